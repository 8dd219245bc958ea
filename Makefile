# Two commands on a fresh machine: `make demo` and `make test`.
# Both create .venv themselves and reinstall only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
# Of tests; more than cores, because many wait for processes that they started.
WORKERS ?= 4

.PHONY: demo docs docs-check test test-all check kernels rewritten clean

demo: $(VENV)/.kernels
	$(BIN)/hocket plan gpt2 --batch 16 --seq 1024 --on mixed-desktop -o plan.json
	@echo "look: open report.html in a browser, trace.json in https://ui.perfetto.dev"
	@echo "next: $(BIN)/hocket explain plan.json, $(BIN)/hocket run plan.json --steps 3"

# The docs site in site/, without requests to other machines; read it with python -m http.server -d site.
docs: $(VENV)/.docs $(VENV)/.kernels
	NO_MKDOCS_2_WARNING=1 $(BIN)/python scripts/docs

# Every page of it in Chromium: links, console errors, requests elsewhere, two seconds to load.
docs-check: docs
	$(BIN)/python scripts/site_check

# Tests start over a hundred Pythons, which read bytecode instead of compiling their sources.
# Kernels are compiled beside the installing and the lints, which need no compiled code.
test: export PYTHONDONTWRITEBYTECODE =
test:
	$(MAKE) --no-print-directory -j2 check kernels rewritten
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -p no:schemathesis

# With whole programs too (tests/conftest.py lists them): before an issue is called resolved.
test-all: export PYTHONDONTWRITEBYTECODE =
test-all:
	$(MAKE) --no-print-directory -j2 check kernels rewritten
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -p no:schemathesis --whole-programs

# Compiled once, so that tests side by side find the kernels on disk.
kernels: $(VENV)/.torch
	$(BIN)/python scripts/compile

# Files of tests are rewritten for their assertions once, and not by every worker. It only saves time.
rewritten: $(VENV)/.dev
	-@$(BIN)/pytest --collect-only -qq -p no:schemathesis > /dev/null

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/browser

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

# Bytecode is written of what is imported: pip would compile ten thousand files, one by one.
$(VENV)/.torch: export PYTHONDONTWRITEBYTECODE =
$(VENV)/.torch: $(VENV)/.venv $(INPUTS)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[torch]'
	$(BIN)/python -c 'import numba, scipy.optimize, torch._dynamo, transformers'
	touch $@

# Part of installing, so that the first plan does not wait for the compiler.
$(VENV)/.kernels: $(VENV)/.torch
	@echo "compiling the kernels of hocket plan for this processor, once: about half a minute"
	$(BIN)/python scripts/compile placement
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(INPUTS)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[torch,dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch $(INPUTS)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[torch,docs]'
	touch $@

clean:
	rm -rf $(VENV) site plan.json report.html trace.json
