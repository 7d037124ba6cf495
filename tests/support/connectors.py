"""The connector without vLLM: its modules are imported over a package that has vLLM's names."""

from __future__ import annotations

import enum
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.fake_vllm import make_fake_vllm

PAGE = 16
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OURS = "kvboost.integrations.vllm"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """As vLLM's connectors begin."""

    def __init__(self, config: object, role: Role, kv_cache_config: object) -> None:
        self._role = role

    def bind_connector_metadata(self, metadata: object) -> None: ...


@pytest.fixture
def connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the connector."""
    if "vllm" in sys.modules:
        pytest.skip("the real vLLM is imported here")
    known, finders = set(sys.modules), list(sys.meta_path)
    make_fake_vllm(tmp_path, "0.26.1")
    monkeypatch.syspath_prepend(tmp_path)
    base: Any = importlib.import_module(BASE)
    base.KVConnectorBase_V1, base.KVConnectorRole = Base, Role
    named: Any = importlib.import_module("vllm.logger")
    named.init_logger = logging.getLogger
    try:
        yield importlib.import_module(f"{OURS}.connector")
    finally:
        sys.meta_path[:] = finders
        for name in set(sys.modules) - known:
            if name.startswith(("vllm", OURS)):
                del sys.modules[name]
                parent, _, short = name.rpartition(".")
                vars(sys.modules.get(parent, connector)).pop(short, None)


class Pool:
    """vLLM's prefix cache: pages by their hashes."""

    enable_caching = True

    def __init__(self) -> None:
        self.pages: dict[bytes, int] = {}

    def get_cached_block(self, page_hash: bytes, groups: list[int]) -> list[Any] | None:
        page = self.pages.get(page_hash)
        return None if page is None else [SimpleNamespace(block_id=page)]


class Scheduler:
    """Runs requests of one token through the scheduler's side of a ``connector``."""

    def __init__(self, connector: Any, **extra: Any) -> None:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            cache_config=SimpleNamespace(block_size=PAGE),
            kv_events_config=None,
        )
        self.connector = connector.KVBoostConnector(config, Role.SCHEDULER, None)
        self.pool = Pool()
        self.connector.bind_gpu_block_pool(self.pool)
        greeting = connector.Greeting(_hello())
        self.connector.set_xfer_handshake_metadata({0: greeting})
        self._pages = 1

    def begin(self, name: str, ids: list[int], salt: str | None = None, **asked: Any) -> Any:
        full = range(len(ids) // PAGE)
        request = SimpleNamespace(
            request_id=name,
            sampling_params=SimpleNamespace(extra_args={"kvboost": asked} if asked else None),
            lora_request=None,
            cache_salt=salt,
            prompt_token_ids=ids,
            all_token_ids=[*ids, 7],
            num_tokens=len(ids) + 1,
            num_computed_tokens=len(ids),
            block_hashes=[repr((salt, ids[: (one + 1) * PAGE])).encode() for one in full],
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            prompt_embeds=None,
            mm_features=None,
        )
        self.connector.on_new_request(request)
        return request

    def known(self, request: Any) -> int:
        """The rows that would be loaded, beyond those that vLLM has."""
        rows, _ = self.connector.get_num_new_matched_tokens(request, 0)
        return rows or 0

    def end(self, request: Any) -> list[int]:
        """The pages of the request, which the prefix cache has from now on."""
        pages = [self._pages + number for number in range(-(-request.num_tokens // PAGE))]
        self._pages += len(pages)
        self.pool.pages |= dict(zip(request.block_hashes, pages, strict=False))
        self.connector.request_finished(request, pages)
        return pages

    def step(self, tokens: int = 0) -> Any:
        """What the workers are told in a step with so many tokens."""
        return self.connector.build_connector_meta(
            SimpleNamespace(total_num_scheduled_tokens=tokens)
        )


def _hello() -> Any:
    from kvboost.integrations.vllm.planner import Hello

    return Hello("weights", "a model", 64)
