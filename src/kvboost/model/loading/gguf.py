"""Checks that a file is a whole GGUF file before a parser that trusts it reads it, and says where
its tensors are.

    magic, version, number of tensors, number of values
    values:   key, type, value          a string is its length and its bytes,
    tensors:  name, shape, type, offset   an array its type, its length and its items
    padding, data of all tensors

The parser in the package ``gguf`` believes every length that it reads: a damaged file makes it fail
in odd ways, or loop for hours. The check reads the same fields, and no length may lead past the end
of the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvboost.errors import ModelError

_HEAD_BYTES = 24
_VERSIONS = (2, 3)
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The size of each type of value that has a fixed one."""
_WHOLE = {4: "I", 10: "Q"}
"""The types of whole numbers that are not negative."""
_STRING, _ARRAY = 8, 9
_MOST_NESTED = 4
_MOST_DIMENSIONS = 8
_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is in its file."""

    name: str
    shape: tuple[int, ...]
    """As torch has it: the dimension whose numbers are neighbours is the last."""
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufIndex:
    """The contents of a GGUF file."""

    path: Path
    architecture: str
    tensors: dict[str, GgufTensor]
    data_start: int
    """Where values and descriptions end and the data of tensors begins."""
    is_little_endian: bool
    numbers: dict[str, int] = field(default_factory=dict)
    """Its values that are whole numbers, by their keys."""


def check_gguf(path: Path) -> GgufIndex:
    """Raises ModelError, naming the file, unless ``path`` is a whole GGUF file."""
    try:
        with path.open("rb") as file:
            if (size := path.stat().st_size) < _HEAD_BYTES:
                _refuse(path, f"it has only {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _check(path, data)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None


def _check(path: Path, data: mmap.mmap) -> GgufIndex:
    if data[:4] != b"GGUF":
        _refuse(path, "it does not begin with GGUF")
    order = "<" if data[4] else ">"  # the version is small, so its large bytes are zero
    reader = _Reader(data, order, lambda why: _refuse(path, why))
    reader.position = 4
    version, tensors, values = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version not in _VERSIONS:
        _refuse(path, f"it is version {version} of the format, and 2 and 3 are known")
    if tensors * 24 + values * 13 > len(data):  # the least that each of them takes
        _refuse(path, f"it claims {tensors:,} tensors and {values:,} values in {len(data):,} bytes")
    numbers, architecture = {"general.alignment": _ALIGNMENT}, ""
    for _ in range(values):
        key, kind = reader.string(), reader.number("I")
        if kind in _WHOLE:
            numbers[key.decode(errors="replace")] = reader.number(_WHOLE[kind])
            continue
        if key == b"general.architecture" and kind == _STRING:
            architecture = reader.string().decode(errors="replace")
            continue
        reader.skip_value(kind)
    found = [reader.tensor() for _ in range(tensors)]
    alignment = max(1, numbers["general.alignment"])
    start = -(-reader.position // alignment) * alignment
    end = start + max((each.start + each.num_bytes for each in found), default=0)
    if end > len(data):
        _refuse(path, f"its last {end - len(data):,} bytes are missing")
    placed = {each.name: replace(each, start=start + each.start) for each in found}
    return GgufIndex(path, architecture, placed, start, order == "<", numbers)


def _refuse(path: Path, why: str) -> NoReturn:
    raise ModelError(f"{path} is not a whole GGUF file: {why}; download it again")


class _Reader:
    """Reads fields one after the other; ``refuse`` raises if a field is not within the file."""

    def __init__(self, data: mmap.mmap, order: str, refuse: Callable[[str], NoReturn]) -> None:
        self._data = data
        self._order = order
        self._refuse = refuse
        self.position = 0

    def number(self, kind: str) -> int:
        """The unsigned integer here: ``I`` has 4 bytes, ``Q`` has 8."""
        start = self.position
        self._skip(4 if kind == "I" else 8)
        return int(struct.unpack_from(self._order + kind, self._data, start)[0])

    def string(self) -> bytes:
        start = self.position + 8
        self._skip(self.number("Q"))
        return self._data[start : self.position]

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind])
        elif kind == _STRING:
            self._skip(self.number("Q"))
        elif kind == _ARRAY and depth < _MOST_NESTED:
            item, count = self.number("I"), self.number("Q")
            if item in _SCALARS:
                self._skip(_SCALARS[item] * count)
                return
            if item == _STRING:
                self._skip_strings(count)
                return
            for _ in range(count):
                self.skip_value(item, depth + 1)
        else:
            self._refuse(f"a value has the unknown type {kind}")

    def _skip_strings(self, count: int) -> None:
        """Vocabularies have hundreds of thousands."""
        data, position, end = self._data, self.position, len(self._data)
        read = struct.Struct(f"{self._order}Q").unpack_from
        for _ in range(count):
            if position + 8 > end:
                position = end + 1
                break
            position += 8 + read(data, position)[0]
        self._skip(position - self.position)

    def tensor(self) -> GgufTensor:
        """The tensor described here; its start is counted from the start of all data."""
        name, dimensions = self.string(), self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            self._refuse(f"the tensor {name!r} claims {dimensions:,} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in set(GGMLQuantizationType):
            self._refuse(f"the tensor {name!r} has the unknown type {kind}")
        known = GGMLQuantizationType(kind)
        per_block, block_bytes = GGML_QUANT_SIZES[known]
        num_bytes = math.prod(shape) // per_block * block_bytes
        text = name.decode(errors="replace")
        return GgufTensor(text, tuple(reversed(shape)), known, offset, num_bytes)

    def _skip(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self.position > len(self._data):
            self._refuse(f"a field near byte {self.position - num_bytes:,} leads past its end")
