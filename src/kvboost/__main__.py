"""``python -m kvboost`` is the ``kvboost`` command."""

from kvboost.cli import app

app()
