from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.data import ChunkData
from kvboost.cache.quantize import plain
from kvboost.cache.tiers.open import open_tiers
from kvboost.config import EngineConfig
from kvboost.integrations.vllm.options import Options, RequestOptions
from kvboost.integrations.vllm.planner import (
    LEAST_ROWS,
    Hello,
    Keep,
    Load,
    Planner,
    prompt_ids,
    salt_of,
)
from kvboost.reuse import repair
from kvboost.reuse.plan import LIVE_TOKENS
from kvboost.reuse.repair import MovedText
from kvboost.tokens.hashing import ChunkKey, TokenIds
from support.planting import chunk_files
from support.redis_server import MISSING, RedisServer

PAGE, CHUNK = 32, 32
WEIGHTS = Hello("weights", "a model", row_bytes=2 * 4)
Start = Callable[..., Planner]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Planner] = []

    def start(
        hello: Hello = WEIGHTS, page: int = PAGE, resumes: bool = False, **extra: Any
    ) -> Planner:
        options = {"chunk_size": CHUNK, "reuse_moved": "always", **extra}
        planner = Planner(Options.parse(options), page, resumes=resumes)
        planner.open([hello])
        started.append(planner)
        return planner

    yield start
    for planner in started:
        planner.close()


def text(seed: int, length: int) -> TokenIds:
    return prompt_ids(np.random.default_rng(seed).integers(0, 10_000, length).tolist())


def join(*texts: TokenIds) -> TokenIds:
    return prompt_ids(np.concatenate(texts).tolist())


def asked(mode: str = "repaired", ratio: float = 0.15, **more: Any) -> RequestOptions:
    return RequestOptions(mode, ratio, **more)


def keep(
    planner: Planner,
    ids: TokenIds,
    salt: str = "",
    asked: RequestOptions = asked(),  # noqa: B008
) -> tuple[ChunkInfo, ...]:
    kept, _ = planner.keep(ids, (tuple(range(1, 100)),), salt, asked)
    return kept.infos if kept is not None else ()


def plan(
    planner: Planner,
    ids: TokenIds,
    local: int = 0,
    salt: str = "",
    asked: RequestOptions = asked(),  # noqa: B008
) -> Load | None:
    load = planner.plan("request", ids, local, salt, asked)
    if load is not None:
        check(load, local, ids)
        assert planner.may_know(ids.tolist(), local, salt, asked)
    return load


def check(load: Load, local: int, ids: TokenIds) -> None:
    """What must hold of every load: each row has one source, and the tokens are the same."""
    assert load.first == local and load.end % PAGE == 0 and load.end < len(ids)
    rows: list[int] = []
    for hit in (*load.plan.in_place, *(hit for run in load.plan.moved for hit in run.hits)):
        assert hit.num_tokens > 0
        there = hit.chunk.token_ids[hit.offset : hit.offset + hit.num_tokens]
        assert there.tolist() == ids[hit.start : hit.end].tolist()
        rows += range(hit.start, hit.end)
    rows += [row for some in load.computed() for row in some]
    assert sorted(rows) == list(range(local, load.end))
    if not load.plan.moved:
        assert not load.computed(), "only a repair computes rows"


def known_keys(planner: Planner, ids: TokenIds, salt: str = "") -> set[ChunkKey]:
    load = plan(planner, ids, salt=salt)
    return set() if load is None else {info.key for info in load.infos}


# Exact text.


@pytest.mark.parametrize("local", [0, 96, 320])
def test_a_glance_tells_that_nothing_is_known(start: Start, local: int) -> None:
    planner, ids = start(), text(1, 900)
    exact = asked("exact")

    def may_know(ids: TokenIds, **other: Any) -> bool:
        given = {"salt": "", "asked": exact, **other}
        return planner.may_know(ids.tolist(), local, **given)

    assert not may_know(ids)
    keep(planner, ids[:600])
    assert may_know(ids) and plan(planner, ids, local, asked=exact) is not None
    assert may_know(ids, asked=asked()) and not may_know(ids, asked=asked("off"))
    assert not may_know(ids, salt="another")
    assert not may_know(ids[: local + LEAST_ROWS])
    other = join(ids[:local], text(2, 600))  # known up to where vLLM's pages end
    assert not may_know(other) and plan(planner, other, local, asked=exact) is None
    planner.forget()
    assert not may_know(ids)


def test_nothing_is_planned_before_the_workers_are_ready() -> None:
    planner = Planner(Options.parse({}), PAGE)
    assert not planner.is_open
    assert planner.plan("request", text(1, 300), 0, "", asked()) is None
    assert planner.keep(text(1, 300), ((1,),), "", asked()) == (None, [])
    assert planner.forget() == []
    planner.gone([ChunkKey("00")])


@pytest.mark.parametrize("length", [127, 128, 129, 160, 161, 300])
def test_the_last_row_is_left_to_vllm(start: Start, length: int) -> None:
    planner, ids = start(), text(1, length)
    assert len(keep(planner, ids)) == -(-length // CHUNK)
    load = plan(planner, ids)
    assert load is not None and not load.plan.moved and load.plan.num_tokens == length
    assert load.end == load.exact_rows == (length - 1) // PAGE * PAGE < length


def test_rows_that_vllm_has_are_not_loaded(start: Start) -> None:
    planner, ids = start(), text(1, 300)
    keep(planner, ids)
    load = plan(planner, ids, local=96)
    assert load is not None and (load.first, load.end) == (96, 288)
    assert load.plan.in_place[0].start == 96
    assert plan(planner, ids, local=288 - LEAST_ROWS + PAGE) is None


def test_a_load_ends_with_a_page_of_vllm_where_chunks_do_not(start: Start) -> None:
    planner, ids = start(chunk_size=48), text(1, 300)
    keep(planner, ids[:240])
    load = plan(planner, join(ids[:240], text(2, 60)), asked=asked("exact"))
    assert load is not None and load.end == 224
    assert load.plan.in_place[-1].end == 224 and load.plan.in_place[-1].chunk.end == 240


def test_a_common_beginning_that_ends_within_a_page_serves_whole_pages(start: Start) -> None:
    planner, ids = start(), text(1, 300)
    keep(planner, ids)
    load = plan(planner, join(ids[:150], text(2, 150)))
    assert load is not None and load.end == 128 and not load.plan.moved


def test_few_rows_are_computed(start: Start) -> None:
    planner = start()
    keep(planner, text(1, 50))
    assert plan(planner, join(text(1, 50), text(2, 100))) is None


def test_modes(start: Start) -> None:
    planner, ids = start(), text(1, 200)
    keep(planner, ids)
    moved = join(text(2, 40), ids)
    assert plan(planner, ids, asked=asked("off")) is None
    assert plan(planner, moved, asked=asked("exact")) is None
    exact, repaired = (plan(planner, ids, asked=asked(mode)) for mode in ("exact", "repaired"))
    assert exact is not None and repaired is not None
    assert exact.exact_rows == exact.end == repaired.end
    assert keep(start(), ids, asked=asked("off")) == ()


def test_what_is_kept_grows_while_its_first_rows_are_stored(start: Start) -> None:
    planner, ids = start(chunk_size=64), text(1, 200)
    tables = (tuple(range(1, 9)),) * 2

    def keep_to(rows: int, first: int) -> Keep | None:
        return planner.keep(ids[:rows], tables, "", asked(), first)[0]

    keep_to(100, 0)
    grown = keep_to(180, 100)
    assert grown is not None and (grown.first, grown.tables) == (100, tables)
    assert [(info.base_position, info.end) for info in grown.infos] == [(64, 128), (128, 180)]
    assert [(hit.start, hit.end) for hit in grown.earlier] == [(64, 100)]
    assert planner.num_stored(ids, "") == 180
    planner.gone([info.key for info in grown.infos])
    assert planner.num_stored(ids, "") == 64
    assert keep_to(200, 180) is None and planner.num_stored(ids, "") == 64


# Moved text.


def test_moved_text_is_found_and_the_rest_computed(start: Start) -> None:
    planner, document = start(), text(1, 160)
    keep(planner, join(text(2, 40), document))
    prompt = join(text(3, 70), document, text(4, 40))
    load = plan(planner, prompt)
    assert load is not None and load.end == 256
    assert load.plan.num_moved > 100 and load.exact_rows == load.plan.moved[0].start >= 70
    assert load.plan.moved[-1].end <= len(prompt) - LIVE_TOKENS
    assert load.computed()[0].start == 0


def test_a_probe_attends_to_no_row_between_the_load_and_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are such rows where pages are longer than the end of the prompt that is probed."""
    monkeypatch.setattr(repair, "PROBE_ROWS", 16)
    planner, document = start(), text(1, 160)
    keep(planner, join(text(2, 40), document))
    prompt = join(text(3, 70), document, text(4, 54))
    load = plan(planner, prompt)
    assert load is not None and load.end == 256
    probe = MovedText(load.plan, len(prompt), 4).probe_attention()
    assert probe.positions.tolist() == list(range(268, 284)) and probe.absent is not None
    assert probe.absent[230:268].all() and not probe.absent[268:].any()


def test_text_that_was_read_in_several_contexts_is_loaded_from_all_of_them(start: Start) -> None:
    planner, document = start(), text(1, 160)
    for number in (2, 3, 4):
        keep(planner, join(text(number, 40), document))
    load = plan(planner, join(text(5, 70), document, text(6, 40)))
    assert load is not None and len(load.copies) == 2
    for copy in load.copies:
        assert {(hit.start, hit.end) for hit in copy} <= {
            (hit.start, hit.end) for hit in load.plan.hits
        }
    needed = [info.key for info in load.infos]
    assert len(set(needed)) == len(needed) == 3 * len(load.plan.hits)
    assert load.failed().infos == []


def test_a_moved_run_that_begins_after_the_last_whole_page_is_left_out(start: Start) -> None:
    """Otherwise rows between the exact ones and it would count as loaded and be computed by
    nobody."""
    planner = start(page=128)
    known, document = text(1, 192), text(2, 64)
    keep(planner, known)
    keep(planner, join(text(3, 32), document))
    prompt = join(known, text(4, 70), document, text(5, 30))
    assert plan(start(), prompt) is None  # nothing known
    load = plan(planner, prompt)
    assert load is not None and load.end == 128 and not load.plan.moved


def test_where_the_self_check_failed_nothing_is_moved(start: Start) -> None:
    planner = start(Hello("weights", "a model", 8, moved_problem="they differ"))
    ids = text(1, 200)
    keep(planner, ids)
    assert plan(planner, join(text(2, 40), ids)) is None
    assert plan(planner, ids) is not None


def test_the_ratio_of_a_request_reaches_the_worker(start: Start) -> None:
    planner, ids = start(recompute_ratio=0.3, recompute_strategy="query"), text(1, 200)
    keep(planner, ids)
    load = plan(planner, join(text(2, 40), ids), asked=asked(ratio=0.4))
    assert load is not None
    assert (load.repair.ratio, load.repair.strategy) == (0.4, "query")


def test_no_chunk_crosses_a_boundary(start: Start) -> None:
    planner, ids = start(), text(1, 100)
    infos = keep(planner, ids, asked=asked(boundaries=(50, 10, 500)))
    ends = [info.end for info in infos]
    assert ends == [10, 42, 50, 82, 100]


# What pays.


def fast_rows(fixed: float) -> tuple[tuple[int, int, float], ...]:
    """Forwards that take ``fixed`` seconds and a millisecond a row."""
    return tuple((rows, rows // 2, fixed + rows / 1000) for rows in (8, 64, 512, 512, 512))


@pytest.mark.parametrize(("fixed", "is_moved"), [(0.001, True), (10.0, False)])
def test_moved_text_is_reused_when_that_is_faster(
    start: Start, fixed: float, is_moved: bool
) -> None:
    hello = Hello("weights", "a model", 8, measured=fast_rows(fixed))
    planner, ids = start(hello, reuse_moved="when_faster"), text(1, 400)
    keep(planner, ids)
    load = plan(planner, join(text(2, 40), ids))
    assert (load is not None and bool(load.plan.moved)) == is_moved


@pytest.mark.parametrize(("length", "is_moved"), [(1000, False), (2500, False), (4000, True)])
@pytest.mark.parametrize("fixed", [0.0025, 0.0035, 0.0045])
def test_short_prompts_are_read_where_reading_is_fast(
    start: Start, fixed: float, length: int, is_moved: bool
) -> None:
    """Forwards of an H200 and a model of 1.5B: 2,500 tokens are read in 18 ms."""
    row = (0.018 - fixed) / 2500
    measured = tuple((rows, rows // 2, fixed + rows * row) for rows in (128, 512, 2048))
    hello = Hello("weights", "a model", 8, measured=measured)
    planner = start(hello, reuse_moved="when_faster", chunk_size=512)
    documents = [text(number, (length - 130) // 8) for number in range(8)]
    planner.keep(join(text(8, 64), *documents), (tuple(range(1, 200)),), "", asked())
    order = [documents[number] for number in (3, 1, 0, 2, 5, 7, 6, 4)]
    load = plan(planner, join(text(9, 70), *order, text(10, 60)))
    assert (load is not None and bool(load.plan.moved)) == is_moved


def test_costs_are_learned_from_reports(start: Start) -> None:
    planner, ids = start(reuse_moved="when_faster"), text(1, 400)
    keep(planner, ids)
    prompt = join(text(2, 40), ids)
    assert plan(planner, prompt) is not None
    planner.learn(fast_rows(10.0))
    assert plan(planner, prompt) is None


def test_only_auto_weighs_costs(start: Start) -> None:
    hello = Hello("weights", "a model", 8, measured=fast_rows(10.0))
    planner = start(hello, reuse_moved="when_faster", recompute_strategy="query")
    keep(planner, text(1, 400))
    assert plan(planner, join(text(2, 40), text(1, 400))) is not None


def searches(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Before which rows plans have looked for moved text."""
    assert planner.index is not None
    found: list[int] = []
    lookup = planner.index.lookup

    def watched(root: ChunkKey, ids: TokenIds, *, moved_before: int = 0) -> Any:
        found.append(moved_before)
        return lookup(root, ids, moved_before=moved_before)

    monkeypatch.setattr(planner.index, "lookup", watched)
    return found


def test_where_moving_cannot_pay_nobody_looks_for_moved_text(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = Hello("weights", "a model", 8, measured=fast_rows(0.1))
    planner = start(hello, reuse_moved="when_faster")
    searched = searches(planner, monkeypatch)
    for length in (100, 120, 200, 400, 2000):
        plan(planner, text(1, length))
    assert searched == [0, 0, 184, 384, 1984]
    planner = start(hello, reuse_moved="always")
    searched = searches(planner, monkeypatch)
    plan(planner, text(1, 100))
    assert searched == [84]


@given(st.floats(0.0, 1.0), st.integers(80, 700), st.integers(0, 500), st.sampled_from([0, 32, 64]))
@settings(max_examples=40, deadline=None)
def test_looking_only_where_it_may_pay_changes_no_plan(
    fixed: float, known: int, more: int, local: int
) -> None:
    hello = Hello("weights", "a model", 8, measured=fast_rows(fixed))
    planner = Planner(Options.parse({"chunk_size": CHUNK}), PAGE)
    planner.open([hello])
    keep(planner, text(1, known))
    prompt = join(text(2, 70), text(1, known), text(3, more + 1))
    found = plan(planner, prompt, local)
    planner._may_pay = lambda *_: True  # type: ignore[method-assign]
    assert plan(planner, prompt, local) == found


def test_what_may_change_plans_is_counted(start: Start) -> None:
    planner, ids = start(), text(1, 200)
    numbers = [planner.num_changes]

    def changes() -> bool:
        numbers.append(planner.num_changes)
        return numbers[-1] > numbers[-2]

    keys = [info.key for info in keep(planner, ids)]
    assert changes()
    keep(planner, ids)
    plan(planner, ids)
    planner.gone([])
    planner.learn([])
    assert not changes()
    planner.gone(keys[-1:])
    assert changes()
    planner.learn(fast_rows(0.1))
    assert changes()
    assert set(planner.forget()) == set(keys[:-1]) and changes()
    assert plan(planner, ids) is None


# Who may reuse what.


def test_salts_and_adapters_are_kept_apart(start: Start) -> None:
    planner, ids = start(), text(1, 200)
    salts = [("a", "b"), ("ab", ""), ("", "ab"), ("a", None), (None, "a"), (None, None)]
    names = [salt_of(*one) for one in salts]
    assert len(set(names)) == len(names) and salt_of("", "") == salt_of(None, None)
    keep(planner, ids, salt=names[0])
    for name in names:
        for prompt in (ids, join(text(2, 40), ids)):
            assert (plan(planner, prompt, salt=name) is not None) == (name == names[0])


def test_other_weights_find_nothing(start: Start, tmp_path: Path) -> None:
    ids = text(1, 200)
    write(start(disk_cache_dir=tmp_path), ids, disk_cache_dir=tmp_path)
    assert plan(start(disk_cache_dir=tmp_path), ids) is not None
    other = start(Hello("other weights", "a model", 8), disk_cache_dir=tmp_path)
    assert plan(other, ids) is None


# The data is elsewhere.


def write(planner: Planner, ids: TokenIds, **options: Any) -> tuple[ChunkInfo, ...]:
    """Keeps ``ids`` as a worker does, in the folder and the remote store of ``options``."""
    infos = keep(planner, ids)
    data = ChunkData(open_tiers(EngineConfig(**options), torch.device("cpu")))
    data.put([KVChunk(info, plain(torch.zeros(2, 1, 1, info.num_tokens, 1))) for info in infos])
    data.flush()
    data.close()
    return infos


def test_what_another_process_writes_is_found(start: Start, tmp_path: Path) -> None:
    mine, other = start(disk_cache_dir=tmp_path), start(disk_cache_dir=tmp_path)
    ids = text(1, 200)
    assert plan(mine, ids) is None
    write(other, ids, disk_cache_dir=tmp_path)
    look_again(mine)
    load = plan(mine, ids)
    assert load is not None and {hit.tier for hit in load.plan.in_place} == {"disk"}
    moved = plan(mine, join(text(2, 40), ids))
    assert moved is not None and moved.plan.num_moved > 100


def test_what_another_process_removes_is_gone(start: Start, tmp_path: Path) -> None:
    mine, other = start(disk_cache_dir=tmp_path), start(disk_cache_dir=tmp_path)
    ids = text(1, 200)
    write(other, ids, disk_cache_dir=tmp_path)
    look_again(mine)
    assert plan(mine, ids) is not None
    for path in chunk_files(tmp_path):
        path.unlink()
    for planner in (mine, other):
        look_again(planner)
    assert plan(mine, ids) is None
    assert plan(other, ids) is not None  # its worker has it in memory, as far as it knows


def look_again(planner: Planner) -> None:
    """A folder that was looked at a moment ago is not looked at again."""
    assert planner.disk is not None
    planner.disk._refreshed = float("-inf")


def test_of_several_workers_each_has_a_folder_of_its_own(start: Start, tmp_path: Path) -> None:
    options = Options.parse({"disk_cache_dir": str(tmp_path)})
    assert options.engine_of(0, 1) == options.engine
    folder = options.engine_of(0, 2).disk_cache_dir
    assert folder != options.engine_of(1, 2).disk_cache_dir
    ids, hellos = text(1, 200), [WEIGHTS, Hello("other heads", "a model", 8)]
    planners = [Planner(Options.parse({"disk_cache_dir": str(tmp_path)}), PAGE) for _ in range(2)]
    for planner in planners:
        planner.open(hellos)
        assert plan(planner, ids) is None
    write(planners[0], ids, disk_cache_dir=folder)
    look_again(planners[1])
    assert plan(planners[1], ids) is not None
    for planner in planners:
        planner.close()


def test_with_a_secret_unsigned_files_are_passed_over(start: Start, tmp_path: Path) -> None:
    secret, ids = "0123456789abcdef" * 2, text(1, 200)
    write(start(disk_cache_dir=tmp_path), ids, disk_cache_dir=tmp_path)
    signing = start(disk_cache_dir=tmp_path, cache_secret=secret)
    assert plan(signing, ids) is None
    write(signing, ids, disk_cache_dir=tmp_path, cache_secret=secret)
    assert plan(start(disk_cache_dir=tmp_path, cache_secret=secret), ids) is not None


def test_the_remote_store_is_asked_for_what_is_not_here(start: Start, tmp_path: Path) -> None:
    remote = {"remote_cache_url": f"file://{tmp_path}", "remote_cache_bytes": 1 << 24}
    ids = text(1, 200)
    write(start(**remote), ids, **remote)
    mine = start(**remote)
    load = plan(mine, ids)
    assert load is not None and {hit.tier for hit in load.plan.in_place} == {"remote"}
    assert load.end == 192
    # What a plan does not use is not remembered: it may leave the store at any time.
    unused = start(**remote)
    assert plan(unused, ids, local=160) is None
    assert unused.index is not None and len(unused.index) == 0


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_moved_text_that_only_redis_has_is_planned(start: Start, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        ids = text(1, 210)
        write(start(remote_cache_url=server.url, chunk_size=64), ids, remote_cache_url=server.url)
        mine = start(remote_cache_url=server.url, chunk_size=64)
        load = plan(mine, join(text(2, 40), ids, text(3, 40)))
    finally:
        server.close()
    assert load is not None and {hit.tier for hit in load.plan.hits} == {"remote"}
    assert (
        load.plan.num_moved == 210
    )  # the last chunk is too short for a mark, and follows the others


def test_what_a_worker_lost_is_not_planned_again(start: Start) -> None:
    planner, ids = start(), text(1, 200)
    infos = keep(planner, ids)
    planner.gone([infos[3].key, ChunkKey("unknown")])
    load = plan(planner, ids, asked=asked("exact"))
    assert load is not None and load.end == 96
    assert [info.key for info in keep(planner, ids)] == [infos[3].key]
    assert known_keys(planner, ids) == {info.key for info in infos[:6]}


def test_a_search_finds_a_text_and_what_follows_it_under_one_salt(start: Start) -> None:
    planner, ids, other = start(), text(1, 200), text(2, 200)
    infos = keep(planner, ids)
    keep(planner, other)
    mine = keep(planner, ids, salt="mine")
    found = planner.search("", [ids[100:140]])()
    assert found.problem == ""
    assert set(found.keys) == {info.key for info in infos if info.end > 100}
    planner.gone(found.keys)
    assert known_keys(planner, ids) == {info.key for info in infos[:3]}
    assert len(known_keys(planner, other)) == 6
    assert planner.num_chunks("mine") == len(mine) == 7
    everything = planner.search("mine", None)()
    assert set(everything.keys) == {info.key for info in mine}


@pytest.mark.parametrize("place", ["disk_cache_dir", "remote_cache_url"])
def test_a_search_finds_what_another_process_has_written(
    start: Start, tmp_path: Path, place: str
) -> None:
    there: dict[str, Any] = {"disk_cache_dir": tmp_path}
    if place == "remote_cache_url":
        there = {place: f"file://{tmp_path}", "remote_cache_bytes": 1 << 24}
    mine, other, ids = start(**there), start(**there), text(1, 200)
    infos = write(other, ids, **there)
    found = mine.search("", [ids[100:140]])()
    assert set(found.keys) == {info.key for info in infos if info.end > 100}
    assert found.problem == ""
    assert mine.search("mine", None)().keys == []


def test_a_shorter_chunk_that_is_replaced_is_dropped(start: Start) -> None:
    planner, ids = start(), text(1, 200)
    short = keep(planner, ids[:150])
    kept, replaced = planner.keep(ids, range(9), "", asked())
    assert kept is not None and replaced == [short[-1].key]
    assert [info.base_position for info in kept.infos] == [128, 160, 192]


def test_a_load_that_failed_has_loaded_nothing(start: Start) -> None:
    planner, ids = start(), text(1, 200)
    keep(planner, ids)
    load = plan(planner, join(text(2, 40), ids))
    assert load is not None and load.plan.moved
    failed = load.failed()
    assert (failed.first, failed.end, failed.plan.num_moved, failed.infos) == (0, 0, 0, [])
    assert failed.exact_rows == 0


# Models with states.

STATEFUL = Hello("weights", "a model", row_bytes=8, state_rows=100)


def test_a_prompt_goes_on_from_the_last_states_that_it_shares(start: Start) -> None:
    planner, ids = start(resumes=True), text(1, 320)
    first = keep(planner, ids[:192])
    assert [info.has_state for info in first] == [False] * 5 + [True]
    again = keep(planner, ids[:288])  # the next step of the same request
    assert [info.base_position for info in again] == [192, 224, 256] and again[-1].has_state
    for length, end in ((320, 288), (280, 192), (180, None)):
        load = plan(planner, ids[:length])
        assert (None if load is None else load.end) == end
    assert plan(planner, ids, local=288) is None  # vLLM has as much
    assert planner.num_stored(ids, "") == 288


def test_chunks_up_to_the_last_states_stay_as_they_are(start: Start) -> None:
    planner, ids = start(resumes=True, chunk_size=128), text(1, 640)
    assert [info.num_tokens for info in keep(planner, ids[:160])] == [128, 32]
    assert [info.num_tokens for info in keep(planner, ids[:576])] == [128, 128, 128, 32]
    assert not keep(planner, ids[:576]) and not keep(planner, ids[:160])
    other = join(ids[:288], text(2, 200))
    assert [info.base_position for info in keep(planner, other[:448])] == [288, 416]


def test_states_within_a_page_are_passed_over(start: Start, tmp_path: Path) -> None:
    """Another process may have had smaller pages."""
    ids = text(1, 400)
    small = start(resumes=True, page=16)
    kept = [*keep(small, ids[:192]), *keep(small, ids[:272])]
    planner = start(resumes=True)
    for info in kept:
        planner.index.add(info, "disk")  # type: ignore[union-attr]
    load = plan(planner, ids)
    assert load is not None and load.end == 192


def test_chunks_and_states_are_pages_apart(start: Start) -> None:
    def spacing(page: int, hello: Hello = STATEFUL, **extra: Any) -> tuple[int, int]:
        planner = start(hello, page, resumes=True, **extra)
        return planner.chunk_size, planner.state_every

    assert spacing(16, chunk_size=64) == (64, 112)  # as large as 100 rows
    assert spacing(48, chunk_size=100) == (96, 144)
    assert spacing(544, chunk_size=512) == (544, 544)
