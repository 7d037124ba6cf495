"""A chunk as bytes: a safetensors file that says what it is and proves that it is whole.

Everything but the tensors stands in the header, so a folder of chunks can be indexed without
reading any. The checksum covers all of it, dtypes and shapes included.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage, Origin
from kvboost.cache.quantize import BITS, KVData
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, chain_key

FORMAT = "kvboost-chunk-1"
HEADER_BYTES = 8192
"""Most headers are shorter: chunks of a few hundred tokens."""

Allocate = Callable[[torch.Tensor], torch.Tensor]
"""An empty tensor of the same dtype and shape as the one given, where the copy shall be."""

_BLOCK = 1 << 18  # copied and then hashed while it is in the processor's cache


class BadChunk(ValueError):
    """These bytes are not a whole chunk."""


def encode(chunk: KVChunk) -> bytes:
    metadata = _metadata(chunk.info)
    tensors = {name: one.cpu() for name, one in chunk.data.tensors.items()}
    digest = _Digest(metadata)
    for name in sorted(tensors):
        digest.begin(name, tensors[name])
        digest.add(_as_bytes(tensors[name]))
    return save(tensors, metadata | {"checksum": digest.hex()})


def decode(data: bytes) -> KVChunk:
    """The chunk that ``encode`` gave; raises ``BadChunk`` if these are not its bytes."""
    header = read_header(data)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadChunk(f"not a safetensors file: {error}") from None
    return _check(header, [(name, tensors[name]) for name in sorted(tensors)], None)


def read_file(path: str | os.PathLike[str], allocate: Allocate = torch.empty_like) -> KVChunk:
    """The chunk in a file, which is mapped, and copied and checked block by block. Raises
    ``OSError`` if it cannot be read and ``BadChunk`` if it is not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            mapped = ((name, file.get_tensor(name)) for name in names)
            return _check(file.metadata() or {}, mapped, allocate)
    except SafetensorError as error:
        raise BadChunk(f"not a safetensors file: {error}") from None


def read_header(data: bytes) -> dict[str, str]:
    """The metadata of a file that begins with ``data``; raises ``BadChunk``."""
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= len(data) - 8:
        raise BadChunk("the header is cut off")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadChunk("the header is not that of a chunk") from None
    return metadata if isinstance(metadata, dict) else {}


def header_length(data: bytes) -> int:
    """How many bytes of a file ``read_header`` needs."""
    return 8 + int.from_bytes(data[:8], "little")


def info(metadata: Mapping[str, str]) -> ChunkInfo:
    """What a header says; raises ``BadChunk`` if it cannot be that of a chunk. Its key is held
    against its tokens, the rest against the checksum once the tensors are read."""
    try:
        if metadata["format"] != FORMAT:
            raise BadChunk(f"format {metadata['format']!r}, not {FORMAT!r}")
        tokens = np.frombuffer(base64.b64decode(metadata["tokens"], validate=True), dtype="<i4")
        parent = ChunkKey(metadata["parent"])
        found = ChunkInfo(
            key=ChunkKey(metadata["key"]),
            parent=parent,
            before=ChunkKey(metadata["before"]),
            root=ChunkKey(metadata["root"]),
            token_ids=as_token_ids(tokens),
            base_position=int(metadata["position"]),
            lineage=Lineage(metadata["lineage"]),
            bits=int(metadata["bits"]),
            nbytes=int(metadata["nbytes"]),
            origin=Origin(metadata["model"], metadata["model_name"]),
            key_norm=float(metadata["key_norm"]),
        )
        key = chain_key(parent, found.token_ids)
        bytes.fromhex(found.root + found.before)
        if found.bits not in BITS or found.base_position < 0 or key != found.key:
            raise BadChunk("the header contradicts itself")
    except BadChunk:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError):
        raise BadChunk("the header is not that of a chunk") from None
    return found


def _metadata(info: ChunkInfo) -> dict[str, str]:
    return {
        "format": FORMAT,
        "key": info.key,
        "parent": info.parent,
        "before": info.before,
        "root": info.root,
        "model": info.origin.fingerprint,
        "model_name": info.origin.name,
        "tokens": _tokens(info.token_ids),
        "position": str(info.base_position),
        "lineage": info.lineage.value,
        "bits": str(info.bits),
        "nbytes": str(info.nbytes),
        "key_norm": repr(info.key_norm),
    }


def _tokens(token_ids: TokenIds) -> str:
    return base64.b64encode(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).decode()


def _check(
    metadata: Mapping[str, str],
    tensors: Iterable[tuple[str, torch.Tensor]],
    allocate: Allocate | None,
) -> KVChunk:
    """The chunk of these parts, copied if ``allocate`` is given; raises ``BadChunk``."""
    described = info(metadata)
    expected = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = _Digest(expected)
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        digest.begin(name, tensor)
        kept[name] = tensor if allocate is None else allocate(tensor)
        source, own = _as_bytes(tensor), _as_bytes(kept[name])
        for start in range(0, len(source), _BLOCK):
            block = own[start : start + _BLOCK]
            if allocate is not None:
                block[:] = source[start : start + _BLOCK]
            digest.add(block)
    if digest.hex() != metadata.get("checksum"):
        raise BadChunk("the checksum does not match")
    data = KVData(described.bits, kept)
    try:
        fits = (data.nbytes, data.num_tokens) == (described.nbytes, described.num_tokens)
    except (KeyError, IndexError):  # nobody wrote this by accident
        fits = False
    if not fits:
        raise BadChunk("the header does not describe the data")
    return KVChunk(described, data)


class _Digest:
    """Of the metadata and of every tensor with its name, dtype and shape."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._digest = xxhash.xxh3_128(json.dumps(metadata, sort_keys=True).encode())

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())

    def add(self, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._digest.update(data.data)

    def hex(self) -> str:
        return self._digest.hexdigest()


def _as_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A view of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
