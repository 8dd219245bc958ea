"""All that hocket uses of numba beyond its public API, checked with numba 0.68 (see pyproject).

Plain ``njit`` compiles the kernels of placement in 143 s instead of about 20, and simulates 205k
ops in 1.26 s instead of 0.13. Four changes make the difference:

- Inner functions are not compiled to machine code. Numba compiles every function together with all
  functions that it calls, so a function reached through five others is optimised and compiled six
  times. Here inner functions stay LLVM code, which is only inlined into entries.
- Loops full of branches (planners, simulator) are optimised by a few passes, without unrolling or
  vectorization. That saves more than half of the time of optimising, and entries run as fast (0.91
  to 1.0 of the time).
- Named tuples of arrays are passed as one value. Numba splits them into seven values per array at
  every call and rebuilds them, which would be more than half of the simulator's code.
- Compiled kernels are cached by the digest of everything that they depend on (`dependencies`);
  numba's own cache only looks at the file of the function itself.
"""

from __future__ import annotations

import hashlib
import pickle  # noqa: TID251 - compiled code runs when it is loaded, whatever its form
from pathlib import Path
from types import CodeType
from typing import Any

import numba
import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba.core import serialize, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, CompileResult, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.datamodel import registry
from numba.core.datamodel.models import TupleModel
from numba.core.runtime.nrt import rtsys
from numba.core.typed_passes import AnnotateTypes, NativeLowering, NopythonRewrites
from numba.core.untyped_passes import InlineClosureLikes

from hocket.kernels import files
from hocket.kernels.dependencies import SourceFunction
from hocket.kernels.progress import compiling

# Parts of the compiler that have no types.
_Library: Any = JITCodeLibrary
_Lowering: Any = NativeLowering
_Compiler: Any = CompilerBase
_Compiled: Any = CompileResult
_Serialize: Any = serialize
_TupleModel: Any = TupleModel
_manager: Any = registry.default_manager
_registered: Any = register_pass(mutates_CFG=True, analysis_only=False)  # type: ignore[no-untyped-call]

_UNREAD = (AnnotateTypes,)
"""Passes that are skipped because nothing uses their output."""
_FOR_OTHERS = (InlineClosureLikes, NopythonRewrites)
"""Passes for nested functions and array expressions, skipped for functions without either."""
_BRIEFLY = (
    "always_inliner", "global_dead_code_eliminate", "sroa", "simplify_cfg", "instruction_combine",
    "simplify_cfg", "aggressive_dce",
)  # fmt: skip
"""Passes that optimise an entry after its functions were optimised one by one.

They inline calls, and then remove tuples that were built only to be unpacked.
"""
_DECIDING = ("hocket.graph.", "hocket.planners.", "hocket.simulate.")
"""Packages whose loops are full of branches; loops of other packages gain from vectorization."""


# ── inner functions and brief optimisation ───────────────────────────────────────────────────────


class _BriefLibrary(_Library):  # type: ignore[misc]
    """Code that is optimised by a few passes, without loop unrolling and vectorization."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout
        passes = _passes(self._codegen)
        manager = passes.getFunctionPassManager()
        for function in ll_module.functions:
            if not function.is_declaration:
                manager.run(function, passes)

    def _optimize_final_module(self) -> None:
        manager = binding.create_new_module_pass_manager()
        for name in _BRIEFLY:
            getattr(manager, f"add_{name}_pass")()
        manager.run(self._final_module, _passes(self._codegen))


def _passes(codegen: Any) -> Any:
    options = binding.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = options.loop_interleaving = False
    return binding.create_pass_builder(codegen._tm, options)


class _InnerLibrary(_BriefLibrary):
    """Code that is only linked into entries and never compiled to machine code."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, as inner functions have no address; make sure that callees are linked."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _InnerLibrary:
        """This library itself, so that numba calls the `set_env` below."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing: `KernelCache.save_overload` sets the environments later, for the entry."""


@_registered
class _EntryLowering(_Lowering):  # type: ignore[misc]
    _name = "entry_lowering"

    def run_pass(self, state: Any) -> Any:
        """Lower a function; those of `_DECIDING` without reference counts use brief passes."""
        is_brief = state.func_id.modname.startswith(_DECIDING) and not state.flags.nrt
        if state.library is None and is_brief:
            _give_library(state, _BriefLibrary)
        return super().run_pass(state)


@_registered
class _InnerLowering(_EntryLowering):
    _name = "inner_lowering"

    def run_pass(self, state: Any) -> Any:
        """Lower a function into a library that is only linked into others."""
        _give_library(state, _InnerLibrary)
        return super().run_pass(state)


def _give_library(state: Any, library: Any) -> None:
    state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
    state.library.enable_object_caching()


class EntryCompiler(_Compiler):  # type: ignore[misc]
    """Numba's compiler with fewer passes and the lowering above."""

    lowering: Any = _EntryLowering

    def define_pipelines(self) -> list[Any]:
        """Return numba's pipeline without needless passes and with this module's lowering."""
        builder: Any = DefaultPassBuilder
        passes = builder.define_nopython_pipeline(self.state)
        needless = (*_UNREAD, *_FOR_OTHERS) if self._is_plain else _UNREAD
        passes.passes = [
            (self.lowering if each is NativeLowering else each, name)
            for each, name in passes.passes
            if each not in needless
        ]
        passes.finalize()
        return [passes]

    @property
    def _is_plain(self) -> bool:
        """True if a function allocates no arrays and contains no nested function."""
        constants = self.state.func_id.code.co_consts
        return not (self.state.flags.nrt or any(isinstance(one, CodeType) for one in constants))


class InnerCompiler(EntryCompiler):
    """The compiler of functions that only compiled code calls."""

    lowering = _InnerLowering


# ── tuples as one argument ───────────────────────────────────────────────────────────────────────


class _WholeTupleModel(_TupleModel):  # type: ignore[misc]
    """Numba's data model of a named tuple that is passed as one argument."""

    def get_argument_type(self) -> Any:
        """Return the type of the tuple itself in place of one type per array member."""
        return self.get_value_type()

    def as_argument(self, builder: Any, value: Any) -> Any:
        """Return the value unchanged."""
        return value

    def from_argument(self, builder: Any, value: Any) -> Any:
        """Return the value unchanged."""
        return value


def pass_tuples_whole() -> None:
    """Make compiled code pass named tuples of this package as one value.

    Tuples of other packages are passed as before: their code may be compiled and cached on disk.
    """
    package = __name__.partition(".")[0]
    usual = _manager._handlers[types.NamedTuple]

    def model(manager: Any, kind: Any) -> Any:
        is_own = kind.instance_class.__module__.partition(".")[0] == package
        return (_WholeTupleModel if is_own else usual)(manager, kind)

    _manager.register(types.NamedTuple, model)


# ── the cache ────────────────────────────────────────────────────────────────────────────────────

_OPTIONS = hashlib.sha256(
    b"".join(
        Path(__file__).with_name(name).read_bytes()
        for name in ("compiler.py", "numba_internals.py")
    )
).hexdigest()
"""Digest of the two files that decide how kernels are compiled; part of the cache key."""


class KernelCache:
    """Disk cache of one kernel's compiled forms, by argument types, CPU and versions.

    No failure here prevents compilation: an unreadable form is compiled again, and a form that
    cannot be written is compiled again by the next process.
    """

    cache_path = None

    def __init__(self, source: SourceFunction, digest: str) -> None:
        self._source, self._digest = source, digest

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the cached form for some types, or None, after which numba compiles it."""
        form = self._form(signature, target.codegen())
        content = files.read(self._source, self._digest, form)
        if content is not None:
            _make_ready(target, content)
            try:
                return _Compiled._rebuild(target, *pickle.loads(content))  # noqa: S301
            except Exception as error:
                files.tell(f"a compiled kernel cannot be loaded ({error!r}): compiled again")
        compiling(self._source.function.__qualname__)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write a compiled form to disk; numba calls this after every compilation."""
        # The code of an entry must know where the constants of its inner functions are.
        for environment in result._find_referenced_environments():
            result.codegen.set_env(environment.env_name, environment)
        form = self._form(signature, result.codegen)
        files.write(self._source, self._digest, form, _Serialize.dumps(result._reduce()))

    def _form(self, signature: Any, codegen: Any) -> str:
        arguments = signature.args if hasattr(signature, "args") else signature
        versions = (_OPTIONS, numba.__version__, np.__version__, codegen.magic_tuple())
        parts = (*versions, *map(_describe, arguments))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _make_ready(target: Any, content: bytes) -> None:
    """Register symbols that loaded code may reference: numba's runtime functions and hash seeds.

    A full refresh of the target imports half of numba and scipy. That takes half a second, so it is
    done only for code that uses hash seeds.
    """
    rtsys.initialize(target)
    if b"hashsecret" in content:
        target.refresh()


def _describe(kind: Any) -> str:
    """Return the name of a type with the names of its fields, which numba's name omits."""
    if not isinstance(kind, types.BaseTuple):
        return str(kind)
    parts: Any = kind
    return f"{kind} {getattr(kind, 'fields', ())} ({', '.join(map(_describe, parts))})"
