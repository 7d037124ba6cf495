"""A client of routers that keeps its connections, as OpenAI's does; and raw requests."""

from __future__ import annotations

import socket

import httpx

from support.live_server import LiveServer

COMPLETIONS = "/v1/completions"
CLIENT = httpx.Client(timeout=120, trust_env=False, verify=False)
"""Certificates take a tenth of a second to load."""


def ask(url: str, prompt: object = "Hello", path: str = COMPLETIONS, **more) -> httpx.Response:
    headers = more.pop("headers", None)
    body = {"model": "fake", "prompt": prompt, **more}
    return CLIENT.post(url + path, json=body, headers=headers)


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return CLIENT.get(url + path, headers=headers)


def warmed(server: LiveServer) -> LiveServer:
    """A server that has been asked something. FastAPI makes routes at the first request, and sets
    filters of warnings meanwhile, so two servers of one process must not do so at once."""
    for path in ("/ready", "/v1/models", COMPLETIONS):
        get(server.url, path, authorization="Bearer k-ann")
    return server


def metric(url: str, name: str, **labels: str) -> float:
    """The value of a metric; 0 if it is not there."""
    for line in get(url, "/metrics").text.splitlines():
        if line.startswith(f"kvboost_route_{name}") and all(
            f'{label}="{value}"' in line for label, value in labels.items()
        ):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def raw_request(
    target: str = COMPLETIONS, body: bytes = b"{}", *headers: str, method: str = "POST"
) -> bytes:
    """A request with ``target`` and ``headers`` exactly as they are."""
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def answers(router: LiveServer, sent: bytes) -> list[int]:
    """The statuses of all answers to raw bytes, until the router closes the connection or has
    answered a last request of ours."""
    last = b"GET /v1/last HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with socket.create_connection((router.host, router.port), timeout=120) as connection:
        connection.sendall(sent + last)
        seen = b""
        try:
            while piece := connection.recv(100_000):
                seen += piece
        except ConnectionResetError:
            pass
    return [int(line.split()[1]) for line in seen.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
