"""Test `retry`: reflections, forks with advice, its removal, advantages, and a lock of 8 replies.

The lock has 4 words at each position, and the reward is 1 if all are right. A policy that is never
right learns nothing from its own episodes.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.test_run import quiet
from tests.support.groups import TASK
from tests.support.tiny_runs import EVEN_WORDS, save_tiny, tiny_run
from tests.techniques.test_tree_run import require_plain
from unstale.cli import session
from unstale.config import ConfigError, make_task
from unstale.config.options import override
from unstale.durability.journal import Journal, check
from unstale.lint import check as lint
from unstale.model.policy import Policy
from unstale.recipes import RECIPES
from unstale.records import (
    ContextPiece,
    Edit,
    Failure,
    Fork,
    Group,
    Piece,
    Placed,
    Provenance,
    Sampled,
    Trajectory,
    collate,
    has_loss,
    replies,
    walk,
)
from unstale.research.techniques.retry import (
    Retry,
    RetryConfig,
    read_reflection,
    without_advice,
)
from unstale.rollout.texts import PolicyTexts
from unstale.techniques.hooks import CreditContext

POSITIONS, WORDS, ROOTS, STEPS, SEEDS = 8, 4, 4, 150, 12
ASKED = WORDS
"""The token with which the environment asks for each word."""
ADVISED = (7, 7)
"""The tokens of advice."""


def context() -> CreditContext:
    return CreditContext(0.0, 0, lambda task: task.key)


def ended(
    episode: int, words: Sequence[int], fork: Fork | None = None, *before: Piece
) -> Trajectory:
    """Return an episode with `words` as its last replies. `before` are the pieces before these."""
    pieces: list[Piece] = [*before]
    for number, word in enumerate(words):
        if number or not before:
            pieces.append(ContextPiece((ASKED,)))
        pieces.append(Sampled((word,), (-0.5,), version=0))
    said = [token for piece in pieces for token in piece.tokens if token < WORDS]
    rewards = {"reward": float(said == [0] * POSITIONS)}
    return Trajectory(tuple(pieces), rewards, "done", TASK, 0, episode, fork=fork)


class Scripted:
    """Texts of a policy that names the first wrong reply, or writes a given text."""

    def __init__(self, text: str = "") -> None:
        self._text = text

    def prompt(self, instructions: str, **texts: str) -> str:
        return instructions + texts["attempt"]

    def written(self, text: Trajectory) -> str:
        assert text.fork
        lines = [line for line in text.fork.note.splitlines() if line.startswith("[step")]
        wrong = next((i for i, line in enumerate(lines, 1) if not line.endswith("] 0")), 0)
        return self._text or json.dumps({"cause": "x", "advice": "use  0", "step": wrong})

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def words(self, episode: Trajectory) -> str:
        return "open the lock"

    def encode(self, text: str) -> tuple[int, ...]:
        assert text == "Note: use 0\n"
        return ADVISED

    async def correction(self, episode: Trajectory) -> tuple[int, tuple[int, ...]] | None:
        said = [tokens for _, tokens in replies(episode.pieces)]
        wrong = next((i for i, tokens in enumerate(said) if tokens != (0,)), None)
        return None if wrong is None else (replies(episode.pieces)[wrong][0], (0,))


def written(episode: int, fork: Fork) -> Trajectory:
    """Return a text that the policy wrote."""
    assert fork.writes and fork.at == 0
    pieces = (ContextPiece((ASKED,)), Sampled((8, 9), (-0.5, -0.5), version=0))
    return Trajectory(pieces, {}, "done", TASK, 0, episode, fork=fork)


def texts_about(results: Sequence[Any], first: int = 100, **options: Any) -> list[Trajectory]:
    retry = Retry(RetryConfig(**{"number": ROOTS, **options}))
    asked = asyncio.run(retry.forks([results], Scripted()))
    return [written(first + i, fork) for i, fork in enumerate(asked)]


def reflect(results: Sequence[Trajectory | Failure], text: str = "", **options: Any) -> Any:
    retry = Retry(RetryConfig(**{"number": ROOTS, **options}))
    rounds = [results, texts_about(results, **options)]
    assert asyncio.run(retry.forks([*rounds, []], Scripted(text))) == ()
    return asyncio.run(retry.forks(rounds, Scripted(text)))


RIGHT = ended(1, [0] * POSITIONS)
WRONG = ended(2, [0, 0, 1, 0, 0, 0, 0, 0])
HINT = Placed(ADVISED, Provenance.FORCED)


def test_failed_attempts_are_tried_again_from_the_named_reply_with_advice() -> None:
    other = ended(3, [2] * POSITIONS)
    forks = reflect([RIGHT, WRONG, Failure(TASK, "begin", "broken"), other], number=3)
    assert forks == [Fork(2, 5, (HINT,)), Fork(3, 1, (HINT,)), Fork(2, 5, (HINT,))]
    assert reflect([RIGHT]) == []
    assert Retry(RetryConfig(number=3)).roots(8) == 5


@pytest.mark.parametrize(
    "text",
    [
        "I cannot say",
        '{"advice": "use 0", "step": 9}',
        '{"advice": "use 0", "step": 0}',
        '{"advice": " ", "step": 1}',
        '{"advice": "use 0", "step": true}',
        '{"advice": "use 0"}',
        "[1, 2]",
    ],
)
def test_advice_that_cannot_be_read_gives_no_retry(text: str) -> None:
    assert reflect([WRONG], text) == []


def test_advice_is_read_from_the_object_in_a_text() -> None:
    text = 'Well: {"step": 3, "advice": "try\\n again", "cause": "?"} so.'
    assert read_reflection(text, WRONG) == (5, "try again")


def retried(episode: int, words: Sequence[int]) -> Trajectory:
    """Return a retry of `WRONG` from its third reply, with `words` from there."""
    fork = Fork(WRONG.episode, 5, (HINT,))
    before = fork.prefix_of(WRONG.pieces)
    return ended(episode, words, fork, *before)


def test_advice_is_removed_and_the_text_after_it_is_rewritten() -> None:
    retry = without_advice(retried(9, [0] * 6))
    assert retry.tokens == RIGHT.tokens
    rewritten = [piece for piece in retry.pieces if isinstance(piece, Placed)]
    assert len(rewritten) == 6 and not retry.sampled
    for piece in rewritten:
        assert piece.provenance == Provenance.REWRITTEN and piece.source_logp == (-0.5,)
        assert piece.edit == Edit(5, 5, ADVISED)
    assert [piece.provenance for piece in retry.pieces[:4:2]] == [Provenance.ENVIRONMENT] * 2
    assert [piece.provenance for piece in retry.pieces[1:5:2]] == [Provenance.SHARED] * 2


def test_replies_before_a_retry_have_no_loss_in_either_attempt() -> None:
    good, bad = retried(9, [0] * 6), retried(10, [3] * 6)
    group = Group(TASK, (WRONG, good, bad))
    seen = context()
    first, second, third = Retry(RetryConfig(number=2)).estimate([group], seen)
    assert first.advantage == (*[0.0] * 5, *[pytest.approx(-1 / 3)] * 11)
    assert second.advantage == (1.0,) * 16, "the advantage of a success is 1"
    assert all(each == 0 for _, each in zip(range(5, 16, 2), third.advantage[5::2], strict=True))
    assert seen.metrics["retry/success_share"] == 0.5
    assert seen.metrics["retry/episode_share"] == pytest.approx(2 / 3)
    batch = collate([first, second, third], groups=[group], placed="anchor")
    assert batch.placed is not None and int(batch.placed.trained.sum()) == 12
    masked = collate([first, second, third], groups=[group], placed="mask")
    assert int(masked.trained.sum()) == POSITIONS, "only the first attempt has a loss"


def test_positive_advantages_below_a_success_are_amplified() -> None:
    half = replace(WRONG, rewards={"reward": 0.5}, episode=4)
    (first, second) = Retry(RetryConfig(number=1)).estimate([Group(TASK, (WRONG, half))], context())
    assert first.advantage[-1] == -0.25 and second.advantage[-1] == 0.75


def open_lock(seed: int, placed: Any, **options: Any) -> tuple[float, int]:
    """Train a policy of independent replies. Return its success, and the sampled tokens."""
    random = np.random.default_rng(seed)
    retry = Retry(RetryConfig(number=ROOTS, **options))
    logits, tokens = np.zeros((POSITIONS, WORDS)), 0
    for step in range(STEPS):
        weights = np.exp(logits - logits.max(1, keepdims=True))
        policy = weights / weights.sum(1, keepdims=True)
        advised = 0.1 * policy + 0.9 * np.eye(WORDS)[[0] * POSITIONS]
        first = step * 2 * ROOTS

        def say(chances: np.ndarray, start: int = 0) -> list[int]:
            drawn = random.random(POSITIONS)
            return [int((chances[i].cumsum() < drawn[i]).sum()) for i in range(start, POSITIONS)]

        episodes = [ended(first + i, say(policy)) for i in range(ROOTS)]
        for fork in reflect(episodes, **options):
            before = fork.prefix_of(episodes[fork.parent - first].pieces)
            words = say(advised, (fork.at - 1) // 2)
            episodes.append(ended(first + len(episodes), words, fork, *before))
        tokens += sum(each.num_sampled for each in episodes)
        gradient = np.zeros_like(logits)
        for item in retry.estimate([Group(TASK, tuple(episodes))], context()):
            for start, piece, _ in walk(item.trajectory.pieces):
                if isinstance(piece, Sampled) or has_loss(piece, placed):
                    (token,), advantage = piece.tokens, item.advantage[start]
                    gradient[start // 2] -= advantage * policy[start // 2]
                    gradient[start // 2, token] += advantage
        logits += 2.0 * gradient / len(episodes)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return float((weights / weights.sum(1, keepdims=True))[:, 0].prod()), tokens


@pytest.mark.parametrize(
    ("placed", "train_shared", "expected", "tokens"),
    [
        ("anchor", True, 0.963, 5900),
        ("mask", True, 0.0, 9400),
        ("anchor", False, 0.963, 5800),
    ],
)
@pytest.mark.costly(cases=1)
def test_retries_open_the_lock_if_they_are_trained_on(
    placed: str, train_shared: bool, expected: float, tokens: int
) -> None:
    """Without a loss of retries, first attempts never succeed."""
    runs = [open_lock(seed, placed, train_shared=train_shared) for seed in range(SEEDS)]
    success, sampled = np.mean(runs, axis=0)
    assert success == pytest.approx(expected, abs=0.01)
    assert sampled == pytest.approx(tokens, rel=0.02)


def advise(self: PolicyTexts, text: Trajectory) -> str:
    return '{"cause": "?", "advice": "w4 w6", "step": 2}'


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("placed", ["guided", "anchor"])
def test_a_run_records_retries_with_their_advice_and_trains_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: str, forked_children: None
) -> None:
    monkeypatch.setattr(PolicyTexts, "written", advise)
    save_tiny(tmp_path / "model")
    base = Policy.load(tmp_path / "model", dtype="float32")
    config = tiny_run(tmp_path / "model", tmp_path, max_steps=3)
    schedule = replace(config.schedule, group_size=4)
    values = {"techniques": "retry", "objective.placed": placed, "retry.train_texts": True}
    config = override(replace(config, schedule=schedule), values)
    run = session.train(config, console=quiet())
    assert all(row["retry/episode_share"] > 0 for row in run.metrics)
    assert min(row["trainer/grad_norm"] for row in run.metrics) > 0
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        forks = [each.trajectory for each in reader.trajectories() if each.trajectory.fork]
    written = [each for each in forks if each.fork and each.fork.writes]
    retries = [each for each in forks if each not in written]
    assert len(written) >= len(retries) > 0
    for each in written:
        assert each.num_turns == 1 and each.rewards == {} and "[step 2]" in each.fork.note
    for each in retries:
        (hint,) = (piece for piece in each.pieces if isinstance(piece, Placed))
        assert hint.provenance == Provenance.FORCED and each.fork and each.fork.text == (hint,)
        assert without_advice(each).num_sampled == 0
    with torch.inference_mode():
        assert sum(require_plain(base, each) for each in retries)


def test_a_run_trains_on_right_replies_of_demonstrations(
    tmp_path: Path, forked_children: None
) -> None:
    save_tiny(tmp_path / "model")
    config = tiny_run(tmp_path / "model", tmp_path, max_steps=3)
    schedule = replace(config.schedule, group_size=4)
    values = {"techniques": "retry", "retry.rule": "correct", "objective.placed": "anchor"}
    run = session.train(override(replace(config, schedule=schedule), values), console=quiet())
    assert min(row["retry/episode_share"] for row in run.metrics) >= 0.3
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        forks = [each.trajectory for each in reader.trajectories() if each.trajectory.fork]
    policy = Policy.load(tmp_path / "model", dtype="float32")
    for each in forks:
        (right,) = each.fork.text if each.fork else ()
        assert isinstance(right, Placed) and right.provenance == Provenance.FOREIGN
        assert policy.tokenizer.decode(list(right.tokens[:-1])).strip() == EVEN_WORDS


@pytest.mark.costly
def test_the_recipe_hard_tasks_trains_as_shipped(tmp_path: Path, forked_children: None) -> None:
    """Only without the waits of its simulated tools."""
    changes = {"runs": str(tmp_path), "max_steps": 1, "eval.tasks": 0, "task.latency_s": 0.0}
    run = session.train(override(RECIPES["hard_tasks"](), changes), console=quiet())
    (row,) = (each for each in run.metrics if "trainer/grad_norm" in each)
    assert row["trainer/grad_norm"] > 0 and row["retry/episode_share"] > 0
    assert row["retry/gain_mean"] > 0.5, "corrected attempts succeed"


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({"techniques": "retry", "retry.rule": "correct"}, "correction.. or demonstration.."),
        ({"techniques": "hints"}, "demonstration.. or data_of.."),
        ({"techniques": "majority"}, "answer_of.."),
    ],
)
def test_a_run_is_refused_at_its_start_if_its_tasks_lack_what_a_technique_needs(
    values: dict, needed: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model")
    tasks = {"task.env": "tests.support.toy:ToyTasks"}
    schedule = {"schedule.group_size": 4, "objective.placed": "anchor"}
    config = override(tiny_run(tmp_path / "model", tmp_path), {**tasks, **schedule, **values})
    assert re.search(f"and {needed} of its tasks for", lint(config).facts["not read"])
    with pytest.raises(ConfigError, match=f"needs {needed} of the task set, and toy has none"):
        session.train(config, console=quiet())


@pytest.mark.parametrize(
    ("env", "values", "refused"),
    [
        ("calculator", {"techniques": "retry", "retry.rule": "correct"}, True),
        ("retail", {"techniques": "retry", "retry.rule": "correct"}, False),
        ("desks", {"techniques": "hints"}, False),
        ("calculator", {"techniques": "majority"}, False),
        ("desks", {"techniques": "majority"}, True),
    ],
)
def test_the_linter_knows_what_the_environments_of_the_package_have(
    env: str, values: dict, refused: bool
) -> None:
    config = override(
        replace(RECIPES["retail"](), task=make_task(env)), {"objective.placed": "anchor", **values}
    )
    (name, *_) = values.values()
    found = [each.wrong for each in lint(config).refusals]
    assert found == ([f"{name} at task.env {env}"] if refused else [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"objective.placed": "mask"}, "needs objective.placed = anchor or guided, got mask"),
        ({"retry.number": 8}, "retry.number must be below schedule.group_size .8., got 8"),
        ({"techniques": "retry step_groups"}, "retry cannot be used with step_groups"),
        ({"retry.rule": "correct", "objective.placed": "guided"}, "objective.placed = anchor, got"),
        ({"retry.rule": "clean", "retry.error": "("}, "retry.error '.' is no regular expression"),
        ({"retry.rule": "plan", "retry.steps": 2}, "retry.steps"),
        ({"objective.loss_aggregation": "sequence_mean"}, "the technique retry needs another"),
    ],
)
def test_what_would_teach_nothing_or_count_wrongly_is_refused(values: dict, message: str) -> None:
    plain = {
        "techniques": "retry",
        "objective.placed": "anchor",
        "advantage.estimator": "grpo",
        "schedule.group_size": 8,
    }
    with pytest.raises(ConfigError, match=message):
        override(RECIPES["calculator"](), {**plain, **values})
