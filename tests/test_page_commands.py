"""Every command that a page shows runs here, or is in a list that says why it does not.

Commands of ours run in this process: a model is loaded once, and a server ends as soon as it
listens. curl asks a server that stays. Words and quotes are what bash makes of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trustme
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from kvboost import EmbeddingModel, KVBoost
from kvboost.cli import app
from kvboost.model.loading.device import cpu_has_bf16
from kvboost.model.loading.load import LoadedModel
from kvboost.model.loading.weights import pull_model
from kvboost.runtime import loading
from kvboost.serve import process
from support.adapters import write_adapter
from support.homes import use_home
from support.live_server import live_server
from support.load_script import load_example
from support.page_code import PAGES, ROOT, Shown, name_of, shown_commands
from support.tiny import save_tiny, tiny_encoder, tiny_model

TINY = "tiny"
"""A folder with a random model, which commands whose answers do not matter take."""
ASKED = (
    *("-m", TINY, "--passages", "3", "--passage-tokens", "128", "--answer-tokens", "2"),
    *("--strategy", "auto", "--donor", "header", "--limit", "1"),
)

RUN: dict[str, tuple[str, ...]] = {
    "kvboost bench": ("--help",),
    "kvboost cache": ("--help",),
    "kvboost cache *": (),
    "kvboost chat": ("-m", TINY, "--max-new-tokens", "4"),
    "kvboost demo": ("-m", TINY, "--quick"),
    "kvboost doctor": (),
    "kvboost explain FILE": ("-m", TINY),
    "kvboost explain turns.jsonl": ("-m", TINY),
    "kvboost explain turns.jsonl --url *": (),
    "kvboost generate *": ("-m", TINY),
    'kvboost generate "$(cat LICENSE)*': (),
    "kvboost models": (),
    "kvboost models *": (),
    "kvboost quality": ASKED,
    "kvboost quality *": ASKED,
    "kvboost quality --load *": (),
    "kvboost route *": ("--port", "0"),
    "kvboost serve": ("-m", TINY, "--port", "0"),
    "kvboost serve *": ("-m", TINY, "--port", "0"),
    "kvboost serve --image-host": ("images.example.com", "-m", TINY, "--port", "0"),
    "kvboost vllm": ("--help",),
    "python -m benchmarks": ("--help",),
    "python -m benchmarks gpu --help": (),
    "python examples/run.py --help": (),
    "curl *": (),
    "export *": (),
}
"""Commands that run, and what is added to make them quick. ``*`` stands for any ending; of several
keys that fit, the longest counts."""

NOT_RUN = {
    "pip install *": "downloads packages; make release installs the wheel in an empty environment",
    "git clone *": "the page does not know the address",
    "make *": "minutes, or what runs this test; tests/test_readme.py looks for the target",
    "KVBOOST_FRAMEWORKS_MODEL=NAME make *": "the same",
    "docker *": "needs docker",
    "kubectl *": "needs Kubernetes; tests/deploy validates the manifests",
    "serve run *": "needs Ray: make test-ray",
    "guidellm *": "needs guidellm: make test-frameworks",
    "lm_eval *": "needs lm-eval: make test-frameworks",
    "vllm *": "needs vLLM: make test-vllm",
    "kvboost vllm *": "needs a running vLLM: make test-vllm; tests/cli/test_vllm.py has a fake one",
    "kvboost doctor --vllm": "needs vLLM: make test-vllm",
    "curl http://127.0.0.1:8000/v1/completions *": "is for vLLM: make test-vllm",
    "kvboost bench ttft*": "minutes; tests/bench/ttft measures a tiny model",
    "kvboost bench serve*": "starts servers one after the other: tests/bench/serve, minutes",
    "kvboost bench agent*": "starts servers one after the other: tests/bench/agent, minutes",
    "kvboost models Qwen/*": "asks the hub",
    "kvboost serve --model HuggingFaceTB/*": "downloads a model; tests/serve has a tiny one",
    "kvboost serve --tp-size *": "starts processes that load a model each: tests/runtime/parallel",
    "kvboost serve --model folder/of/a/model --tp-size *": "the same",
    "kvboost serve --device-memory *": "needs a GPU",
    "kvboost quality --task code --model *": "needs a model that writes code",
    "kvboost quality --model Qwen/*": "downloads a model",
    "python -m benchmarks *": "minutes, a GPU, vLLM or a dataset; tests/benchmarks has parts",
    "OMP_NUM_THREADS=1 python -m benchmarks *": "the same",
    "python examples/*": "tests/test_examples.py runs them on a tiny model",
    "python scripts/fetch_models.py *": "downloads models",
    "python scripts/list_models.py": "tests/scripts/test_list_models.py runs it",
    # Names of a command or an option, without what it needs:
    **dict.fromkeys(
        (
            *("kvboost", "kvboost explain", "kvboost explain --url", "kvboost generate"),
            *(
                "kvboost cache ls",
                "kvboost cache verify",
                "kvboost quality --task",
                "kvboost route",
                "kvboost serve --draft-model",
            ),
        ),
        "is a name",
    ),
}
"""Commands that do not run here, and why."""

STANDS_FOR = {
    **dict.fromkeys(("MODEL", "FOLDER", "folder/of/a/model"), TINY),
    "NAME": "smollm2-135m",
    "FILE": "turns.jsonl",
    "DIR": "kv",
    "TASK": "summary",
    "HOST": "images.example.com",
}
"""What a page leaves to the reader, and what it is here."""
SERVER = re.compile(
    r"(?:http://)?(?:localhost|127\.0\.0\.1):8000|http://10\.0\.0\.1:8001|\bURL(?= )"
)
OTHER_SERVER, NO_SERVER = re.compile(r"http://10\.0\.0\.2:8001|(?<=URL )URL"), "http://127.0.0.1:1"
VARIES = re.compile(r"\b\d+ s\b|\b[0-9a-f]{12}\b")
"""Ages, and keys of chunks: these depend on the versions of torch and transformers."""

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def closest(command: str, keys: dict[str, Any]) -> str:
    """The longest of ``keys`` that fits; empty if none does."""
    fitting = (
        key
        for key in keys
        if (command.startswith(key[:-1]) if key.endswith("*") else command == key)
    )
    return max(fitting, key=len, default="")


def added_to(command: str) -> tuple[str, ...] | None:
    """What makes a command quick; None if it does not run here."""
    run, not_run = closest(command, RUN), closest(command, NOT_RUN)
    assert run or not_run, f"`{command}` is neither in RUN nor in NOT_RUN of {__file__}"
    return RUN[run] if len(run) > len(not_run) else None


def all_commands() -> list[str]:
    return [shown.command for page in PAGES for shown in shown_commands(page.read_text())]


def encoder(name: str, **_: Any) -> EmbeddingModel:
    model = tiny_encoder()
    model.name = name
    return model


class Models:
    """Models that no engine has any more, by how they were loaded. To load one takes seconds."""

    def __init__(self) -> None:
        self._idle: dict[str, list[LoadedModel]] = defaultdict(list)
        self._load = loading.load

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Engines that are opened and closed in the block get them, and leave theirs."""
        taken: list[tuple[list[LoadedModel], LoadedModel]] = []

        def load_or_take(name: Any, **options: Any) -> LoadedModel:
            idle = self._idle[f"{name} {options}"]
            taken.append((idle, idle.pop() if idle else self._load(name, **options)))
            return taken[-1][1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "load", load_or_take)
            patch.setattr(EmbeddingModel, "from_pretrained", encoder)
            yield
        for idle, model in taken:
            idle.append(model)


class Shell:
    """Runs what pages show, with the models and the server that all pages share."""

    def __init__(self, running: ExitStack) -> None:
        self.done: set[str] = set()
        self._models = Models()
        self._running = running
        self._url: str | None = None

    def run(self, command: str, added: tuple[str, ...]) -> str:
        """What ``command`` prints. It must succeed."""
        command = command.replace("tcp://*:5557", "tcp://*:0")  # any port that is free
        command = SERVER.sub(lambda _: self.url, OTHER_SERVER.sub(NO_SERVER, command))
        if command.startswith("curl "):
            return self._curl(command) if shutil.which("curl") else ""
        words = [STANDS_FOR.get(word, word) for word in split(command.removesuffix(" …"))]
        while words[0] in ("python", "-m"):
            words = words[1:]
        program, *arguments = words
        main = {"kvboost": app, "benchmarks": benchmarks}.get(program)
        with self._models.lent(), ending_servers():
            done = CliRunner(env={"COLUMNS": "120"}).invoke(
                main or load_example(Path(program).stem).app, [*arguments, *added], input="y\n"
            )
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
        return done.output

    @property
    def url(self) -> str:
        """The address of a server that has answered one request."""
        if self._url is None:
            engine = self._running.enter_context(KVBoost.from_pretrained(TINY))
            names = {"served_names": ("smollm2-135m",)}
            own = encoder("all-minilm-l6-v2")
            server = live_server(engine, embedding_model=own, **names)
            self._url = self._running.enter_context(server).url
            body = json.dumps({"model": "smollm2-135m", "prompt": "A lamp", "max_tokens": 1})
            self._curl(
                f"curl {self._url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
            )
        return self._url

    def _curl(self, command: str) -> str:
        if (made_up := "/chatcmpl-0123456789abcdef") in command:
            known = json.loads(self._curl(command.replace(made_up, "")))
            command = command.replace(made_up, f"/{known['data'][-1]['id']}")
        script = command.replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def split(command: str) -> list[str]:
    """The words that a shell makes of a command."""
    script = f"printf '%s\\0' {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@contextmanager
def ending_servers() -> Iterator[None]:
    """A server that starts in the block ends as soon as it listens and has said so."""
    startup = process.Server.startup

    async def start_and_end(server: process.Server, sockets: Any = None) -> None:
        await startup(server, sockets)
        server.should_exit = True

    interval = sys.getswitchinterval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.Server, "startup", start_and_end)
        patch.setattr(process, "log_to_stderr", lambda: None)
        yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with ExitStack() as running, pytest.MonkeyPatch.context() as patch:
        use_home(patch, tmp_path_factory.mktemp("home"), models=True)
        patch.delenv("KVBOOST_CACHE_DIR", raising=False)
        yield Shell(running)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), tiny_model("llama"))


@pytest.fixture
def clone(tmp_path: Path, tiny: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a folder with everything that the pages' commands name."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    Path(TINY).symlink_to(tiny)
    for name in ("poet", "clerk"):
        Path("adapters").mkdir(exist_ok=True)
        (Path("adapters") / name).symlink_to(adapter)
    Path("model.gguf").symlink_to(pull_model("smollm2-135m") / "model.gguf")
    Path("handbook").mkdir()
    for name in ("handbook/rules.md", "faq.md", "log.txt"):
        Path(name).write_text("Rule 1: the lamp is lit at dusk.\n")
    Path("keys.txt").write_text("support:k-support\nsales:k-sales\n")
    Path("serve.toml").write_text('model = "smollm2-135m"\nmax-running = 16\n')
    pair = trustme.CA().issue_cert("localhost")
    pair.cert_chain_pems[0].write_to_path("cert.pem")
    pair.private_key_pem.write_to_path("key.pem")
    asked = [[{"role": "user", "content": f"The lamp is lit at {hour}. When?"}] for hour in (5, 6)]
    Path("turns.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in asked))
    for name in ("musique", "hotpotqa", "2wiki", "musique_dev", "hotpotqa_dev"):
        passages = [
            {"title": name, "text": " ".join(f"{name} {20 * n + k} passed." for k in range(20))}
            for n in range(3)
        ]
        question = {"question": f"Which {name}?", "answers": ["40"], "passages": passages}
        Path(f"{name}.jsonl").write_text(json.dumps(question) + "\n")


@every_page
@pytest.mark.usefixtures("clone")
def test_the_commands_run_and_print_what_the_page_shows(
    page: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown in shown_commands(page.read_text()):
        added = added_to(shown.command)
        if added is None or (shown.command in shell.done and not shown.output):
            continue
        if shown.command.startswith("export "):
            name, _, value = SERVER.sub(lambda _: shell.url, shown.command[7:]).partition("=")
            monkeypatch.setenv(name, value)
            continue
        printed = shell.run(shown.command, added)
        shell.done.add(shown.command)
        if cpu_has_bf16():  # other processors hold more bytes
            assert missing(shown, printed) == [], f"{shown.command} printed\n{printed}"


def missing(shown: Shown, printed: str) -> list[str]:
    """The lines of a page that a command has not printed. Their order may depend on times."""
    lines = printed.splitlines()
    lines += [" ".join(two) for two in pairwise(lines)]  # with longer times, a line is wrapped
    return [line for line in shown.output if not any(looks_like(line, one) for one in lines)]


def looks_like(shown: str, printed: str) -> bool:
    """Compares lines, except for blanks, what varies, and what the page leaves out with dots."""
    pattern = re.escape(" ".join(VARIES.sub("...", shown).split())).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


def test_every_entry_of_the_lists_is_used() -> None:
    commands = all_commands()
    for keys in (RUN, NOT_RUN):
        used = {closest(command, keys) for command in commands}
        assert {*keys} - used == set()


def test_a_command_in_no_list_is_found() -> None:
    with pytest.raises(AssertionError, match="neither in RUN nor in NOT_RUN"):
        added_to("kvboost dance")
    assert added_to("kvboost serve --heal off") == RUN["kvboost serve *"]
    assert added_to("kvboost serve --tp-size 2") is None


def test_a_line_that_is_not_printed_is_found() -> None:
    shown = Shown("kvboost cache ls", ["key  used", "43c 21 s", "[4 tokens; ...]"])
    assert missing(shown, "43c   3 s\nkey used\nmore\n[4 tokens; 5 ms]\n") == []
    assert missing(shown, "43d 3 s\nkey used\n[5 tokens; 5 ms]\n") == shown.output[1:]
