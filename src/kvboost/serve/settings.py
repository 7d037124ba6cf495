"""The server's settings."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import kvboost
from kvboost.config import (
    MOST_CONTEXTS,
    GenerationMode,
    at_least,
    choose,
    install_extra,
    one_of,
    whole,
)
from kvboost.errors import ConfigError

METRICS = ("open", "key", "off")
_LEAST = {"max_body_bytes": 1024, "max_header_bytes": 1024}
RELOADABLE = ("served_names", "mode", "keys", "timeout", "log_prompts", "image_hosts")
"""Settings that a running server can change. All others need a restart."""


@dataclass(frozen=True)
class ApiKey:
    """A key that gives access to the server, and the name of its tenant."""

    name: str
    secret: str
    is_admin: bool = False

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r}, is_admin={self.is_admin})"


def parse_keys(lines: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """Reads keys from lines of ``key``, ``name:key`` or ``admin:name:key``. A line that begins with
    ``#`` is a comment.

    A key without a name is named after its place: ``key-1`` and so on. No name and no key may occur
    twice.
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
            said = f"the key of {name!r} in {source} must be printable ASCII without blanks"
            raise ConfigError(said)
        keys.append(ApiKey(name, secret, is_admin))
    for what in ("name", "secret"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ConfigError(f"a {'key' if what == 'secret' else what} occurs twice in {source}")
    return tuple(keys)


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one server. Validated on creation."""

    served_names: tuple[str, ...] = ()
    """Names that requests may use for the model. Default: its own name."""
    mode: str = GenerationMode.CHUNK_KV_REUSE.value
    """How much of the cache a request uses unless it says otherwise."""
    keys: tuple[ApiKey, ...] = ()
    """Keys that give access. Without any, no key is needed."""
    shared_cache: bool = False
    """Whether keys share cached text. By default each key has its own salt."""
    timeout: float | None = 600.0
    """Seconds after which an unfinished request is cancelled."""
    strict_fields: bool = False
    """Whether a request with a field that this server does not know is refused. By default the
    field is left out, and the answer says so."""
    default_max_tokens: int = 1024
    """The longest chat answer unless a request says otherwise, if it fits the context."""
    max_body_bytes: int = 8 * 1024**2
    max_header_bytes: int = 32 * 1024
    max_requests: int = 512
    """Requests of tenants that may be open at once."""
    max_anonymous_requests: int = 64
    """Requests to open paths (the page, metrics) that may be open at once. ``/health`` and
    ``/ready`` do not count."""
    max_connections: int = 768
    """Connections that may be open at once. 1,024 open files are a usual limit."""
    head_seconds: float = 10.0
    """Seconds from a new connection to the complete head of its request; 0 sets no limit."""
    body_seconds: float = 30.0
    """Seconds from the head of a request to the end of its body; 0 sets no limit."""
    write_seconds: float = 60.0
    """Seconds for which a client may take no data before it is disconnected; 0 sets no limit."""
    warm: tuple[tuple[str, str], ...] = ()
    """Documents that the server reads when it starts: the name and the text of each."""
    pin: bool = False
    """Whether these documents are pinned."""
    warm_for: tuple[str, ...] = ()
    """The names of the keys that they are read for."""
    warm_contexts: int = MOST_CONTEXTS
    """In how many contexts they are read if there are several: after the first, in idle time."""
    max_documents: int = 1024
    """Documents that are kept for one tenant."""
    max_document_bytes: int = 64 * 1024**2
    """Text of the documents that are kept for one tenant."""
    embedding_model: kvboost.EmbeddingModel | None = None
    """The model for embeddings. Default: the model that answers requests."""
    image_hosts: tuple[str, ...] = ()
    """Hosts from which images of prompts may be fetched, such as ``images.example.com``,
    ``*.example.com`` or ``10.0.0.5:9000``. Empty: images are data URLs only."""
    image_seconds: float = 20.0
    """Seconds in which all images of a request that are fetched must arrive; 0 sets no limit."""
    session_seconds: float = 600.0
    """Seconds for which a session's KV is pinned after a turn, unless a request says otherwise."""
    retention_seconds: float = 24 * 3600.0
    """The most seconds for which ``prompt_cache_retention`` keeps a conversation; 0: not at all."""
    max_sessions: int = 256
    """Sessions that one tenant may have."""
    stored_response_seconds: float = 3600.0
    """Seconds for which responses of ``/v1/responses`` are kept, and can be continued."""
    max_stored_responses: int = 1024
    """Responses that are kept for one tenant."""
    max_stored_bytes: int = 64 * 1024**2
    """Memory that these responses and their conversations take, about."""
    drain_seconds: float = 30.0
    """Seconds for running answers to finish when the server stops."""
    metrics: str = "open"
    """Who may read ``/metrics``: ``"open"`` anyone, ``"key"`` administrators, ``"off"`` no one."""
    log_prompts: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Host names that the server answers to (the ``Host`` header). Empty: any."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser, such as
    ``https://app.example``; ``*`` means any page."""
    tls_cert: Path | None = None
    """A PEM file with the server's certificate and those of its issuers. Default: no TLS."""
    tls_key: Path | None = None
    """The certificate's private key, unless it is in ``tls_cert`` too."""
    otlp_endpoint: str | None = None
    """Where traces are sent: the address of an OpenTelemetry collector (OTLP over HTTP)."""

    def __post_init__(self) -> None:
        choose(GenerationMode, self.mode, "mode")
        if not all(isinstance(name, str) and name for name in self.served_names):
            said = f"served_names={self.served_names!r} must be names, none of them empty"
            raise ConfigError(said)
        one_of(self.metrics, METRICS, "metrics")
        if self.metrics == "key" and not self.keys:
            raise ConfigError(
                "metrics='key' needs API keys, but there are none; set some, or use 'open' or 'off'"
            )
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "int":
                whole(value, _LEAST.get(one.name, 1), one.name)
            elif one.type in ("float", "float | None") and value is not None:
                at_least(value, 0.0, one.name)
        self._check_warm()
        for origin in self.cors_origins:
            check_origin(origin)
        if self.image_hosts:
            check_image_hosts(self.image_hosts)
        check_certificate(self.tls_cert, self.tls_key)
        if self.otlp_endpoint is not None:
            check_collector(self.otlp_endpoint)

    def _check_warm(self) -> None:
        names = [key.name for key in self.keys]
        if unknown := [name for name in self.warm_for if name not in names]:
            there_are = f"the keys are {', '.join(names)}" if names else "the server has no keys"
            raise ConfigError(f"warm_for={unknown[0]!r} is not the name of a key; {there_are}")
        if self.warm and self.keys and not self.shared_cache and not self.warm_for:
            raise ConfigError(
                "each key has its own cache, so say for which the documents are read: warm_for "
                f"({', '.join(names)}), or let all keys share one cache"
            )
        if self.pin and not self.warm:
            raise ConfigError("pin goes with documents to warm, and there are none")

    @property
    def needs_key(self) -> bool:
        return bool(self.keys)

    @property
    def private_paths(self) -> tuple[str, ...]:
        """The beginnings of paths that need a key, if there are keys."""
        return ("/v1/", "/api/", "/tokenize", "/detokenize", *self.admin_paths)

    @property
    def admin_paths(self) -> tuple[str, ...]:
        """The beginnings of paths that need an administrator's key, if there are keys."""
        always = ("/kvboost/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
        return (*always, "/metrics") if self.metrics == "key" else always


TENANT_PATHS = (*("/kvboost/documents", "/kvboost/files", "/kvboost/sessions"), "/kvboost/explain")
"""The beginnings of paths below ``/kvboost/`` that every key may use: they show its own data."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_origin(origin: str) -> None:
    """Raises ConfigError unless ``origin`` is what browsers send as ``Origin``, or ``*``."""
    parts = urlsplit(origin)
    if origin != "*" and (
        parts.scheme not in ("http", "https")
        or not parts.netloc
        or origin != f"{parts.scheme}://{parts.netloc}"
    ):
        raise ConfigError(
            f"the origin {origin!r} must be a scheme and a host without a path, such as "
            "https://app.example, or * for every page"
        )


def check_image_hosts(hosts: Iterable[str]) -> None:
    """Raises ConfigError unless images can be fetched from ``hosts``."""
    from kvboost.serve.images.addresses import ImageHosts, trusted_authorities

    ImageHosts(hosts)
    trusted_authorities()


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raises ConfigError unless both are missing or the key belongs to the certificate."""
    if cert is None:
        if key is not None:
            said = f"the TLS key {key} needs its certificate; give both, tls_cert and tls_key"
            raise ConfigError(said)
        return
    for file in (cert, key):
        if file is not None and not file.is_file():  # a pipe would stop a server that reloads
            raise ConfigError(f"the TLS file {file} is not a regular file, or is not there")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = str(cert) if key is None else f"{cert} with the key {key}"
        raise ConfigError(f"the TLS certificate {files} cannot be used: {error}") from None


def _no_password() -> str:
    raise ValueError("the key has a password; give one without")


def check_collector(endpoint: str) -> None:
    """Raises ConfigError unless ``endpoint`` is an address and traces' packages are there."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_endpoint={endpoint!r} must be the address of an OpenTelemetry collector, such "
            "as http://127.0.0.1:4318"
        )
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_there(module):
            raise ConfigError(f"traces need {module}; {install_extra('otel')}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
