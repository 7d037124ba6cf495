"""Several servers as one: requests go to the server that has read their text.

``kvboost route`` puts one address before servers that run anywhere. ``kvboost.deploy:app`` runs
them in Ray Serve, which also starts, watches and scales them:

    serve run kvboost.deploy:app model=smollm2-135m replicas=2 redis=redis://host:6379
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``app`` builds the application for Ray Serve. Ray is imported only then."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvboost.deploy.ray.build import build

    return build
