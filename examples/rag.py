"""RAG: passages and a question. In a fixed order passages are reused exactly, in any other moved.

Passages at the beginning of the prompt, in the same order as before, are exact hits: the answer is
that of a full prefill. The runner measures this (mode prefix_cache). Its last prompt reverses the
passages, so that the table also shows what exact reuse alone cannot do.

A retriever returns other passages for each question, or the same ones in another order. For that,
read them in advance with ``warm`` and ask in the default mode: KVBoost moves them to their new
places and repairs them a little. ``main`` shows it. If the order does not matter to you,
``engine.arrange`` finds the order with the longest exact hit.
"""

from __future__ import annotations

import copy
import fnmatch
import heapq
import inspect
import sched
from collections.abc import Callable, Sequence
from types import ModuleType

from kvboost import KVBoost

Messages = list[dict[str, str]]

PASSAGES = (heapq, sched, copy, fnmatch)
"""Modules whose documentation the questions are about. The order is part of the prompt: sort
passages by something that does not depend on the question, such as their name or age."""

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
    """Puts every question to ``ask(title, prompt)``, and the last one again with the passages in
    another order."""
    for question in QUESTIONS:
        ask(question, messages(question))
    ask("the same, passages reversed", messages(QUESTIONS[-1], PASSAGES[::-1]))


def main() -> None:
    """The same without the runner, with the passages in another order for every question."""
    with KVBoost.from_pretrained("smollm2-135m") as engine:
        engine.warm([inspect.getdoc(module) or "" for module in PASSAGES])
        for number, question in enumerate(QUESTIONS):
            order = PASSAGES[number:] + PASSAGES[:number]
            result = engine.chat(messages(question, order), 24)
            print(f"{question}\n  {result.output_text}")
            print(
                f"  {result.exact_tokens} tokens exact, {result.moved_tokens} moved, "
                f"{result.recomputed_tokens} of those recomputed; {result.ttft_ms:.0f} ms\n"
            )
            for note in result.reuse.notes:
                print(f"  note: {note}")


if __name__ == "__main__":
    main()
