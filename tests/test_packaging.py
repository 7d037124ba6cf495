"""The source distribution is the whole project: its tests run and its docs can be read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_OURS = (".*", "__pycache__", "*.egg-info", "build", "dist", "bench-results")


def test_the_sdist_holds_tests_docs_examples_and_scripts(tmp_path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_OURS))
    expected = {
        str(path.relative_to(tree))
        for folder in ("deploy", "docs", "examples", "scripts", "src", "tests")
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    top = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"}
    expected |= top | {"Dockerfile", "Makefile", "compose.yaml", "constraints.txt"}
    program = "import sys; from setuptools.build_meta import build_sdist as b; b(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("kvboost-*.tar.gz")
    with tarfile.open(archive) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert sorted(expected - held) == []
