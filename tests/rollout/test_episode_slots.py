"""Test segments: who gets the next slot, what an episode may still use, and what it records.

Episodes that wait keep their tokens and versions. Every episode continues, also if others fail or
are cancelled.
"""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tests.rollout.test_episode import LetterChat, Tasks, awake, over, says
from unstale.config import EngineConfig, RolloutConfig
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import EnvError, Message, ToolCall, Turn
from unstale.records import (
    NO_BUDGET,
    ContextPiece,
    EpisodeBudget,
    EpisodeRecord,
    Fork,
    Group,
    GroupRequest,
    Piece,
    Sampled,
    Task,
    Trajectory,
)
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.segments import BudgetUse, EpisodeSlot, EpisodeSlots

TASK = Task("toy", "train", 1)
THREES = EpisodeBudget(context=1000, calls=100, segments=9, segment_tokens=3, segment_calls=100)
"""Segments of three tokens."""


class CallingChat(LetterChat):
    """A chat in which each `c` of a reply is a tool call."""

    def parse(self, tokens: Sequence[int]) -> Message:
        text = "".join(map(chr, tokens))
        return Message("assistant", text, tuple(ToolCall("c", {}) for _ in range(text.count("c"))))


def play(
    budget: EpisodeBudget,
    script: Sequence[Turn | Exception],
    replies: Sequence[str] = ("abcdef.",),
    past: Sequence[Piece] = (),
) -> Trajectory:
    """Run an episode whose replies come in turn, and the last one repeats."""
    (trajectory,) = play_group(budget, script, replies, past).trajectories
    return trajectory


def play_group(
    budget: EpisodeBudget,
    script: Sequence[Turn | Exception],
    replies: Sequence[str] = ("abcdef.",),
    past: Sequence[Piece] = (),
    retries: int = 1,
) -> Group:
    """Run a group of one such episode."""
    said = [piece for piece in past if isinstance(piece, Sampled)]
    spoken = "".join(chr(token) for piece in said for token in piece.tokens)

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """Continue the text of all replies, which the tokens sampled so far begin."""
        text = "".join(map(chr, tokens)).removeprefix("hi").replace("+", "")
        texts = "".join([*replies, *[replies[-1]] * 9])
        assert texts.startswith(text)
        return list(map(ord, texts[len(text) :]))

    async def main() -> Group:
        engine = await awake(ScriptedEngine(say))
        config = EngineConfig(max_completion_tokens=8, max_context=1000)
        generator = Generator(engine, CallingChat(), config)  # type: ignore[arg-type]
        rollout = Rollout(
            generator, Tasks([*script]), RolloutConfig(retries=retries), slots=EpisodeSlots(1)
        )
        past_records = (EpisodeRecord(0, tuple(past), None),) if past else ()
        request = GroupRequest(0, TASK, 0, 0, past=past_records, sizes=(1,), budget=budget)
        return await rollout.group(request, size=1)

    assert not past or spoken
    group = asyncio.run(main())
    assert group.budget == budget
    return group


def sampled(trajectory: Trajectory) -> list[str]:
    return ["".join(map(chr, piece.tokens)) for piece in trajectory.sampled]


def test_the_oldest_waiting_episode_gets_the_next_slot() -> None:
    async def main() -> list[str]:
        slots, log = EpisodeSlots(2), []
        ended = {name: asyncio.Event() for name in "abcd"}

        async def run(name: str, age: tuple[int, int]) -> None:
            async with EpisodeSlot(slots, age, lambda seconds: None) as slot:
                log.append(f"{name} runs")
                await ended[name].wait()
                log.append(f"{name} pauses")
                await slot.pause()
                log.append(f"{name} continues")

        async with asyncio.TaskGroup() as tasks:
            for name, age in [("a", (0, 0)), ("b", (0, 1)), ("c", (2, 0)), ("d", (1, 0))]:
                tasks.create_task(run(name, age))
            await asyncio.sleep(0)
            for name in "abdc":
                ended[name].set()
                for _ in range(5):
                    await asyncio.sleep(0)
        return log

    # a gives its slot to d, which is older than c, and continues when b gives its slot back
    assert asyncio.run(main()) == [
        *("a runs", "b runs", "a pauses", "d runs", "b pauses", "a continues", "b continues"),
        *("c runs", "d pauses", "d continues", "c pauses", "c continues"),
    ]


def test_an_episode_that_is_cancelled_while_it_waits_takes_no_slot() -> None:
    async def main() -> None:
        slots = EpisodeSlots(1)
        async with EpisodeSlot(slots, (0, 0), lambda seconds: None):
            waiting = asyncio.create_task(slots.take((0, 1)))
            other = asyncio.create_task(slots.take((0, 2)))
            await asyncio.sleep(0)
            waiting.cancel()
        await other
        late = asyncio.create_task(slots.take((0, 3)))
        await asyncio.sleep(0)
        slots.give_back()  # the slot is given to `late`, and then `late` is cancelled
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await asyncio.wait_for(slots.take((0, 4)), 1)

    asyncio.run(main())


def test_what_is_left_of_a_budget_by_hand() -> None:
    budget = EpisodeBudget(context=100, calls=9, segments=2, segment_tokens=10, segment_calls=4)
    spent = BudgetUse(budget)
    assert (spent.reply_limit(85), spent.reply_limit(50), spent.stop(50)) == (15, 20, None)
    spent.count(7)
    assert (spent.reply_limit(50), spent.segment) == (13, 1)
    spent.count_calls(4)  # ends the first segment, of which 3 tokens are lost
    assert (spent.reply_limit(50), spent.segment) == (10, 1)
    spent.count(10)
    assert (spent.reply_limit(50), spent.segment, spent.stop(50)) == (0, 2, "max_tokens")
    other = BudgetUse(budget)
    other.count(12)
    other.count_calls(4)
    assert (other.segment, other.stop(50)) == (2, "max_turns")
    third = BudgetUse(budget)
    third.count_calls(9)
    assert (third.segment, third.stop(50), third.stop(100)) == (1, "max_turns", "max_turns")
    assert BudgetUse(budget).stop(100) == "max_tokens"
    assert BudgetUse(EpisodeBudget(reply_tokens=5)).reply_limit(50) == 5
    assert BudgetUse().stop(1 << 40) is None and BudgetUse().facts() == {}


def test_a_fork_has_used_the_budget_of_the_replies_before_it() -> None:
    said = [Sampled(tuple(map(ord, text)), (-0.5,) * len(text), 0) for text in ("cab.", "cc", ".")]
    pieces = [ContextPiece((1, 2)), said[0], ContextPiece((3,)), *said[1:], ContextPiece((4,))]
    prefix = Fork(0, 11).prefix_of(pieces)
    assert not any(isinstance(piece, Sampled) for piece in prefix)
    budget = EpisodeBudget(context=50, calls=3, segments=4, segment_tokens=5, segment_calls=9)
    for begun in (pieces, prefix):
        used = BudgetUse(budget)
        used.replay(begun, CallingChat())  # type: ignore[arg-type]
        assert (used.segment, used.segment_left, used.stop(11)) == (2, 3, "max_turns")


def test_a_reply_continues_in_the_next_segment() -> None:
    result = play(THREES, [says("hi"), Turn((Message("user", "+"),)), over()])
    assert sampled(result) == ["abc", "def", ".", "ab", "cde", "f."]
    assert (result.num_turns, result.stop, result.facts["segments"]) == (2, "done", 5)
    plain = play(NO_BUDGET, [says("hi"), Turn((Message("user", "+"),)), over()])
    assert sampled(plain) == ["abcdef.", "abcdef."] and "segments" not in plain.facts
    assert result.tokens == plain.tokens and result.rewards == plain.rewards


def answers(count: int = 9) -> list[Turn]:
    return [says("hi"), *[Turn((Message("user", "+"),))] * count]


@pytest.mark.parametrize(
    ("budget", "text", "stop"),
    [
        (EpisodeBudget(segments=3, segment_tokens=3, segment_calls=9), "abcdef.ab", "max_tokens"),
        (EpisodeBudget(segments=2, segment_tokens=90, segment_calls=2), "abcdef." * 4, "max_turns"),
        (EpisodeBudget(calls=3, segments=9, segment_tokens=99), "abcdef." * 3, "max_turns"),
        (EpisodeBudget(context=20, segments=9, segment_tokens=4), "abcdef.abcdef.ab", "max_tokens"),
    ],
)
def test_an_episode_ends_at_each_limit(budget: EpisodeBudget, text: str, stop: str) -> None:
    """The environment answers with one token, and each whole reply has one call."""
    result = play(budget, answers())
    assert ("".join(sampled(result)), result.stop, result.rewards) == (text, stop, {})


def test_a_budget_of_replies_shortens_each_of_them() -> None:
    async def main() -> Group:
        engine = await awake(ScriptedEngine(lambda tokens, _: list(map(ord, "abcdef."))))
        config = EngineConfig(max_completion_tokens=8, max_context=1000)
        generator = Generator(engine, CallingChat(), config)  # type: ignore[arg-type]
        script = [says("hi"), *answers(1)[1:], over()]
        rollout = Rollout(generator, Tasks(script), RolloutConfig())
        request = GroupRequest(0, TASK, 0, 0, budget=EpisodeBudget(reply_tokens=4))
        return await rollout.group(request, size=1)

    (trajectory,) = asyncio.run(main()).trajectories
    assert sampled(trajectory) == ["abcd", "abcd"] and trajectory.stop == "cut_reply"
    assert "segments" not in trajectory.facts


def test_a_resumed_episode_has_the_same_segments_and_end() -> None:
    budget = EpisodeBudget(segments=4, segment_tokens=4, segment_calls=2)
    whole = play(budget, answers())
    assert whole.stop == "max_tokens" and whole.facts["segments"] == 4
    for count in range(2, len(whole.pieces)):
        again = play(budget, answers(), past=whole.pieces[:count])
        assert (again.tokens, again.stop, again.facts) == (whole.tokens, whole.stop, whole.facts)


def run_groups(
    script: Callable[[], list[Turn | Exception]], *, slots: int, groups: int, size: int
) -> tuple[list[Group], list[int], int]:
    """Run groups at the same time. Return them, and of each segment the group that ran it.

    The last result is the largest number of replies that were sampled at the same time.
    """
    order: list[int] = []
    running = [0, 0]

    async def slowly(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.sleep(0)

    class Counting(ScriptedEngine):
        async def sample(self, tokens, params):  # type: ignore[no-untyped-def]
            running[0] += 1
            running[1] = max(running)
            order.append(tokens[0])
            try:
                return await super().sample(tokens, params)
            finally:
                running[0] -= 1

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return list(map(ord, "abcdef."[(len(tokens) - 1) % 8 :]))

    class Scripts(Tasks):
        def env(self, task: Task, seed: int) -> object:  # type: ignore[override]
            self.scripts.append([says(chr(task.index)), *script()])
            return super().env(task, seed)

    async def main() -> list[Group]:
        engine = await awake(Counting(say, token_delay=slowly))
        config = EngineConfig(max_completion_tokens=8, max_context=1000)
        generator = Generator(engine, CallingChat(), config)  # type: ignore[arg-type]
        options = RolloutConfig(max_failed_share=1.0)
        rollout = Rollout(generator, Scripts(), options, slots=EpisodeSlots(slots))
        requests = [
            GroupRequest(number, Task("toy", "train", number), 0, number, budget=THREES)
            for number in range(groups)
        ]
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(rollout.group(each, size=size)) for each in requests]
        assert rollout._slots is not None and rollout._slots._free == slots
        return [each.result() for each in made]

    return asyncio.run(main()), order, running[1]


def test_with_one_slot_the_oldest_group_is_preferred_and_all_end() -> None:
    """Each episode has three segments. At the end of one, the oldest other episode has its turn."""
    groups, order, most = run_groups(lambda: [over()], slots=1, groups=3, size=1)
    assert order == [0, 1, 0, 1, 0, 1, 2, 2, 2] and most == 1
    assert [each.facts["segments"] for group in groups for each in group.trajectories] == [3] * 3


def test_slots_limit_the_episodes_that_run_and_failed_ones_give_them_back() -> None:
    good, _, most = run_groups(lambda: [over()], slots=3, groups=5, size=4)
    assert most == 3 and all(len(group.trajectories) == 4 for group in good)
    bad, _, most = run_groups(lambda: [EnvError("broken")], slots=2, groups=3, size=2)
    assert most == 2 and all(len(group.failures) == 2 for group in bad)


def test_later_segments_have_the_versions_that_sampled_them() -> None:
    async def main() -> Trajectory:
        begun = asyncio.Event()

        async def note(tokens: Sequence[int], params: SamplingParams) -> None:
            begun.set()
            await asyncio.sleep(0)

        def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
            return list(map(ord, "abcdef."[len(tokens) - 2 :]))

        engine = await awake(ScriptedEngine(say, logp=-0.5, token_delay=note))
        config = EngineConfig(max_completion_tokens=8, max_context=1000)
        generator = Generator(engine, LetterChat(), config)  # type: ignore[arg-type]
        slots = EpisodeSlots(1)
        rollout = Rollout(generator, Tasks([says("hi"), over()]), RolloutConfig(), slots=slots)
        request = GroupRequest(5, TASK, 0, 0, budget=THREES)
        async with asyncio.TaskGroup() as tasks:
            group = tasks.create_task(rollout.group(request, size=1))
            await begun.wait()
            await slots.take((0, 0))  # waits until the first segment ends
            await engine.interrupt()
            engine._logp = -0.25
            await engine.load({}, version=1)
            await engine.resume()
            assert not group.done()
            slots.give_back()
        (trajectory,) = group.result().trajectories
        return trajectory

    result = asyncio.run(main())
    found = [(piece.version, piece.behavior_logp) for piece in result.sampled]
    assert found == [(0, (-0.5,) * 3), (1, (-0.25,) * 3), (1, (-0.25,))]


def test_waits_for_a_slot_are_counted_apart_from_generation() -> None:
    """One wait before the first segment and one between two segments, each of 0.3 s."""

    async def main() -> dict[str, float]:
        def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
            return list(map(ord, "abcd."[len(tokens) - 2 :]))

        engine = await awake(ScriptedEngine(say))
        config = EngineConfig(max_completion_tokens=8, max_context=1000)
        generator = Generator(engine, LetterChat(), config)  # type: ignore[arg-type]
        slots = EpisodeSlots(1)
        rollout = Rollout(generator, Tasks([says("hi"), over()]), RolloutConfig(), slots=slots)
        await slots.take((0, 0))
        request = GroupRequest(5, TASK, 0, 0, budget=THREES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.group(request, size=1))
            await asyncio.sleep(0.3)
            again = tasks.create_task(slots.take((0, 1)))
            await asyncio.sleep(0)
            slots.give_back()  # to the older `again`
            await again
            slots.give_back()  # to the episode, which runs its first segment
            await slots.take((0, 2))
            await asyncio.sleep(0.3)
            slots.give_back()
        return rollout.wait_times.read("rollout")

    waited = asyncio.run(main())
    assert waited["rollout/slot_wait_s"] >= 0.59
    assert waited["rollout/generation_wait_s"] < 0.2


def test_a_prompt_that_leaves_no_room_for_a_reply_fails_its_episode() -> None:
    group = play_group(EpisodeBudget(context=2, segments=9), answers(), retries=0)
    assert not group.trajectories
    (failure,) = group.failures
    assert "has 2 tokens, and an episode may have 2: no reply fits" in failure.error
