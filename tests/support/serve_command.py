"""The command line of ``kvboost serve``, parsed as it is for a server that starts."""

from __future__ import annotations

from typing import Any

from typer.main import get_command

from kvboost.cli import app
from kvboost.cli.serve_options import check_config


def serve_options(*arguments: str) -> dict[str, Any]:
    """The parameters that ``arguments`` give. Raises ConfigError if the file of ``--config`` has a
    mistake."""
    command = get_command(app).commands["serve"]
    with command.make_context("serve", list(arguments)) as context:
        check_config(context)
        return context.params
