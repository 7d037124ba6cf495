"""Whether the hub answers, asked once and briefly.

The hub's own client tries each file six times, which takes half a minute without a network, even if
every file is in its cache.
"""

from __future__ import annotations

from huggingface_hub import constants, get_session

_SECONDS = 4.0


def why_unreachable() -> str | None:
    """Why the hub does not answer now; None if it does. Any answer counts, a refusal too."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # of whichever HTTP library the hub's client uses
        return f"{type(error).__name__}: {error}"
    return None
