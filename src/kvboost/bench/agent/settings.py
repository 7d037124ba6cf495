"""The options of ``kvboost bench agent``: of made-up sessions and of recorded ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from kvboost.bench.kit.benchmark import ROUNDS, option
from kvboost.bench.kit.benchmark import Settings as Base
from kvboost.bench.peers.servers import OURS, RIVAL, SYSTEMS
from kvboost.bench.serve.run import DEVICE, PYTHON_OF_VLLM
from kvboost.bench.texts.agent import LAYOUTS, SCRIPT
from kvboost.config import DEFAULT_MODEL
from kvboost.errors import ConfigError

LEAST_TURNS = 2
MADE_UP = (OURS, RIVAL)
"""The servers of made-up sessions, if none is named."""
_OF_TRACES = ("sessions", "kinds", "at_once", "most_tokens", "checked", "reuse_moved")
_OF_MADE_UP = ("layouts", "turns", "tool_seconds", "rounds")


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    QUICK: ClassVar = {"turns": 6, "rounds": 1, "tool_seconds": 0.2, "systems": (OURS,)}

    model: str = option(DEFAULT_MODEL, "A bundled name or a folder.")
    device: str = option("cpu", DEVICE, choices=("cpu", "cuda"))
    trace: str | None = option(
        None,
        "Replay the sessions recorded in this file instead of made-up ones: JSON lines (.gz too), "
        "each a request with agent (its kind), session and input (the whole prompt). Every prompt "
        "is sent as it was recorded, whatever a server answers.",
    )
    sessions: int | None = option(
        None, "With --trace: so many sessions, spread over the kinds; all if not given.", least=1
    )
    kinds: tuple[str, ...] = option(
        (), "With --trace: only sessions of this kind; all if not given.", "kind"
    )
    at_once: int = option(1, "With --trace: sessions that run at the same time.", least=1)
    most_tokens: int | None = option(
        None,
        "With --trace: requests with more tokens are left out; as many as the model's context "
        "holds if not given.",
        least=1,
    )
    checked: int = option(
        0,
        "With --trace: so many turns that can reuse moved text are also asked without reuse, to "
        "compare the first token's distribution and the action of 64 tokens.",
        least=0,
    )
    reuse_moved: str = option(
        "when_faster",
        "With --trace: whether kvboost also moves text where computing it would be faster.",
        choices=("when_faster", "always"),
    )
    vllm: str | None = option(None, PYTHON_OF_VLLM)
    systems: tuple[str, ...] = option(
        (),
        "Server to measure. If none is named: kvboost and vllm; with --trace all that are set up "
        "here, but not kvboost-baseline.",
        "system",
        choices=tuple(SYSTEMS),
    )
    threads: int | None = option(
        None, "Threads of every server; fewer than cores on a machine that is busy.", least=1
    )
    layouts: tuple[str, ...] = option(
        LAYOUTS, "Where results and files go.", "layout", choices=LAYOUTS
    )
    turns: int = option(20, "Turns of a session.", least=LEAST_TURNS, most=2 * len(SCRIPT))
    tool_seconds: float = option(1.0, "How long a tool runs between two turns.", least=0.0)
    rounds: int = option(1, ROUNDS, least=1, most=50)
    minutes: float = option(
        10.0,
        "Sessions end early rather than take longer than this all together; with --trace no "
        "session begins later.",
        least=0.0,
    )
    seed: int = option(
        0, "Decides what the files and results say; with --trace, which turns are checked."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong, form = (
            (_OF_TRACES, "needs") if self.trace is None else (_OF_MADE_UP, "has no use in")
        )
        for field in fields(self):
            usual = (field.default, self.QUICK.get(field.name, field.default))
            value = getattr(self, field.name)
            if field.name in wrong and value not in usual:
                flag = (field.metadata["option"].flag or field.name).replace("_", "-")
                told = "leave it out" if self.trace else "name a file of recorded sessions"
                raise ConfigError(f"--{flag} {form} a replay (--trace FILE); {told}")
