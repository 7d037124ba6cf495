"""Tests inside vLLM, in the environment that ``make peers`` sets up: ``make test-vllm``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FOLDER = tempfile.TemporaryDirectory(prefix="kvboost-vllm-")  # removed at the end
os.environ.setdefault("VLLM_CACHE_ROOT", _FOLDER.name)
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker are here, to be looked at
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}

import pytest  # noqa: E402

pytest.register_assert_rewrite("support.vllm_engines")
from support.vllm_engines import ALWAYS, Engine, Texts  # noqa: E402


@pytest.fixture(scope="module")
def texts(engine: Engine) -> Texts:
    return Texts(engine.llm.get_tokenizer())


@pytest.fixture(scope="module")
def start(model: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines whose workers have processes of their own, with another ``folder``'s model if
    one is given. Each ends the one before."""
    running: list[Engine] = []

    def start(
        extra: dict[str, Any], workers: int = 1, folder: Path = model, **options: Any
    ) -> Engine:
        while running:
            running.pop().close()
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("01"[:workers])
        options |= {"tensor_parallel_size": workers, "distributed_executor_backend": "mp"}
        running.append(Engine({**ALWAYS, **extra}, folder, **options))
        return running[0]

    yield start
    while running:
        running.pop().close()
