"""RAG over a folder through a running server: embeddings find documents, and their KV is reused.

Start a server, then run this:

    kvboost serve --embedding-model all-minilm-l6-v2
    python examples/rag_server.py FOLDER --question "What is a heap?" --question "What is copied?"

Every text file of the folder is uploaded once (``/kvboost/documents``), embedded once
(``/v1/embeddings``), and read in the background. For each question, the files that are closest to
it go into the prompt by their ids, in the order of the ranking, so that they follow each other
differently in each prompt. Each question is asked without and with reuse, and the time to the first
token of both is printed; the first request of all only wakes the server up.

Needs ``httpx``, ``numpy`` and ``openai``.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import OpenAI

INSTRUCTION = "Answer the question from these documents in one sentence."


@dataclass(frozen=True)
class Library:
    """The documents of a folder: their ids on the server and their embeddings."""

    names: list[str]
    ids: list[str]
    vectors: np.ndarray

    def closest(self, vector: np.ndarray, count: int) -> list[int]:
        return np.argsort(-(self.vectors @ vector))[:count].tolist()


def upload(http: httpx.Client, folder: Path) -> dict[str, str]:
    """Uploads the text files of a folder; returns the id of each by its name. To upload a file
    again changes nothing, because its id comes from its content."""
    ids = {}
    for path in sorted(folder.iterdir()):
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        except UnicodeDecodeError:
            continue
        if text:
            answer = http.post("/kvboost/documents", json={"text": text, "title": path.name})
            answer.raise_for_status()
            ids[path.name] = answer.json()["id"]
    if not ids:
        raise SystemExit(f"{folder} holds no text file")
    last = 0
    while True:
        listed = http.get("/kvboost/documents").raise_for_status().json()["data"]
        waiting = [one for one in listed if one["status"] in ("waiting", "reading")]
        if not waiting:
            return ids
        if len(waiting) != last:
            print(f"documents that the server has not read yet: {len(waiting)}")
        last = len(waiting)
        time.sleep(1)


def embed(client: OpenAI, model: str, texts: list[str]) -> np.ndarray:
    found = client.embeddings.create(
        model=model, input=texts, extra_body={"truncate_prompt_tokens": -1}
    )
    return np.array([one.embedding for one in found.data])


def prompt(library: Library, chosen: list[int], question: str) -> list[dict[str, Any]]:
    """The documents by id, then the question. The client sends the parts as they are."""
    documents = [{"type": "document", "document_id": library.ids[index]} for index in chosen]
    parts = [
        {"type": "text", "text": INSTRUCTION},
        *documents,
        {"type": "text", "text": f"Question: {question}"},
    ]
    return [{"role": "user", "content": parts}]


def ask(
    client: OpenAI, model: str, messages: Any, mode: str, max_tokens: int
) -> tuple[str, dict[str, Any]]:
    """The answer, and the server's report on it."""
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"kvboost": {"mode": mode, "heal": "off"}},
    )
    return answer.choices[0].message.content or "", answer.kvboost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--question", action="append", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--documents", type=int, default=3, help="documents in a prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()

    http = httpx.Client(
        base_url=options.url, headers={"authorization": f"Bearer {options.key}"}, timeout=600
    )
    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.key, timeout=600, max_retries=0)
    names = [model.id for model in client.models.list()]
    chat_model, embedding_model = names[0], names[-1]

    ids = upload(http, options.folder)
    texts = [(options.folder / name).read_text(encoding="utf-8") for name in ids]
    library = Library(list(ids), list(ids.values()), embed(client, embedding_model, texts))
    ask(client, chat_model, [{"role": "user", "content": "Hello"}], "baseline", 1)

    for question in options.question:
        (vector,) = embed(client, embedding_model, [question])
        chosen = library.closest(vector, options.documents)
        messages = prompt(library, chosen, question)
        print(f"\n{question}\n  documents: {', '.join(library.names[index] for index in chosen)}")
        _, without = ask(client, chat_model, messages, "baseline", options.max_tokens)
        answer, reused = ask(client, chat_model, messages, "chunk_kv_reuse", options.max_tokens)
        print(f"  {answer.strip()}")
        print(
            f"  first token: {without['ttft_ms']:.0f} ms without reuse, {reused['ttft_ms']:.0f} ms "
            f"with it; tokens: {reused['exact_tokens']} exact, {reused['moved_tokens']} moved "
            f"({reused['recomputed_tokens']} recomputed), {reused['computed_tokens']} new"
        )
        for note in reused["notes"]:
            print(f"  note: {note}")


if __name__ == "__main__":
    main()
