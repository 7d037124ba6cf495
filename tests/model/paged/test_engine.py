"""Whole requests over pages: the answers are those over buffers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvboost.model.paged.graphs import make_capture
from kvboost.model.paged.pool import PagedPool, why_buffers
from kvboost.model.paged.sampling import PickedOnDevice
from kvboost.model.paged.slab import PAGE, Holding, Slab
from kvboost.reuse.paged.forwards import SegmentForwards
from kvboost.reuse.paged.hooks import PROBES, REPAIRS, ROWS
from support.paged_engines import TWO_LAYERS, forward_of, leaks, paged_engine, steps_of
from support.replay_again import ReplayAgain
from support.tiny import DEVICE, make_engine, tiny_model

TEXT = "A request has pages of one slab, and a table says which. "
PASSAGES = [
    "The first passage is about rivers and the towns beside them, mostly in spring. ",
    "The second passage counts the stars, one after another, until the morning comes. ",
]


def answers(engine: Any, **options: Any) -> list[list[int]]:
    prompts = [TEXT, TEXT[:30] + "What else?", "Another text."]
    alone = [engine.generate(prompt, 3, ignore_eos=True, **options) for prompt in prompts]
    return [result.token_ids for result in alone]


def test_other_requests_run_while_a_device_picks_a_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, asked, picked = [TEXT, TEXT[:30] + "What else?"], [], []
    with paged_engine(monkeypatch) as engine:
        expected = [engine.generate(prompt, 6, ignore_eos=True).token_ids for prompt in prompts]
        made = PickedOnDevice.__init__

        def slow(soon: PickedOnDevice, token: torch.Tensor) -> None:
            made(soon, token)
            picked.append(soon)
            left = [False] * 3
            if len(picked) == 2:
                soon.is_done = lambda: asked.append(True) or not left or left.pop()

        monkeypatch.setattr(PickedOnDevice, "__init__", slow)
        found = engine.generate_batch(prompts, 6, ignore_eos=True)
        assert [result.token_ids for result in found] == expected
        assert len(asked) == 4  # the first one's steps ran in between and leaks(engine) == []


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama", "gpt2"])
def test_answers_equal_those_over_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with paged_engine(monkeypatch, name, pages=False, sizes=TWO_LAYERS) as plain:
        expected = answers(plain)
        assert plain.runtime.backend.forward is plain.model.forward
    with paged_engine(monkeypatch, name, sizes=TWO_LAYERS) as engine:
        assert answers(engine) == expected
        again = engine.generate(TEXT, 3, ignore_eos=True)
        assert again.token_ids == expected[0] and again.exact_tokens > 30
        steps = steps_of(engine)
        assert steps.num_steps >= 8 and steps.num_ahead >= 4
        assert leaks(engine) == []


def test_a_batch_with_a_shared_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the beginning are held by all; the answers are those of requests alone."""
    monkeypatch.setattr("kvboost.runtime.sharing.LEAST_SHARED", 128)
    prompts = [[*range(192), 7, number] for number in range(3)]
    given: list[int] = []
    take = Slab.take

    def taking(self: Slab, num_rows: int, shared: Sequence[int] = ()) -> Holding | None:
        if 192 < num_rows < 256:  # layers are compared with other numbers of rows
            given.append(len(shared))
        return take(self, num_rows, shared)

    monkeypatch.setattr(Slab, "take", taking)
    with paged_engine(monkeypatch, pages=False) as plain:
        expected = [plain.generate(ids, 3, "baseline", ignore_eos=True) for ids in prompts]
    with paged_engine(monkeypatch) as engine:
        found = engine.generate_batch(prompts, 3, "prefix_cache", ignore_eos=True, keep=False)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert sorted(given) == [0, 192 // PAGE, 192 // PAGE]
        assert leaks(engine) == []


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("gemma3_text", "query"),  # layers of two kinds
        ("gpt_oss", "query"),
        ("phi3", "cacheblend"),
    ],
)
def test_moved_text_is_placed_probed_and_repaired_in_pages(monkeypatch, name, strategy) -> None:
    def run(pages: bool) -> tuple[list[int], int, tuple[int, ...]]:
        options = {"recompute_strategy": strategy, "reuse_moved": "always", "chunk_size": 32}
        options["heal"] = "idle"
        with paged_engine(monkeypatch, name, pages=pages, sizes=TWO_LAYERS, **options) as engine:
            engine.generate(PASSAGES[0] + PASSAGES[1], 1, ignore_eos=True)
            result = engine.generate(PASSAGES[1] + "So?", 2, ignore_eos=True)
            if pages:
                assert steps_of(engine).num_steps and leaks(engine) == []
                forwards = forward_of(engine).runner
                assert isinstance(forwards, SegmentForwards) and forwards.note is None
                kinds = {kind for kind, _ in forwards._forwards}
                assert kinds >= ({REPAIRS, PROBES} if strategy == "query" else {ROWS})
            return result.token_ids, result.moved_tokens, result.reuse.recomputed

    tokens, moved, recomputed = run(pages=False)
    assert moved > 32 and recomputed
    assert run(pages=True) == (tokens, moved, recomputed)


def test_costs_are_learned_from_requests_that_record_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture, learned = ReplayAgain(), []
    monkeypatch.setattr("kvboost.runtime.paged_backend.make_capture", lambda *_: capture)
    with paged_engine(monkeypatch, "phi3") as engine:
        cost = engine.runtime.cost
        monkeypatch.setattr(cost, "observe", lambda rows, *_: learned.append(rows))
        engine.generate(TEXT[:30], 2, ignore_eos=True)
        assert capture.num_graphs and learned == []
        engine.generate(TEXT[5:35], 2, ignore_eos=True)
        assert learned == [30, 1]
        assert (cost.computed_rows(30), cost.computed_rows(1)) == (32, 1)


def test_requests_with_options_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, sampled, with log probabilities and stopped early, in one batch as alone."""
    each: list[Any] = [{}, {"temperature": 5.0, "seed": 3}, {"logprobs": 2}, {"max_new_tokens": 1}]
    prompts = [TEXT[:20], TEXT[:20], TEXT[:25], TEXT[:9]]
    with paged_engine(monkeypatch) as engine:
        together = engine.generate_batch(prompts, 3, "baseline", each=each, ignore_eos=True)
        for prompt, own, result in zip(prompts, each, together, strict=True):
            options = {"max_new_tokens": 3, **own}
            alone = engine.generate(prompt, mode="baseline", ignore_eos=True, **options)
            assert alone.token_ids == result.token_ids
            assert [one.token_id for one in result.logprobs or ()] == (
                result.token_ids if "logprobs" in own else []
            )
        assert together[0].token_ids != together[1].token_ids
        assert leaks(engine) == []


def test_a_stream_that_is_closed_returns_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with paged_engine(monkeypatch) as engine:
        with engine.stream(TEXT[:30], 50, ignore_eos=True) as stream:
            next(iter(stream))
        assert leaks(engine) == []


def test_a_slab_that_is_full_leaves_requests_with_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    with paged_engine(monkeypatch, pages=False) as plain:
        expected = plain.generate(2 * TEXT, 2, ignore_eos=True).token_ids
    with paged_engine(monkeypatch, max_kv_bytes="1KiB") as engine:
        assert engine.generate(2 * TEXT, 2, ignore_eos=True).token_ids == expected
        assert steps_of(engine).num_steps == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="what a CPU is told")
def test_cpus_have_buffers_and_say_why() -> None:
    forward = make_engine(tiny_model("llama")).model.forward
    assert "NVIDIA" in why_buffers(forward)
    assert make_capture(forward.shape.device, "auto").note == "CUDA graphs need a GPU"


def test_a_format_takes_the_path_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tokens are rows of one forward over pages, and the other request still has its tokens
    picked on the device."""
    options: list[Any] = [{"choice": ["abcdefgh-1", "abcdefgh-2"]}, {}]
    prompts = [TEXT, "Another text."]
    with paged_engine(monkeypatch, pages=False) as plain:
        expected = [
            plain.generate(prompt, 12, **chosen).token_ids
            for prompt, chosen in zip(prompts, options, strict=True)
        ]
    with paged_engine(monkeypatch) as engine:
        rows = []
        forward = forward_of(engine)
        run = forward.run
        monkeypatch.setattr(
            forward,
            "run",
            lambda segments: (
                rows.extend((len(s), s.sampler is None) for s in segments) or run(segments)
            ),
        )
        found = engine.generate_batch(prompts, 12, each=options)
        assert [one.token_ids for one in found] == expected
        assert (9, True) in rows and (1, False) in rows
        assert leaks(engine) == []


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_kernels_themselves_give_the_same_answers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests on a CPU run most of them in torch."""
    prompt = TEXT[:20]
    with paged_engine(monkeypatch, name, pages=False) as plain:
        expected = plain.generate(prompt, 2, ignore_eos=True).token_ids
    with paged_engine(monkeypatch, name, interpreted=True) as engine:
        assert engine.generate(prompt, 2, ignore_eos=True).token_ids == expected
        assert steps_of(engine).num_steps >= 1


def test_a_closed_engine_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while somebody still holds the engine."""
    engine = paged_engine(monkeypatch, reuse_moved="always")
    for prompt in (TEXT, "Before it. " + TEXT):
        engine.generate(prompt, 3, ignore_eos=True)
    pool = engine.runtime.pool
    assert isinstance(pool, PagedPool)
    slab = weakref.ref(pool.slab)
    engine.close()
    assert slab() is None
