"""What fits, where, and how fast at most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvboost.model.fit import bandwidths
from kvboost.model.fit.bandwidths import Bandwidths
from kvboost.model.fit.fits import Fit, Machine, fits
from kvboost.model.fit.headers import ModelHeader, StoredTensor

GB = 10**9
RATES = Bandwidths(ram=50 * GB, disk=5 * GB, bus=25 * GB, gpu=1000 * GB)
LAYER_NUMBERS, OTHER_NUMBERS = 480_000_000, 780_000_000
OF_32B = ModelHeader(
    "32b.gguf",
    "qwen2",
    (
        *(
            StoredTensor(f"blk.{number}.all", "Q4_K", LAYER_NUMBERS, LAYER_NUMBERS * 9 // 16)
            for number in range(64)
        ),
        StoredTensor("token_embd.weight", "Q4_K", OTHER_NUMBERS, OTHER_NUMBERS * 9 // 16),
        StoredTensor("output.weight", "Q6_K", OTHER_NUMBERS, OTHER_NUMBERS * 13 // 16),
    ),
    layers=64,
    kv_numbers=2 * 64 * 8 * 128,
    context=32768,
    is_quantized=True,
)


def machine(memory: int, gpu: int = 0) -> Machine:
    name = "some GPU" if gpu else None
    return Machine(memory * GB, memory * GB, RATES, torch.float32, name, gpu * GB)


def by_form(found: list[Fit]) -> dict[tuple[str, str], Fit]:
    return {(one.device, one.weights): one for one in found}


def test_a_32b_model_on_an_8_gb_card() -> None:
    found = by_form(fits(OF_32B, machine(64, 8)))
    packed = found["cuda", "packed"]
    assert packed.how == "streamed" and 30 < packed.streamed_layers < 64
    per_layer = int(64 * (LAYER_NUMBERS * 9 // 16) * 5 / 4.5) // 64
    expected = 25 * GB / (packed.streamed_layers * per_layer)
    assert packed.tokens_per_s == pytest.approx(expected)
    assert "device_memory='6.7GiB'" in packed.options and packed.kv_tokens == 900_000_000 // 262_144
    assert found["cuda", "bfloat16"].how == "streamed from disk", "the host holds 57 of 63 GB"
    assert found["cpu", "packed"].how == "resident"
    assert found["cpu", "float32"].how == "too large"


def test_a_large_gpu_holds_it_and_a_small_host_reads_from_disk() -> None:
    large = by_form(fits(OF_32B, machine(256, 80)))
    assert large["cuda", "packed"].how == large["cuda", "bfloat16"].how == "resident"
    assert large["cuda", "packed"].streamed_layers == 0
    small = by_form(fits(OF_32B, machine(8, 8)))["cuda", "packed"]
    assert small.how == "streamed from disk"
    assert small.tokens_per_s is not None
    assert small.tokens_per_s < by_form(fits(OF_32B, machine(64, 8)))["cuda", "packed"].tokens_per_s


def test_plain_files_have_no_packed_form_and_unknown_layers_are_not_streamed() -> None:
    plain = ModelHeader(
        "plain", "llama", (StoredTensor("w", "BF16", GB, 2 * GB),), 0, None, None, False
    )
    (only,) = fits(plain, machine(16))
    assert (only.weights, only.how, only.kv_tokens) == ("float32", "resident", None)
    assert only.tokens_per_s == pytest.approx(50 / 4)
    assert by_form(fits(plain, machine(16, 1)))["cuda", "bfloat16"].how == "too large"


def test_packed_experts_are_for_gpus_and_take_what_they_say() -> None:
    blocks = StoredTensor("layers.0.experts.down_proj_blocks", "U8", 24 * GB, 12 * GB, 13 * GB)
    others = StoredTensor("model.norm.weight", "BF16", 1 * GB, 2 * GB, 2 * GB)
    of_20b = ModelHeader(
        "20b", "gpt_oss", (blocks, others), 1, None, None, True, packs_on_cpu=False
    )
    found = by_form(fits(of_20b, machine(256, 80)))
    assert set(found) == {("cuda", "bfloat16"), ("cuda", "packed"), ("cpu", "float32")}
    assert found["cuda", "packed"].num_bytes == 15 * GB
    assert found["cuda", "bfloat16"].num_bytes == 50 * GB


def test_bandwidths_are_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.setattr(bandwidths, "RAM_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidths, "DISK_BYTES", 1 << 20)
    found = bandwidths.bandwidths()
    assert found.ram > 0 and found.disk is not None and found.disk > 0
    assert bandwidths.bandwidths() == found, "read from its file"
    kept = json.loads((tmp_path / "bandwidths.json").read_text())
    assert kept["bytes_per_s"]["ram"] == found.ram
    (tmp_path / "bandwidths.json").write_text(json.dumps({**kept, "machine": "another"}))
    assert bandwidths.bandwidths() != found
    (tmp_path / "bandwidths.json").write_text("nonsense")
    assert bandwidths.bandwidths(again=True).ram > 0
