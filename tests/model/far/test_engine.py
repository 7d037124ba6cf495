"""Requests that are larger than the memory for KV get the answers of an engine with enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvboost import CacheFolderError, ConfigError, KVBoost, KVTooLargeError
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.host import HostAttention
from kvboost.model.far.host_kv import HostFarKV
from kvboost.model.far.kv import FarKV
from kvboost.model.far.memory import HostMemory
from kvboost.model.far.place import FarPlace
from kvboost.model.far.store import FarStore
from kvboost.model.far.streamed import StreamedAttention
from support.far_kv import late_attention
from support.tiny import DEVICE, dynamic_model, make_engine, tiny_model

PROMPT = [(7 * number + 3) % 250 for number in range(200)]
MOVED = [*PROMPT[64:], *range(9, 29), *PROMPT[:64]]
NEAR = 128
"""Rows that fit; a request with far rows has half of them near."""

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="far rows in files")


@contextmanager
def far_engine(model: Any, **config: Any) -> Iterator[KVBoost]:
    sizes = model.config
    dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    row_bytes = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * dim * 4
    options = {"far_kv_bytes": "10MiB", "heal": "off", "reuse_moved": "always", **config}
    with make_engine(model, max_kv_bytes=NEAR * row_bytes, **options) as engine:
        yield engine
        assert engine.runtime.check_integrity() == []
        assert far_of(engine).used_bytes == 0


def far_of(engine: KVBoost) -> FarStore:
    far = engine.runtime.pool.far
    assert far is not None
    return far


def answers(engine: KVBoost) -> list[list[int]]:
    """New text, the same text again, moved text, and a batch."""
    alone = [engine.generate(prompt, 12, ignore_eos=True) for prompt in (PROMPT, PROMPT, MOVED)]
    assert alone[0].exact_tokens == 0 and alone[1].exact_tokens == len(PROMPT) - 1
    batch = engine.generate_batch([PROMPT, PROMPT[:40]], 5, "prefix_cache", ignore_eos=True)
    return [result.token_ids for result in (*alone, *batch)]


def expected_answers(model: Any) -> list[list[int]]:
    with make_engine(model, heal="off", reuse_moved="always") as plain:
        return answers(plain)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"hidden_size": 128}),  # our kernels serve its heads
        ("gemma2", {}),  # windows and soft caps, by torch's
    ],
)
def test_answers_over_far_rows_in_a_file(
    name: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name, **sizes)
    far_rows: list[int] = []
    make_far = FarKV._make_far

    def noted(self: FarKV, count: int, written: int) -> None:
        make_far(self, count, written)
        far_rows.append(self.far_rows)

    monkeypatch.setattr(FarKV, "_make_far", noted)
    with far_engine(model, far_kv_dir=tmp_path) as engine:
        assert answers(engine) == expected_answers(model)
        assert far_of(engine).num_lent == 4, "the short request of the batch has none"
        assert far_of(engine).near_rows == NEAR // 2
    assert far_rows and max(far_rows) > len(PROMPT) - NEAR // 2
    assert list(tmp_path.iterdir()) == [], "the files have no names"


def test_answers_over_far_rows_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: rows pass through slots that hold NaN before and after, and the host attends to
    half of them."""
    model = tiny_model("llama")
    made: list[StreamedAttention] = []

    def another_device(shape: KVShape, folder: object) -> FarPlace:
        def attention() -> StreamedAttention:
            made.append(late_attention(shape, 48, HostAttention(shape)))
            monkeypatch.setattr(made[0].costs, "host_share", lambda _: 0.5)
            return made[0]

        memory = partial(HostMemory, shape)
        return FarPlace(HostFarKV, memory, shape.row_bytes.__mul__, attention)

    monkeypatch.setattr("kvboost.runtime.devices.in_file", another_device)
    with far_engine(model) as engine:
        engine.model.forward._kernels = None
        assert answers(engine) == expected_answers(model)
    steps = 3 * 10  # layers of one answer; prompts are only streamed
    assert made[0].num_streamed > made[0].num_on_host > steps


def test_a_request_that_does_not_fit_far_memory_either(tmp_path: Path) -> None:
    with far_engine(tiny_model("llama"), far_kv_bytes="150KiB", far_kv_dir=tmp_path) as engine:
        with pytest.raises(KVTooLargeError, match="far_kv_bytes leaves 153,600"):
            engine.generate(PROMPT, 5)
        with pytest.raises(KVTooLargeError, match="205 tokens"):
            engine.generate_batch([PROMPT], 5)
        assert engine.generate(PROMPT[:180], 3, ignore_eos=True).token_ids
    (tmp_path / "file").touch()
    with (
        far_engine(tiny_model("llama"), far_kv_dir=tmp_path / "file") as engine,
        pytest.raises(CacheFolderError, match="far_kv_dir"),
    ):
        engine.generate(PROMPT, 5)


def test_a_tilde_in_the_folder_is_the_home_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with far_engine(tiny_model("llama"), far_kv_dir="~/far") as engine:
        assert engine.generate(PROMPT, 2, ignore_eos=True).token_ids
    assert [path.name for path in tmp_path.iterdir()] == ["far"]


def test_far_memory_is_given_back_if_near_memory_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with far_engine(tiny_model("llama")) as engine:
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
            patched.setattr(KVShape, "allocate", fails)
            engine.generate(PROMPT, 5)
        assert far_of(engine).used_bytes == 0
        assert engine.cache_stats()["far_kv_bytes"] == 0


def test_requests_wait_for_far_memory() -> None:
    """There is enough for one of them at a time."""
    with far_engine(tiny_model("llama"), far_kv_bytes="200KiB") as engine:
        found = engine.generate_batch([PROMPT, PROMPT[1:], PROMPT[2:]], 3, ignore_eos=True)
        assert [len(result.token_ids) for result in found] == [3, 3, 3]
        assert far_of(engine).num_lent == 3


@pytest.mark.parametrize(
    ("make", "strict", "reason"),
    [
        (lambda: tiny_model("bloom"), False, "keeps its own attention"),
        (dynamic_model, True, "in one piece"),
    ],
)
def test_models_that_cannot_have_far_rows_say_so(
    make: Callable[[], Any], strict: bool, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(make(), strict=strict, far_kv_bytes="1MiB")


def test_near_memory_must_hold_some_rows() -> None:
    with pytest.raises(ConfigError, match="raise max_kv_bytes"):
        make_engine(tiny_model("llama"), far_kv_bytes="1MiB", max_kv_bytes="10KiB")
