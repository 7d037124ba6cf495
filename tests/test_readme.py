"""The documentation is true: its code runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import doctest
import functools
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from benchmarks.entries import SCRIPTS
from kvboost.cli import app
from support.homes import use_home

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "research").glob("*.md")),
    ROOT / "examples" / "README.md",
]
RUNNABLE = (
    *("README.md", "docs/tutorial.md", "docs/coming-from-0.9.md"),
    *("docs/howto/agents.md", "docs/howto/explain.md", "docs/reference.md"),
)
"""Pages whose Python blocks run from top to bottom, in one namespace per page; without the blocks
that talk to a server, which `make test-frameworks` runs."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED_FILE = re.compile(r"(?<![\w/.-])(?:benchmarks|scripts|examples|tests)/[\w/.-]+\.\w+")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@dataclass(frozen=True)
class Example:
    """A Python block, and the output that the page shows right after it, if any."""

    code: str
    line: int
    output: str | None


def examples(text: str) -> Iterator[Example]:
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        output = None
        if following is not None and following[1] == "text":
            between = text[fence.end() : following.start()]
            output = following[2] if not between.strip() else None
        yield Example(fence[2], text.count("\n", 0, fence.start()) + 1, output)


@functools.cache
def complaint(arguments: tuple[str, ...]) -> str | None:
    """What the command line says against ``arguments``; None if they parse. Runs nothing:
    ``--help`` comes first, once every command and option has been recognised."""
    commands = app
    if arguments[:1] == ("benchmarks",):
        if set(arguments[1:2]) & SCRIPTS.keys():
            return None  # a test of its own asks for its help
        commands, arguments = benchmarks, arguments[1:]
    with patch("typer.rich_utils.rich_format_help"):  # nobody reads it
        shown = CliRunner().invoke(commands, [*arguments, "--help"])
    return shown.output if shown.exit_code else None


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """The arguments of every ``kvboost ...`` that a page quotes, and of every
    ``python -m benchmarks ...``, which begin with "benchmarks"."""
    quoted = [code[1] for code in INLINE_CODE.finditer(FENCE.sub("", text))]
    for fence in FENCE.finditer(text):
        if fence[1] != "python":
            quoted += fence[2].replace("\\\n", " ").splitlines()
    for line in quoted:
        command = re.match(r"\s*(?:\$ )?(?:kvboost\s+|python -m (?=benchmarks\s))(.*)", line)
        if command is not None:
            words = shlex.split(re.split(r"\s[#&|<>;]", f"{command[1]} ")[0])
            yield tuple(word for word in words if word not in ("...", "…"))


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a folder that looks like a clone to the examples; they may leave files in it. What
    one page calibrates, no other page uses."""
    shutil.copy(ROOT / "LICENSE", tmp_path)
    monkeypatch.chdir(tmp_path)
    use_home(monkeypatch, tmp_path / "home", models=True)


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("page", RUNNABLE)
def test_the_code_runs_and_prints_what_the_page_shows(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / page).read_text()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for example in examples(text):
        if "http://" in example.code:
            continue
        capsys.readouterr()
        padding = "\n" * example.line  # a traceback then names the page's own line
        exec(compile(padding + example.code, str(ROOT / page), "exec"), namespace)
        printed = capsys.readouterr().out
        if example.output is not None:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            matches = doctest.OutputChecker().check_output(example.output, printed, flags)
            assert matches, f"{page}:{example.line} printed\n{printed}"
    if (engine := namespace.get("engine")) is not None:
        engine.close()


@every_page
def test_every_command_parses(page: Path) -> None:
    for arguments in commands(page.read_text()):
        assert complaint(arguments) is None, f"kvboost {shlex.join(arguments)}"


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


def test_the_home_page_shows_the_code_and_the_figures_of_the_readme() -> None:
    readme, home = ((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
    assert next(examples(home)).code == next(examples(readme)).code
    figures = re.findall(r"\| [*]{0,2}([\d,]+)[*]{0,2} (?=\|)", home)
    assert len(figures) == 9
    assert [figure for figure in figures if not re.search(rf"\b{figure}\b", readme)] == []


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "kvboost"
    for package in sorted(source.rglob("__init__.py")):
        name = package.parent.relative_to(source).name
        assert not name or f"{name}/" in text, f"src/kvboost/{package.parent.relative_to(source)}"


def test_the_checks_find_what_they_look_for() -> None:
    text = "\n".join(
        [
            "See `kvboost bench ttft --peers` and",
            "```bash",
            "kvboost quality --limit 3 \\",
            "  --ratio 0.1 &",
            "python -m benchmarks gpu --quick",
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
        ("bench", "ttft", "--peers"),
        ("quality", "--limit", "3", "--ratio", "0.1"),
        ("benchmarks", "gpu", "--quick"),
        ("generate", "-", "--cache-dir", "./kv"),
    ]
    assert list(examples(text)) == [Example("print(1)\n", 8, "1\n")]
    assert "--no-such-option" in (complaint(("quality", "--no-such-option")) or "")
    assert "no-such-benchmark" in (complaint(("bench", "no-such-benchmark")) or "")
    assert complaint(("bench", "gpu")) is not None
    assert "no-such-option" in (complaint(("benchmarks", "gpu", "--no-such-option")) or "")
