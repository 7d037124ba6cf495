"""A server whose engine is behind a connection, as it is behind that of an API process."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvboost.serve.app import create_app
from kvboost.serve.process import bind
from kvboost.serve.remote.engine import RemoteEmbeddingModel, RemoteEngine
from kvboost.serve.remote.host import Host
from kvboost.serve.remote.link import Link
from kvboost.serve.remote.wire import EmbeddingDescription, EngineDescription, Pipe, ToApi, ToEngine
from kvboost.serve.remote.worker import ApiServer
from kvboost.serve.settings import ServerSettings
from support.live_server import LiveServer, running


@contextmanager
def hosted(engine: Any, own: Any = None) -> Iterator[Link]:
    """A connection to ``engine``, which another thread serves."""
    ours, theirs = socket.socketpair()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        host = Host(
            *(engine, Pipe[ToEngine](ours, ToEngine), own),
            on_ready=lambda: None,
            on_lost=lambda: None,
            on_reloaded=lambda number, taken: None,
            on_adapters=lambda: host.tell_adapters(),
        )
        over = asyncio.Event()
        begun.set_result((asyncio.get_running_loop(), over))
        await over.wait()
        host.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, over = begun.result(20)
    try:
        yield Link(Pipe[ToApi](theirs, ToApi))
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20)
        theirs.close()


@contextmanager
def remote_server(engine: Any, **settings: Any) -> Iterator[LiveServer]:
    """``engine`` on the network, with all of HTTP on the other side of a connection."""
    chosen = ServerSettings(**{"drain_seconds": 5.0, **settings})
    own = chosen.embedding_model
    with hosted(engine, own) as link, bind("127.0.0.1", 0) as listening:
        about = EngineDescription.of(engine, pickle.dumps(engine.prompt_tokenizer))
        if own is not None:
            own.between_parts = engine.answer_meanwhile
            there: Any = RemoteEmbeddingModel(link, EmbeddingDescription.of(own))
            chosen = replace(chosen, embedding_model=there)
        server = ApiServer(create_app(RemoteEngine(link, about), chosen), link)
        with running(server, listening) as live:
            yield live
