"""Files that a server reads when it starts."""

from __future__ import annotations

import pytest

from kvboost.cli.option_files import read_texts
from kvboost.errors import ConfigError
from kvboost.serve.settings import ApiKey, ServerSettings


def test_folders_are_read_in_order_without_what_is_not_text(tmp_path) -> None:
    (tmp_path / "b.md").write_text("B", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.md").write_text("\ufeffA", encoding="utf-8")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    texts, left_out = read_texts([tmp_path, tmp_path / "b.md"], 100)
    assert [text for _, text in texts] == ["A", "B", "B"]
    assert texts[0][0].endswith("a.md") and left_out == [str(tmp_path / "image.png")]
    assert read_texts([], 100) == ((), [])


def test_mistakes_are_named(tmp_path) -> None:
    (tmp_path / "image.png").write_bytes(b"\xff")
    (tmp_path / "long.md").write_text("x" * 50)
    for path, said in (
        (tmp_path / "none", "no such file"),
        (tmp_path / "image.png", "not UTF-8"),
        (tmp_path / "long.md", "50 bytes; a server takes 10"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_texts([path], 10)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no text file"):
        read_texts([tmp_path / "empty"], 10)


def test_with_keys_a_server_must_know_for_which_it_warms() -> None:
    keys, warm = (ApiKey("ann", "k"),), (("a.md", "A"),)
    assert ServerSettings(keys=keys, warm=warm, warm_for=("ann",)).warm_for == ("ann",)
    assert ServerSettings(keys=keys, warm=warm, shared_cache=True).warm == warm
    for wrong, said in (
        ({"keys": keys, "warm": warm}, "each key has its own cache"),
        ({"keys": keys, "warm": warm, "warm_for": ("bob",)}, "'bob'"),
        ({"pin": True}, "pin goes with"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServerSettings(**wrong)
