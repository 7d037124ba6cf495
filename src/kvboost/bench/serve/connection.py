"""A user's connection to a server, kept from one request to the next.

It is written by hand because the clients share the machine with the server: a general HTTP client
would spend more time on a piece of text than a fast server does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

KEPT_SECONDS = 3.0
"""An idle connection is kept for so long. uvicorn, which most servers use, closes it after 5."""
MOST_AT_ONCE = 1 << 16


class Connection:
    """Sends one request at a time to the server at ``url``. Close it at the end."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        at = urlsplit(url)
        assert at.hostname is not None and at.port is not None
        self._place = at.hostname, at.port
        sent = {"host": at.netloc, "content-type": "application/json", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0

    async def lines(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
        """Sends a request and yields the lines of its answer as they arrive. Raises ``ValueError``
        if the status is not 200, ``OSError`` or ``EOFError`` if the connection fails."""
        reader, writer = await self._connected()
        self._open = None  # until the whole answer has arrived
        try:
            head = f"{method} {path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, headers = _read_head(await reader.readuntil(b"\r\n\r\n"))
            if status != 200:
                said = b"".join([piece async for piece in _pieces(reader, headers)])
                raise ValueError(f"HTTP {status}: {said.decode(errors='replace')[:300]}")
            rest = b""
            async for piece in _pieces(reader, headers):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line
            if rest:
                yield rest
            if "transfer-encoding" in headers or "content-length" in headers:
                self._open, self._used = (reader, writer), time.monotonic()
        finally:
            if self._open is None:
                writer.close()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The open connection, or a new one if it has been idle for long or the server has closed
        it."""
        idle = time.monotonic() - self._used
        if self._open is not None and (idle > KEPT_SECONDS or self._open[0].at_eof()):
            self.close()
        return self._open or await asyncio.open_connection(*self._place)


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """The status of an answer and its headers, with names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parted = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in parted}


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body of an answer, piece by piece."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(MOST_AT_ONCE):
            yield piece
