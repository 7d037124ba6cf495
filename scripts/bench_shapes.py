"""Time to first token of model shapes without weights: random ones are as slow as real ones.

    python scripts/bench_shapes.py qwen2.5-3b qwen2.5-7b --tokens 1024 --tokens 8192

Meant for a GPU; a 3B shape on a CPU takes minutes per round.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvboost import EngineConfig, KVBoost, StockModel
from kvboost.bench.kit.machine import describe
from kvboost.bench.speed.ttft import report
from kvboost.bench.speed.ttft.patterns import measure_decode, measure_ttft

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny import byte_tokenizer

SHAPES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4),
}


def random_model(shape: str, device: str) -> Qwen2ForCausalLM:
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=65_536,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def main(
    shapes: Annotated[list[str], typer.Argument(help=", ".join(SHAPES))],
    tokens: Annotated[list[int] | None, typer.Option(help="Prompt lengths.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Medians are over this many.")] = 5,
    device: Annotated[str, typer.Option(help="cuda, cpu or mps.")] = "cuda",
) -> None:
    """Random weights in real shapes, against stock transformers; JSON on the last line."""
    console = Console()
    lengths = tokens or [1024, 8192, 32_768]
    results: dict[str, object] = {}
    for shape in shapes:
        if shape not in SHAPES:
            raise typer.BadParameter(f"{shape!r} is unknown; there are {', '.join(SHAPES)}")
        model = random_model(shape, device)
        stock = StockModel(copy.deepcopy(model))
        config = EngineConfig(max_cache_bytes=20 * 1024**3)
        with KVBoost.from_model(model, byte_tokenizer(), config=config) as engine:
            results["machine"] = describe(engine.device, engine.dtype)
            rows = [measure_ttft(engine, stock, "rag", n, 32, rounds) for n in lengths]
            decode = measure_decode(engine, stock, min(8192, max(lengths)), rounds)
        console.print(shape, report.ttft_table(rows), report.decode_table(decode))
        results[shape] = {
            "rows": [row.as_json() for row in rows],
            "decode": decode.as_json(),
        }
        del model, stock, engine
        if device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(results))


if __name__ == "__main__":
    typer.run(main)
