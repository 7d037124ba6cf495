"""A secret: chunks are signed and named with it, and nothing else is accepted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from typer.testing import CliRunner

from kvboost import ConfigError, GenerationMode, KVBoost
from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from kvboost.cache.folder import CacheFolder
from kvboost.cache.quantize import plain
from kvboost.cache.secret import Secret
from kvboost.cli.main import app
from kvboost.config import EngineConfig
from kvboost.tokens.hashing import as_token_ids, chain_key, root_key
from support.chunks import make_chunk
from support.planting import PROMPT, chunk_files, remote

OURS, THEIRS = "a secret of ours", "a secret of theirs"
PREFIX = GenerationMode.PREFIX_CACHE


def disk(engine: KVBoost) -> dict:
    return engine.cache_stats()["tiers"]["disk"]


def fill(open_engine: Callable[..., KVBoost], **options: object) -> list[int]:
    """The plain answer; the folder holds the prompt afterwards."""
    with open_engine(**options) as engine:
        engine.generate(PROMPT, 8, PREFIX)
        return engine.generate(PROMPT, 8, GenerationMode.BASELINE).token_ids


def edit(path: Path, rows: torch.Tensor | None = None, **fields: str) -> None:
    """Changes a file as one can without the secret: its signature is that of before."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | fields
    path.write_bytes(save(tensors if rows is None else {"kv": rows}, metadata))


def signed(secret: Secret) -> KVChunk:
    ids = as_token_ids(range(8))
    root = root_key("model", "", secret=secret.naming)
    name = chain_key(root, ids, secret=secret.naming)
    chunk = make_chunk(ids, parent=root, root=root, key=name)
    return KVChunk(replace(chunk.info, signed=True), chunk.data)


def test_signed_chunks_serve_engines_that_have_the_secret(open_engine) -> None:
    expected = fill(open_engine, cache_secret=OURS)
    engine = open_engine(cache_secret=OURS)
    result = engine.generate(PROMPT, 8, PREFIX)
    assert result.token_ids == expected and result.exact_tokens > 140
    assert disk(engine)["hits"] > 0 and disk(engine)["faults"] == {}


def test_signed_chunks_come_from_a_remote_store_too(open_engine, tmp_path) -> None:
    far = {"disk_cache_dir": None, **remote(tmp_path)}
    fill(open_engine, cache_secret=OURS, **far)
    for secret, least in ((OURS, 140), (THEIRS, 0), (None, 0)):
        engine = open_engine(cache_secret=secret, **far)
        found = engine.generate(PROMPT, 8, PREFIX).exact_tokens
        assert found > least if least else found == 0


def test_names_cannot_be_computed_without_the_secret(open_engine, tmp_path) -> None:
    fill(open_engine, cache_secret=OURS)
    names = {path.name for path in chunk_files(tmp_path / "kv")}
    shutil.rmtree(tmp_path / "kv")
    fill(open_engine)
    assert names.isdisjoint(path.name for path in chunk_files(tmp_path / "kv"))


def test_an_engine_without_the_secret_leaves_signed_chunks_alone(open_engine, tmp_path) -> None:
    expected = fill(open_engine, cache_secret=OURS)
    files = {path: path.read_bytes() for path in chunk_files(tmp_path / "kv")}
    engine = open_engine()
    assert disk(engine)["chunks"] == len(files) and engine.cache_stats()["chunks"] == 0
    result = engine.generate(PROMPT, 8, PREFIX)
    assert result.token_ids == expected and result.cached_tokens == 0
    engine.flush()
    assert disk(engine)["faults"] == {}
    assert all(path.read_bytes() == data for path, data in files.items())


@pytest.mark.parametrize("secret", [None, THEIRS], ids=["unsigned", "another secret"])
def test_what_is_not_signed_with_our_secret_is_a_fault(secret, open_engine, tmp_path) -> None:
    expected = fill(open_engine, cache_secret=secret)
    written = len(chunk_files(tmp_path / "kv"))
    engine = open_engine(cache_secret=OURS)
    result = engine.generate(PROMPT, 8, PREFIX)
    assert result.token_ids == expected and result.cached_tokens == 0
    assert disk(engine)["faults"] == {"corrupt": written}
    assert chunk_files(tmp_path / "kv") == []


def test_rows_that_were_exchanged_are_noticed(open_engine, tmp_path) -> None:
    """Without the secret nothing shows that the numbers are not the model's."""
    for secret, faults in ((None, {}), (OURS, {"corrupt": 1})):
        expected = fill(open_engine, cache_secret=secret)
        opening = None if secret is None else Secret(secret)
        chunks = {path: codec.read_file(path, secret=opening) for path in files(tmp_path)}
        path, chunk = next(one for one in chunks.items() if one[1].info.base_position == 64)
        rows = torch.rand_like(chunk.data.tensors["kv"])
        if secret is None:
            path.write_bytes(codec.encode(KVChunk(chunk.info, plain(rows))))
        else:
            edit(path, rows)
        engine = open_engine(cache_secret=secret)
        answer = engine.generate(PROMPT, 8, PREFIX).token_ids
        assert disk(engine)["faults"] == faults
        assert (answer == expected) is (secret is not None)
        engine.close()
        shutil.rmtree(tmp_path / "kv")


def files(tmp_path: Path) -> list[Path]:
    return chunk_files(tmp_path / "kv")


@pytest.mark.parametrize(
    "fields",
    [{"position": "80"}, {"before": "0" * 32}, {"lineage": "approximate"}, {"signature": "0" * 64}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_header_that_was_changed_is_noticed_at_the_start(fields, open_engine, tmp_path) -> None:
    fill(open_engine, cache_secret=OURS)
    edit(files(tmp_path)[0], **fields)
    engine = open_engine(cache_secret=OURS)
    assert disk(engine)["faults"] == {"corrupt": 1}


def test_a_signed_chunk_comes_back_and_no_flipped_bit_does(tmp_path: Path) -> None:
    secret = Secret(OURS)
    chunk = signed(secret)
    data = codec.encode(chunk, secret)
    assert torch.equal(codec.decode(data, secret).data.tensors["kv"], chunk.data.tensors["kv"])
    (tmp_path / "chunk").write_bytes(data)
    assert codec.read_file(tmp_path / "chunk", secret=secret).key == chunk.key
    for place in range(8, len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises(codec.BadChunk):
            codec.decode(bytes(flipped), secret)
    for other in (None, Secret(THEIRS)):
        with pytest.raises(codec.BadChunk, match="signed"):
            codec.decode(data, other)
    with pytest.raises(codec.BadChunk, match="not signed"):
        codec.decode(codec.encode(make_chunk(range(8))), secret)


def test_the_secret_comes_from_the_environment_and_is_not_shown(monkeypatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_SECRET", OURS)
    config = EngineConfig()
    assert config.cache_secret == OURS and OURS not in repr(config)
    assert EngineConfig(cache_secret=THEIRS).cache_secret == THEIRS
    with pytest.raises(ConfigError, match="has 5 characters; at least 16") as raised:
        EngineConfig(cache_secret="short")
    assert "short" not in str(raised.value)


def run(*args: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["cache", *map(str, args)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_commands_check_signatures(open_engine, tmp_path, monkeypatch) -> None:
    folder, archive = tmp_path / "kv", tmp_path / "kv.tar"
    fill(open_engine, cache_secret=OURS)
    number = len(files(tmp_path))
    assert f"{number} signed chunks not checked" in run("verify", "--dir", folder, code=1)
    assert "KVBOOST_CACHE_SECRET" in run("export", archive, "--dir", folder, code=2)
    monkeypatch.setenv("KVBOOST_CACHE_SECRET", OURS)
    assert f"{number} whole chunks" in run("verify", "--dir", folder)
    assert f"{number} chunks, " in run("export", archive, "--dir", folder)
    assert f"{number} chunks installed" in run("import", archive, "--dir", tmp_path / "other")
    monkeypatch.setenv("KVBOOST_CACHE_SECRET", THEIRS)
    assert f"{number} refused" in run("import", archive, "--dir", tmp_path / "third")
    monkeypatch.delenv("KVBOOST_CACHE_SECRET")
    assert f"{number} refused" in run("import", archive, "--dir", tmp_path / "fourth")
    assert "1 whole chunk\n" not in run("verify", "--dir", folder, code=1)
    assert CacheFolder(folder).summary().chunks == number  # nothing was put aside


def test_import_takes_files_only(tmp_path) -> None:
    assert "not a regular file" in run("import", "/dev/zero", "--dir", tmp_path / "kv", code=2)
