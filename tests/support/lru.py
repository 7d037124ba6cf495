"""The plainest order of eviction: to compare the learned one with, and for tests of any."""

from __future__ import annotations

from kvboost.cache.eviction.policy import EvictionPolicy, Node, Rank


class LRU(EvictionPolicy):
    """Least recently used."""

    def _rank(self, node: Node) -> Rank:
        return node.used, 0.0
