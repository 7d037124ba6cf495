"""Code: one source file, asked about several times.

An editor's assistant gets the open file with every question. The file is long and the questions are
short. The model reads the file once; each question after the first costs only its own tokens.

What makes it work: the file comes before the question. After an edit the lines above it are still
cached, and the lines below it are computed again. That is cheap for an edit at the end of the file,
as in the last prompt here; for an edit in the first line it is nearly the whole file.

The file is not called ``code.py`` because the standard library has a module of that name, which
``pdb`` imports.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable

from kvboost import GenerationMode, KVBoost

Messages = list[dict[str, str]]

SOURCE = inspect.getsource(bisect)

QUESTIONS = (
    "What does insort_left do when x is already in the list?",
    "What does bisect_left return?",
    "What is the argument key for?",
    "Why is there an import at the end of the file?",
)


def messages(question: str, source: str = SOURCE) -> Messages:
    """The prompt for one question: first the file, then the question."""
    content = f"Here is a Python file.\n\n{source}\nAnswer in one sentence. {question}"
    return [{"role": "user", "content": content}]


def edited() -> str:
    """The file after an edit at its end, as the assistant sees it a minute later."""
    return f"{SOURCE}\n\ndef contains(a, x):\n    return a[bisect_left(a, x)] == x\n"


def ask_all(ask: Callable[[str, Messages], str]) -> None:
    """Puts every question to ``ask(title, prompt)``, and one more after an edit of the file."""
    for question in QUESTIONS:
        ask(question, messages(question))
    question = "Is the function contains right?"
    ask(f"{question} (file edited)", messages(question, edited()))


def main() -> None:
    """The same without the runner. The spans of a result say which tokens of the prompt were reused
    and which were computed."""
    with KVBoost.from_pretrained("smollm2-135m") as engine:
        for question in QUESTIONS:
            result = engine.chat(messages(question), 24, GenerationMode.PREFIX_CACHE)
            print(f"{question}\n  {result.output_text}")
            computed = sum(span.num_tokens for span in result.spans if span.kind == "compute")
            print(f"  {computed} of {result.prompt_tokens} tokens read, {result.ttft_ms:.0f} ms\n")


if __name__ == "__main__":
    main()
