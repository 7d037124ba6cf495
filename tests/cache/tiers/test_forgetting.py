"""What is forgotten is on no tier."""

from __future__ import annotations

from pathlib import Path

from kvboost.cache import codec
from kvboost.cache.tiers.remote.tier import open_remote
from kvboost.tokens.hashing import as_token_ids, root_key
from support.chunks import ROOT
from support.tiered import admit, files, hits, rows_of, text


def test_a_forgotten_text_and_all_chunks_after_it_are_nowhere(open_store, tmp_path) -> None:
    secret = text(7, 40)
    store = open_store(remote=open_remote(f"file://{tmp_path}/far", 10**9))
    admit(store, [*text(1), *secret, *text(2)])
    admit(store, [*text(3, 5), *secret[:36], *text(4)])  # elsewhere, and a part of it
    admit(store, text(5))
    store.flush()
    assert sum(holds(path, secret) for path in files(tmp_path / "kv")) >= 18
    assert store.forget_text([as_token_ids(secret)]) > 20
    for folder in ("kv", "far"):
        left = list(tmp_path.glob(f"{folder}/**/*.safetensors"))
        assert left and not any(holds(path, secret) for path in left)
    assert len(hits(store, [*text(1), *secret])) == 3  # the text before it stays
    assert len(hits(store, text(5))) == 3
    assert store.check_integrity() == []


def holds(path: Path, secret: list[int]) -> bool:
    """Whether three tokens in a row of ``secret`` are in a chunk."""
    ids = codec.read_file(path).info.token_ids.tolist()
    return any(ids[i : i + 3] == secret[j : j + 3] for i in range(2) for j in range(34))


def test_forgetting_includes_approximate_branches_and_chunks_whose_beginning_is_lost(
    open_store, tmp_path
) -> None:
    secret = text(7, 40)
    store = open_store()
    ids = [*secret, *text(8, 24)]
    # Exact up to the middle of the secret, approximate after it.
    store.admit(ROOT, as_token_ids(ids), rows_of(ids), exact_rows=20, repair="x")
    admit(store, text(9))
    store.flush()
    assert store.forget_text([as_token_ids(secret)]) == store.stats().admitted - 3
    assert store.stats().chunks == 3
    # A chunk in the middle is lost: the chunks after it may have followed any text.
    long = text(10, 60)
    admit(store, long)
    with store.lookup(ROOT, as_token_ids(long)) as known, store.lock:
        store.holdings.residency.mark_lost(known.exact[5].chunk.key)
    assert store.forget_text([as_token_ids(text(11))]) == 9
    assert len(hits(store, long)) == 5 and store.check_integrity() == []


def test_forgetting_includes_other_processes_chunks_and_quarantine(open_store, tmp_path) -> None:
    one, two = open_store(), open_store()
    admit(one, text(1))
    one.flush()
    aside = tmp_path / "kv" / "quarantine"
    aside.mkdir()
    (aside / f"{'a' * 32}.safetensors").write_bytes(b"some of it")
    assert two.forget_text([as_token_ids(text(1))]) == 3
    assert files(tmp_path / "kv") == [] and not list(aside.iterdir())


def test_forgetting_a_salt_reaches_the_remote_store(open_store, tmp_path) -> None:
    root = root_key("model", "tenant")
    store = open_store(remote=open_remote(f"file://{tmp_path}/far", 10**9))
    admit(store, text(1), root)
    admit(store, text(2))
    store.flush()
    assert store.forget(root) == 3
    assert hits(store, text(1), root) == [] and len(hits(store, text(2))) == 3


def test_pins_end_when_their_chunks_are_forgotten(open_store) -> None:
    store = open_store()
    admit(store, text(1))
    store.pin("it", ROOT, as_token_ids(text(1)))
    store.forget_text([as_token_ids(text(1))])
    assert store.stats().pinned == 0 and store.pins() == []
