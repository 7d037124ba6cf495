"""The unit for systemd, and the configuration file beside it."""

from __future__ import annotations

import configparser
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.serve_command import serve_options

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvboost.service"


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def test_systemd_finds_no_mistake(tmp_path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "kvboost.service"
    copy.write_text(UNIT.read_text().replace("/opt/kvboost/bin/kvboost", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True
    )
    said = [line for line in done.stderr.splitlines() if "kvboost.service" in line]
    assert said == []


def test_the_unit_runs_a_command_that_parses_and_reloads_by_sighup() -> None:
    program, *arguments = service()["ExecStart"].split()
    assert program.endswith("/kvboost")
    file = UNIT.parent / Path(arguments[-1]).name
    assert arguments[0] == "serve"
    assert serve_options(*arguments[1:-1], str(file))["max_waiting"] == 256
    assert service()["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_answers_have_time_to_end_and_a_stop_is_no_failure() -> None:
    assert int(service()["TimeoutStopSec"]) > 30
    assert int(service()["SuccessExitStatus"]) == 128 + signal.SIGTERM
