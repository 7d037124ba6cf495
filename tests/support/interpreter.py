"""Triton's interpreter, quicker: it changes the language before every call of a function and back
after every kernel, which takes a third of its time. Here it is changed once."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType


def change_language_once() -> None:
    """Call it before the first kernel runs; again does nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    if not isinstance(interpreter._patch_lang, _Once):
        interpreter._patch_lang = _Once(interpreter._patch_lang, (language, language.core))


class _Once:
    """Functions differ in which of ``modules`` they see, and only those are changed for them."""

    def __init__(self, change: Callable[[FunctionType], object], modules: tuple[object, ...]):
        self.change = change
        self.modules = modules
        self.done: set[tuple[bool, ...]] = set()

    def __call__(self, function: FunctionType) -> _Kept:
        seen = list(function.__globals__.values())
        sees = tuple(any(one is module for one in seen) for module in self.modules)
        if sees not in self.done:
            self.change(function)
            self.done.add(sees)
        return _Kept()


class _Kept:
    def restore(self) -> None:
        """Tests run no other code in Triton's language."""
