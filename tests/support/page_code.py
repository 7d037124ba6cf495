"""What a page of the documentation quotes: commands, Python code, and what is wrong with them.

Nothing runs here; ``test_page_commands`` runs the commands. Commands of ours are given to the
parsers of the programs that they name; calls of KVBoost in Python code are compared with its
signatures.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner

import kvboost
from benchmarks.__main__ import app as benchmarks
from kvboost.cli import app
from kvboost.results import GenerationResult
from support.load_script import load_example, load_script

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "research").glob("*.md")),
    ROOT / "examples" / "README.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)*)`")
COMMAND = re.compile(
    r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*"  # a prompt, and variables that are set for one command
    r"(?:python -m (?=benchmarks)|python (?=\w+/)|(?=kvboost|make))"
    r"((?:kvboost|make|benchmarks|(?:scripts|examples)/\w+\.py)(?:\s.*|$))"
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Example:
    """A Python block, and the output that the page shows right after it, if any."""

    code: str
    line: int
    output: str | None


def examples(text: str) -> Iterator[Example]:
    fences = list(FENCE.finditer(text))
    for fence, following in zip_longest(fences, fences[1:]):
        if fence[1] != "python":
            continue
        output = None
        if following is not None and following[1] == "text":
            between = text[fence.end() : following.start()]
            output = following[2] if not between.strip() else None
        yield Example(fence[2], text.count("\n", 0, fence.start()) + 1, output)


def inline_code(text: str) -> list[str]:
    """The code between backticks, also where a line ends in it."""
    return [code[1].replace("\n", " ") for code in INLINE_CODE.finditer(FENCE.sub("", text))]


@dataclass
class Shown:
    """A command as a page shows it, and the lines that the page shows as its output."""

    command: str
    output: list[str] = field(default_factory=list)


def shown_commands(text: str) -> Iterator[Shown]:
    """Every command of a page's blocks for a shell, whatever its program, and every command of ours
    in its prose."""
    for code in inline_code(text):
        if COMMAND.match(command := " ".join(code.split())):  # a line may end in it
            yield Shown(command)
    for fence in FENCE.finditer(text):
        if fence[1] in ("bash", "console", "sh"):
            yield from _typed(fence[2])


def _typed(block: str) -> Iterator[Shown]:
    """The commands of a block. Where lines begin with a prompt, the others are output. A quotation
    may go on in the next line."""
    prompted = block.startswith("$ ")
    shown, open_quotation = None, ""
    for line in block.replace("\\\n", " ").splitlines():
        typed = open_quotation or line.startswith("$ ") or not prompted
        if not typed:
            shown.output.append(line)
            continue
        command = f"{open_quotation}\n{line}" if open_quotation else line.removeprefix("$ ")
        command = re.sub(r"(^|\s+)# .*$", "", command)
        open_quotation = command if _is_open(command) else ""
        if command and not open_quotation:
            if shown is not None:
                yield shown
            shown = Shown(command)
    assert not open_quotation, open_quotation
    if shown is not None:
        yield shown


def _is_open(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """Every command of ours that a page quotes, as words; the first one is the program."""
    for shown in shown_commands(text):
        command = COMMAND.match(shown.command)
        if command is not None:
            words = shlex.split(re.split(r"\s[#&|<>;)]", f"{command[1]} ")[0])
            yield tuple(word for word in words if word not in ("...", "…"))


@functools.cache
def complaint(command: tuple[str, ...]) -> str | None:
    """What the program says against its arguments; None if they parse."""
    program, *arguments = command
    if arguments and re.match("--[a-z]", arguments[-1]):
        arguments.append("1")  # prose may name an option without its value
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = {word for word in arguments if "=" not in word} - {*targets}
        return f"no target {unknown}" if unknown else None
    if program in ("kvboost", "benchmarks"):
        return _refusal_of_app(app if program == "kvboost" else benchmarks, arguments)
    folder, _, name = program.partition("/")
    load = load_script if folder == "scripts" else load_example
    return _refusal_of(getattr(load(name.removesuffix(".py")), "main", None), arguments)


def _refusal_of_app(program: typer.Typer, arguments: list[str]) -> str | None:
    """``--help`` runs nothing, once every command and option before it has been recognised."""
    shown = CliRunner().invoke(program, [*arguments, "--help"])
    return shown.output if shown.exit_code else None


def _refusal_of(main: Any, arguments: list[str]) -> str | None:
    """Why ``main`` of a script refuses its arguments. It ends once it has parsed them; one without
    a parser would run, so without arguments nothing is asked."""
    if not arguments:
        return None
    if main is None:
        return "it takes no arguments"
    takes = inspect.signature(main).parameters
    if takes and "arguments" not in takes:
        script = typer.Typer()
        script.command()(main)
        return _refusal_of_app(script, arguments)

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def only_parse(*given: Any) -> None:
        parse(*given)
        raise Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", only_parse),
        mock.patch.object(sys, "argv", ["script", *arguments]),
    ):
        try:
            main()
        except Parsed:
            return None
        except SystemExit as ended:
            return f"it ends with {ended}"
    return "it takes no arguments"


@functools.cache
def extras() -> set[str]:
    """The extras that the package has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {*project["optional-dependencies"]}


def unknown_extras(text: str) -> set[str]:
    named = re.findall(r"(?:kvboost|\.)\[([\w,]+)\]", text)
    return {extra for names in named for extra in names.split(",")} - extras()


def mistakes(code: str) -> Iterator[str]:
    """What the code asks of KVBoost and KVBoost does not have: names, attributes of an engine or a
    result, and keyword arguments."""
    tree = ast.parse(code)
    known: dict[str, Any] = {
        "KVBoost": kvboost.KVBoost,
        "engine": kvboost.KVBoost,
        "result": GenerationResult,
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvboost"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    yield f"{node.module} has no {alias.name}"
                known[alias.asname or alias.name] = getattr(module, alias.name, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = known.get(node.value.id)
            if owner is not None and not _has(owner, node.attr):
                yield f"{node.value.id} has no {node.attr}"
        elif isinstance(node, ast.Call):
            accepted = _accepted(_resolve(node.func, known))
            for keyword in node.keywords:
                if accepted is not None and keyword.arg and keyword.arg not in accepted:
                    yield f"{ast.unparse(node.func)} takes no {keyword.arg}"


def inline_mistakes(text: str) -> Iterator[str]:
    """:func:`mistakes` of the calls and attributes that prose quotes."""
    for code in inline_code(text):
        if re.match(r"(?:engine|result|KVBoost)\.(?!py\b)\w", code):
            try:
                ast.parse(code)
            except SyntaxError:
                code = re.match(r"[\w.]+\w", code)[0]  # type: ignore[index]
            yield from mistakes(code)


def _has(owner: Any, name: str) -> bool:
    fields = getattr(owner, "__dataclass_fields__", {})
    return hasattr(owner, name) or name in fields or name in getattr(owner, "__annotations__", {})


def _resolve(function: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(function, ast.Name):
        return known.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return getattr(known.get(function.value.id), function.attr, None)
    return None


def _accepted(function: Any) -> set[str] | None:
    """The keyword arguments of ``function``; None if it is not known or takes any."""
    if not callable(function) or function.__module__.partition(".")[0] != "kvboost":
        return None
    names: set[str] = set()
    for parameter in inspect.signature(function).parameters.values():
        options = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if options:
            names |= {*_typed_dict(function, options[1]).__annotations__}
        elif parameter.kind is parameter.VAR_KEYWORD:
            return None
        else:
            names.add(parameter.name)
    return names


def _typed_dict(function: Any, name: str) -> Any:
    for module in (sys.modules[function.__module__], kvboost.config, kvboost.runtime.options):
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(name)
