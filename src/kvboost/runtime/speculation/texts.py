"""The texts that requests have read and written lately, which later ones may be drafted from."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from kvboost.runtime.speculation.suffixes import IndexedText
from kvboost.tokens.hashing import ChunkKey, TokenIds

MOST_TEXTS = 8
"""Texts of one tenant."""
MOST_TOKENS = 32 * 1024
"""Tokens of them, all together; the newest text is kept in any case, up to its last so many."""
MOST_TENANTS = 64


class TenantTexts:
    """Thread-safe. Tenants are told apart by the roots of their caches: a draft from another's text
    would tell, by its speed, what that text says. Everything goes when the store forgets anything,
    which changes its ``epoch``."""

    def __init__(self) -> None:
        self._texts: OrderedDict[ChunkKey, list[IndexedText]] = OrderedDict()
        self._epoch = 0
        self._lock = threading.Lock()

    def add(self, root: ChunkKey, ids: TokenIds, epoch: int) -> None:
        """Keeps a text in place of those that it continues, unless something was forgotten after
        ``epoch``, at which it was begun."""
        text = IndexedText(ids[-MOST_TOKENS:])
        with self._lock:
            if epoch < self._epoch:
                return
            self._follow(epoch)
            texts = [old for old in self._texts.get(root, ()) if not _continues(text, old)]
            texts.append(text)
            while len(texts) > MOST_TEXTS or sum(map(len, texts)) > MOST_TOKENS:
                texts.pop(0)
            self._texts[root] = texts
            self._texts.move_to_end(root)
            if len(self._texts) > MOST_TENANTS:
                self._texts.popitem(last=False)

    def of(self, root: ChunkKey, epoch: int) -> list[IndexedText]:
        """The texts of one tenant, the newest first; ``epoch`` is that of the store."""
        with self._lock:
            self._follow(epoch)
            return self._texts.get(root, [])[::-1]

    def _follow(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._texts.clear()
            self._epoch = epoch


def _continues(text: IndexedText, old: IndexedText) -> bool:
    length = len(old)
    if length > len(text) or (length and text.ids[length - 1] != old.ids[-1]):
        return False
    return np.array_equal(text.ids[:length], old.ids)
