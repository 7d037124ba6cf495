"""How engines do on known text at other places, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from kvboost.bench.interior.measure import Row
from kvboost.bench.interior.prompts import PLACES
from kvboost.bench.peers.engines import OURS
from kvboost.bench.report import spread


def show(
    console: Console, rows: Sequence[Row], best: Mapping[str, tuple[str, float]], planned: int
) -> None:
    """``planned``: the rounds of the run, if there was time for all."""
    console.print("", interior_table(rows))
    console.print(
        "ms to the first token, median [lowest-highest]; reused: known tokens that were not "
        "computed, – where the engine does not tell.\nkvboost's moved text is repaired, not exact "
        "(kvboost quality says how close); all else is exact, or as exact as its engine.",
        style="dim",
        highlight=False,
        markup=False,
    )
    for place, (name, ratio) in best.items():
        console.print(f"{place}: {ratio:.1f} × the best other ({name})", highlight=False)
    for engine in dict.fromkeys(row.engine for row in rows):
        counted = min(row.rounds for row in rows if row.engine == engine)
        if counted < planned:
            said = f"{engine} was too slow for {planned} rounds; {counted} counted"
            console.print(said, style="yellow", highlight=False)


def interior_table(rows: Sequence[Row]) -> Table:
    """A block of engines per place."""
    table = Table(
        title=f"documents that were read before, about {max(row.num_tokens for row in rows):,} "
        "tokens",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold underline",
    )
    for heading in ("place", "engine"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "reused", "× ours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place in PLACES:
        here = [row for row in rows if row.place == place]
        ours = next((row.ttft.median_ms for row in here if row.engine == OURS), None)
        for at, row in enumerate(here):
            share = "–" if row.reused_share is None else f"{row.reused_share:.0%}"
            times = "" if ours is None else f"{row.ttft.median_ms / ours:.1f}"
            name = "" if at else place
            table.add_row(name, row.engine, spread(row.ttft), share, times)
    return table
