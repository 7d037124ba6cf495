"""Engines of vLLM with the connector, and prompts for them."""

from __future__ import annotations

import bisect
import heapq
import inspect
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.outputs import RequestOutput

from kvboost.integrations.vllm.connector import KVBoostConnector
from kvboost.integrations.vllm.worker import Worker
from kvboost.model.loading.weights import models_dir

MODEL = models_dir() / "smollm2-135m"
PAGE = 32
ALWAYS = {"reuse_moved": "always"}
Mode = str | dict[str, Any]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[dict[int, float]]
    """The likeliest tokens of every step."""
    cached: int
    usage: dict[str, int] | None
    """What the connector says of the request."""

    @classmethod
    def of(cls, output: RequestOutput) -> Answer:
        assert output.finished
        one = output.outputs[0]
        logprobs = [{token: p.logprob for token, p in step.items()} for step in one.logprobs or ()]
        usage = (output.kv_transfer_params or {}).get("kvboost")
        return cls(list(one.token_ids), logprobs, output.num_cached_tokens or 0, usage)

    def difference(self, other: Answer) -> float:
        """The largest of the first token's logarithms."""
        mine, its = self.logprobs[0], other.logprobs[0]
        common = mine.keys() & its.keys()
        assert len(common) >= 3
        return max(abs(mine[token] - its[token]) for token in common)


def here() -> Any:
    """The worker in this process."""
    group = get_kv_transfer_group()
    assert isinstance(group, KVBoostConnector)
    return group.worker


class Engine:
    """vLLM in this process: its scheduler can be looked at, and its worker, unless workers have
    processes of their own."""

    def __init__(
        self, extra: dict[str, Any] | None = None, model: Path = MODEL, **options: Any
    ) -> None:
        transfer = KVTransferConfig(
            kv_connector="KVBoostConnector",
            kv_connector_module_path="kvboost.integrations.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=extra or {},
        )
        options = {"max_model_len": 2048, "enforce_eager": True, **options}
        self.llm = LLM(
            str(model),
            dtype="float32",
            block_size=PAGE,
            max_num_seqs=4,
            kv_transfer_config=transfer,
            **options,
        )
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.connector: KVBoostConnector = self.scheduler.connector
        self._number = 0

    @property
    def worker(self) -> Worker:
        worker: Worker = here()
        return worker

    @property
    def rows(self) -> int:
        """The rows that our own forwards have computed so far."""
        return self.worker.forward.num_rows

    def ask(
        self, ids: Sequence[int], mode: Mode = "repaired", tokens: int = 8, **prompt: Any
    ) -> Answer:
        request = self.add(ids, mode, tokens, **prompt)
        return self.finish()[request]

    def add(
        self, ids: Sequence[int], mode: Mode = "repaired", tokens: int = 8, **prompt: Any
    ) -> str:
        self._number += 1
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            logprobs=5,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvboost": mode}},
        )
        name = f"request {self._number}"
        self.engine.add_request(name, {"prompt_token_ids": list(ids), **prompt}, params)
        return name

    def finish(self) -> dict[str, Answer]:
        """Runs everything; the answers by request."""
        answers = {}
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            answers |= {out.request_id: Answer.of(out) for out in outputs if out.finished}
        # In a process of its own vLLM takes one more step by itself, in which rows are kept.
        self.engine.step()
        return answers

    def fresh(self) -> None:
        """Empties vLLM's own prefix cache; ours stays."""
        assert self.llm.reset_prefix_cache()

    def empty(self) -> None:
        """Empties both."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def full(self, ids: Sequence[int], tokens: int = 8) -> Answer:
        """The answer of vLLM alone; nothing is left of it."""
        self.fresh()
        answer = self.ask(ids, "off", tokens)
        assert answer.cached == 0 and answer.usage is None
        self.fresh()
        return answer

    @property
    def num_chunks(self) -> int:
        """How many chunks our store has."""
        assert self.connector.planner.index is not None
        return len(self.connector.planner.index)

    def set_slices(self, rows: int) -> None:
        self.worker.options = replace(self.worker.options, slice_rows=rows)

    def set_repair(self, strategy: str) -> None:
        planner = self.connector.planner
        config = replace(planner.options.engine, recompute_strategy=strategy)
        planner.options = replace(planner.options, engine=config)

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


class Texts:
    """A header, three documents and a question, in tokens."""

    def __init__(self, tokenizer: Any, length: int = 160) -> None:
        self.encode = tokenizer.encode
        self.head = self.encode("You are a careful assistant. Read the files.\n")
        self.documents = [
            self.encode(f"\n### File {one.__name__}\n{inspect.getsource(one)}")[:length]
            for one in (bisect, heapq, stat)
        ]
        self.question = self.encode(
            "\n\nQuestion: which function in these files inserts an item into a sorted list, and "
            "what does it do? Say also in which file it is and which of its arguments may be left "
            "out, and what happens then.\nAnswer: The function"
        )

    def prompt(self, *order: int, head: Sequence[int] | None = None) -> list[int]:
        parts = [self.head if head is None else head]
        parts += [self.documents[number] for number in order]
        return [token for part in (*parts, self.question) for token in part]


def talk_together(engine: Engine, texts: Texts, least: int) -> None:
    """Three conversations of two turns, at the same time: each has the answers that it has alone.
    Their second turns reuse all of the prompt, and at least so many tokens of the answer."""
    prompts = [texts.prompt(*order) for order in ((0, 1), (1, 2), (2, 0))]
    full = [engine.full(ids, tokens=150) for ids in prompts]
    engine.fresh()
    names = [engine.add(ids, tokens=150) for ids in prompts]
    answers = engine.finish()
    assert [answers[name].tokens for name in names] == [one.tokens for one in full]
    longer = [[*ids, *one.tokens, *texts.question] for ids, one in zip(prompts, full, strict=True)]
    expected_of = [engine.full(ids) for ids in longer]
    names = [engine.add(ids) for ids in longer]
    answers = engine.finish()
    for name, ids, expected in zip(names, prompts, expected_of, strict=True):
        turn = answers[name]
        assert turn.usage is not None and turn.usage["exact_tokens"] >= len(ids) + least
        assert turn.tokens == expected.tokens and turn.difference(expected) < 1e-4
