"""Lets transformers read the config and the vocabulary of a GGUF file in a tenth of the time.

The reader of the package ``gguf`` makes several numpy arrays for every item of an array, and a
vocabulary with its merges has hundreds of thousands of items. transformers creates such a reader
for the config, for the weights and for the tokenizer. Ours makes one object for every item.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gguf
from gguf import GGUFReader, GGUFValueType

_HEAD = 12
"""The bytes of an array's type and length."""


class QuickReader(GGUFReader):
    """A reader that has the same values. A string in an array is ``bytes``."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], Sequence[int], list[GGUFValueType]]:
        """The bytes that a value takes, its parts, which of them are data, and their types."""
        kind = GGUFValueType.ARRAY
        item = GGUFValueType(int(self._get(orig_offs, "u4")[0])) if raw_type == kind else None
        if item is None or item == kind:
            return super()._get_field_parts(orig_offs, raw_type)
        length = self._get(orig_offs + 4, "u8")
        count, start = int(length[0]), orig_offs + _HEAD
        if item == GGUFValueType.STRING:
            items, size = self._strings(start, count)
        else:
            numbers = self._get(start, self.gguf_scalar_to_np[item], count)
            items, size = list(numbers.reshape(-1, 1)), numbers.nbytes
        types = [kind, item] if count else [kind]
        return _HEAD + size, [item, length, *items], range(2, 2 + count), types

    def _strings(self, start: int, count: int) -> tuple[list[bytes], int]:
        """``count`` strings from byte ``start`` on, and the bytes that they take."""
        data = memoryview(self.data)
        is_little = (sys.byteorder == "little") == (self.byte_order != "S")
        read = struct.Struct("<Q" if is_little else ">Q").unpack_from
        found, at = [], start
        for _ in range(count):
            end = at + 8 + read(data, at)[0]
            found.append(bytes(data[at + 8 : end]))
            at = end
        return found, at - start


@contextmanager
def quick_reader() -> Iterator[None]:
    """transformers reads GGUF files with a :class:`QuickReader`: it imports the class whenever it
    reads one."""
    gguf.GGUFReader = QuickReader
    try:
        yield
    finally:
        gguf.GGUFReader = GGUFReader
