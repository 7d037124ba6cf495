"""Keys rotated as the shift rotates them."""

from __future__ import annotations

import torch

from kvboost.reuse.rope import Rotation


def rotated(
    rotation: Rotation,
    keys: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    *,
    back: bool = False,
) -> torch.Tensor:
    """``keys``, ``[..., positions, dim]``, rotated to their positions, or ``back`` from there."""
    cos, sin = rotation.spread(cos_sin, keys.shape[-1])
    return keys * cos + rotation.quarter_turn(keys) * (-sin if back else sin)
