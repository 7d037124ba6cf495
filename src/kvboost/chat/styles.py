"""How a model writes calls of tools and reasoning, as its chat template shows."""

from __future__ import annotations

from dataclasses import dataclass

THINK, THOUGHT = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class CallStyle:
    """A call is a JSON object with ``name`` and the key ``arguments``, between ``opens`` and
    ``closes``. If these are empty, the answer begins with the object."""

    opens: str = "<tool_call>"
    closes: str = "</tool_call>"
    arguments: str = "arguments"

    @property
    def before(self) -> str:
        """The text before a call."""
        return f"{self.opens}\n" if self.opens else ""

    @property
    def after(self) -> str:
        return f"\n{self.closes}" if self.closes else ""

    @property
    def between(self) -> str:
        """The text between two calls."""
        return "\n" if self.opens else "; "


TAGGED = CallStyle()
"""Qwen 2, 2.5 and 3, SmolLM, Hermes, and models whose template knows no tools."""
BARE = CallStyle("", "", "parameters")
"""Llama 3.1 to 3.3. It may write ``PYTHON_TAG`` first."""


@dataclass(frozen=True)
class ChatStyle:
    calls: CallStyle = TAGGED
    thinks: bool = False
    """Whether answers may begin with reasoning between ``<think>`` and ``</think>``."""
    names_parameters: bool = False
    """Whether calls are written as XML instead, ``<function=name><parameter=key>value``, as Qwen 3
    Coder and Qwen 3.5 do."""

    @classmethod
    def of(cls, template: str | None) -> ChatStyle:
        """The style of a model with this chat template."""
        if template is None:
            return cls()
        is_bare = PYTHON_TAG in template or "Environment: ipython" in template
        return cls(
            BARE if is_bare and TAGGED.opens not in template else TAGGED,
            THOUGHT in template,
            "<function=" in template,
        )
