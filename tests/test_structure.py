"""The packages: imports go downwards only, public names are what they say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import kvboost

SRC = Path(kvboost.__file__).parent

BASE = {"config", "errors", "results", "progress"}
MAY_IMPORT = {  # the architecture: a package imports the packages that it names here, and no others
    "config": {"errors"},
    "results": {"config", "errors"},
    "progress": {"config"},
    "api_client": {"errors"},
    "tokens": BASE,
    "cache": BASE | {"tokens"},
    "structured": BASE,
    "chat": BASE | {"structured"},
    "model": BASE | {"chat"},
    "reuse": BASE | {"tokens", "cache", "model"},
    "runtime": BASE | {"tokens", "cache", "model", "reuse", "structured"},
    "integrations": BASE | {"api_client", "tokens", "cache", "model", "reuse"},
    "checks": BASE | {"tokens", "model", "runtime"},
    "engine": BASE | {"tokens", "chat", "structured", "model", "runtime", "checks"},
    "kvboost": BASE | {"tokens", "model", "runtime", "engine"},
    "serve": BASE | {"tokens", "chat", "structured", "runtime", "kvboost"},
    "deploy": BASE | {"tokens", "serve", "kvboost"},
    "bench": BASE | {"model", "kvboost"},
    "cli": BASE
    | {"api_client", "cache", "model", "checks", "integrations", "serve", "deploy", "bench"}
    | {"kvboost"},
    "__main__": {"cli"},
}
FORBIDDEN_LIBRARIES = {
    "tokens": {"torch", "transformers"},
    "structured": {"torch", "transformers"},
    "chat": {"torch", "transformers"},
    "deploy/content.py": {"torch"},
    "deploy/router.py": {"torch"},
    "cache/lookup": {"torch"},
    "cache/eviction": {"torch"},
    "runtime/scheduler.py": {"torch", "transformers"},
    "runtime/speculation/suffixes.py": {"torch"},
    "model/triton": {"transformers"},
    "model/triton/__init__.py": {"triton"},
}


def package_of(path: Path) -> str:
    first = path.relative_to(SRC).parts[0]
    return "kvboost" if first == "__init__.py" else first.removesuffix(".py")


@cache
def imports_of(path: Path) -> frozenset[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names.add("relative")
    return frozenset(names)


WORKERS = SRC / "bench" / "peers" / "workers"
"""Programs of other processes, most of them in other people's environments."""
FILES = sorted(SRC.rglob("*.py"))


def test_imports_go_downwards() -> None:
    public = set(kvboost.__all__)
    for path in FILES:
        package = package_of(path)
        for name in imports_of(path):
            assert name != "relative", f"{path}: imports are absolute"
            parts = name.split(".")
            assert parts[0] != "benchmarks", f"{path}: a wheel has no benchmarks/"
            if parts[0] != "kvboost":
                continue
            target = "kvboost" if len(parts) == 1 or parts[1] in public else parts[1]
            allowed = MAY_IMPORT.get(package, set()) | {package}
            assert target in allowed, f"{path}: {package} must not import {name}"


def test_only_the_model_package_imports_transformers() -> None:
    for path in FILES:
        libraries = {name.split(".")[0] for name in imports_of(path)}
        if package_of(path) != "model" and path.parent != WORKERS:
            assert "transformers" not in libraries, path
        if "llguidance" in libraries:
            assert path == SRC / "structured" / "library.py"
        if "ray" in libraries:
            assert path.parent == SRC / "deploy" / "ray"
        for place, forbidden in FORBIDDEN_LIBRARIES.items():
            if str(path.relative_to(SRC)).startswith(place):
                assert not libraries & forbidden, path
    assert [place for place in FORBIDDEN_LIBRARIES if not (SRC / place).exists()] == []


def test_only_its_package_imports_triton() -> None:
    """The package works without it."""
    for path in FILES:
        of_package = {name for name in imports_of(path) if name.startswith("kvboost.model.triton.")}
        if path.parent == SRC / "model" / "triton":
            others = {name for name in imports_of(path) if name.startswith("kvboost.")} - of_package
            assert not others, f"{path}: kernels know tensors only"
        else:
            assert "triton" not in {name.split(".")[0] for name in imports_of(path)}, path


CHOOSE = (
    *("bench/kit/machine.py", "bench/peers/setting.py", "cli/serve.py", "cache/tiers/ram.py"),
    *("runtime/devices.py", "model/loading/device.py", "model/execution/traits.py"),
    *("model/execution/fast_layers.py", "model/execution/partial_attention.py"),
    *("model/native/build.py", "model/paged/graphs.py", "model/quantized/blocks.py"),
    *("model/triton/__init__.py", "model/triton/host.py", "model/triton/rows.py"),
    "integrations/vllm/pages.py",
)
"""Where a device is chosen, or a kernel for it."""
KINDS = re.compile(r"\w*(KV|Pool|Sampler|Hook|Mass|Shift|Deviation|Probe|Prefix|KVData|PagedData)")


def test_the_kind_of_a_device_is_asked_only_where_something_is_chosen_for_it() -> None:
    asking = {
        str(path.relative_to(SRC))
        for path in FILES
        if re.search(r"\bdevice\.type\b|\.is_cuda\b", path.read_text())
    }
    assert asking == set(CHOOSE)


def test_no_kv_sampler_or_hook_is_told_by_its_class() -> None:
    """They say themselves what callers need to know."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = ast.unparse(node.args[1])
                assert not KINDS.fullmatch(asked), f"{path}:{node.lineno}: isinstance(…, {asked})"


def test_public_names_are_sorted_and_there() -> None:
    assert kvboost.__all__ == sorted(kvboost.__all__)
    for name in kvboost.__all__:
        assert getattr(kvboost, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvboost.nonsense  # noqa: B018


def test_listing_the_public_names_imports_nothing_large() -> None:
    program = "import sys, kvboost; print(*dir(kvboost)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    listed, imported = (line.split() for line in done.stdout.splitlines())
    assert [name for name in listed if not name.startswith("__")] == kvboost.__all__
    assert {"__doc__", "__file__", "__name__", "__path__", "__version__"} < set(listed)
    assert not {"torch", "transformers", "numpy"} & set(imported)


def test_every_public_member_of_the_engine_has_a_docstring() -> None:
    members = [name for name in dir(kvboost.KVBoost) if not name.startswith("_")]
    assert len(members) > 50
    assert [name for name in members if not getattr(kvboost.KVBoost, name).__doc__] == []


def test_no_test_imports_a_test_and_helpers_are_in_support() -> None:
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        if path.is_relative_to(tests / "support"):
            continue
        assert path.name == "conftest.py" or path.name.startswith("test_"), path
    for path in tests.rglob("*.py"):
        for name in re.findall(r"^ *(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE):
            assert not re.search(r"\btest_", name), f"{path}: {name}"


KERNELS = {"support/compile_kernels.py", "model/triton/test_warm.py"}
"""They name every kernel, and kernels have no public names."""
MOST_PRIVATE_LINES = 136
"""A neighbour looks at public names. Lower this when there are fewer; do not raise it."""


def private_names() -> set[str]:
    """Those that the package, the benchmarks and the scripts define."""
    root = Path(__file__).parents[1]
    defines = (
        r"(?:def|class) (_[A-Za-z]\w*)|self\.(_[A-Za-z]\w*)(?:: .*)? = |^(_[A-Za-z]\w*)(?:: .*)? = "
    )
    return {
        name
        for folder in (SRC, root / "benchmarks", root / "scripts")
        for path in folder.rglob("*.py")
        for groups in re.findall(defines, path.read_text(), re.MULTILINE)
        for name in groups
    } - {"", "_replace"}


def test_tests_look_through_public_names() -> None:
    tests, private, lines = Path(__file__).parent, private_names(), []
    reaches = (
        r"(?<!\bself)(?<!\bcls)\.(_\w+)|import .*?\b(_\w+)|setattr\([^()\"]*\"(?:[\w.]*\.)?(_\w+)"
    )
    for path in sorted(tests.rglob("*.py")):
        place = path.relative_to(tests).as_posix()
        text = path.read_text()
        found = {
            text.count("\n", 0, match.end()) + 1
            for match in re.finditer(reaches, text)
            if private & set(match.groups())
        }
        if place not in KERNELS:
            lines += [f"{place}:{line}" for line in sorted(found)]
    assert len(lines) <= MOST_PRIVATE_LINES, "\n".join(lines)
