"""A fingerprint of a loaded model: what its KV depends on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_VOLATILE = (
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "_commit_hash",
    "distributed_config",
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: torch.nn.Module, config: Any, **more: Any) -> str:
    """Identifies config, weights, dtype, RoPE parameters and adapters of ``model``, and whatever
    ``more`` its KV depends on.

    It covers the name, shape, dtype, sum of bits and a sample of the values of each tensor, so an
    adapter, another revision or a single edited row gives another fingerprint. A model that is
    split over several ranks has the fingerprint of the whole model; all ranks must ask for it.
    """
    digest = hashlib.blake2b(digest_size=16)
    described = {name: one for name, one in config.to_dict().items() if name not in _VOLATILE}
    given = [described, more] if more else described
    digest.update(json.dumps(given, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = _whole(tensor.detach()).reshape(-1)
        if flat.numel():
            bits = flat.view(_BITS.get(flat.element_size(), torch.uint8))
            total = int(bits.sum(dtype=torch.int64))
            sample = bits[:: max(1, len(bits) // 64)].tolist()
            digest.update(f"{total}{sample}".encode())
    return digest.hexdigest()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which every rank has a part, put together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
