"""EleutherAI's lm-eval, compared with transformers and with the engine itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before the imports that read it: the data set is a local file

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [
    ("Water boils at a hundred", " degrees.", " lamps."),
    ("One, two, three, four, five, six, seven,", " eight", " stones"),
    ("The lighthouse was lit in", " 1858.", " the soup."),
    ("The keeper wrote down the weather every four", " hours", " mountains, said the cat."),
    ("Paris is the capital of", " France", " Naïveté – “42 €”"),
    ("Monday, Tuesday, Wednesday, Thursday,", " Friday", " Tuesday"),
    ("def add(a, b):\n    return a", " + b", " lantern"),
    ("The opposite of hot is", " cold", " hotter 🔥"),
    ("A year has twelve", " months", " moths"),
    ("In the winter of 1892 the sea took the lower", " steps", " house"),
]
"""What a text begins with, how it goes on, and how it does not."""
NEW_TOKENS = 12
STOP = ["\n\n"]

FROM_THE_ENGINE = """
import json, sys
from kvboost import KVBoost
asked = json.load(sys.stdin)
options = {"max_new_tokens": asked["length"], "mode": "baseline", "stop": asked["stop"]}
with KVBoost.from_pretrained(asked["model"], dtype="float32") as engine:
    said = [
        engine.chat([{"role": "user", "content": text}], **options).output_text
        if asked["chat"] else engine.generate(text, **options).output_text
        for text in asked["prompts"]
    ]
print(json.dumps(said))
"""


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """Two tasks over a data set of ten rows: which end is likelier, and how a text goes on."""
    data = tmp_path / "rows.jsonl"
    rows = [{"text": text, "ends": ends, "right": 0} for text, *ends in ROWS]
    data.write_text("\n".join(map(json.dumps, rows)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
    }
    ends = {"doc_to_choice": "ends", "doc_to_target": "right", "metric_list": [{"metric": "acc"}]}
    chosen = {"task": "ends", "output_type": "multiple_choice", **ends}
    generation = {"until": STOP, "max_gen_toks": NEW_TOKENS, "do_sample": False}
    written = {
        "task": "goes_on",
        "output_type": "generate_until",
        "doc_to_target": "{{ends[0]}}",
        "generation_kwargs": generation,
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (chosen, written):  # JSON is YAML
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps({**shared, **task}))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory) -> None:
    folder = str(tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)


def evaluate(server: Any, folder: Path, tasks: TaskManager, task: str, model: str, **more: Any):
    """The samples of ``task``, in the order of ROWS. ``more`` are arguments of lm-eval's model."""
    path = "chat/completions" if model == "local-chat-completions" else "completions"
    given = {"model": server.model, "base_url": f"{server.url}/{path}", "tokenizer": str(folder)}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={**given, **more},
        tasks=[task],
        task_manager=tasks,
        bootstrap_iters=0,
        apply_chat_template=model == "local-chat-completions",
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ROWS)
    return found["results"][task], samples


@pytest.fixture(scope="module")
def expected(model_folder) -> list[list[tuple[float, bool]]]:
    """The log likelihood of every end, and whether greedy decoding writes it, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def score(text: str, end: str) -> tuple[float, bool]:
        before = len(tokenizer(text, add_special_tokens=False).input_ids)
        ids = tokenizer(text + end, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            told = model(ids).logits[0, before - 1 : -1].log_softmax(-1)
        follow = ids[0, before:]
        is_greedy = bool((told.argmax(-1) == follow).all())
        return float(told.gather(1, follow[:, None]).sum()), is_greedy

    return [[score(text, end) for end in ends] for text, *ends in ROWS]


@pytest.mark.parametrize(
    "how", [{}, {"batch_size": 4, "num_concurrent": 2}], ids=["one by one", "in batches"]
)
def test_log_likelihoods_are_those_of_transformers(
    server, model_folder, tasks, knows_every_field, expected, has_run, how
) -> None:
    results, samples = evaluate(server, model_folder, tasks, "ends", "local-completions", **how)
    for sample, right in zip(samples, expected, strict=True):
        found = sample["filtered_resps"]
        assert [one for one, _ in found] == pytest.approx([one for one, _ in right], abs=2e-3)
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in right]
    assert {is_greedy for ends in expected for _, is_greedy in ends} == {True, False}
    share = sum(good[0] > bad[0] for good, bad in expected) / len(ROWS)
    assert results["acc,none"] == pytest.approx(share)
    batches = ", in batches" if how else ""
    has_run("lm_eval", f"`local-completions`, log likelihoods equal transformers'{batches}")


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_generated_text_is_the_engines_greedy_answer(
    server, model_folder, tasks, knows_every_field, has_run, model
) -> None:
    _, samples = evaluate(server, model_folder, tasks, "goes_on", model)
    said = [sample["resps"][0][0] for sample in samples]
    asked = {
        "model": server.model,
        "prompts": [text for text, *_ in ROWS],
        "length": NEW_TOKENS,
        "stop": STOP,
        "chat": model == "local-chat-completions",
    }
    done = subprocess.run(
        [os.environ["KVBOOST_SERVER_PYTHON"], "-c", FROM_THE_ENGINE],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    assert said == json.loads(done.stdout.splitlines()[-1])
    assert all(said)
    has_run("lm_eval", f"`{model}`, generated text equals the engine's greedy answer")
