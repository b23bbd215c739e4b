"""Test the limit of turns of a technique: its reminders and extensions, also on a resume."""

import asyncio
from collections.abc import Sequence

from tests.rollout.test_episode import LetterChat, Tasks, awake, over, says
from unstale.config import EngineConfig, RolloutConfig
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.records import (
    ContextPiece,
    EpisodeRecord,
    Group,
    GroupRequest,
    Piece,
    Task,
    Trajectory,
    TurnLimit,
)
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator

TASK = Task("toy", "train", 1)


def play(
    limit: TurnLimit | None,
    script: list[Turn],
    replies: Sequence[str] = ("ab.",),
    *,
    max_turns: int = 10,
    past: Sequence[Piece] = (),
) -> Trajectory:
    """Run an episode in a group with a limit. Replies come in turn, and the last one repeats."""
    chat = LetterChat()
    said = [len(past) // 2]

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        reply = replies[min(said[0], len(replies) - 1)]
        said[0] += 1
        return list(map(ord, reply))

    async def main() -> Group:
        engine = await awake(ScriptedEngine(say))
        generator = Generator(engine, chat, EngineConfig(max_completion_tokens=8, max_context=1000))
        rollout = Rollout(generator, Tasks(script), RolloutConfig(max_turns=max_turns))
        record = EpisodeRecord(0, tuple(past), None)
        request = GroupRequest(
            0, TASK, 0, 0, past=(record,) if past else (), sizes=(1,), turn_limit=limit
        )
        return await rollout.group(request, size=1)

    group = asyncio.run(main())
    assert group.turn_limit == limit
    (trajectory,) = group.trajectories
    return trajectory


def test_an_evaluation_has_the_limit_of_its_rollout() -> None:
    async def main() -> Trajectory:
        engine = await awake(ScriptedEngine(lambda tokens, params: list(map(ord, "ab."))))
        config = EngineConfig(max_completion_tokens=8, max_context=1000)
        rollout = Rollout(
            Generator(engine, LetterChat(), config), Tasks(talk()), RolloutConfig(max_turns=10)
        )
        rollout.turn_limit = TurnLimit(2, remind=1)
        outcome = await rollout.episode(TASK, env_seed=0, noise_seed=0)
        assert isinstance(outcome, Trajectory)
        return outcome

    result = asyncio.run(main())
    assert (result.stop, result.num_turns) == ("max_turns", 2)
    assert answers(result) == ["more\n\nYou have 1 reply left.", "more"]


def answers(trajectory: Trajectory) -> list[str]:
    """Return the texts of the environment after the first."""
    given = [piece for piece in trajectory.pieces if isinstance(piece, ContextPiece)]
    return ["".join(map(chr, piece.tokens)) for piece in given[1:]]


def talk(count: int = 12, reward: float = 0.0) -> list[Turn]:
    return [says("hi")] + [Turn((Message("user", "more"),), reward=reward) for _ in range(count)]


def test_an_episode_ends_at_its_limit_and_is_reminded_before() -> None:
    result = play(TurnLimit(4, remind=2), talk())
    assert (result.stop, result.num_turns, result.reward) == ("max_turns", 4, 0.0)
    assert answers(result) == [
        "more",
        "more\n\nYou have 2 replies left.",
        "more\n\nYou have 1 reply left.",
        "more",
    ]
    plain = play(None, talk())
    assert plain.num_turns == 10 and set(answers(plain)) == {"more"}


def test_a_limit_above_that_of_all_episodes_has_no_effect_but_reminders() -> None:
    result = play(TurnLimit(20, remind=1), talk(), max_turns=3)
    assert result.num_turns == 3 and answers(result)[1] == "more\n\nYou have 1 reply left."


def test_an_episode_that_ends_before_has_its_reward() -> None:
    result = play(TurnLimit(3, remind=3), [*talk(1), over()])
    assert (result.stop, result.reward) == ("done", 1.0)
    assert answers(result) == ["more\n\nYou have 2 replies left."]


def test_a_request_in_the_last_reply_gives_more_turns_as_often_as_allowed() -> None:
    limit = TurnLimit(2, remind=1, extend=2, extensions=1, request="go")
    asking = play(limit, talk(), ["a.", "go.", "go."])
    assert asking.num_turns == 4
    assert answers(asking) == [
        "more\n\nYou have 1 reply left. To get 2 more, write go in your last reply.",
        "more",
        "more\n\nYou have 1 reply left.",
        "more",
    ]
    assert play(limit, talk(), ["go.", "a."]).num_turns == 2  # asked too early
    narrow = play(limit, talk(), ["a.", "go."], max_turns=3)
    assert narrow.num_turns == 3 and "To get 1 more" in answers(narrow)[0]


def test_without_a_request_a_reward_of_a_turn_gives_more() -> None:
    limit = TurnLimit(2, extend=3, extensions=2)
    assert play(limit, talk(reward=0.1)).num_turns == 8
    assert play(limit, talk()).num_turns == 2
    script = talk()
    script[1] = Turn((Message("user", "more"),), reward=0.5)
    assert play(limit, script).num_turns == 5  # none since the first extension


def test_a_resumed_episode_has_the_same_limit_reminders_and_extensions() -> None:
    limit = TurnLimit(2, remind=2, extend=2, extensions=1, request="go")
    replies = ["a.", "go.", "c.", "d."]
    whole = play(limit, talk(), replies)
    assert whole.num_turns == 4
    for count in (2, 4, 6):
        assert play(limit, talk(), replies, past=whole.pieces[:count]).pieces == whole.pieces
