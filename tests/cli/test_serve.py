"""``kvboost serve``: what it passes on, what it says, and what it refuses before loading."""

from __future__ import annotations

import socket
import sys
from functools import partial

import pytest
import torch
import trustme
from typer.testing import CliRunner

import kvboost
from kvboost.cli import app
from kvboost.config import EngineOptions
from kvboost.serve import process as running
from kvboost.serve.remote import processes as running_apart
from support.fake_engine import FakeEngine


class Loaded(FakeEngine):
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, config: kvboost.EngineConfig) -> None:
        super().__init__()
        self.config = config

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def started(monkeypatch):
    """The server's settings and the engine's options, without a server or a model."""
    seen = {}

    def load(model, **options):
        config = {name: options[name] for name in EngineOptions.__annotations__ if name in options}
        seen.update(options=options, model=model, engine=Loaded(kvboost.EngineConfig(**config)))
        return seen["engine"]

    def serve(engine, settings, listening, on_ready, reread=None, processes=1):
        seen.update(settings=settings, reread=reread, processes=processes)
        on_ready()

    monkeypatch.setattr(kvboost.KVBoost, "from_pretrained", load)
    monkeypatch.setattr(running, "serve", serve)
    monkeypatch.setattr(running_apart, "serve", partial(serve, processes=2))
    monkeypatch.delenv("KVBOOST_API_KEYS", raising=False)
    monkeypatch.delenv("KVBOOST_CACHE_DIR", raising=False)
    return seen


def serve(*arguments: str):
    return CliRunner().invoke(app, ["serve", "--port", "0", *arguments])


def test_options_reach_the_engine_and_the_server(started) -> None:
    done = serve(
        *("--model", "m", "--max-running", "3", "--max-waiting", "4", "--kv-bits", "8"),
        *("--max-kv-bytes", "1GiB", "--max-cache-bytes", "2GiB", "--max-pause", "0.5"),
        *("--cache-dir", "kv", "--timeout", "0", "--served-name", "a", "--served-name", "b"),
        *("--disk-cache-bytes", "3GiB", "--remote-cache-bytes", "4GiB"),
        *("--far-kv-bytes", "9GiB", "--far-kv-dir", "far", "--state-every", "512"),
        *("--heal", "off"),
        *("--speculate", "8"),
        *("--mode", "prefix_cache", "--drain-seconds", "7", "--log-prompts", "--metrics", "off"),
        *("--tp-size", "2", "--image-host", "a.example", "--image-host", "*.b.example:8080"),
    )
    assert done.exit_code == 0, done.output
    options, settings = started["options"], started["settings"]
    assert started["model"] == "m" and options["max_running"] == 3 and options["max_waiting"] == 4
    assert options["max_kv_bytes"] == "1GiB" and options["max_pause"] == 0.5
    assert options["state_every"] == 512
    assert options["far_kv_bytes"] == "9GiB" and str(options["far_kv_dir"]) == "far"
    assert options["kv_cache_bits"] == 8 and str(options["disk_cache_dir"]) == "kv"
    assert options["tp_size"] == 2
    config = started["engine"].config
    assert options["heal"] == "off" and options["max_audit_kl"] is None
    assert options["speculate"] == 8 and options["draft_model"] is None
    assert (config.disk_cache_bytes, config.remote_cache_bytes) == (3 * 1024**3, 4 * 1024**3)
    assert settings.timeout is None and settings.served_names == ("a", "b")
    assert settings.mode == "prefix_cache" and settings.drain_seconds == 7 and settings.log_prompts
    assert settings.metrics == "off"
    assert settings.image_hosts == ("a.example", "*.b.example:8080")
    assert started["engine"].closed


def test_serve_prints_its_address_once_and_how_to_try_it(started) -> None:
    done = serve()
    assert done.stdout.startswith("http://127.0.0.1:") and done.stdout.strip().endswith("/v1")
    assert done.stdout.count("http") == 1
    assert "A page at / " in done.stderr and "curl http" in done.stderr
    assert done.stderr.count("http:") == 1  # the curl line alone
    assert "warning" not in done.stderr and "Bearer" not in done.stderr


def test_serve_says_what_it_serves_and_with_what(started) -> None:
    (line,) = [line for line in serve().stderr.splitlines() if line.startswith("serving")]
    assert line.startswith("serving fake on cpu in float32; cache: 2GiB in memory; own kernels: ")
    secret = "redis://:secret-word@host"
    shown = serve("--cache-dir", "kv", "--max-cache-bytes", "1GiB", "--remote-cache", secret).stderr
    assert "cache: 1GiB in memory and 20GiB in kv and a remote store" in shown
    assert "secret-word" not in shown


def test_defaults_are_those_of_the_engine(started) -> None:
    serve()
    assert started["engine"].config == kvboost.EngineConfig()
    assert started["reread"] is None  # there are no files


def test_serve_warns_about_a_public_address_without_keys(started, tmp_path) -> None:
    assert "the server asks for no key" in serve("--host", "0.0.0.0").stderr
    keys = tmp_path / "keys.txt"
    keys.write_text("admin:root:secret-word\n")
    done = serve("--host", "0.0.0.0", "--api-keys", str(keys))
    assert "asks for no key" not in done.stderr and "secret-word" not in done.output
    assert "Bearer KEY" in done.stderr


def test_keys_come_from_a_file_and_from_the_environment(started, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KVBOOST_API_KEYS", "bob:k-bob,k-other")
    assert "every key may inspect the cache" in serve().stderr
    assert [key.name for key in started["settings"].keys] == ["bob", "key-2"]
    keys = tmp_path / "keys.txt"
    keys.write_text("# ours\nann:k-ann\n")
    serve("--api-keys", str(keys))
    assert [key.name for key in started["settings"].keys] == ["ann", "bob", "key-3"]


def test_a_local_server_without_keys_answers_to_local_names_only(started, monkeypatch) -> None:
    serve("--allow-host", "box.lan")
    assert started["settings"].allowed_hosts == ("localhost", "127.0.0.1", "::1", "box.lan")
    for open_to_all in (("--allow-host", "*"), ("--host", "0.0.0.0")):
        serve(*open_to_all)
        assert started["settings"].allowed_hosts == ()
    monkeypatch.setenv("KVBOOST_API_KEYS", "k")
    serve()
    assert started["settings"].allowed_hosts == ()


def test_mistakes_are_one_line_before_anything_is_loaded(started, tmp_path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n")
    for arguments, message in (
        (("--api-keys", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--api-keys", str(empty)), "holds no key"),
        (("--mode", "turbo"), "mode='turbo'"),
        (("--image-host", "https://a.example"), "--image-host='https://a.example' must be a host"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
    ):
        done = serve(*arguments)
        assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = serve("--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2 and "cannot listen on 127.0.0.1" in done.stderr
    assert "model" not in started


@pytest.mark.parametrize(
    ("device", "given", "processes"),
    [("cpu", "auto", 1), ("cuda", "auto", 2), ("cpu", "1", 2), ("cuda", "0", 1)],
)
def test_http_has_its_own_process_on_gpus(started, monkeypatch, device, given, processes) -> None:
    monkeypatch.setattr(Loaded, "device", torch.device(device))
    monkeypatch.setattr(sys.modules["kvboost.cli.serve"], "announce", lambda *given: None)
    done = serve("--api-workers", given, "--no-rehearse")
    assert done.exit_code == 0, done.output
    assert started["processes"] == processes


@pytest.mark.parametrize("given", ["-1", "2", "many"])
def test_the_error_about_api_workers_names_the_range(started, given) -> None:
    done = serve("--api-workers", given)
    assert done.exit_code == 2 and f"--api-workers {given} must be auto, 0 or 1" in done.output
    assert "options" not in started


def test_kv_events_are_set_up_as_asked(started) -> None:
    done = serve(
        *("--kv-events", "tcp://*:5557", "--kv-events-topic", "kv@here@m"),
        *("--kv-events-replay", "tcp://*:5558", "--kv-events-block", "64"),
    )
    assert done.exit_code == 0, done.output
    chosen = kvboost.KVEvents("tcp://*:5557", "kv@here@m", "tcp://*:5558", 64)
    assert started["options"]["kv_events"] == chosen
    assert "publishing KV events at tcp://*:5557" in done.output
    assert serve().exit_code == 0 and started["options"]["kv_events"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv-events", "5557"], "--kv-events='5557' is not an address for KV events"),
        (["--kv-events-topic", "kv"], "--kv-events-topic and --kv-events-replay go with"),
    ],
)
def test_kv_events_that_cannot_be_published_are_refused(started, arguments, said) -> None:
    done = serve(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.output.split())
    assert "options" not in started


def test_kv_events_do_not_show_what_tenants_send(started, monkeypatch) -> None:
    monkeypatch.setenv("KVBOOST_API_KEYS", "ann:k-ann,bob:k-bob")
    done = serve("--kv-events", "tcp://*:5557")
    assert done.exit_code == 2 and "--shared-cache" in done.output
    assert serve("--kv-events", "tcp://*:5557", "--shared-cache").exit_code == 0


def test_adapters_are_loaded_before_the_server_starts(started) -> None:
    done = serve("--lora", "poet=adapters/poet", "--lora", "clerk=a=b")
    assert done.exit_code == 0, done.output
    loaded = [(one["load"], one["path"]) for one in started["engine"].asked]
    assert loaded == [("poet", "adapters/poet"), ("clerk", "a=b")]


@pytest.mark.parametrize("given", [("poet",), ("=x",), ("a=",), ("a=x", "a=y")])
def test_adapters_need_a_name_and_a_path(started, given: tuple[str, ...]) -> None:
    done = serve(*(part for one in given for part in ("--lora", one)))
    assert done.exit_code != 0 and "give NAME=PATH" in " ".join(done.output.split())
    assert "engine" not in started


def test_options_for_operators_reach_the_server(started, tmp_path) -> None:
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "both.pem"
    )
    done = serve(
        *("--cors-origin", "https://a.example", "--cors-origin", "http://localhost:3000"),
        *("--tls-cert", str(tmp_path / "both.pem"), "--otlp-endpoint", "http://collector:4318"),
    )
    assert done.exit_code == 0, done.output
    settings = started["settings"]
    assert settings.cors_origins == ("https://a.example", "http://localhost:3000")
    assert settings.tls_cert == tmp_path / "both.pem" and settings.tls_key is None
    assert settings.otlp_endpoint == "http://collector:4318"
    assert done.stdout.startswith("https://127.0.0.1:") and "curl https://" in done.stderr
    assert "any web page" not in done.stderr
    assert "any web page" in serve("--cors-origin", "*").stderr


def test_a_file_gives_the_options_that_the_command_line_leaves_out(started, tmp_path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'max-running = 3\ntimeout = 5.0\nserved-name = ["a", "b"]\nlog-prompts = true\n'
    )
    done = serve("--config", str(file), "--timeout", "7")
    assert done.exit_code == 0, done.output
    assert started["options"]["max_running"] == 3
    settings = started["settings"]
    assert settings.timeout == 7.0 and settings.served_names == ("a", "b") and settings.log_prompts
    file.write_text("speculate = 8\nfar-kv-bytes = 0\ntimeout = 5\n")  # texts and numbers
    assert serve("--config", str(file)).exit_code == 0 and started["options"]["speculate"] == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-runing = 3", "unknown option 'max-runing'; did you mean 'max-running'?"),
        ("max_running = 3", "did you mean 'max-running'?"),
        ("max-running =", "cannot be read"),
        ("max-running = 'many'", "max-running='many' must be a whole number"),
        ("max-running = true", "max-running=True must be a whole number"),
        ("timeout = '5'", "timeout='5' must be a number"),
        ("log-prompts = 1", "log-prompts=1 must be true or false"),
        ("heal = false", "heal=False must be text in quotes"),
        ("served-name = 'a'", """served-name='a' must be a list, such as ["a", "b"]"""),
        ("warm = ['a', 5]", "warm=['a', 5] must be a list"),
    ],
)
def test_a_mistake_in_the_file_says_what_was_expected(started, tmp_path, text, message) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    done = serve("--config", str(file))
    assert done.exit_code == 2 and message in done.stderr and str(file) in done.stderr
    assert "options" not in started
    file.write_text("")
    assert serve("--config", str(file)).exit_code == 0
    file.write_text(text)
    with pytest.raises(kvboost.ConfigError, match="--config"):
        started["reread"]()


def test_authorities_that_cannot_be_read_are_refused_before_a_model_is_loaded(
    started, monkeypatch, tmp_path
) -> None:
    for name, content in {"gone": None, "empty": "", "text": "no certificate"}.items():
        file = tmp_path / name
        if content is not None:
            file.write_text(content)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        done = serve("--image-host", "a.example")
        assert done.exit_code == 2 and not started
        assert "images cannot be fetched" in done.stderr and "SSL_CERT_FILE" in done.stderr


def test_what_changed_in_the_files_is_read_again(started, tmp_path, caplog) -> None:
    file, keys = tmp_path / "serve.toml", tmp_path / "keys.txt"
    file.write_text(f'max-running = 3\ntimeout = 5.0\napi-keys = "{keys}"\n')
    keys.write_text("ann:k-ann\n")
    serve("--config", str(file), "--mode", "prefix_cache")
    before, reread = started["settings"], started["reread"]
    assert reread() == before and not caplog.text
    file.write_text(
        f'max-running = 4\ntimeout = 6.0\nmode = "baseline"\napi-keys = "{keys}"\n'
        'image-host = ["a.example"]\n'
    )
    keys.write_text("ann:k-ann\nbob:k-bob\n")
    after = reread()
    assert after.timeout == 6.0 and [key.name for key in after.keys] == ["ann", "bob"]
    assert after.image_hosts == ("a.example",)
    assert after.mode == "prefix_cache"  # the command line comes first
    assert "a restart is needed for --max-running" in caplog.text
    file.write_text("max-running = 0\n")
    with pytest.raises(kvboost.ConfigError, match="max_running=0"):
        reread()
    file.write_text(f'api-keys = "{keys}"\nimage-host = ["*"]\n')
    with pytest.raises(kvboost.ConfigError, match="image_hosts='\\*' must be a host"):
        reread()


def test_options_that_are_removed_from_the_file_get_their_defaults(
    started, tmp_path, caplog
) -> None:
    file = tmp_path / "serve.toml"
    options = (
        'timeout = 5.0\nmode = "baseline"\nlog-prompts = true\nserved-name = ["a"]\n'
        'max-running = 3\ncors-origin = ["https://a"]\nshared-cache = true\n'
    )
    file.write_text(options)
    serve("--config", str(file), "--max-waiting", "7")
    reread = started["reread"]
    file.write_text("")
    after = reread()
    assert (after.timeout, after.mode, after.log_prompts) == (600.0, "chunk_kv_reuse", False)
    assert after.served_names == ()
    waiting = caplog.text.strip().rpartition("a restart is needed for ")[2]
    assert sorted(waiting.split(", ")) == ["--cors-origin", "--max-running", "--shared-cache"]
    caplog.clear()
    file.write_text(options)
    assert reread() == started["settings"] and not caplog.text


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "kvboost.serve.process")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = serve()
    assert done.exit_code == 2
    assert "needs uvicorn; install it with: pip install 'kvboost[serve]'" in done.stderr


def test_files_are_warmed_and_pinned_and_an_embedding_model_is_loaded(
    started, tmp_path, monkeypatch
) -> None:
    loaded = []
    monkeypatch.setattr(
        kvboost.EmbeddingModel, "from_pretrained", lambda name, device: loaded.append(name)
    )
    (tmp_path / "a.md").write_text("A lamp.")
    (tmp_path / "b.bin").write_bytes(b"\xff")
    done = serve(
        *("--warm", str(tmp_path), "--pin", "--max-pinned-bytes", "1MiB"),
        *("--embedding-model", "all-minilm-l6-v2"),
    )
    assert done.exit_code == 0, done.stderr
    settings = started["settings"]
    assert settings.warm == ((str(tmp_path / "a.md"), "A lamp."),) and settings.pin
    assert started["engine"].config.max_pinned_bytes == 2**20
    assert loaded == ["all-minilm-l6-v2"] and "b.bin" in done.stderr
    refused = serve("--warm", str(tmp_path / "none"))
    assert refused.exit_code == 2 and "no such file" in refused.stderr
