"""Our own kernels in C, compiled on the machine where they first run."""

from kvboost.model.native.build import describe, is_available, library, why_not

__all__ = ["describe", "is_available", "library", "why_not"]
