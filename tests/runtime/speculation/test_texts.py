"""A tenant's last texts."""

from __future__ import annotations

import numpy as np

from kvboost.runtime.speculation import suffixes
from kvboost.runtime.speculation.suffixes import MOST_TEXTS, TenantTexts
from kvboost.tokens.hashing import ChunkKey

ANNA, BERT = ChunkKey(b"anna"), ChunkKey(b"bert")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.uint32)


def kept(found: TenantTexts, root: ChunkKey, epoch: int = 0) -> list[list[int]]:
    return [text.ids.tolist() for text in found.of(root, epoch)]


def test_texts_are_apart_and_the_newest_comes_first() -> None:
    found = TenantTexts()
    found.add(ANNA, ids(1, 2), 0)
    found.add(ANNA, ids(3, 4), 0)
    found.add(BERT, ids(5), 0)
    assert kept(found, ANNA) == [[3, 4], [1, 2]] and kept(found, BERT) == [[5]]


def test_a_longer_text_replaces_its_beginning() -> None:
    found = TenantTexts()
    for text in (ids(1, 2), ids(7), ids(1, 2, 3)):
        found.add(ANNA, text, 0)
    assert kept(found, ANNA) == [[1, 2, 3], [7]]


def test_the_texts_of_a_tenant_are_few(monkeypatch) -> None:
    found = TenantTexts()
    for number in range(2 * MOST_TEXTS):
        found.add(ANNA, ids(number), 0)
    assert len(kept(found, ANNA)) == MOST_TEXTS
    monkeypatch.setattr(suffixes, "MOST_TOKENS", 3)
    found.add(ANNA, ids(90, 91, 92, 93), 0)
    assert kept(found, ANNA) == [[91, 92, 93]]
    monkeypatch.setattr(suffixes, "MOST_TENANTS", 1)
    found.add(BERT, ids(5), 0)
    assert kept(found, ANNA) == []


def test_all_go_when_something_is_forgotten() -> None:
    found = TenantTexts()
    found.add(ANNA, ids(1, 2), 0)
    assert kept(found, ANNA, epoch=1) == []
    found.add(ANNA, ids(1, 2), 0)  # it was begun before that
    assert kept(found, ANNA, epoch=1) == []
    found.add(ANNA, ids(3), 1)
    assert kept(found, ANNA, epoch=1) == [[3]]
