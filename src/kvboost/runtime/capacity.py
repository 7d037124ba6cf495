"""Whether there is memory for the KV of a request, in pages, in a buffer or far away."""

from __future__ import annotations

from kvboost.config import GenerationMode
from kvboost.errors import KVTooLargeError
from kvboost.runtime.job import Job
from kvboost.runtime.request import Request
from kvboost.runtime.runtime import Runtime


def check_size(runtime: Runtime, request: Request) -> None:
    """Raises ``KVTooLargeError`` if a request could not even run alone."""
    rows = runtime.rows_for(request, batched=True)
    needed = rows * runtime.model.forward.shape.row_bytes
    far = runtime.pool.far
    if far is not None and far.takes(rows):
        far.check(rows)
    elif needed > runtime.max_kv_bytes:
        raise KVTooLargeError(rows, needed, runtime.max_kv_bytes)


def has_room(runtime: Runtime, job: Job) -> bool:
    """Whether the KV of one more request fits beside that of those that run."""
    running, request = runtime.running, job.state.request
    shared = 0
    if job.mode is GenerationMode.PREFIX_CACHE:  # other modes may reuse moved text instead
        shared = running.num_shared(request, job.root)
    rows = runtime.rows_for(request, batched=True)
    far = runtime.pool.far
    if far is not None and far.takes(rows) and not far.has_room(rows):
        return False
    rows -= shared
    return running.nbytes()[0] + runtime.pool.bytes_for(rows) <= runtime.max_kv_bytes
