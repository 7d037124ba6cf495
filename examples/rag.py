"""RAG: passages first, in a fixed order, and the question after them.

Only exact prefix reuse exists so far: text is reused when it is the same from the first token
on. So the passages stand at the front, always in the same order, and the question comes last.
This fits a small handbook that goes into every prompt, or several questions about the same
search results.

It does not yet help a retriever that returns other passages, or the same ones in another order,
for each question: everything from the first difference on is read again. The last prompt here
asks with the passages reversed, so that the table shows this too.
"""

from __future__ import annotations

import copy
import fnmatch
import heapq
import inspect
import sched
from collections.abc import Callable, Sequence
from types import ModuleType

from kvboost import GenerationMode, KVBoost

Messages = list[dict[str, str]]

PASSAGES = (heapq, sched, copy, fnmatch)
"""Modules whose documentation the questions are about. The order is part of the prompt: sort
passages by something that does not depend on the question, such as their name or their age."""

QUESTIONS = (
    "Which element of a heap is always the smallest?",
    "What does a deep copy do with the objects it finds?",
    "Which pattern matches every single character?",
    "Which two functions does a scheduler need?",
)


def messages(question: str, passages: Sequence[ModuleType] = PASSAGES) -> Messages:
    """The prompt for one question: instructions, passages, and only then the question."""
    texts = "\n\n".join(f"[{module.__name__}]\n{inspect.getdoc(module)}" for module in passages)
    content = f"Answer from these passages in one sentence.\n\n{texts}\n\nQuestion: {question}"
    return [{"role": "user", "content": content}]


def ask_all(ask: Callable[[str, Messages], str]) -> None:
    """Puts every question to ``ask(title, prompt)``, and the last one once more with the
    passages in another order."""
    for question in QUESTIONS:
        ask(question, messages(question))
    ask("the same, passages reversed", messages(QUESTIONS[-1], PASSAGES[::-1]))


def main() -> None:
    """The same without the runner. ``plan`` says what a prompt would reuse and runs nothing."""
    with KVBoost.from_pretrained("smollm2-135m") as engine:
        for question in QUESTIONS:
            result = engine.chat(messages(question), 24, GenerationMode.PREFIX_CACHE)
            print(f"{question}\n  {result.output_text}")
            print(f"  {result.kv_reuse_ratio:.0%} reused, {result.ttft_ms:.0f} ms\n")
        for title, passages in (("as before", PASSAGES), ("reversed", PASSAGES[::-1])):
            plan = engine.plan(messages("And why?", passages), GenerationMode.PREFIX_CACHE)
            print(f"with the passages {title}, {plan.kv_reuse_ratio:.0%} would be reused")


if __name__ == "__main__":
    main()
