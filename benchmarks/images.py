"""The second question about an image, and an image that has moved, with a random SmolVLM.

Figures are the times to the first token of the first and the second question about an image, and of
a question about the same image after another text: by a full prefill and by reusing moved rows,
with the KL between their distributions. The model is random, so the KL says little about quality;
the times are those of the arithmetic.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import ROUNDS, Bench, Report, option
from kvboost.bench.kit.tables import ms, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

TILE = 256
LONG = "The report of the museum says that pictures are lent to schools for a week at most. " * 3


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"rounds": 1, "layers": 4}

    rounds: int = option(5, ROUNDS, least=1, most=50)
    layers: int = option(16, "Layers of the model.", least=1)
    width: int = option(576, "Its width, a multiple of 192.", least=192)


def make_engine(layers: int, width: int) -> Any:
    """An engine over a random model of the structure of SmolVLM, with tiles of 64 rows."""
    import transformers

    from kvboost import KVBoost
    from support.vision_models import FIRST_TOKEN, VOCAB, vision_tokenizer

    torch.manual_seed(0)
    vision = transformers.SmolVLMVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=TILE,
        patch_size=16,
    )
    text = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 192,
        max_position_embeddings=8192,
        eos_token_id=256,
    )
    config = transformers.SmolVLMConfig(
        vision_config=vision,
        text_config=text,
        scale_factor=2,
        image_token_id=FIRST_TOKEN,
        pad_token_id=256,
    )
    model = transformers.SmolVLMForConditionalGeneration(config).eval()
    processor = transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
    )
    return KVBoost.from_model(
        model,
        vision_tokenizer("smolvlm"),
        image_processor=processor,
        speculate="off",
        reuse_moved="always",
        heal="off",
    )


def first_token_ms(engine: Any, messages: Any, mode: str = "chunk_kv_reuse") -> float:
    return float(engine.generate(messages, 1, mode).ttft_ms)


def kl(engine: Any, messages: Any) -> float:
    """Of the first token's distributions, by a full prefill and over moved rows."""
    full, moved = (
        torch.log_softmax(engine.score(messages, [65], mode).logits[0].double(), -1)
        for mode in ("baseline", "chunk_kv_reuse")
    )
    return float((full.exp() * (full - moved)).sum())


def run(settings: Settings, bench: Bench) -> Report:
    from support.vision_models import about, file_of, picture

    bench.describe("cpu", torch.float32)
    engine = make_engine(settings.layers, settings.width)
    found: dict[str, list[float]] = {name: [] for name in ("first", "second", "full", "moved")}
    divergences = []
    first_token_ms(engine, about(file_of(picture(0, 512, 512)), "What is this?"))  # not measured
    for seed in range(1, settings.rounds + 1):
        image = file_of(picture(seed, 512, 512))
        found["first"].append(first_token_ms(engine, about(image, "What is this?")))
        found["second"].append(first_token_ms(engine, about(image, "Which of them is red?")))
        after = about(image, f"What is this? {seed}", LONG)
        divergences.append(kl(engine, after))
        found["full"].append(first_token_ms(engine, after, "baseline"))
        found["moved"].append(first_token_ms(engine, after))
    tokens = len(engine.encode(about(image, "What is this?")))
    engine.close()
    times = {name: median(some) for name, some in found.items()}
    ratio, moved_ratio = times["second"] / times["first"], times["moved"] / times["full"]
    rows = [
        ("another question ÷ the first", ms(times["second"]), ms(times["first"]), f"{ratio:.3f}"),
        ("moved ÷ all rows computed", ms(times["moved"]), ms(times["full"]), f"{moved_ratio:.3f}"),
    ]
    title = f"an image of 512 x 512 pixels in a prompt of {tokens} tokens: first token"
    figures = {"ratio": ratio, "moved_ratio": moved_ratio, "kl": median(divergences)}
    return Report({"ms": times, **figures}, [table(title, ("",), ("ms", "÷ ms", "ratio"), rows)])
