"""What the engine's loop sends to an API process."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvboost.serve.remote.host import AnswerSender, Outgoing
from kvboost.serve.remote.wire import Step
from support.tiny import make_engine, tiny_model

TOKENS = 24


class Sent:
    """A connection that keeps what is sent."""

    def __init__(self, answers: int) -> None:
        self.steps: list[Step] = []
        self._left = answers
        self.all_ended = threading.Event()

    def send(self, message: Any) -> None:
        assert isinstance(message, Step)
        self.steps.append(message)
        self._left -= sum(news.ended is not None for news in message.news)
        if not self._left:
            self.all_ended.set()


def test_a_step_of_many_answers_is_one_message() -> None:
    prompts = [[7 * i + 1, 5, 9, 3, 11] for i in range(8)]
    with make_engine(tiny_model("llama")) as engine:
        expected = [engine.generate(one, TOKENS, ignore_eos=True).token_ids for one in prompts]
        sent = Sent(len(prompts))
        outgoing = Outgoing(engine, sent)
        for number, prompt in enumerate(prompts):
            outgoing.running[number] = answer = AnswerSender(outgoing, number)
            ids = np.array(prompt, np.int32)
            engine.answer_to(answer.listen, ids, TOKENS, "baseline", ignore_eos=True)
        assert sent.all_ended.wait(60)
        steps = engine.serving_stats()["steps"]
    news = [one for step in sent.steps for one in step.news]
    for number, ids in enumerate(expected):
        own = [one for one in news if one.number == number]
        assert [token for one in own for token in one.token_ids] == ids
        assert [one.begun is not None for one in own] == [True] + [False] * (len(own) - 1)
        assert own[-1].ended is not None and own[-1].ended.finish_reason == "length"
        assert own[-1].ended.reuse is None  # as it was in the beginning
    assert len(sent.steps) <= steps + len(prompts)  # those that end are told at once
    assert not outgoing.running


def test_log_probabilities_go_with_their_tokens() -> None:
    with make_engine(tiny_model("llama")) as engine:
        expected = engine.generate([1, 2, 3], TOKENS, ignore_eos=True, logprobs=2).logprobs
        sent = Sent(1)
        answer = AnswerSender(Outgoing(engine, sent), 1)
        options = {"ignore_eos": True, "logprobs": 2}
        engine.answer_to(answer.listen, [1, 2, 3], TOKENS, "baseline", **options)
        assert sent.all_ended.wait(60)
    news = [one for step in sent.steps for one in step.news]
    assert all(len(one.token_ids) == len(one.logprobs or ()) for one in news)
    told = [found for one in news for found in one.logprobs or ()]
    assert [one.token_id for one in told] == [one.token_id for one in expected or ()]
