"""Ray Serve on this machine: two replicas of the real application, and a Redis of the tests'.

These tests need an environment with Ray; ``make test-ray`` makes one and runs them there.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("KVBOOST_TEST_RAY") else ["test_*.py"]
