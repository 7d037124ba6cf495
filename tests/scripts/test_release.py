"""What a release must hold, and what its README's links become."""

from __future__ import annotations

import hashlib

import pytest

from support.load_script import load_script

release = load_script("release")

TRACKED = [
    *(".ci/run", ".gitignore", "LICENSE", "README.md", "docs/cache.md", "tests/test_tiers.py"),
    *("src/kvboost/__init__.py", "src/kvboost/py.typed", "src/kvboost/serve/static/index.html"),
    *("src/kvboost/model/native/amx/rows.c", "src/kvboost/bench/texts/words.json"),
]
WHEEL = [
    *(name.removeprefix("src/") for name in TRACKED if name.startswith("src/")),
    *(f"kvboost-1.0.0.dist-info/{name}" for name in release.DIST_INFO),
]
SDIST = [f"kvboost-1.0.0/{name}" for name in (*TRACKED[2:], "PKG-INFO", "setup.cfg")]


def test_a_wheel_holds_the_package_and_nothing_else() -> None:
    assert release.wheel_problems(WHEEL, TRACKED, "1.0.0") == []


@pytest.mark.parametrize(
    "missing",
    [
        "kvboost/py.typed",
        "kvboost/serve/static/index.html",
        "kvboost/model/native/amx/rows.c",
        "kvboost-1.0.0.dist-info/licenses/LICENSE",
    ],
)
def test_a_file_that_a_wheel_lacks_is_named(missing: str) -> None:
    held = [name for name in WHEEL if name != missing]
    assert release.wheel_problems(held, TRACKED, "1.0.0") == [f"the wheel lacks {missing}"]


@pytest.mark.parametrize(
    "strange", ["tests/test_tiers.py", "kvboost/__pycache__/config.cpython-311.pyc", "kvboost/a.so"]
)
def test_a_file_that_a_wheel_should_not_hold_is_named(strange: str) -> None:
    found = release.wheel_problems([*WHEEL, strange], TRACKED, "1.0.0")
    assert found == [f"the wheel holds {strange}"]


def test_an_sdist_holds_every_tracked_file_but_a_few() -> None:
    made = [f"kvboost-1.0.0/src/kvboost.egg-info/{name}" for name in ("PKG-INFO", "SOURCES.txt")]
    assert release.sdist_problems([*SDIST, *made], TRACKED, "1.0.0") == []
    without = [name for name in SDIST if not name.endswith("cache.md")]
    found = release.sdist_problems([*without, "kvboost-1.0.0/keys.txt"], TRACKED, "1.0.0")
    assert found == ["the sdist lacks docs/cache.md", "the sdist holds keys.txt"]


def test_other_versions_are_named(tmp_path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.1.0\n\n## 1.0.0\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.1.0\n")
    assert release.version_problems(tmp_path, "1.1.0", "v1.1.0") == []
    problems = release.version_problems(tmp_path, "1.2.0", "v1.1.0")
    assert [problem.split()[0] for problem in problems] == ["the", "CHANGELOG.md", "CITATION.cff"]


def test_links_lead_to_the_repository() -> None:
    page = "[a](docs/a.md#b) ![c](docs/c.png) [d](https://x.example/d) [e](#f) [i]"
    linked = release.absolute_links(page, "https://r.example/blob/v1", "https://r.example/raw/v1")
    assert linked == (
        "[a](https://r.example/blob/v1/docs/a.md#b) ![c](https://r.example/raw/v1/docs/c.png) "
        "[d](https://x.example/d) [e](#f) [i]"
    )


def test_checksums_are_those_of_sha256sum(tmp_path) -> None:
    file = tmp_path / "kvboost.whl"
    file.write_bytes(b"wheel")
    expected = f"{hashlib.sha256(b'wheel').hexdigest()}  kvboost.whl\n"
    assert release.checksums([file]) == expected
