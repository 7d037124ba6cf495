"""Random adapters in PEFT's files, and models with such an adapter merged into their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from kvboost import KVBoost, StockModel
from kvboost.model.adapters.adapter import AppliedAdapter
from kvboost.model.adapters.files import read_adapter
from kvboost.model.execution.segment import Segment
from support.tiny import DEVICE

QV = ("q_proj", "v_proj")
LINEARS = (*QV, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    targets: Iterable[str] = LINEARS,
    rank: int = 4,
    tensors: Mapping[str, torch.Tensor] | None = None,
    loudness: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter of all modules whose names end with one of ``targets``. Both factors are random,
    so it changes every answer. ``tensors`` are written beside its own. ``dtype``: of the file."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            own = (config.get("rank_pattern") or {}).get(name.rpartition(".")[2], rank)
            out, width = module.weight.shape
            if type(module).__name__ == "Conv1D":  # of GPT-2
                out, width = width, out
            for side, shape in (("A", (own, width)), ("B", (out, own))):
                random = loudness * torch.randn(shape, generator=generator)
                found[f"base_model.model.{name}.lora_{side}.weight"] = random.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**found, **(tensors or {})}, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    described["target_modules"] = sorted(targets)
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Adds an adapter to the weights of ``model``, by its definition."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    alphas: Mapping[str, float] = config.get("alpha_pattern") or {}
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." not in name:
                continue
            path = name.removeprefix("base_model.model.").partition(".lora_A")[0]
            alpha = alphas.get(path.rpartition(".")[2], config["lora_alpha"])
            rank = len(down)
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            module = model.get_submodule(path)
            delta = scale * tensors[name.replace("_A.", "_B.")] @ down
            module.weight += (delta if isinstance(module, nn.Linear) else delta.T).to(DEVICE)
    return model


def check_merged(engine: KVBoost, stock: StockModel, folder: Path, targets: Iterable[str]) -> None:
    """Raises unless an adapter gives what its weights give merged. Changes ``stock``."""
    forward, ids = engine.model.forward, torch.arange(3, 15)
    written = write_adapter(folder, forward.model, targets=targets)
    adapter = forward.load_adapter(read_adapter(written))
    with engine.runtime.pool.lend(32) as kv:
        kv.adapter = AppliedAdapter(adapter)
        adapted = forward([Segment(kv, ids, range(12), 12)])
    merge(stock.model, folder)
    torch.testing.assert_close(adapted, stock.logits(ids.tolist()), atol=1e-3, rtol=0)
