"""Chunk files as an attacker would write them: whole, with a valid checksum, and wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk, Lineage
from kvboost.cache.quantize import KVData, Quantizer, plain
from kvboost.tokens.hashing import ChunkKey, as_token_ids, chain_key, root_key

PROMPT = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. " * 2


def remote(folder: Path) -> dict[str, object]:
    """Options of an engine whose remote store is beside the cache in ``folder``."""
    return {"remote_cache_url": f"file://{folder}/far", "remote_cache_bytes": 10**9}


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.safetensors"))


def rewrite(path: Path, change: Callable[[KVChunk], KVChunk]) -> None:
    """Replaces a chunk by another one under the same name."""
    path.write_bytes(codec.encode(change(codec.read_file(path))))


def _with(chunk: KVChunk, data: KVData) -> KVChunk:
    return KVChunk(replace(chunk.info, bits=data.bits, nbytes=data.nbytes), data)


def _packed(chunk: KVChunk) -> KVChunk:
    """Eight bits, as the header says, and most of the tensors missing."""
    values = torch.zeros(3, 2, chunk.info.num_tokens, 16, dtype=torch.uint8)
    return _with(chunk, KVData(8, {"values": values}))


def _rounded(chunk: KVChunk) -> KVChunk:
    """Eight bits and all tensors: the rows are close, and would be served as exact ones."""
    kv = chunk.data.tensors["kv"]
    return _with(chunk, Quantizer(8, None).pack(kv, chunk.info.base_position))


def _flat(chunk: KVChunk) -> KVChunk:
    return _with(chunk, plain(torch.zeros(2, 6, 16, chunk.info.num_tokens)))


def _one_number(chunk: KVChunk) -> KVChunk:
    """Copying broadcasts it to every layer, head and dimension."""
    return _with(chunk, plain(torch.zeros(2, 1, 1, chunk.info.num_tokens, 1)))


def _described(**changes: object) -> Callable[[KVChunk], KVChunk]:
    return lambda chunk: KVChunk(replace(chunk.info, **changes), chunk.data)


WRONG: dict[str, Callable[[KVChunk], KVChunk]] = {
    "a layer missing": lambda chunk: _with(
        chunk, plain(chunk.data.tensors["kv"][:, :-1].contiguous())
    ),
    "tensors missing": _packed,
    "four dimensions": _flat,
    "broadcastable": _one_number,
    "whole numbers": lambda chunk: _with(chunk, plain(chunk.data.tensors["kv"].to(torch.int8))),
    "another precision": _rounded,
    "another dtype": lambda chunk: _with(chunk, plain(chunk.data.tensors["kv"].bfloat16())),
    "another position": _described(base_position=5000),
    "another lineage": _described(lineage=Lineage.APPROXIMATE),
    "another root": _described(root=root_key("another", "")),
}


def plant(path: Path, **fields: str) -> Path:
    """Writes a copy of the chunk at ``path`` whose header says something else, with a checksum that
    is right and under the name that its key has then; returns where it is."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | fields
    if metadata["tokens"] == "?":
        tokens = as_token_ids([0])
    else:
        tokens = as_token_ids(memoryview(base64.b64decode(metadata["tokens"])).cast("i").tolist())
    if "key" not in fields and metadata["tokens"] != "?":
        metadata["key"] = chain_key(ChunkKey(metadata["parent"]), tokens)
    if metadata["before"] == "itself":
        metadata["before"] = metadata["key"]
    if not len(tokens):
        tensors = {"kv": tensors["kv"][:, :, :, :0].contiguous()}
        metadata["nbytes"] = "0"
    place = path.parent.parent / metadata["key"][:2] / f"{metadata['key']}.safetensors"
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(save(tensors, metadata | {"checksum": _checksum(metadata, tensors)}))
    return place


def _checksum(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    """As the format defines it, written down once more."""
    content = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


HUGE = "1" + "0" * 400
NEGATIVE = base64.b64encode(b"\xff\xff\xff\xff").decode()

BAD_HEADERS: dict[str, dict[str, str]] = {
    "a huge position": {"position": HUGE},
    "a position beyond 2**31": {"position": str(2**31)},
    "a negative position": {"position": "-1"},
    "a position that is not a number": {"position": "1e400"},
    "a huge size": {"nbytes": HUGE},
    "more bytes than the file has": {"nbytes": str(2**31)},
    "no root": {"root": ""},
    "a root with spaces": {"root": " ".join(["ab"] * 11)},
    "a root that is not hexadecimal": {"root": "z" * 32},
    "a short before": {"before": "ab"},
    "an unknown lineage": {"lineage": "new"},
    "bits that are not a number": {"bits": "many"},
    "no tokens": {"tokens": ""},
    "no tokens, and itself before": {"tokens": "", "before": "itself"},
    "itself before": {"before": "itself"},
    "a negative token": {"tokens": NEGATIVE},
    "a long name": {"model_name": "x" * 100_000},
    "a format of others": {"format": "pt"},
}

OTHER_VERSIONS: dict[str, dict[str, str]] = {
    "an older format": {"format": "kvboost-chunk-0"},
    "a newer format": {"format": "kvboost-chunk-3"},
    "a newer format, signed": {"format": "kvboost-chunk-3-signed"},
    "a newer format without any of our fields": {
        **dict.fromkeys(("tokens", "position", "lineage", "nbytes"), "?"),
        "format": "kvboost-chunk-31",
    },
    "a field that we do not know": {"rotation": "half"},
    "an unknown precision": {"bits": "2"},
}
