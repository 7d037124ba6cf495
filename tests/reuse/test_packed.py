"""Probes and repairs of several requests in one forward, against a forward for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import KVBoost
from kvboost.model.execution.attention import StopForward
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook, Rules, Segment
from kvboost.reuse.probe import AttentionMass, Deviation
from kvboost.reuse.repair import probed_layers
from kvboost.reuse.request import BufferedRows
from kvboost.reuse.shift import Spans
from support.families import HAS_LATENTS, family_model
from support.forwards import count_forwards
from support.tiny import make_engine, random_ids, tiny_model

PROMPT = 80
SPANS = Spans.of([range(5, 30), range(30, 60)], PROMPT)
REPAIRED = np.array([5, 9, 20, 33, 41, 58, *range(60, PROMPT)])
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6, "head_dim": 32},  # kernels in C, where there is a compiler
    "gemma2": {"num_hidden_layers": 6},  # windows and soft caps
    "gpt_oss": {"num_hidden_layers": 6},  # sinks
    "gemma3n_text": {},  # the last layers attend to the keys of earlier ones
}
LATENT = "deepseek_v3"


@pytest.fixture(params=[*MODELS, LATENT])
def engine(request: pytest.FixtureRequest) -> Iterator[KVBoost]:
    name = request.param
    if name == LATENT and not HAS_LATENTS:
        pytest.skip("needs transformers 5.22")
    model = family_model(name) if name == LATENT else tiny_model(name, **MODELS[name])
    with make_engine(model) as made:
        yield made


def close(given: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-4)


class Request:
    """A request whose rows have all been read, so that any may be computed again."""

    def __init__(self, forward: Forward, seed: int) -> None:
        self.bands = probed_layers(forward.shape.num_layers)
        self.ids = torch.tensor(random_ids(PROMPT, seed))
        self.kv = RequestKV(forward.shape, PROMPT)
        forward([Segment(self.kv, torch.tensor(random_ids(PROMPT, seed + 100)), range(PROMPT))])

    def segment(self, rows: range | torch.Tensor, num_logits: int = 1, **options: Any) -> Segment:
        ids = self.ids[rows.start : rows.stop] if isinstance(rows, range) else self.ids[rows]
        return Segment(self.kv, ids, rows, num_logits, **options)

    def probe(self, start: int) -> Segment:
        """Of the rows from ``start`` on, before which three are not known."""
        absent = torch.zeros(PROMPT, dtype=torch.bool)
        absent[start - 3 : start] = True
        hook = AttentionMass(self.bands, absent[:start])
        rows = torch.arange(start, PROMPT)
        options = {"until": self.bands.last, "absent": absent, "may_go_on": True}
        return self.segment(rows, 0, hook=hook, **options)

    def deviation(self, start: int) -> Segment:
        rows = torch.arange(start, PROMPT)
        return self.segment(rows, 0, hook=Deviation(1, rows), until=1)

    def repair(self, engine: KVBoost) -> Segment:
        backend = engine.runtime.backend
        shift = BufferedRows(self.kv, backend.packer, backend.rotation).shift(REPAIRED, SPANS)
        assert shift is not None
        return self.segment(torch.from_numpy(REPAIRED), hook=shift)


def all_kinds(engine: KVBoost) -> list[Segment]:
    """Two probes, two repairs, rows after a known beginning and the next row of an answer, each of
    a request of its own; the same every time."""
    first, second, *others = (Request(engine.model.forward, seed) for seed in range(6))
    return [
        first.probe(PROMPT - 16),
        others[0].repair(engine),
        others[1].segment(range(50, PROMPT)),
        second.probe(PROMPT - 30),
        others[2].segment(range(PROMPT - 1, PROMPT)),
        others[3].repair(engine),
    ]


def observed(segment: Segment) -> torch.Tensor:
    assert segment.hook is not None
    seen = segment.hook.observed()
    assert seen is not None
    return seen.cpu()


@pytest.mark.parametrize("native", [True, False])
def test_one_forward_gives_what_a_forward_for_each_gives(
    engine: KVBoost, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.model.forward
    if not native:
        monkeypatch.setattr(forward, "_kernels", None)
    alone, packed = all_kinds(engine), all_kinds(engine)
    expected = [forward([segment]) for segment in alone]
    sizes = count_forwards(forward, monkeypatch)
    given = forward.run(packed)
    assert sizes == [len(packed)]
    for one, other, logits, wanted in zip(packed, alone, given, expected, strict=True):
        close(logits, wanted)
        # What a probe writes above its last layer is written again by the repair.
        end = one.first if one.until is not None else PROMPT
        close(one.kv.rows(0, end), other.kv.rows(0, end))
    for probe in (0, 3):
        seen, wanted = observed(packed[probe]), observed(alone[probe])
        close(seen, wanted)
        most = torch.topk(seen[1, 0], 12).indices
        assert set(most.tolist()) == set(torch.topk(wanted[1, 0], 12).indices.tolist())
        assert float(seen[:, 0].sum()) > 1


def test_a_forward_of_probes_ends_after_the_last_layer_they_need(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.model.forward
    requests = [Request(forward, seed) for seed in range(2)]
    layers, last = range(forward.shape.num_layers), requests[0].bands.last
    before = [request.kv.rows(0, PROMPT).clone() for request in requests]
    sizes = count_forwards(forward, monkeypatch)
    given = forward.run([request.probe(PROMPT - 20) for request in requests])
    assert sizes == [2] and all(logits.shape == (0, forward.num_logits) for logits in given)
    for request, rows in zip(requests, before, strict=True):
        changed = (request.kv.rows(0, PROMPT) != rows).flatten(2).any(-1).any(0)
        assert changed.tolist() == [layer <= last for layer in layers]


def test_a_probe_of_moved_rows_shares_a_forward_with_those_that_end_where_it_does(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that a probe for deviation runs are kept in the layers above, unless they are
    chosen."""
    forward = engine.model.forward

    def make() -> list[Segment]:
        requests = [Request(forward, seed) for seed in range(4)]
        return [
            requests[0].deviation(10),
            requests[1].segment(range(50, PROMPT)),
            requests[2].deviation(40),
            requests[3].probe(PROMPT - 16),
        ]

    alone, packed = make(), make()
    expected = [forward([segment]) for segment in alone]
    sizes = count_forwards(forward, monkeypatch)
    given = forward.run(packed)
    assert sizes == [2, 2]
    for one, other, logits, wanted in zip(packed, alone, given, expected, strict=True):
        close(logits, wanted)
        if one.hook is not None:
            close(observed(one), observed(other))
    for index in (0, 2):
        close(packed[index].kv.rows(0, PROMPT), alone[index].kv.rows(0, PROMPT))
        assert float(observed(packed[index]).sum()) > 0


class SeesOneLayer(Hook):
    """Says that it has seen enough, as hooks over pages do."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        self.layers.append(layer)
        raise StopForward


def test_a_hook_that_has_seen_enough_ends_no_forward_that_others_need(engine: KVBoost) -> None:
    forward = engine.model.forward
    expected = forward([Request(forward, 1).segment(range(50, PROMPT))])
    first, second = (Request(forward, seed) for seed in range(2))
    hook = SeesOneLayer()
    probe = first.segment(range(60, PROMPT), 0, hook=hook, until=1, may_go_on=True)
    _, given = forward.run([probe, second.segment(range(50, PROMPT))])
    close(given, expected)
    assert hook.layers == [0]
