"""Signals that reach ``kvboost serve`` before its server has handlers of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer


class Loading:
    """The time until the server listens: what signals have asked for in it."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._reloads = False
        self._has_server = False
        self.before: dict[int, Any] = {}
        """The handlers that were there before."""

    def ended(self) -> None:
        """Call it once the server handles signals: it gets those that could not be served."""
        self._has_server = True
        if self._reloads:
            signal.raise_signal(signal.SIGHUP)
        if self.stopped_by is not None:  # what it raised was caught somewhere in a library
            signal.raise_signal(self.stopped_by)

    def stop(self, number: int, _: object) -> None:
        """Handles SIGTERM and SIGINT. A second one does what it does in other programs, and so does
        one that comes after the server has stopped."""
        signal.signal(number, self.before[number])
        if self._has_server:
            signal.raise_signal(number)
            return
        self.stopped_by = number
        raise SystemExit(128 + number)

    def reload(self, _: int, __: object) -> None:
        """Handles SIGHUP. The files may have changed since they were read, so it is kept."""
        if not (self._reloads or self._has_server):
            # Not by sys.stderr: the signal may have interrupted a write to it.
            os.write(2, b"SIGHUP: the files are read again as soon as the server listens\n")
        self._reloads = True


@contextmanager
def signals_while_loading(*, reloads: bool) -> Iterator[Loading]:
    """Handles signals from now on until the server does, and again once it has stopped. SIGTERM and
    SIGINT end the loading with the exit code of a process that the signal has ended. Unless there
    are files to read again (``reloads``), SIGHUP ends the process, as it does later."""
    loading = Loading()
    handlers: dict[int, Callable[[int, object], None]]
    handlers = {signal.SIGTERM: loading.stop, signal.SIGINT: loading.stop}
    if reloads:
        handlers[signal.SIGHUP] = loading.reload
    for number, handler in handlers.items():
        loading.before[number] = signal.getsignal(number)
        signal.signal(number, handler)
    try:
        yield loading
    except BaseException:
        if loading.stopped_by is None:
            raise
        # Not by rich: the signal may have interrupted it, and it would print its line again.
        typer.echo("stopped while the model was loading", err=True)
        raise typer.Exit(128 + loading.stopped_by) from None
    finally:
        for number, handler in loading.before.items():
            signal.signal(number, handler)
