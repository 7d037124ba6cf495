from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvboost.model.loading.tokenizer import ModelTokenizer
from kvboost.tokens.text import Detokenizer, StopMatcher
from support.tiny import byte_tokenizer

TOKENIZER = ModelTokenizer(byte_tokenizer())


@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text_and_never_show_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in TOKENIZER.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.finish() == text


def test_tokens_are_decoded_as_transformers_decodes_them() -> None:
    hf = byte_tokenizer()
    ids = [*hf.encode("a é ."), hf.eos_token_id, *hf.encode(" b")]
    assert TOKENIZER.decode(ids) == hf.decode(ids, skip_special_tokens=True) == "a é . b"
    assert TOKENIZER.decode(tuple(ids)) == "a é . b"


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super().decode(*args, **kwargs)).upper()

    shouting = Shouting(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert ModelTokenizer(shouting).decode(TOKENIZER.encode("ab")) == "AB"


def test_known_text_is_not_decoded_again() -> None:
    decoded = []

    class Counting(ModelTokenizer):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            decoded.append(list(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counting(byte_tokenizer()))
    first, *others = TOKENIZER.encode("a€")
    assert [detokenizer.push(token) for token in [first, *others]] == ["a", "", "", "€"]
    assert len(decoded) == 5  # of each token, and of the first one again, before the next piece


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    first, *_ = TOKENIZER.encode("é")
    assert detokenizer.push(first) == ""
    assert detokenizer.finish() == "\ufffd"


@given(
    st.text("abX", max_size=30),
    st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=30),
)
def test_stops_are_found_however_the_text_is_cut(text, stops, cuts) -> None:
    matcher = StopMatcher(stops)
    shown, rest = "", text
    for cut in cuts:
        shown += matcher.push(rest[:cut])
        rest = rest[cut:]
    shown += matcher.push(rest) + matcher.finish()
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert matcher.stopped == bool(ends)
    assert len(shown) <= len(text)
    assert text.startswith(shown)
    if not ends:
        assert shown == text
    else:  # a cut may let a later stop end first, but none may be seen
        assert not any(stop in shown for stop in stops)


def test_a_stop_across_pieces_is_held_back_and_cut_off() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one E") == "one "
    assert matcher.push("N") == ""
    assert matcher.push("D two") == ""
    assert matcher.stopped
    assert matcher.finish() == ""


def test_text_that_only_resembled_a_stop_is_released() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ""
    assert matcher.push("d") == "ENd"
    assert matcher.push("E") == ""
    assert matcher.finish() == "E"
