"""Splits an answer into reasoning, content and calls of tools while it is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal, Protocol

from kvboost.chat.calls import CallReader, Part
from kvboost.chat.styles import PYTHON_TAG, THINK, THOUGHT, CallStyle
from kvboost.results import GenerationResult, ParsedAnswer, ToolCall

_FENCE = "```"
_CUT_MARK = 2
"""So many characters at the end of an answer that was cut may be the beginning of a tag."""


class AnswerParser(Protocol):
    """Reads an answer piece by piece. However it is cut, the joined parts are the same."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self, *, cut: bool = False) -> list[Part]:
        """The parts that were held back until the end. ``cut``: a limit has ended the answer, so
        the last tag or call may be incomplete; its beginning is then left out."""


class TextParser:
    """Reads reasoning in ``<think>`` and calls in a :class:`CallStyle`. Blanks between the three
    kinds of parts are left out. Whatever the style, content that begins with a JSON object which
    names one of the tools is a call, also within a code block: small models forget the tags."""

    def __init__(
        self,
        calls: CallStyle | None,
        *,
        thinks: bool,
        begun: bool = False,
        names: Collection[str] = (),
    ) -> None:
        """``begun``: the prompt has opened the reasoning. ``names``: those of the tools."""
        self._calls = calls
        self._names = names
        self._thinks = thinks
        self._kind: Literal["content", "reasoning"] = "reasoning" if begun else "content"
        self._said: set[str] = set()
        self._held = ""
        self._blank = ""
        self._is_fresh = True
        """Whether nothing of the present part has been passed on."""
        self._reader: CallReader | None = None
        self._has_calls = False
        self._in_tag = False
        self._before_call = ""
        """Text that was dropped before a call without a tag. It is shown if that turns out to be no
        call."""
        self._is_cut = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        return _joined(self._read(final=False))

    def finish(self, *, cut: bool = False) -> list[Part]:
        self._is_cut = cut
        return _joined(self._read(final=True))

    def _read(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held:
            before = self._held
            # A call without a tag may begin only where the content does.
            is_bare = self._calls is not None and self._is_fresh and self._kind == "content"
            if self._reader is not None:
                parts += self._read_call(self._reader)
            elif self._in_tag:
                parts += self._read_in_tag(final=final)
            elif begins := is_bare and self._begins_call():
                self._reader = CallReader(self._names)
            elif begins is None and not final:
                break
            else:
                parts += self._read_text(final=final)
            if self._held == before and self._reader is None:
                break
        is_left_out = self._is_cut and self._in_tag
        if final and self._reader is not None and not (self._reader.has_begun or is_left_out):
            parts += self._say(self._frame[0] + self._reader.text)
        return parts

    @property
    def _frame(self) -> tuple[str, str]:
        """The text before and after a call."""
        if self._calls is None or not self._in_tag:
            return self._before_call, ""
        return self._calls.before, self._calls.after

    def _read_text(self, *, final: bool) -> list[Part]:
        """Text up to the next mark."""
        marks = self._marks()
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            parts = self._say(self._held[:at])
            self._held = self._held[at + len(mark) :]
            self._enter(mark)
            return parts
        unfinished = _possible_start(self._held, marks)
        if final and unfinished < (_CUT_MARK if self._is_cut else len(self._held) + 1):
            unfinished = 0
        safe = len(self._held) - unfinished
        text, self._held = self._held[:safe], "" if final else self._held[safe:]
        return self._say(text)

    def _marks(self) -> list[str]:
        if self._kind == "reasoning":
            return [THOUGHT]
        tag = [self._calls.opens] if self._calls is not None and self._calls.opens else []
        return [THINK, *tag] if self._thinks else tag

    def _enter(self, mark: str) -> None:
        self._blank, self._is_fresh = "", True
        if mark == THINK:
            self._kind = "reasoning"
        elif mark == THOUGHT:
            self._kind = "content"
        else:
            self._in_tag = True

    def _begins_call(self) -> bool | None:
        """Whether a call begins here; None if more text must tell. What precedes it is dropped."""
        rest = self._held.lstrip("; \n" if self._has_calls else None)
        if self._has_calls and self._before_call.startswith(_FENCE):  # the block of the last call
            if _FENCE.startswith(rest) and rest != _FENCE:
                return None
            self._before_call, rest = "", rest.removeprefix(_FENCE).lstrip("; \n")
            self._held = rest
        dropped = ""
        for lead in (PYTHON_TAG, f"{_FENCE}json", f"{_FENCE}tool_call", _FENCE):
            if lead.startswith(rest):
                return None
            if rest.startswith(lead):
                dropped, rest = lead, rest.removeprefix(lead)
                break
        blank = rest[: len(rest) - len(rest.lstrip())]
        rest = rest.lstrip()
        if not rest.startswith("{"):
            return False if rest else None
        self._held, self._before_call = rest, dropped + (blank if dropped else "")
        return True

    def _read_in_tag(self, *, final: bool) -> list[Part]:
        """Reads what is between a call and the end of its tag: nothing, another call, or other
        text."""
        assert self._calls is not None
        rest = self._held.lstrip()
        if rest[:1] in ("{", "["):
            self._held, self._reader = rest, CallReader()
            return []
        at = self._held.find(self._calls.closes)
        if at < 0 and not final:
            return []
        end = len(self._held) if at < 0 else at
        text, self._held = self._held[:end], self._held[end + len(self._calls.closes) :]
        self._in_tag = False
        unfinished = 0 if at >= 0 else _possible_start(text, [self._calls.closes])
        if not text[: len(text) - unfinished].strip():  # also if the answer ends in its closing tag
            return []
        return self._say(self._calls.opens + text + (self._calls.closes if at >= 0 else ""))

    def _read_call(self, reader: CallReader) -> list[Part]:
        parts: list[Part] = []
        for number, character in enumerate(self._held, start=1):
            parts += reader.push(character)
            if reader.is_complete or (reader.is_hopeless and not self._in_tag):
                self._held, self._reader = self._held[number:], None
                self._blank, self._is_fresh = "", True
                self._has_calls |= reader.has_begun
                before, after = self._frame
                return parts if reader.has_begun else self._say(before + reader.text + after)
        self._held = ""
        return parts

    def _say(self, text: str) -> list[Part]:
        """Passes on text without blanks around it. Content after a call begins a new line."""
        if self._is_fresh:
            text = text.lstrip()
            self._blank = "\n" if self._kind in self._said else ""
        text = self._blank + text
        shown = text.rstrip()
        if not shown:
            self._blank = "" if self._is_fresh else text
            return []
        self._blank, self._is_fresh = text[len(shown) :], False
        self._said.add(self._kind)
        return [Part(self._kind, shown)]


class OneCall:
    """Leaves out all calls of an answer but the first."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        return self._kept(self._parser.feed(text))

    def finish(self, *, cut: bool = False) -> list[Part]:
        return self._kept(self._parser.finish(cut=cut))

    def _kept(self, parts: Iterable[Part]) -> list[Part]:
        kept = []
        for part in parts:
            self._num_calls += part.kind == "call"
            if self._num_calls <= 1 or part.kind not in ("call", "arguments"):
                kept.append(part)
        return kept


def _possible_start(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if mark.startswith(text[-length:]):
                longest = length
                break
    return longest


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring parts of one text as one part."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind != "call":
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def collect(parts: Iterable[Part]) -> ParsedAnswer:
    """The answer that ``parts`` make."""
    texts = {"content": "", "reasoning": ""}
    calls: list[ToolCall] = []
    for part in parts:
        if part.kind == "call":
            calls.append(ToolCall(part.text, ""))
        elif part.kind == "arguments":
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + part.text)
        else:
            texts[part.kind] += part.text
    return ParsedAnswer(texts["content"], texts["reasoning"], tuple(calls))


def with_parts(result: GenerationResult, parser: AnswerParser | None) -> GenerationResult:
    """``result`` with the parts of its answer, if ``parser`` reads any."""
    if parser is None:
        return result
    parts = parser.feed(result.output_text)
    parts += parser.finish(cut=result.finish_reason == "length")
    return replace(result, parsed=collect(parts))
