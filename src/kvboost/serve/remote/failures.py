"""Errors that cross from the engine's process to an API process."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import kvboost.errors
from kvboost.errors import KVBoostError
from kvboost.serve.errors import ApiError
from kvboost.serve.remote.wire import WireError

logger = logging.getLogger("kvboost.serve")

_PLAIN = (str, int, float, bool, type(None))


class EngineFailure(Exception):
    """A defect showed in the engine's process, whose log says where."""


def to_wire(error: BaseException) -> WireError:
    """``error`` as a message. Where a defect is shows only in this process, so it is logged here:
    without its message, which may have a prompt in it."""
    if not isinstance(error, KVBoostError):
        where = "".join(traceback.format_tb(error.__traceback__))
        logger.error("a request failed with %s in the engine\n%s", type(error).__name__, where)
    attributes = {name: one for name, one in vars(error).items() if isinstance(one, _PLAIN)}
    return WireError(type(error).__name__, str(error), attributes)


def from_wire(error: WireError) -> Exception:
    """The same error again. Its class is one of ``kvboost.errors``, or it was a defect."""
    kind: Any = getattr(kvboost.errors, error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, KVBoostError)):
        return EngineFailure(f"{error.kind}: {error.message}")
    takes_others = "__init__" in vars(kind)  # it makes its message of what it takes
    made: KVBoostError = kind.__new__(kind, error.message) if takes_others else kind(error.message)
    vars(made).update(error.attributes)
    return made


def engine_lost() -> ApiError:
    """The engine's process has ended."""
    said = "the engine's process has ended; the server must be started again"
    return ApiError(503, said, "engine_lost", retry_after=5)
