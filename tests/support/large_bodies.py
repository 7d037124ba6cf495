"""Large request bodies, hostile and honest, and what they do to a server's other clients."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

SIZE = 8 * 1024**2
"""The largest body that a server takes by default."""

CHAT, COMPLETION, WARM = "/v1/chat/completions", "/v1/completions", "/kvboost/warm"
RESPONSE, MESSAGE, EMBED = "/v1/responses", "/v1/messages", "/v1/embeddings"


Filling = Callable[[int], str]
"""What comes in the place of the ``@`` of a body that has so many bytes left."""


def repeated(item: str, size: int = SIZE) -> Filling:
    """As many times ``item`` as fit, with commas between; at most ``size`` bytes."""
    return lambda room: ",".join([item] * ((min(room, size) + 1) // (len(item.encode()) + 1)))


def numbered(item: str, count: int) -> Filling:
    return lambda _: ",".join(item % number for number in range(count))


def quoted(text: str) -> Filling:
    """``text`` as a JSON string."""
    return lambda _: json.dumps(text, ensure_ascii=False)


def bodies(model: str) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Path and body by name."""
    message = '{"role": "user", "content": "%s"}'
    chat, asked = '"messages": [@]', f'"messages": [{message % "a"}], '
    said = '"messages": [{"role": "user", "content": @}]'
    parts = said.replace("@", "[@]")
    thought = '"messages": [{"role": "assistant", "content": "a", "reasoning_content": @}]'
    call = '"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", '
    call += '"function": {"name": "f", "arguments": @}}]}]'
    item = '"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": @}]'
    tool = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [@]}}}]'
    ids, prompt, continued = '"prompt": [@]', '"prompt": @', '"prompt": "a", '
    sentence = "The lighthouse at Skagen was lit in 1858. "
    long_text = quoted(sentence * ((SIZE - 200) // len(sentence)))
    many = quoted("[" + "{}," * ((SIZE - 400) // 3) + "{}]")
    digits = ",".join(["9" * 4000] * 2000)
    fields = numbered('"x%d": 1', 175_000)
    described: dict[str, tuple[str, str, Filling]] = {
        "JSON in arguments": (CHAT, call, many),
        "JSON in an item": (RESPONSE, item, many),
        "a schema as text": (CHAT, asked + '"guided_json": @', many),
        "numbers of a tool": (CHAT, asked + tool, lambda _: digits),
        "numbers of a call": (CHAT, call, quoted(f"[{digits}]")),
        "long reasoning": (CHAT, thought, long_text),
        "long options of the template": (
            CHAT,
            asked + '"chat_template_kwargs": {"a": @}',
            long_text,
        ),
        "deep arguments": (CHAT, call, quoted("[" * 500 + "1" + "]" * 500)),
        "8,000 blocks": (MESSAGE, parts, numbered('{"type": "text", "text": "%d"}', 8_000)),
        "a long block": (MESSAGE, said, long_text),
        "many texts to embed": (EMBED, '"input": [@]', numbered('"text %d"', 60_000)),
        "a long text to embed": (EMBED, '"input": @', long_text),
        "one emoji in a long text": (COMPLETION, prompt, quoted(sentence * 199_720 + "\U0001f600")),
        "numbers as messages": (CHAT, chat, repeated("1")),
        "empty messages": (CHAT, chat, repeated('{"role":"user","content":""}')),
        "empty lists": (CHAT, chat, repeated("[]")),
        "numbers as parts": (CHAT, parts, repeated("1")),
        "negative ids": (COMPLETION, ids, repeated("-1")),
        "valid ids": (COMPLETION, ids, repeated("1")),
        "lists of ids": (COMPLETION, ids, repeated("[1]")),
        "empty strings": (COMPLETION, ids, repeated('""')),
        "empty stops": (COMPLETION, continued + '"stop": [@]', repeated('""')),
        "unknown fields": (COMPLETION, continued + "@", fields),
        "wrong metadata": (CHAT, asked + '"metadata": {@}', fields),
        "wrong biases": (
            COMPLETION,
            continued + '"logit_bias": {@}',
            numbered('"x%d": "a"', 175_000),
        ),
        "250,000 ids": (COMPLETION, ids, numbered("%d", 250_000)),
        "120,000 empty lists": (CHAT, chat, repeated("[]", 360_000)),
        "8,000 messages": (CHAT, chat, numbered(message.replace("%s", "%d"), 8_000)),
        "60,000 unknown fields": (COMPLETION, continued + "@", numbered('"x%d": 1', 60_000)),
        "escapes": (COMPLETION, prompt, quoted('"' * 4_100_000)),
        "long text": (COMPLETION, prompt, long_text),
        "long message": (CHAT, said, long_text),
        "one long word": (COMPLETION, prompt, quoted("x" * 8_000_000)),
    }

    def make(template: str, filling: Filling) -> bytes:
        before, after = f'{{"model": "{model}", "max_tokens": 1, {template}}}'.split("@")
        return (before + filling(SIZE - len(before + after)) + after).encode()

    made = {
        name: (path, partial(make, template, filling))
        for name, (path, template, filling) in described.items()
    }
    return made | {
        "nested lists": (CHAT, lambda: b"[" * SIZE),
        "nested objects": (CHAT, lambda: b'{"a":' * (SIZE // 5)),
        "long document": (WARM, lambda: f'{{"documents": [{long_text(0)}]}}'.encode()),
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
