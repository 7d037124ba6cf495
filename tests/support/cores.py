"""How many cores a test may use."""

from __future__ import annotations

import os


def cores_per_worker() -> int:
    """All of them, or this worker's part where pytest-xdist runs several."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, (os.cpu_count() or 1) // workers)
