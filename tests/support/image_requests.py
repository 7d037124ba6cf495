"""Requests with an image, in the words of each API."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import httpx

QUESTION = "What is this?"


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chat(url: str, question: str = QUESTION, **more: Any) -> tuple[str, dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
    said = [part, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": said}]
    return "/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 6, **more}


def anthropic(url: str, question: str = QUESTION, **more: Any) -> tuple[str, dict[str, Any]]:
    head, _, data = url.partition(";base64,")
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    if not data:
        source = {"type": "url", "url": url}
    said = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": said}]
    return "/v1/messages", {"model": "m", "messages": messages, "max_tokens": 6, **more}


def responses(url: str, question: str = QUESTION, **more: Any) -> tuple[str, dict[str, Any]]:
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    said = [image, {"type": "input_text", "text": question}]
    items = [{"role": "user", "content": said}]
    return "/v1/responses", {"model": "m", "input": items, "max_output_tokens": 6, **more}


APIS: dict[str, Callable[..., tuple[str, dict[str, Any]]]] = {
    "chat": chat,
    "anthropic": anthropic,
    "responses": responses,
}


def text_of(answer: httpx.Response) -> str:
    said = answer.json()
    if "choices" in said:
        return str(said["choices"][0]["message"]["content"])
    part = said["content"] if "content" in said else said["output"][0]["content"]
    return str(part[0]["text"])


def error_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])
