"""gpt-oss in MXFP4, as its folder holds it: random blocks and scales."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.tiny import save_tiny

Stored = dict[str, torch.Tensor]


def random_blocks(
    experts: int, outputs: int, inputs: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of the weights of one product, from all codes and several scales."""
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(117, 123, shape, dtype=torch.uint8, generator=generator)


def save_mxfp4(folder: Path, **changes: object) -> Stored:
    """Writes a tiny model and returns its tensors."""
    save_tiny(folder, "gpt_oss", **changes)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {}
    for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks, scales = random_blocks(experts, outputs, inputs, seed)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return stored


def numbers_in(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 ``[..., inputs]``, written out as the format defines them."""
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([positive, -positive])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (numbers[codes] * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)
