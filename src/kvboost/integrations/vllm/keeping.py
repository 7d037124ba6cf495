"""The rows of running and ended requests that the workers are told to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvboost.integrations.vllm.branches import Branch
from kvboost.integrations.vllm.groups import Groups
from kvboost.integrations.vllm.later import Ended, Later
from kvboost.integrations.vllm.leaving import Followed, Leaving, PageEnds, Running
from kvboost.integrations.vllm.planner import Keep, Planner, prompt_ids
from kvboost.integrations.vllm.served import Served
from kvboost.integrations.vllm.tally import Tally
from kvboost.tokens.hashing import ChunkKey

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

LATER_ROWS, IDLE_ROWS = 4096, 32_768
"""Rows of requests that were put off and are kept together: beside others, and alone."""


class Keeping:
    """Enters what is to be kept into the planner's index, and collects the messages of that for the
    workers. ``served`` are the requests that vLLM has, which the caller changes. ``page`` is the
    number of rows in a page. With ``puts_off``, requests may be kept later."""

    def __init__(
        self,
        planner: Planner,
        served: Mapping[str, Served],
        groups: Groups,
        page: int,
        tally: Tally,
        *,
        puts_off: bool,
    ) -> None:
        self._planner = planner
        self._served = served
        self._page = page
        self._tally = tally
        self._pool: BlockPool | None = None
        # Rows that leave a window cannot be put off.
        self.later = Later(page, tally.put_off, is_on=puts_off and groups.is_one)
        self._followed: Leaving | PageEnds | None = None
        if groups.with_states:
            self._followed = PageEnds(groups.with_states, page)
        elif groups.window is not None:
            self._followed = Leaving(groups.window, page)
        self._ended: list[Ended] = []
        """Requests whose answers are on their way, and of which rows are to be kept."""
        self._keeps: list[Keep] = []
        self._dropped: list[ChunkKey] = []

    def bind(self, pool: BlockPool) -> None:
        """vLLM's pages are those of ``pool``."""
        self._pool = pool
        if not pool.enable_caching:  # pages without names could not be found later
            self.later = Later(self._page, self._tally.put_off, is_on=False)

    def take(self) -> tuple[list[Keep], list[ChunkKey]]:
        """The messages since the last call: what is to be kept, and the chunks to be dropped."""
        keeps, self._keeps = self._keeps, []
        dropped, self._dropped = self._dropped, []
        return keeps, dropped

    def follow(self, output: SchedulerOutput) -> None:
        """Enters rows that leave a window: the step that is planned may give their pages away.
        Enters states that the step leaves at ends of pages."""
        followed = self._followed
        if followed is None:
            return
        self._grow(followed, output)
        if isinstance(followed, Leaving):
            for request_id in followed.due():
                self._keep_leaving(followed, self._served[request_id])
        else:
            for request_id, num_rows in output.num_scheduled_tokens.items():
                self._keep_states(followed, self._served[request_id], num_rows)

    def _grow(self, followed: Followed, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._begin(followed, new.req_id, new.block_ids, new.num_computed_tokens)
        others = output.scheduled_cached_reqs
        for request_id, tables, rows in zip(
            others.req_ids, others.new_block_ids, others.num_computed_tokens, strict=True
        ):
            if request_id in others.resumed_req_ids:
                self._begin(followed, request_id, tables, rows)
            else:
                followed.grow(request_id, tables, rows)

    def _begin(
        self, followed: Followed, request_id: str, tables: Sequence[Sequence[int]], rows: int
    ) -> None:
        served = self._served[request_id]
        if self._is_kept(served):
            if served.token_ids is None:
                served.token_ids = prompt_ids(served.request.prompt_token_ids)
            stored = self._planner.num_stored(served.token_ids, served.salt)
            followed.begin(served.request, tables, rows, stored)

    def _keep_leaving(self, leaving: Leaving, served: Served, *, has_ended: bool = False) -> None:
        """Enters the rows that a request has computed since the last time."""
        request = served.request
        if (one := leaving.of(request)) is None:
            return
        rows = min(one.rows, request.num_tokens)
        if has_ended:
            rows = min(request.num_computed_tokens, request.num_tokens - 1)
        rows = min(rows, len(one.tables[0]) * self._page)
        if not self._is_kept(served) or rows <= one.first:
            return
        some = self._some(served, one, rows, one.first)
        one.first = rows
        if has_ended:
            self._ended.append(some)
        else:
            self._keep(some)

    def _keep_states(self, page_ends: PageEnds, served: Served, num_rows: int) -> None:
        """Enters a request up to the last row whose states are in its pages."""
        one = page_ends.of(served.request)
        row = page_ends.reached(served.request, num_rows, self._planner.state_every)
        if one is None or row is None or not self._is_kept(served):
            return
        self._keep(self._some(served, one, row))
        one.first = row

    def _some(self, served: Served, one: Running, rows: int, first: int = 0) -> Ended:
        """The first ``rows`` rows of a request that runs. Those before ``first`` are not in its
        pages any more."""
        tables, pages = tuple(map(tuple, one.tables)), rows // self._page
        ids, asked, salt = served.token_ids, served.asked, served.salt
        return Ended(served.request, ids, asked, salt, tables, rows, pages, first)

    def end(self, served: Served, block_ids: tuple[list[int], ...], branch: Branch | None) -> None:
        """A request ends, which ran in ``branch``, and its pages are those of ``block_ids``. Its
        rows are entered by ``finish_ended``."""
        request, load = served.request, served.load
        if self._followed is not None:
            if isinstance(self._followed, Leaving):  # states at its end are at no end of a page
                self._keep_leaving(self._followed, served, has_ended=True)
            self._followed.end(request.request_id)
            return
        if served.is_loading or not self._is_kept(served):
            return
        if any(0 in table for table in block_ids):  # the null page: vLLM has freed some rows
            return
        num_rows = min(request.num_computed_tokens, request.num_tokens - 1)
        num_rows = min(num_rows, len(block_ids[0]) * self._page)
        exact_rows, exact_pages = num_rows, num_rows // self._page
        if branch is not None:  # hashes of approximate pages are ours
            exact_rows = branch.first * self._page
            if load is not None and load.first <= exact_rows:
                exact_rows = max(exact_rows, load.exact_rows)
            exact_rows, exact_pages = min(num_rows, exact_rows), branch.first
        ids, asked, salt = served.token_ids, served.asked, served.salt
        tables = tuple(map(tuple, block_ids))
        ended = Ended(request, ids, asked, salt, tables, exact_rows, exact_pages)
        adapted = request.lora_request is not None  # whose name alone names vLLM's pages
        if adapted or not self.later.puts_off(ended, len(self._served)):
            self._ended.append(ended)

    def finish_ended(self) -> None:
        """Enters what ended requests leave. Their answers need not wait for that, so it is done
        when the next step is planned."""
        ended, self._ended = self._ended, []
        for one in ended:
            self._keep(one)

    def keep_later(self, most_rows: int) -> None:
        """Enters some requests that were put off, if it is time."""
        if self.later.is_time(len(self._served)):
            for one in self.later.take(most_rows, self._page_of):
                self._keep(one)

    def _page_of(self, page_hash: Any) -> int | None:
        """The page that vLLM's prefix cache has under a hash."""
        found = None if self._pool is None else self._pool.get_cached_block(page_hash, [0])
        return found[0].block_id if found else None

    def _is_kept(self, served: Served) -> bool:
        """Whether rows of a request are to be kept."""
        may_be = served.is_kept and served.asked.mode != "off"
        return may_be and self._planner.is_open and served.has_only_tokens

    def _keep(self, ended: Ended) -> None:
        request, asked, salt = ended.request, ended.asked, ended.salt
        token_ids = ended.exact_ids()
        keep, replaced = self._planner.keep(token_ids, ended.tables, salt, asked, ended.first)
        self._dropped += replaced
        if keep is not None:
            self._keeps.append(keep)
        if request.cache_salt is None and request.lora_request is None:
            # Salts and adapters would have to be published with the blocks.
            self._planner.announce(ended.hashes, token_ids, salt)
