"""Limits of the images in a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageLimits:
    """What a prompt may bring."""

    max_images: int = 32
    max_bytes: int = 20 * 1024**2
    """Of the file of one image."""
    max_pixels: int = 24_000_000
    """Of one image, before it is scaled down."""
