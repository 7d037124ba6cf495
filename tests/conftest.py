"""Engines on tiny models."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from support.cores import cores_per_worker

# Triton's interpreter runs its kernels without a GPU. It must be chosen before anything imports it.
if os.environ.get("KVBOOST_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import fastapi.routing
import httpx._transports.default
import pytest
import torch
import typer.testing
from hypothesis import HealthCheck, settings

from kvboost import KVBoost
from kvboost.model.loading.device import cpu_has_bf16
from support.families import FAMILIES, family_model
from support.tiny import OTHER_MODELS, any_model, make_engine, tiny_model

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much on a busy machine

# A command line, the fields of our servers' replies and the certificates that clients trust are the
# same for all tests; to make any of them takes as long as most tests.
for module, name in (
    (typer.testing, "_get_command"),
    (fastapi.routing, "create_model_field"),
    (httpx._transports.default, "create_ssl_context"),
):
    setattr(module, name, functools.cache(getattr(module, name)))

if "PYTEST_XDIST_WORKER" in os.environ:  # several share the cores, and so do their processes
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_worker()))

# A busy machine is no failure. More examples, for an hour to spare: KVBOOST_TEST_EXAMPLES=1000.
settings.register_profile(
    "kvboost",
    max_examples=int(os.environ.get("KVBOOST_TEST_EXAMPLES", "20")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvboost")

collect_ignore = ["inside_vllm"]  # in an environment of their own: make test-vllm


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, but for two on processors without bfloat16: ours says that it is slow,
    and torch's, given once, that another library multiplies such numbers."""
    if not cpu_has_bf16():
        for expected in ("bfloat16 is emulated", "mkldnn_matmul failed, switching to BLAS gemm"):
            config.addinivalue_line("filterwarnings", f"ignore:{expected}:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests run first: the last ones are short then, and workers end together. The
    first worker takes them all while the others take the rest, so only one loads real weights."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: "e2e" not in item.path.parts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says why tests were skipped, one line a reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture
def engine() -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama")) as made:
        yield made
        assert made.check_integrity() == []


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Callable[..., KVBoost]]:
    """Engines that share a folder; each takes options of its own."""
    opened: list[KVBoost] = []

    def open_engine(**config: object) -> KVBoost:
        options = {"disk_cache_dir": tmp_path / "kv", "gpu_cache_bytes": 0, **config}
        opened.append(make_engine(tiny_model("llama"), **options))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def tiny_engine() -> Callable[[str], KVBoost]:
    """One engine per architecture for the whole session."""

    @functools.cache
    def make(name: str) -> KVBoost:
        model = family_model(name) if name in FAMILIES else any_model(name)
        return make_engine(model, strict=name not in OTHER_MODELS)

    return make
