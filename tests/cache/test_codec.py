from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk, Lineage
from kvboost.cache.mixed import join_groups
from kvboost.cache.quantize import KVData, Quantizer, plain
from kvboost.tokens.hashing import branch_key, root_key
from support.chunks import make_chunk
from support.remote_stores import assert_same

OTHER = root_key("another chunk", "")


def chunks() -> list[KVChunk]:
    kv = torch.randn(2, 2, 1, 70, 8)
    return [
        make_chunk(range(70), data=plain(kv)),
        make_chunk(
            range(70),
            data=plain(kv.bfloat16()),
            parent=branch_key(OTHER, "a repair"),
            before=OTHER,
            position=9,
            lineage=Lineage.APPROXIMATE,
        ),
        make_chunk(range(70), data=Quantizer(8, None).pack(kv.bfloat16(), 0)),
        make_chunk(
            range(3),
            data=Quantizer(4, None).pack(kv[:, :, :, :3].contiguous(), 2),
            parent=OTHER,
            position=2,
        ),
        make_chunk(range(70), data=join_groups(packed(16), [torch.randn(3, 5)])),
        make_chunk(range(70), data=join_groups(packed(8))),
    ]


def packed(bits: int) -> list[KVData]:
    """Layers of two shapes."""
    shapes = (2, 2, 1, 70, 8), (2, 3, 2, 70, 4)
    return [Quantizer(bits, None).pack(torch.randn(shape), 0) for shape in shapes]


HEADER = codec.read_header(codec.encode(make_chunk(range(5))))


@pytest.mark.parametrize("chunk", chunks(), ids=["32", "16", "8", "4", "mixed", "mixed 8"])
def test_a_chunk_is_the_same_after_encoding_and_decoding(chunk, tmp_path: Path) -> None:
    data = codec.encode(chunk)
    assert_same(codec.decode(data), chunk)
    path = tmp_path / "chunk"
    path.write_bytes(data)
    read = codec.read_file(path)
    assert_same(read, chunk)
    path.write_bytes(bytes(len(data)))  # what was read does not lie in the file
    assert_same(read, chunk)
    assert codec.info(codec.read_header(data[: codec.header_length(data)])).key == chunk.key


def test_only_chunks_of_layers_that_differ_have_the_newer_format() -> None:
    """Earlier versions read the others as before, and leave these alone."""
    formats = [codec.read_header(codec.encode(chunk))["format"] for chunk in chunks()]
    assert formats == ["kvboost-chunk-1"] * 4 + ["kvboost-chunk-2"] * 2


def test_a_chunk_must_have_the_state_that_its_header_says() -> None:
    chunk = chunks()[4]
    with pytest.raises(codec.BadChunk, match="does not describe"):
        codec.decode(codec.encode(replace(chunk, info=replace(chunk.info, has_state=False))))


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """200 places all over the file, the header included: never another chunk than the one."""
    rng = random.Random(0)
    noticed = 0
    for chunk in chunks():
        data = codec.encode(chunk)
        header = codec.header_length(data)
        for number in range(50):
            flipped = bytearray(data)
            place = rng.randrange(header if number % 2 else len(data))
            flipped[place] ^= 1 << rng.randrange(8)
            path = tmp_path / "chunk"
            path.write_bytes(flipped)
            for read, source in ((codec.decode, bytes(flipped)), (codec.read_file, path)):
                try:
                    assert_same(read(source), chunk)  # a bit that means nothing, such as padding
                except codec.BadChunk:
                    noticed += 1
    assert noticed > 350


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.5, 0.999])
def test_truncated_bytes_are_noticed(keep, tmp_path: Path) -> None:
    data = codec.encode(chunks()[0])
    cut = data[: int(keep * len(data)) if isinstance(keep, float) else keep]
    path = tmp_path / "chunk"
    path.write_bytes(cut)
    with pytest.raises(codec.BadChunk):
        codec.decode(cut)
    with pytest.raises(codec.BadChunk):
        codec.read_file(path)


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    foreign = save({"kv": torch.zeros(3)}, {"format": "pt"})
    for data in (foreign, save({"kv": torch.zeros(3)}), b"\xff" * 400, b"{}" * 100):
        with pytest.raises(codec.BadChunk):
            codec.decode(data)
        path = tmp_path / "chunk"
        path.write_bytes(data)
        with pytest.raises(codec.BadChunk):
            codec.read_file(path)
    with pytest.raises(FileNotFoundError):
        codec.read_file(tmp_path / "nothing")


def test_a_header_that_contradicts_itself_is_refused() -> None:
    header = codec.read_header(codec.encode(chunks()[0]))
    for name, value in (("key", "0" * 32), ("bits", "7"), ("position", "x"), ("lineage", "new")):
        with pytest.raises(codec.BadChunk):
            codec.info(header | {name: value})


@given(st.dictionaries(st.sampled_from(sorted(HEADER)), st.text(max_size=40), min_size=1))
def test_whatever_a_header_says_is_a_chunk_or_refused(fields) -> None:
    """And what is accepted is within bounds, so that nothing after it can fail."""
    try:
        found = codec.info(HEADER | fields)
    except codec.BadChunk:
        return
    assert found.num_tokens >= 1 and 0 <= found.base_position < codec.MOST_POSITIONS
    assert 0 < found.nbytes < codec.MOST_BYTES
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in (found.root, found.before))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_chunk_or_refused(data) -> None:
    with pytest.raises(codec.BadChunk):
        codec.decode(data)
