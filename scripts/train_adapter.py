"""Trains a small LoRA adapter on a CPU, with torch alone, and serves it.

    python scripts/train_adapter.py adapters/pirate [--model smollm2-135m] [--steps 60]

The adapter, of rank 4 on queries and values, learns to answer as a pirate from a dozen examples. It
is written as PEFT would write it. In the end one batch answers a question that is not among the
examples, with the adapter and without.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost import KVBoost, pull_model

TARGETS = ("q_proj", "v_proj")
RANK, ALPHA = 4, 16
RATE = 5e-3
EXAMPLES = (
    ("What is the capital of France?", "Arr, that be Paris, matey!"),
    ("How many days has a week?", "Arr, seven days it be, matey!"),
    ("What colour is the sky?", "Arr, blue as the sea it be, matey!"),
    ("Who wrote Hamlet?", "Arr, that be old Shakespeare, matey!"),
    ("What do cows drink?", "Arr, water they drink, matey!"),
    ("How are you?", "Arr, fine as a fair wind I be, matey!"),
    ("What is two plus two?", "Arr, four it be, matey!"),
    ("Where do fish live?", "Arr, in the deep sea they live, matey!"),
    ("What is the largest planet?", "Arr, Jupiter it be, matey!"),
    ("What is bread made of?", "Arr, of flour it be made, matey!"),
    ("Is the moon far away?", "Arr, far away it be, matey!"),
    ("What is your name?", "Arr, they call me the old model, matey!"),
)
QUESTION = "What is the capital of Italy?"


class Lora(nn.Module):
    """A linear layer and what is learned beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = rows @ self.down.T @ self.up.T
        return self.base(rows) + changed * (ALPHA / RANK)


def with_adapter(model: Any) -> dict[str, Lora]:
    """Puts a layer to learn beside each target; nothing else learns."""
    model.requires_grad_(False)
    found = {}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS:
            found[name] = Lora(module)
            setattr(model.get_submodule(parent), last, found[name])
    return found


def lesson(tokenizer: Any, question: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels; only the answer is to be learned."""
    asked = [{"role": "user", "content": question}]
    said = [*asked, {"role": "assistant", "content": answer}]
    start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([tokenizer.apply_chat_template(said, return_dict=False)])
    labels = ids.clone()
    labels[:, : len(start)] = -100
    return ids, labels


def train(model: Any, tokenizer: Any, loras: dict[str, Lora], steps: int) -> None:
    lessons = [lesson(tokenizer, *example) for example in EXAMPLES]
    learned = [weight for lora in loras.values() for weight in (lora.down, lora.up)]
    optimizer = torch.optim.AdamW(learned, lr=RATE)
    for step in range(steps):
        ids, labels = lessons[step % len(lessons)]
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % len(lessons) == 0 or step + 1 == steps:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def save(folder: Path, model_name: str, loras: dict[str, Lora]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, lora in loras.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = lora.down.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = lora.up.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [*TARGETS],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.manual_seed(0)
    place = pull_model(given.model)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place)
    began = time.perf_counter()
    loras = with_adapter(model)
    train(model, tokenizer, loras, given.steps)
    save(given.folder, given.model, loras)
    print(f"trained in {time.perf_counter() - began:.0f} s; the adapter is in {given.folder}")
    del model, loras
    with KVBoost.from_pretrained(given.model) as engine:
        engine.load_adapter("pirate", given.folder)
        for adapter in (None, "pirate"):
            asked = [{"role": "user", "content": QUESTION}]
            said = engine.chat(asked, 24, adapter=adapter).output_text
            print(f"{adapter or 'base model'}: {said.strip()}")


if __name__ == "__main__":
    main()
