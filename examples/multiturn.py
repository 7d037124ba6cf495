"""Multi-turn: a growing conversation, sent as a whole with every turn.

A chat model keeps no memory between calls, so each turn sends everything that was said before.
Without reuse a turn costs the whole conversation. With reuse it costs only the new message: the
earlier turns are cached, and so are the model's own answers, from the moment they are written.

What makes it work: append, never rewrite. Dropping or summarizing old turns changes the beginning,
and everything after the change is computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvboost import GenerationMode, KVBoost

Messages = list[dict[str, str]]

SYSTEM = "You help people to write letters. Answer in one or two short sentences."

DRAFT = """\
Dear neighbours,

As many of you know, the old pear tree in the courtyard lost a large branch in the storm of last
week. Nobody was hurt, but the branch came down where the children of number four usually play,
and it took part of the fence with it. The gardener has looked at the tree since. She says that
it is about ninety years old, that the trunk is sound, and that it can be saved if the crown is
made smaller before the winter. Cutting it down would be cheaper, and she could do that too.

I would like to keep the tree. It gives shade to the whole south side in summer, it feeds more
birds than all our feeders together, and some of us still make jam from the pears. But I know
that not everybody sees it like this. The fruit draws wasps in September, the leaves block the
gutter of number six every autumn, and the work costs four hundred and eighty pounds, which is
more than the courtyard fund holds at the moment. Each flat would have to add about thirty.

So I suggest that we meet on the first Thursday of next month, at seven in the evening, in the
laundry room, and decide together. Whoever cannot come may leave a note in my letter box, number
two, until the day before. Please also say whether you could help with mending the fence; we have
the boards already and would need four people for one Saturday morning.

With kind regards,
Ruth
"""

TURNS = (
    f"Here is a letter to my neighbours.\n\n{DRAFT}\nWhat is it about?",
    "Is it friendly enough?",
    "Which sentence would you leave out?",
    "Write a subject line for it.",
    "And how should I remind them the day before?",
)


def ask_all(ask: Callable[[str, Messages], str]) -> None:
    """Holds the conversation. ``ask(title, prompt)`` returns the answer, which becomes part of the
    next prompt word for word."""
    messages = [{"role": "system", "content": SYSTEM}]
    for number, turn in enumerate(TURNS, start=1):
        messages.append({"role": "user", "content": turn})
        answer = ask(f"{number}. {turn.splitlines()[-1]}", messages)
        messages.append({"role": "assistant", "content": answer})


def main() -> None:
    """The same without the runner. ``stream`` shows the answer while the model writes it."""
    with KVBoost.from_pretrained("smollm2-135m") as engine:

        def ask(title: str, messages: Messages) -> str:
            print(title, end="\n  ")
            stream = engine.stream(messages, 24, GenerationMode.PREFIX_CACHE)
            for piece in stream:
                print(piece, end="", flush=True)
            result = stream.result
            print(f"\n  {result.kv_reuse_ratio:.0%} reused, {result.ttft_ms:.0f} ms\n")
            return result.output_text

        ask_all(ask)


if __name__ == "__main__":
    main()
