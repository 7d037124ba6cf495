from __future__ import annotations

from kvboost.model import triton

if not triton.is_available():
    collect_ignore_glob = ["test_*.py"]
