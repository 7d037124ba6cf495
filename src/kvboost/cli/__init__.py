"""The ``kvboost`` command. Thin: it parses, calls public names and prints."""

from kvboost.cli.main import app

__all__ = ["app"]
