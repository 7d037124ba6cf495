"""A model of which some layers see a window only: Gemma 3's architecture, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GraniteSWAConfig, GraniteSWAForCausalLM
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvboost.integrations.vllm.options import Options
from kvboost.integrations.vllm.support import why_nothing
from support.planting import chunk_files
from support.tiny import byte_tokenizer, save_tiny
from support.vllm_engines import PAGE, Engine, Texts, here, talk_together

WINDOW, CHUNK = 64, 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"head_dim": 32, "query_pre_attn_scalar": 32, "max_position_embeddings": 2048}
    save_tiny(folder, "gemma3_text", sliding_window=WINDOW, **sizes)
    return folder


def windows(_: object) -> list[int | None]:
    return [layer.sliding_window for layer in here().open_pages.layers]


def test_with_the_hybrid_manager_exact_text_is_reused(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start({"disk_cache_dir": str(tmp_path), "chunk_size": CHUNK})
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    assert len(groups) > 1
    texts = Texts(byte_tokenizer())
    ids = texts.prompt(0, 1, 2)
    full = engine.full(ids)
    first = engine.ask(ids)
    engine.fresh()
    again = engine.ask(ids)
    assert again.usage is not None and again.usage["exact_tokens"] == again.cached > 600
    assert again.tokens == full.tokens == first.tokens and again.difference(full) < 1e-4
    # The next turn of a conversation, and another question about the same text.
    for prompt, least in (
        ([*ids, *first.tokens, *texts.question], len(ids) - 32),
        ([*texts.prompt(0, 1)[: -len(texts.question)], *texts.question[::-1]], 320),
    ):
        expected = engine.full(prompt)
        turn = engine.ask(prompt)
        assert turn.usage is not None and turn.usage["exact_tokens"] >= least
        assert turn.tokens == expected.tokens and turn.difference(expected) < 1e-4
    # A long answer: its rows leave the window one by one.
    long = engine.full(ids, tokens=400)
    engine.ask(ids, tokens=400)
    prompt = [*ids, *long.tokens, *texts.question]
    expected = engine.full(prompt)
    turn = engine.ask(prompt)
    assert turn.usage is not None and turn.usage["exact_tokens"] >= len(ids) + 360
    assert turn.tokens == expected.tokens and turn.difference(expected) < 1e-4
    assert turn.cached == turn.usage["exact_tokens"]


def test_without_the_hybrid_manager_moved_text_is_reused_too(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True}
    engine = start({"disk_cache_dir": str(tmp_path)}, **options)
    assert {None, WINDOW} == set(engine.llm.collective_rpc(windows)[0])
    assert engine.connector.planner.is_open and engine.connector.planner.moves
    texts = Texts(byte_tokenizer())
    ids = texts.prompt(0, 1, 2)
    full = engine.full(ids)
    longer = engine.full([*ids, *full.tokens, *texts.question])
    first = engine.ask(ids)
    engine.fresh()
    again = engine.ask(ids)
    assert again.usage is not None and again.usage["exact_tokens"] == again.cached > 600
    assert again.tokens == full.tokens and again.difference(full) < 1e-4
    engine.fresh()
    turn = engine.ask([*ids, *first.tokens, *texts.question], "exact")
    assert turn.usage is not None and turn.usage["exact_tokens"] >= len(ids) - 32
    assert turn.tokens == longer.tokens and turn.difference(longer) < 1e-4
    engine.fresh()
    other = texts.prompt(2, 1, 0)
    expected = engine.full(other)
    moved = engine.ask(other)
    assert moved.usage is not None and moved.usage["moved_tokens"] > 400
    assert 0 < moved.usage["recomputed_tokens"] < 0.4 * moved.usage["moved_tokens"]
    engine.empty()
    engine.ask(ids)
    engine.fresh()
    repaired = engine.ask(other, {"ratio": 1.0})
    assert repaired.usage is not None and repaired.usage["moved_tokens"] > 400
    assert repaired.tokens == expected.tokens and repaired.difference(expected) < 1e-4
    engine = start({"disk_cache_dir": str(tmp_path)}, **options)
    again = engine.ask(ids)
    assert again.usage is not None and again.usage["exact_tokens"] == again.cached > 600
    assert again.tokens == full.tokens and again.difference(full) < 1e-4


@pytest.mark.parametrize("third", [1e4, 0.0])
def test_a_later_layer_without_positions_keeps_text_where_it_is(
    third: float, start: Callable[..., Engine], tmp_path: Path
) -> None:
    """Beside sinks, which also make rows of one token differ."""
    torch.manual_seed(0)
    config = GraniteSWAConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
        layer_rope_theta=[1e4, 1e4, third, 1e4],
        attention_multiplier=0.18,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    made = GraniteSWAForCausalLM(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(4) if weight.ndim > 1 else weight.add_(torch.rand_like(weight) / 2)
    made.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = start({}, folder=tmp_path, disable_hybrid_kv_cache_manager=True)
    assert engine.connector.planner.is_open
    assert engine.connector.planner.moves == bool(third)


def test_requests_that_run_together_keep_their_own_rows(start: Callable[..., Engine]) -> None:
    """Each reads in slices, and pages that leave the window of one are another's at once."""
    options = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 128,
    }
    engine = start({"chunk_size": CHUNK}, **options)
    talk_together(engine, Texts(byte_tokenizer()), least=100)


def test_a_model_of_windowed_layers_only_reuses_exact_text(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    sizes = {"head_dim": 32, "max_position_embeddings": 2048}
    folder = save_tiny(tmp_path, "mistral", sliding_window=WINDOW, **sizes)
    engine = start({"chunk_size": CHUNK}, folder=folder, max_model_len=1024)
    (group,) = engine.scheduler.kv_cache_config.kv_cache_groups
    assert isinstance(group.kv_cache_spec, SlidingWindowSpec)
    texts = Texts(byte_tokenizer())
    ids = texts.prompt(0, 1)
    first = engine.ask(ids, tokens=150)
    prompt = [*ids, *first.tokens, *texts.question]
    expected = engine.full(prompt)
    turn = engine.ask(prompt)
    assert turn.usage is not None and turn.usage["exact_tokens"] >= len(ids) + 100
    assert turn.tokens == expected.tokens and turn.difference(expected) < 1e-4


def test_a_lost_chunk_is_computed(start: Callable[..., Engine], tmp_path: Path) -> None:
    options = {"disk_cache_dir": str(tmp_path), "chunk_size": CHUNK, "max_cache_bytes": 0}
    ids = Texts(byte_tokenizer()).prompt(0, 1)
    engine = start(options)
    full = engine.ask(ids)
    engine = start(options)  # the folder is read at the start
    for path in chunk_files(tmp_path)[:2]:
        path.write_bytes(b"damaged")
    again = engine.ask(ids)
    assert again.cached == 0 and again.tokens == full.tokens and again.difference(full) < 1e-4
    assert engine.connector.tally.totals()["loads"] == {"loaded": 0, "failed": 1}
    engine.fresh()
    assert engine.ask(ids).tokens == full.tokens


def reason(
    *specs: KVCacheSpec,
    speculative: object = None,
    extra: dict[str, Any] | None = None,
    **cache: Any,
) -> str | None:
    """Why nothing is reused of a model with such groups."""
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        model_config=SimpleNamespace(use_mla=False),
        cache_config=SimpleNamespace(block_size=PAGE, **{"mamba_cache_mode": "align"} | cache),
        speculative_config=speculative,
    )
    return why_nothing(config, Options.parse(extra or {}), KVCacheConfig(1, [], groups))


def full(block_size: int = PAGE) -> KVCacheSpec:
    sizes = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(block_size=block_size, **sizes)


def window(block_size: int = PAGE) -> KVCacheSpec:
    sizes = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return SlidingWindowSpec(block_size=block_size, sliding_window=WINDOW, **sizes)


def test_groups_that_cannot_be_served_are_declined_with_a_remedy() -> None:
    assert reason(full()) is reason(full(), window()) is reason(window()) is None
    for declined in (reason(full(), window(2 * PAGE)), reason(full(), window(), speculative=1)):
        assert "--disable-hybrid-kv-cache-manager" in (declined or "")
    assert reason(full(), speculative=1) is None


def mamba(block_size: int = PAGE) -> KVCacheSpec:
    return MambaSpec(block_size=block_size, shapes=((8, 8),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("specs", "more", "said"),
    [
        ((full(), mamba()), {"mamba_cache_mode": "none"}, "--enable-prefix-caching"),
        ((full(), mamba()), {"mamba_cache_mode": "all"}, "--mamba-cache-mode all"),
        ((full(), mamba()), {"speculative": 1}, "speculative decoding"),
        ((full(), mamba()), {"use_replayssm": True}, "--use-replayssm"),
        ((full(), mamba()), {"prefix_match_unit": 16}, "--prefix-match-unit"),
        ((full(), mamba()), {"extra": {"remote_cache_url": "redis://a"}}, "remote_cache_url"),
        ((full(), window(), mamba()), {}, "SlidingWindowSpec"),
        ((full(), mamba(2 * PAGE)), {}, "--mamba-block-size"),
        ((mamba(),), {}, "states only"),
    ],
)
def test_states_that_cannot_be_served_are_declined(
    specs: tuple[KVCacheSpec, ...], more: dict[str, Any], said: str
) -> None:
    assert said in (reason(*specs, **more) or "")


def test_states_at_ends_of_pages_are_served() -> None:
    assert reason(full(), mamba()) is reason(mamba(), mamba(), full()) is None
