"""The quick reader of GGUF files against the one that it replaces."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from transformers.integrations.ggml import _gguf_parse_value

from kvboost.model.loading.gguf_reader import QuickReader, quick_reader


def write(path: Path, order: GGUFEndian) -> None:
    writer = GGUFWriter(path, "llama", endianess=order)
    writer.add_block_count(3)
    writer.add_string("a.string", "four")
    writer.add_array("some.strings", ["", "a", "é 中文", "x" * 300])
    writer.add_array("some.numbers", [1, -2, 70_000])
    writer.add_array("some.floats", [0.5, -1e30])
    writer.add_array("some.truths", [True, False])
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_tensor("token_embd.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("order", GGUFEndian)
def test_all_values_and_tensors_are_the_same(tmp_path, order: GGUFEndian) -> None:
    file = tmp_path / "model.gguf"
    write(file, order)
    ours, theirs = QuickReader(file), GGUFReader(file)
    assert _values(ours) == _values(theirs)
    assert _values(ours)["some.strings"][0] == ["", "a", "é 中文", "x" * 300]
    assert [tensor.name for tensor in ours.tensors] == ["token_embd.weight"]
    assert np.array_equal(ours.tensors[0].data, theirs.tensors[0].data)


def _values(reader: GGUFReader) -> dict[str, object]:
    """All values as transformers reads them, and their types."""
    return {
        name: ([_gguf_parse_value(field.parts[at], field.types) for at in field.data], field.types)
        for name, field in reader.fields.items()
        if name != "nested"  # which transformers does not read
    }


def test_transformers_has_it_for_a_while() -> None:
    with quick_reader(), quick_reader():
        assert gguf.GGUFReader is QuickReader
    assert gguf.GGUFReader is GGUFReader
    with pytest.raises(KeyError), quick_reader():
        raise KeyError
    assert gguf.GGUFReader is GGUFReader
