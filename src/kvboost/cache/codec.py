"""A chunk as bytes: a safetensors file that describes itself and proves that it is whole.

Everything except the tensors is in the header, so a folder of chunks can be indexed without
reading any tensors. The checksum covers all of it, dtypes and shapes included. It proves that a
chunk is whole, not where it is from. With a secret, a keyed MAC takes its place and the header is
also signed on its own; then only an engine that has the secret can make chunks that are accepted.

Others may write where chunks are kept, so nothing that a header says is believed: every field has
bounds, and a chunk must be what was planned before a request uses it.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage, Origin
from kvboost.cache.mixed import AnyFormat, format_of, is_plain, states_of
from kvboost.cache.quantize import BITS, KVData
from kvboost.cache.secret import Secret
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, chain_key

FORMAT = "kvboost-chunk-1"
MIXED_FORMAT = "kvboost-chunk-2"
"""Of models whose layers differ (``cache/mixed.py``). Earlier versions of KVBoost cannot read it,
and leave such chunks alone."""
SIGNED = "-signed"
FORMATS = (FORMAT, MIXED_FORMAT)
HEADER_BYTES = 8192
"""Most headers are shorter: those of chunks of a few hundred tokens."""
LONGEST_HEADER = 1 << 20
"""Of a chunk of 150,000 tokens. A longer one is refused before it is read."""
MOST_POSITIONS = 1 << 31
MOST_BYTES = 1 << 40
LONGEST_NAME = 4096

Allocate = Callable[[torch.Tensor], torch.Tensor]
"""Returns an empty tensor with the dtype and shape of the given one, wherever the copy belongs."""

_BLOCK = 1 << 18  # copied and then hashed while it is in the processor's cache
_KEY = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"\d{1,19}")
_NOT_SIGNED = ("checksum", "signature")
_BEGINNING = b'{"__metadata__":{'
_MOST_VALUES = 1 << 14  # in a header: many small values take far longer to read than one long one
_ANY_FORMAT = re.compile(r"kvboost-chunk-\d{1,9}(-signed)?")
_FIELDS = frozenset(
    (
        *("format", "key", "parent", "before", "root", "model", "model_name", "tokens"),
        *("position", "lineage", "bits", "nbytes", "signature", "checksum"),
        *("lag", "state"),
    )
)


class BadChunk(ValueError):
    """These bytes are not a whole chunk, or not the chunk that was expected."""


class OtherVersion(BadChunk):
    """A chunk that another version of KVBoost wrote, in a form that this one cannot read. It may
    be whole, so it is left where it is."""


@dataclass(frozen=True)
class Expected:
    """The format that a chunk must have before a request uses it."""

    planned: ChunkInfo
    format: AnyFormat | None = None
    """The model's; None compares the tensors with one another only."""

    @property
    def most_bytes(self) -> int | None:
        """The size of the largest file that such a chunk can have: what is larger is not read. None
        if that is not known."""
        if self.format is None:
            return None
        info = self.planned
        return LONGEST_HEADER + self.format.most_bytes(info.num_tokens, info.base_position)


def encode(chunk: KVChunk, secret: Secret | None = None) -> bytes:
    format = FORMAT if is_plain(chunk.data.tensors) else MIXED_FORMAT
    metadata = _metadata(chunk.info, format if secret is None else format + SIGNED)
    if secret is not None:
        metadata["signature"] = secret.sign(metadata)
    tensors = {name: one.cpu() for name, one in chunk.data.tensors.items()}
    digest = _Digest(metadata, secret)
    for name in sorted(tensors):
        digest.begin(name, tensors[name])
        digest.add(_as_bytes(tensors[name]))
    return save(tensors, metadata | {"checksum": digest.hex()})


def decode(data: bytes, secret: Secret | None = None, expected: Expected | None = None) -> KVChunk:
    """The chunk that ``encode`` gave; raises ``BadChunk`` if these are not its bytes, or if it is
    not what was ``expected``."""
    metadata = read_header(data)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadChunk(f"not a safetensors file: {error}") from None
    return _check(metadata, tensors, None, secret, expected)


def read_file(
    path: str | os.PathLike[str],
    allocate: Allocate = torch.empty_like,
    secret: Secret | None = None,
    expected: Expected | None = None,
) -> KVChunk:
    """The chunk in a file, which is mapped, and copied and checked block by block. Raises
    ``OSError`` if the file cannot be read and ``BadChunk`` as :func:`decode` does."""
    try:
        with safe_open(path, framework="pt") as file:
            mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _check(file.metadata() or {}, mapped, allocate, secret, expected)
    except SafetensorError as error:
        raise BadChunk(f"not a safetensors file: {error}") from None


def read_header(data: bytes) -> dict[str, str]:
    """The metadata of a file that begins with ``data``; raises ``BadChunk``."""
    end = header_length(data)
    if end > len(data):
        raise BadChunk("the header is cut off")
    header = data[8:end]
    if sum(map(header.count, (b"{", b"[", b","))) > _MOST_VALUES:
        raise BadChunk("the header has too many values")
    try:
        metadata = json.loads(header.decode())["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadChunk("the header is not that of a chunk") from None
    return metadata if isinstance(metadata, dict) else {}


def header_length(data: bytes) -> int:
    """The bytes that ``read_header`` needs of a file that begins with ``data``; raises
    ``BadChunk`` if the first ones are not a chunk's."""
    if not data.startswith(_BEGINNING, 8):
        raise BadChunk("the header is not that of a chunk")
    length = int.from_bytes(data[:8], "little")
    if length > LONGEST_HEADER:
        raise BadChunk(f"a header of {length} bytes; {LONGEST_HEADER} are allowed")
    return 8 + length


def info(
    metadata: Mapping[str, str], secret: Secret | None = None, size: int = MOST_BYTES
) -> ChunkInfo:
    """The header of a file of ``size`` bytes; raises ``BadChunk`` if a chunk of ours
    cannot say that. The key is compared with the tokens here, everything else with the checksum
    once the tensors are read.

    Without the secret, a signed header is only looked at: its ``info`` says ``signed``.
    """
    try:
        signed = _is_signed(metadata, secret)
        bits = _number(metadata["bits"], MOST_POSITIONS)
        if bits not in BITS or not metadata.keys() <= _FIELDS:
            raise OtherVersion("it has fields or a precision that this version does not know")
        tokens = np.frombuffer(base64.b64decode(metadata["tokens"], validate=True), dtype="<i4")
        found = ChunkInfo(
            key=_key(metadata["key"]),
            parent=_key(metadata["parent"]),
            before=_key(metadata["before"]),
            root=_key(metadata["root"]),
            token_ids=as_token_ids(tokens),
            base_position=_number(metadata["position"], MOST_POSITIONS - len(tokens)),
            lineage=Lineage(metadata["lineage"]),
            bits=bits,
            nbytes=_number(metadata["nbytes"], size),
            origin=Origin(_name(metadata["model"]), _name(metadata["model_name"])),
            signed=signed,
            lag=_number(metadata.get("lag", "0"), MOST_POSITIONS),
            has_state=_flag(metadata.get("state")),
        )
        naming = b"" if secret is None else secret.naming
        can_name = secret is not None or not signed
        if can_name and chain_key(found.parent, found.token_ids, secret=naming) != found.key:
            raise BadChunk("the key is not that of the tokens")
    except BadChunk:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError):
        raise BadChunk("the header is not that of a chunk") from None
    if not _is_possible(found):
        raise BadChunk("the header contradicts itself")
    return found


def _is_possible(found: ChunkInfo) -> bool:
    """Whether the fields of a header go together."""
    is_first = found.before == found.root
    exact = found.lineage is Lineage.EXACT
    return (
        found.num_tokens >= 1
        and not (found.token_ids < 0).any()
        and found.nbytes >= 1
        and found.key not in (found.parent, found.before, found.root)
        and is_first == (found.base_position == 0)
        and (found.parent == found.before if exact else found.parent != found.root)
    )


def _is_signed(metadata: Mapping[str, str], secret: Secret | None) -> bool:
    """Whether a header is signed. Raises ``BadChunk`` if it is not in a format of ours, or if it
    should be signed and is not, or not with this secret."""
    name = metadata["format"]
    known, signed = name.removesuffix(SIGNED) in FORMATS, name.endswith(SIGNED)
    if not known and _ANY_FORMAT.fullmatch(name):
        raise OtherVersion(f"format {name!r}; this version reads {' and '.join(FORMATS)}")
    if set(map(type, metadata.values())) != {str}:
        raise BadChunk("the header is not that of a chunk")
    if not known:
        raise BadChunk(f"format {name[:100]!r}, not {' or '.join(FORMATS)}, signed or not")
    if secret is None:
        return signed
    if not signed:
        raise BadChunk("it is not signed")
    content = {field: value for field, value in metadata.items() if field not in _NOT_SIGNED}
    if not secret.signed(content, metadata["signature"]):
        raise BadChunk("it is not signed with our secret")
    return True


def _key(text: str) -> ChunkKey:
    if _KEY.fullmatch(text) is None:
        raise BadChunk(f"{text[:64]!r} is not a key: 32 hexadecimal digits")
    return ChunkKey(text)


def _number(text: str, limit: int) -> int:
    """A whole number from 0 up to, not including, ``limit``."""
    if _NUMBER.fullmatch(text) is None or int(text) >= limit:
        raise BadChunk(f"{text[:64]!r} is not a whole number below {limit}")
    return int(text)


def _flag(text: str | None) -> bool:
    """Whether a field that is "1" or missing is there."""
    if text not in (None, "1"):
        raise BadChunk(f"{text[:64]!r} is not 1")
    return text is not None


def _name(text: str) -> str:
    if len(text) > LONGEST_NAME:
        raise BadChunk(f"a name of {len(text)} characters; {LONGEST_NAME} are allowed")
    return text


def _metadata(info: ChunkInfo, format: str) -> dict[str, str]:
    return {
        "format": format,
        "key": info.key,
        "parent": info.parent,
        "before": info.before,
        "root": info.root,
        "model": info.origin.fingerprint,
        "model_name": info.origin.name[:LONGEST_NAME],
        "tokens": _tokens(info.token_ids),
        "position": str(info.base_position),
        "lineage": info.lineage.value,
        "bits": str(info.bits),
        "nbytes": str(info.nbytes),
        **({"lag": str(info.lag)} if info.lag else {}),
        **({"state": "1"} if info.has_state else {}),
    }


def _tokens(token_ids: TokenIds) -> str:
    return base64.b64encode(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).decode()


def _check(
    metadata: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    allocate: Allocate | None,
    secret: Secret | None,
    expected: Expected | None,
) -> KVChunk:
    """The chunk of these parts, copied if ``allocate`` is given; raises ``BadChunk``. What it is
    said to be comes first: nothing is copied for a chunk that would be refused."""
    described = info(metadata, secret)
    if described.signed and secret is None:
        raise BadChunk("it is signed, and there is no secret to check it with")
    if expected is not None and not described.is_as_planned(expected.planned):
        raise BadChunk("it is not the chunk that was planned")
    format = expected.format if expected is not None else None
    format = format or format_of(described.bits, tensors)
    position = described.base_position
    if format is None or not format.describes(
        described.bits, described.num_tokens, position, tensors
    ):
        raise BadChunk("its tensors do not have the names, shapes and dtypes of this model's KV")
    content = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = _Digest(content, secret)
    kept: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.begin(name, tensor)
        kept[name] = tensor if allocate is None else allocate(tensor)
        source, own = _as_bytes(tensor), _as_bytes(kept[name])
        for start in range(0, len(source), _BLOCK):
            block = own[start : start + _BLOCK]
            if allocate is not None:
                block[:] = source[start : start + _BLOCK]
            digest.add(block)
    if not _same(digest.hex(), metadata.get("checksum", "")):
        raise BadChunk("the checksum does not match")
    data = KVData(described.bits, kept)
    if data.nbytes != described.nbytes or bool(states_of(data)) != described.has_state:
        raise BadChunk("the header does not describe the data")
    return KVChunk(described, data)


class _Digest:
    """Of the metadata and of every tensor with its name, dtype and shape. A checksum, or a keyed
    MAC if there is a secret."""

    def __init__(self, metadata: Mapping[str, str], secret: Secret | None) -> None:
        self._digest = xxhash.xxh3_128() if secret is None else secret.mac()
        self._digest.update(json.dumps(dict(metadata), sort_keys=True).encode())

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())

    def add(self, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._digest.update(data.data)

    def hex(self) -> str:
        return self._digest.hexdigest()


def _same(left: str, right: str) -> bool:
    """Compares without telling by its time where they differ."""
    return hmac.compare_digest(left.encode(), right.encode(errors="replace"))


def _as_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A view of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
