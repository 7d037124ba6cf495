"""Chatbot: one long system prompt, many users with one question each.

Every request begins with the same instructions, and only the question at the end is new. The model
reads the instructions once; after that, each user waits for their own question only.

What makes it work: nothing before or inside the instructions changes. A user's name or today's date
in the first line would make every prompt different from its first tokens on. Put such things into
the user's message.
"""

from __future__ import annotations

from collections.abc import Callable

from kvboost import GenerationMode, KVBoost

Messages = list[dict[str, str]]

SYSTEM = """\
You are the help desk of a town library. Answer in one or two short sentences, in plain words.
Answer from the rules below. If they do not say, tell the reader to ask at the desk. Never guess
a fee, a date or a phone number.

Opening. The library is open from nine in the morning until seven in the evening on weekdays, and
from ten until four on Saturdays. It is closed on Sundays and public holidays. The reading room
on the first floor closes fifteen minutes before the rest of the house. The return box beside the
entrance is open day and night; what is put in before nine counts as returned the day before.

Cards. Anyone who lives, works or studies in the town may have a card. Bring a passport or an
identity card and something that shows your address, such as a bill. The card is free for
children, pupils and students, and costs twelve pounds a year for everyone else. A lost card is
replaced for three pounds. Children under twelve need the signature of a parent.

Borrowing. A card holds up to twenty items at a time. Books may be kept for four weeks, films and
music for one week, and games for two weeks. Reference books, newspapers and the maps in the
local history room stay in the house. A loan may be renewed twice, at the desk, by phone or on
the website, unless someone else has reserved the item. Reserving costs nothing. A reserved item
waits at the desk for seven days.

Late and lost. Each day late costs twenty pence for each item, and never more than five pounds
for one item. Children pay no late fees. Whoever loses or damages an item pays what a new copy
costs, or brings a new copy of the same edition. Nobody can borrow while more than ten pounds are
owed.

Rooms and machines. Two study rooms for up to six people can be booked for two hours a day, with
a card, up to a fortnight ahead. Eight computers stand on the ground floor; an hour a day is free
with a card. Printing costs ten pence a page in black and thirty pence in colour. Scanning to a
memory stick is free. Drinks with a lid are allowed everywhere but in the local history room;
food is allowed in the entrance hall only.

Help. On Tuesday afternoons a volunteer helps with phones and forms; no appointment is needed.
The story hour for children under six is on Wednesdays at half past three. Readers who cannot
come to the library may ask for the home visit service, which brings books once a month.
"""

QUESTIONS = (
    "How long may I keep a film?",
    "What do I need to bring to get a card?",
    "Can I return a book on a Sunday night?",
    "How much is a page printed in colour?",
    "When is the story hour for children?",
)


def messages(question: str) -> Messages:
    """The prompt of one user: the part that never changes comes first."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def ask_all(ask: Callable[[str, Messages], str]) -> None:
    """Puts every question to ``ask(title, prompt)``; users do not see each other's answers."""
    for question in QUESTIONS:
        ask(question, messages(question))


def main() -> None:
    """The same without the runner. ``warm`` reads the instructions when the service starts, so that
    the first user does not have to wait for them either."""
    with KVBoost.from_pretrained("smollm2-135m") as engine:
        engine.warm([{"role": "system", "content": SYSTEM}])
        for question in QUESTIONS:
            result = engine.chat(messages(question), 24, GenerationMode.PREFIX_CACHE)
            print(f"{question}\n  {result.output_text}")
            print(f"  {result.kv_reuse_ratio:.0%} reused, {result.ttft_ms:.0f} ms\n")


if __name__ == "__main__":
    main()
