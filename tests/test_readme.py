"""The documentation is true: its code runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.model.loading.load import LoadedModel
from kvboost.runtime import loading
from support.homes import use_home
from support.live_server import live_server
from support.load_script import load_script
from support.page_code import (
    FENCE,
    PAGES,
    ROOT,
    Example,
    commands,
    complaint,
    examples,
    inline_mistakes,
    mistakes,
    name_of,
    unknown_extras,
)

RUNNABLE = (
    *("README.md", "docs/tutorial.md", "docs/coming-from-0.9.md"),
    *("docs/howto/agents.md", "docs/howto/explain.md", "docs/reference.md"),
    *("docs/documents.md", "docs/structured.md", "docs/server.md"),
)
"""Pages whose Python blocks run from top to bottom, in one namespace per page. Blocks that talk to
a server get one; those whose client is not installed here are left to `make test-frameworks`."""
SERVER = "http://127.0.0.1:8000"

LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED_FILE = re.compile(r"(?<![\w/.-])(?:benchmarks|scripts|examples|tests)/[\w/.-]+\.\w+")


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def spare() -> dict[str, list[LoadedModel]]:
    """Models that no engine has any more, by how they were loaded. To load one takes seconds."""
    return defaultdict(list)


@pytest.fixture
def clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: dict[str, list[LoadedModel]]
) -> Iterator[None]:
    """Works in a folder that looks like a clone to the examples; they may leave files in it. What
    one page calibrates, no other page uses."""
    shutil.copy(ROOT / "LICENSE", tmp_path)
    monkeypatch.chdir(tmp_path)
    use_home(monkeypatch, tmp_path / "home", models=True)
    load, taken = loading.load, []

    def load_or_take(name: str, **options: Any) -> LoadedModel:
        kind = f"{name} {options}"
        taken.append((kind, spare[kind].pop() if spare[kind] else load(name, **options)))
        return taken[-1][1]

    monkeypatch.setattr(loading, "load", load_or_take)
    yield
    for kind, model in taken:
        spare[kind].append(model)


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("page", RUNNABLE)
def test_the_code_runs_and_prints_what_the_page_shows(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / page).read_text()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with ExitStack() as stack:
        url = None
        for example in examples(text):
            code = "\n" * example.line + example.code  # a traceback then names the page's own line
            if SERVER in code:
                if not can_import(code):
                    continue
                if url is None:
                    engine = stack.enter_context(KVBoost.from_pretrained("smollm2-135m"))
                    url = stack.enter_context(live_server(engine)).url
                code = code.replace(SERVER, url)
            capsys.readouterr()
            exec(compile(code, str(ROOT / page), "exec", dont_inherit=True), namespace)
            printed = capsys.readouterr().out
            if example.output is not None:
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                matches = doctest.OutputChecker().check_output(example.output, printed, flags)
                assert matches, f"{page}:{example.line} printed\n{printed}"
    if (engine := namespace.get("engine")) is not None:
        engine.close()


def can_import(code: str) -> bool:
    packages = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    return all(importlib.util.find_spec(name) for name in packages)


@every_page
def test_every_command_parses(page: Path) -> None:
    for command in commands(page.read_text()):
        assert complaint(command) is None, shlex.join(command)


@every_page
def test_every_call_is_one_that_kvboost_has(page: Path) -> None:
    text = page.read_text()
    for example in examples(text):
        found = list(mistakes(example.code))
        assert found == [], f"{name_of(page)}:{example.line}"
    if page.name != "coming-from-0.9.md":  # it names what is gone
        assert list(inline_mistakes(text)) == []
    assert unknown_extras(text) == set()


@every_page
def test_json_and_configuration_files_are_valid(page: Path) -> None:
    for fence in FENCE.finditer(page.read_text()):
        if fence[1] == "json":
            json.loads(fence[2])
        elif fence[1] == "toml":
            for option in tomllib.loads(fence[2]):
                assert complaint(("kvboost", "serve", f"--{option}")) is None, option


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if fragment:
            assert fragment in anchors(target), f"{name_of(page)} links to {link}"


@every_page
def test_every_quoted_file_exists(page: Path) -> None:
    for path in QUOTED_FILE.findall(page.read_text()):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


def test_the_home_page_begins_as_the_readme() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    config = {"docs_dir": ROOT / "docs", "repo_url": ""}
    home = load_script("docs_hooks").on_page_markdown(text, page, config, None)
    readme = (ROOT / "README.md").read_text()
    assert next(examples(home)).code == next(examples(readme)).code
    assert "](docs/" not in home and "](reuse.md#healing)" in home
    assert not text.startswith("---"), "its settings could hide the site's navigation"


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "kvboost"
    for package in sorted(source.rglob("__init__.py")):
        name = package.parent.relative_to(source).name
        assert not name or f"{name}/" in text, f"src/kvboost/{package.parent.relative_to(source)}"


def test_the_architecture_names_modules_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.(?:py|c|h))`", (ROOT / "docs" / "architecture.md").read_text())
    source = ROOT / "src" / "kvboost"
    assert len(named) > 50
    files = {f"/{path.relative_to(ROOT)}" for path in source.rglob("*") if path.is_file()}
    known = (*files, *(f"/{name}" for name in named if (ROOT / name).exists()))
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in known)]
    assert missing == []


def test_the_checks_find_what_they_look_for() -> None:
    text = "\n".join(
        [
            "See `kvboost bench ttft",
            "--peers` and",
            "```bash",
            "kvboost quality --limit 3 \\",
            "  --ratio 0.1 &",
            "OMP_NUM_THREADS=1 python -m benchmarks gpu --quick",
            "python scripts/fetch_models.py NAME",
            "make bench WORKERS=2",
            "$ kvboost generate - --cache-dir ./kv < report.txt   # a comment",
            "```",
            "```python",
            "print(1)",
            "```",
            "",
            "```text",
            "1",
            "```",
        ]
    )
    assert list(commands(text)) == [
        ("kvboost", "bench", "ttft", "--peers"),
        ("kvboost", "quality", "--limit", "3", "--ratio", "0.1"),
        ("benchmarks", "gpu", "--quick"),
        ("scripts/fetch_models.py", "NAME"),
        ("make", "bench", "WORKERS=2"),
        ("kvboost", "generate", "-", "--cache-dir", "./kv"),
    ]
    assert list(examples(text)) == [Example("print(1)\n", 11, "1\n")]


@pytest.mark.parametrize(
    "command",
    [
        "kvboost quality --no-such-option",
        "kvboost bench no-such-benchmark",
        "kvboost bench gpu",
        "benchmarks gpu --no-such-option",
        "benchmarks overload --no-such-option",
        "scripts/fetch_models.py --no-such-option",
        "scripts/list_models.py --no-such-option",
        "examples/run.py --no-such-option",
        "make no-such-target",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert complaint(tuple(command.split())) is not None


def test_a_call_that_does_not_exist_is_found() -> None:
    code = """
from kvboost import KVBoost, Nothing
engine = KVBoost.from_pretrained("m", max_cache_bites=1)
result = engine.generate("a", max_new_tokens=1, mode="baseline", keep=False, how=2)
engine.warn("a")
print(result.text, result.output_text)
"""
    assert sorted(mistakes(code)) == [
        "KVBoost.from_pretrained takes no max_cache_bites",
        "engine has no warn",
        "engine.generate takes no how",
        "kvboost has no Nothing",
        "result has no text",
    ]
    assert list(inline_mistakes("`engine.pin(text, until=1)` and `engine.lost`")) == [
        "engine.pin takes no until",
        "engine has no lost",
    ]
    assert unknown_extras("pip install 'kvboost[serve,gold]'") == {"gold"}
