from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from kvboost.integrations.vllm.later import FEW, MANY, REMEMBERED, SAMPLE, USELESS, Ended, Later
from kvboost.integrations.vllm.options import RequestOptions
from kvboost.integrations.vllm.planner import prompt_ids

PAGE = 16
ASKED = RequestOptions("repaired", 0.15)


@dataclass
class Request:
    block_hashes: list[bytes]
    all_token_ids: list[int] = field(default_factory=list)


def ended(name: str, pages: int = 3, salt: str = "", rows: int | None = None) -> Ended:
    """Its hashes are those of every other with this name, as far as both go."""
    hashes = [f"{name} {page}".encode() for page in range(pages)]
    exact_rows = pages * PAGE + 5 if rows is None else rows
    return Ended(Request(hashes), None, ASKED, salt, (tuple(range(pages + 1)),), exact_rows, pages)


def find(page_hash: bytes) -> int:
    """Every page is at 100 and its number."""
    return 100 + int(page_hash.split()[-1])


class Busy:
    """A Later whose last requests loaded nothing; ``counts`` is what became of requests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.later = Later(PAGE, lambda outcome: self.counts.update([outcome]), is_on=True)
        self.number = 0
        for number in range(USELESS):
            self.number += 1
            assert not self.later.puts_off(ended(f"before {number}"), MANY)

    def end(self, one: Ended, num_requests: int = MANY) -> bool:
        """Whether it is put off, or would be if it were not one of the sample."""
        if (self.number + 1) % SAMPLE == 0:
            self.number += 1
            self.later.puts_off(ended(f"sample {self.number}"), num_requests)
        self.number += 1
        return self.later.puts_off(one, num_requests)


def test_requests_are_put_off_when_many_run_and_none_has_loaded() -> None:
    busy = Busy()
    assert busy.end(ended("a"))
    assert not busy.end(ended("b"), MANY - 1)
    assert not busy.later.is_time(FEW + 1) and busy.later.is_time(FEW)
    busy.later.on_load()
    assert not busy.end(ended("c")) and busy.later.is_time(MANY)


def test_some_are_kept_all_the_same() -> None:
    busy = Busy()
    put_off = [busy.later.puts_off(ended(f"one {n}"), MANY) for n in range(4 * SAMPLE)]
    assert put_off.count(False) == 4


def test_what_is_kept_later_is_where_the_prefix_cache_has_it_then() -> None:
    busy = Busy()
    one = ended("a")
    busy.end(one)
    (taken,) = busy.later.take(10**6, find)
    assert taken.tables == ((100, 101, 102),) and taken.request is one.request
    assert (taken.exact_rows, taken.exact_pages) == (3 * PAGE, 3)
    assert busy.counts == {"kept": 1} and not len(busy.later)


def test_pages_after_one_that_is_gone_are_left_out() -> None:
    busy = Busy()
    busy.end(ended("a"))
    busy.end(ended("b"))
    gone = {b"a 0", b"b 2"}
    (taken,) = busy.later.take(10**6, lambda one: None if one in gone else find(one))
    assert taken.tables == ((100, 101),) and taken.exact_rows == 2 * PAGE
    assert busy.counts == {"dropped": 1, "kept": 1}


def test_a_conversation_that_goes_on_is_remembered_once() -> None:
    busy = Busy()
    for pages in (2, 3, 3, 5):
        assert busy.end(ended("a", pages))
    assert busy.end(ended("b", 1))
    assert len(busy.later) == 2 and not busy.counts
    assert busy.later.take(10**6, find)[0].exact_pages == 5


def test_only_requests_with_names_for_all_their_exact_pages_are_put_off() -> None:
    busy = Busy()
    assert not busy.end(ended("short", 0))
    assert not busy.end(ended("a branch", 3, rows=6 * PAGE))
    without_prefix_cache = ended("a")
    without_prefix_cache.request.block_hashes = []
    assert not busy.end(without_prefix_cache)


def test_the_oldest_are_taken_first_and_not_too_many_at_once() -> None:
    busy = Busy()
    for name in "abcd":
        busy.end(ended(name, 4))
    rows = ended("a", 4).exact_rows
    names = [one.request.block_hashes[0][:1] for one in busy.later.take(2 * rows, find)]
    assert names == [b"a", b"b"]
    assert len(busy.later.take(1, find)) == 1  # at least one


def test_the_oldest_are_dropped_when_there_are_too_many() -> None:
    busy = Busy()
    for number in range(REMEMBERED + 2):
        busy.end(ended(f"one {number}"))
    assert len(busy.later) == REMEMBERED and busy.counts == {"dropped": 2}


def test_what_is_forgotten_is_not_kept_later() -> None:
    busy = Busy()
    busy.end(ended("a", salt="mine"))
    busy.end(ended("b", salt="yours"))
    busy.later.forget("mine")
    assert [one.salt for one in busy.later.take(10**6, find)] == ["yours"]
    busy.end(ended("c"))
    busy.later.forget()
    assert not len(busy.later)


def test_tokens_of_the_prompt_are_taken_from_where_they_are_at_hand() -> None:
    one = replace(ended("a", rows=40), prompt=prompt_ids(range(30)))
    one.request.all_token_ids = list(range(50))
    assert one.exact_ids().tolist() == list(range(40))
    assert replace(one, prompt=None).exact_ids().tolist() == list(range(40))
    assert replace(one, exact_rows=20).exact_ids().tolist() == list(range(20))
