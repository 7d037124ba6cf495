"""Latent attention: rows that are keys and values of all heads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.shapes import config_of
from kvboost import GenerationMode, SpanKind, StockModel, UnsupportedModelError
from kvboost.errors import AdapterError, ConfigError
from kvboost.model.adapters.adapter import AppliedAdapter
from kvboost.model.adapters.files import read_adapter
from kvboost.model.execution import latent
from kvboost.model.execution.caches import ShapeProbe, observe
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.latent import LatentAttention, latent_layers
from kvboost.model.execution.segment import Segment
from kvboost.model.loading.compat import ARCHITECTURES
from kvboost.model.loading.parallel import check_split
from kvboost.model.quantized.layers import BlockProduct, QuantizedLinear
from kvboost.model.quantized.weight import QuantizedWeight
from kvboost.reuse.repair import STRATEGIES
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift, Spans
from support.adapters import merge, write_adapter
from support.families import FAMILIES, HAS_LATENTS, family_model
from support.tiny import make_engine

pytestmark = pytest.mark.skipif(not HAS_LATENTS, reason="needs transformers 5.22")
BASELINE, EXACT, MOVED = GenerationMode
CLOSE = {"atol": 1e-3, "rtol": 0}
NAMES = ("deepseek_v2", "deepseek_v3", "minicpm3")
"""Neighbouring channels; YaRN and experts; halves."""


@pytest.fixture(params=[False, True], ids=["absorbed", "expanded"])
def one_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All attention in one form."""
    monkeypatch.setattr(LatentAttention, "expands", lambda *_: request.param)


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed))


def forward_of(model: Any) -> Forward:
    return Forward(model, packed=True, latent=True)


def lite(**changes: Any) -> Any:
    """One small layer with the heads of DeepSeek-V2-Lite."""
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 260}
    return config_of("deepseek-v2-lite", **{**small, **changes})


@pytest.mark.usefixtures("one_form")
@pytest.mark.parametrize("name", NAMES)
def test_both_forms_equal_the_models_own_attention(name: str) -> None:
    """Prompts, what follows them, rows with gaps, single rows and rows that others share."""
    model = family_model(name)
    stock = StockModel(copy.deepcopy(model))
    forward = forward_of(model)
    prompts = [ids_of(length, length) for length in (40, 7, 33, 36)]
    prompts[3][:30] = prompts[0][:30]
    kvs = [RequestKV(forward.shape, 64) for _ in prompts]
    forward([Segment(kvs[0], prompts[0][:35], range(35), 0)])
    forward([Segment(kvs[2], prompts[2], range(33), 0)])
    gaps = torch.tensor([3, 10, 11, 30, 32])
    kvs[3].attach_prefix(kvs[0].share(30))
    packed = forward(
        [
            Segment(kvs[0], prompts[0][35:], range(35, 40), 5),
            Segment(kvs[1], prompts[1], range(7)),
            Segment(kvs[2], prompts[2][gaps], gaps),
            Segment(kvs[3], prompts[3][30:], range(30, 36)),
        ]
    )
    of_each = [stock.logits(prompt.tolist()) for prompt in prompts]
    expected = torch.cat([of_each[0][-5:], *(some[-1:] for some in of_each[1:])])
    torch.testing.assert_close(packed, expected, **CLOSE)
    token = int(packed[4].argmax())
    following = forward([Segment(kvs[0], torch.tensor([token]), range(40, 41))])
    logits = stock.logits([*prompts[0].tolist(), token])[-1:]
    torch.testing.assert_close(following, logits, **CLOSE)


def test_heads_are_expanded_in_groups_where_all_would_take_too_much_memory(monkeypatch) -> None:
    monkeypatch.setattr(latent, "MOST_EXPANDED", 3 * 40 * 2 * 20)  # 40 rows of three heads of four
    model = family_model("deepseek_v3")
    stock, ids = StockModel(copy.deepcopy(model)), ids_of(40)
    forward = forward_of(model)
    found = forward([Segment(RequestKV(forward.shape, 64), ids, range(40), 40)])
    torch.testing.assert_close(found, stock.logits(ids.tolist()), **CLOSE)


def test_rows_that_may_not_be_seen_are_hidden_in_both_forms(monkeypatch) -> None:
    """Of a prompt whose rows are not all computed yet, in 16 bits, on torch's grid."""
    forward = forward_of(family_model("deepseek_v3").bfloat16())
    kv = RequestKV(forward.shape, 256)
    forward([Segment(kv, ids_of(90), range(90), 0)])
    absent = torch.zeros(90, dtype=torch.bool)
    absent[20:60] = True
    found = []
    for expanded in (False, True):
        monkeypatch.setattr(LatentAttention, "expands", lambda *_, given=expanded: given)
        for hidden in (absent, None):
            found.append(forward([Segment(kv, ids_of(90)[70:], range(70, 90), 20, absent=hidden)]))
    hiding, seeing = (found[0], found[2]), (found[1], found[3])
    for pair in (hiding, seeing):
        torch.testing.assert_close(*pair, atol=0.1 * float(pair[0].abs().max()), rtol=0)
    assert (hiding[0] - seeing[0]).abs().max() > 0.3 * hiding[0].abs().max()


def test_the_form_with_less_arithmetic_is_taken() -> None:
    layer = latent_layers(_on_meta(lite()))[0]
    for rows, keys, expanded in (
        (1, 1, True),
        (1, 100, False),
        (1, 100_000, False),
        (64, 8192, False),
        (512, 8192, True),
        (8192, 8192, True),
    ):
        assert layer.expands(rows, keys) is expanded, (rows, keys)


def _on_meta(config: Any) -> Any:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config)


def test_rows_take_an_eighth_of_expanded_keys_and_values_or_less() -> None:
    import transformers

    config = lite()
    shape = observe(transformers.DeepseekV2ForCausalLM(config), latent=True).shape
    assert shape == KVShape(1, 1, 576, torch.float32, torch.device("cpu"), sides=1)
    heads, plain = config.num_attention_heads, config.qk_nope_head_dim
    expanded = heads * (plain + config.qk_rope_head_dim + config.v_head_dim) * 4
    assert shape.row_bytes * 8 <= expanded
    assert 27 * shape.row_bytes // 2 == 31_104, "bytes per token of DeepSeek-V2-Lite in 16 bits"


def test_chunks_on_disk_survive_a_restart_in_full_precision(tmp_path: Path) -> None:
    ids = ids_of(80).tolist()
    options = {"disk_cache_dir": tmp_path / "kv", "kv_cache_bits": 8}
    with make_engine(family_model("deepseek_v3"), **options) as engine:
        expected = engine.generate(ids, 6, BASELINE, ignore_eos=True).token_ids
        engine.warm(ids)
        assert any("kv_cache_bits=8 has no effect" in note for note in engine.notes)
        assert engine.facts()["kv_cache_bits"] == 16
    with make_engine(family_model("deepseek_v3"), **options) as engine:
        answer = engine.generate(ids, 6, EXACT, ignore_eos=True)
        assert answer.token_ids == expected
        assert answer.cached_tokens >= 64
        scored = engine.score(ids, [1, 2, 3], EXACT)
    stock = StockModel(family_model("deepseek_v3"))
    torch.testing.assert_close(scored.logits, stock.logits([*ids, 1, 2, 3])[79:-1], **CLOSE)


def test_moved_text_with_some_rows_recomputed_is_closer_than_with_none() -> None:
    """The shift corrects latents and rotated parts."""
    model = family_model("deepseek_v2")
    stock = StockModel(copy.deepcopy(model))
    passages = [ids_of(48, seed).tolist() for seed in (1, 2, 3)]
    question = ids_of(24, 4).tolist()
    prompt = [*passages[2], *passages[0], *passages[1], *question]
    expected = stock.logits([*prompt, 0])[len(prompt) - 1 : -1].log_softmax(-1)
    found = {}
    with make_engine(model) as engine:
        engine.warm([token for passage in passages for token in passage])
        for ratio in (0.0, 0.5, 1.0):
            scored = engine.score(
                prompt, [0], MOVED, recompute_strategy="query", recompute_ratio=ratio
            )
            spans = scored.reuse.spans
            assert sum(s.num_tokens for s in spans if s.kind is SpanKind.MOVED) >= 96
            given = scored.logits.log_softmax(-1)
            found[ratio] = float((expected.exp() * (expected - given)).sum())
    assert found[1.0] < 1e-5 < found[0.5] < found[0.0]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_repairs_rows_of_latents(strategy: str) -> None:
    """Both probes see them: of attention, and of how far rows deviate."""
    with make_engine(family_model("deepseek_v3")) as engine:
        first, second, question = (ids_of(48, seed).tolist() for seed in (1, 2, 3))
        engine.warm([*first, *second])
        prompt = [*second, *first, *question[:24]]
        options = {"recompute_strategy": strategy, "recompute_ratio": 0.5}
        answer = engine.generate(prompt, 2, MOVED, reuse_moved="always", **options)
        assert answer.moved_tokens >= 48
        assert (answer.recomputed_tokens > 0) == (strategy != "none")


def test_the_shift_changes_a_row_once() -> None:
    """Though it is key and value."""
    generator = torch.Generator().manual_seed(0)
    stale, fresh = torch.randn(2, 1, 1, 1, 64, 12, generator=generator).unbind(0)
    rotation = Rotation(torch.tensor([[0.3, 0.1]] * 2))
    positions = torch.arange(8, 40, 3)
    shifted = {}
    for sides in (1, 2):
        shape = KVShape(2, 1, 12, torch.float32, torch.device("cpu"), sides)
        kv = RequestKV(shape, 64)
        with kv.filling(0, 64) as rows:
            rows.copy_(stale)
        shift = Shift(rotation, positions, Spans.of([range(8, 40)], 64))
        shift.kv = kv
        given = fresh[0, 0, :, positions].transpose(0, 1)
        shift.on_fresh(1, given, given)
        shifted[sides] = kv.rows(0, 64)[0]
    assert not torch.equal(shifted[1], stale[0].expand_as(shifted[1]))
    torch.testing.assert_close(shifted[1], shifted[2])


def test_the_model_is_given_back_as_it_was() -> None:
    model = family_model("minicpm3")
    expected = StockModel(copy.deepcopy(model)).logits([5, 6, 7])
    modules = [one for one in model.modules() if hasattr(one, "expand_kv")]
    with make_engine(model) as first, make_engine(model) as second:
        answers = [each.generate([5, 6, 7], 3, BASELINE).token_ids for each in (first, second)]
        first.close()
        assert not any("expand_kv" in vars(module) for module in modules)
        assert second.generate([5, 6, 7], 3, BASELINE).token_ids == answers[0] == answers[1]
    assert not any({"expand_kv", "kvboost_attention"} & set(vars(one)) for one in modules)
    torch.testing.assert_close(model(torch.tensor([[5, 6, 7]])).logits[0], expected)


@pytest.mark.usefixtures("one_form")
def test_an_adapter_of_the_expansion_equals_merged_weights(tmp_path: Path) -> None:
    """Beside a request without it."""
    model = family_model("deepseek_v3")
    files = read_adapter(write_adapter(tmp_path, model, targets=("kv_b_proj", "q_b_proj")))
    stock = StockModel(copy.deepcopy(model))
    merged = StockModel(merge(copy.deepcopy(model), tmp_path))
    forward = forward_of(model)
    adapter = forward.load_adapter(files)
    ids = ids_of(30)
    plain, adapted = (RequestKV(forward.shape, 64) for _ in range(2))
    adapted.adapter = AppliedAdapter(adapter)
    for rows in (range(20), range(20, 29), range(29, 30)):
        some = ids[rows.start : rows.stop]
        found = forward([Segment(kv, some, rows, len(rows)) for kv in (plain, adapted)])
        for given, reference in zip(found.split(len(rows)), (stock, merged), strict=True):
            logits = reference.logits(ids[: rows.stop].tolist())[rows.start :]
            torch.testing.assert_close(given, logits, **CLOSE)


def test_an_adapter_that_begins_within_a_prompt_may_not_change_the_expansion(
    tmp_path: Path,
) -> None:
    forward = forward_of(family_model("deepseek_v3"))
    for targets in (("q_b_proj",), ("kv_b_proj",)):
        folder = write_adapter(tmp_path / targets[0], forward.model, targets=targets)
        config = folder / "adapter_config.json"
        written = json.loads(config.read_text()) | {"alora_invocation_tokens": [1, 2]}
        config.write_text(json.dumps(written))
    forward.load_adapter(read_adapter(tmp_path / "q_b_proj"))
    with pytest.raises(AdapterError, match="latents would be expanded by two weights"):
        forward.load_adapter(read_adapter(tmp_path / "kv_b_proj"))


@pytest.mark.usefixtures("one_form")
def test_a_quantised_expansion_gives_what_its_numbers_give() -> None:
    model = family_model("deepseek_v3", {**FAMILIES["deepseek_v3"], "kv_lora_rank": 32})
    for module in [one for one in model.modules() if hasattr(one, "expand_kv")]:
        shape = module.kv_b_proj.weight.shape
        codes = torch.randint(-100, 100, shape, dtype=torch.int8)
        weight = QuantizedWeight(codes, torch.full((shape[0], 1), 0.01), None, 8, 32)
        with torch.no_grad():
            module.kv_b_proj.weight.copy_(weight.dequantized())
        module.quantised = weight
    stock = StockModel(copy.deepcopy(model))
    for module in [one for one in model.modules() if hasattr(one, "expand_kv")]:
        weight = module.quantised
        product = BlockProduct(weight)
        module.kv_b_proj = QuantizedLinear(weight.shape, product, has_bias=False, digest="")
    forward, ids = forward_of(model), ids_of(30)
    kv = RequestKV(forward.shape, 64)
    found = [forward([Segment(kv, ids[a:b], range(a, b), b - a)]) for a, b in ((0, 20), (20, 30))]
    torch.testing.assert_close(torch.cat(found), stock.logits(ids.tolist()), **CLOSE)


def test_what_is_not_possible_is_refused(tmp_path: Path) -> None:
    model = family_model("deepseek_v3")
    with pytest.raises(ConfigError, match="keeps latents, which are small and stay near"):
        make_engine(model, far_kv_bytes=1 << 20)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="keeps latents, which all heads share"):
        check_split(tmp_path / "model", 2, strict=True)
    with pytest.raises(UnsupportedModelError, match="keeps expanded keys and values in this ver"):
        latent_layers(nn.Linear(1, 1))
    with pytest.raises(UnsupportedModelError, match="layer 3 keeps expanded keys and values"):
        ShapeProbe(latent=True).update(torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 6), 3)


def test_every_family_with_latents_is_in_the_table() -> None:
    latent = {name for name, one in ARCHITECTURES.items() if one.latent}
    assert latent == {name for name, options in FAMILIES.items() if "kv_lora_rank" in options} | {
        "kimi_k25"
    }
