"""Prompts as token ids."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from kvboost.config import ImageLimits
from kvboost.errors import ImageError, PromptError
from kvboost.tokens.hashing import TokenIds, as_token_ids
from kvboost.tokens.images import (
    ImageReader,
    ReadPrompt,
    expand,
    images_in,
    is_image_row,
    place,
    without_files,
)
from kvboost.tokens.text import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """Chat messages with the tools that the model may call (OpenAI's format), and options of the
    model's chat template, such as ``{"enable_thinking": False}``."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether the answer continues the last message instead."""


Prompt = str | Sequence[int] | TokenIds | Sequence[Mapping[str, Any]] | Conversation | ReadPrompt
"""Text, token ids, chat messages (``{"role": ..., "content": ...}``), a conversation, or a prompt
that was read before. The content of a message is text, or parts: ``{"type": "text", "text": ...}``
and ``{"type": "image", "image": ...}``."""


class PromptReader:
    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        images: ImageReader | str = "this model cannot be given images",
        limits: ImageLimits | None = None,
    ) -> None:
        """``images`` reads them, or says why the model takes none."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._images = images
        self._limits = limits or ImageLimits()

    def read(self, prompt: Prompt) -> TokenIds:
        """The token ids of ``prompt``; PromptError if there are none or it is no prompt."""
        return self.read_whole(prompt).token_ids

    def read_text(self, prompt: Prompt) -> TokenIds:
        """The same; ImageError if there are rows of images among them."""
        ids = self.read(prompt)
        if is_image_row(ids).any():
            raise ImageError("there are images in what has to be text")
        return ids

    def read_whole(self, prompt: Prompt, *, add_special_tokens: bool = True) -> ReadPrompt:
        """``prompt`` as token ids, with its images; PromptError if it is no prompt.
        ``add_special_tokens``: whether text gets the tokens that the model expects in front."""
        if isinstance(prompt, ReadPrompt):
            return prompt
        conversation = None
        if isinstance(prompt, Conversation):
            conversation = prompt
        elif not isinstance(prompt, str) and _is_chat(prompt):
            conversation = Conversation(prompt)
        if conversation is not None and has_images(conversation):
            return self._with_images(conversation)
        if isinstance(prompt, str):  # an empty text is empty, even if a BOS token would precede it
            encode = self._tokenizer.encode if add_special_tokens else self.join
            ids = as_token_ids(encode(prompt) if prompt else [])
        elif conversation is not None:
            ids = self.join(self.render(conversation))
        else:
            ids = self._check(prompt)
        if not len(ids):
            raise PromptError("the prompt is empty; give at least one token")
        return ReadPrompt(ids)

    def _with_images(self, conversation: Conversation) -> ReadPrompt:
        """A conversation with images: the text that each becomes is in its place."""
        given = images_in(conversation.messages)
        reader = self._images
        if isinstance(reader, str):
            raise ImageError(reader)
        if len(given) > self._limits.max_images:
            raise ImageError(
                f"the prompt has {len(given)} images; at most {self._limits.max_images} are allowed"
            )
        files = [reader.file_of(one, self._limits) for one in given]
        images = [reader.read(file, self._limits) for file in files]
        text = self.render(conversation)
        ids = self.join(expand(text, reader.placeholder, images))
        return place(ids, images, reader.row_id)

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation in the model's chat template, with its special tokens. For
        each image there is the template's placeholder."""
        if not _is_chat(conversation.messages):
            said = f"a conversation has chat messages; got {_short(conversation.messages)}"
            raise PromptError(said)
        messages = conversation.messages
        return self._tokenizer.render_chat(
            without_files(messages) if has_images(conversation) else messages,
            tools=conversation.tools,
            options=conversation.template_options,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
        )

    def read_document(self, text: str, header: str | None) -> tuple[TokenIds, int]:
        """The ids of ``text`` after ``header``, and how many of them come before it. Without a
        header, the text begins a user's first message in the chat template."""
        if not isinstance(text, str) or not text:
            raise PromptError(f"a document is a non-empty string; got {_short(text)}")
        frame = self._tokenizer.chat_frame() if header is None else None
        if frame is None:
            ids = self.read(f"{header or ''}{text}")
            return ids, max(0, len(ids) - len(self.join(text)))
        return self.join(frame[0], text), len(self.join(frame[0]))

    def frame(self, header: str | None, question: str) -> tuple[TokenIds, TokenIds]:
        """The ids before and after a prompt's documents: ``header`` and ``question``. Without a
        header, the chat template's beginning, and the question with the template's end."""
        frame = self._tokenizer.chat_frame() if header is None else None
        if frame is None:
            return as_token_ids(self._tokenizer.encode(header or "")), self.join(question)
        return self.join(frame[0]), self.join(question, frame[1])

    def inside(self, text: str) -> list[TokenIds]:
        """The ids that find ``text`` inside other texts: see :func:`inside`."""
        return inside(text, self._tokenizer.encode_fragment)

    def locate(self, text: str, token_ids: Sequence[int] | TokenIds) -> tuple[int, int] | None:
        """The rows ``[start, end)`` of ``token_ids`` that hold ``text``, the first time it occurs.
        Its first and its last token may be shared with the text around it."""
        ids = self.join(text.strip())
        inner = ids[1:-1] if len(ids) > 8 else ids
        data, sought = as_token_ids(token_ids).tobytes(), inner.tobytes()
        at = data.find(sought)
        while at % 4 and at >= 0:  # between two ids
            at = data.find(sought, at + 1)
        if at < 0 or not sought:
            return None
        edge = (len(ids) - len(inner)) // 2
        return max(0, at // 4 - edge), min(len(token_ids), at // 4 + len(inner) + edge)

    def join(self, *fragments: str) -> TokenIds:
        """The ids of ``fragments``, each encoded on its own, joined in order."""
        ids = [token for text in fragments for token in self._tokenizer.encode_fragment(text)]
        return as_token_ids(ids)

    def _check(self, prompt: object) -> TokenIds:
        try:
            ids = _as_array(prompt)
        except ValueError:  # lists of different lengths
            ids = np.empty((0, 0))
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise PromptError(
                f"a prompt is a string, token ids, or chat messages; got {_short(prompt)}"
                f"{_rows_hint(ids)}"
            )
        wrong = ids[(ids < 0) | (ids >= self._vocab_size) & ~is_image_row(ids)]
        if len(wrong):
            raise PromptError(
                f"token id {wrong[0]} is outside the model's vocabulary of {self._vocab_size:,} "
                f"(0 to {self._vocab_size - 1:,})"
            )
        return as_token_ids(ids)


def has_images(conversation: Conversation) -> bool:
    """Whether a message of a conversation has an image."""
    return bool(_is_chat(conversation.messages) and images_in(conversation.messages))


def _as_array(prompt: Any) -> np.ndarray[Any, Any]:
    """``prompt`` as an array of whatever it holds."""
    if type(prompt) is list and prompt and type(prompt[0]) is int:
        with suppress(struct.error):  # if not all of them are whole numbers of 64 bits
            packed = struct.pack(f"{len(prompt)}q", *prompt)  # a fifth of the time of asarray
            return np.frombuffer(packed, dtype=np.int64)
    return np.asarray(prompt)


def inside(text: str, encode: Callable[[str], Sequence[int]]) -> list[TokenIds]:
    """The ids that find ``text`` inside other texts, in several variants: its first and last token
    depend on the text around it. ``encode`` adds no special tokens."""
    if not text.strip():
        raise PromptError(f"a text to look for is not blank; got {_short(text)}")
    ways = [as_token_ids(encode(f"{before}{text.strip()}")) for before in ("", " ", "\n")]
    return [ids[1:-1] if len(ids) > 8 else ids for ids in ways]


def _is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether ``prompt`` is a conversation; raises PromptError on a message we cannot read."""
    if not isinstance(prompt, Sequence) or (prompt and isinstance(prompt[0], int)):
        return False
    kinds = set(map(type, prompt))  # a prompt of many ids has one, which is asked once
    if not any(issubclass(kind, Mapping) for kind in kinds):
        return False
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            said = f"a chat message is a mapping with 'role' and 'content'; got {_short(message)}"
            raise PromptError(said)
    return True


def _rows_hint(ids: np.ndarray[Any, Any]) -> str:
    """A hint for an error: what to do with token ids in rows, as transformers' tokenizers return
    them."""
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        return ""
    if len(ids) == 1:
        return "; these are token ids in one row, so use ids[0]"
    return f"; these are token ids in {len(ids)} rows, so give one, or all to generate_batch()"


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
