"""The options of the connector, and what one request may choose."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvboost.config import EngineConfig, one_of, whole
from kvboost.errors import ConfigError

MODES = ("repaired", "exact", "off")
"""The modes: a request reuses moved text too, only its beginning, or nothing."""
STRATEGIES = ("auto", "query")
"""All but ``cacheblend``, for which forwards in vLLM have no hook."""
COMMANDS = ("stats", "forget")
CHUNK_SIZE = 512
"""Tokens in a chunk, unless an option says otherwise: as many as in our own engine on a GPU. Every
chunk costs the scheduler's and the worker's Python some time, for which a GPU waits."""
EVERYTHING = "everything"
MOST_TEXTS = 256
MOST_TOKENS = 1 << 20
"""Tokens of all texts that one command may forget. The scheduler looks at each of them."""
MOST_BOUNDARIES = 4096
_ENGINE_OPTIONS = (
    "chunk_size",
    "max_cache_bytes",
    "gpu_cache_bytes",
    "disk_cache_dir",
    "disk_cache_bytes",
    "remote_cache_url",
    "remote_cache_bytes",
    "cache_secret",
    "recompute_strategy",
    "recompute_ratio",
    "reuse_moved",
)


@dataclass(frozen=True)
class Options:
    """``kv_connector_extra_config``: options of :class:`kvboost.config.EngineConfig` that concern
    the cache and the repair, and those of the connector itself."""

    engine: EngineConfig
    mode: str = "repaired"
    """The mode of requests that do not name one: ``"repaired"``, ``"exact"`` or ``"off"``."""
    slice_rows: int = 2048
    """While others run or are loaded, at most so many rows are repaired between steps of vLLM."""
    self_check: bool = True
    """Whether moved reuse is compared with a plain forward at the start, and turned off if they
    differ."""
    commands: bool = True
    """Whether requests may ask for statistics and forget what was read under their own salt."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Options:
        own = {one.name for one in fields(cls)} - {"engine"}
        if unknown := sorted(set(extra) - own - set(_ENGINE_OPTIONS)):
            known = ", ".join(sorted({*own, *_ENGINE_OPTIONS}))
            raise ConfigError(
                f"kv_connector_extra_config has unknown options: {', '.join(unknown)}. Known are: "
                f"{known}"
            )
        engine: dict[str, Any] = {"gpu_cache_bytes": 0, "chunk_size": CHUNK_SIZE}
        engine |= {name: extra[name] for name in _ENGINE_OPTIONS if name in extra}
        options = cls(EngineConfig(**engine), **{name: extra[name] for name in own & set(extra)})
        one_of(options.mode, MODES, "mode")
        one_of(options.engine.recompute_strategy, STRATEGIES, "recompute_strategy")
        whole(options.slice_rows, 16, "slice_rows")
        for name in ("self_check", "commands"):
            if not isinstance(value := getattr(options, name), bool):
                raise ConfigError(f"{name}={value!r} must be true or false")
        return options

    def engine_of(self, rank: int, num_ranks: int) -> EngineConfig:
        """The options for one of several workers: each keeps its heads in a folder of its own."""
        if num_ranks == 1 or self.engine.disk_cache_dir is None:
            return self.engine
        folder = Path(self.engine.disk_cache_dir) / f"rank-{rank}-of-{num_ranks}"
        return replace(self.engine, disk_cache_dir=folder)


@dataclass(frozen=True)
class Command:
    """A command to the cache instead of a prompt: ``{"stats": true}``,
    ``{"forget": [[1, 2, 3], ...]}`` with the tokens of texts, or ``{"forget": "everything"}``."""

    name: str
    texts: tuple[tuple[int, ...], ...] | None = None
    """The texts to forget, as token ids; None is everything."""

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Command:
        if len(said) > 1:
            raise ConfigError(
                f"{reprlib.repr(list(said))} cannot be asked in one request; a command is asked "
                "alone"
            )
        ((name, given),) = said.items()
        if name == "stats":
            if given is not True:
                raise ConfigError(f"stats={reprlib.repr(given)} must be true")
            return cls(name)
        if given == EVERYTHING:
            return cls(name)
        is_list = isinstance(given, list) and 0 < len(given) <= MOST_TEXTS
        if not is_list or _num_items(given) > MOST_TOKENS or not all(map(_are_numbers, given)):
            raise ConfigError(
                f"forget={reprlib.repr(given)} must be {EVERYTHING!r}, or a list of texts, each a "
                f"list of token ids; {MOST_TEXTS} texts and {MOST_TOKENS:,} tokens at most"
            )
        texts = tuple(tuple(ids) for ids in given)
        if not all(texts):
            raise ConfigError(f"forget={reprlib.repr(given)} has a text without tokens")
        return cls(name, texts)


@dataclass(frozen=True)
class RequestOptions:
    """The options of a request in ``kv_transfer_params["kvboost"]``: a mode, or a dict with
    ``mode``, ``ratio`` and ``boundaries``; or, instead of them, a command."""

    mode: str
    ratio: float
    boundaries: tuple[int, ...] = field(default=())
    command: Command | None = None

    @classmethod
    def of_request(cls, extra_args: object, defaults: Options) -> RequestOptions:
        """The options in the extra arguments of a request, whatever its client has sent. Raises
        ``ConfigError`` and nothing else: any other exception would stop vLLM for everybody."""
        try:
            extra: Any = extra_args or {}
            transfer = extra.get("kv_transfer_params") or {}
            return cls.parse(transfer.get("kvboost", extra.get("kvboost")), defaults)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{reprlib.repr(extra_args)} cannot be read ({type(error).__name__}); "
                "kv_transfer_params is an object"
            ) from None

    @classmethod
    def parse(cls, given: object, defaults: Options) -> RequestOptions:
        """Raises ``ConfigError`` if ``given`` is not as described."""
        if given is None:
            return cls(defaults.mode, defaults.engine.recompute_ratio)
        said: Mapping[str, Any] = {"mode": given} if isinstance(given, str) else given or {}  # type: ignore[assignment]
        if isinstance(said, Mapping) and set(said) & set(COMMANDS):
            if not defaults.commands:
                asked = reprlib.repr(list(said))
                raise ConfigError(f"commands are off here, so {asked} cannot be asked")
            return cls("off", 0.0, command=Command.parse(said))
        if not isinstance(said, Mapping) or set(said) - {"mode", "ratio", "boundaries"}:
            raise ConfigError(
                f"kvboost={reprlib.repr(given)} must be one of {', '.join(MODES)}, or an object "
                "with mode, ratio and boundaries, or a command"
            )
        mode = said.get("mode", defaults.mode)
        if mode not in MODES:
            listing = ", ".join(map(repr, MODES))
            raise ConfigError(
                f"mode={reprlib.repr(mode)} is not available; choose one of {listing}"
            )
        ratio = said.get("ratio", defaults.engine.recompute_ratio)
        if type(ratio) not in (int, float) or not 0 <= ratio <= 1:
            raise ConfigError(f"ratio={reprlib.repr(ratio)} must be a number between 0 and 1")
        boundaries = said.get("boundaries", ())
        if _num_items([boundaries]) > MOST_BOUNDARIES or not _are_numbers(boundaries):
            raise ConfigError(
                f"boundaries={reprlib.repr(boundaries)} must be a list of token positions, "
                f"{MOST_BOUNDARIES:,} at most"
            )
        return cls(mode, float(ratio), tuple(boundaries))


def _num_items(lists: Sequence[object]) -> int:
    """The number of items of these lists together."""
    return sum(len(one) for one in lists if isinstance(one, Sequence))


def _are_numbers(given: object) -> bool:
    """Whether it is a list of whole numbers from 0 on, none of them too large for a token."""
    return isinstance(given, Sequence) and all(
        type(one) is int and 0 <= one < 2**31 for one in given
    )
