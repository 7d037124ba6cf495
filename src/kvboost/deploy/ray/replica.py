"""A replica: one model, one cache, and KVBoost's own application, unchanged."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

from ray import serve

from kvboost.deploy.content import Sketch
from kvboost.deploy.ray.options import DeployOptions
from kvboost.deploy.ray.scaling import autoscaling_stats
from kvboost.deploy.requests import UPSTREAM_HEADER
from kvboost.deploy.router import Known

REPORTED_MARKS = 8192
"""Marks in a report, the newest: 64 kB."""
REPORTED_BLOCKS = 2048
STALLED_SECONDS = 120.0
"""A replica that has requests and takes no step for so long is replaced."""
Message = dict[str, Any]


class Replica:
    """Runs in a process of its own. Serve calls the methods."""

    def __init__(self, options: dict[str, Any]) -> None:
        given = DeployOptions(**options)
        threads = max(1, int(given.cpus))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        import torch

        torch.set_num_threads(threads)
        import kvboost
        from kvboost.config import api_keys
        from kvboost.serve.app import create_app
        from kvboost.serve.settings import ServerSettings, parse_keys

        self._engine = kvboost.KVBoost.from_pretrained(
            given.model,
            device=given.device,
            dtype=given.dtype,
            max_cache_bytes=given.max_cache_bytes,
            remote_cache_url=given.redis,
            max_waiting=given.max_ongoing,
        )
        settings = ServerSettings(
            keys=parse_keys(api_keys(), "KVBOOST_API_KEYS"),
            shared_cache=given.shared_cache,
            drain_seconds=given.drain_seconds,
        )
        self._app = create_app(self._engine, settings)
        self._drain_seconds = given.drain_seconds
        self._name = serve.get_replica_context().replica_id.unique_id
        self._known = Known(given.remember)
        self._reports = count(1)
        self._progress = Progress(time.monotonic())

    async def asgi(
        self, sketch: Sketch, scope: dict[str, Any], body: bytes
    ) -> AsyncGenerator[Message, None]:
        """The application's answer to a request, as ASGI messages. Closing the generator is what a
        client that hangs up is to a server: the request is cancelled."""
        queue: asyncio.Queue[Any] = asyncio.Queue()  # messages, then None
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for part in parts:
                return part
            await asyncio.Event().wait()
            raise AssertionError

        async def answer() -> None:
            try:
                whole = {**scope, "type": "http", "asgi": {"version": "3.0"}, "state": {}}
                await self._app(whole, receive, queue.put)
            finally:
                queue.put_nowait(None)

        task = asyncio.create_task(answer())
        try:
            while (message := await queue.get()) is not None:
                if message["type"] == "http.response.start":
                    named = (UPSTREAM_HEADER.encode(), self._name.encode())
                    message = {**message, "headers": [*message["headers"], named]}
                    if message["status"] == 200:
                        self._known.add(sketch)
                yield message
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def record_routing_stats(self) -> dict[str, Any]:
        """The text that this replica has read, for routers that did not send it."""
        return {
            "number": next(self._reports),
            "marks": self._known.marks.newest(REPORTED_MARKS),
            "blocks": self._known.blocks.newest(REPORTED_BLOCKS),
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        return autoscaling_stats(self._engine.serving_stats())

    async def check_health(self) -> None:
        """Raises if the engine has requests and makes no progress."""
        stats = self._engine.serving_stats()
        busy = bool(stats["running"] or stats["waiting"])
        if self._progress.stalled(busy, stats["steps"], time.monotonic()):
            raise RuntimeError(f"the engine has taken no step for {STALLED_SECONDS:g} s")

    async def __del__(self) -> None:
        """Serve calls this once, after the last answer or when the time to drain is over."""
        await self._engine.adrain(self._drain_seconds)
        await asyncio.to_thread(self._engine.flush)
        await asyncio.to_thread(self._engine.close)


class Progress:
    """Whether an engine that has requests takes steps."""

    def __init__(self, now: float) -> None:
        self._steps = -1
        self._since = now

    def stalled(self, busy: bool, steps: int, now: float) -> bool:
        if not busy or steps != self._steps:
            self._steps, self._since = steps, now
        return now - self._since > STALLED_SECONDS
