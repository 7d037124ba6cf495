from __future__ import annotations

import ast
import inspect
import os
import sys

import pytest
import torch

from kvboost.cache import codec
from kvboost.cache.quantize import plain
from kvboost.cache.tiers.base import Tier
from kvboost.cache.tiers.remote import tier as remote
from kvboost.cache.tiers.remote.tier import open_remote
from kvboost.errors import ConfigError
from support.chunks import make_chunk
from support.redis_server import MISSING
from support.remote_stores import (
    as_plain,
    assert_same,
    big_chunk,
    counted_size,
    opened,
    packed_chunk,
    size_of,
)


def test_another_client_gets_what_was_put(url: str) -> None:
    chunks = [make_chunk([1, 2, 3]), packed_chunk(), big_chunk(5, 3 << 20)]
    with opened(url) as here, opened(url) as there:
        tier: Tier = here
        assert [tier.put(chunk) for chunk in chunks] == [True] * 3
        for chunk in chunks:
            assert_same(there.get(chunk.key), chunk)
        assert there.nbytes == tier.nbytes == sum(counted_size(here, chunk) for chunk in chunks)
        assert sorted(there.keys()) == sorted(chunk.key for chunk in chunks)
        infos = {info.key: as_plain(info) for info in there.list_chunks().infos}
        assert infos == {chunk.key: as_plain(chunk.info) for chunk in chunks}
        stats = there.stats()
        assert (stats.hits, stats.misses, stats.faults) == (3, 0, {})
        assert here.stats().puts == 3


def test_deleted_chunks_are_gone_and_no_longer_counted(url: str) -> None:
    first, second = make_chunk([1]), make_chunk([2])
    with opened(url) as tier:
        assert tier.put(first) and tier.put(second)
        tier.delete(first.key)
        tier.delete(first.key)
        assert tier.get(first.key) is None
        assert tier.contains_many([first.key, second.key]) == [False, True]
        assert tier.keys() == [second.key]
        assert tier.nbytes == size_of(second)
        assert (tier.stats().misses, tier.faults) == (1, {})


def test_an_empty_store_is_not_a_fault(url: str) -> None:
    with opened(url) as tier:
        assert tier.get(make_chunk([1]).key) is None
        assert (tier.keys(), list(tier.list_chunks().infos), tier.nbytes) == ([], [], 0)
        assert tier.contains_many([]) == []
        tier.delete(make_chunk([1]).key)
        assert tier.faults == {}


def test_a_chunk_is_not_written_twice(url: str) -> None:
    chunk = big_chunk(1)
    with opened(url) as tier:
        assert tier.put(chunk) and tier.put(chunk)
        assert tier.nbytes == size_of(chunk)


def test_a_chunk_larger_than_the_budget_evicts_nothing(url: str) -> None:
    small, large = make_chunk([1]), big_chunk(2)
    with opened(url, max_bytes=size_of(large) - 1) as tier:
        assert tier.put(small)
        assert not tier.put(large)
        assert tier.keys() == [small.key]
        assert tier.faults == {}


def test_the_oldest_chunks_are_evicted_first(url: str) -> None:
    chunks = [big_chunk(number) for number in range(5)]
    with opened(url, max_bytes=3 * size_of(chunks[0])) as tier:
        for chunk in chunks:
            assert tier.put(chunk)
            assert tier.nbytes <= tier.max_bytes
        assert tier.contains_many([chunk.key for chunk in chunks]) == [False] * 2 + [True] * 3


def test_a_closed_tier_misses(url: str) -> None:
    chunk = make_chunk([1])
    with opened(url) as tier:
        assert tier.put(chunk)
    assert tier.get(chunk.key) is None
    assert not tier.put(chunk)
    assert not tier.contains_many([chunk.key])[0]


def test_long_headers_are_read(url: str) -> None:
    chunk = make_chunk(range(3000), data=plain(torch.zeros(2, 1, 1, 3000, 1)))
    assert codec.header_length(codec.encode(chunk)) > codec.HEADER_BYTES
    with opened(url) as tier:
        assert tier.put(chunk)
        assert [as_plain(info) for info in tier.list_chunks().infos] == [as_plain(chunk.info)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_can_use_the_tier(url: str) -> None:
    if url.startswith(("memory:", "asyncfolder:")):
        pytest.skip("memory is not shared, and the wrapper's threads end with the fork")
    chunks = [big_chunk(number) for number in range(3)]
    with opened(url) as tier:
        assert tier.put(chunks[0])
        child = os.fork()
        if child == 0:
            os._exit(0 if tier.get(chunks[0].key) and tier.put(chunks[1]) else 1)
        assert tier.put(chunks[2])
        assert os.waitpid(child, 0)[1] == 0
        for chunk in chunks:
            assert_same(tier.get(chunk.key), chunk)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_redis_and_valkey_urls_reach_a_server(scheme: str) -> None:
    with opened(f"{scheme}://localhost:1/0", None) as tier:
        assert tier.get(make_chunk([1]).key) is None
        assert tier.faults == {"unreachable": 1}


@pytest.mark.parametrize(
    ("url", "max_bytes", "message"),
    [
        ("nonsense://x", 1, r"nonsense.*allowed are redis://.*s3://"),
        ("redis://localhost:port", 1, r"redis://localhost:port.*should look like redis://"),
        ("redis://localhost?nonsense=1", 1, r"nonsense.*should look like redis://"),
        ("/some/folder", None, r"/some/folder.*needs a budget"),
    ],
)
def test_bad_urls_are_refused_with_what_is_allowed(
    url: str, max_bytes: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_remote(url, max_bytes)


def test_passwords_are_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        open_remote("redis://me:secret@localhost:port?password=secret", 1)
    assert "me:…@localhost" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_missing_fsspec_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("kvboost.cache.tiers.remote.fsspec.get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"'s3://bucket'.*Install s3fs"):
        open_remote("s3://bucket", 1)


@pytest.mark.parametrize(
    ("url", "package"), [("redis://localhost", "redis"), ("/some/folder", "fsspec")]
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    monkeypatch.delitem(sys.modules, f"kvboost.cache.tiers.remote.{package}", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"needs {package}.*pip install 'kvboost\[remote\]'"):
        open_remote(url, 1)


def test_the_tier_itself_needs_no_extra() -> None:
    tree = ast.parse(inspect.getsource(remote))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names.isdisjoint({"redis", "fsspec"})
