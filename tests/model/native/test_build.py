"""Compiling the kernels, and working without them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
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
    monkeypatch.setattr(build, "_processor", frozenset)
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs_compiler()
    monkeypatch.setattr(build, "_processor", frozenset)
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))  # nothing is computed with it
    monkeypatch.setattr(build, "TUNING", {})
    assert build.why_not(FLOAT32) is None
    (made,) = (tmp_path / "native").iterdir()
    before = made.stat().st_mtime_ns
    assert build.is_available(FLOAT32)
    assert made.stat().st_mtime_ns == before
    assert build.describe(FLOAT32).startswith("float32 portable (")


STRICT = ["cc", "-O1", "-fopenmp", "-DKVBOOST_FLOAT32", "-Wall", "-Wextra", "-Werror"]


def compiled(folder: Path, sources: Iterable[Path], *flags: str) -> list[Path]:
    """The objects of ``sources``, compiled without a warning."""
    folder.mkdir()
    subprocess.run([*STRICT, *flags, "-c", *sources], cwd=folder, check=True)
    return sorted(folder.glob("*.o"))


def check(source: str, folder: Path, objects: list[Path]) -> str:
    """Links and runs a program that compares kernels with naive loops; returns what it says."""
    program, path = folder / "check", Path(__file__).with_name(source)
    subprocess.run([*STRICT, path, *objects, "-o", program, "-lm"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("all equal\n"), done.stdout
    return done.stdout


def test_the_kernels_equal_naive_loops_on_the_oldest_processor(tmp_path: Path) -> None:
    """Without wide vectors."""
    needs_compiler()
    quantized = compiled(tmp_path / "quantized", (build.FOLDER / build.QUANTIZED).glob("*.c"))
    others = [*build.FOLDER.glob("*.c"), *(build.FOLDER / "float32").glob("*.c")]
    check("check.c", tmp_path, [*compiled(tmp_path / "others", others), *quantized])
    assert "AVX2" not in check("check_quantized.c", tmp_path, quantized)


def test_quantized_products_equal_naive_loops_with_avx2(tmp_path: Path) -> None:
    needs_compiler()
    if "avx2" not in build._processor():
        pytest.skip("this processor has no AVX2")
    sources = (build.FOLDER / build.QUANTIZED).glob("*.c")
    quantized = compiled(tmp_path / "quantized", sources, "-mavx2", "-mfma", "-mf16c")
    assert "AVX2" in check("check_quantized.c", tmp_path, quantized)


def test_a_model_answers_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_NATIVE", "0")
    with make_engine(tiny_model("llama", hidden_size=128, head_dim=32)) as engine:
        assert not engine._model.forward.has_kernels
        assert len(engine.generate(list(range(5, 60)), 4, ignore_eos=True).token_ids) == 4
