"""The interpreter accepts more than the compiler does, so kernels are also compiled."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import kvboost.model.triton as room
from kvboost.config import home

SCRIPT = Path(__file__).parents[2] / "support" / "compile_kernels.py"


def test_all_kernels_compile_for_a_gpu() -> None:
    """Those that have changed since the last run: what is compiled is kept."""
    kept = home() / "tests" / "triton"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(kept)}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = {
        node.name
        for path in Path(str(room.__file__)).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert {line.split()[0] for line in done.stdout.splitlines()} == kernels
    assert list(kept.glob("**/*.cubin"))
