"""The secret that engines share to name and sign their chunks."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping


class Secret:
    """Two keys derived from the user's secret: ``naming`` for the names of chunks, ``signing`` for
    their MACs. The secret itself is not kept, and neither key is ever shown."""

    def __init__(self, text: str) -> None:
        self.naming = _derive(text, b"kvboost naming")
        self._signing = _derive(text, b"kvboost signing")

    def mac(self) -> hashlib.blake2b:
        """An empty keyed digest, to be fed with everything that it shall vouch for."""
        return hashlib.blake2b(key=self._signing, digest_size=32)

    def sign(self, metadata: Mapping[str, str]) -> str:
        """The signature of a header alone: a start reads no more than headers."""
        digest = hashlib.blake2b(key=self._signing, digest_size=32, person=b"kvboost header")
        digest.update(json.dumps(dict(metadata), sort_keys=True).encode())
        return digest.hexdigest()

    def signed(self, metadata: Mapping[str, str], signature: str) -> bool:
        """Whether ``signature`` is that of ``metadata``."""
        return hmac.compare_digest(self.sign(metadata).encode(), signature.encode())


def _derive(text: str, purpose: bytes) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32, person=purpose).digest()
