from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvboost.integrations.vllm import branches as module
from kvboost.integrations.vllm.branches import Branch, Branches

PAGE = 4


class PageHash(bytes):
    """As vLLM's: bytes of a type of their own."""


def extend(hashes: list[PageHash], ids: list[int]) -> list[PageHash]:
    """As vLLM does: each full page is chained on the last hash there is."""
    for start in range(len(hashes) * PAGE, len(ids) - PAGE + 1, PAGE):
        parent = hashes[-1] if hashes else b""
        page = repr(ids[start : start + PAGE]).encode()
        hashes.append(PageHash(hashlib.sha256(parent + page).digest()))
    return hashes


def exact(ids: list[int]) -> list[PageHash]:
    return extend([], ids)


@given(st.integers(0, 5), st.text())
def test_no_exact_hash_is_left_in_a_branch(first: int, repair: str) -> None:
    ids = list(range(6 * PAGE))
    hashes, branches = exact(ids), Branches()
    branches.enter("a", hashes, Branch(first, repair))
    assert hashes[:first] == exact(ids)[:first]
    assert not set(hashes[first:]) & set(exact(ids))
    assert len(set(hashes)) == 6 and all(type(one) is PageHash for one in hashes)
    assert branches.of("a") == Branch(first, repair)
    other = exact(ids)
    branches.enter("b", other, Branch(first, f"{repair}!"))  # other repairs have other branches
    assert not set(hashes[first:]) & set(other[first:])


def test_generated_pages_chain_onto_the_branch() -> None:
    ids = list(range(9 * PAGE))
    hashes = exact(ids[: 6 * PAGE])
    Branches().enter("a", hashes, Branch(2, "r"))
    extend(hashes, ids)
    assert not set(hashes[2:]) & set(exact(ids))


def test_leaving_restores_the_hashes() -> None:
    hashes, branches = exact(list(range(24))), Branches()
    branches.enter("a", hashes, Branch(1, "r"))
    branches.leave("a", hashes)
    assert hashes == exact(list(range(24))) and branches.of("a") is None


def test_a_request_can_rejoin_one_that_has_ended_but_none_of_before_a_reset() -> None:
    hashes, branches = exact(list(range(24))), Branches()
    assert not branches
    branches.enter("a", hashes, Branch(1, "r"))
    branches.forget("a")
    assert branches
    branches.clear()
    assert not branches


def test_entering_again_starts_from_the_exact_hashes() -> None:
    hashes, branches = exact(list(range(24))), Branches()
    branches.enter("a", hashes, Branch(1, "r"))
    branches.enter("a", hashes, Branch(3, "r"))
    other = exact(list(range(24)))
    Branches().enter("b", other, Branch(3, "r"))
    assert hashes == other


def test_the_next_turn_finds_the_pages_of_its_branch() -> None:
    branches, ids = Branches(), list(range(6 * PAGE))
    first_turn = exact(ids)
    branches.enter("a", first_turn, Branch(2, "r"))
    branches.forget("a")
    cached = set(first_turn)
    longer = exact([*ids, *range(100, 112)])
    assert branches.rejoin("b", longer, "r", cached.__contains__) == Branch(2, "r")
    assert longer[:6] == first_turn and branches.of("b") == Branch(2, "r")
    branches.leave("b", longer)
    assert longer == exact([*ids, *range(100, 112)])


def test_exact_pages_are_preferred_to_a_branch() -> None:
    branches, ids = Branches(), list(range(6 * PAGE))
    approximate = exact(ids)
    branches.enter("a", approximate, Branch(2, "r"))
    cached = {*approximate, *exact(ids)}
    again = exact(ids)
    assert branches.rejoin("b", again, "r", cached.__contains__) is None
    assert again == exact(ids)


def test_a_branch_is_rejoined_only_with_its_repair_text_and_pages() -> None:
    branches, ids = Branches(), list(range(6 * PAGE))
    pages = exact(ids)
    branches.enter("a", pages, Branch(2, "r"))
    cached = set(pages)
    other = [*ids[:9], 99, *ids[10:]]  # differs in page 2
    assert branches.rejoin("b", exact(ids), "another", cached.__contains__) is None
    assert branches.rejoin("c", exact(other), "r", cached.__contains__) is None
    assert branches.rejoin("d", exact(ids), "r", lambda _: False) is None
    branches.clear()
    assert branches.rejoin("e", exact(ids), "r", cached.__contains__) is None


def test_the_last_of_several_branches_is_rejoined() -> None:
    branches, ids = Branches(), list(range(6 * PAGE))
    first, second = exact(ids), exact(ids)
    branches.enter("a", first, Branch(1, "r"))
    branches.enter("b", second, Branch(4, "r"))
    again = exact(ids)
    cached = {*first, *second}
    assert branches.rejoin("c", again, "r", cached.__contains__) == Branch(4, "r")
    assert again == second


def test_the_oldest_branches_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_BRANCHES", 2)
    branches, texts = Branches(), [[number] * 8 for number in range(3)]
    for number, ids in enumerate(texts):
        branches.enter(str(number), exact(ids), Branch(0, "r"))
    every = {one for ids in texts for one in exact(ids)}
    found = [
        branches.rejoin(f"again {number}", exact(ids), "r", lambda page: page not in every)
        for number, ids in enumerate(texts)
    ]
    assert found == [None, Branch(0, "r"), Branch(0, "r")]
