"""Promises: an interrupted reply continues from the same tokens under the next version, as a second piece of the same
turn; limits end episodes; a failed environment is begun again with the same seed, then reported, and never hides an
engine's death; every piece is announced the moment it arrives."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from afterimage.config import EngineConfig, RolloutConfig
from afterimage.engines import EngineDied, SamplingParams
from afterimage.engines.scripted import ScriptedEngine
from afterimage.envs import EnvError, Message, Turn
from afterimage.rollout import Rollout, Speaker, TooManyFailures, derive_seed, describe, examine
from afterimage.trajectory import Failure, Given, Group, Handout, Open, Sampled, Task, Trajectory

END = ord(".")
TASK = Task("toy", "train", 1)


class LetterChat:
    """One token per letter; a full stop ends a reply."""

    stop_tokens = (END,)

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(map(ord, messages[0].content))

    def following(self, messages: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        return tuple(map(ord, ("" if ended else ".") + messages[0].content))

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", "".join(map(chr, tokens)))


class Env:
    def __init__(self, script: list[Turn | Exception], heard: list[str]) -> None:
        self.script, self.heard = script, heard

    async def begin(self) -> Turn:
        return await self.step(Message("assistant", ""))

    async def step(self, reply: Message) -> Turn:
        self.heard.append(reply.content)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Tasks:
    """Each new environment plays the next script."""

    name = "toy"
    tools = ()

    def __init__(self, *scripts: list[Turn | Exception]) -> None:
        self.scripts, self.heard, self.seeds = list(scripts), [], []

    def train(self, seed: int) -> Any: ...

    def held_out(self, count: int) -> Any: ...

    def env(self, task: Task, seed: int) -> Env:
        self.seeds.append(seed)
        return Env(self.scripts.pop(0), self.heard)


def says(text: str) -> Turn:
    return Turn((Message("user", text),))


def over(reward: float = 1.0, **facts: float) -> Turn:
    return Turn((), done=True, rewards={"r": reward}, facts=facts)


async def awake(engine: ScriptedEngine, version: int = 0) -> ScriptedEngine:
    await engine.start()
    await engine.load({}, version=version)
    await engine.resume()
    return engine


def play(
    tasks: Tasks,
    say: Callable[[Sequence[int], SamplingParams], Sequence[int]] = lambda tokens, params: list(map(ord, "ab.")),
    **rooms: Any,
) -> tuple[Trajectory | Failure, list[Open]]:
    arrived: list[Open] = []

    async def main() -> Trajectory | Failure:
        engine = await awake(ScriptedEngine(say))
        speaker = Speaker(engine, LetterChat(), EngineConfig(max_reply_tokens=8, **rooms.pop("engine", {})))
        rollout = Rollout(speaker, tasks, RolloutConfig(**rooms), arrived=arrived.append)
        return await rollout.episode(TASK, env_seed=7, noise_seed=8)

    return asyncio.run(main()), arrived


def test_an_episode_is_pieces_in_the_order_they_were_said() -> None:
    tasks = Tasks([says("hi"), says("go on"), over(0.5, calls=2)])
    outcome, arrived = play(tasks)
    assert isinstance(outcome, Trajectory)
    kinds = [(type(piece).__name__, "".join(map(chr, piece.tokens))) for piece in outcome.pieces]
    assert kinds == [("Given", "hi"), ("Sampled", "ab."), ("Given", "go on"), ("Sampled", "ab.")]
    assert (outcome.reward, outcome.stop, outcome.num_turns, outcome.facts["calls"]) == (0.5, "done", 2, 2)
    assert tasks.heard == ["", "ab.", "ab."]
    assert [(item.start, "".join(map(chr, item.tokens))) for item in arrived] == [(2, "hiab."), (10, "hiab.go onab.")]


def test_a_cut_off_reply_is_closed_before_the_answer() -> None:
    tasks = Tasks([says("hi"), says("yes"), over()])
    outcome, _ = play(tasks, lambda tokens, params: [ord("x")] * params.max_tokens)
    assert isinstance(outcome, Trajectory)
    assert "".join(map(chr, outcome.tokens)) == "hi" + "x" * 8 + ".yes" + "x" * 8


def test_turn_and_context_limits_end_an_episode_without_reward() -> None:
    by_turns, _ = play(Tasks([says("hi")] + [says("more")] * 9), max_turns=3)
    assert isinstance(by_turns, Trajectory)
    assert (by_turns.stop, by_turns.num_turns, by_turns.reward) == ("max_turns", 3, 0.0)
    by_room, _ = play(Tasks([says("hi" * 4)] + [says("more")] * 9), engine={"max_context": 16})
    assert isinstance(by_room, Trajectory)
    assert by_room.stop == "max_tokens" and by_room.reward == 0.0


def test_an_interrupted_reply_continues_from_its_own_tokens_under_the_next_version() -> None:
    script = list(map(ord, "abcdef."))
    asked: list[tuple[str, int]] = []
    fourth = asyncio.Event()

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        asked.append(("".join(map(chr, tokens)), params.max_tokens))
        return script[len(tokens) - 2 :]

    async def slow(tokens: Sequence[int], params: SamplingParams) -> None:
        if len(tokens) == 2 + 3:
            fourth.set()
            if engine.version == 4:
                await asyncio.Event().wait()

    engine = ScriptedEngine(say, token_delay=slow)

    async def main() -> Trajectory | Failure:
        await awake(engine, version=4)
        speaker = Speaker(engine, LetterChat(), EngineConfig(max_reply_tokens=8))
        rollout = Rollout(speaker, Tasks([says("hi"), over()]), RolloutConfig())
        async with asyncio.TaskGroup() as group:
            episode = group.create_task(rollout.episode(TASK, env_seed=1, noise_seed=2))
            await fourth.wait()
            await engine.interrupt()
            await engine.load({}, version=5)
            await engine.resume()
        return episode.result()

    outcome = asyncio.run(main())
    assert isinstance(outcome, Trajectory)
    assert [(piece.version, "".join(map(chr, piece.tokens))) for piece in outcome.sampled] == [(4, "abc"), (5, "def.")]
    assert outcome.num_turns == 1
    assert asked == [("hi", 8), ("hiabc", 5)]


def test_a_failed_environment_is_begun_again_with_its_seed() -> None:
    tasks = Tasks([says("hi"), EnvError("the shop burnt down")], [says("hi"), over()])
    outcome, _ = play(tasks, retries=1)
    assert isinstance(outcome, Trajectory)
    assert tasks.seeds == [7, 7]


def test_what_fails_again_is_reported_with_its_place() -> None:
    outcome, _ = play(Tasks([says("hi"), says("so"), KeyError("sku")], [ZeroDivisionError("odd")]), retries=1)
    assert outcome == Failure(TASK, "begin", "ZeroDivisionError: odd")
    outcome, _ = play(Tasks([says("hi"), says("so"), KeyError("sku")]), retries=0)
    assert outcome == Failure(TASK, "step 2", "KeyError: 'sku'", turns=2, sampled_tokens=6)


def test_a_hanging_environment_is_a_failed_episode() -> None:
    class Hangs(Tasks):
        def env(self, task: Task, seed: int) -> Any:
            class Hanging:
                async def begin(self) -> Turn:
                    return await asyncio.get_running_loop().create_future()

            return Hanging()

    outcome, _ = play(Hangs(), retries=0, timeout_s=0.01)
    assert isinstance(outcome, Failure) and outcome.error.startswith("TimeoutError")


def test_a_cancellation_inside_an_environment_fails_its_episode_alone() -> None:
    class Leaky(Tasks):
        def env(self, task: Task, seed: int) -> Any:
            class Env:
                async def begin(self) -> Turn:
                    inner = asyncio.ensure_future(asyncio.sleep(60))
                    inner.cancel()
                    await inner
                    raise AssertionError("unreachable")

            return Env()

    outcome, _ = play(Leaky(), retries=0)
    assert isinstance(outcome, Failure) and outcome.error.startswith("CancelledError")


def test_a_prompt_that_leaves_no_room_ends_the_run_with_the_knob_to_turn() -> None:
    with pytest.raises(ValueError, match=r"has 30 tokens, engine.max_context is 20.*raise engine.max_context"):
        play(Tasks([says("x" * 30), over()]), engine={"max_context": 20})


def test_an_engines_death_is_no_failed_episode() -> None:
    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        raise EngineDied("out of memory")

    with pytest.raises(EngineDied, match="out of memory"):
        play(Tasks([says("hi"), over()]), say, retries=3)


def test_too_many_failures_are_the_machinerys() -> None:
    scripts: list[list[Turn | Exception]] = [[EnvError("gone")] if i % 2 else [says("hi"), over()] for i in range(200)]

    async def main() -> None:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        rollout = Rollout(
            Speaker(engine, LetterChat(), EngineConfig()),
            Tasks(*scripts),
            RolloutConfig(retries=0, max_failed_share=0.4),
        )
        for _ in range(200):
            await rollout.episode(TASK, env_seed=0, noise_seed=0)

    with pytest.raises(TooManyFailures, match=r"10 of the last 20 episodes failed.*in begin: EnvError: gone"):
        asyncio.run(main())


def test_siblings_share_the_environments_seed_and_not_the_noise() -> None:
    seeds: set[int] = set()

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        seeds.add(params.seed)
        return [END]

    tasks = Tasks(*[[says("hi"), over()] for _ in range(4)])

    async def main() -> Group:
        engine = await awake(ScriptedEngine(say))
        rollout = Rollout(Speaker(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig())
        return await rollout.group(Handout(0, TASK, 0, 0), size=4)

    group = asyncio.run(main())
    assert len(group.trajectories) == 4 and len(seeds) == 4 and len(set(tasks.seeds)) == 1
    assert len({trajectory.episode for trajectory in group.trajectories}) == 4


def test_what_groups_were_like() -> None:
    good = Trajectory((Given((1, 2)), Sampled((3,), (-0.1,), 0)), {"r": 1.0}, "done", TASK, 0, facts={"calls": 2.0})
    bad = Trajectory((Given((1,)), Sampled((3, 4), (-0.1, -0.1), 0)), {"r": 0.0}, "max_turns", TASK, 0)
    numbers = describe([Group(TASK, (good, bad)), Group(TASK, (bad,), (Failure(TASK, "begin", "x"),))])
    assert numbers["rollout/success"] == pytest.approx(1 / 3)
    assert numbers["rollout/failed"] == 1 and numbers["rollout/sampled_tokens"] == 5
    assert numbers["rollout/tokens_mean"] == 3 and numbers["rollout/uniform_groups_share"] == 0.5
    assert numbers["rollout/cut_short_share"] == pytest.approx(2 / 3)
    assert numbers["env/calls"] == pytest.approx(2 / 3)


def test_an_examination_grades_every_task_and_tells_how_far_it_is() -> None:
    tasks = Tasks([says("hi"), over(1.0)], [says("hi"), over(0.0)], [EnvError("x")])
    told: list[tuple[int, int]] = []

    async def main() -> list[bool]:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        rollout = Rollout(Speaker(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig(retries=0))
        ask = [Task("toy", "held-out", index) for index in range(3)]
        return await examine(rollout, ask, seed=0, progress=lambda text, *, done=0, total=0: told.append((done, total)))

    assert asyncio.run(main()) == [True, False, False]
    assert sorted(told) == [(1, 3), (2, 3), (3, 3)]


def test_seeds_differ_in_every_part() -> None:
    seeds = {derive_seed(a, b, c) for a in range(5) for b in ("x", "y") for c in range(5)}
    assert len(seeds) == 50 and all(0 <= seed < 2**63 for seed in seeds)
