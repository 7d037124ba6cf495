"""Imports parts of transformers and torch when they are first called, not before.

While transformers' modules for models are imported, they import functions for models that are split
over processes, and mark functions for torch's compiler. Both take longer than everything else that
they need, and most processes use neither. So these modules get stand-ins for the functions that
are listed here. A stand-in imports the function when it is called. Marks are set when torch's
compiler is imported. Whatever is not listed is imported at once, as ever. What transformers finds
out about its own files is kept, see ``import_structure.py``.

That is for our own commands. In a program that uses KVBoost, ``torch.compile(fullgraph=True)``
cannot trace a stand-in, stand-ins are not pickled, and a thread that imports torch's compiler at
the same time receives one. So such a program has to ask for it: ``KVBOOST_DEFER_IMPORTS=1``. With
``0``, nothing is deferred anywhere.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kvboost.config import defers_imports
from kvboost.model.loading.import_structure import import_quickly

COMPILER = "torch._dynamo"
STRUCTURES = "transformers.utils.import_utils"
IMPORTERS = (
    "torch.nn.attention.bias",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.generation.utils",
)
"""The modules that get stand-ins, with all that they import in turn."""
FUNCTIONS = {
    "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "torch._dynamo.utils": ("is_compile_supported",),  # torchvision asks when it computes
    "transformers.distributed.checkpoint": (
        "_get_resolved_distributed_checkpoint_files",
        "_load_model_checkpoint_distributed",
        "_save_model_checkpoint_distributed",
        "consolidate_distributed_checkpoint",
        "get_distributed_checkpoint_dir",
    ),
    "transformers.distributed.expert_parallel": ("apply_expert_parallelism",),
    "transformers.distributed.fsdp": (
        "apply_fully_sharded_data_parallelism",
        "get_fsdp_ckpt_kwargs",
        "is_fsdp_enabled",
        "is_fsdp_managed_module",
        "update_fsdp_plugin_peft",
    ),
    "transformers.distributed.sharding_utils": (
        "DtensorShardOperation",
        "_dtensor_from_local_like",
    ),
    "transformers.distributed.tensor_parallel": (
        "_validate_parallel_plan_styles",
        "apply_tensor_parallelism",
        "gather_state_dict_for_save",
        "get_kv_heads_per_rank",
        "resolve_parallel_plans",
        "verify_tp_plan",
    ),
}
"""Names that modules only call, by module: functions, and classes of which objects are made."""
MARKS = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators of torch's compiler. They change nothing unless it runs."""

Function = Callable[..., Any]
Around = Callable[[Callable[[], None]], None]
"""Calls what executes a module."""


def install(*, own_process: bool = False) -> None:
    """From now on, imports are deferred if they may be, unless they were made before."""
    if not defers_imports(own_process=own_process) or COMPILER in sys.modules:
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _stand_in(module: str, name: str) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


class _StandIn(ModuleType):
    """A module of which only some functions can be had without importing it."""

    def __init__(self, name: str, functions: Mapping[str, Function]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever walks through all modules
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


class _Finder(MetaPathFinder):
    """Finds modules as others do, and has a say in how those that matter here are imported."""

    def __init__(self) -> None:
        self._depth = 0
        self._lock = threading.Lock()
        self._pending: list[Callable[[ModuleType], object]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        around: Around
        if name in IMPORTERS:
            around = self._import_with_stand_ins
        elif name == COMPILER:
            around = self._mark_after
        elif name == STRUCTURES:
            around = functools.partial(import_quickly, name=STRUCTURES)
        else:
            return None
        spec = _found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, around)
        return spec

    def _import_with_stand_ins(self, execute: Callable[[], None]) -> None:
        """Several threads may do this at once, so nothing is locked while a module is executed."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._put_stand_ins()
        try:
            execute()
        except ImportError:  # perhaps of something that the stand-ins do not have
            _take_stand_ins()
            execute()
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    _take_stand_ins()

    def _put_stand_ins(self) -> None:
        has_compiler = COMPILER in sys.modules
        for module, names in FUNCTIONS.items():
            if not (has_compiler and module.startswith(COMPILER)):
                functions = {name: _stand_in(module, name) for name in names}
                sys.modules.setdefault(module, _StandIn(module, functions))
        marks = {name: functools.partial(self._mark, name) for name in MARKS}
        sys.modules.setdefault(COMPILER, _StandIn(COMPILER, marks))

    def _mark(self, mark: str, function: Function | None = None, *args: Any, **options: Any) -> Any:
        """Does what a decorator of the compiler does, once there is one."""
        if function is None:
            return lambda function: self._mark(mark, function, *args, **options)
        if mark != "disable":
            self._pending.append(lambda compiler: getattr(compiler, mark)(function))
            return function
        chosen = [function]

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            return chosen[0](*given, **named)

        def disable(compiler: Any) -> None:
            chosen[0] = compiler.disable(function, *args, **options)

        self._pending.append(disable)
        return call

    def _mark_after(self, execute: Callable[[], None]) -> None:
        execute()
        pending, self._pending = self._pending, []
        for mark in pending:
            mark(sys.modules[COMPILER])


def _take_stand_ins() -> None:
    for module in (COMPILER, *FUNCTIONS):
        if isinstance(sys.modules.get(module), _StandIn):
            sys.modules.pop(module, None)


def _found_by_others(
    name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    found = (finder.find_spec(name, path, target) for finder in others)
    return next((spec for spec in found if spec is not None), None)


class _Around(Loader):
    """Another loader, with something around it."""

    def __init__(self, loader: Any, around: Around) -> None:
        self._loader, self._around = loader, around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._around(lambda: self._loader.exec_module(module))
