"""Keys that rotate to another position; ``test_families.py`` moves those of every family."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.execution.mixed_kv import make_kv
from kvboost.reuse.rope import Rotation
from support.rotated import rotated
from support.tiny import CONTEXT, make_engine, tiny_model

ORIGINAL = {"original_max_position_embeddings": 64}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
}


def moved_and_direct(engine, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer-0 keys of the same tokens, computed at 0 and moved, and computed at ``distance``."""
    from kvboost.model.execution.segment import Segment

    rotation, _ = engine.runtime.backend.rotation.at(0)
    forward = engine.model.forward
    ids = torch.arange(40, 64)
    keys = []
    for start in (0, distance):
        kv = make_kv(forward.shape, start + len(ids))
        filler = torch.arange(start) % 7
        forward([Segment(kv, torch.cat([filler, ids]), range(start + len(ids)))])
        keys.append(kv.layer(0, start, start + len(ids))[0])
    alike = keys[0].repeat(len(rotation.kinds), 1, 1, 1)
    moved = torch.empty_like(alike)
    rotation.move(alike, distance, moved)
    return moved[0], keys[1][0]


def test_each_group_of_layers_rotates_its_own_way() -> None:
    """The full layers of Gemma 4 have larger heads, of which a quarter rotates, and slower."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    with make_engine(tiny_model("gemma4_text", layer_types=kinds)) as engine:
        moved, direct = moved_and_direct(engine, 171)
    assert moved.shape[-1] == 32
    assert torch.allclose(moved, direct, atol=1e-4)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rope_moves_as_well(kind) -> None:
    scaled = {"rope_theta": 10000.0, **SCALED[kind]}
    with make_engine(tiny_model("llama", rope_parameters=scaled)) as engine:
        moved, direct = moved_and_direct(engine, 171)
    assert torch.allclose(moved, direct, atol=1e-4)


def test_longrope_moves_below_its_switch() -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 200,
    }
    with make_engine(tiny_model("phi3", rope_parameters=longrope)) as engine:
        moved, direct = moved_and_direct(engine, 150)
    assert torch.allclose(moved, direct, atol=1e-4)


def test_a_layer_without_positions_is_left_alone() -> None:
    frequencies = torch.tensor([[0.5, 0.1], [0.0, 0.0]])
    keys = torch.randn(2, 1, 3, 4)
    moved = torch.empty_like(keys)
    Rotation(frequencies).move(keys, 100, moved)
    assert torch.equal(moved[1], keys[1]) and not torch.allclose(moved[0], keys[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_back_undoes_a_rotation_and_leaves_other_channels(interleaved) -> None:
    rotation = Rotation(torch.rand(1, 3), interleaved=interleaved)
    keys = torch.randn(2, 5, 8)
    turns = rotation.cos_sin(0, torch.tensor([0, 1, 7, 100, 5000]))
    turned = rotated(rotation, keys, turns)
    assert torch.equal(turned[..., 6:], keys[..., 6:])
    assert torch.equal(turned[:, 0], keys[:, 0])
    assert torch.allclose(rotated(rotation, turned, turns, back=True), keys, atol=1e-5)


def test_two_moves_are_one(tiny_engine) -> None:
    rotation = tiny_engine("llama").runtime.backend.rotation
    keys = torch.randn(3, 2, 5, 16)
    once, twice, both = (torch.empty_like(keys) for _ in range(3))
    rotation.move(keys, 30000, once)
    rotation.move(once, CONTEXT - 30000, twice)
    rotation.move(keys, CONTEXT, both)
    assert torch.allclose(twice, both, atol=1e-4)
