"""The rows of ``kvboost quality``, one a question, and the files that keep them."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvboost import ConfigError

EXACT = "exact"
DONORS = {
    "alone": "each passage read by itself",
    "header": "each passage read after the chat template's header",
    "other": "each passage read after the header and a passage of another question",
    "reordered": "all passages read in one earlier request, in another order",
    "contexts": "each passage read after the header, and after three passages of another question",
    "idle": "each passage read after the header, and in idle time after three of the others",
    "edit": "all passages read after one more line near the front",
    "cleared": "all passages read with one more in the middle, which was cleared since",
    "dropped": "all passages read after two more at the front, which were dropped since",
    "tools": "all passages read with the first two in the other order",
    "added": "all passages but the second, which was added since",
    "compacted": "all passages but the first, which stands for a summary, read after four others",
    "session": "earlier turns with moved text: each adds a passage and changes a line at the front",
    "healed": "the same, and idle time heals after every turn",
    EXACT: "the same prompt read before: exact hits",
}
"""How passages were read before, by the donor kind."""
DEFAULT_KEPT = "16 bits"
NOISE = "noise"
"""The donor kind of the noise floor."""
NOISE_KINDS = ("bfloat16", "two shapes")
"""Full prefill in bfloat16 against float32; and in bfloat16 in slices against in one piece."""
QUESTIONS = "questions"
"""The task whose answers are short."""


@dataclass(frozen=True)
class LongAnswer:
    """A long answer beside full prefill's own."""

    task: str
    likeness: float
    """1 if it is the same text."""
    no_passages_likeness: float
    """Of the answer without passages."""
    parses: bool | None = None
    """Whether it is a function; None if it is no code."""
    full_parses: bool | None = None
    passes: bool | None = None
    """Whether the function does what was asked for; None if nothing can tell."""
    full_passes: bool | None = None


@dataclass(frozen=True)
class Row:
    """One question, served in one way."""

    question: str
    donor: str
    strategy: str
    ratio: float
    kl: float
    """Mean over the answer's tokens."""
    top1: float
    """The share of the answer's tokens that stay the likeliest."""
    first_difference: int | None
    """The first token that does not; None if the greedy answer is the same text."""
    f1: float | None
    """None of a long answer."""
    full_f1: float | None
    ttft_ratio: float
    """Time until the answer's logits were there, as a share of full prefill's."""
    charged_share: float
    kept: str = DEFAULT_KEPT
    hit_rate: float = 0.0
    """Share of the prompt's rows that were not computed."""
    bytes_per_token: float = 0.0
    charged_flops: float = 0.0
    """The cost of repair, as a share of the arithmetic of computing all moved rows."""
    kl_by_token: tuple[float, ...] = ()
    no_context_f1: float | None = None
    """Of the answer without passages."""
    no_context_kl: float | None = None
    """Of the distributions without passages, over the same answer."""
    long: LongAnswer | None = None
    """None of a question."""
    ttft_ms: float = 0.0
    """Time until the answer's logits were there. This and the rest is 0 in older files."""
    recomputed_layer_tokens: int = 0
    """Of the passages; see ``PayloadCost``."""
    dense_layer_tokens: int = 0
    kv_bytes: int = 0

    @property
    def cell(self) -> tuple[str, str, str, float]:
        """The facts that rows of a table have in common."""
        return self.donor, self.kept, self.strategy, self.ratio

    @property
    def key(self) -> tuple[str, str, str, str, float]:
        return self.question, *self.cell

    @property
    def task(self) -> str:
        return QUESTIONS if self.long is None else self.long.task


def append_rows(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """Adds rows to a file of JSON lines, to be shown again or together with others."""
    with Path(path).open("a") as file:
        file.write("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def load_rows(paths: Sequence[str | os.PathLike[str]]) -> list[Row]:
    """The rows of all files, each once. A path may be a pattern such as ``rows-*.jsonl``."""
    rows: dict[tuple[str, str, str, str, float], Row] = {}
    for path in _files(paths):
        try:
            for line in Path(path).read_text().splitlines():
                read = json.loads(line)
                read["kl_by_token"] = tuple(read.get("kl_by_token", ()))
                if read.get("long") is not None:
                    read["long"] = LongAnswer(**read["long"])
                row = Row(**read)
                rows[row.key] = row
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} holds no rows that --save wrote: {error}") from error
    return list(rows.values())


def _files(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    found = []
    for path in paths:
        name = os.fspath(path)
        matching = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not matching:
            raise ConfigError(f"load={name!r} matches no file; give files that --save wrote")
        found += matching
    return found


def saved_rows(path: str | None) -> list[Row]:
    """The rows that an interrupted run has left in its file. A last line that was cut off is
    removed."""
    if path is None or not Path(path).exists():
        return []
    text = Path(path).read_text()
    if text and not text.endswith("\n"):
        Path(path).write_text(text[: text.rfind("\n") + 1])
    return load_rows([path])
