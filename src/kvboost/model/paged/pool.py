"""Lends pages to requests, if they have any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kvboost.model import triton
from kvboost.model.execution.kv import KVPool, Prefix, RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.latent import TOO_WIDE
from kvboost.model.loading.device import has_capability
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import PAGE, Slab, pages_for

if TYPE_CHECKING:
    from kvboost.model.execution.forward import Forward

SPARE_REQUESTS = 16
"""Requests beyond those of the batch that can have pages: those that run alone."""


def why_buffers(forward: Forward) -> str:
    """Why requests of a model have buffers of their own; empty if they have pages. Pages need our
    attention, a GPU that Triton's kernels run on, and a model in one piece."""
    if len({weight.device for weight in forward.model.parameters()}) != 1:
        return "the model is on several devices"
    own = "" if forward.packed else "the model keeps its own attention"
    own = own or ("" if forward.fits_pages else TOO_WIDE)
    own = own or ("" if forward.is_uniform else "the KV of the model's layers differs")
    if getattr(forward.model.config.get_text_config(), "attention_chunk_size", None):
        own = own or "some layers attend to their own stretch of text only"
    return why_no_pages(forward.shape.device) or own


def why_no_pages(device: torch.device) -> str:
    """Why no model on this device has pages; empty if one can."""
    if not has_capability(device):
        return "only on NVIDIA GPUs of compute capability 8.0 and later"
    return "" if triton.is_available() else "triton is not installed"


class PagedPool(KVPool):
    """Lends pages of a slab, which is allocated with the first request. A request that the slab
    has no space for gets a buffer of its own: it is served as without pages."""

    def __init__(
        self,
        shape: KVShape,
        num_bytes: int,
        max_running: int,
        context: int | None,
        on_slab: Callable[[Slab], None],
        *,
        keeps: bool = False,
    ) -> None:
        """The slab has ``num_bytes``; if it ``keeps`` nothing of ended requests, no more than so
        many requests of the model's ``context`` need. ``on_slab`` is called with the slab before a
        request has pages of it."""
        super().__init__(shape, max_idle=2)
        self._requests = max_running + SPARE_REQUESTS
        self._most_pages = pages_for(context) if context else None
        pages = num_bytes // (PAGE * shape.row_bytes)
        if self._most_pages is not None and not keeps:
            pages = min(pages, self._requests * self._most_pages)
        self._num_pages = max(1, pages)
        self._on_slab = on_slab
        self._slab: Slab | None = None
        self._lent: set[int] = set()
        self._making = threading.Lock()

    @property
    def slab(self) -> Slab:
        with self._making:
            if self._slab is None:
                made = Slab(self.shape, self._num_pages, self._requests, self._most_pages)
                self._on_slab(made)
                self._slab = made
            return self._slab

    def prepare(self) -> None:
        """Allocates the slab now, not with the first request."""
        assert self.slab is not None

    @contextmanager
    def lend(self, num_tokens: int, base: Prefix | None = None) -> Iterator[RequestKV]:
        is_far = self.far is not None and self.far.takes(num_tokens)
        shared = () if base is None else base.pages
        if is_far or shared is None:
            with super().lend(num_tokens, base) as kv:
                yield kv
            return
        slab = self.slab
        holding = slab.take(num_tokens, shared)
        if holding is None:
            with super().lend(num_tokens) as kv:
                yield kv
            return
        self._lent.add(holding.serial)
        try:
            yield PagedKV(slab, holding, base)
        finally:
            slab.release(holding)
            self._lent.discard(holding.serial)

    def check_integrity(self) -> list[str]:
        """Pages that are held although no request has any; requests that run hide them."""
        return [] if self._slab is None or self._lent else self._slab.check_integrity()

    def bytes_for(self, num_tokens: int) -> int:
        if self.far is not None and self.far.takes(num_tokens):
            return self.far.near_bytes
        return pages_for(num_tokens) * PAGE * self.shape.row_bytes

    def clear(self) -> None:
        super().clear()
        with self._making:
            self._slab = None
