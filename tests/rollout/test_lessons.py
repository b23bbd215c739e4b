"""Test lessons: the teacher and the text of each sequence, from the data of its task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_runs import save_tiny
from unstale.config import ConfigError, RunConfig
from unstale.envs import ListedTasks, Message
from unstale.envs.chat import Chat
from unstale.model.loading import load_tokenizer
from unstale.records import (
    Batch,
    ContextPiece,
    Group,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.rollout.lessons import Lessons, build_lessons
from unstale.techniques.distil import DistilConfig
from unstale.trainer.teachers import as_taught

NAMED = "low=models/a high=models/b"


class Rows(ListedTasks):
    """Tasks with two fields of data."""

    name = "rows"
    tools: tuple[Any, ...] = ()

    def __init__(self) -> None:
        rows = [
            {"kind": kind, "answer": f"w{3 + i} <|im_end|>"}
            for i, kind in enumerate(("low", "high"))
        ]
        self.data = {"train": rows, "held_out": rows}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny(folder)
    return Chat(load_tokenizer(folder), ())


def played(chat: Chat, prompts: Sequence[Sequence[int]] = ()) -> tuple[Batch, list[Group]]:
    """Return a batch of one episode of each task, and its groups."""
    prompts = prompts or [chat.encode_prompt([Message("user", "w9")])] * 2
    groups = []
    for number, prompt in enumerate(prompts):
        pieces = (
            ContextPiece(tuple(prompt)),
            Sampled((7, 1), (-0.1, -0.2), 0),
            ContextPiece((2, 8, 1, 2)),
            Sampled((5,), (-0.3,), 0),
        )
        task = Task("rows", "train", number)
        item = Trajectory(pieces, {}, "done", task, 0, episode=number)
        groups.append(Group(task, (item,), number=number))
    scored = [ScoredTrajectory(group.trajectories[0], (0.0,)) for group in groups]
    return collate(scored, groups=groups), groups


def lessons(chat: Chat, **options: Any) -> Lessons:
    return Lessons(DistilConfig(**options), Rows(), chat)


def test_a_field_chooses_the_teacher(chat: Chat) -> None:
    batch, groups = played(chat)
    found = lessons(chat, teacher=NAMED, domain="kind")(batch, groups).lessons
    kinds = [Rows().data_of(group.task)["kind"] for group in groups]
    assert [each.teacher for each in found] == [("low", "high").index(kind) for kind in kinds]
    assert not any(each.tokens for each in found)


def test_the_teacher_reads_the_text_at_the_end_of_the_prompt(chat: Chat) -> None:
    """Tokens of later turns are not moved among each other, and no text ends the message."""
    batch, groups = played(chat)
    taught, where = as_taught(lessons(chat, teacher="self", context=" {answer}")(batch, groups))
    for i, ((start, end), group) in enumerate(zip(taught.spans(), groups, strict=True)):
        answer = Rows().data_of(group.task)["answer"]
        prompt = chat.encode_prompt([Message("user", f"w9 {answer}")])
        own = batch.tokens[slice(*batch.spans()[i])].tolist()
        tail = own[len(chat.encode_prompt([Message("user", "w9")])) :]
        assert taught.tokens[start:end].tolist() == [*prompt, *tail]
        assert taught.tokens[start:end][where[start:end]].tolist() == [7, 1, 5]


def test_fields_and_teachers_that_do_not_exist_are_named(chat: Chat) -> None:
    batch, groups = played(chat)
    with pytest.raises(ConfigError, match=r"no field 'solution'\. It has env, kind, answer"):
        lessons(chat, teacher="self", context="{solution}")(batch, groups)
    with pytest.raises(ConfigError, match="no teacher for env = 'rows' of task rows/train/"):
        lessons(chat, teacher=NAMED)(batch, groups)
    with pytest.raises(ConfigError, match=r"fields of the task's data, got \{answer\.x\}"):
        lessons(chat, teacher="self", context="{answer.x}")
    with pytest.raises(ConfigError, match=r"distil.context '{': "):
        lessons(chat, teacher="self", context="{")
    unended, groups = played(chat, [(2, 9)] * 2)
    with pytest.raises(ConfigError, match="writes no end token after the last message"):
        lessons(chat, teacher="self", context="w3")(unended, groups)


def test_only_runs_whose_teacher_depends_on_the_task_have_lessons(chat: Chat) -> None:
    plain = RunConfig(recipe="")
    one = RunConfig(
        recipe="",
        techniques="distil",
        technique_options={"distil": DistilConfig(teacher="models/a")},
    )
    assert build_lessons(plain, Rows(), chat) is None
    assert build_lessons(one, Rows(), chat) is None


def test_the_first_task_is_checked_before_the_run(chat: Chat) -> None:
    config = RunConfig(
        recipe="",
        techniques="distil",
        technique_options={"distil": DistilConfig(teacher=NAMED, domain="subject")},
    )
    with pytest.raises(ConfigError, match=r"distil\.domain: the data of task .* 'subject'"):
        build_lessons(config, Rows(), chat)


def test_lessons_survive_a_choice_of_sequences(chat: Chat, tmp_path: Path) -> None:
    batch, groups = played(chat)
    given = lessons(chat, teacher="self", context="w4")(batch, groups)
    chosen, _ = given.select([1])
    assert chosen.lessons == given.lessons[1:]
