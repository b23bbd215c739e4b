"""Test the VitaBench adapter against a fake of its public interface (tests/support/fake_vita.py).

The reward is 1 if the judge finds that every requirement is met. The judge sees the conversation in
windows of ten messages that overlap by two, and its earlier decisions. Episodes do not share goods.
A model plays the user at its endpoint, and not again after a resume.
"""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rewards.test_judge import Model, completion, model
from tests.support import fake_vita
from unstale.config import ConfigError, make_task
from unstale.envs import EnvError, Message, Resumable, ToolCall, Turn
from unstale.envs.registry import build_taskset
from unstale.rewards.judge import LLMJudge
from unstale.testing import check_env

__all__ = ["model"]
YES, NO = (
    json.dumps({"reason": reason, "score": score}) for reason, score in (("y", 10), ("n", 0))
)
DONE = Message("assistant", "It is done.")


@pytest.fixture(autouse=True)
def vita(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vita.install(monkeypatch)


def tasks(model: Model, domain: str = "delivery", **options: Any) -> Any:
    return build_taskset(make_task(f"vita:{domain}", judge=model.url, **options))


def call(name: str, item: str) -> Message:
    return Message("assistant", "", (ToolCall(name, {"item": item}),))


def asked(model: Model) -> list[dict[str, str]]:
    """Return the texts of each question to the judge."""
    return [json.loads(body["messages"][1]["content"]) for body in model.asked]


async def play(env: Any, *replies: Message) -> list[Turn]:
    try:
        return [await env.begin(), *[await env.step(reply) for reply in replies]]
    finally:
        env.close()


def test_an_episode_is_worth_1_if_every_requirement_is_met(
    model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    model.answers = [completion(YES)]
    taskset = tasks(model)
    env = taskset.env(taskset.held_out(2)[1], 0)
    replies = [call("order", "tea 2"), call("price", "coffee"), DONE, DONE]
    begin, ordered, failed, agreed, end = asyncio.run(play(env, *replies))
    assert [message.role for message in begin.messages] == ["system", "user"]
    assert begin.messages[0].content == f"Serve in english. It is {fake_vita.TIME} Saturday."
    assert begin.messages[1].content == "Order tea 2 by delivery."
    assert ordered.messages == (Message("tool", "order 1"),)
    assert failed.messages == (Message("tool", "Error: 'coffee'"),)
    assert agreed.messages[0].content.startswith("Yes, please go ahead")
    assert end.done and end.rewards == {"rubrics": 1.0} and end.facts == {"rubrics_met": 1.0}
    questions = asked(model)
    assert {each["requirement"] for each in questions} == {"tea is ordered", "the price is told"}
    assert len(questions) == 2, "a requirement that is listed twice is judged once"
    assert "order({'item': 'tea 2'})" in questions[0]["messages"]
    assert questions[0]["time"] == fake_vita.TIME and questions[0]["part"] == "1 of 1"
    assert "Traceback" not in capfd.readouterr().err


def test_the_judge_sees_windows_and_its_earlier_decisions(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty messages are three windows. What one window met, a later one can revoke."""
    scores = {"tea is ordered": [10, 10, 10], "the price is told": [0, 10, 0]}
    taskset = tasks(model)
    env = taskset.env(taskset.held_out(1)[0], 0)

    async def verdict(judge: LLMJudge, **texts: str) -> Any:
        seen.append(texts)
        score = scores[texts["requirement"]][int(texts["part"][0]) - 1]
        return SimpleNamespace(score=score / 10, reason=f"part {texts['part']}")

    seen: list[dict[str, str]] = []
    monkeypatch.setattr(LLMJudge, "verdict", verdict)
    calls = [call("price", "tea 0")] * 7
    *_, end = asyncio.run(play(env, *calls, DONE, DONE))
    assert end.rewards == {"rubrics": 0.0} and end.facts == {"rubrics_met": 0.5}
    parts = [each for each in seen if each["requirement"] == "the price is told"]
    assert [each["part"] for each in parts] == ["1 of 3", "2 of 3", "3 of 3"]
    assert [each["before"] for each in parts] == [
        "not met: not judged yet",
        "not met: part 1 of 3",
        "met: part 2 of 3",
    ]
    first, last = ([line[:4] for line in each["messages"].splitlines()] for each in parts[::2])
    assert (first[0], first[-1]) == ("[1] ", "[10]") and (last[0], last[-1]) == ("[17]", "[20]")


def test_each_episode_has_the_goods_of_its_task_alone(model: Model) -> None:
    model.answers = [completion(YES)]
    taskset = tasks(model)
    envs = [taskset.env(task, 0) for task in (taskset.held_out(1)[0], next(taskset.train(0)))]
    own = [env._task.instructions.split()[2] for env in envs]

    async def main() -> list[list[Turn]]:
        return await asyncio.gather(
            *(play(env, *[call("price", f"tea {number}") for number in range(4)]) for env in envs)
        )

    for number, turns in zip(own, asyncio.run(main()), strict=True):
        found = [
            place for place, turn in enumerate(turns[1:]) if turn.messages[0].content.isdigit()
        ]
        assert found == [int(number)]


def test_it_keeps_the_contract_and_has_both_domains_in_turn(model: Model) -> None:
    model.answers = [completion(NO)]
    both = tasks(model, "all")
    check_env(both, episodes=4, max_turns=6)
    held_out = both.held_out(100)
    assert [task.env for task in held_out] == ["vita:delivery", "vita:instore"] * 2
    assert both.name == "vita:all" and len(both.tools) == 2
    stop = Message("assistant", fake_vita.STOP)
    *_, end = asyncio.run(play(both.env(held_out[1], 0), stop))
    assert end.rewards == {"rubrics": 0.0}, "the policy may end it, and is judged"


def test_the_judge_of_both_domains_has_one_budget(model: Model) -> None:
    model.answers = [completion(YES, tokens=50_000)]
    both = tasks(model, "all", judge_tokens=60_000)
    delivery, instore = both.held_out(2)
    stop = Message("assistant", fake_vita.STOP)
    *_, end = asyncio.run(play(both.env(delivery, 0), stop))
    assert end.rewards == {"rubrics": 1.0}
    with pytest.raises(EnvError, match=r"the judge's budget is .* 60000 tokens"):
        asyncio.run(play(both.env(instore, 0), stop))


def test_a_model_plays_the_user_and_not_again_after_a_resume(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    said = ("<think>Tea?</think>\nTea, please.", "Go on.", fake_vita.STOP)
    model.answers = [*map(completion, said), completion(YES)]
    taskset = tasks(model, user=model.url, user_model="any", user_temperature=0.5)
    task = taskset.held_out(1)[0]

    async def main() -> Turn:
        env = taskset.env(task, 0)
        assert isinstance(env, Resumable)
        begin = await env.begin()
        assert begin.messages[1] == Message("user", "Tea, please.")
        await env.step(call("order", "tea 0"))
        assert (await env.step(DONE)).messages == (Message("user", "Go on."),)
        resumed = taskset.env(task, 0)
        state = env.snapshot()
        assert state is not None
        await resumed.resume(state)
        assert json.loads(resumed.snapshot()) == json.loads(state)
        again = await resumed.step(call("order", "tea 0"))
        assert again.messages == (Message("tool", "order 2"),), "the first order was repeated"
        end: Turn = await resumed.step(DONE)
        env.close()
        resumed.close()
        return end

    assert asyncio.run(main()).rewards == {"rubrics": 1.0}
    users = model.asked[:3]
    assert all(body["model"] == "any" and body["temperature"] == 0.5 for body in users)
    assert [message["role"] for message in users[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert "customer 0" in users[0]["messages"][0]["content"]
    assert set(model.keys) == {"Bearer secret"}


def test_a_user_without_an_answer_fails_the_episode(model: Model) -> None:
    model.answers = [(500, b"{}"), completion("x" * (1 << 20)), completion("<think>Tea.</think> ")]
    taskset = tasks(model, user=model.url)
    for says in (
        "gave no answer: HTTP 500",
        "gave no answer: .*at most 1048576",
        "returned no text: .*Check that it is a chat model",
    ):
        with pytest.raises(EnvError, match=says):
            asyncio.run(play(taskset.env(taskset.held_out(1)[0], 0)))


@pytest.mark.parametrize(
    ("env", "options", "says"),
    [
        ("vita:delivery", {}, "task.env vita:delivery needs a judge: give the URL"),
        ("vita:delivery", {"judge": "gpt"}, "task.judge must be the URL of an endpoint"),
        ("vita:delivery", {"user": "file:///x"}, "task.user must be the URL of an endpoint"),
        ("vita:delivery", {"user": "http://[::1"}, "task.user must be the URL of an endpoint"),
        ("vita:delivery", {"user": "http://a b/v1"}, "task.user must be the URL of an endpoint"),
        ("vita:delivery", {"user": "http://a:99999999"}, "task.user must be the URL of an endpo"),
        ("vita:instor", {"judge": "http://127.0.0.1:1"}, "one of delivery, instore, all; got"),
        ("tau2:retail@gpt", {"user": "http://127.0.0.1:1"}, "both name a model for the user"),
        ("retail", {"user": "http://127.0.0.1:1"}, "task.user is an option of tau2"),
    ],
)
def test_wrong_options_are_refused(env: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_taskset(make_task(env, **options))
