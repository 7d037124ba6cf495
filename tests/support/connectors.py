"""The connector without vLLM: its modules are imported over a package that has vLLM's names."""

from __future__ import annotations

import enum
import hashlib
import importlib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.fake_vllm import make_fake_vllm

PAGE = 16
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OURS = "kvboost.integrations.vllm"
Tables = tuple[list[int], ...]


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


@dataclass
class Full:
    """A group of layers that see all rows."""

    block_size: int = PAGE


@dataclass
class Window(Full):
    """A group of layers that see a window only."""

    sliding_window: int = 0


@dataclass
class States:
    """A group of layers with states."""

    block_size: int = PAGE


class Base:
    """As vLLM's connectors begin."""

    def __init__(self, config: object, role: Role, kv_cache_config: object) -> None:
        self._role = role
        self._connector_metadata: object = None

    def bind_connector_metadata(self, metadata: object) -> None:
        self._connector_metadata = metadata

    def has_connector_metadata(self) -> bool:
        """vLLM calls a connector for every layer if it has."""
        return self._connector_metadata is not None


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
    kinds: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    kinds.SlidingWindowSpec, kinds.MambaSpec = Window, States
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
    """Runs requests of one token through the scheduler's side of a ``connector``. ``windows`` are
    those of the groups of layers, None for full attention. With ``has_states``, one more group has
    states."""

    def __init__(
        self,
        connector: Any,
        windows: Sequence[int | None] = (None,),
        *,
        has_states: bool = False,
        **extra: Any,
    ) -> None:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            cache_config=SimpleNamespace(block_size=PAGE),
            kv_events_config=None,
        )
        groups = [
            SimpleNamespace(
                layer_names=[f"layers.{number}"],
                kv_cache_spec=Full() if window is None else Window(sliding_window=window),
            )
            for number, window in enumerate(windows)
        ]
        if has_states:
            names = [f"layers.{len(groups)}"]
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=States()))
        caches = SimpleNamespace(kv_cache_groups=groups)
        self.connector = connector.KVBoostConnector(config, Role.SCHEDULER, caches)
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
            num_prompt_tokens=len(ids),
            num_computed_tokens=len(ids),
            block_hashes=[_digest(salt, ids[: (one + 1) * PAGE]) for one in full],
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

    def step(
        self,
        tokens: int = 0,
        *,
        new: Mapping[str, tuple[Tables, int]] | None = None,
        running: Mapping[str, tuple[Tables | None, int]] | None = None,
        resumed: Collection[str] = (),
    ) -> Any:
        """What the workers are told in a step with so many tokens, of each of its requests. Of
        scheduled requests it has their new pages, in each group, and how many rows were computed
        before."""
        started, others = new or {}, running or {}
        return self.connector.build_connector_meta(
            SimpleNamespace(
                total_num_scheduled_tokens=tokens,
                num_scheduled_tokens=dict.fromkeys([*started, *others], tokens),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=rows)
                    for name, (tables, rows) in started.items()
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(others),
                    new_block_ids=[tables for tables, _ in others.values()],
                    num_computed_tokens=[rows for _, rows in others.values()],
                    resumed_req_ids=set(resumed),
                ),
            )
        )


def _digest(salt: str | None, ids: list[int]) -> bytes:
    return hashlib.sha256(repr((salt, ids)).encode()).digest()


def _hello() -> Any:
    from kvboost.integrations.vllm.planner import Hello

    return Hello("weights", "a model", 64)
