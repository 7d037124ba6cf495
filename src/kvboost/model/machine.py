"""What the machine has."""

from __future__ import annotations

import os


def memory_bytes() -> int:
    """The memory of this machine; 0 if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
