"""The options that several commands take, and how commands print."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from kvboost.config import (
    EXACTNESS,
    EngineConfig,
    GenerationMode,
    choose,
    chosen_cache_dir,
    most_drafted,
    one_of,
    whole,
)
from kvboost.errors import ConfigError, KVBoostError
from kvboost.results import GenerationResult


def told(help: str, *flags: str, **more: Any) -> Any:
    """An option of a command, with its help."""
    return typer.Option(*flags, help=help, **more)


Model = Annotated[
    str,
    told(
        "A model's name, a folder, a .gguf file or a hub id; see kvboost models.", "--model", "-m"
    ),
]
Device = Annotated[str | None, told("cpu, cuda or mps; by default the best one there is.")]
Dtype = Annotated[
    str | None, told("float32, bfloat16 or float16; by default what suits the device.")
]
Weights = Annotated[
    str,
    told(
        "Weights of a quantised model: packed (kept in 4 and 8 bits), plain (expanded) or "
        "auto (packed where that is fast)."
    ),
]
Mode = Annotated[
    str, told("baseline (no reuse), prefix_cache (exact reuse only) or chunk_kv_reuse (all reuse).")
]
Exactness = Annotated[
    str, told("repaired (moved text answers as it is) or verified (it is read again, exactly).")
]
Speculate = Annotated[
    str,
    told(
        "auto (draft tokens from the text that was read where that is faster), off, or the "
        "most tokens of a draft."
    ),
]
DraftModel = Annotated[
    str | None, told("A smaller model with the same vocabulary that drafts tokens too.")
]
DeviceMemory = Annotated[
    str | None,
    told("What to take of the GPU's memory, such as 8GiB: layers that do not fit are streamed."),
]
HostMemory = Annotated[
    str | None, told("Memory for streamed layers; others are read from disk in every step.")
]
AsJson = Annotated[bool, told("Print JSON, for scripts.", "--json")]
Temperature = Annotated[
    float, told("0 always takes the likeliest token; more makes answers vary.", min=0.0)
]
Seed = Annotated[int | None, told("Gives the same random choices every time.")]
MaxNewTokens = Annotated[int, told("The longest answer, in tokens.")]

CacheDir = Annotated[
    Path | None,
    told(
        "Keep the cache in this folder for the next run; by default the folder that "
        "KVBOOST_CACHE_DIR names, if any."
    ),
]
KVBits = Annotated[
    int, told("Precision of the cache: 16 bits, or 8 or 4 to save space.", "--kv-bits")
]


def option(help: str, default: Any = None, flag: str | None = None, **more: Any) -> Any:
    """A field of a dataclass of options. ``flag`` is its name on the command line if it has another
    one; ``more`` is for ``typer.Option``."""
    return field(default=default, metadata={"option": (flag, {"help": help, **more})})


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option for each field of a parameter that is a dataclass."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[tuple[str, Any, Any]] = []
    for one in inspect.signature(command).parameters.values():
        if one.name in groups:
            parameters += _options_of(groups[one.name])
        else:
            parameters.append((one.name, one.default, hints[one.name]))

    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{one.name: given.pop(one.name) for one in fields(kind)})
        command(**given)

    set_signature(run, parameters)
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def set_signature(run: Callable[..., None], parameters: Sequence[tuple[str, Any, Any]]) -> None:
    """Has ``run`` show ``parameters``: the name, default and annotation of each."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    shown = [
        inspect.Parameter(name, by_name, default=default, annotation=kind)
        for name, default, kind in parameters
    ]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {name: kind for name, _, kind in parameters}


def _options_of(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        annotation = hints[one.name]
        if "option" in one.metadata:
            flag, more = one.metadata["option"]
            if annotation is bool:  # without --no-...
                flag = flag or f"--{one.name.replace('_', '-')}"
            annotation = Annotated[annotation, typer.Option(*([flag] if flag else []), **more)]
        yield one.name, one.default, annotation


out = Console()
say = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
"""The console for messages of a server. Only its address goes to standard output, for scripts."""
Host = Annotated[str, told("The address to listen on.")]
AllowHost = Annotated[
    list[str] | None, told("Another host name of this server; may be repeated; * allows any.")
]
_LOCAL = ("localhost", "127.0.0.1", "::1")


def address(host: str, port: int, scheme: str = "http") -> str:
    """Where a server that listens on ``host`` can be reached from this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{port}"


def only_local(more: Sequence[str]) -> tuple[str, ...]:
    """The host names of a server that only this machine can reach: a web page can make a browser
    call 127.0.0.1 under the page's own host name. Empty, which allows all, if ``more`` has *."""
    return () if "*" in more else (*_LOCAL, *more)


RENAMED = {
    "kv_cache_bits": "kv_bits",
    "disk_cache_dir": "cache_dir",
    "remote_cache_url": "remote_cache",
}
"""Options of an engine that have another name on the command line."""
_NAMES = {**RENAMED, "model_name": "model", "endpoint": "kv_events", "image_hosts": "image_host"}
_NAMES["replay_endpoint"] = "kv_events_replay"


def in_flags(message: str) -> str:
    """An error of the library as the command line says it: with ``--max-kv-bytes='x'`` in front."""
    named = re.match(r"[a-z_]+(?==)", message)
    if named is None:
        return message
    name = _NAMES.get(named[0], named[0])
    return f"--{name.replace('_', '-')}{message[named.end() :]}"


@contextmanager
def errors() -> Iterator[None]:
    """Prints our errors as one line and exits with code 2. Bugs keep their traceback."""
    try:
        yield
    except KVBoostError as error:
        typer.secho(f"error: {in_flags(str(error))}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def unwrap_help(app: typer.Typer) -> None:
    """Joins the lines of each paragraph in the help of all commands of ``app``: terminals wrap them
    at their own width. Paragraphs with indented lines stay as they are."""
    for command in app.registered_commands:
        told = inspect.cleandoc(
            command.help or (command.callback and command.callback.__doc__) or ""
        )
        command.help = "\n\n".join(
            paragraph
            if re.search(r"^\s", paragraph, re.MULTILINE)
            else " ".join(paragraph.split("\n"))
            for paragraph in told.split("\n\n")
        )
    for group in app.registered_groups:
        if group.typer_instance is not None:
            unwrap_help(group.typer_instance)


def unreadable(option: str, file: Path, error: Exception, remedy: str) -> ConfigError:
    """The error for a file that ``option`` names: why it cannot be read, and what to do."""
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError(f"{option} {file} cannot be read ({reason}); {remedy}")


def speculation(speculate: str) -> str | int:
    """The option ``--speculate`` as the engine takes it."""
    return int(speculate) if speculate.isdecimal() else speculate


@dataclass(frozen=True)
class Answering:
    """How a request is answered."""

    mode: Mode = "chunk_kv_reuse"
    exactness: Exactness = "repaired"
    speculate: Speculate = str(EngineConfig.speculate)

    def checked(self, max_new_tokens: int) -> dict[str, Any]:
        """The options of the request, apart from its mode. Raises ConfigError for a mistake."""
        choose(GenerationMode, self.mode, "mode")
        one_of(self.exactness, EXACTNESS, "exactness")
        speculate = speculation(self.speculate)
        most_drafted(speculate)
        whole(max_new_tokens, 1, "max_new_tokens")
        return {"exactness": self.exactness, "speculate": speculate}


def read_schema(file: Path) -> dict[str, Any]:
    """The JSON schema in ``file``."""
    try:
        schema = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise unreadable("--schema", file, error, "name a file with a JSON schema") from None
    if not isinstance(schema, dict):
        raise ConfigError(f'--schema {file} must hold an object, such as {{"type": "object"}}')
    return schema


@dataclass(frozen=True)
class Loading:
    """How a model is loaded, and where its cache is."""

    cache_dir: CacheDir = None
    kv_bits: KVBits = EngineConfig.kv_cache_bits
    device: Device = None
    dtype: Dtype = None
    weights: Weights = EngineConfig.weights


def load_engine(model: str, how: Loading, **options: Any) -> Any:
    """Loads an engine and meanwhile says so: importing torch takes seconds, and so do weights."""
    with Console(stderr=True).status(f"loading {model}") as status:
        import kvboost

        if any(info.name == model and not info.installed for info in kvboost.list_models()):
            status.stop()  # the installation shows its own progress
        return kvboost.KVBoost.from_pretrained(
            model,
            device=how.device,
            dtype=how.dtype,
            disk_cache_dir=how.cache_dir or chosen_cache_dir(),
            kv_cache_bits=how.kv_bits,
            weights=how.weights,
            **options,
        )


def summary(result: GenerationResult) -> str:
    """One line about a request: what it reused, also from slower tiers, and how long it took."""
    rows: Counter[str] = Counter()
    for span in result.spans:
        rows[span.tier or ""] += span.num_tokens
    fetched = " and ".join(
        f"{rows[tier]:,} from {tier}" for tier in ("disk", "remote") if rows[tier]
    )
    return (
        f"[{result.prompt_tokens:,} prompt tokens, {result.kv_reuse_ratio:.0%} reused"
        f"{fetched and f' ({fetched})'}; first token after {result.ttft_ms:.0f} ms; "
        f"{len(result.token_ids)} tokens in {result.total_ms / 1e3:.1f} s; {result.finish_reason}]"
    ).replace("[", "\\[", 1)


_SHOWN = (
    *("output_text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens"),
    *("exact_tokens", "approximate_tokens", "moved_tokens", "recomputed_tokens"),
    *("answer_exact_from", "healed_tokens", "drafted_tokens", "accepted_tokens", "kv_reuse_ratio"),
)


def describe(result: GenerationResult) -> dict[str, Any]:
    """A result as a JSON object."""
    return {
        **{name: getattr(result, name) for name in _SHOWN},
        "charged_tokens": result.reuse.charged_tokens,
        "timings": vars(result.timings),
        "spans": [
            {"kind": span.kind.value, "start": span.start, "end": span.end, "tier": span.tier}
            for span in result.spans
        ],
    }


def print_line(line: str, style: str = "", console: Console = out) -> None:
    """Prints ``line`` as it is: terminals wrap it, and nothing in it is markup."""
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
