"""Our own kernels in C, compiled on the machine where they first run."""

from kvboost.model.native.build import any_library, describe, is_available, library, why_not

__all__ = ["any_library", "describe", "is_available", "library", "why_not"]
