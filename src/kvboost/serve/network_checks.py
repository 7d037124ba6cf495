"""Mistakes in settings of the network, found before a model is loaded."""

from __future__ import annotations

import ssl
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from kvboost.config import install_extra
from kvboost.errors import ConfigError


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


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raises ConfigError unless both are missing or the key belongs to the certificate."""
    if cert is None:
        if key is not None:
            raise ConfigError(
                f"the TLS key {key} needs its certificate; give both, tls_cert and tls_key"
            )
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
    """Raises ConfigError unless ``endpoint`` is an address and the packages for traces are
    installed."""
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
