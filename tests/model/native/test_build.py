"""Compiling the kernels, and doing without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost.model.native import build


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is built yet."""
    monkeypatch.setattr(build, "load_library", build.load_library.__wrapped__)
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))


def needs_tiles() -> None:
    if not build._processor() >= build.NEEDED:
        pytest.skip("this CPU has no matrix tiles")


def test_they_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_NATIVE", "0")
    assert build.load_library() == "turned off by KVBOOST_NATIVE=0"


def test_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_processor", frozenset)
    assert "AMX" in str(build.load_library())


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tiles()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no C compiler" in str(build.load_library())


def test_a_compiler_that_fails_is_said_and_torch_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs_tiles()
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such flag >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    assert build.load_library() == "they could not be built"
    assert "no such flag" in caplog.text
    assert [path.name for path in (tmp_path / "native").iterdir()] == []


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_tiles()
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("KVBOOST_NATIVE", "1")
    assert not isinstance(library := build.load_library(), str), library
    (made,) = (tmp_path / "native").iterdir()
    before = made.stat().st_mtime_ns
    assert not isinstance(build.load_library(), str)
    assert made.stat().st_mtime_ns == before


def test_a_model_answers_without_them() -> None:
    """In a process of its own, as what is loaded stays."""
    code = (
        "import torch\n"
        "from tiny import make_engine, tiny_model\n"
        "model = tiny_model('llama', hidden_size=128, head_dim=32).to(torch.bfloat16)\n"
        "with make_engine(model) as engine:\n"
        "    answer = engine.generate(list(range(5, 60)), 4, ignore_eos=True)\n"
        "    print(engine._model.forward._kernels is not None, len(answer.token_ids))\n"
    )
    env = {**os.environ, "KVBOOST_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.stdout.split() == ["False", "4"], done.stderr
