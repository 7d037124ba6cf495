"""Experts that stay in MXFP4, against the same numbers written out and against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import moe
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvboost import KVBoost, StockModel
from kvboost.errors import ModelError
from kvboost.model import triton
from kvboost.model.execution.experts import NAME, Experts, mixed
from kvboost.model.loading.experts import idle_weights
from kvboost.model.loading.fingerprint import fingerprint
from kvboost.model.loading.load import read
from kvboost.model.quantized.layers import num_weights, packed_identity, weights_of
from kvboost.model.quantized.mxfp4 import Mxfp4Weight
from kvboost.model.quantized.source import find_filled
from kvboost.model.streaming.parking import Parking
from kvboost.model.streaming.place import place
from kvboost.model.streaming.plan import DeviceBudget
from support.adapters import QV, check_merged
from support.late_slots import LateSlots
from support.mxfp4 import numbers_in, random_blocks, save_mxfp4
from support.tiny import DEVICE

CPU = torch.device("cpu")


@pytest.mark.parametrize("inputs", [32, 96, 128, 160, 256])
def test_a_weight_has_the_numbers_of_its_blocks(inputs: int) -> None:
    blocks, scales = random_blocks(3, 24, inputs)
    weight = Mxfp4Weight.of(blocks, scales, CPU)
    assert weight.shape == (3, 24, inputs) and weight.num_experts == 3
    expected = numbers_in(blocks, scales)
    assert torch.equal(weight.expanded(torch.float32), expected)
    of_transformers = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(weight.expanded(torch.bfloat16).transpose(1, 2), of_transformers)


def test_a_weight_takes_four_bits_and_a_quarter() -> None:
    blocks, scales = random_blocks(2, 8, 256)
    assert Mxfp4Weight.of(blocks, scales, CPU).nbytes == blocks.nbytes + scales.nbytes


@pytest.mark.parametrize("octet", [0, 1, 127, 128])
def test_any_scale_that_kernels_can_apply_is_kept(octet: int) -> None:
    blocks, scales = random_blocks(1, 4, 32)
    scales[0, 2] = octet
    weight = Mxfp4Weight.of(blocks, scales, CPU)
    assert torch.equal(weight.expanded(torch.float32), numbers_in(blocks, scales))


def test_a_larger_scale_is_refused() -> None:
    blocks, scales = random_blocks(1, 4, 32)
    scales[0, 2] = 130
    with pytest.raises(ModelError, match=r"2\*\*3, and weights stay packed up to 2\*\*1"):
        Mxfp4Weight.of(blocks, scales, CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("gpt-oss")
    save_mxfp4(place)
    return place


def read_in(folder: Path, form: str, dtype: str = "float32", device: str = "cpu") -> Any:
    return read(folder, strict=True, device=device, dtype=dtype, weight_form=form)[0]


def expanded(folder: Path, dtype: str = "float32") -> Any:
    with pytest.warns(UserWarning, match=f"MXFP4 weights are expanded to {dtype}"):
        return read_in(folder, "plain", dtype)


def experts_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers]


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(2, 16, device=model.device)[None]).logits
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_model_is_the_expanded_one(folder: Path, dtype: str) -> None:
    packed, plain = read_in(folder, "packed", dtype), expanded(folder, dtype)
    names = dict(packed.named_parameters())
    others = {name: each for name, each in plain.named_parameters() if name in names}
    assert len(dict(plain.named_parameters())) - len(others) == 2 * len(experts_of(packed))
    assert all(torch.equal(names[name], other) for name, other in others.items())
    assert all(names[name].dtype == other.dtype for name, other in others.items())
    for ours, theirs in zip(experts_of(packed), experts_of(plain), strict=True):
        assert torch.equal(ours.gate_up_proj, theirs.gate_up_proj)
        assert torch.equal(ours.down_proj, theirs.down_proj)
    limit = 1e-5 if dtype == "float32" else 5e-2
    assert torch.allclose(logits_of(packed), logits_of(plain), atol=limit)
    assert num_weights(packed) == num_weights(plain)
    assert idle_weights(packed) == idle_weights(plain)
    assert idle_weights(packed, in_bytes=True) < idle_weights(plain, in_bytes=True) / 2


@pytest.mark.skipif(not triton.is_available(), reason="no Triton")
def test_our_kernels_run_packed_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file to the logits, without a GPU in Triton's interpreter; afterwards the model's
    own products run, over weights that are expanded for them."""
    from kvboost.model.triton.mxfp4 import PackedWeights

    calls: list[Any] = []
    multiply = PackedWeights.product
    monkeypatch.setattr(
        PackedWeights,
        "product",
        lambda self, *given, **more: (calls.append(self), multiply(self, *given, **more))[1],
    )
    model = read_in(folder, "packed", device=DEVICE)
    expected = logits_of(model)
    own = model.config._experts_implementation
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, mixed)
    experts = Experts(model)
    assert experts.are_known and experts.are_packed and not calls
    experts.bind()
    assert torch.allclose(logits_of(model), expected, atol=1e-4)
    assert len(calls) == 2 * len(experts_of(model))
    with experts.as_stock():  # transformers has no products for codes
        assert model.config._experts_implementation == NAME
    rows = torch.randn(2, model.config.hidden_size, device=DEVICE, requires_grad=True)
    shares, chosen = torch.rand(2, 4, device=DEVICE).topk(2)
    mixed(experts_of(model)[0], rows, chosen, shares).sum().backward()
    assert rows.grad is not None, "our kernels compute no gradients"
    experts.release()
    calls.clear()
    assert model.config._experts_implementation == own
    assert torch.allclose(logits_of(model), expected, atol=1e-5) and not calls


def test_answers_from_packed_and_expanded_experts_are_the_same(folder: Path) -> None:
    prompt = "What is new in the second chapter? " * 4
    with KVBoost.from_pretrained(folder, weights="packed", dtype="float32", device="cpu") as engine:
        model, tokenizer = engine.model.forward.model, engine.tokenizer
        first = engine.generate(prompt, 6, ignore_eos=True).token_ids
        facts = engine.facts()
        again = engine.generate(prompt, 6, ignore_eos=True)
        assert again.token_ids == first and again.exact_tokens > 0
        with KVBoost.from_model(model, tokenizer) as other:
            assert other.generate(prompt, 6, ignore_eos=True).token_ids == first
            assert other.model.fingerprint == engine.model.fingerprint
    assert facts["weights"] == "packed (torch, MXFP4 expanded)"
    with pytest.warns(UserWarning, match="expanded to float32"):
        plain = KVBoost.from_pretrained(folder, dtype="float32", device="cpu")
    with plain:
        assert plain.generate(prompt, 6, ignore_eos=True).token_ids == first
        assert plain.facts()["weights"] == "plain"
        assert plain.facts()["parameters"] == facts["parameters"]
        assert plain.model.fingerprint != engine.model.fingerprint


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_an_engine_on_a_gpu_packs_experts_by_itself(folder: Path, dtype: str, limit: float) -> None:
    """Over pages and graphs, one request and several. In bfloat16, another order of sums may choose
    another expert for a row."""
    prompt, others = [*range(2, 130)], [[*range(number, 60)] for number in range(5)]
    options = {"dtype": dtype, "device": DEVICE}
    with KVBoost.from_pretrained(folder, **options) as engine:
        assert engine.facts()["weights"] == "packed (triton, MXFP4)"
        ours = [
            engine.score(prompt[:60], prompt[60:], mode).logits.float().cpu()
            for mode in ("baseline", "prefix_cache")
        ]
        first = engine.generate(prompt, 12, ignore_eos=True).token_ids
        together = [one.token_ids for one in engine.generate_batch(others, 12, ignore_eos=True)]
    with pytest.warns(UserWarning, match="MXFP4 weights are expanded"):
        plain = KVBoost.from_pretrained(folder, weights="plain", **options)
    with plain:
        expected = plain.score(prompt[:60], prompt[60:], "baseline").logits.float().cpu()
        assert all((each - expected).abs().mean() < limit for each in ours)
        if dtype == "float32":
            assert plain.generate(prompt, 12, ignore_eos=True).token_ids == first
            answers = plain.generate_batch(others, 12, ignore_eos=True)
            assert [one.token_ids for one in answers] == together


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_another_code_or_scale_is_another_model(folder: Path, part: str) -> None:
    model, other = read_in(folder, "packed"), read_in(folder, "packed")
    before = fingerprint(model, model.config)
    assert fingerprint(other, other.config) == before
    getattr(experts_of(other)[1], f"down_proj_{part}")[3, 0, 5] ^= 1
    assert fingerprint(other, other.config) != before
    assert packed_identity(model)["kernels"] == []
    assert weights_of(model) == "packed (torch, MXFP4 expanded)"


@pytest.mark.parametrize(
    ("device", "dtype", "packs"),
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, True),
        ("cuda", torch.float16, False),
        ("cpu", torch.bfloat16, False),
    ],
)
def test_auto_packs_where_kernels_run(
    folder: Path, device: str, dtype: torch.dtype, packs: bool
) -> None:
    found = find_filled("auto", folder, None, {}, torch.device(device), dtype)
    assert (found is not None and found.packed) is packs


def test_what_cannot_stay_packed_says_why(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'float16' does not hold MXFP4 weights"):
        read_in(folder, "packed", "float16")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe"}))
    with pytest.raises(ModelError, match=r"model type 'qwen3_moe' do not stay packed.*gpt_oss do"):
        read_in(tmp_path, "packed")
    other = save_mxfp4(tmp_path / "other", num_hidden_layers=1)
    changed = tmp_path / "other" / "config.json"
    settings = json.loads(changed.read_text())
    changed.write_text(json.dumps({**settings, "intermediate_size": 64}))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert f"{name}_blocks" in other
    with pytest.raises(ModelError, match=rf"{name}.* \(4, 64, 192\).* \(4, 64, 128\)"):
        read_in(tmp_path / "other", "packed")


def test_a_parked_model_streams_its_codes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory as far as that goes, and then in a file."""
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.setattr("kvboost.model.streaming.plan.OTHER_BYTES", 0)
    save_mxfp4(tmp_path / "model", num_hidden_layers=6)
    expected = logits_of(read_in(tmp_path / "model", "packed"))
    parking = Parking(100_000)
    device = torch.device("cpu", 0)  # another name than the host's
    model, _ = read(
        tmp_path / "model",
        strict=True,
        device=device,
        dtype="float32",
        weight_form="packed",
        parked=parking,
    )
    assert parking.spilled_bytes > 0
    budget = DeviceBudget(900_000, host_bytes=100_000)
    placement = place(model, device, budget, LateSlots, spilled_bytes=parking.spilled_bytes)
    assert placement.streamed is not None and placement.plan.on_disk
    codes = experts_of(model)[placement.plan.streamed[0]].packed("down_proj").codes
    assert codes.untyped_storage().nbytes() > codes.nbytes, "they are in a slot"
    for _ in range(2):
        assert torch.equal(logits_of(model), expected)


def test_an_adapter_changes_the_attention_beside_packed_experts(
    folder: Path, tmp_path: Path
) -> None:
    stock = StockModel(expanded(folder))
    with KVBoost.from_pretrained(folder, weights="packed", dtype="float32", device="cpu") as engine:
        check_merged(engine, stock, tmp_path, QV)


def test_a_model_from_the_hub_stays_packed(folder: Path, tmp_path: Path) -> None:
    """The hub's cache, as its client lays it out; without a network."""
    cached = tmp_path / "models--some--gpt-oss"
    (cached / "snapshots").mkdir(parents=True)
    shutil.copytree(folder, cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    model, _ = read(
        "some/gpt-oss",
        strict=True,
        device="cpu",
        dtype="float32",
        weight_form="packed",
        cache_dir=str(tmp_path),
        local_files_only=True,
    )
    assert torch.equal(logits_of(model), logits_of(read_in(folder, "packed")))
