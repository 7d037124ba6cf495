"""The KV of running requests, of which every rank holds its heads."""

from __future__ import annotations

from kvboost.model.kv import KVPool, RequestKV
from kvboost.model.kv_shape import KVShape
from kvboost.runtime.parallel.messages import Clear, NewKV, Reserve
from kvboost.runtime.parallel.ranks import Ranks


class ShardedKV(RequestKV):
    """Rank 0's heads. The other ranks have a buffer with the same rows."""

    def __init__(self, ranks: Ranks, shape: KVShape, num_tokens: int) -> None:
        super().__init__(shape, num_tokens)
        self._ranks = ranks
        self._handle = ranks.new_handle()
        ranks.cast(NewKV(self.number, num_tokens))

    @property
    def number(self) -> int:
        return self._handle.number

    def reserve(self, num_tokens: int) -> None:
        if num_tokens > self.capacity:
            self._ranks.cast(Reserve(self.number, num_tokens))
            super().reserve(num_tokens)

    def clear(self, start: int, end: int) -> None:
        self._ranks.cast(Clear(self.number, start, end))
        super().clear(start, end)


def number_of(kv: object) -> int:
    """What the other ranks call a buffer."""
    assert isinstance(kv, ShardedKV)
    return kv.number


class ShardedPool(KVPool):
    """Idle buffers keep theirs on the other ranks, too."""

    def __init__(self, ranks: Ranks, shape: KVShape, max_idle: int) -> None:
        super().__init__(shape, max_idle)
        self._ranks = ranks

    def _make(self, num_tokens: int) -> RequestKV:
        return ShardedKV(self._ranks, self.shape, num_tokens)
