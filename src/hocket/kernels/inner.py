"""Functions that only compiled code calls, compiled no further than that needs.

The compiler makes machine code of every function, and that code contains all that the function
calls: what is called through five others is optimised and translated six times. Here an inner
function stays as it is before optimisation, and only the entry, which contains all of them, is
optimised and translated. That takes about a quarter of the time off compiling the kernels of
`hocket plan`, and the entries run as fast (the simulator a fifth faster, list scheduling 5 %
slower).

Loops of planners and of the simulator look up and decide, a few times round, and nothing in them
is done to many values at once: they are optimised by a few passes, without being unrolled or made
vectors of, which takes more than half off optimising and translating, and the entries run as fast
(0.91 to 1.0 of the time).
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from llvmlite import binding  # type: ignore[import-untyped]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import (
    AnnotateTypes,
    NativeLowering,
    NopythonRewrites,
    NopythonTypeInference,
)
from numba.core.untyped_passes import InlineClosureLikes

from hocket.kernels.elements import ElementLower
from hocket.kernels.inference import RememberingInference

_Library: Any = JITCodeLibrary
_Lowering: Any = NativeLowering
_Compiler: Any = CompilerBase
_Flags: Any = Flags
_registered: Any = register_pass(mutates_CFG=True, analysis_only=False)  # type: ignore[no-untyped-call]


_UNREAD = (AnnotateTypes,)
"""Passes that make what nobody looks at."""
_FOR_OTHERS = (InlineClosureLikes, NopythonRewrites)
"""Passes for functions within functions and for whole arrays in one expression."""
_BRIEFLY = (
    "always_inliner", "global_dead_code_eliminate", "sroa", "simplify_cfg", "instruction_combine",
    "simplify_cfg", "aggressive_dce",
)  # fmt: skip
"""How an entry is optimised: what is called is put into what calls it, after which tuples that were
put together to be taken apart again vanish; functions were optimised each by itself before."""
_DECIDING = ("hocket.graph.", "hocket.planners.", "hocket.simulate.")
"""Rooms whose loops decide; those of others add up."""


class _BriefLibrary(_Library):  # type: ignore[misc]
    """Code that is optimised without the passes that only make deciding loops longer."""

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
    """Code to be linked into that of entries: it is never machine code itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """No function is anywhere; the call makes sure that what it calls is linked in."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _InnerLibrary:
        """Asked for in order to set the environment."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Nothing to set yet: see `set_environments`."""


@_registered
class _EntryLowering(_Lowering):  # type: ignore[misc]
    _name = "entry_lowering"
    lowering_class = ElementLower

    def run_pass(self, state: Any) -> Any:
        """Lower a function; counted references need the compiler's own passes."""
        is_brief = state.func_id.modname.startswith(_DECIDING) and not state.flags.nrt
        if state.library is None and is_brief:
            _give_library(state, _BriefLibrary)
        return super().run_pass(state)


@_registered
class _InnerLowering(_EntryLowering):
    _name = "inner_lowering"

    def run_pass(self, state: Any) -> Any:
        """Lower a function into a library of the kind above."""
        _give_library(state, _InnerLibrary)
        return super().run_pass(state)


def _give_library(state: Any, kind: Any) -> None:
    state.library = kind(state.targetctx.codegen(), state.func_id.func_qualname)
    state.library.enable_object_caching()


class QuickFlags(_Flags):  # type: ignore[misc]
    """Options that are compared quickly: the compiler looks them up for every call in a function.

    A fifth of the time that compiling takes goes there otherwise.
    """

    _HASH = hash(_Flags())
    """Of the names alone, the same for all."""

    def __hash__(self) -> int:
        return self._HASH

    def __eq__(self, other: object) -> bool:
        # What is set alike is alike; the rest is compared value by value, defaults included.
        is_same = isinstance(other, _Flags) and self._values == other._values
        return is_same or bool(super().__eq__(other) is True)


class EntryCompiler(_Compiler):  # type: ignore[misc]
    """The compiler with quick options and variables that are values."""

    lowering: Any = _EntryLowering

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags = QuickFlags(self.state.flags)

    def define_pipelines(self) -> list[Any]:
        """All passes for compiled code that are needed, some replaced."""
        builder: Any = DefaultPassBuilder
        passes = builder.define_nopython_pipeline(self.state)
        needless = (*_UNREAD, *_FOR_OTHERS) if self._is_plain else _UNREAD
        replaced = {NativeLowering: self.lowering, NopythonTypeInference: RememberingInference}
        passes.passes = [
            (replaced.get(each, each), name) for each, name in passes.passes if each not in needless
        ]
        passes.finalize()
        return [passes]

    @property
    def _is_plain(self) -> bool:
        """True if a function makes no arrays and has none within it."""
        constants = self.state.func_id.code.co_consts
        return not (self.state.flags.nrt or any(isinstance(one, CodeType) for one in constants))


class InnerCompiler(EntryCompiler):
    """The same with another end."""

    lowering = _InnerLowering


def set_environments(result: Any) -> None:
    """Tell the code of an entry where the constants of the inner functions in it are."""
    for environment in result._find_referenced_environments():
        result.codegen.set_env(environment.env_name, environment)
