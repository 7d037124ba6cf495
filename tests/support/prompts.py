"""Prompts of the same passages in any order, and the modes and options that read them."""

from __future__ import annotations

import random

from kvboost import GenerationMode
from support.tiny import VOCAB

BASELINE, EXACT, MOVED = GenerationMode
SLOPPY = {"recompute_strategy": "none"}


def words(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB - 10), k=length)


HEADER, QUESTION = words(100, 9), words(200, 20)
PASSAGES = [words(number, 40 + number) for number in range(4)]


def prompt_of(order: list[int], header: list[int] = HEADER) -> list[int]:
    return [*header, *(token for number in order for token in PASSAGES[number]), *QUESTION]
