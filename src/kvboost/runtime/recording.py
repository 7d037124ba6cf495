"""Recording CUDA graphs when an engine starts, so that its first requests do not wait for them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvboost.model.paged.pool import PagedPool
from kvboost.progress import Progress
from kvboost.runtime.runtime import Runtime

log = logging.getLogger("kvboost")

TAILS = (64, 128, 256, 512)
"""Rows after a known beginning."""
REPAIRED = (256, 512, 1280)
"""Rows of a repair: those of moved prompts of about 2,000 to 8,000 tokens."""

Part = tuple[int, Callable[[], object]]
"""How many rows a graph has, and what records it."""


def record_graphs(runtime: Runtime, max_running: int) -> int:
    """Records decode steps of up to ``max_running`` requests, those with drafts, the usual rows
    after known text, and what moved text takes, until half of the memory for graphs is used; other
    sizes are recorded when they are first needed. Returns how many graphs there are."""
    if not isinstance(runtime.pool, PagedPool):
        return 0
    runtime.pool.prepare()
    steps = runtime.model.forward.steps
    if steps is None or not steps.capture.has_room:
        return 0
    parts = _parts(runtime, max_running)
    with (
        Progress("recording CUDA graphs", only_on_terminal=True) as progress,
        progress.step("steps, prompts and repairs", total=len(parts)) as step,
    ):
        # The largest first: the others then fit into its memory.
        for rows, record in sorted(parts, key=lambda part: -part[0]):
            if not steps.capture.has_room:
                break
            try:
                runtime.model.forward.exclusively(record)
            except Exception as error:  # the request that needs it will tell
                log.warning("no graph of %d rows was recorded at the start: %s", rows, error)
            step.advance()
    return steps.capture.num_graphs


def _parts(runtime: Runtime, max_running: int) -> list[Part]:
    from kvboost.model.paged.draft_steps import SIZES
    from kvboost.model.paged.steps import bucket_of
    from kvboost.reuse.paged.forwards import PROBES, REPAIRS, ROWS

    steps, forwards = runtime.model.forward.steps, runtime.forwards
    assert steps is not None and forwards is not None
    sizes = {bucket_of(requests) for requests in range(1, max_running + 1)}
    parts: list[Part] = [(size, lambda size=size: steps.record(size)) for size in sizes]  # type: ignore[misc]
    if runtime.drafts:
        parts += [(size, lambda size=size: steps.drafts.record(size)) for size in SIZES]  # type: ignore[misc]
    wanted = {(ROWS, rows) for rows in TAILS}
    if runtime.rotation is not None:
        parts.append((steps.beside_rows + 1, lambda: steps.record(1, with_beside=True)))
        parts.append((0, forwards.compile_kernels))
        wanted |= {(REPAIRS, rows) for rows in REPAIRED} | {(PROBES, 0)}
    made = {(kind, forwards.size_for(kind, rows)) for kind, rows in wanted}
    for kind, size in made:
        if size <= forwards.most_rows:
            parts.append((size, lambda kind=kind, size=size: forwards.record(kind, size)))  # type: ignore[misc]
    return parts
