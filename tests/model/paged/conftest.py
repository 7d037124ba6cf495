from __future__ import annotations

import pytest

from kvboost.model import triton
from kvboost.model.paged.slab import SCRATCH, Slab

if not triton.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages hold NaN until rows are written, as memory that was used before may."""
    init = Slab.__init__

    def poisoned(self: Slab, *args: object, **options: object) -> None:
        init(self, *args, **options)  # type: ignore[arg-type]
        self.data[:, SCRATCH + 1 :] = float("nan")

    monkeypatch.setattr(Slab, "__init__", poisoned)
