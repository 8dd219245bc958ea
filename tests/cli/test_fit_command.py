"""``hocket fit`` as it is typed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from click.testing import CliRunner
from planners.memory.steps import MIB, chain_step

import hocket
from hocket.base.errors import HocketError, UsageError
from hocket.base.units import format_bytes, format_percent, format_seconds, typed_bytes
from hocket.cli.root import root
from hocket.graph.files import write_graph
from hocket.graph.graph import DTYPES
from hocket.plan.files import read_plan
from hocket.plan.sections import Memory
from hocket.planners.memory.given_budget import BudgetWarning
from hocket.view.fit import fit_table
from hocket.view.table import plain

KEYS = {
    "peak_bytes", "budget_bytes", "lower_bound_bytes", "gap", "step_s", "offloaded_bytes",
    "recomputed_flops", "resident_parameters", "plan_seconds", "feasible",
}  # fmt: skip


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "chain.json"
    write_graph(chain_step(6, activation=32 * MIB, weight=16 * MIB), path)
    return path


def run(*arguments):
    return CliRunner().invoke(root, list(map(str, arguments)))


def test_fit_writes_a_plan_that_verify_and_show_accept(graph_file, tmp_path):
    plan = tmp_path / "plan.json"
    result = run("fit", graph_file, "--on", "1xh200", "--memory", "500MiB", "-o", plan)
    assert result.exception is None, result.exception
    for words in ("plain", "full recompute", "offload everything", "✔  hocket", "Largest tensors"):
        assert words in result.stdout
    saved = read_plan(plan)
    assert saved.plan[Memory].budget_bytes == (500 * MIB,)
    assert max(saved.plan.claims.peak_bytes) <= 500 * MIB
    assert run("verify", plan).exception is None
    shown = run("show", plan)
    assert "within its budget" in shown.stdout
    simulated = json.loads(run("simulate", plan, "--json").stdout)
    assert simulated["step_s"] == pytest.approx(saved.plan.claims.step_s)
    page = (tmp_path / "report.html").read_text()
    assert "Largest tensors at the peak" in page
    assert ">before<" in page
    assert ">after<" in page
    refused = run("run", plan)
    assert isinstance(refused.exception, UsageError)
    assert "not captured op by op from a model" in refused.exception.message


def test_what_shows_a_plan_tells_its_budget_its_blocks_and_what_moves(tmp_path):
    graph, plan = tmp_path / "chain.json", tmp_path / "plan.json"
    write_graph(chain_step(6, activation=32 * MIB, weight=16 * MIB), graph)
    result = run("fit", graph, "--on", "1xh200", "--memory", "300MiB", "-o", plan, "--json")
    assert result.exception is None, result.exception
    fitted = json.loads(result.stdout)
    blocks = read_plan(plan).plan[Memory].blocks
    policies = Counter(block.activations for block in blocks)
    whole = sum(16 * MIB for _ in range(6))
    for command in ("show", "explain", "simulate"):
        text = " ".join(run(command, plan).stdout.split())
        assert "within 300.0 MiB: " in text
        for policy, count in policies.items():
            shown = {"kept": "saved on the device"}.get(policy, policy)
            assert f"{count} block{'s' * (count > 1)} {shown}" in text
        to_host, from_host = fitted["offloaded_bytes"], fitted["fetched_bytes"]
        assert f"{format_bytes(to_host)} go to the host" in text
        assert f"{format_bytes(from_host)} come from it" in text
        assert f"copies to and from the host, {format_bytes(to_host + from_host)}" in text
        assert " 0 transfers" not in text
        assert f"a step among many takes {format_seconds(fitted['step_s'])}" in text
        kept = json.loads(run(command, plan, "--json").stdout)["memory"]
        assert kept["budget_bytes"] == 300 * MIB
        assert kept["blocks"] == policies
        assert (kept["offloaded_bytes"], kept["fetched_bytes"]) == (to_host, from_host)
        assert kept["recomputed_flops"] == pytest.approx(fitted["recomputed_flops"])
        assert kept["streamed_bytes"] == whole - fitted["resident_parameters"]
    assert f"{format_bytes(fitted['peak_bytes'])} of " in run("show", plan).stdout
    explained = run("explain", plan).stdout
    assert "more or faster devices" not in explained
    assert "would help: a larger budget" in explained


def test_the_table_has_the_share_that_is_recomputed_at_any_width():
    fitted = hocket.fit(chain_step(6, activation=32 * MIB, weight=16 * MIB), "1xh200", "300MiB")
    for width in (60, 72, 80, 120):
        lines = plain(fit_table(fitted), width).splitlines()
        assert lines[0].split()[-1] == "recomputed"
        assert all(line.endswith("%") for line in lines[1:5])
    assert "from host" in plain(fit_table(fitted), 80)


def test_the_page_says_of_seconds_what_is_about_seconds(graph_file, tmp_path):
    plan = tmp_path / "plan.json"
    answer = json.loads(
        run("fit", graph_file, "--on", "1xh200", "--memory", "300MiB", "-o", plan, "--json").stdout
    )
    page = (tmp_path / "report.html").read_text()
    gap = f"another plan could shorten the step by at most {format_percent(answer['gap'])}"
    assert gap in page.partition(">Peak<")[0].rpartition(">Step<")[2]
    assert "above the bound" not in page


def test_fit_says_what_the_order_of_updates_on_the_host_gains(graph_file):
    plain = json.loads(
        run("fit", graph_file, "--on", "1xh200", "--memory", "4GiB", "--json").stdout
    )
    assert plain["host_updates"] is None
    result = run("fit", graph_file, "--on", "1xh200", "--memory", "160MiB", "--json")
    answer = json.loads(result.stdout)
    found = answer["host_updates"]
    finished_s, async_s = found["step_s"], found["async_step_s"]
    assert async_s <= finished_s * (1 + 1e-9)
    assert found["gain"] == pytest.approx(finished_s / async_s)
    # No less than the plain step.
    assert answer["step_s"] == pytest.approx(max(finished_s, plain["step_s"]), rel=0.01)
    result = run("fit", graph_file, "--on", "1xh200", "--memory", "160MiB", "--json",
                 "--async-update")  # fmt: skip
    faster = json.loads(result.stdout)
    async_s = faster["host_updates"]["async_step_s"]
    assert faster["step_s"] == pytest.approx(max(async_s, plain["step_s"]), rel=0.01)
    assert faster["step_s"] <= answer["step_s"] * (1 + 1e-9)


def test_fit_answers_with_the_keys_that_programs_read(graph_file):
    found = json.loads(
        run("fit", graph_file, "--on", "1xh200", "--memory", "500MiB", "--json").stdout
    )
    assert set(found) >= KEYS
    assert found["feasible"] is True
    assert found["peak_bytes"] <= found["budget_bytes"] == 500 * MIB
    assert found["lower_bound_bytes"] <= found["smallest_budget_bytes"] <= found["peak_bytes"]
    assert 0 <= found["gap"] < 1
    names = [candidate["name"] for candidate in found["candidates"]]
    assert names == ["plain", "full recompute", "offload everything", "hocket"]
    peaks = [level["peak_bytes"] for level in found["frontier"]]
    times = [level["step_s"] for level in found["frontier"]]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)


def test_fit_without_room_exits_with_4_and_the_smallest_budget(graph_file):
    result = run("fit", graph_file, "--on", "1xh200", "--memory", "1MiB", "--json")
    assert result.exit_code == 4
    told = json.loads(result.stdout)
    assert told["feasible"] is False
    assert told["chosen"] is None
    text = run("fit", graph_file, "--on", "1xh200", "--memory", "1MiB").stdout
    names = [line.strip("✔ ").split("  ")[0] for line in text.partition("\n\n")[0].splitlines()]
    assert len(names) == len(set(names))
    assert "✔" not in text
    assert "Nothing fits into 1.0 MiB. The minimum-memory plan" in text
    assert f"give it {typed_bytes(told['smallest_budget_bytes'])}," in told["error"]["hint"]
    again = run(
        "fit", graph_file, "--on", "1xh200", "--json",
        "--memory", f"{told['smallest_budget_bytes']}B",
    )  # fmt: skip
    assert json.loads(again.stdout)["feasible"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--on", "2xh200", "--memory", "1GiB"), "has 2 devices; a memory plan is for one"),
        (("--on", "1xh200", "--memory", "1GiB", "--max", "batch"), "a graph file is what it is"),
        (("--on", "1xh200", "--memory", "1GiB", "--batch", "4"), "has no effect on the graph file"),
    ],
)
def test_fit_refuses_what_it_cannot_do(graph_file, arguments, words):
    error = run("fit", graph_file, *arguments).exception
    assert isinstance(error, HocketError)
    assert words in error.message


ATTENDING = """
import torch
from torch import nn


class Attend(nn.Linear):
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = super().forward(x).unflatten(-1, (2, -1)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1).mean()


def build(batch=2):
    return Attend(8, 8), torch.zeros(batch, 4, 8)
"""


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_fit_records_the_kernels_and_types_of_what_it_plans_for(tmp_path):
    """A processor computes attention with dropout op by op, and does not know autocast of CUDA."""
    own = tmp_path / "own.py"
    own.write_text(ATTENDING)
    processor = tmp_path / "here.toml"
    processor.write_text(
        'name = "here"\n[kinds.cores]\ncpu = true\nmemory = "4GiB"\n'
        'memory_bandwidth = "20GB/s"\npeak = { float32 = "0.1TFLOP/s" }\n'
        '[[devices]]\nkind = "cores"\n'
    )

    def fitted(on):
        plan = tmp_path / "plan.json"
        result = run("fit", f"{own}:build", "--on", on, "--memory", "1GiB", "-o", plan)
        assert result.exception is None, result.exception
        graph = read_plan(plan).problem.graph
        kinds = {graph.kind_of(op) for op in range(graph.num_ops)}
        dtypes = {DTYPES[number] for number in graph.op_dtype.tolist()}
        return any("efficient_attention" in kind for kind in kinds), dtypes

    is_fused, dtypes = fitted("1xh200")
    assert is_fused
    assert "bfloat16" in dtypes
    is_fused, dtypes = fitted(processor)
    assert not is_fused
    assert "bfloat16" not in dtypes


def test_fit_never_replaces_source(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(ATTENDING)
    error = run("fit", f"{own}:build", "--on", "1xh200", "-o", own).exception
    assert isinstance(error, UsageError)
    assert "would be Python source" in error.message
    assert own.read_text() == ATTENDING


def test_fit_refuses_several_devices_before_it_captures(tmp_path):
    (tmp_path / "slow.py").write_text("raise SystemExit('captured')")
    error = run("fit", f"{tmp_path}/slow.py:build", "--on", "2xh200", "--memory", "1GiB").exception
    assert isinstance(error, HocketError)
    assert "a memory plan is for one" in error.message


@pytest.fixture
def card(tmp_path):
    """A card of 512 MiB of which 62 MiB less 1 KiB stay empty."""
    path = tmp_path / "card.toml"
    path.write_text(
        'name = "den"\n[kinds.small]\nmemory = "512MiB"\nheadroom = "63487KiB"\n'
        'memory_bandwidth = "448GB/s"\npeak = { float32 = "16TFLOP/s" }\n'
        'host_link = { bandwidth = "11GB/s", latency = "8us" }\n[[devices]]\nkind = "small"\n'
    )
    return path


def test_fit_knows_what_the_card_has_and_what_of_it_is_usable(graph_file, card):
    def fit(*arguments):
        return run("fit", graph_file, "--on", card, "--json", *arguments)

    by_default = json.loads(fit().stdout)
    assert by_default["budget_bytes"] == by_default["usable_bytes"] == 450 * MIB + 1024
    assert by_default["device_bytes"] == 512 * MIB
    quiet = run("fit", graph_file, "--on", card, "--memory", "450MiB", "-o", card.parent / "a.json")
    assert quiet.exception is None
    assert "warning" not in quiet.stderr
    full = run("fit", graph_file, "--on", card, "--memory", "500MiB", "-o", card.parent / "b.json")
    assert full.exception is None
    assert "warning: a budget of 500.0 MiB is more than tensors may fill" in full.stderr
    assert "450.0 MiB of its 512.0 MiB are usable" in full.stderr
    assert (
        "of its 512.0 MiB gpu0 lets tensors fill 450.0 MiB"
        in (card.parent / "b.report.html").read_text()
    )
    error = fit("--memory", "513MiB").exception
    assert isinstance(error, UsageError)
    assert "more than gpu0 has: 512.0 MiB" in error.message
    assert "give it 450MiB" in error.hint
    with pytest.warns(BudgetWarning, match=r"450\.0 MiB of its 512\.0 MiB are usable"):
        hocket.fit(chain_step(2), card, "500MiB")
    assert hocket.fit(chain_step(2), card).budget_bytes == 450 * MIB + 1024


def test_fit_refuses_a_budget_that_the_card_has_not_before_it_captures(tmp_path, card):
    (tmp_path / "slow.py").write_text("raise SystemExit('captured')\ndef build(): ...")
    error = run("fit", f"{tmp_path}/slow.py:build", "--on", card, "--memory", "1GiB").exception
    assert isinstance(error, UsageError)
    assert "more than gpu0 has" in error.message


def test_fit_says_which_models_have_no_other_depth_before_it_captures():
    error = run("fit", "resnet50", "--on", "1xh200", "--max", "layers").exception
    assert isinstance(error, UsageError)
    assert "the number of layers of 'resnet50' cannot be changed" in error.message


def test_fit_wants_a_size():
    result = run("fit", "gpt2", "--on", "1xh200", "--memory", "much")
    assert result.exit_code == 2


def test_the_old_name_of_the_placement_planner_leads_to_the_new_one(graph_file):
    error = run("plan", graph_file, "--on", "1xh200", "--planner", "m-etf+fit-memory").exception
    assert isinstance(error, UsageError)
    assert "spread-memory" in error.hint


def test_a_host_that_has_no_room_is_named_where_it_is_why_nothing_fits(graph_file):
    told = ("fit", graph_file, "--on", "1xh200", "--memory", "300MiB", "--json")
    assert json.loads(run(*told).stdout)["host_budget_bytes"] is None
    result = run(*told, "--host-memory", "1KiB")
    assert result.exit_code == 4
    answer = json.loads(result.stdout)
    assert "does not fit into 300.0 MiB with 1.0 KiB on the host" in answer["error"]["message"]
    assert answer["host_budget_bytes"] == 2**10
    enough = typed_bytes(answer["smallest_host_bytes"])
    assert f"let {enough} wait on the host" in answer["error"]["hint"]
    assert run(*told, "--host-memory", enough).exception is None
    # What fits nowhere is not the host's fault.
    nowhere = ("fit", graph_file, "--on", "1xh200", "--memory", "1MiB", "--host-memory", "1KiB")
    told = json.loads(run(*nowhere, "--json").stdout)
    assert "host" not in told["error"]["message"] + told["error"]["hint"]


@pytest.mark.parametrize("command", ["show", "explain", "simulate"])
def test_a_damaged_plan_is_refused_with_what_is_wrong(graph_file, tmp_path, command):
    path = tmp_path / "plan.json"
    run("fit", graph_file, "--on", "1xh200", "--memory", "500MiB", "-o", path)
    plan = json.loads(path.read_text())
    noted = plan["problem"]["work"]["graph"]["inline"].setdefault("meta", {})
    for lists in (3, [[]], {"a": 1}):
        noted["lists"] = lists
        path.write_text(json.dumps(plan))
        told = run(command, path)
        assert told.exception is None or isinstance(told.exception, HocketError)
    del noted["lists"]
    last = plan["sections"]["memory"]["blocks"][-1]
    first, last["ops"][0] = last["ops"][0], 0
    path.write_text(json.dumps(plan))
    with pytest.raises(HocketError, match="blocks follow each other"):
        raise run(command, path).exception
    last["ops"][0] = first
    del plan["sections"]["placement"]
    path.write_text(json.dumps(plan))
    with pytest.raises(HocketError, match="places no op"):
        raise run(command, path).exception


def test_plan_with_memory_on_one_device_answers_as_fit_does(graph_file):
    found = [
        json.loads(
            run(command, graph_file, "--on", "1xv100-16g", "--memory", "300MiB", "--json").stdout
        )
        for command in ("fit", "plan")
    ]
    assert found[0].keys() == found[1].keys()
    assert found[0]["step_s"] == found[1]["step_s"]
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(
            root, ["plan", str(graph_file), "--on", "2xt4", "--must", "fit 8GiB"],
            catch_exceptions=False,
        )  # fmt: skip
    assert caught.value.hint == "--memory 8GiB"
