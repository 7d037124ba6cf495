"""How KVBoost scores in KVShareArena, which asks every method that reuses KV the same questions.

    python -m benchmarks arena --model FOLDER --data KVShareArena/data/queryset --out FILE

Needs https://github.com/xishi404/KVShareArena in the same environment: clone it, then
``pip install --no-deps -e KVShareArena``. Its harness gives sources and questions to the methods of
``Method`` below and writes FILE. ``kva score FILE`` then prints the share of the gap recovered,
(F1 - F1 without sources) / (F1 of full prefill - F1 without sources), for Qwen/Qwen3-8B, whose
references it has. ``kvboost quality`` measures the same with any model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from kvboost import KVBoost, __version__
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.bench.kit.machine import here
from kvboost.bench.quality.asked import payload_cost
from kvboost.config import DEFAULT_MODEL
from kvboost.errors import ConfigError
from kvboost.tokens.prompt import Conversation

NAME = "kvboost"
SUBSETS = ("hotpotqa", "qasper", "multifieldqa_en")
OPTIONS = {"reuse_moved": "always", "heal": "off", "max_cache_bytes": "8GiB"}
"""Of the engine. Nothing is computed anew because it would be faster, or repaired in idle time. The
cache has room for the sources of several questions."""
SOURCES = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Marks where the sources are in the text of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"limit": 10}

    model: str = option(DEFAULT_MODEL, "A model's folder or hub id.")
    subset: str = option(SUBSETS[0], "The questions.", choices=SUBSETS)
    data: str = option("", "KVShareArena's folder data/queryset; it must be given.")
    out: str = option("", "The results are written to this file; it must be given.")
    limit: int = option(100, "Questions; all 100 are scored.", least=1)
    options: str = option(
        "{}", """Options of KVBoost as JSON, such as '{"recompute_strategy": "cacheblend"}'."""
    )


@dataclass
class Answer:
    """The fields of KVShareArena's ``AnswerResult``."""

    text: str
    recomputed_layer_tokens: int
    dense_payload_layer_tokens: int
    kv_bytes: int
    ttft_ms: float
    aux: dict[str, Any] = field(default_factory=dict)


class Method:
    """KVShareArena's contract (``kvsharearena.contract.BaseRepairMethod``). The harness calls
    ``setup`` once; then, for each question, ``build_cache`` for each source and ``answer``."""

    track = frozenset({"re"})
    """Retrieved evidence: sources in the order given, then the question."""
    mechanism_class = 1
    """Selective recomputation."""
    provenance = "official"
    backend = f"{NAME} {__version__}"
    training_data = None
    cost_notes = (
        "recomputed_layer_tokens: layers x (recomputed rows + probes + rows of sources that were "
        "not cached); the first source follows the text it was read after and is an exact hit. "
        "dense_payload_layer_tokens: layers x tokens of sources. kv_bytes: tokens of sources x "
        "bytes of a token in the cache. ttft_ms: from the call, planning included, until the first "
        "token is on the host."
    )

    def setup(self, model_id: str, config: dict[str, Any]) -> None:
        """Loads the model. What ``config`` has besides ``exam`` are options of KVBoost."""
        given = {name: value for name, value in config.items() if name != "exam"}
        self._engine = KVBoost.from_pretrained(model_id, **{**OPTIONS, **given})
        self._before, _ = self._around(config["exam"], "")

    def build_cache(self, source_text: str) -> list[int]:
        """Reads one source after the prompt's beginning, which no question changes; returns its
        tokens."""
        ids = self._engine.encode(source_text, add_special_tokens=False)
        self._engine.warm([*self._before, *ids])
        return ids

    def answer(self, question: str, caches: list[list[int]], config: dict[str, Any]) -> Answer:
        """Answers over the sources whose tokens are ``caches``, and keeps nothing of it."""
        engine, exam = self._engine, config["exam"]
        before, after = self._around(exam, question)
        sources = [token for ids in caches for token in ids]
        prompt = [*before, *sources, *after]
        result = engine.generate(prompt, exam["max_new_tokens"], keep=False)
        cost = payload_cost(engine, result.reuse, len(before), len(before) + len(sources))
        return Answer(
            text=result.output_text,
            recomputed_layer_tokens=cost.recomputed_layer_tokens,
            dense_payload_layer_tokens=cost.dense_layer_tokens,
            kv_bytes=cost.kv_bytes,
            ttft_ms=result.ttft_ms,
            aux={
                "prompt_tokens": result.prompt_tokens,
                "exact_tokens": result.exact_tokens,
                "moved_tokens": result.moved_tokens,
                "recomputed_tokens": result.recomputed_tokens,
                "strategy": result.reuse.strategy,
            },
        )

    def teardown(self) -> None:
        self._engine.close()

    def _around(self, exam: dict[str, Any], question: str) -> tuple[list[int], list[int]]:
        """The tokens of a prompt before and after its sources. Models that can think do not."""
        asked = exam["pre_ctx"] + SOURCES + exam["mid_q"] + question + exam["tail"]
        messages = [
            {"role": "system", "content": exam["system_prompt"]},
            {"role": "user", "content": asked},
        ]
        said = Conversation(messages, template_options={"enable_thinking": False})
        before, _, after = self._engine.render(said).partition(SOURCES)
        encode = self._engine.encode
        return encode(before, add_special_tokens=False), encode(after, add_special_tokens=False)


def run(settings: Settings, bench: Bench) -> Report:
    for name in ("data", "out"):
        if not getattr(settings, name):
            raise ConfigError(f"{name} is missing; see python -m benchmarks arena --help")
    try:
        options = json.loads(settings.options)
    except ValueError as error:
        raise ConfigError(f"options={settings.options!r} is no JSON: {error}") from error
    try:
        contract, harness = (
            import_module(f"kvsharearena.{name}") for name in ("contract", "harness")
        )
    except ImportError as error:
        raise ConfigError(
            f"{error}; clone https://github.com/xishi404/KVShareArena, then "
            "pip install --no-deps -e KVShareArena"
        ) from error
    bench.machine = dict(here())
    contract.register(NAME)(type("KVBoostMethod", (Method, contract.BaseRepairMethod), {}))
    done = harness.run(
        NAME,
        settings.model,
        "re",
        settings.subset,
        n=settings.limit,
        data_dir=settings.data,
        out=settings.out,
        method_cfg=options,
    )
    return Report({"summary": done["summary"]}, [json.dumps(done["summary"])])
