"""The connector that vLLM loads.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVBoostConnector",
        "kv_connector_module_path": "kvboost.integrations.vllm.connector", "kv_role": "kv_both"}'

It says to vLLM's scheduler that all rows but the tail of a prompt will be loaded, though some of
them are moved, repaired or computed on the way. vLLM never asks how rows came to be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvboost.cache.events.announcements import Announcements
from kvboost.cache.events.layout import medium
from kvboost.errors import ConfigError
from kvboost.integrations.vllm.branches import Branch, Branches
from kvboost.integrations.vllm.commands import Commands
from kvboost.integrations.vllm.messages import Greeting, Report, Step
from kvboost.integrations.vllm.metrics import Metrics, Stats
from kvboost.integrations.vllm.options import Command, Options, RequestOptions
from kvboost.integrations.vllm.planner import Load, Planner, prompt_ids, repair_name, salt_of
from kvboost.integrations.vllm.support import why_nothing
from kvboost.integrations.vllm.tally import Tally, usage
from kvboost.integrations.vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvboost")


class KVBoostConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        # A load that fails must be computed; vLLM's default would end the request. vLLM reads this
        # after it has made the connector.
        transfer.kv_load_failure_policy = "recompute"
        self._options = Options.parse(transfer.kv_connector_extra_config)
        if role is KVConnectorRole.WORKER:
            declined = why_nothing(vllm_config, self._options, kv_cache_config)
            self._worker = Worker(vllm_config, self._options, declined)
            return
        self._page = vllm_config.cache_config.block_size
        events = vllm_config.kv_events_config
        self._is_heard = events is not None and events.enable_kv_cache_events
        announced = Announcements(self._page) if self._is_heard else None
        self._planner = Planner(self._options, self._page, announced)
        self._branches = Branches()
        self._tally = Tally()
        self._commands = Commands(self._planner, self._tally)
        self._pool: BlockPool | None = None
        self._asked: dict[str, RequestOptions] = {}
        self._planned: dict[str, Load] = {}
        self._loading: dict[str, Load] = {}
        self._loaded: dict[str, Load] = {}
        self._recomputed: dict[str, int] = {}
        self._failed: set[str] = set()
        self._salts: dict[str, str] = {}
        self._unkept: set[str] = set()
        """Requests that ran when something under their salt was forgotten."""
        self._errors: dict[str, str] = {}
        self._step = Step()
        self._ended: list[Callable[[], None]] = []
        """What is left to do for requests whose answers are on their way."""

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers are ready."""
        greetings = [metadata[rank] for rank in sorted(metadata)]
        hellos = [one.hello for one in greetings if isinstance(one, Greeting) and one.hello]
        if len(hellos) != len(greetings) or self._pool is None:
            return
        self._planner.open(hellos)
        self._commands.open(len(hellos))

    def on_new_request(self, request: Request) -> None:
        """A turn of a conversation whose pages are approximate continues in their branch. A
        command begins."""
        asked = self._ask(request)
        if asked.command is not None:
            self._begin(request, asked.command)
        if asked.mode != "repaired" or self._pool is None or not self._serves(request):
            return
        pool = self._pool
        self._branches.rejoin(
            request.request_id,
            request.block_hashes,
            repair_name(self._planner.repair(asked)),
            lambda page_hash: pool.get_cached_block(page_hash, [0]) is not None,
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """May be asked several times before the request runs."""
        request_id = request.request_id
        if self._commands.waits(request_id):
            return None, False  # vLLM asks again
        self._planned.pop(request_id, None)
        if request.num_preemptions or request_id in self._loaded or not self._serves(request):
            return 0, False
        if request.skip_reading_prefix_cache:  # it wants the log probabilities of its prompt
            return 0, False
        branch = self._branches.of(request_id)
        if branch is not None and num_computed_tokens <= branch.first * self._page:
            # None of its pages is there any more, or it was planned before: plan anew.
            self._branches.leave(request_id, request.block_hashes)
            branch = None
        self._finish_ended()
        load = self._planner.plan(
            request_id,
            prompt_ids(request.prompt_token_ids or ()),
            num_computed_tokens,
            self._salt(request),
            self._ask(request),
        )
        if load is None:
            return 0, False
        if branch is None and load.exact_rows < load.end:
            name = repair_name(load.repair)
            self._branches.enter(
                request_id, request.block_hashes, Branch(load.exact_rows // self._page, name)
            )
        self._planned[request_id] = load
        return load.end - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        load = self._planned.pop(request.request_id, None)
        if load is not None and num_external_tokens:
            pages = tuple(blocks.get_block_ids()[0])[: load.end // self._page]
            load = replace(load, pages=pages)
            self._loading[request.request_id] = load
            self._tally.start(request.request_id)
            self._step.loads.append(load)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        self._finish_ended()
        step, self._step = self._step, Step()
        step.orders = self._commands.take_orders()
        step.is_busy = scheduler_output.total_num_scheduled_tokens > 0
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._planner.gone(report.gone)
            self._planner.learn(report.measured)
            self._tally.hear(report.tiers)
            self._commands.hear(report.replies)
            loading = self._loading.keys()
            self._recomputed |= {
                one: rows for one, rows in report.recomputed.items() if one in loading
            }
            self._failed |= loading & set(report.failed)
        for request_id in connector_output.finished_recving or ():
            if (load := self._loading.pop(request_id, None)) is not None:
                failed = request_id in self._failed
                self._failed.discard(request_id)
                self._loaded[request_id] = load.failed() if failed else load
                self._tally.finish(load, self._recomputed.get(request_id, 0), failed=failed)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        later, params = self._finish(request, block_ids)
        answer = self._commands.take_answer(request.request_id)
        if (error := self._errors.pop(request.request_id, None)) is not None:
            answer = {"error": error}
        if answer is not None:
            params = {"kvboost": {**(params or {}).get("kvboost", {}), **answer}}
        return later, params

    def _finish(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        branch, load = self._branches.of(request_id), self._loaded.pop(request_id, None)
        asked = self._ask(request)
        recomputed = self._recomputed.pop(request_id, 0)
        self._branches.forget(request_id)
        self._asked.pop(request_id, None)
        self._planned.pop(request_id, None)
        self._salts.pop(request_id, None)
        is_kept = request_id not in self._unkept
        self._unkept.discard(request_id)
        if self._loading.pop(request_id, None) is not None:
            self._tally.cancel(request_id)
            self._failed.discard(request_id)
            self._step.cancelled.append(request_id)
            return False, None
        if not is_kept or not self._serves(request):
            return False, _usage(load, recomputed)
        num_rows = min(request.num_computed_tokens, request.num_tokens - 1)
        num_rows = min(num_rows, len(block_ids) * self._page)
        exact_rows = num_rows if branch is None else min(num_rows, self._exact_rows(branch, load))
        # Hashes of approximate pages are ours.
        exact_pages = num_rows // self._page if branch is None else branch.first
        pages = tuple(block_ids)
        self._ended.append(lambda: self._keep(request, asked, pages, exact_rows, exact_pages))
        # vLLM frees the pages now. The next step is the first that can write to them, and it
        # begins with the copy.
        return False, _usage(load, recomputed)

    def _finish_ended(self) -> None:
        """Enters what ended requests leave. Their answers need not wait for that, so it is done
        when the next step is planned."""
        ended, self._ended = self._ended, []
        for finish in ended:
            finish()

    def _keep(
        self,
        request: Request,
        asked: RequestOptions,
        pages: tuple[int, ...],
        exact_rows: int,
        exact_pages: int,
    ) -> None:
        token_ids, salt = prompt_ids(request.all_token_ids[:exact_rows]), self._salt(request)
        keep, replaced = self._planner.keep(request.request_id, token_ids, pages, salt, asked)
        self._step.dropped += replaced
        if keep is not None:
            self._step.keeps.append(keep)
        if asked.mode != "off" and request.cache_salt is None and request.lora_request is None:
            # Salts and adapters would have to be published with the blocks.
            self._planner.announce(request.block_hashes[:exact_pages], token_ids, salt)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> list[KVCacheEvent]:
        """Blocks that our tiers hold now, or hold no longer."""
        if self._is_heard:
            self._finish_ended()
        announced = self._planner.take_announcements()
        if not announced:
            return []
        from kvboost.integrations.vllm.publish import as_events

        engine = self._options.engine
        return as_events(
            announced,
            page=self._page,
            medium=medium(is_slow=bool(engine.disk_cache_dir or engine.remote_cache_url)),
        )

    def get_kv_connector_stats(self) -> Stats | None:
        """What has changed. Workers tell the scheduler's side, which tells all."""
        if self._role is KVConnectorRole.WORKER:
            return None
        changed = self._tally.take(self._planner.num_chunks())
        return None if changed is None else Stats(changed)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Metrics:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """Forgets everything."""
        self._finish_ended()
        self._step.dropped += self._planner.forget()
        self._branches.clear()
        return True

    def _ask(self, request: Request) -> RequestOptions:
        """What a request wants; the default if it says so in a way that cannot be read."""
        request_id = request.request_id
        if request_id not in self._asked:
            extra = request.sampling_params and request.sampling_params.extra_args
            try:
                self._asked[request_id] = RequestOptions.of_request(extra, self._options)
            except ConfigError as error:
                logger.warning("KVBoost ignores what request %s asks: %s", request_id, error)
                self._errors[request_id] = str(error)
                self._asked[request_id] = RequestOptions.parse(None, self._options)
            asked = self._asked[request_id]
            self._salts[request_id] = salt = self._salt(request)
            if self._commands.is_forgetting(salt):
                self._unkept.add(request_id)
            if request.lora_request is not None and asked.mode == "repaired":
                # Our forwards run without the adapter.
                self._asked[request_id] = replace(asked, mode="exact")
        return self._asked[request_id]

    def _begin(self, request: Request, command: Command) -> None:
        salt = self._salt(request)
        if command.name == "forget":
            # Its tokens may be in the rows that requests compute now.
            self._unkept |= {one for one, its in self._salts.items() if its == salt}
        self._commands.begin(request.request_id, command, salt)

    def _serves(self, request: Request) -> bool:
        """Whether the KV of a request depends on its tokens alone."""
        embeds = request.prompt_embeds is not None or request.prompt_token_ids is None
        return self._planner.is_open and not (embeds or request.mm_features)

    def _salt(self, request: Request) -> str:
        adapter = request.lora_request
        name = None if adapter is None else f"{adapter.lora_name}\0{adapter.lora_path}"
        return salt_of(request.cache_salt, name)

    def _exact_rows(self, branch: Branch, load: Load | None) -> int:
        rows: int = branch.first * self._page
        if load is not None and load.first <= rows:
            rows = max(rows, load.exact_rows)
        return rows

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.greet()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called at the start of every step, before anything is written to a page."""
        super().bind_connector_metadata(connector_metadata)
        for keep in self._metadata.keeps:
            self._worker.keep(keep)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.step(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_pages()

    def build_connector_worker_meta(self) -> Report | None:
        return self._worker.take_report()

    @property
    def _metadata(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Step)
        return metadata

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.WORKER:
            self._worker.close()
        else:
            self._commands.close()
            self._planner.close()


def _usage(load: Load | None, recomputed: int) -> dict[str, Any] | None:
    """What is said of a request in its answer's ``kv_transfer_params``."""
    return None if load is None else {"kvboost": usage(load, recomputed)}
