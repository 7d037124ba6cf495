"""An API process: HTTP, JSON, chat templates, tokenizing and the text of answers."""

from __future__ import annotations

import pickle
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from fastapi import FastAPI

from kvboost.serve.app import create_app
from kvboost.serve.process import SWITCH_SECONDS, Server, collecting_rarely, log_to_stderr
from kvboost.serve.remote import wire
from kvboost.serve.remote.engine import RemoteEmbeddingModel, RemoteEngine
from kvboost.serve.remote.link import Link
from kvboost.serve.settings import ServerSettings


class ApiServer(Server):
    """The server of an API process: it stops when the engine's process says so, or ends."""

    def __init__(self, app: FastAPI, link: Link) -> None:
        super().__init__(app, lambda: link.send(wire.Ready()))
        self._link = link
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._link.on_stop = self._stop
        self._link.on_reload = self._take_settings
        self._link.attach()
        await super().startup(sockets)

    def _stop(self) -> None:
        self.should_exit = True

    def _take_settings(self, message: wire.Reload) -> None:
        settings: ServerSettings = pickle.loads(message.settings)
        taken = self.take_over(lambda: self._app.state.server.reload(settings))
        self._link.send(wire.Reloaded(message.number, taken))


def main(listening: int, end: int) -> None:
    """Serves until the engine's process says otherwise. ``listening`` and ``end`` are descriptors:
    of the socket that clients connect to, and of the connection to the engine's process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the engine's process
    sys.setswitchinterval(SWITCH_SECONDS)
    log_to_stderr()
    pipe: wire.Pipe[wire.ToApi] = wire.Pipe(socket.socket(fileno=end), wire.ToApi)
    try:
        start: wire.Start = pickle.loads(pipe.receive_bytes())
    except wire.Lost:
        sys.exit(1)
    link = Link(pipe)
    engine: Any = RemoteEngine(link, start.engine)
    settings = start.settings
    if start.embedding_model is not None:
        own: Any = RemoteEmbeddingModel(link, start.embedding_model)
        settings = replace(settings, embedding_model=own)
    app = create_app(engine, settings)
    with collecting_rarely():
        ApiServer(app, link).run(sockets=[socket.socket(fileno=listening)])
    was_lost = link.is_lost
    link.close()
    sys.exit(1 if was_lost else 0)
