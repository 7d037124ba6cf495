"""Files that somebody wrote to harm whoever loads them. Each is refused with a reason, after little
work and with little memory, and nothing is changed."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvboost.errors import AdapterError
from kvboost.model.adapters import files
from kvboost.model.adapters.files import read_adapter
from kvboost.model.adapters.patterns import Patterns
from kvboost.model.execution.forward import Forward
from support.adapters import QV, write_adapter
from support.tiny import make_engine, tiny_model

MODEL = tiny_model("llama")
MODULE = "model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", MODEL, targets=QV)


def refused(folder: Path, said: str) -> None:
    """Loading it raises our error in time, with little memory and a short message."""
    found: list[BaseException | None] = []

    def load() -> None:
        try:
            Forward(MODEL, packed=True).load_adapter(read_adapter(folder))
            found.append(None)
        except BaseException as error:
            found.append(error)

    tracemalloc.start()
    try:
        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        thread.join(120)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found, "it waits for ever"
    with pytest.raises(AdapterError, match=said) as raised:
        if found[0] is not None:
            raise found[0]
    assert len(str(raised.value)) < 1000 and "\n" not in str(raised.value)
    assert peak < 100 << 20


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "an infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha=inf"),
    "an alpha that is not a number": ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
    "a negative alpha": ({"lora_alpha": -1}, "lora_alpha=-1"),
    "an alpha of 400 digits": ({"lora_alpha": 10**400}, "lora_alpha=1000.*…"),
    "an alpha beyond the model's numbers": ({"lora_alpha": 1e300}, "not finite"),
    "a huge rank": ({"r": 10**9}, "65,536 at most"),
    "a rank of 400 digits": ({"r": 10**400}, "r=1000"),
    "a rank of false": ({"r": False}, "r=False"),
    "a rank that is an object": ({"r": {"a": 1}}, "r={'a': 1}"),
    "patterns that are a list": ({"rank_pattern": ["q_proj"]}, "must be an object"),
    "patterns that are a text": ({"alpha_pattern": "q_proj"}, "must be an object"),
    "a pattern of a text": ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern='8'"),
    "many patterns": ({"rank_pattern": {f"a{n}": 4 for n in range(5000)}}, "4096 are allowed"),
    "a long pattern": ({"rank_pattern": {"a" * 300: 4}}, "256 are allowed"),
    "tokens that are a text": ({"alora_invocation_tokens": "abc"}, "token ids"),
    "tokens that are true": ({"alora_invocation_tokens": [True]}, "token ids"),
    "negative tokens": ({"alora_invocation_tokens": [-1]}, "token ids"),
    "huge tokens": ({"alora_invocation_tokens": [10**30]}, "token ids"),
    "many tokens": ({"alora_invocation_tokens": [1] * 2000}, "1024 at most"),
    "a huge option": ({"made_up": "x" * 900_000}, "does not know"),
    "an option of odd characters": ({"a\x1b[2J\nb": 1}, r"a\?\[2J\?b=1"),
    "another kind of adapter": ({"peft_type": ["LORA"] * 1000}, "only 'LORA'"),
    "a bias that is an object": ({"bias": {"all": True}}, "it has biases"),
    "a start that is a list": ({"init_lora_weights": [1, 2]}, "changes the weights"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_is_believed_in_nothing(case: str, folder: Path) -> None:
    fields, said = CONFIGS[case]
    change_config(folder, **fields)
    refused(folder, said)


SLOW = ("(a+)+b", "(a|a)*b", "(a|aa)+$", "a?" * 40 + "a" * 40, "(a|a)" * 30 + "b", "(.*.*.*.*)+b")
HUGE = ("a{2147483647}", "((a{100}){100}){100}", "(" * 100 + ")" * 100)
ODD = ("(?=a)b", "(?P<x>a)", r"(a)\1", "[", "[z-a]", "a++", "", "\x00", "q_proj|")


@pytest.mark.parametrize("pattern", SLOW + HUGE + ODD)
def test_only_simple_patterns_are_compared(pattern: str, folder: Path) -> None:
    """A regular expression could take for ever, or memory without end, and no thread would run."""
    change_config(folder, rank_pattern={pattern: 4})
    refused(folder, "rank_pattern.*pattern")


@pytest.mark.parametrize("pattern", [".*.*b", "a*a*b", "[ab]*[ab]+c", "(a|aa)(a|aa)a*b", "..*.*b"])
def test_simple_patterns_take_no_time(pattern: str) -> None:
    """Slow ones would take years. The longest names that are allowed, most of them of dots."""
    for module in ("a" * 256, "a." * 128, "." * 256):
        Patterns({pattern: 1}).find(module)


def test_comparing_patterns_ends(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("kvboost.model.adapters.patterns.MOST_SECONDS", -1.0)
    change_config(folder, rank_pattern={"other": 4})
    refused(folder, "takes longer")


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True),
        ("_proj", False),
        ("self_attn.q_proj", True),
        ("layers.0.*", True),
        ("layers.1.*", False),
        (r"layers\.\d+\.self_attn\.(q|v)_proj", True),
        ("^model.layers.[0-9].self_attn.q_proj$", True),
        ("^layers.0.self_attn.q_proj", False),
        (".*q_proj", True),
    ],
)
def test_simple_patterns_are_those_of_peft(pattern: str, matches: bool) -> None:
    utils = pytest.importorskip("peft.utils.other")
    assert (utils.get_pattern_key([pattern], MODULE) == pattern) is matches
    assert (Patterns({pattern: 1}).find(MODULE) == 1) is matches


def header(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def with_header(data: bytes, length: int | None = None, numbers: bytes = b"") -> bytes:
    return struct.pack("<Q", len(data) if length is None else length) + data + numbers


def described(shape: Any, offsets: Any, dtype: Any = "F32", rank: int = 4) -> bytes:
    """A file of one module; ``shape`` and so on are those of its first factor."""
    names = [f"base_model.model.{MODULE}.lora_{side}.weight" for side in "AB"]
    first = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    second = {"dtype": "F32", "shape": [64, rank], "data_offsets": [1024, 2048]}
    return with_header(header(**dict(zip(names, (first, second), strict=True))), None, bytes(2048))


TENSORS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "damaged|not JSON"),
    "a header of 2**63 bytes": (with_header(b"{}", 1 << 63), "a header of 9,223"),
    "a header of 8 MB that is not there": (with_header(b"{}", 8 << 20), "ends within"),
    "a deep header": (with_header(b'{"a":' + b"[" * 100_000), "too many lists"),
    "a deep header with spaces": (with_header((b"[" + b" " * 40) * 100_000), "not JSON"),
    "a header of small lists": (with_header(b"[" + b"[]," * 2_000_000 + b"[]]"), "too many lists"),
    "a header that is a list": (with_header(b"[1, 2]"), "not an object"),
    "a header that is not text": (with_header(b"\xff\xfe\x00" * 50), "not JSON"),
    "no tensors": (with_header(b"{}"), "no tensors"),
    "a tensor that is a number": (
        with_header(header(**{f"{MODULE}.lora_A.weight": 3})),
        "is not described",
    ),
    "offsets beyond the file": (described([4, 64], [1 << 40, (1 << 40) + 1024]), "damaged"),
    "offsets that overlap": (described([4, 64], [512, 1536]), "damaged"),
    "negative offsets": (described([4, 64], [-1024, 0]), "damaged"),
    "offsets in reverse": (described([4, 64], [1024, 0]), "not the size"),
    "offsets of texts": (described([4, 64], ["0", "1024"]), "not described"),
    "terabytes": (described([4, 1 << 40], [0, 1024]), "not the size"),
    "terabytes, as the offsets say": (described([4, 1 << 40], [0, 1 << 44]), "damaged"),
    "a shape beyond 64 bits": (described([4, 1 << 70], [0, 1 << 74]), "damaged"),
    "a negative shape": (described([-4, -64], [0, 1024]), "only matrices"),
    "a shape of fractions": (described([4.0, 64], [0, 1024]), "only matrices"),
    "a shape of many dimensions": (described([1] * 100_000, [0, 4]), "only matrices"),
    "a shape that is a text": (described("44", [0, 1024]), "only matrices"),
    "a type that lies": (described([4, 64], [0, 1024], "F64"), "not the size"),
    "whole numbers": (described([4, 64], [0, 1024], "I32"), "only matrices"),
    "an unknown type": (described([4, 64], [0, 1024], "F4"), "only matrices"),
    "a type that is a list": (described([4, 64], [0, 1024], ["F32"]), "not described"),
    "a name with a NUL": (
        with_header(header(**{"a\0b.lora_A.weight": {}, "a\0b.lora_B.weight": {}})),
        r"a\?b.* would stay unused",
    ),
    "a name of 100,000 characters": (
        with_header(header(**{"a" * 100_000 + ".lora_A.weight": {}})),
        "would stay unused",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_file_of_tensors_is_believed_in_nothing(case: str, folder: Path) -> None:
    data, said = TENSORS[case]
    (folder / WEIGHTS).write_bytes(data)
    refused(folder, said)


def test_a_huge_config_is_not_read(folder: Path) -> None:
    os.truncate(folder / CONFIG, 100 << 20)
    refused(folder, "104,857,600 bytes; 1,048,576 are allowed")


def test_a_config_that_is_deep_or_no_json(folder: Path) -> None:
    for text, said in (
        ("[" * 10_000, "too many lists"),
        ((" " * 50 + "[") * 10_000, "not JSON"),
        ('{"r": ' + "9" * 10_000 + "}", "not JSON"),
        ("\x00" * 100, "not JSON"),
    ):
        (folder / CONFIG).write_text(text)
        refused(folder, said)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_weights_that_are_not_finite_are_refused(value: float, folder: Path) -> None:
    """Every answer would be nothing, and its rows would be cached. The last one is finite alone,
    and not with the scale of the config."""
    tensors = load_file(folder / WEIGHTS)
    tensors[f"base_model.model.{MODULE}.lora_B.weight"][3, 1] = value
    save_file(tensors, folder / WEIGHTS)
    refused(folder, f"'{MODULE}' has weights that are not finite in torch.float32")


def test_a_sparse_file_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a terabyte, which the file system does not hold."""
    os.truncate(folder / WEIGHTS, 1 << 40)
    monkeypatch.setattr(files, "available_bytes", lambda: 1 << 60)
    refused(folder, "damaged: .* bytes in a file of 1,099,511,627,776")


def test_a_rank_beyond_the_layer_is_refused(folder: Path) -> None:
    write_adapter(folder, MODEL, targets=QV, rank=500)
    refused(folder, "rank 500, more than a layer of its size can use")


def test_weights_larger_than_the_memory_are_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "available_bytes", lambda: 10_000)
    refused(folder, "needs .* of memory, and 9.8KiB are free")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["fifo", "zeros", "folder", "socket"])
def test_what_is_not_a_file_is_not_read(
    name: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "zeros":
        (folder / name).symlink_to("/dev/zero")
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        monkeypatch.chdir(folder)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    refused(folder, "there is no adapter" if name == CONFIG else "not a regular file|cannot be")


def test_a_link_to_a_file_is_followed(folder: Path, tmp_path: Path) -> None:
    """The hub's cache is made of links."""
    linked = tmp_path / "snapshots" / ".." / "linked"
    linked.parent.parent.mkdir()
    (tmp_path / "linked").mkdir()
    for name in (CONFIG, WEIGHTS):
        (linked / name).symlink_to(folder / name)
    assert read_adapter(linked).hashed.result() == read_adapter(folder).hashed.result()


def test_a_pickle_is_never_opened(folder: Path) -> None:
    """Beside weights it is ignored, and without them it is refused."""
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/harmed'\ntR.")
    assert read_adapter(folder).modules
    (folder / WEIGHTS).unlink()
    refused(folder, "pickle")


@pytest.mark.parametrize("change", ["longer", "shorter", "other", "gone"])
def test_weights_that_change_while_they_are_read_are_refused(change: str, folder: Path) -> None:
    found = read_adapter(folder)
    path = folder / WEIGHTS
    data = path.read_bytes()
    if change == "gone":
        path.unlink()
    elif change == "other":
        path.write_bytes(data.replace(b"q_proj", b"o_proj"))
    else:
        path.write_bytes(data + b"x" if change == "longer" else data[:-1])
    with pytest.raises(AdapterError, match=r"has changed while it was read|cannot be read"):
        Forward(MODEL, packed=True).load_adapter(found)


def test_a_refused_adapter_changes_no_answer(tmp_path: Path) -> None:
    hostile: list[Callable[[Path], None]] = [
        lambda path: change_config(path, rank_pattern={"(a+)+b": 4}),
        lambda path: (path / WEIGHTS).write_bytes(TENSORS["a header of small lists"][0]),
    ]
    with make_engine(tiny_model("llama")) as engine:
        folder = write_adapter(tmp_path / "good", tiny_model("llama"), targets=QV)
        engine.load_adapter("good", folder)
        expected = [
            engine.generate("A text.", 4, adapter=name).token_ids for name in ("good", None)
        ]
        for number, harm in enumerate(hostile):
            path = write_adapter(tmp_path / str(number), tiny_model("llama"), targets=QV)
            harm(path)
            with pytest.raises(AdapterError):
                engine.load_adapter("good", path, in_place=True)
        again = [engine.generate("A text.", 4, adapter=name).token_ids for name in ("good", None)]
        assert again == expected and list(engine.adapters()) == ["good"]
