"""A fingerprint of the weights that a worker holds."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: torch.nn.Module, config: Any, **more: Any) -> str:
    """Identifies a loaded model: its config, every tensor's name, shape, dtype and sum of bits, a
    sample of its values, and whatever else the KV depends on."""
    digest = hashlib.blake2b(digest_size=16)
    described = {name: value for name, value in config.to_dict().items() if not _is_volatile(name)}
    digest.update(json.dumps([described, more], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1)
            bits = flat.view(_INTS.get(flat.element_size(), torch.uint8))
            sample = bits[:: max(1, len(bits) // 64)].tolist()
            digest.update(f"{int(bits.sum(dtype=torch.int64))}{sample}".encode())
    return digest.hexdigest()


def _is_volatile(name: str) -> bool:
    return name in ("_name_or_path", "transformers_version", "_commit_hash")
