from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.errors import ConfigError
from kvboost.tokens.chunking import SHORTEST_DOCUMENT, Cutter, fixed
from kvboost.tokens.hashing import as_token_ids

STRATEGIES = ("fixed", "semantic", "document")

# Tokens as real vocabularies have them: ends glued to words, nothing, half a character.
PIECES = ["a", "b ", " c", " ", "", "\ufffd", ".", " d.", '?"', "\n", ".\n", "\n\n", "\n\nz", "-"]
MARKERS = [("\n\n",), ("-" * 10,), ("\n\n", "--"), ("--", "-- -"), ("a--\n", "-")]

# Runs, so that markers overlap, follow each other closely or are far apart.
runs = st.tuples(st.integers(0, len(PIECES) - 1), st.integers(1, 3) | st.integers(6, 24))
tokens = st.lists(runs, max_size=12).map(
    lambda found: [token_id for token_id, length in found for _ in range(length)]
)
sizes = st.integers(1, 20)


def pieces(ids: Sequence[int]) -> str:
    return "".join(PIECES[token_id] for token_id in ids)


def characters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def cut(cutter: Cutter, text: str) -> list[str]:
    """The chunks of ``text``, each character a token."""
    intervals = cutter(as_token_ids([ord(character) for character in text]))
    return [text[start:end] for start, end in intervals]


def by_character(strategy: str, chunk_size: int, markers: Sequence[str] = ("\n\n",)) -> Cutter:
    return Cutter(strategy, chunk_size, characters, 0x3100, markers)


class Reader:
    """The slow reference: reads token by token and says whether a chunk ends here."""

    def __init__(self, strategy: str, chunk_size: int, markers: Sequence[str]) -> None:
        self.strategy = strategy
        self.chunk_size = chunk_size
        self.markers = [marker.replace(" ", "") for marker in markers]

    def cut(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        intervals = []
        start = document = 0
        for end in range(1, len(ids) + 1):
            ends_document = self.strategy == "document" and self.ends_document(ids[document:end])
            if (
                end - start == self.chunk_size
                or ends_document
                or (self.strategy == "semantic" and self.ends_sentence(ids[start:end]))
            ):
                intervals.append((start, end))
                start = end
            if ends_document:
                document = end
        return intervals + [(start, len(ids))] * (start < len(ids))

    def ends_sentence(self, chunk: Sequence[int]) -> bool:
        last = pieces(chunk[-1:])
        bare = last.rstrip().rstrip("\"'”)]}")
        return len(chunk) >= self.chunk_size // 2 and ("\n" in last or bare.endswith((".", "?")))

    def ends_document(self, document: Sequence[int]) -> bool:
        text = pieces(document).replace(" ", "")
        before = len(pieces(document[:-1]).replace(" ", ""))
        return len(document) >= SHORTEST_DOCUMENT and any(
            text.startswith(marker, at) and at + len(marker) > before
            for marker in self.markers
            for at in range(len(text))
        )


@given(st.sampled_from(STRATEGIES), sizes, st.sampled_from(MARKERS), tokens)
def test_cuts_equal_those_of_a_token_by_token_reader(strategy, size, markers, ids):
    cutter = Cutter(strategy, size, pieces, len(PIECES), markers)
    expected = Reader(strategy, size, markers).cut(ids)
    assert cutter(as_token_ids(ids)) == expected
    assert cutter(as_token_ids(ids)) == expected, "and the same again"


@given(st.sampled_from(STRATEGIES), sizes, st.sampled_from(MARKERS), tokens, tokens)
def test_all_chunks_but_the_last_stay_when_a_sequence_grows(strategy, size, markers, ids, more):
    cutter = Cutter(strategy, size, pieces, len(PIECES), markers)
    settled = cutter(as_token_ids(ids))[:-1]
    assert cutter(as_token_ids(ids + more))[: len(settled)] == settled


@given(sizes, st.sampled_from(["\n", "-"]), tokens, tokens)
def test_a_document_is_cut_alike_at_any_position(size, character, ids, document):
    cutter = Cutter("document", size, pieces, len(PIECES), [character * 2])
    other = ids + [PIECES.index("a")] * SHORTEST_DOCUMENT + [PIECES.index(character)] * 2
    moved = [
        (start + len(other), end + len(other)) for start, end in cutter(as_token_ids(document))
    ]
    assert cutter(as_token_ids(other + document)) == cutter(as_token_ids(other)) + moved


def test_fixed_is_the_grid_and_decodes_nothing():
    def refuse(ids: Sequence[int]) -> str:
        raise AssertionError(f"decoded {ids}")

    ids = as_token_ids(range(11))
    assert Cutter("fixed", 4, refuse, 11)(ids) == fixed(11, 4)


@pytest.mark.parametrize(
    ("piece", "ends"),
    [
        (".", True), (" end.  ", True), ('!"', True), ("?)", True), ("…", True), (".”]", True),
        ("。", True), ("\n", True), ("\n    x", True), (" }\n", True),
        ("", False), ("\ufffd", False), (" ", False), (",", False), ('"', False), (".5", False),
    ],
)  # fmt: skip
def test_what_ends_a_sentence(piece: str, ends: bool):
    cutter = Cutter("semantic", 4, lambda ids: ["word", piece][ids[0]], 2)
    assert cutter(as_token_ids([0, 1, 0])) == ([(0, 2), (2, 3)] if ends else [(0, 3)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_text_without_any_end_is_cut_on_the_grid(strategy: str):
    ids = np.full(100_003, ord("a"), np.int32)
    assert by_character(strategy, 128)(ids) == fixed(len(ids), 128)


BLANK_LINE = ["\n\n"]


@pytest.mark.parametrize(
    ("markers", "size", "chunks"),
    [
        (BLANK_LINE, 20, ["document 1\n\n", "document 2\n\n", "doc"]),
        (BLANK_LINE, 20, ["one\ntwo\nthree\n"]),
        # a long one is cut from its own beginning, and its rest stays alone
        (BLANK_LINE, 10, ["document\n\n", "0123456789", "ab\n\n", "next"]),
        # one shorter than eight tokens joins the next
        (BLANK_LINE, 20, ["one\n\ntwo\n\n", "three\n\nfour"]),
        (BLANK_LINE, 20, ["seven\n\neight.\n\n", "next"]),
        (BLANK_LINE, 20, ["eight.\n\n", "next"]),
        (BLANK_LINE, 20, ["eight\n\n\n", "next"]),  # markers may overlap
        (BLANK_LINE, 20, ["document\n  \n", "next"]),  # a line of spaces is a blank one
        (["###", "\n\n"], 20, ["document###", " another\n\n", "next"]),
        (["\n\n", "###"], 20, ["document###", " another\n\n", "next"]),
        # the marker that ends first counts when one holds another
        (["cument--1", "--"], 20, ["document--", "1 next"]),
    ],
)
def test_documents_end_after_their_marker(markers: list[str], size: int, chunks: list[str]):
    assert SHORTEST_DOCUMENT == 8
    assert cut(by_character("document", size, markers), "".join(chunks)) == chunks


def test_a_marker_may_span_many_tokens_and_end_inside_one():
    words = ["<", "/", "doc", ">\n", "word "]
    cutter = Cutter("document", 64, lambda ids: words[ids[0]], 5, ["</doc>"])
    assert cutter(as_token_ids([4] * 6 + [0, 1, 2, 3] + [4] * 3)) == [(0, 10), (10, 13)]


@pytest.mark.parametrize("strategy", ["semantic", "document"])
def test_an_id_is_decoded_when_it_is_first_seen_and_never_again(strategy: str):
    decoded: Counter[int] = Counter()

    def decode(ids: Sequence[int]) -> str:
        decoded.update(ids)
        return characters(ids)

    cutter = Cutter(strategy, 4, decode, 250_000)
    cutter(as_token_ids([5, 9, 5, 5]))
    assert decoded == {5: 1, 9: 1}
    cutter(as_token_ids([9, 7, 5, 249_999]))
    assert decoded == {5: 1, 9: 1, 7: 1, 249_999: 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "paragraphs"}, "chunking='paragraphs' is not available; choose one of"),
        ({"chunk_size": 0}, "chunk_size=0 must be a whole number of at least 1"),
        ({"markers": "\n\n"}, "is one string; give a list"),
        ({"markers": []}, "at least one"),
        ({"markers": ["END", "  "]}, "more than spaces"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str):
    allowed = {"strategy": "document", "chunk_size": 8, "markers": ["\n\n"]}
    with pytest.raises(ConfigError, match=re.escape(message)):
        Cutter(decode=characters, vocab_size=9, **(allowed | options))


@given(st.sampled_from(STRATEGIES), tokens, st.lists(st.integers(-3, 80), max_size=4), sizes)
def test_text_between_boundaries_is_cut_on_its_own(strategy, ids, boundaries, size) -> None:
    cutter = Cutter(strategy, size, pieces, len(PIECES))
    inside = sorted({place for place in boundaries if 0 < place < len(ids)})
    expected = []
    for begin, end in zip([0, *inside], [*inside, len(ids)], strict=True):
        expected += [(begin + a, begin + b) for a, b in cutter(as_token_ids(ids[begin:end]))]
    assert cutter(as_token_ids(ids), boundaries) == expected
