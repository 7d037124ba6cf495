"""The source distribution is the whole project: its tests run and its docs can be read. What is
written about the version and about Python in several files is the same everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import kvboost
from support.load_script import load_script

ROOT = Path(__file__).parents[1]
NOT_OURS = (".*", "__pycache__", "*.egg-info", "build", "dist", "bench-results")


def test_the_sdist_holds_tests_docs_examples_and_scripts(tmp_path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_OURS))
    expected = {
        str(path.relative_to(tree))
        for folder in ("benchmarks", "deploy", "docs", "examples", "scripts", "src", "tests")
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    top = {
        *("CHANGELOG.md", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md", "LICENSE"),
        *("README.md", "pyproject.toml"),
    }
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


def test_the_version_is_the_same_everywhere() -> None:
    assert load_script("release").version_problems(ROOT, kvboost.__version__, None) == []


def test_every_python_that_is_claimed_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tested = re.findall(r"[\d.]+", re.findall(r"^ +python: (\[.+\])$", workflow, re.MULTILINE)[0])
    assert claimed == tested
    assert project["requires-python"] == f">={claimed[0]}"
    assert f"Python {claimed[0]} or newer" in (ROOT / "README.md").read_text()


def test_pre_commit_has_the_ruff_of_the_constraints() -> None:
    pinned = re.findall(r"^ruff==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"ruff==[\d.]+", hooks) == pinned * 2
