"""The simulation of routing: what a server holds is found there, and nowhere else."""

from __future__ import annotations

import zlib

import numpy as np

from benchmarks import routing
from benchmarks.cluster import Traffic
from kvboost.bench.peers.setting import Vocabulary
from kvboost.tokens.hashing import as_token_ids
from support.passages import text

VOCABULARY = Vocabulary(
    lambda said: [zlib.crc32(word.encode()) & 0xFFFF for word in said.split()], lambda ids: "", ()
)


def test_a_server_finds_what_it_has_read_wherever_it_is() -> None:
    server, ids = routing.Server(1000), np.arange(1000, 1256)
    first = as_token_ids(ids)
    assert server.read(first) == (0, 0, 256)
    server.keep(first, 256)
    assert server.read(first)[0] >= 240
    in_place, moved, start = server.read(as_token_ids([*range(40), *ids, *range(50, 90)]))
    assert (in_place, start) == (0, 40) and moved >= 240
    assert routing.Server(1000).read(first) == (0, 0, 256)


def test_documents_that_fit_two_servers_and_not_one_gain_by_routing() -> None:
    documents = [text(number, 256) for number in range(8)]
    traffic = Traffic(documents, seed=0, words=text("words", 2000).split())
    given = (traffic, VOCABULARY, 4, 60)
    turns = routing.share("round-robin", routing.best, *given)
    content = routing.share("content", routing.best, *given)
    assigned = routing.share("content", routing.fixed_servers(documents), *given)
    assert 0 < turns < content < 1 and turns < assigned < 1
