"""Compiling the kernels, and working without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvboost.model.native import build
from support.tiny import make_engine, tiny_model

FLOAT32 = torch.float32


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_load", build._load.__wrapped__)
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.setenv("KVBOOST_NATIVE", "1")


def needs_compiler() -> None:
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_environment_turns_them_off(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_NATIVE", "0")
    assert build.why_not(dtype) == "turned off by KVBOOST_NATIVE=0"
    assert not build.is_available(dtype)


def test_bfloat16_needs_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "processor", frozenset)
    assert "AMX" in str(build.why_not(torch.bfloat16))


def test_other_dtypes_have_no_kernels() -> None:
    assert build.describe(torch.float16) == "no: only for bfloat16 and float32"
    with pytest.raises(RuntimeError, match=r"no kernels for torch\.float16"):
        build.library(torch.float16)


def test_another_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert build.why_not(FLOAT32) == "they are built on Linux only"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no C compiler" in str(build.why_not(FLOAT32))


def test_a_failing_compiler_is_logged_and_torch_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "bin" / "gcc"
    broken.parent.mkdir()
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such flag >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    assert build.why_not(FLOAT32) == "they could not be built"
    assert "no such flag" in caplog.text
    assert [path.name for path in (tmp_path / "native").iterdir()] == []


def test_float32_needs_no_particular_processor_and_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_compiler()
    monkeypatch.setattr(build, "processor", frozenset)
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))  # nothing is computed with it
    monkeypatch.setattr(build, "TUNING", {})
    assert build.why_not(FLOAT32) is None
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("compiling kernels for this CPU (float32 portable), once")
    assert said[1].startswith("compiled in ") and len(said) == 2
    (made,) = (tmp_path / "native").iterdir()
    before = made.stat().st_mtime_ns
    assert build.is_available(FLOAT32)
    assert made.stat().st_mtime_ns == before and capsys.readouterr().err == ""
    assert build.describe(FLOAT32).startswith("float32 portable (")


STRICT = "-O1 -fopenmp -shared -fPIC -Wall -Wextra -Werror"
COMPARISONS = (
    *("adapter_products", "decoder", "head", "kernels", "layers", "moved_rows"),
    *("quantized_layers", "quantized_product"),
)
PROGRAM = """
import sys
import pytest, torch
from kvboost.model.native import build
build.processor = frozenset  # whose features no form needs
build.TUNING = {}
for flags in sys.argv[1].split(";"):
    build.FLAGS = flags.split()
    build._load.cache_clear()
    library = build.library(torch.float32)
    print(build.describe(torch.float32), library.kvboost_quantized_instructions().decode())
    if failed := pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]):
        sys.exit(failed)
"""


def test_kernels_for_older_processors_equal_torchs_too() -> None:
    """The comparisons of this folder, without wide vectors and, on a processor that has it, with
    AVX2. Nothing is compiled with a warning."""
    needs_compiler()
    has_avx2 = "avx2" in build.processor()
    forms = [STRICT, f"{STRICT} -mavx2 -mfma -mf16c"] if has_avx2 else [STRICT]
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in COMPARISONS]
    program = [sys.executable, "-c", PROGRAM, ";".join(forms), *files]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("float32 portable (")]
    assert len(said) == len(forms) and "AVX2" not in said[0]
    assert not has_avx2 or said[1] == "float32 portable (AVX2) AVX2"


def test_a_model_answers_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_NATIVE", "0")
    with make_engine(tiny_model("llama", hidden_size=128, head_dim=32)) as engine:
        assert not engine.model.forward.has_kernels
        assert len(engine.generate(list(range(5, 60)), 4, ignore_eos=True).token_ids) == 4
