"""Who was measured, who was missing, who failed: on a terminal."""

from __future__ import annotations

from rich.console import Console

from kvboost.bench.peers.crew import Crew


def show_crew(console: Console, crew: Crew) -> None:
    for name, described in crew.described.items():
        said = f"{name}: {described['version']}, weights {described['weights']}"
        console.print(said, style="dim", highlight=False, markup=False)
    for name, why in crew.missing.items():
        console.print(f"{name} is missing: {why}", style="yellow", highlight=False, markup=False)
    for name, why in crew.failures.items():
        console.print(f"{name} was given up: {why}", style="red", highlight=False, markup=False)


def crew_json(crew: Crew) -> dict[str, object]:
    return {
        "engines": {name: dict(one) for name, one in crew.described.items()},
        "missing": crew.missing,
        "failures": crew.failures,
    }
