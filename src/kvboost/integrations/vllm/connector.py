"""The connector that vLLM loads.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVBoostConnector",
        "kv_connector_module_path": "kvboost.integrations.vllm.connector", "kv_role": "kv_both"}'

It says to vLLM's scheduler that all rows but the tail of a prompt will be loaded, though some of
them are moved, repaired or computed on the way. vLLM never asks how rows came to be there.
"""

from __future__ import annotations

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
from kvboost.integrations.vllm.groups import Groups
from kvboost.integrations.vllm.keeping import IDLE_ROWS, LATER_ROWS, Keeping
from kvboost.integrations.vllm.messages import Greeting, Report, Step
from kvboost.integrations.vllm.metrics import Metrics, Stats
from kvboost.integrations.vllm.options import Command, Options, RequestOptions
from kvboost.integrations.vllm.planner import Load, Planner, prompt_ids, repair_name, salt_of
from kvboost.integrations.vllm.served import Served
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

HELD_ROWS = 65_536
"""With so many rows in chunks that are held for requests without pages, or states of their size,
others wait: all that wait would need more memory than the cache may have."""

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
        self.options = Options.parse(transfer.kv_connector_extra_config)
        self.groups = Groups.of(kv_cache_config)
        if role is KVConnectorRole.WORKER:
            declined = why_nothing(vllm_config, self.options, kv_cache_config)
            self.worker = Worker(vllm_config, self.options, declined, self.groups)
            return
        self.page = self.groups.page or vllm_config.cache_config.block_size
        events = vllm_config.kv_events_config
        self._is_heard = events is not None and events.enable_kv_cache_events
        announced = Announcements(self.page) if self._is_heard else None
        resumes = bool(self.groups.with_states)
        self.planner = Planner(self.options, self.page, announced, resumes=resumes)
        self.branches = Branches()
        self.tally = Tally()
        self._commands = Commands(self.planner, self.tally)
        self._pool: BlockPool | None = None
        self.served: dict[str, Served] = {}
        self.held_rows = 0
        """Of loads whose chunks the workers hold, or are about to, without pages for them. States
        count as the rows that take as much memory."""
        self._step = Step()
        # What is on disk or remote also serves others, and routers are told what is kept.
        engine = self.options.engine
        is_shared = self._is_heard or engine.disk_cache_dir or engine.remote_cache_url
        self.keeping = Keeping(
            self.planner,
            self.served,
            self.groups,
            self.page,
            self.tally,
            puts_off=not is_shared,
        )

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        self.keeping.bind(gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers are ready."""
        greetings = [metadata[rank] for rank in sorted(metadata)]
        hellos = [one.hello for one in greetings if isinstance(one, Greeting) and one.hello]
        if len(hellos) != len(greetings) or self._pool is None:
            return
        self.planner.open(hellos)
        if self.groups.with_states:
            logger.info(
                "KVBoost keeps states at ends of pages (%d tokens), about every %d tokens and at "
                "the ends of prompts, with chunks of up to %d tokens",
                self.page,
                self.planner.state_every,
                self.planner.chunk_size,
            )
        self._commands.open(len(hellos))

    def on_new_request(self, request: Request) -> None:
        """A turn of a conversation whose pages are approximate continues in their branch. A
        command begins."""
        served = self._of(request)
        asked = served.asked
        if asked.command is not None:
            self._begin(request.request_id, asked.command, served.salt)
        if not self.branches or asked.mode != "repaired" or not self._serves(served):
            return
        pool = self._pool
        assert pool is not None
        self.branches.rejoin(
            request.request_id,
            request.block_hashes,
            repair_name(self.planner.repair(asked)),
            lambda page_hash: pool.get_cached_block(page_hash, [0]) is not None,
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """May be asked several times before the request runs."""
        request_id = request.request_id
        if self._commands.waits(request_id):
            return None, False  # vLLM asks again
        served = self._of(request)
        if request.num_preemptions or served.load is not None or not self._serves(served):
            return 0, False
        if request.skip_reading_prefix_cache:  # it wants the log probabilities of its prompt
            return 0, False
        branch = self.branches.of(request_id)
        if branch is not None and num_computed_tokens <= branch.first * self.page:
            # None of its pages is there any more, or it was planned before: plan anew.
            self.branches.leave(request_id, request.block_hashes)
            branch = None
        self.keeping.finish_ended()
        if served.fetched is not None and served.fetched.first != num_computed_tokens:
            self._let_go(served)  # vLLM has more of it or less than when it was planned
        if served.fetched is None:
            # If vLLM has no pages for a request, it asks in every step.
            asked = (num_computed_tokens, request.num_tokens, self.planner.num_changes)
            if served.planned[0] != asked:
                served.planned = asked, self._plan(request, served, num_computed_tokens)
        if (load := served.planned[1]) is None:
            return 0, False
        if not self.groups.is_one:
            # With several groups, vLLM cannot compute the rows of a load that fails. So it begins
            # when it cannot fail any more.
            if served.fetched is None and self.held_rows < HELD_ROWS:
                self._hold(served, load)
                self._step.fetches.append(load)
            if not served.is_fetched:
                return None, False
        if branch is None and load.exact_rows < load.end:
            name = repair_name(load.repair)
            self.branches.enter(
                request_id, request.block_hashes, Branch(load.exact_rows // self.page, name)
            )
        return load.end - num_computed_tokens, True

    def _hold(self, served: Served, load: Load | None) -> None:
        for one, sign in ((served.fetched, -1), (load, 1)):
            if one is not None:
                self.held_rows += sign * (one.end - one.first + self.planner.state_rows)
        served.fetched, served.is_fetched = load, False

    def _let_go(self, served: Served) -> None:
        """The chunks of a load that was not sent need not be held any more."""
        if served.fetched is not None:
            self._step.cancelled.append(served.fetched.request_id)
            self._hold(served, None)
            served.planned = None, None

    def _give_up_fetching(self, served: Served) -> None:
        """A chunk is lost: vLLM computes the request."""
        if (load := served.fetched) is not None:
            self._let_go(served)
            self.tally.finish(load, 0, failed=True)
            served.load = load.failed()

    def _plan(self, request: Request, served: Served, local: int) -> Load | None:
        token_ids, salt = request.prompt_token_ids or (), served.salt
        if not self.planner.may_know(token_ids, local, salt, served.asked):
            return None
        if served.token_ids is None:
            served.token_ids = prompt_ids(token_ids)
        return self.planner.plan(request.request_id, served.token_ids, local, salt, served.asked)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        served, request_id = self._of(request), request.request_id
        _, load = served.planned
        if load is not None and num_external_tokens:
            last = load.end // self.page
            tables = tuple(tuple(table[:last]) for table in blocks.get_block_ids())
            served.load, served.is_loading = replace(load, tables=tables), True
            self._hold(served, None)
            self.tally.start(request_id)
            self.keeping.later.on_load()
            self._step.loads.append(served.load)
        elif load is not None:  # vLLM goes on without it
            self._let_go(served)
            branch = self.branches.of(request_id)
            if branch is not None and branch.first * self.page >= load.first:
                self.branches.leave(request_id, request.block_hashes)
        served.planned = None, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        keeping = self.keeping
        keeping.finish_ended()
        keeping.follow(scheduler_output)
        is_busy = scheduler_output.total_num_scheduled_tokens > 0
        if not is_busy:
            keeping.keep_later(IDLE_ROWS)
        step, self._step = self._step, Step()
        step.keeps, dropped = keeping.take()
        step.dropped += dropped
        step.orders, step.is_busy = self._commands.take_orders(), is_busy
        if is_busy:
            # With the next step: vLLM already names pages that this step is about to compute.
            keeping.keep_later(LATER_ROWS)
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self.planner.gone(report.gone)
            self.planner.learn(report.measured)
            self.tally.hear(report.tiers)
            self._commands.hear(report.replies)
            for request_id in self.served.keys() & report.recomputed.keys():
                self.served[request_id].recomputed = report.recomputed[request_id]
            for name in report.fetched:
                if (served := self.served.get(name[0])) is not None:
                    served.is_fetched |= served.waits_for(name)
            for name in report.failed:
                if (served := self.served.get(name[0])) is not None:
                    served.has_failed |= served.loads(name)
                    if served.waits_for(name):
                        self._give_up_fetching(served)
        for request_id in connector_output.finished_recving or ():
            served = self.served.get(request_id)
            if served is not None and served.is_loading and served.load is not None:
                self.tally.finish(served.load, served.recomputed, failed=served.has_failed)
                served.is_loading = False
                if served.has_failed:
                    served.load = served.load.failed()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished_all_groups`, of a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM frees the pages now. The next step is the first that can write to them, and it
        begins with the copy."""
        served = self._of(request)
        self._finish(served, block_ids)
        del self.served[request.request_id]
        said: dict[str, Any] = {}
        if served.load is not None and not served.is_loading:
            said = usage(served.load, served.recomputed)
        said |= self._commands.take_answer(request.request_id) or {}
        if served.error:
            said["error"] = served.error
        return False, {"kvboost": said} if said else None

    def _finish(self, served: Served, block_ids: tuple[list[int], ...]) -> None:
        request_id = served.request.request_id
        branch = self.branches.of(request_id)
        self.branches.forget(request_id)
        self._let_go(served)
        self.keeping.end(served, block_ids, branch)
        if served.is_loading:
            self.tally.cancel(request_id)
            self._step.cancelled.append(request_id)

    def take_events(self) -> list[KVCacheEvent]:
        """Blocks that our tiers hold now, or hold no longer."""
        if self._is_heard:
            self.keeping.finish_ended()
        announced = self.planner.take_announcements()
        if not announced:
            return []
        from kvboost.integrations.vllm.publish import as_events

        engine = self.options.engine
        return as_events(
            announced,
            page=self.page,
            medium=medium(is_slow=bool(engine.disk_cache_dir or engine.remote_cache_url)),
        )

    def get_kv_connector_stats(self) -> Stats | None:
        """The changes. Workers tell the scheduler's side, which tells all."""
        if self._role is KVConnectorRole.WORKER:
            return None
        changed = self.tally.take(self.planner.num_chunks())
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
        """Forgets everything, what waits for pages and what requests have computed so far too: the
        weights may be others now."""
        self.keeping.finish_ended()
        self.keeping.later.forget()
        for served in self.served.values():
            self._let_go(served)
            served.is_kept &= not served.request.num_computed_tokens
        self._step.dropped += self.planner.forget()
        self.branches.clear()
        return True

    def _of(self, request: Request) -> Served:
        """The known facts of a request. It asks for the default if what it says cannot be read."""
        request_id = request.request_id
        if (known := self.served.get(request_id)) is not None:
            return known
        extra, error = request.sampling_params and request.sampling_params.extra_args, ""
        try:
            asked = RequestOptions.of_request(extra, self.options)
        except ConfigError as refused:
            logger.warning("KVBoost ignores what request %s asks: %s", request_id, refused)
            asked, error = RequestOptions.parse(None, self.options), str(refused)
        adapter, name = request.lora_request, None
        if adapter is not None:
            name = f"{adapter.lora_name}\0{adapter.lora_path}"
            if asked.mode == "repaired":  # our forwards run without the adapter
                asked = replace(asked, mode="exact")
        salt = salt_of(request.cache_salt, name)
        is_kept = not self._commands.is_forgetting(salt)
        served = Served(request, asked, salt, error=error, is_kept=is_kept)
        self.served[request_id] = served
        return served

    def _begin(self, request_id: str, command: Command, salt: str) -> None:
        if command.name == "forget":
            self.keeping.later.forget(salt)
            for one in self.served.values():
                # Its tokens may be in the rows that requests compute now.
                one.is_kept &= one.salt != salt
        self._commands.begin(request_id, command, salt)

    def _serves(self, served: Served) -> bool:
        return self.planner.is_open and served.has_only_tokens

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.greet()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called at the start of every step, before anything is written to a page. vLLM's own
        reference stays empty: with one, vLLM would call us twice for every layer, for nothing."""
        assert isinstance(connector_metadata, Step)
        self._bound = connector_metadata
        if not self.groups.with_states:  # else the step computes what is kept
            self.worker.keep(connector_metadata.keeps)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """vLLM has launched its own forward, if there is one. Loads go on behind it: in front of
        it, a GPU would wait for what the host prepares."""
        return None, self.worker.step(self._bound) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_pages()

    def build_connector_worker_meta(self) -> Report | None:
        return self.worker.take_report()

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.WORKER:
            self.worker.close()
        else:
            self._commands.close()
            self.planner.close()
