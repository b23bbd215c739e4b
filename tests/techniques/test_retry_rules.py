"""Test the rules `plan`, `correct` and `clean` of `retry`, on the lock of `test_retry.py`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.groups import TASK
from tests.techniques.test_retry import (
    POSITIONS,
    SEEDS,
    STEPS,
    WORDS,
    WRONG,
    Scripted,
    context,
    ended,
    texts_about,
)
from unstale.envs import Message, ToolCall
from unstale.records import (
    ContextPiece,
    Edit,
    Fork,
    Group,
    Piece,
    Placed,
    Provenance,
    Sampled,
    Trajectory,
    collate,
    has_loss,
    walk,
)
from unstale.research.techniques.retry import PLANNED_BY, Retry, RetryConfig

ROOTS = 4


def made(rule: Any, **options: Any) -> Retry:
    return Retry(RetryConfig(**{"rule": rule, "number": ROOTS, **options}))


def forks(retry: Retry, *rounds: Sequence[Any], texts: Any = None) -> Sequence[Fork | None]:
    return asyncio.run(retry.forks(rounds, texts or Scripted()))


def test_a_plan_is_written_from_every_attempt_and_read_by_the_next_one() -> None:
    good = ended(1, [0] * POSITIONS)
    plans = texts_about([good, WRONG], rule="plan", number=2)
    assert [each.fork and each.fork.parent for each in plans] == [1, 2]
    retry = made("plan", number=2)
    starts = forks(retry, [good, WRONG], plans, texts=Scripted("1. open  \n"))
    assert starts == [
        Fork(100, 0, note=f"{PLANNED_BY}\n1. open"),
        Fork(101, 0, note=starts[1].note),
    ]  # type: ignore[union-attr]
    assert forks(retry, [good, WRONG], plans, starts) == ()
    assert forks(retry, [good, WRONG], plans, texts=Scripted(" ")) == [], (
        "an empty plan is not used"
    )


def test_attempts_with_a_plan_are_compared_with_each_other_and_pay_its_writer() -> None:
    plans = texts_about([WRONG, WRONG], rule="plan", number=2)
    note = f"{PLANNED_BY}\nopen"
    good = ended(7, [0] * POSITIONS, Fork(100, 0, note=note))
    bad = ended(8, [1] * POSITIONS, Fork(101, 0, note=note))
    group = Group(TASK, (WRONG, good, bad), texts=tuple(plans))
    seen = context()
    *attempts, first, second = made("plan", train_texts=True).estimate([group], seen)
    assert [each.advantage[-1] for each in attempts] == [0, 0.5, -0.5]
    assert (first.advantage, second.advantage) == ((0.5,), (-0.5,))
    assert seen.metrics["retry/gain_mean"] == 0.5 and seen.metrics["retry/gain_error"] == 0.5
    batch = collate([*attempts, first, second], groups=[group])
    assert not batch.placed and int(batch.trained.sum()) == 3 * POSITIONS + 4
    assert len(made("plan").estimate([group], context())) == 3, "plans are not trained on"


def corrected(parent: Trajectory, episode: int, words: Sequence[int], fork: Fork) -> Trajectory:
    return ended(episode, words, fork, *fork.prefix_of(parent.pieces))


def test_a_right_reply_takes_the_place_of_the_first_wrong_one_again_and_again() -> None:
    right = Placed((0,), Provenance.FOREIGN)
    retry = made("correct", steps=2)
    (first,) = forks(retry, [WRONG, ended(1, [0] * POSITIONS)])
    assert first == Fork(2, 5, (right,))
    again = _then(WRONG, 3, [0, 2, 0, 0, 0], first)
    (second,) = forks(retry, [WRONG], [again])
    assert second == Fork(3, 9, (right,))
    assert forks(retry, [WRONG], [again], [again]) == (), "at most 2 replies"
    last = _then(again, 4, [0, 0, 0], second)
    assert forks(made("correct", steps=0), [WRONG], [again], [last]) == []
    group = Group(TASK, (WRONG, again, last))
    whole, part, end = retry.estimate([group], context())
    good, bad = pytest.approx(2 / 3), pytest.approx(-1 / 3)
    assert whole.advantage == (*[good] * 5, *[bad] * 11)
    assert part.advantage == (*[good] * 9, *[bad] * 7)
    assert end.advantage == (good,) * 16
    batch = collate([whole, part, end], groups=[group], placed="anchor")
    assert batch.placed and batch.placed.trained.nonzero().squeeze(1).tolist() == [16 + 5, 32 + 9]
    assert int(batch.sampled.sum()) == 8 + 5 + 3, "a shared reply has one loss"


def _then(parent: Trajectory, episode: int, words: Sequence[int], fork: Fork | None) -> Trajectory:
    """Return an episode that goes on after the placed reply of a fork with further replies."""
    assert fork
    pieces: list[Piece] = [*fork.prefix_of(parent.pieces), ContextPiece((WORDS,))]
    return ended(episode, words, fork, *pieces)


def open_lock(seed: int, retry: Retry, texts: Any = None) -> float:
    """Train a policy of independent replies on corrected attempts. Return its success."""
    random = np.random.default_rng(seed)
    logits = np.zeros((POSITIONS, WORDS))
    for step in range(STEPS):
        weights = np.exp(logits - logits.max(1, keepdims=True))
        policy = weights / weights.sum(1, keepdims=True)

        def say(start: int, policy: np.ndarray = policy) -> list[int]:
            drawn = random.random(POSITIONS)
            return [int((policy[i].cumsum() < drawn[i]).sum()) for i in range(start, POSITIONS)]

        first = step * 100
        rounds = [[ended(first + i, say(0)) for i in range(ROOTS)]]
        known = {each.episode: each for each in rounds[0]}
        while starts := forks(retry, *rounds, texts=texts):
            rounds.append([])
            for fork in starts:
                assert fork
                number, done = first + len(known), fork.at // 2 + 1
                parent = known[fork.parent]
                if done < POSITIONS:
                    known[number] = _then(parent, number, say(done), fork)
                else:
                    known[number] = corrected(parent, number, (), fork)
                rounds[-1].append(known[number])
        gradient = np.zeros_like(logits)
        for item in retry.estimate([Group(TASK, tuple(known.values()))], context()):
            for start, piece, _ in walk(item.trajectory.pieces):
                if isinstance(piece, Sampled) or has_loss(piece, "anchor"):
                    (token,), advantage = piece.tokens, item.advantage[start]
                    gradient[start // 2] -= advantage * policy[start // 2]
                    gradient[start // 2, token] += advantage
        logits += 2.0 * gradient / len(known)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return float((weights / weights.sum(1, keepdims=True))[:, 0].prod())


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("steps", "expected"), [(0, 0.965), (1, 0.0)])
def test_corrections_open_the_lock_if_they_go_on_until_the_end(steps: int, expected: float) -> None:
    """One correction cannot help where several replies are wrong."""
    retry = made("correct", steps=steps)
    opened = [open_lock(seed, retry) for seed in range(SEEDS // 2)]
    assert np.mean(opened) == pytest.approx(expected, abs=0.02)


CALL, ERROR, ANSWER, THINK, STOP = 20, 21, 22, 23, 1
"""Tokens: begin of a call, an environment's error and its other answer, thoughts, end of reply."""


class Calls(Scripted):
    """Texts of tokens, of which `CALL` and what follows is a tool call."""

    def text(self, tokens: Sequence[int]) -> str:
        words = {ERROR: "Error: no such thing", ANSWER: "it is done"}
        return " ".join(words.get(token, str(token)) for token in tokens)

    def parse(self, tokens: Sequence[int]) -> Message:
        if CALL not in tokens:
            return Message("assistant", self.text(tokens))
        at = list(tokens).index(CALL)
        call = ToolCall("do", {"with": self.text(tokens[at + 1 :])})
        return Message("assistant", self.text(tokens[:at]), (call,))


def said(*tokens: int) -> Sampled:
    return Sampled(tokens, tuple(-0.1 * token for token in tokens), version=2)


def called(*pieces: Piece, reward: float = 1.0, fork: Fork | None = None) -> Trajectory:
    return Trajectory(pieces, {"reward": reward}, "done", TASK, 0, 9, fork=fork)


PROMPT, FAILED, WORKED = ContextPiece((5, 6)), ContextPiece((ERROR,)), ContextPiece((ANSWER,))
NEW = (THINK, 31, CALL, 2, 3, 4, 5, 7, STOP)


def cleaned(*pieces: Piece, **options: Any) -> Fork | None:
    (*found,) = forks(made("clean", **options), [called(*pieces)], texts=Calls())
    return found[0] if found else None


def test_a_similar_call_replaces_the_one_that_failed_behind_its_thoughts() -> None:
    old = said(THINK, 30, CALL, 2, 3, 4, 5, 6, STOP)
    fork = cleaned(PROMPT, old, FAILED, said(*NEW), WORKED, said(9, STOP))
    taken = (*old.tokens[2:], ERROR, THINK, 31)
    edit = Edit(4, 4, taken)
    logps = tuple(-0.1 * token for token in NEW[2:])
    assert fork == Fork(9, 4, (Placed(NEW[2:], Provenance.REWRITTEN, 2, logps, edit),))
    record = (*PROMPT.tokens, *old.tokens[:2], *NEW[2:])
    sampled = (*PROMPT.tokens, *old.tokens, ERROR, *NEW)
    assert edit.undo(record) == sampled, "the context in which the call was sampled"


def test_another_call_replaces_the_whole_reply() -> None:
    old = said(THINK, 30, CALL, 11, 12, 13, STOP)
    fork = cleaned(PROMPT, old, FAILED, said(*NEW), WORKED)
    assert fork and fork.at == 2 and fork.text[0].tokens == NEW
    assert fork.text[0].edit == Edit(2, 2, (*old.tokens, ERROR))  # type: ignore[union-attr]
    similar = cleaned(PROMPT, old, FAILED, said(*NEW), WORKED, similarity=0.0)
    assert similar and similar.at == 4


def test_an_attempt_without_a_better_call_stays_as_it_is() -> None:
    old = said(CALL, 2, STOP)
    assert cleaned(PROMPT, old, FAILED, said(30, STOP)) is None, "no call in the next reply"
    assert cleaned(PROMPT, old, FAILED, old, FAILED) is None, "all calls failed"
    assert cleaned(PROMPT, old, WORKED, said(9, STOP)) is None, "no call failed"
    third = said(CALL, 2, 9, STOP)
    fork = cleaned(PROMPT, old, FAILED, old, FAILED, third, WORKED)
    assert fork and fork.text[0].tokens == third.tokens, "the first later call that works"


def test_replaced_calls_are_not_replaced_again_and_later_ones_are() -> None:
    old, new = said(CALL, 2, STOP), said(CALL, 2, 9, STOP)
    retry = made("clean", steps=2)
    attempt = called(PROMPT, old, FAILED, new, WORKED, said(30, STOP), reward=0.0)
    (fork,) = forks(retry, [attempt], texts=Calls())
    assert fork
    tail = (FAILED, said(30, STOP), WORKED, old, FAILED, new, WORKED)
    clean = called(*fork.prefix_of(attempt.pieces), *tail, fork=fork)
    (second,) = forks(retry, [attempt], [clean], texts=Calls())
    assert second and second.at > len(PROMPT.tokens) + len(new.tokens)
    assert forks(retry, [attempt], [clean], [clean], texts=Calls()) == ()


def test_the_attempt_with_the_error_is_trained_on_only_before_it() -> None:
    old = said(THINK, 30, CALL, 2, 3, 4, 5, 6, STOP)
    attempt = called(PROMPT, old, FAILED, said(*NEW), WORKED, reward=0.0)
    fork = cleaned(*attempt.pieces)
    assert fork
    clean = Trajectory(
        (*fork.prefix_of(attempt.pieces), WORKED, said(9, STOP)),
        {"reward": 1.0},
        "done",
        TASK,
        0,
        10,
        fork=fork,
    )
    other = Trajectory((PROMPT, said(9, STOP)), {"reward": 0.0}, "done", TASK, 0, 11)
    group = Group(TASK, (attempt, clean, other))
    first, second, third = made("clean").estimate([group], context())
    assert first.advantage == (*[0.5] * 4, *[0.0] * (len(attempt) - 4))
    assert second.advantage == (0.5,) * len(clean) and third.advantage == (-0.5,) * 4
    batch = collate([first, second, third], groups=[group], placed="guided")
    assert batch.placed and int(batch.placed.trained.sum()) == len(NEW) - 2


LAST = said(9, STOP)


def attempted(episode: int, calls: Sequence[int]) -> Trajectory:
    """Return an attempt whose calls have these arguments: 0 works, and others are errors."""
    pieces: list[Piece] = [PROMPT]
    for argument in calls:
        pieces += [said(CALL, argument, STOP), FAILED if argument else WORKED]
    success = float(calls[-1] == 0)
    return Trajectory((*pieces, LAST), {"reward": success}, "done", TASK, 0, episode)


def learn_calls(seed: int, steps: int, *, clean: bool) -> tuple[float, float]:
    """Train a policy of a first call and of one after an error, which is right more often.

    Return the success of evaluations with one call, and with a second one after an error.
    """
    random, retry = np.random.default_rng(seed), made("clean")
    logits = np.array([[0.0] * WORDS, [2.0] + [0.0] * (WORDS - 1)])
    for _ in range(steps):
        policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        attempts = []
        for episode in range(2 * ROOTS):
            first, second = (int(random.choice(WORDS, p=each)) for each in policy)
            attempts.append(attempted(episode, (first, second) if first else (first,)))
        known = {each.episode: each for each in attempts}
        for fork in forks(retry, attempts, texts=Calls()) if clean else ():
            assert fork
            pieces = (*fork.prefix_of(known[fork.parent].pieces), WORKED, LAST)
            child = Trajectory(pieces, {"reward": 1.0}, "done", TASK, 0, len(known), fork=fork)
            known[child.episode] = child
        gradient = np.zeros_like(logits)
        for item in retry.estimate([Group(TASK, tuple(known.values()))], context()):
            tokens = item.trajectory.tokens
            for start, piece, _ in walk(item.trajectory.pieces):
                if piece.tokens[0] == CALL and (
                    isinstance(piece, Sampled) or has_loss(piece, "guided")
                ):
                    argument, after = piece.tokens[1], int(tokens[start - 1] == ERROR)
                    gamma = policy[0, argument] / policy[1, argument]
                    weight = item.advantage[start + 1] * (
                        1 if isinstance(piece, Sampled) else gamma
                    )
                    gradient[after] -= weight * policy[after]
                    gradient[after, argument] += weight
        logits += gradient / len(attempts)
    p, repaired = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[:, 0]
    return float(p), float(p + (1 - p) * repaired)


def test_policies_that_learn_from_replaced_calls_are_evaluated_with_and_without_a_repair() -> None:
    """Without `clean`, episodes whose error was repaired reward it, and first calls stay wrong."""
    runs = {
        clean: np.mean([learn_calls(seed, 60, clean=clean) for seed in range(SEEDS)], axis=0)
        for clean in (True, False)
    }
    assert runs[True] == pytest.approx((0.721, 0.987), abs=0.01)
    assert runs[False] == pytest.approx((0.467, 0.986), abs=0.01)
