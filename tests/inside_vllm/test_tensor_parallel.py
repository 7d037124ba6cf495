"""Two workers, each with half of the heads, against one that has all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvboost.integrations.vllm.repair import Repairer
from support.tiny import byte_tokenizer, tiny_model
from support.vllm_engines import Answer, Engine, Texts, here

MOVED = 400
"""Fewer rows of the prompts in another order are not moved."""
CHUNKS = {"chunk_size": 128}
"""Several for a prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with heads that two workers can share."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    tiny = tiny_model("llama", **sizes, head_dim=32, max_position_embeddings=2048)
    tiny.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> Texts:
    return Texts(byte_tokenizer())


@pytest.fixture(scope="module")
def alone(start: Callable[..., Engine], prompts: Texts) -> dict[str, Answer]:
    """The answers of one worker."""
    engine = start(CHUNKS)
    answers = {"full": engine.full(prompts.prompt(2, 1, 0))}
    answers["first"] = engine.ask(prompts.prompt(0, 1, 2))
    engine.fresh()
    answers["moved"] = engine.ask(prompts.prompt(2, 1, 0))
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engine(
    alone: dict[str, Answer], start: Callable[..., Engine], folder: Path, prompts: Texts
) -> Engine:
    """Two workers, which have read the documents in one order and written them to the folder. They
    were started again since, so they have nothing in memory."""
    extra = {**CHUNKS, "disk_cache_dir": str(folder)}
    engine = start(extra, workers=2)
    first = engine.ask(prompts.prompt(0, 1, 2))
    assert first.cached == 0 and first.usage is None
    assert first.tokens == alone["first"].tokens and first.difference(alone["first"]) < 1e-4
    return start(extra, workers=2)


@pytest.fixture(autouse=True)
def fresh(engine: Engine) -> None:
    """vLLM's own cache is empty, and nothing is left to be written."""
    engine.fresh()
    engine.llm.collective_rpc(settle)
    engine.llm.collective_rpc(watch)


def settle(_: object) -> None:
    """Returns when everything is written."""
    worker = here()
    worker.thread.submit(worker.data.flush).result()


def on_each(engine: Engine, look: Callable[[Any], Any]) -> list[Any]:
    """What ``look`` finds in both workers."""
    found: list[Any] = engine.llm.collective_rpc(look)
    assert len(found) == 2
    return found


def watch(_: object) -> None:
    """Notes the rows of our forwards from now on."""
    worker: Any = here()
    worker.seen, repairer = [], worker.repairer

    def run(ids: Any, rows: Any, *more: Any) -> None:
        worker.seen.append(rows.tolist())
        Repairer.run(repairer, ids, rows, *more)

    repairer.run = run


def seen(_: object) -> list[list[int]]:
    rows: list[list[int]] = here().seen
    return rows


def rank_and_heads(_: object) -> tuple[int, int]:
    return get_tensor_model_parallel_rank(), here().open_pages.num_kv_heads


def test_another_process_loads_the_heads_of_both_workers(
    engine: Engine, alone: dict[str, Answer], prompts: Texts, folder: Path
) -> None:
    assert on_each(engine, rank_and_heads) == [(0, 2), (1, 2)]
    again = engine.ask(prompts.prompt(0, 1, 2), "exact")
    assert again.usage is not None and again.usage["exact_tokens"] == again.cached > 600
    assert again.tokens == alone["first"].tokens and again.difference(alone["first"]) < 1e-4
    for rank in (0, 1):
        assert list((folder / f"rank-{rank}-of-2").glob("??/*.safetensors"))


def test_all_moved_rows_repaired_is_full_prefill(
    engine: Engine, alone: dict[str, Answer], prompts: Texts
) -> None:
    repaired = engine.ask(prompts.prompt(2, 1, 0), {"ratio": 1.0})
    assert repaired.usage is not None and repaired.usage["moved_tokens"] > MOVED
    assert all(sum(map(len, rows)) > MOVED for rows in on_each(engine, seen))
    assert repaired.tokens == alone["full"].tokens
    assert repaired.difference(alone["full"]) < 1e-4


def test_workers_choose_the_rows_that_one_worker_would(
    engine: Engine, alone: dict[str, Answer], prompts: Texts
) -> None:
    moved = engine.ask(prompts.prompt(2, 1, 0))
    assert moved.usage is not None and moved.usage == alone["moved"].usage
    first, second = on_each(engine, seen)
    assert first == second and sum(map(len, first)) >= moved.usage["recomputed_tokens"] > 50
    assert moved.tokens == alone["moved"].tokens and moved.difference(alone["moved"]) < 1e-4
    assert moved.logprobs[0] != alone["full"].logprobs[0]


class Late:
    """A thread whose results of fetching are there only when they were asked for four times."""

    def __init__(self, thread: Any) -> None:
        self._thread = thread
        self.asked = 0

    def submit(self, call: Any, *given: Any) -> Any:
        coming: Future[Any] = self._thread.submit(call, *given)
        if call.__name__ != "_bring":
            return coming
        result = coming.result()
        late: Any = Future()
        late.set_result(result)
        late.done = self._is_done
        return late

    def _is_done(self) -> bool:
        self.asked += 1
        return self.asked > 4


def make_late(_: object) -> None:
    """The second worker's chunks come late from now on; the first has them in memory."""
    worker = here()
    if get_tensor_model_parallel_rank() == 1:
        worker.thread = Late(worker.thread)
        worker.data.at_hand = lambda planned: None


def make_punctual(_: object) -> int:
    worker = here()
    if get_tensor_model_parallel_rank() == 0:
        return 0
    late, worker.thread = worker.thread, worker.thread._thread
    del worker.data.at_hand
    return int(late.asked)


def test_workers_wait_for_each_other_while_another_request_runs(
    engine: Engine, alone: dict[str, Answer], prompts: Texts
) -> None:
    engine.ask(prompts.prompt(0, 1, 2), "exact")
    engine.fresh()
    engine.llm.collective_rpc(make_late)
    bystander = engine.add(prompts.question, "off", 40)
    for _ in range(4):
        engine.engine.step()
    request = engine.add(prompts.prompt(2, 1, 0))
    answers = engine.finish()
    assert on_each(engine, make_punctual) == [0, 5]
    assert answers[request].usage == alone["moved"].usage
    assert answers[request].tokens == alone["moved"].tokens
    assert answers[request].difference(alone["moved"]) < 1e-4
    assert len(answers[bystander].tokens) == 40


def forget(_: object) -> int:
    """The second worker loses everything, and the scheduler does not know."""
    data = here().data
    if get_tensor_model_parallel_rank() == 0:
        return 0
    keys = list(data._known)
    data.drop(keys)
    return len(keys)


def test_what_one_worker_has_lost_is_computed_and_kept_again(
    engine: Engine, alone: dict[str, Answer], prompts: Texts
) -> None:
    lost = on_each(engine, forget)
    assert lost[0] == 0 < lost[1]
    moved = engine.ask(prompts.prompt(2, 1, 0))
    assert moved.usage is not None and set(moved.usage.values()) == {0}
    assert moved.tokens == alone["full"].tokens and moved.difference(alone["full"]) < 1e-4
    for _ in range(3):  # chunks that this load did not need are missed by the next one
        engine.fresh()
        exact = engine.ask(prompts.prompt(0, 1, 2), "exact")
        assert exact.tokens == alone["first"].tokens
        assert exact.difference(alone["first"]) < 1e-4
    assert exact.usage is not None and exact.usage["exact_tokens"] == exact.cached > 600


def held(_: object) -> tuple[int, int]:
    """Chunks and bytes in the memory of a worker."""
    ram = here().data.stats()["ram"]
    return ram.chunks, ram.nbytes


def test_commands_reach_both_workers(engine: Engine, prompts: Texts, folder: Path) -> None:
    engine.ask(prompts.prompt(0, 1, 2), "exact", tokens=1)
    said = engine.ask([5], {"stats": True}, tokens=1).usage
    assert said is not None
    ram: Any = said["stats"]["tiers"]["ram"]
    first, second = on_each(engine, held)
    assert first == second and first[0] == ram["chunks"] > 3
    assert ram["bytes"] == first[1] + second[1]
    assert engine.ask([5], {"forget": "everything"}, tokens=1).usage is not None
    assert on_each(engine, held) == [(0, 0), (0, 0)]
    assert not list(folder.glob("*/??/*.safetensors"))
