"""Tests inside vLLM, in the environment that ``make peers`` sets up: ``make test-vllm``."""

from __future__ import annotations

import os
import tempfile

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

pytest.register_assert_rewrite("engines")
from engines import Engine, Texts  # noqa: E402


@pytest.fixture(scope="module")
def texts(engine: Engine) -> Texts:
    return Texts(engine.llm.get_tokenizer())
