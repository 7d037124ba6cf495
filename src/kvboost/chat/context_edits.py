"""Context editing: clears old tool results and old reasoning from a conversation before the model
reads it. The fields are those of Anthropic's ``context_management``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from kvboost.config import closest
from kvboost.errors import ConfigError
from kvboost.results import AppliedEdit

Message = Mapping[str, Any]
TOOL_USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
CLEARED = "[Old tool result cleared]"
"""The text in place of a result that was cleared."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields in which chat templates look for the reasoning of a message."""
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class ClearToolUses:
    """Replaces the oldest tool results by a short text. A use is a call and its result."""

    trigger: str = "input_tokens"
    """The count that decides whether anything is cleared: ``input_tokens`` or ``tool_uses``."""
    trigger_value: int = 100_000
    """Nothing is cleared unless there are more than these."""
    keep: int = 3
    """So many of the last uses are not cleared."""
    clear_at_least: int = 0
    """Nothing is cleared if that would save fewer tokens."""
    exclude_tools: frozenset[str] = field(default_factory=frozenset)
    """Uses of these tools are not cleared. Among the last uses they count."""
    clear_tool_inputs: bool | frozenset[str] = False
    """Whether the arguments of cleared calls are emptied too; or the tools for which they are."""

    def apply(self, messages: Sequence[Message], tokens: int) -> tuple[list[Message], int]:
        """The edited messages, and how many uses were cleared. ``tokens``: those of the prompt. A
        result that is no longer than the text in its place stays."""
        edited, cleared = list(messages), 0
        uses = _tool_uses(messages)
        if (len(uses) if self.trigger == "tool_uses" else tokens) <= self.trigger_value:
            return edited, 0
        for use in uses[: max(0, len(uses) - self.keep)]:
            if use.name in self.exclude_tools:
                continue
            changes = {use.result: _without_result(edited[use.result])}
            if use.call is not None and self._clears_inputs(use.name):
                changes[use.call] = _without_input(edited[use.call], use.number)
            made = {at: one for at, one in changes.items() if one is not None}
            for at, one in made.items():
                edited[at] = one
            cleared += bool(made)
        return edited, cleared

    def _clears_inputs(self, name: str) -> bool:
        chosen = self.clear_tool_inputs
        return chosen if isinstance(chosen, bool) else name in chosen

    def report(self, cleared: int, tokens: int) -> AppliedEdit:
        return AppliedEdit(TOOL_USES, tokens, cleared_tool_uses=cleared)


@dataclass(frozen=True)
class ClearThinking:
    """Removes the reasoning of older turns. A turn is all that the assistant writes between two
    messages of the user, calls of tools included."""

    keep: int | None = 1
    """The reasoning of so many last turns that have any is kept; None keeps all."""
    clear_at_least: ClassVar[int] = 0

    def apply(self, messages: Sequence[Message], tokens: int) -> tuple[list[Message], int]:
        """The edited messages, and how many turns lost their reasoning."""
        turns: dict[int, list[int]] = {}
        turn = 0
        for at, message in enumerate(messages):
            turn += message["role"] == "user"
            if message["role"] == "assistant" and any(message.get(one) for one in REASONING):
                turns.setdefault(turn, []).append(at)
        edited = list(messages)
        keep = len(turns) if self.keep is None else self.keep
        old = list(turns.values())[: max(0, len(turns) - keep)]
        for at in (place for places in old for place in places):
            edited[at] = {
                name: value for name, value in messages[at].items() if name not in REASONING
            }
        return edited, len(old)

    def report(self, cleared: int, tokens: int) -> AppliedEdit:
        return AppliedEdit(THINKING, tokens, cleared_thinking_turns=cleared)


Edit = ClearToolUses | ClearThinking


class Conversation(Protocol):
    """A dataclass with chat messages."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def messages(self) -> Sequence[Message]: ...


C = TypeVar("C", bound=Conversation)


def edit_context(
    conversation: C, given: object, count: Callable[[C], int]
) -> tuple[C, tuple[AppliedEdit, ...]]:
    """``conversation`` after the edits of ``given``, a value of ``context_management`` or None, and
    the edits that were applied. Messages are edited in copies, and none is added or removed.
    ``count`` gives the tokens of a conversation as a prompt. Raises ConfigError if ``given`` is
    wrong."""
    applied: list[AppliedEdit] = []
    edits = () if given is None else read_edits(given)
    tokens = count(conversation) if edits else 0
    for edit in edits:
        messages, cleared = edit.apply(conversation.messages, tokens)
        if not cleared:
            continue
        edited = replace(conversation, messages=messages)
        saved = tokens - count(edited)
        if saved >= edit.clear_at_least:
            applied.append(edit.report(cleared, saved))
            conversation, tokens = edited, tokens - saved
    return conversation, tuple(applied)


@dataclass(frozen=True)
class _ToolUse:
    name: str
    result: int
    """The message that has the result."""
    call: int | None
    """The message that has the call; None if there is none."""
    number: int = 0
    """The number of the call in that message."""


def _tool_uses(messages: Sequence[Message]) -> list[_ToolUse]:
    """The uses of tools, in the order of their results. A result belongs to the call with its id,
    or else to the first call before it that has no result yet."""
    uses: list[_ToolUse] = []
    waiting: list[tuple[int, int, Mapping[str, Any]]] = []
    for at, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            waiting = [(at, number, call) for number, call in enumerate(calls)]
        elif message["role"] == "tool":
            same = (one for one in waiting if one[2].get("id") == message.get("tool_call_id"))
            found = next(same, waiting[0] if waiting else None)
            if found is None:
                uses.append(_ToolUse(message.get("name") or "", at, None))
                continue
            waiting.remove(found)
            name = _function(found[2]).get("name") or message.get("name") or ""
            uses.append(_ToolUse(name, at, found[0], found[1]))
    return uses


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The name and the arguments of a call. Some templates take calls without ``function``."""
    function: Mapping[str, Any] = call.get("function", call)
    return function


def _without_result(message: Message) -> Message | None:
    """``message`` without its result; None if that would not be shorter."""
    content = message["content"]
    is_text = isinstance(content, str)
    size = len(content) if is_text else sum(len(part.get("text") or "") for part in content or ())
    if size <= len(CLEARED):
        return None
    return {**message, "content": CLEARED if is_text else [{"type": "text", "text": CLEARED}]}


def _without_input(message: Message, number: int) -> Message | None:
    """``message`` with empty arguments in one of its calls; None if they are empty already. They
    stay JSON text if they were."""
    calls = list(message["tool_calls"])
    function = _function(calls[number])
    given = function.get("arguments")
    empty: Any = "{}" if isinstance(given, str) else {}
    if not given or given == empty:
        return None
    emptied = {**function, "arguments": empty}
    call = calls[number]
    calls[number] = {**call, "function": emptied} if "function" in call else emptied
    return {**message, "tool_calls": calls}


def read_edits(given: object) -> tuple[Edit, ...]:
    """The edits of ``context_management``. A field that is None counts as not given. Raises
    ConfigError if anything in it is unknown or wrong."""
    fields = _fields("", given, ("edits",), "{'edits': [...]}")
    listed = fields.get("edits", [])
    if not isinstance(listed, (list, tuple)):
        raise _wrong(
            "edits", listed, f"must be a list of edits, such as [{{'type': {TOOL_USES!r}}}]"
        )
    edits = tuple(_read_edit(f"edits[{number}]", one) for number, one in enumerate(listed))
    types = [one["type"] for one in listed]
    if len(set(types)) < len(types):
        raise _wrong("edits", types, "has two edits of one type; give each type once")
    if THINKING in types[1:]:
        raise _wrong("edits", types, f"has them in the wrong order; put {THINKING} first")
    return edits


def _read_edit(place: str, given: object) -> Edit:
    shown = f"{{'type': {TOOL_USES!r}}} or {{'type': {THINKING!r}}}"
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == THINKING:
        fields = _fields(place, given, ("type", "keep"), shown)
        return ClearThinking(_turns(f"{place}.keep", fields.get("keep")))
    if kind != TOOL_USES:
        is_typed = isinstance(given, Mapping) and "type" in given
        at, value = (f"{place}.type", kind) if is_typed else (place, given)
        raise _wrong(at, value, f"is no edit that KVBoost knows; use {shown}")
    known = ("type", "trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs")
    fields = _fields(place, given, known, shown)
    default = ClearToolUses()

    def amount(name: str, least: int, types: tuple[str, ...], value: int) -> tuple[str, int]:
        return _amount(f"{place}.{name}", fields.get(name), least, types, value)

    trigger, trigger_value = amount(
        "trigger", 1, ("input_tokens", "tool_uses"), default.trigger_value
    )
    inputs = fields.get("clear_tool_inputs", False)
    if not isinstance(inputs, bool):
        inputs = _names(f"{place}.clear_tool_inputs", inputs, "true, false or ")
    return ClearToolUses(
        trigger,
        trigger_value,
        amount("keep", 0, ("tool_uses",), default.keep)[1],
        amount("clear_at_least", 0, ("input_tokens",), default.clear_at_least)[1],
        _names(f"{place}.exclude_tools", fields.get("exclude_tools", ())),
        inputs,
    )


def _turns(place: str, given: object) -> int | None:
    """How many turns keep their reasoning; None for all."""
    if given == "all" or (isinstance(given, Mapping) and dict(given) == {"type": "all"}):
        return None
    if isinstance(given, str):
        raise _wrong(place, given, "must be {'type': 'thinking_turns', 'value': 1} or 'all'")
    return _amount(place, given, 1, ("thinking_turns",), 1)[1]


def _amount(
    place: str, given: object, least: int, types: tuple[str, ...], default: int
) -> tuple[str, int]:
    """The type and the value of an object like ``{"type": "tool_uses", "value": 3}``."""
    if given is None:
        return types[0], default
    shown = f"{{'type': {types[0]!r}, 'value': {default}}}"
    fields = _fields(place, given, ("type", "value"), shown)
    if (kind := fields.get("type")) not in types:
        raise _wrong(f"{place}.type", kind, f"must be {' or '.join(map(repr, types))}")
    value = fields.get("value")
    if isinstance(value, float) and value.is_integer():  # JSON has one kind of number
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        said = f"must be a whole number of at least {least}; give {shown}, for example"
        raise _wrong(f"{place}.value", value, said)
    return kind, value


def _names(place: str, given: object, others: str = "") -> frozenset[str]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise _wrong(place, given, f"must be {others}a list of names of tools")
    return frozenset(given)


def _fields(place: str, given: object, known: Collection[str], shown: str) -> dict[str, Any]:
    """The fields of an object that are given."""
    if not isinstance(given, Mapping):
        raise _wrong(place, given, f"must be an object; give {shown}, for example")
    for name in given:
        if name not in known:
            guess = closest(name, known) if isinstance(name, str) else None
            hint = f"did you mean {guess!r}? The fields are" if guess else "the fields are"
            inside = f"{place}.{name}" if place else str(name)
            raise _wrong(inside, given[name], f"is no known field; {hint} {', '.join(known)}")
    return {name: one for name, one in given.items() if one is not None}


def _wrong(place: str, value: object, said: str) -> ConfigError:
    text = repr(value)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
    return ConfigError(f"context_management{': ' if place else ''}{place}={shown} {said}")
