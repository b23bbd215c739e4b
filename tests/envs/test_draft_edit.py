"""Test drafts and edits: only the edit is rewarded, and both turns are trained."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.groups import TASK, made
from unstale.algorithms.advantages import grpo
from unstale.config import ConfigError
from unstale.config.tasks import make_task
from unstale.envs import Env, Message, ToolCall, Turn
from unstale.envs.draft_edit import DraftEdit, change, with_mistakes
from unstale.envs.registry import build_taskset
from unstale.records import Group, collate
from unstale.testing import check_env

REQUEST = "Check it, and reply again."


def length(reply: str, row: dict) -> float:
    """Return the reward of a reply: its number of words."""
    return float(len(reply.split()))


def played(env: Env, replies: Sequence[Message]) -> list[Turn]:
    async def play() -> list[Turn]:
        turns = [await env.begin()]  # type: ignore[misc]
        for reply in replies:
            turns.append(await env.step(reply))  # type: ignore[misc]
        return turns

    return asyncio.run(play())


def said(*texts: str) -> list[Message]:
    return [Message("assistant", text) for text in texts]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(40)))
    return f"dataset:{path}"


def test_only_the_edit_is_rewarded_and_the_draft_is_a_fact(rows: str) -> None:
    options = {"reward": f"{__name__}:length", "edit_request": REQUEST}
    for extra, facts in (
        ({}, {}),
        ({"score_drafts": True}, {"draft_reward": 1.0, "edit_gain": 2.0}),
    ):
        tasks = build_taskset(make_task(rows, **options, **extra))
        task = next(iter(tasks.train(0)))
        opening, asked, last = played(tasks.env(task, 0), said("one", "one two three"))
        assert opening.messages[0].content.startswith("Say")
        assert asked == Turn((Message("user", REQUEST),))
        assert last.done and last.rewards == {"reward": 3.0} and last.facts == facts
        check_env(tasks)
    plain = build_taskset(make_task(rows, reward=options["reward"]))
    assert played(plain.env(task, 0), said("one"))[-1].rewards == {"reward": 1.0}
    with pytest.raises(ConfigError, match=r"task\.score_drafts needs task\.edit_request"):
        make_task(rows, reward=options["reward"], score_drafts=True)


def test_changes_are_made_in_the_draft_and_all_else_stays(rows: str) -> None:
    options = {"reward": f"{__name__}:length", "edit_request": REQUEST, "edits": "in_place"}
    tasks = build_taskset(make_task(rows, **options, score_drafts=True))
    task = next(iter(tasks.train(0)))
    changes = "I check.\ntwo => 2 and 3\none => gone\n4=>\nfour => 4"
    _, asked, last = played(tasks.env(task, 0), said("one, two one 4", changes))
    assert asked.messages[0].content.startswith(REQUEST + "\nWrite each change on a line")
    assert last.rewards == {"reward": 5.0}, "one, 2 and 3 one"
    assert last.facts == {"edits": 2, "edits_missed": 2, "draft_reward": 4, "edit_gain": 1}
    assert played(tasks.env(task, 0), said("one", "No change."))[-1].rewards == {"reward": 1.0}
    check_env(tasks)
    with pytest.raises(ConfigError, match=r"task\.edits needs task\.edit_request"):
        make_task(rows, reward=options["reward"], edits="in_place")


@pytest.mark.parametrize(
    ("text", "always"),
    [
        ("They buy 12 pens for $5 each.\n12 * 5 = 60\nSo they pay 60 dollars.", True),
        ("7", True),
        ("a a a a", False),
        ("a => b\nb => a", False),
        ("", False),
    ],
)
def test_the_changes_undo_all_mistakes(text: str, *, always: bool) -> None:
    for seed in range(40):
        for count in (1, 3):
            draft, edits = with_mistakes(text, Random(seed), count)
            assert change(draft, "\n".join(edits)) == (text, len(edits), 0)
            if always and count == 1:
                assert len(edits) == 1 and draft != text


def test_no_change_undoes_a_mistake_into_another_one() -> None:
    for seed in range(40):
        assert len(with_mistakes("7", Random(seed), 2)[1]) == 1
        draft, edits = with_mistakes("add 3 and 4", Random(seed), 2)
        pairs = zip(["add", "3", "and", "4"], draft.split(), strict=True)
        assert len(edits) == sum(right != wrong for right, wrong in pairs)


def test_a_puzzle_may_have_a_draft() -> None:
    tasks = build_taskset(
        make_task("synthesis", size=9, held_out=9, edit_request=REQUEST, score_drafts=True)
    )
    task = next(iter(tasks.train(0)))
    answer = tasks.data_of(task).answer  # type: ignore[attr-defined]
    last = played(tasks.env(task, 0), said(answer, "nothing"))[-1]
    assert last.rewards == {"success": 0.0}
    assert last.facts["draft_reward"] == 1 and last.facts["edit_gain"] == -1


class Tool:
    """An environment that answers tool calls and rewards the first reply without one."""

    async def begin(self) -> Turn:
        return Turn((Message("user", "?"),))

    async def step(self, reply: Message) -> Turn:
        if reply.tool_calls:
            return Turn((Message("tool", "4"),))
        return Turn((), done=True, rewards={"reward": 1.0})


def test_a_tool_call_is_no_draft_and_later_drafts_are_not_scored() -> None:
    call = Message("assistant", "", (ToolCall("add", {}),))
    env = DraftEdit(Tool, REQUEST, score_draft=True)
    turns = played(env, [call, *said("4"), call, *said("4")])
    assert [turn.messages[0].role for turn in turns[:-1]] == ["user", "tool", "user", "tool"]
    assert turns[2].messages[0].content == REQUEST
    assert turns[-1].done and turns[-1].facts == {}


def success(*, seeds: int = 12, steps: int = 30) -> Tensor:
    """Return the chance of success, `[seeds]`, of a policy of drafts and edits with 5 words.

    An edit succeeds if it repeats the draft and the draft is word 3. Both learn from the advantage
    that the batch has for their turn.
    """
    noise = torch.Generator().manual_seed(0)
    draft, edit = torch.zeros(seeds, 5), torch.zeros(seeds, 5, 5)
    for _ in range(steps):
        first = torch.multinomial(draft.softmax(1), 8, replacement=True, generator=noise)
        given = edit.gather(1, first[..., None].expand(-1, -1, 5))
        second = torch.multinomial(given.softmax(-1).reshape(-1, 5), 1, generator=noise)
        second = second.reshape(seeds, 8)
        reward = ((first == 3) & (second == 3)).float()
        groups = [
            Group(
                TASK,
                tuple(
                    made(float(reward[s, i]), turns=((9, int(first[s, i])), (9, int(second[s, i]))))
                    for i in range(8)
                ),
            )
            for s in range(seeds)
        ]
        batch = collate(grpo(groups))
        advantage = batch.advantage[batch.sampled].reshape(seeds, 8, 2)
        assert torch.equal(advantage[..., 0], advantage[..., 1])
        score = one_hot(second, 5) - given.softmax(-1)
        change = advantage[..., 1, None] * score / 8
        edit = edit.scatter_add(1, first[..., None].expand_as(change), 4 * change)
        score = one_hot(first, 5) - draft.softmax(1)[:, None]
        draft = draft + 4 * (advantage[..., :1] * score).mean(1)
    return draft.softmax(1)[:, 3] * edit.softmax(-1)[:, 3, 3]


def test_the_reward_of_the_edit_teaches_the_draft() -> None:
    """Without a gradient of the draft, success would stay below 1 / 5, its chance of word 3."""
    assert success().mean() > 0.6
