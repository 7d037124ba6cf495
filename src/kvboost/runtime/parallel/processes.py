"""Starts the processes of the other ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from kvboost.errors import ConfigError
from kvboost.runtime.parallel.ranks import STEP_SECONDS, Link, Ranks

START_SECONDS = 300.0
"""How long a process may take to import what it needs."""
PROGRAM = """
import json, sys
sys.path[:], *arguments = json.loads(sys.argv[1])
from kvboost.runtime.parallel.follower import main
main(*arguments)
"""
"""What another rank runs. It imports from where this process does."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def open_ranks(size: int, device: torch.device) -> Ranks:
    """Starts ``size - 1`` processes for devices of this kind; returns when they are ready."""
    if distributed.is_initialized():
        raise ConfigError(
            f"tp_size={size}: this process has a process group of torch.distributed already; close "
            "the other engine with tp_size first, and do not use torchrun: KVBoost starts its "
            "processes itself"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvboost-ranks-"))
        stack.callback(_leave_group)
        meeting = os.path.join(folder, "meeting")
        processes: list[subprocess.Popen[bytes]] = []
        links: list[Link] = []
        for rank in range(1, size):
            process, link = _start(rank, size, meeting, backend)
            processes.append(process)
            links.append(link)
        ranks = Ranks(processes, links, stack.pop_all().close)
    try:
        with ranks.together():
            for link in links:  # each says that it is there
                link.receive(START_SECONDS)
            join_group(meeting, backend, 0, size)
    except BaseException:
        ranks.close()
        raise
    return ranks


def _start(
    rank: int, size: int, meeting: str, backend: str
) -> tuple[subprocess.Popen[bytes], Link]:
    ours, theirs = socket.socketpair()
    threads = max(1, torch.get_num_threads() // size)
    with theirs:
        arguments = [sys.path, rank, size, meeting, backend, theirs.fileno(), threads]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0, which then ends the others
        )
    return process, Link(Connection(ours.detach()))


def join_group(meeting: str, backend: str, rank: int, size: int) -> None:
    """Makes this process a rank of torch's default process group, over this machine's loopback.
    The ranks meet in the file ``meeting``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    distributed.init_process_group(
        backend,
        store=FileStore(meeting, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=STEP_SECONDS),
    )


def _leave_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
