"""Errors of models that cannot be traced: the reason, and the line of the user's code.

`own_code` converts exceptions of user code into errors that name the user's line; `reason` and
`remedy` explain why a trace failed and what to change.
"""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hocket.base.errors import HocketError, UsageError

_LIBRARIES = ("torch", "transformers", "hocket")


class UntraceableError(UsageError):
    """A model cannot be traced on fake tensors."""

    code = "untraceable"


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame outside torch, transformers, hocket and Python.

    If all frames are in libraries, the innermost one outside torch, hocket and Python.
    """
    # The file with the error never ran, so it has no frame in the traceback.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    for hidden in (_LIBRARIES, ("torch", "hocket")):
        for frame in reversed(frames):
            if not _is_in(frame.filename, hidden):
                return f"{frame.filename}:{frame.lineno}"
    return ""


def as_shown(error: BaseException) -> str:
    """Return the last line of an error's traceback; import errors are shown without their class."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError | OSError) or not text:
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"


@contextmanager
def own_code(
    failure: str, hint: str, tell: Callable[[BaseException], str] = as_shown
) -> Iterator[None]:
    """Turn exceptions of the user's own code into a `UsageError` that names their line."""
    try:
        yield
    except HocketError:
        raise
    except SystemExit as error:
        # If it were raised, the command would end with the script's exit code, possibly 0.
        raise UsageError(
            f"{failure}: it calls sys.exit({error.code!r})", where=user_line(error), hint=hint
        ) from error
    except Exception as error:
        raise UsageError(f"{failure}: {tell(error)}", where=user_line(error), hint=hint) from error


def reason(error: BaseException) -> str:
    """One-line reason why tracing stopped, with the source text of the user's line if available."""
    file, _, number = user_line(error).rpartition(":")
    text = linecache.getline(file, int(number)).strip() if file else ""
    first = next(iter(str(error).strip().splitlines()), "")
    cause = _explanation(error) or first or type(error).__name__
    return f"{cause} (in {text!r})" if text else cause


def remedy(model: torch.nn.Module) -> str:
    """Hint on what to change so that the model can be traced, judged by its modules."""
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if module.training and (hasattr(module, "layerdrop") or hasattr(config, "layerdrop")):
            place = f"{path!r}" if path else type(module).__name__
            return (
                f"{place} draws in each step whether to skip a layer (layerdrop): call "
                "model.eval() before, which switches that and dropout off, or build it without "
                "layerdrop"
            )
    return "keep the step independent of data values, or give the model real weights"


def _explanation(error: BaseException) -> str:
    """Plain explanation of torch's own tracing errors."""
    from torch._subclasses import fake_tensor as fake

    if isinstance(error, fake.DataDependentOutputException):
        return f"{error.func} takes a value out of a tensor, so what follows depends on the data"
    if isinstance(error, fake.DynamicOutputShapeException):
        return f"the shape of the result of {error.func} depends on the data"
    if isinstance(error, fake.UnsupportedOperatorException):
        return f"{error.func} has no shape rule"
    return ""


def _is_in(filename: str, libraries: tuple[str, ...]) -> bool:
    if filename.startswith("<") or _is_python(filename):
        return True
    roots = {"torch": torch.__file__, "hocket": __file__}
    for name in libraries:
        if name in roots and _package_root(roots[name], name) in Path(filename).parents:
            return True
        if name not in roots and f"site-packages/{name}/" in filename.replace("\\", "/"):
            return True
    return False


def _is_python(filename: str) -> bool:
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return not is_installed and Path(sysconfig.get_path("stdlib")) in Path(filename).parents


def _package_root(file: str, name: str) -> Path:
    return next(parent for parent in Path(file).parents if parent.name == name)
