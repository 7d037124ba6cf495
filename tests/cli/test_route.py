"""``kvboost route``: what it passes on, what it says, and what it refuses."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.serve import process
from support.live_server import wait_for
from support.scripted_upstream import lists, say, upstream
from support.server_process import ServerProcess

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2/v1")


@pytest.fixture
def started(monkeypatch):
    """The router that would run."""
    seen = {}

    def run(app, listening, on_ready):
        seen["state"] = app.state.server
        on_ready()

    monkeypatch.setattr(process, "run", run)
    return seen


def route(*arguments: str):
    return CliRunner().invoke(app, ["route", "--port", "0", *arguments])


def test_options_reach_the_router(started) -> None:
    done = route(
        *URLS,
        *("--policy", "beginning", "--remember", "6400", "--request-tokens", "7"),
        *("--shared-cache", "--health-seconds", "0.5", "--timeout", "0", "--drain-seconds", "3"),
        *("--max-body", "1MiB", "--max-requests", "900", "--metrics", "off"),
    )
    assert done.exit_code == 0, done.output
    options = started["state"].options
    assert options.upstreams == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert options.router.policy == "beginning" and options.router.remember_tokens == 6400
    assert options.router.request_tokens == 7 and options.shared_cache
    assert options.health_seconds == 0.5 and options.timeout is None
    limits = options.limits
    assert limits.max_body_bytes == 1024**2 and limits.drain_seconds == 3
    assert limits.max_anonymous_requests == 900 and limits.max_connections == 1800
    assert limits.metrics == "off"


def test_the_router_prints_its_address_and_which_server_is_missing(started) -> None:
    done = route(*URLS)
    assert done.stdout.startswith("http://127.0.0.1:") and done.stdout.strip().endswith("/v1")
    assert "routing by content to 2 servers" in done.stderr
    assert done.stderr.count("gets no requests yet") == 2
    assert "nothing to choose" in route(URLS[0]).stderr


def test_the_router_says_which_models_are_served_where(tmp_path) -> None:
    with (
        upstream(models=lists("small", "adapter")) as one,
        upstream(models=lists("org/large")) as other,
        upstream(models=say(401)) as keyed,
    ):
        servers = (one.url, other.url, keyed.url)
        with ServerProcess(*servers, folder=tmp_path, command="route") as router:
            wait_for(lambda: "may go there" in router.log)
            shown = " ".join(router.log.split())
        with ServerProcess(one.url, folder=tmp_path, command="route") as router:
            wait_for(lambda: "serving small, adapter" in router.log)
    assert f"{one.url} serves small, adapter" in shown
    assert f"{other.url} serves org/large" in shown
    assert "the servers serve different models" in shown
    assert f"{keyed.url} does not list its models to the router (/v1/models answers 401)" in shown


def test_a_local_router_answers_to_local_names_only(started) -> None:
    route(*URLS, "--allow-host", "box.lan")
    hosts = started["state"].settings.allowed_hosts
    assert hosts == ("localhost", "127.0.0.1", "::1", "box.lan")
    for open_to_all in (("--allow-host", "*"), ("--host", "0.0.0.0")):
        route(*URLS, *open_to_all)
        assert started["state"].settings.allowed_hosts == ()


def test_a_router_needs_no_torch() -> None:
    program = (
        "import sys, kvboost.deploy.proxy, kvboost.serve.process; print(*sys.modules, sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.strip().split(","))
    assert "httpx" in imported and not imported & {"torch", "transformers", "ray"}


def test_mistakes_are_one_line(started) -> None:
    for arguments, message in (
        (("box:8000",), "is not the address of a server"),
        ((URLS[0], URLS[0] + "/v1"), "given twice"),
        ((*URLS, "--policy", "best"), "policy='best'"),
        ((*URLS, "--max-body", "much"), "--max-body='much'"),
        ((*URLS, "--metrics", "key"), "metrics='key'"),
    ):
        done = route(*arguments)
        assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = route(*URLS, "--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2 and "cannot listen on 127.0.0.1" in done.stderr
    assert "state" not in started
