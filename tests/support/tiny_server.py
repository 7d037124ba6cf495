"""Our server over a tiny model, as a process: ``python -m support.tiny_server PORT MODE``.

It moves text whether or not that is faster, which the command line does not offer. ``TinyPeer``
runs it where a benchmark wants a server.
"""

from __future__ import annotations

import os
import signal
import sys

from support.fake_openai import FakePeer
from support.live_server import live_app
from support.tiny import make_engine, tiny_model

CONTEXT = 4096


class TinyPeer(FakePeer):
    ready_path = "/ready"

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self._mode = mode

    def command(self, setting: object, port: int) -> list[str]:
        return [sys.executable, "-m", "support.tiny_server", str(port), self._mode]

    def environment(self, setting: object) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join(sys.path)}


if __name__ == "__main__":
    from kvboost.serve.app import create_app
    from kvboost.serve.settings import ServerSettings

    model = tiny_model("llama", max_position_embeddings=CONTEXT)
    with (
        make_engine(model) as engine,
        live_app(create_app(engine, ServerSettings(mode=sys.argv[2])), int(sys.argv[1])),
    ):
        signal.sigwait({signal.SIGTERM})
