"""Few-shot: many worked examples, and the new case at the end.

The examples teach the model the task, and they are the same for every case. The model reads them
once; after that, each case costs only its own line.

What makes it work: the examples and their order are fixed. If you pick the examples that resemble
the case, the prompt changes near its beginning, and most of it is computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvboost import GenerationMode, KVBoost

TASK = "Messages to a railway company, each with its topic: refund, lost, times, access or thanks."

EXAMPLES = (
    ("My train was cancelled and I would like the money for my ticket back.", "refund"),
    ("I left a green umbrella on the seat by the door this morning.", "lost"),
    ("Does the last train to the coast still leave at ten past eleven?", "times"),
    ("Is there a lift at the new station, or only the stairs?", "access"),
    ("The guard on the night train was kind to my mother. Please tell him.", "thanks"),
    ("I was charged twice for the same journey on Friday.", "refund"),
    ("Which trains run on the second of January?", "times"),
    ("Has anybody handed in a child's red shoe?", "lost"),
    ("I use a wheelchair and need the ramp at both ends of my journey.", "access"),
    ("We arrived two hours late and missed the concert. What do we get back?", "refund"),
    ("What a clean carriage, and on a Monday too. Well done.", "thanks"),
    ("My laptop bag is still above seat forty in coach C.", "lost"),
    ("How long do I have to change trains at the junction?", "times"),
    ("I bought a return ticket but travelled only one way.", "refund"),
    ("May my guide dog travel with me in the sleeping car?", "access"),
    ("A black suitcase with a yellow ribbon was not there when I got off.", "lost"),
    ("Thank you for holding the connection for us last night.", "thanks"),
    ("Is the six o'clock train earlier during the summer?", "times"),
    ("The announcements cannot be heard with my hearing aid.", "access"),
    ("The heating was broken all the way. I want part of the fare back.", "refund"),
    ("Your driver waited for an old man who was running. That was lovely.", "thanks"),
    ("I think my keys fell between the seats on the way to the airport.", "lost"),
    ("When does the ticket office open on Sundays?", "times"),
    ("Where on the platform do I wait for the coach with the wide doors?", "access"),
    ("I paid for first class and had to stand.", "refund"),
    ("The new timetable is so much easier to read. I am grateful.", "thanks"),
    ("Somebody took my blue coat and left a similar one.", "lost"),
    ("Do trains run every hour after the evening rush?", "times"),
    ("Can a helper meet me at the taxi rank? I am blind.", "access"),
    ("The card machine failed but the amount was still taken.", "refund"),
)

CASES = (
    "I must have dropped my glasses in the dining car.",
    "Is there a train back after midnight on Saturday?",
    "My ticket was never scanned because the train did not come.",
    "Please pass on my thanks to the woman who found my seat.",
    "Is the gap too wide for a pram at the old platform?",
)


def prompt(case: str) -> str:
    """Plain text rather than chat: the model continues the list. The prompt ends without a space,
    because the token of a word usually begins with one."""
    examples = "\n\n".join(f"Message: {message}\nTopic: {topic}" for message, topic in EXAMPLES)
    return f"{TASK}\n\n{examples}\n\nMessage: {case}\nTopic:"


def ask_all(ask: Callable[[str, str], str]) -> None:
    """Puts every case to ``ask(title, prompt)``."""
    for case in CASES:
        ask(case, prompt(case))


def main() -> None:
    """The same without the runner. ``stop`` ends the answer at the end of its line; otherwise the
    model would continue with another message."""
    with KVBoost.from_pretrained("smollm2-135m") as engine:
        for case in CASES:
            result = engine.generate(prompt(case), 24, GenerationMode.PREFIX_CACHE, stop="\n")
            print(f"{case}\n  {result.output_text.strip()}")
            print(f"  {result.kv_reuse_ratio:.0%} reused, {result.ttft_ms:.0f} ms\n")


if __name__ == "__main__":
    main()
