from __future__ import annotations

import pytest

from kvboost.bench.serve.users import (
    CLEARED,
    FEWEST_PASSAGES,
    KEPT_RESULTS,
    LONG_PASSAGE_TOKENS,
    MOST_PASSAGES,
    PASSAGE_TOKENS,
    PASSAGES_OF_A_PROMPT,
    SYSTEM_TOKENS,
    TURNS,
    WORKLOADS,
    Request,
    Workload,
    make_workload,
)
from kvboost.bench.texts.prompts import passages
from kvboost.errors import ConfigError


def count_words(text: str) -> int:
    return len(text.split())


def workload(name: str, users: int = 3, requests: int = 4, seed: int = 0) -> Workload:
    return make_workload(name, passages(), count_words, users=users, requests=requests, seed=seed)


def shown(request: Request) -> str:
    """The passages of a prompt."""
    return request.messages[-1]["content"].rsplit("\n\n", 1)[0]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_every_time_and_another_with_another_seed(name: str) -> None:
    assert workload(name) == workload(name)
    assert [len(requests) for requests in workload(name).users] == [4, 4, 4]
    sent = [
        {str(request.messages[-1:]) for user in workload(name, seed=seed).users for request in user}
        for seed in (0, 1)
    ]
    if name != "agent":  # whose last message is one of a few questions
        assert not sent[0] & sent[1]
    assert workload(name) != workload(name, seed=1)


@pytest.mark.parametrize(
    ("name", "tokens"), [("rag", PASSAGE_TOKENS), ("rag-8k", LONG_PASSAGE_TOKENS)]
)
def test_rag_draws_passages_of_a_pool_in_changing_orders_with_a_new_question(
    name: str, tokens: int
) -> None:
    made = workload(name, users=4, requests=6)
    prompts = [request.messages[-1]["content"] for user in made.users for request in user]
    questions = [prompt.rsplit("\n\n", 1)[1] for prompt in prompts]
    assert len(set(questions)) == len(prompts) == 24
    assert len({prompt[:200] for prompt in prompts}) > FEWEST_PASSAGES // 2  # beginnings change
    for prompt in prompts:
        whole = PASSAGES_OF_A_PROMPT * tokens
        assert 0.8 * whole < count_words(prompt) < 1.1 * whole
    assert not any(request.continues for user in made.users for request in user)


@pytest.mark.parametrize(("users", "pool"), [(1, FEWEST_PASSAGES), (8, 32), (64, MOST_PASSAGES)])
def test_the_warmup_of_rag_shows_every_passage_and_asks_other_questions(
    users: int, pool: int
) -> None:
    made = workload("rag", users=users, requests=3)
    warm = [request for user in made.warmup for request in user]
    assert len(warm) == -(-pool // PASSAGES_OF_A_PROMPT)
    read = "\n\n".join(map(shown, warm))
    asked = [request for user in made.users for request in user]
    for request in asked:
        assert all(part in read for part in shown(request).split("\n\n"))
    assert not set(map(str, warm)) & set(map(str, asked))


def test_chat_has_one_long_system_prompt_and_conversations_that_continue() -> None:
    made = workload("chat", users=3, requests=TURNS + 2)
    systems = {
        message["content"]
        for user in (*made.users, *made.warmup)
        for request in user
        for message in request.messages
        if message["role"] == "system"
    }
    assert len(systems) == 1
    assert 0.9 * SYSTEM_TOKENS < count_words(systems.pop()) <= SYSTEM_TOKENS
    for user in made.users:
        assert [at for at, request in enumerate(user) if not request.continues] == [0, TURNS]
        assert len({request.messages[-1]["content"] for request in user}) == len(user)


def test_an_agent_clears_the_oldest_result_that_it_still_had() -> None:
    made = workload("agent", users=2, requests=KEPT_RESULTS + 2)
    for user in made.users:
        for turn, request in enumerate(user):
            contents = [one["content"] for one in request.messages if one["role"] == "user"]
            results, cleared = contents[:-1], max(0, turn + 1 - KEPT_RESULTS)
            assert len(results) == turn + 1
            assert [CLEARED in one for one in results] == [at < cleared for at in range(turn + 1)]
            if turn:  # the newer ones are those of the turn before
                before = [one["content"] for one in user[turn - 1].messages]
                assert all(one in before for one in results[cleared:-1])
    first, second = (user[0].messages for user in made.users)
    assert first[0] == second[0] and first[1] != second[1]


def test_an_unknown_workload_and_too_few_passages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"load='ragg' .* 'rag', 'rag-8k', 'chat', 'agent'"):
        workload("ragg")
    with pytest.raises(ConfigError, match="0 passages are too few: none is left for the load"):
        make_workload("rag", [], count_words, users=1, requests=1, seed=0)
