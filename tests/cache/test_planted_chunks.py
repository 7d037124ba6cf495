"""Chunks that others wrote into the folder, the remote store or an archive: whole, and wrong. An
engine refuses them, counts them, and answers as if they were not there."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvboost import GenerationMode
from kvboost.cache import codec
from kvboost.cache.folder import CacheFolder, Imported
from kvboost.cache.lookup.catalogue import holding, preceding
from kvboost.tokens.hashing import ChunkKey, as_token_ids
from support.chunks import make_chunk
from support.planting import BAD_HEADERS, PROMPT, WRONG, chunk_files, plant, remote, rewrite

PREFIX = GenerationMode.PREFIX_CACHE


def in_the_middle(folder: Path) -> Path:
    """The file of a chunk that neither begins nor ends the prompt."""
    entries = CacheFolder(folder).entries()
    (key,) = {entry.info.key for entry in entries if entry.info.base_position == 64}
    return folder / key[:2] / f"{key}.safetensors"


def ends(work: Callable[[], object]) -> bool:
    """Whether ``work`` returns in time."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(120)
    return not thread.is_alive()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_chunk_on_disk_is_put_into_quarantine(wrong, open_engine, expected, tmp_path):
    folder = tmp_path / "kv"
    path = in_the_middle(folder)
    rewrite(path, WRONG[wrong])
    engine = open_engine()
    for _ in range(2):
        assert engine.generate(PROMPT, 4, PREFIX).token_ids == expected
    assert engine.cache_stats()["tiers"]["disk"]["faults"] == {"corrupt": 1}
    assert (folder / "quarantine" / path.name).exists()
    assert engine.check_integrity() == []


@pytest.mark.parametrize(
    "wrong", ["a layer missing", "another dtype", "another position", "another root"]
)
def test_a_wrong_chunk_in_a_remote_store_is_deleted_there(wrong, open_engine, expected, tmp_path):
    path = tmp_path / "far" / in_the_middle(tmp_path / "kv").relative_to(tmp_path / "kv")
    rewrite(path, WRONG[wrong])
    engine = open_engine(disk_cache_dir=None, **remote(tmp_path))
    before = path.read_bytes()
    for _ in range(2):
        assert engine.generate(PROMPT, 4, PREFIX).token_ids == expected
    assert engine.cache_stats()["tiers"]["remote"]["faults"] == {"corrupt": 1}
    assert not path.exists() or path.read_bytes() != before  # or written again by then
    assert engine.check_integrity() == []


@pytest.mark.parametrize("wrong", ["a layer missing", "broadcastable", "another position"])
def test_a_wrong_chunk_does_not_serve_moved_text(wrong, open_engine, expected, tmp_path) -> None:
    options = {"reuse_moved": "always", "recompute_strategy": "none"}
    prompt = "Something else entirely. " + PROMPT + " What now?"
    path = in_the_middle(tmp_path / "kv")  # before others are written beside it
    honest = open_engine(**options).generate(prompt, 4)
    rewrite(path, WRONG[wrong])
    engine = open_engine(**options)
    result = engine.generate(prompt, 4)
    assert 0 < result.moved_tokens < honest.moved_tokens
    assert engine.cache_stats()["tiers"]["disk"]["faults"] == {"corrupt": 1}


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_chunk_must_have_all_of_its_tensors(bits, open_engine, tmp_path) -> None:
    options = {"kv_cache_bits": bits, "chunk_size": 64}
    with open_engine(**options) as engine:
        expected = engine.generate(PROMPT, 4, GenerationMode.BASELINE).token_ids
        engine.generate(PROMPT, 4, PREFIX)
        first = engine.generate(PROMPT, 4, PREFIX).token_ids
    files = {
        codec.read_file(path).info.base_position: path for path in chunk_files(tmp_path / "kv")
    }
    path = files[0]
    rewrite(path, WRONG["tensors missing"])
    engine = open_engine(**options)
    assert engine.generate(PROMPT, 4, PREFIX).token_ids in (expected, first)
    assert engine.cache_stats()["tiers"]["disk"]["faults"] == {"corrupt": 1}


def imported(folder: Path, path: Path, tmp_path: Path) -> Imported:
    """What another folder takes from an archive of this file."""
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        archive.add(path, path.relative_to(folder).as_posix())
    done = CacheFolder(tmp_path / "other", create=True).install(tmp_path / "evil.tar")
    assert done.installed == len(chunk_files(tmp_path / "other"))
    return done


@pytest.mark.parametrize("header", BAD_HEADERS)
@pytest.mark.usefixtures("expected")
def test_a_bad_header_is_one_fault_and_goes_into_quarantine(header: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    place = plant(in_the_middle(folder), **BAD_HEADERS[header])
    done = imported(folder, place, tmp_path)
    assert (done.installed, done.refused) == (0, 1)
    assert CacheFolder(folder).verify().bad == 1
    assert not place.exists() and (folder / "quarantine" / place.name).exists()


@pytest.mark.parametrize(
    "header", ["a huge position", "no tokens, and itself before", "a long name", "a short before"]
)
def test_a_bad_header_stops_no_start(header, open_engine, expected, tmp_path) -> None:
    plant(in_the_middle(tmp_path / "kv"), **BAD_HEADERS[header])
    engine = open_engine()
    assert engine.generate(PROMPT, 4, PREFIX).token_ids == expected
    assert engine.cache_stats()["tiers"]["disk"]["faults"] == {"corrupt": 1}
    assert engine.check_integrity() == []


@pytest.mark.parametrize("wrong", ["tensors missing", "four dimensions", "whole numbers"])
def test_an_archive_does_not_carry_impossible_tensors_in(wrong, open_engine, expected, tmp_path):
    folder = tmp_path / "kv"
    path = in_the_middle(folder)
    rewrite(path, WRONG[wrong])
    done = imported(folder, path, tmp_path)
    assert (done.installed, done.refused) == (0, 1)
    assert CacheFolder(folder).verify().bad == 1


def test_forgetting_ends_although_a_chunk_without_tokens_precedes_itself(
    open_engine, expected, tmp_path
) -> None:
    plant(in_the_middle(tmp_path / "kv"), **BAD_HEADERS["no tokens, and itself before"])
    engine = open_engine()
    assert ends(lambda: engine.forget("the lazy dog"))
    assert engine.generate(PROMPT, 4, PREFIX).token_ids == expected


def test_every_walk_along_before_and_parent_ends() -> None:
    names = [ChunkKey(f"{number:032x}") for number in range(4)]
    # Two chunks before one another, and one before itself.
    links = {0: 1, 1: 0, 2: 2, 3: 2}
    infos = {
        names[number]: make_chunk(
            [number], key=names[number], parent=names[link], position=5 if number < 3 else 9
        ).info
        for number, link in links.items()
    }
    found: list[list[ChunkKey]] = []
    for parents in (False, True):
        assert ends(
            lambda parents=parents: found.extend(
                [info.key for info in preceding(infos, infos[name], parents=parents)]
                for name in names
            )
        )
    assert found == [[], [], [], [names[2]]] * 2
    assert ends(lambda: holding(infos, [as_token_ids(range(3))]))


def test_a_position_that_contradicts_the_chunk_before_is_refused(open_engine, expected, tmp_path):
    """Nothing in the header itself shows it: the chunk before ends elsewhere."""
    path = in_the_middle(tmp_path / "kv")
    rewrite(path, WRONG["another position"])
    assert CacheFolder(tmp_path / "kv").verify().bad == 0
    engine = open_engine()
    result = engine.generate(PROMPT, 4, PREFIX)
    assert result.token_ids == expected and result.exact_tokens == 64


def test_what_is_planted_without_a_change_is_accepted(open_engine, expected, tmp_path) -> None:
    """So the other tests fail for what the header says, and not for how it was planted."""
    folder = tmp_path / "kv"
    path = in_the_middle(folder)
    assert plant(path) == path
    assert CacheFolder(folder).verify()
