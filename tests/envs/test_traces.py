"""Test `traces`: an expert's conversations, patches of wrong steps, and returns that end there."""

import asyncio
import json
from base64 import b64encode
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.cli.test_run import quiet
from tests.support.groups import TASK
from tests.support.tiny_runs import tiny_run
from tests.techniques.test_retry import context
from unstale.cli import session
from unstale.config import ConfigError, make_task
from unstale.config.options import override
from unstale.durability.journal import Journal
from unstale.envs import Image, Message, ToolCall, Turn
from unstale.envs.registry import build_taskset
from unstale.pictures import numbers_in
from unstale.records import ContextPiece, Group, Sampled, ScoredTrajectory, Trajectory
from unstale.research.envs.traces import TraceTasks, score_step
from unstale.research.techniques.step_groups import StepGroups, StepGroupsConfig
from unstale.testing import check_env
from unstale.testing.pictures import draw_digit, save_vision_model

TOOL = {"type": "function", "function": {"name": "press", "parameters": {}}}


def pressed(key: str) -> Message:
    return Message("assistant", "", (ToolCall("press", {"key": key}),))


def step(key: str) -> list[dict[str, Any]]:
    call = {"function": {"name": "press", "arguments": {"key": key}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{key} is down"},
    ]


def conversation(number: int = 0) -> dict[str, Any]:
    """Return a row: an expert presses a, b and c, then says that it is done."""
    opening = {"role": "user", "content": f"press keys, number {number}"}
    steps = [each for key in "abc" for each in step(key)]
    end = {"role": "assistant", "content": "all done"}
    return {"messages": [opening, *steps, end], "tools": [TOOL]}


def tasks(folder: Path, *rows: Any, **options: Any) -> TraceTasks:
    file = folder / "traces.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows or [conversation()]))
    made = build_taskset(make_task(f"traces:{file}", **{"held_out_share": 0.0, **options}))
    assert isinstance(made, TraceTasks)
    return made


def play(made: TraceTasks, *replies: Message) -> list[Turn]:
    async def episode() -> list[Turn]:
        env = made.env(next(iter(made.train(0))), 0)
        turns = [await env.begin()]
        for reply in replies:
            turns.append(await env.step(reply))
        return turns

    return asyncio.run(episode())


END = Message("assistant", " all  done ")
A, B, C = map(pressed, "abc")


def test_the_experts_own_replies_are_a_success(tmp_path: Path) -> None:
    begin, *turns = play(tasks(tmp_path), A, B, C, END)
    assert begin.messages[0].content == "press keys, number 0"
    assert [turn.messages[0].content for turn in turns[:3]] == [
        "a is down",
        "b is down",
        "c is down",
    ]
    assert [turn.reward for turn in turns] == [1, 1, 1, 1] and turns[-1].done
    assert turns[-1].rewards == {"success": 1}
    assert turns[-1].facts == {"progress": 1, "patches": 0, "semi_online": 1}


def test_a_wrong_reply_is_patched_with_the_experts_step(tmp_path: Path) -> None:
    *_, patched, third, last = play(tasks(tmp_path), A, pressed("x"), C, END)
    assert patched.reward == 0.5, "the right tool"
    (shown,) = patched.messages
    assert shown.role == "user" and '["press", {"key": "b"}]' in shown.content
    assert "b is down" in shown.content
    assert third.reward == last.reward == 1 and last.rewards == {"success": 0}
    assert last.facts == {"progress": 0.25, "patches": 1, "semi_online": 0.125}


def test_an_episode_ends_at_the_first_wrong_reply_after_its_patches(tmp_path: Path) -> None:
    wrong = Message("assistant", "no")
    turns = play(tasks(tmp_path), wrong, wrong, wrong)
    assert [turn.done for turn in turns] == [False, False, False, True]
    assert [turn.reward for turn in turns[1:]] == [0, 0, 0] and turns[-1].facts["patches"] == 3
    assert play(tasks(tmp_path, patches=0), wrong)[-1].done


class Keyboard:
    """The true environment of `conversation()`: a wrong key changes nothing."""

    most = 6
    """Largest number of replies."""

    def __init__(self) -> None:
        self.left, self.replies = ["a", "b", "c"], 0

    def step(self, reply: Message) -> float | None:
        """Return the success at the end, else None."""
        self.replies += 1
        if not reply.tool_calls:
            return float(not self.left)
        if self.left and reply.tool_calls[0].arguments["key"] == self.left[0]:
            self.left.pop(0)
        return 0.0 if self.replies == self.most else None


def online_success(chance: float) -> float:
    """Return the success of a policy that is right with this chance, over all of its episodes."""
    total, open_episodes = 0.0, [(1.0, ())]
    while open_episodes:
        p, rights = open_episodes.pop()
        for right, q in ((True, chance), (False, 1 - chance)):
            env, ended = Keyboard(), None
            for each in (*rights, right):
                expert = pressed(env.left[0]) if env.left else END
                ended = env.step(expert if each else pressed("x"))
            if ended is None:
                open_episodes.append((p * q, (*rights, right)))
            else:
                total += p * q * ended
    return total


def semi_online(made: TraceTasks, chance: float) -> tuple[float, float]:
    """Return the mean of `semi_online` and of the success on the recording, over all episodes."""
    mean, success = 0.0, 0.0
    for rights in product((True, False), repeat=4):
        said = [
            expert if right else pressed("x")
            for expert, right in zip((A, B, C, END), rights, strict=True)
        ]
        turns = play(made, *said[: 1 + _last(rights)])
        p = prod(chance if right else 1 - chance for right in rights)
        mean += p * turns[-1].facts["semi_online"]
        success += p * turns[-1].rewards["success"]
    return mean, success


def _last(rights: Sequence[bool]) -> int:
    """Return the index of the reply that ends an episode on the recording: the third wrong one."""
    wrong = [place for place, right in enumerate(rights) if not right]
    return wrong[2] if len(wrong) > 2 else len(rights) - 1


def test_the_semi_online_score_is_nearer_to_the_true_success_and_not_equal(tmp_path: Path) -> None:
    """The true environment forgives wrong keys, which the recording cannot know."""
    made = tasks(tmp_path)
    rows = []
    for chance in (0.3, 0.5, 0.7, 0.9):
        score, success = semi_online(made, chance)
        rows.append((chance, score, success, online_success(chance)))
        assert success == pytest.approx(chance**4)
        progress = sum(chance**n for n in range(1, 5)) / 4
        assert score == pytest.approx((progress + chance**4) / 2)
    assert rows[1][1:] == pytest.approx((0.1484, 0.0625, 0.3438), abs=1e-4)
    assert rows[3][1:] == pytest.approx((0.7149, 0.6561, 0.9842), abs=1e-4)
    scores, true = [row[1] for row in rows], [row[3] for row in rows]
    assert scores == sorted(scores) and true == sorted(true), "both order the policies alike"
    assert all(success < score < online for _, score, success, online in rows)


def test_traces_keep_the_contract_of_environments(tmp_path: Path) -> None:
    made = tasks(tmp_path, *map(conversation, range(40)), held_out_share=0.3)
    check_env(made)
    task = made.held_out(1)[0]
    assert made.tools_of(task) == [TOOL] and made.text(task).startswith("press keys")
    assert [each.role for each in made.demonstration(task)][-2:] == ["tool", "assistant"]


def screen(data: bytes | str, words: str) -> dict[str, Any]:
    url = data if isinstance(data, str) else f"data:image/png;base64,{b64encode(data).decode()}"
    parts = [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": parts}


def tap(x: float, y: float) -> Message:
    return Message("assistant", "", (ToolCall("tap", {"at": [x, y], "long": False}),))


def screens(first: bytes | str, second: bytes | str) -> dict[str, Any]:
    """Return a row: an expert sees a screen, taps, sees another one, and is done."""
    arguments = {"at": [100, 20], "long": False}
    call = {"function": {"name": "tap", "arguments": arguments}}
    replies = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    end = {"role": "assistant", "content": "done"}
    tool = {"type": "function", "function": {"name": "tap", "parameters": {}}}
    messages = [screen(first, "Open it. Screen: "), *replies, screen(second, "Now: "), end]
    return {"messages": messages, "tools": [tool]}


def test_screens_are_shown_also_in_patches_and_taps_may_be_near(tmp_path: Path) -> None:
    first, second = (draw_digit(digit, Random(digit)) for digit in (1, 2))
    (tmp_path / "second.png").write_bytes(second)
    made = tasks(tmp_path, screens(first, "second.png"), tolerance=5)
    begin, seen, _ = play(made, tap(103, 16), Message("assistant", "done"))
    assert begin.messages[0].images == (Image(first, len("Open it. Screen: ")),)
    assert seen.reward == 1 and seen.messages[0].images == (Image(second, len("Now: ")),)
    _, patched, _ = play(made, tap(106, 20), Message("assistant", "done"))
    (shown,) = patched.messages
    assert patched.reward == 0.5 and shown.content.endswith("\nNow: ")
    assert shown.images == (Image(second, len(shown.content)),)
    task = next(iter(made.train(0)))
    assert [bool(each.images) for each in made.demonstration(task)] == [True, False, True, False]
    assert made.text(task) == "Open it. Screen: "


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (tap(100.0, 20), 1),
        (tap(100, True), 0.5),
        (Message("assistant", "", (ToolCall("tap", {"at": [100, 20]}),)), 0.5),
        (Message("assistant", "", (ToolCall("tap", {"at": [100, 20, 1], "long": False}),)), 0.5),
        (Message("assistant", "", (ToolCall("tap", {"at": [100, 20], "long": 0}),)), 0.5),
        (pressed("a"), 0),
    ],
)
def test_only_numbers_may_be_near(reply: Message, score: float) -> None:
    assert score_step(reply, tap(100, 20), tolerance=1) == score


@pytest.mark.parametrize("url", ["none.png", "data:image/png;base64,?", "data:text/plain,a"])
def test_a_missing_screen_is_named(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"traces.jsonl, line 1: .*(no picture|not a data URL)"):
        tasks(tmp_path, screens(url, url))


@pytest.mark.costly
@pytest.mark.usefixtures("forked_children")
def test_a_policy_that_sees_is_trained_on_screens_with_step_and_episode_advantages(
    tmp_path: Path,
) -> None:
    save_vision_model("qwen3_vl", tmp_path / "model", num_hidden_layers=1)
    pair = [draw_digit(digit, Random(digit)) for digit in (1, 2)]
    file = tmp_path / "traces.jsonl"
    said = [{"role": "assistant", "content": digit} for digit in "12"]
    row = {"messages": [screen(pair[0], "First "), said[0], screen(pair[1], "Next "), said[1]]}
    file.write_text(f"{json.dumps(row)}\n")
    task = make_task(f"traces:{file}", held_out_share=0.0)
    plain = tiny_run(tmp_path / "model", tmp_path, max_steps=2, task=task)
    chosen = {"techniques": "step_groups", "step_groups.rule": "two_level"}
    config = override(plain, {**chosen, "step_groups.cut_below": 1.0})
    run = session.train(config, console=quiet())
    assert {row["old_logps/exact_share"] for row in run.metrics} == {1.0}
    with Journal.read(run.folder) as journal:
        seen = [each.trajectory for each in journal.trajectories()]
    assert {len([*numbers_in(each.tokens)]) for each in seen} == {2}, "both screens"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": "hi"}], "begin with a prompt, and have a reply"),
        ([{"role": "assistant", "content": "hi"}], "begin with a prompt, and have a reply"),
        ([{"role": "user", "content": "hi"}, *step("a")[:1], *step("b")], "follow each other"),
    ],
)
def test_other_rows_are_refused_by_their_place(
    tmp_path: Path, messages: Sequence[Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"traces.jsonl, line 1: .*{problem}"):
        tasks(tmp_path, {"messages": messages})


def returns(rewards: Sequence[float], **options: Any) -> tuple[float, ...]:
    """Return the turn advantages of an episode beside one whose turns have the reward 0."""

    def ended(episode: int, rewards: Sequence[float]) -> Trajectory:
        pieces = [
            piece
            for turn in range(len(rewards))
            for piece in (ContextPiece((2, turn)), Sampled((5,), (-0.5,), 0))
        ]
        return Trajectory(tuple(pieces), {}, "done", TASK, 0, episode, tuple(rewards))

    pair = [ended(1, rewards), ended(2, [0.0] * len(rewards))]
    settings: dict[str, Any] = {"rule": "two_level", "discount": 0.5, "std": False, **options}
    found = StepGroups(StepGroupsConfig(**settings)).recredit(
        [Group(TASK, tuple(pair))], [ScoredTrajectory(each, (0.0,)) for each in pair], context()
    )
    return tuple(2 * each for each in found[0].advantage)


def test_no_return_crosses_a_patch() -> None:
    """Without the cut the first step would be paid for what the expert's step led to."""
    assert returns([1, 0, 1, 1], cut_below=1) == (1, 0, 1.5, 1)
    assert returns([1, 0, 1, 1]) == (1.375, 0.75, 1.5, 1)
    assert returns([1, 0.5, 1, 1], cut_below=1) == (1.25, 0.5, 1.5, 1)
