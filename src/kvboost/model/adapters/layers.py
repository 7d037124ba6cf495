"""Adding what adapters change to the outputs of linear layers, row by row.

The rows of a forward are packed segments of many requests, each with an adapter of its own or none.
While such a forward runs, a hook on each linear layer adds ``rows @ down.T @ up`` to the outputs of
the rows that an adapter applies to. All other forwards pass the hooks by.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvboost.model.adapters.adapter import Adapter, Delta
from kvboost.model.adapters.files import AdapterFiles
from kvboost.model.adapters.reading import refuse
from kvboost.model.execution.segment import Segment

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Current(threading.local):
    rows: AdaptedRows | None = None


_current = _Current()


def adapted_rows() -> AdaptedRows | None:
    """The adapted rows of the forward that this thread runs; None if it has none."""
    return _current.rows


class AdaptedRows:
    """Which rows of a forward have which adapter."""

    def __init__(self, hooks: AdapterHooks, segments: Sequence[Segment]) -> None:
        self.hooks = hooks
        self.runs: list[tuple[slice, Adapter]] = []
        self.num_rows = 0
        self.changes: object = None
        """The same for whole layers of ours, once they have asked for it."""
        for segment in segments:
            applied, end = segment.kv.adapter, self.num_rows + len(segment)
            if applied is not None and segment.end > applied.start:
                first = self.num_rows + segment.num_before(applied.start)
                self._add_run(slice(first, end), applied.adapter)
            self.num_rows = end

    def _add_run(self, rows: slice, adapter: Adapter) -> None:
        if self.runs and self.runs[-1][0].stop == rows.start and self.runs[-1][1] is adapter:
            rows = slice(self.runs.pop()[0].start, rows.stop)
        self.runs.append((rows, adapter))

    def add(self, module: str, given: torch.Tensor, out: torch.Tensor) -> None:
        """Adds to ``out``, ``[..., out]``, what adapters change for the rows ``given``."""
        rows, results = given.flatten(0, -2), out.view(-1, out.shape[-1])
        if len(rows) != self.num_rows:
            raise RuntimeError(
                f"{module} computes {len(rows)} rows of a forward of {self.num_rows}, so adapters "
                "cannot be told apart there"
            )
        for part, adapter in self.runs:
            delta = adapter.deltas.get(module)
            if delta is not None:
                results[part].addmm_(rows[part] @ delta.down.t(), delta.up)


class AdapterHooks:
    """The hooks of one engine on the linear layers of its model. They stay from the first adapter
    of a module on; several engines may share a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._installed: dict[str, Any] = {}

    def make(self, files: AdapterFiles) -> Adapter:
        """The adapter for this model. Raises AdapterError if it does not fit."""
        deltas = {}
        place = self._model.device, self._model.dtype
        head = self._model.get_output_embeddings()
        for name, shape in files.shapes.items():
            self._check(files, name, shape.width, shape.height, head)
        hashed = files.hashed  # it begins now
        for name, weights in files.modules.items():
            up = weights.up.t().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            if weights.scale != 1.0:
                up.mul_(weights.scale)
            down = weights.down.to(*place).contiguous()
            deltas[name] = Delta(down, up.to(*place).contiguous())
        self._check_finite(files, deltas)
        rank = max(len(delta.down) for delta in deltas.values())
        return Adapter(hashed.result(), rank, deltas, files.invocation)

    def _check_finite(self, files: AdapterFiles, deltas: Mapping[str, Delta]) -> None:
        """One such number makes whole answers of nothing, and their rows are cached."""
        finite = [
            torch.isfinite(d.down).all() & torch.isfinite(d.up).all() for d in deltas.values()
        ]
        for name, is_finite in zip(deltas, torch.stack(finite).tolist(), strict=True):
            if not is_finite:
                raise refuse(
                    files.path, f"{name!r} has weights that are not finite in {self._model.dtype}"
                )

    def _check(
        self, files: AdapterFiles, name: str, width: int, height: int, head: nn.Module | None
    ) -> None:
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            raise refuse(
                files.path,
                f"it changes {name!r}, and {type(self._model).__name__} has no such part",
            ) from None
        if module is head or isinstance(module, nn.Embedding):
            raise refuse(files.path, f"it changes {name!r}; embeddings and heads are not supported")
        sizes = _sizes(module)
        if sizes is None:
            raise refuse(files.path, f"{name!r} is no linear layer but {type(module).__name__}")
        if sizes != (width, height):
            raise refuse(
                files.path,
                f"{name!r} takes {sizes[0]} numbers to {sizes[1]}, the adapter {width} to "
                f"{height}: it belongs to another model",
            )

    def install(self, modules: Iterable[str]) -> None:
        """Puts hooks on these modules. No forward may run meanwhile."""
        for name in modules:
            if name not in self._installed:
                module = self._model.get_submodule(name)
                self._installed[name] = module.register_forward_hook(self._hook(name))

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in self._installed.values():
            handle.remove()
        self._installed.clear()

    @contextmanager
    def applied(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Adds the adapters of ``segments`` to the forward that runs in the context. It may run
        between two layers of another one."""
        if _current.rows is None and all(segment.kv.adapter is None for segment in segments):
            yield
            return
        rows, outer = AdaptedRows(self, segments), _current.rows
        _current.rows = rows if rows.runs else None
        try:
            yield
        finally:
            _current.rows = outer

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
            rows = _current.rows
            if rows is not None and rows.hooks is self:
                rows.add(name, given[0], out)

        return add


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """The sizes of a linear layer's input and output; None if it is none."""
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    if type(module).__name__ == "Conv1D":  # of transformers: a linear layer, transposed
        sizes = [getattr(module, name, None) for name in ("nx", "nf")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return sizes[0], sizes[1]  # type: ignore[return-value]
