"""Files that claim to be GGUF, each refused in one sentence that names the file."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from kvboost import KVBoost, ModelError
from kvboost.model.loading.gguf import check_gguf

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf(
    values: list[bytes], tensors: list[bytes], data: bytes = b"", align: int = 32, version: int = 3
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    head += b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


VALUES = [
    value("general.architecture", STRING, text("llama")),
    value("tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("b")),
    value("scores", ARRAY, struct.pack("<IQ2f", FLOAT32, 2, 0.0, 1.0)),
]


def refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=why) as error:
        check_gguf(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("align", [32, 64])
def test_a_whole_file_passes_and_one_byte_less_does_not(tmp_path, align) -> None:
    values = [*VALUES, value("general.alignment", UINT32, struct.pack("<I", align))]
    tensors = [tensor("w", 4, 2), tensor("q", 32, kind=2, offset=32)]  # Q4_0: 18 bytes
    content = gguf(values, tensors, bytes(32 + 18), align)
    path = tmp_path / "whole.gguf"
    path.write_bytes(content)
    index = check_gguf(path)
    assert index.architecture == "llama" and index.tensors["w"].shape == (2, 4)
    assert index.tensors["q"].num_bytes == 18
    assert index.tensors["q"].start + 18 == len(content)
    refused(tmp_path, content[:-1], "its last 1 bytes are missing")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "only 0 bytes"),
        (b"GGUF", "only 4 bytes"),
        (b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
        (gguf(VALUES, [], version=9), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64), "claims .* tensors"),
        (gguf([value("k", 99, bytes(8))], []), "unknown type 99"),
        (gguf([value("k", STRING, struct.pack("<Q", 1 << 62))], []), "past its end"),
        (gguf([value("k", ARRAY, struct.pack("<IQ", FLOAT32, 1 << 62))], []), "past its end"),
        (gguf([value("k", ARRAY, struct.pack("<IQ", STRING, 1 << 62))], []), "past its end"),
        (gguf([value("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 50)], []), "unknown type 9"),
        (gguf(VALUES, [tensor("w", *[1] * 9)]), "claims 9 dimensions"),
        (gguf(VALUES, [tensor("w", 4, kind=999)]), "unknown type 999"),
        (gguf(VALUES, [tensor("w", 1 << 62, 1 << 62)]), "bytes are missing"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, content, why) -> None:
    refused(tmp_path, content, why)


def test_random_bytes_after_the_magic_are_refused(tmp_path) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        head = b"GGUF" + struct.pack("<IQQ", 3, rng.randrange(3), rng.randrange(1, 40))
        refused(tmp_path, head + rng.randbytes(600), "not a whole GGUF file")


def test_loading_a_damaged_file_names_it(tmp_path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + random.Random(0).randbytes(4096))
    with pytest.raises(ModelError, match=r"noise\.gguf is not a whole GGUF file"):
        KVBoost.from_pretrained(str(path))


def test_a_whole_file_that_is_no_model_is_refused_with_its_name(tmp_path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(gguf([], []))
    with pytest.raises(ModelError, match=r"the GGUF file .*empty\.gguf cannot be loaded"):
        KVBoost.from_pretrained(str(path))
