"""Large request bodies, hostile and honest, and what they do to a server's other clients."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SIZE = 8 * 1024**2
"""The largest body that a server takes by default."""

CHAT, COMPLETION, WARM = "/v1/chat/completions", "/v1/completions", "/kvboost/warm"
RESPONSE, MESSAGE, EMBED = "/v1/responses", "/v1/messages", "/v1/embeddings"


def repeated(before: str, item: str, after: str, size: int = SIZE) -> bytes:
    """``before``, as many times ``item`` as fit, separated by commas, and ``after``."""
    room = size - len((before + after).encode())
    count = (room + 1) // (len(item.encode()) + 1)
    return (before + ",".join([item] * count) + after).encode()


def numbered(before: str, item: str, after: str, count: int) -> bytes:
    """``before``, ``item % number`` for so many numbers, and ``after``."""
    return (before + ",".join(item % number for number in range(count)) + after).encode()


def inside(before: str, text: str, after: str) -> bytes:
    """``text`` as a JSON string in a body."""
    return f"{before}{json.dumps(text)}{after}".encode()


def bodies(model: str) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Path and body by name."""
    head = f'{{"model": "{model}", "max_tokens": 1, '
    chat, text = head + '"messages": [', '{"role": "user", "content": "%s"}]}'
    sentence = "The lighthouse at Skagen was lit in 1858. "
    long_text = sentence * ((SIZE - 200) // len(sentence))
    many = "[" + "{}," * ((SIZE - 400) // 3) + "{}]"
    call = (
        chat + '{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": '
    )
    digits = "[" + ",".join(["9" * 4000] * 2000) + "]"
    tool = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}], '
    asks = f"{chat}{text % 'a'}"[:-1]
    return {
        "JSON in arguments": (
            CHAT,
            lambda: inside(call + '{"name": "f", "arguments": ', many, "}}]}]}"),
        ),
        "JSON in an item": (
            RESPONSE,
            lambda: inside(
                f'{{"model": "{model}", "input": [{{"type": "function_call", "call_id": "1", '
                '"name": "f", "arguments": ',
                many,
                "}]}",
            ),
        ),
        "a schema as text": (CHAT, lambda: inside(f'{asks}, "guided_json": ', many, "}")),
        "numbers of a tool": (
            CHAT,
            lambda: f'{head}{tool % f"""{{"enum": {digits}}}"""}"messages": [{text % "a"}'.encode(),
        ),
        "numbers of a call": (
            CHAT,
            lambda: inside(call + '{"name": "f", "arguments": ', digits, "}}]}]}"),
        ),
        "long reasoning": (
            CHAT,
            lambda: inside(
                chat + '{"role": "assistant", "content": "a", "reasoning_content": ',
                long_text,
                "}]}",
            ),
        ),
        "long options of the template": (
            CHAT,
            lambda: inside(f'{asks}, "chat_template_kwargs": {{"a": ', long_text, "}}"),
        ),
        "deep arguments": (
            CHAT,
            lambda: inside(
                call + '{"name": "f", "arguments": ', "[" * 500 + "1" + "]" * 500, "}}]}]}"
            ),
        ),
        "8,000 blocks": (
            MESSAGE,
            lambda: numbered(
                head + '"messages": [{"role": "user", "content": [',
                '{"type": "text", "text": "%d"}',
                "]}]}",
                8_000,
            ),
        ),
        "a long block": (MESSAGE, lambda: (chat + text % long_text).encode()),
        "many texts to embed": (
            EMBED,
            lambda: numbered(f'{{"model": "{model}", "input": [', '"text %d"', "]}", 60_000),
        ),
        "a long text to embed": (
            EMBED,
            lambda: f'{{"model": "{model}", "input": "{long_text}"}}'.encode(),
        ),
        "one emoji in a long text": (
            COMPLETION,
            lambda: (head + f'"prompt": "{long_text[:-8]}\U0001f600"}}').encode(),
        ),
        "numbers as messages": (CHAT, lambda: repeated(chat, "1", "]}")),
        "empty messages": (CHAT, lambda: repeated(chat, '{"role":"user","content":""}', "]}")),
        "empty lists": (CHAT, lambda: repeated(chat, "[]", "]}")),
        "numbers as parts": (
            CHAT,
            lambda: repeated(chat + '{"role": "user", "content": [', "1", "]}]}"),
        ),
        "negative ids": (COMPLETION, lambda: repeated(head + '"prompt": [', "-1", "]}")),
        "valid ids": (COMPLETION, lambda: repeated(head + '"prompt": [', "1", "]}")),
        "lists of ids": (COMPLETION, lambda: repeated(head + '"prompt": [', "[1]", "]}")),
        "empty strings": (COMPLETION, lambda: repeated(head + '"prompt": [', '""', "]}")),
        "empty stops": (
            COMPLETION,
            lambda: repeated(head + '"prompt": "a", "stop": [', '""', "]}"),
        ),
        "unknown fields": (
            COMPLETION,
            lambda: numbered(head + '"prompt": "a", ', '"x%d": 1', "}", 175_000),
        ),
        "wrong metadata": (
            CHAT,
            lambda: numbered(chat + text[:-1] % "a" + ', "metadata": {', '"x%d": 1', "}}", 175_000),
        ),
        "wrong biases": (
            COMPLETION,
            lambda: numbered(head + '"prompt": "a", "logit_bias": {', '"x%d": "a"', "}}", 175_000),
        ),
        "nested lists": (CHAT, lambda: b"[" * SIZE),
        "nested objects": (CHAT, lambda: b'{"a":' * (SIZE // 5)),
        "250,000 ids": (COMPLETION, lambda: numbered(head + '"prompt": [', "%d", "]}", 250_000)),
        "120,000 empty lists": (CHAT, lambda: repeated(chat, "[]", "]}", 360_000)),
        "8,000 messages": (
            CHAT,
            lambda: numbered(chat, '{"role": "user", "content": "%d"}', "]}", 8_000),
        ),
        "60,000 unknown fields": (
            COMPLETION,
            lambda: numbered(head + '"prompt": "a", ', '"x%d": 1', "}", 60_000),
        ),
        "escapes": (
            COMPLETION,
            lambda: head.encode() + b'"prompt": "' + b'\\"' * 4_100_000 + b'"}',
        ),
        "long text": (COMPLETION, lambda: (head + f'"prompt": "{long_text}"}}').encode()),
        "long message": (CHAT, lambda: (chat + text % long_text).encode()),
        "one long word": (COMPLETION, lambda: (head + f'"prompt": "{"x" * 8_000_000}"}}').encode()),
        "long document": (WARM, lambda: f'{{"documents": ["{long_text}"]}}'.encode()),
    }


@dataclass(frozen=True)
class Outcome:
    status: int
    """0: no answer in time."""
    message: str
    seconds: float
    slowest_health: float
    growth_bytes: int
    """By how much the resident memory of the process grew at most."""


def send(url: str, path: str, body: bytes, pid: int, timeout: float = 300.0) -> Outcome:
    """Sends one body, and asks for ``/health`` every 20 ms until the answer is there."""
    address = urlsplit(url)
    answer: dict[str, object] = {"status": 0, "message": ""}

    def post() -> None:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            answer.update(status=response.status)
            try:
                answer.update(message=json.loads(text)["error"]["message"])
            except (ValueError, KeyError):
                answer.update(message=text[:80].decode("utf-8", "replace"))
        except TimeoutError:
            pass
        finally:
            connection.close()

    before = memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    began = time.perf_counter()
    sender = threading.Thread(target=post)
    sender.start()
    slowest = 0.0
    health = http.client.HTTPConnection(address.hostname or "", address.port, timeout)
    while sender.is_alive():
        asked = time.perf_counter()
        health.request("GET", "/health")
        health.getresponse().read()
        slowest = max(slowest, time.perf_counter() - asked)
        sender.join(0.02)
    health.close()
    seconds = time.perf_counter() - began
    growth = memory(pid, "VmHWM") - before
    return Outcome(answer["status"], str(answer["message"]), seconds, slowest, growth)  # type: ignore[arg-type]


def memory(pid: int, kind: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return 0
