"""What an operator may choose about the server."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from kvboost.config import GenerationMode, at_least, choose, whole
from kvboost.errors import ConfigError


@dataclass(frozen=True)
class ApiKey:
    """One key that opens the server, and whose it is."""

    name: str
    secret: str
    is_admin: bool = False

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r}, is_admin={self.is_admin})"


def parse_keys(lines: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """Keys from lines of ``key``, ``name:key`` or ``admin:name:key``; ``#`` begins a comment line.

    A key without a name is called after its place, ``key-1`` and so on. Names and keys occur once.
    """
    keys: list[ApiKey] = []
    for line in (line.strip() for line in lines):
        if not line or line.startswith("#"):
            continue
        *names, secret = line.split(":")
        is_admin = len(names) == 2 and names[0] == "admin"
        name = names[-1] if names else f"key-{len(keys) + 1}"
        if len(names) > (2 if is_admin else 1) or not name or not secret:
            raise ConfigError(
                f"entry {len(keys) + 1} of {source} is not a key; write 'key', 'name:key' or "
                "'admin:name:key'"
            )
        if not secret.isascii() or not secret.isprintable() or " " in secret:
            raise ConfigError(f"the key of {name!r} in {source} must be printable ASCII, no blanks")
        keys.append(ApiKey(name, secret, is_admin))
    for what in ("name", "secret"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ConfigError(f"a {'key' if what == 'secret' else what} stands twice in {source}")
    return tuple(keys)


@dataclass(frozen=True)
class ServerSettings:
    """Validated on creation."""

    served_names: tuple[str, ...] = ()
    """What requests may call the model; by default its own name."""
    mode: str = GenerationMode.CHUNK_KV_REUSE.value
    """How much of the cache a request may use that does not say."""
    keys: tuple[ApiKey, ...] = ()
    """Who may come in; without any everybody may."""
    shared_cache: bool = False
    """Whether keys share what was read. By default each has a salt of its own."""
    timeout: float | None = 600.0
    """Seconds after which a request that is not answered is given up."""
    default_max_tokens: int = 1024
    """The longest chat answer of a request that does not say, if the context holds it."""
    max_body_bytes: int = 8 * 1024**2
    max_header_bytes: int = 32 * 1024
    max_requests: int = 512
    """Requests that may be open at once, of any kind."""
    body_seconds: float = 30.0
    """How long a client may take to send its request."""
    write_seconds: float = 60.0
    """How long a client may take nothing of a stream before it is left alone."""
    drain_seconds: float = 30.0
    """How long running answers may take when the server stops."""
    log_prompts: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Names by which the server may be called (the ``Host`` header); empty allows any."""

    def __post_init__(self) -> None:
        choose(GenerationMode, self.mode, "mode")
        if not all(isinstance(name, str) and name for name in self.served_names):
            raise ConfigError(f"served_names={self.served_names!r} must hold names")
        for option in ("default_max_tokens", "max_requests"):
            whole(getattr(self, option), 1, option)
        whole(self.max_body_bytes, 1024, "max_body_bytes")
        whole(self.max_header_bytes, 1024, "max_header_bytes")
        for option in ("body_seconds", "write_seconds", "drain_seconds"):
            at_least(getattr(self, option), 0.0, option)
        if self.timeout is not None:
            at_least(self.timeout, 0.0, "timeout")

    @property
    def needs_key(self) -> bool:
        return bool(self.keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
