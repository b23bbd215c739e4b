"""Test the episode loop.

An interrupted reply continues with the same tokens under the next version, as a second piece of the
turn. Limits end episodes. A failed environment is retried with the same seed, then reported; a
crashed engine raises. `on_piece` gets every piece at once. A resumed episode continues from its
record token for token; if its environment gives other text, it restarts without counting as failed.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from unstale.config import EngineConfig, RolloutConfig
from unstale.engines import EngineDied, SamplingParams, Stopwatch
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import EnvError, Message, Turn
from unstale.records import (
    UNREPEATED_TEXT,
    ContextPiece,
    EpisodeRecord,
    Failure,
    Fork,
    Group,
    GroupRequest,
    PendingPiece,
    Piece,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.rollout import evaluation
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import FinishedEpisodes, evaluate
from unstale.rollout.failures import TooManyFailures
from unstale.rollout.generator import Generator
from unstale.rollout.metrics import describe
from unstale.rollout.seeds import derive_seed
from unstale.rollout.timeouts import MOST_IN_ROUND, Attempt, run_to_completion

END = ord(".")
TASK = Task("toy", "train", 1)


class LetterChat:
    """A chat with one token per letter. A full stop ends a reply."""

    stop_tokens = (END,)
    longest_token = 4

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(map(ord, messages[0].content))

    def encode_continuation(
        self, messages: Sequence[Message], *, ended: bool, calls: Sequence[object] = ()
    ) -> tuple[int, ...]:
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
    """A task set whose environments play the scripts in order."""

    name = "toy"
    tools = ()

    def __init__(self, *scripts: list[Turn | Exception]) -> None:
        self.scripts, self.heard, self.seeds = list(scripts), [], []

    def train(self, seed: int) -> Any: ...

    def held_out(self, count: int) -> Any: ...

    def env(self, task: Task, seed: int) -> Env:
        self.seeds.append(seed)
        return Env(self.scripts.pop(0), self.heard)


def without_line(outcome: Trajectory | Failure) -> Failure:
    """Return a failure without the line of `Env.step` that raised its error."""
    assert isinstance(outcome, Failure)
    error, _, line = outcome.error.partition(" (")
    assert line.endswith("in step: raise answer)")
    return replace(outcome, error=error)


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
    say: Callable[[Sequence[int], SamplingParams], Sequence[int]] = lambda tokens, params: list(
        map(ord, "ab.")
    ),
    **rooms: Any,
) -> tuple[Trajectory | Failure, list[PendingPiece]]:
    arrived: list[PendingPiece] = []

    async def main() -> Trajectory | Failure:
        engine = await awake(ScriptedEngine(say))
        generator = Generator(
            engine, LetterChat(), EngineConfig(max_completion_tokens=8, **rooms.pop("engine", {}))
        )
        rollout = Rollout(generator, tasks, RolloutConfig(**rooms), on_piece=arrived.append)
        return await rollout.episode(TASK, env_seed=7, noise_seed=8)

    return asyncio.run(main()), arrived


def test_an_episode_is_pieces_in_the_order_they_were_said() -> None:
    tasks = Tasks([says("hi"), says("go on"), over(0.5, calls=2)])
    outcome, arrived = play(tasks)
    assert isinstance(outcome, Trajectory)
    kinds = [(type(piece).__name__, "".join(map(chr, piece.tokens))) for piece in outcome.pieces]
    assert kinds == [
        ("ContextPiece", "hi"),
        ("Sampled", "ab."),
        ("ContextPiece", "go on"),
        ("Sampled", "ab."),
    ]
    assert (outcome.reward, outcome.stop, outcome.num_turns, outcome.facts["calls"]) == (
        0.5,
        "done",
        2,
        2,
    )
    assert tasks.heard == ["", "ab.", "ab."]
    assert [(item.start, "".join(map(chr, item.tokens))) for item in arrived] == [
        (2, "hiab."),
        (10, "hiab.go onab."),
    ]


def test_a_cut_off_reply_is_closed_before_the_answer() -> None:
    tasks = Tasks([says("hi"), says("yes"), over()])
    outcome, _ = play(tasks, lambda tokens, params: [ord("x")] * params.max_tokens)
    assert isinstance(outcome, Trajectory)
    assert "".join(map(chr, outcome.tokens)) == "hi" + "x" * 8 + ".yes" + "x" * 8


def test_truncation_is_a_fact_of_the_reply_also_if_the_environment_ends_the_episode() -> None:
    def letters(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        return [ord("x")] * params.max_tokens

    def share(*outcomes: Trajectory | Failure) -> tuple[float, float, float]:
        group = Group(TASK, tuple(each for each in outcomes if isinstance(each, Trajectory)))
        figures = describe([group])
        names = ("truncated_share", "cut_reply_share", "max_tokens_share")
        return tuple(figures[f"completion/{name}"] for name in names)  # type: ignore[return-value]

    cut, _ = play(Tasks([says("hi"), over(0.0)]), letters)
    assert isinstance(cut, Trajectory) and (cut.stop, cut.rewards) == ("cut_reply", {"r": 0.0})
    assert share(cut) == (1.0, 1.0, 1.0)
    whole, _ = play(Tasks([says("hi"), over()]))
    first, _ = play(
        Tasks([says("hi"), says("so"), over()]),
        lambda tokens, params: letters(tokens, params) if len(tokens) == 2 else [END],
    )
    assert isinstance(whole, Trajectory) and isinstance(first, Trajectory)
    assert (whole.stop, first.stop) == ("done", "done") and "cut_replies" not in whole.facts
    assert share(whole, first) == (0.0, pytest.approx(1 / 3), 0.0)


def test_every_piece_is_recorded_when_an_engine_was_interrupted() -> None:
    """Episodes take turns only after that."""
    number = 3 * MOST_IN_ROUND
    arrived: list[PendingPiece] = []

    begun: list[int] = []

    async def second_token(tokens: Sequence[int], params: SamplingParams) -> None:
        if len(tokens) == len("hi") + 1:
            begun.append(len(tokens))
            await asyncio.Event().wait()

    async def main() -> int:
        script = list(map(ord, "ab."))
        engine = await awake(ScriptedEngine(lambda *_: script, token_delay=second_token))
        tasks = Tasks(*[[says("hi"), over()] for _ in range(number)])
        generator = Generator(engine, LetterChat(), EngineConfig())
        rollout = Rollout(generator, tasks, RolloutConfig(), on_piece=arrived.append)
        playing = [
            asyncio.create_task(rollout.episode(TASK, env_seed=7, noise_seed=each))
            for each in range(number)
        ]
        for _ in range(20 * number):
            await asyncio.sleep(0)
        await engine.interrupt()
        found = len(arrived)
        for each in playing:
            each.cancel()
        await asyncio.wait(playing)
        return found

    assert asyncio.run(main()) == number


def test_turn_and_context_limits_end_an_episode_without_reward() -> None:
    by_turns, _ = play(Tasks([says("hi")] + [says("more")] * 9), max_turns=3)
    assert isinstance(by_turns, Trajectory)
    assert (by_turns.stop, by_turns.num_turns, by_turns.reward) == ("max_turns", 3, 0.0)
    by_room, _ = play(Tasks([says("hi" * 4)] + [says("more")] * 9), engine={"max_context": 16})
    assert isinstance(by_room, Trajectory)
    assert by_room.stop == "max_tokens" and by_room.reward == 0.0


def test_a_cut_off_episode_has_the_rewards_of_its_last_turn_and_the_facts_of_all() -> None:
    turns = [
        Turn((Message("user", str(n)),), rewards={"r": -n}, reward=-1, facts=facts)
        for n, facts in enumerate([{"first": 1, "calls": 0}, {"calls": 1}, {"late": 5}])
    ]
    by_turns, _ = play(Tasks([says("hi"), *turns, over()]), max_turns=3)
    assert isinstance(by_turns, Trajectory)
    assert (by_turns.stop, by_turns.rewards) == ("max_turns", {"r": -2.0})
    assert by_turns.turn_rewards == (-1, -1, -1)
    assert {**by_turns.facts}.items() >= {"first": 1, "calls": 1, "late": 5}.items()
    by_itself, _ = play(Tasks([says("hi"), *turns, over(1.0, calls=4)]))
    assert isinstance(by_itself, Trajectory) and by_itself.rewards == {"r": 1.0}
    assert {**by_itself.facts}.items() >= {"first": 1, "calls": 4, "late": 5}.items()


def test_rewards_of_a_cut_off_episode_are_combined() -> None:
    class Halved(Tasks):
        def combine(self, rewards: dict[str, float]) -> float:
            return rewards["r"] / 2

    turn = Turn((Message("user", "on"),), rewards={"r": 0.5})
    outcome, _ = play(Halved([says("hi"), turn, turn]), max_turns=2)
    assert isinstance(outcome, Trajectory)
    assert (outcome.rewards, outcome.facts["reward/r"]) == ({"reward": 0.25}, 0.5)


class Held(Env):
    """An environment with an external resource that must be closed."""

    async def close(self) -> None:
        self.heard.append("closed")


@pytest.mark.parametrize(
    ("script", "rooms"),
    [
        ([says("hi"), over()], {}),
        ([says("hi")] + [says("more")] * 9, {"max_turns": 1}),
        ([says("hi"), EnvError("broken")], {"retries": 0}),
        ([EnvError("broken")], {"retries": 0}),
    ],
)
def test_an_environment_lets_go_however_its_episode_ends(
    monkeypatch: pytest.MonkeyPatch, script: list[Turn | Exception], rooms: dict[str, int]
) -> None:
    tasks = Tasks()
    env = Held(script, tasks.heard)
    monkeypatch.setattr(tasks, "env", lambda task, seed: env)
    play(tasks, **rooms)
    assert tasks.heard.count("closed") == 1 and tasks.heard[-1] == "closed"


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
        generator = Generator(engine, LetterChat(), EngineConfig(max_completion_tokens=8))
        rollout = Rollout(generator, Tasks([says("hi"), over()]), RolloutConfig())
        async with asyncio.TaskGroup() as group:
            episode = group.create_task(rollout.episode(TASK, env_seed=1, noise_seed=2))
            await fourth.wait()
            await engine.interrupt()
            await engine.load({}, version=5)
            await engine.resume()
        return episode.result()

    outcome = asyncio.run(main())
    assert isinstance(outcome, Trajectory)
    assert [(piece.version, "".join(map(chr, piece.tokens))) for piece in outcome.sampled] == [
        (4, "abc"),
        (5, "def."),
    ]
    assert outcome.num_turns == 1
    assert asked == [("hi", 8), ("hiabc", 5)]


def test_a_failed_environment_is_begun_again_with_its_seed() -> None:
    tasks = Tasks([says("hi"), EnvError("the shop burnt down")], [says("hi"), over()])
    outcome, _ = play(tasks, retries=1)
    assert isinstance(outcome, Trajectory)
    assert tasks.seeds == [7, 7]


def test_what_fails_again_is_reported_with_its_place() -> None:
    outcome, _ = play(
        Tasks([says("hi"), says("so"), KeyError("sku")], [ZeroDivisionError("odd")]), retries=1
    )
    assert without_line(outcome) == Failure(TASK, "begin", "ZeroDivisionError: odd")
    outcome, _ = play(Tasks([says("hi"), says("so"), KeyError("sku")]), retries=0)
    expected = Failure(TASK, "step 2", "KeyError: 'sku'", turns=2, sampled_tokens=6)
    assert without_line(outcome) == expected


def test_a_hanging_environment_is_a_failed_episode() -> None:
    class Hangs(Tasks):
        def env(self, task: Task, seed: int) -> Any:
            class Hanging:
                async def begin(self) -> Turn:
                    return await asyncio.get_running_loop().create_future()

            return Hanging()

    outcome, _ = play(Hangs(), retries=0, timeout_s=0.01)
    assert isinstance(outcome, Failure) and outcome.error.startswith("TimeoutError")


def test_a_task_set_with_limits_of_its_own_allows_longer_calls() -> None:
    class Slow(Tasks):
        longest_call_s = 60.0

        def env(self, task: Task, seed: int) -> Any:
            class Waiting(Env):
                async def step(self, reply: Message) -> Turn:
                    await asyncio.sleep(0.05)
                    return await super().step(reply)

            return Waiting(self.scripts.pop(0), self.heard)

    outcome, _ = play(Slow([says("hi"), over()]), retries=0, timeout_s=0.01)
    assert isinstance(outcome, Trajectory)


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


def test_a_prompt_that_leaves_no_room_fails_its_episode_with_the_option_to_raise() -> None:
    outcome, _ = play(Tasks([says("x" * 30), over()]), engine={"max_context": 20}, retries=0)
    assert isinstance(outcome, Failure) and outcome.stage == "begin"
    assert "has 30 tokens, engine.max_context is 20: no reply fits" in outcome.error


def test_an_engines_death_is_no_failed_episode() -> None:
    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        raise EngineDied("out of memory")

    with pytest.raises(EngineDied, match="out of memory"):
        play(Tasks([says("hi"), over()]), say, retries=3)


def test_too_many_failures_are_the_machinerys() -> None:
    scripts: list[list[Turn | Exception]] = [
        [EnvError("gone")] if i % 2 else [says("hi"), over()] for i in range(200)
    ]

    async def main() -> None:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        rollout = Rollout(
            Generator(engine, LetterChat(), EngineConfig()),
            Tasks(*scripts),
            RolloutConfig(retries=0, max_failed_share=0.4),
        )
        for _ in range(200):
            await rollout.episode(TASK, env_seed=0, noise_seed=0)

    with pytest.raises(
        TooManyFailures,
        match=r"50.0% of the episodes of 20 groups failed.*of toy.train.1: EnvError: gone",
    ):
        asyncio.run(main())


def test_siblings_share_the_environments_seed_and_not_the_noise() -> None:
    seeds: set[int] = set()

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        seeds.add(params.seed)
        return [END]

    tasks = Tasks(*[[says("hi"), over()] for _ in range(4)])

    async def main() -> Group:
        engine = await awake(ScriptedEngine(say))
        rollout = Rollout(Generator(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig())
        return await rollout.group(GroupRequest(0, TASK, 0, 0), size=4)

    group = asyncio.run(main())
    assert len(group.trajectories) == 4 and len(seeds) == 4 and len(set(tasks.seeds)) == 1
    assert len({trajectory.episode for trajectory in group.trajectories}) == 4


def fork_of(
    scripts: Sequence[list[Turn | Exception]], at: int, **options: Any
) -> tuple[Group, Sequence[tuple[str, int]], Tasks]:
    """Run one episode, and one that is forked from it after `at` tokens.

    Return the group, the text and the seed of each call of the engine, and the tasks. The engine
    says "ab.", and "cd." with the seed of the forked episode.
    """
    calls: list[tuple[str, int]] = []

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        calls.append(("".join(map(chr, tokens)), params.seed))
        words = "ab." if params.seed == calls[0][1] else "cd."
        return list(map(ord, words))[params.sampled :]

    async def more(results: Sequence[Trajectory | Failure]) -> Sequence[Fork]:
        return [Fork(0, at)] if len(results) == 1 else []

    async def main() -> tuple[Group, Tasks]:
        tasks, request = Tasks(*scripts), GroupRequest(0, TASK, 0, 0, sizes=(1,))
        engine = await awake(ScriptedEngine(say))
        rollout = Rollout(
            Generator(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig(**options)
        )
        return await rollout.group(request, size=1, more=more), tasks

    group, tasks = asyncio.run(main())
    return group, calls, tasks


def spoken(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [("".join(map(chr, p.tokens)), p.provenance.name) for p in trajectory.pieces]


def test_a_fork_shares_its_parents_beginning_and_has_rewards_of_its_own_replies_only() -> None:
    def script() -> list[Turn | Exception]:
        return [
            says("hi"),
            Turn((Message("user", "so"),), reward=0.25),
            Turn((), done=True, reward=0.5, rewards={"r": 0.5}),
        ]

    group, calls, tasks = fork_of([script(), script()], at=7)
    trunk, fork = group.trajectories
    assert spoken(trunk) == [
        ("hi", "ENVIRONMENT"),
        ("ab.", "SAMPLED"),
        ("so", "ENVIRONMENT"),
        ("ab.", "SAMPLED"),
    ]
    assert spoken(fork) == [
        ("hi", "ENVIRONMENT"),
        ("ab.", "SHARED"),
        ("so", "ENVIRONMENT"),
        ("cd.", "SAMPLED"),
    ]
    assert trunk.turn_rewards == (0.25, 0.5) and fork.turn_rewards == (0.5,)
    assert fork.fork == Fork(0, 7) and trunk.fork is None
    assert group.added == {1} and fork.rewards == trunk.rewards == {"r": 0.5}
    assert [text for text, _ in calls] == ["hi", "hiab.so", "hiab.so"], "no token is sampled twice"
    assert tasks.heard == ["", "ab.", "ab.", "", "ab.", "cd."], "the environment is run again"
    assert tasks.seeds[0] == tasks.seeds[1]


def test_a_fork_in_the_middle_of_a_reply_continues_it() -> None:
    group, calls, _ = fork_of([[says("hi"), over()] for _ in range(2)], at=3)
    fork = group.trajectories[1]
    assert spoken(fork) == [("hi", "ENVIRONMENT"), ("a", "SHARED"), ("d.", "SAMPLED")]
    assert calls[1][0] == "hia" and fork.num_turns == 1
    batch = collate([ScoredTrajectory(each, (1.0,)) for each in group.trajectories])
    assert batch.count(batch.sampled) == [3, 2]
    assert not batch.behavior_logp[batch.provenance == int(Provenance.SHARED)].any()


def test_a_fork_of_an_environment_that_gives_another_text_fails_alone() -> None:
    scripts = [[says("hi"), says("so"), over()], *[[says("ho")] for _ in range(2)]]
    group, _, _ = fork_of(scripts, at=7, retries=1)
    assert len(group.trajectories) == 1
    (failure,) = group.failures
    assert failure.stage == "begin" and "other tokens than the 2 on record" in failure.error


@pytest.mark.parametrize(("begins", "failed"), [("hi", False), ("ho", True)])
def test_a_resumed_fork_starts_again_at_its_place_if_its_own_text_differs(
    begins: str, failed: bool
) -> None:
    fork = Fork(0, 3)
    trunk = Trajectory(
        (ContextPiece(tuple(map(ord, "hi"))), Sampled(tuple(map(ord, "ab.")), (-0.5,) * 3, 0)),
        {"r": 1.0},
        "done",
        TASK,
        seed=0,
    )
    own = (Sampled((ord("d"), END), (-0.5,) * 2, 0), ContextPiece(tuple(map(ord, "so"))))
    open_fork = EpisodeRecord(1, (*fork.prefix_of(trunk.pieces), *own), None, fork=fork)
    past = (EpisodeRecord(0, trunk.pieces, trunk), open_fork)
    request = GroupRequest(0, TASK, 0, 0, past=past, sizes=(1,))
    restarts: list[int] = []

    async def main() -> Group:
        say = ScriptedEngine(lambda tokens, params: list(map(ord, "cd."))[params.sampled :])
        scripts = [[says(begins), says("no"), over()] for _ in range(2)]
        rollout = Rollout(
            Generator(await awake(say), LetterChat(), EngineConfig()),
            Tasks(*scripts),
            RolloutConfig(retries=0),
            on_restart=lambda episode, failure: restarts.append(episode),
        )
        return await rollout.group(request, size=1)

    group = asyncio.run(main())
    assert restarts == ([] if failed else [1]) and len(group.failures) == failed
    if not failed:
        assert spoken(group.trajectories[1])[1:3] == [("a", "SHARED"), ("d.", "SAMPLED")]


def test_an_episode_is_not_forked_after_its_end_or_from_an_unknown_one() -> None:
    with pytest.raises(ValueError, match="episode 0 has 5 tokens: it cannot be forked after 9"):
        fork_of([[says("hi"), over()]], at=9)


def test_a_group_is_enlarged_after_its_results_and_a_resumed_one_ends_equal() -> None:
    seeds: list[int] = []

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        seeds.append(params.seed)
        return [END]

    async def more(results: Sequence[Trajectory | Failure]) -> Sequence[None]:
        return [None] * {2: 1, 3: 2}.get(len(results), 0)

    async def main() -> tuple[Group, Group]:
        tasks = Tasks(*[[says("hi"), over()] for _ in range(7)])
        engine = await awake(ScriptedEngine(say))
        rollout = Rollout(Generator(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig())
        request = GroupRequest(3, TASK, 0, 0, sizes=(2,))
        whole = await rollout.group(request, size=2, more=more)
        rollout.restore(3, ())
        past = tuple(
            EpisodeRecord(n, each.pieces, each) for n, each in enumerate(whole.finished[:3])
        )
        begun = replace(request, begun=True, past=past, sizes=(2, 3, 5))
        return whole, await rollout.group(begun, size=5, more=more)

    whole, resumed = asyncio.run(main())
    assert resumed == whole and whole.added == {2, 3, 4}
    assert len(set(seeds)) == 5 and seeds[5:] == seeds[3:5]


def test_an_examination_grades_every_task_and_tells_how_far_it_is() -> None:
    tasks = Tasks([says("hi"), over(1.0)], [says("hi"), over(0.0)], [EnvError("x")])
    told: list[tuple[int, int]] = []

    async def main() -> list[bool | None]:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        rollout = Rollout(
            Generator(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig(retries=0)
        )
        ask = [Task("toy", "held-out", index) for index in range(3)]
        return await evaluate(
            rollout,
            ask,
            seed=0,
            progress=lambda text, *, done=0, total=0, **_: told.append((done, total)),
        )

    assert asyncio.run(main()) == [True, False, None]
    assert sorted(told) == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_evaluation_tells_what_it_waits_for_and_where_its_time_went() -> None:
    """A reward that takes long is not the engine's time, nor that of a start."""

    async def main() -> tuple[list[str], dict[str, float]]:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        grading, graded = asyncio.Event(), asyncio.Event()

        class Graded(Env):
            async def step(self, reply: Message) -> Turn:
                grading.set()
                await graded.wait()
                await asyncio.sleep(0.05)
                return await super().step(reply)

        class GradedTasks(Tasks):
            def env(self, task: Task, seed: int) -> Env:
                return Graded(self.scripts.pop(0), self.heard)

        tasks = GradedTasks([says("hi"), over(1.0)])
        rollout = Rollout(Generator(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig())
        shown: list[Callable[[], str]] = []
        finished = FinishedEpisodes()
        running = asyncio.create_task(
            evaluate(
                rollout,
                [Task("toy", "held-out", 0)],
                seed=0,
                progress=lambda text, *, detail, **_: shown.append(detail),
                finished=finished,
            )
        )
        await grading.wait()
        during = shown[0]()
        graded.set()
        await running
        return [during, shown[-1]()], finished.waits

    texts, waits = asyncio.run(main())
    assert texts == ["1 in tools or rewards", ""]
    assert waits["eval/tool_wait_s"] > 0.04 > waits["eval/generation_wait_s"]


def test_an_evaluation_runs_a_limited_number_of_episodes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "MAX_CONCURRENT", 3)
    live, most = 0, 0

    class Counts:
        wait_times = Stopwatch()

        async def episode(self, task: Task, **_: object) -> Failure:
            nonlocal live, most
            live += 1
            most = max(most, live)
            await asyncio.sleep(0)
            live -= 1
            return Failure(task, "begin", "x")

    tasks = [Task("toy", "held-out", index) for index in range(20)]
    rollout = cast(Rollout, Counts())
    found = asyncio.run(evaluate(rollout, tasks, seed=0, progress=lambda *_, **__: None))
    assert found == [None] * 20 and most == 3


class Panic(BaseException):
    """An error that is no `Exception`, like a panic of a tokenizer in Rust."""


def test_an_attempt_that_ends_with_any_error_raises_it() -> None:
    async def panics() -> None:
        raise Panic("index out of bounds")

    async def main() -> None:
        with pytest.raises(Panic, match="index out of bounds"):
            await asyncio.wait_for(Attempt(panics()).outcome(), 5)

    asyncio.run(main())


def test_an_error_of_work_that_outlives_a_cancellation_is_raised() -> None:
    async def main() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            await go.wait()
            raise OSError("the disk is full")

        waiting = asyncio.create_task(run_to_completion(work()))
        await begun.wait()
        waiting.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(OSError, match="the disk is full"):
            await waiting

    asyncio.run(main())


def test_seeds_differ_in_every_part() -> None:
    seeds = {derive_seed(a, b, c) for a in range(5) for b in ("x", "y") for c in range(5)}
    assert len(seeds) == 50 and all(0 <= seed < 2**63 for seed in seeds)


class Notebook:
    """An episode writer that records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __call__(self, *, episode: int, seed: int, again: bool = False) -> "Notebook":
        self.told.append(("begin", episode, again))
        return self

    def write_piece(self, position: int, piece: Piece) -> None:
        self.told.append((position, "".join(map(chr, piece.tokens))))

    def write_snapshot(self, num_pieces: int, state: str) -> None:
        self.told.append(("snapshot", num_pieces, state))

    def write_outcome(self, outcome: Trajectory | Failure) -> None:
        self.told.append(("ended", type(outcome).__name__))

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None:
        self.told.append(("restarted", reason, turns, sampled_tokens))


def text(*words: str) -> tuple[Piece, ...]:
    """Return the pieces as text, the environment's in brackets."""
    return tuple(
        ContextPiece(tuple(map(ord, word[1:-1])))
        if word[0] == "["
        else Sampled(tuple(map(ord, word)), (-0.5,) * len(word), 3)
        for word in words
    )


def go_on(
    tasks: Tasks,
    past: EpisodeRecord,
    script: str = "ab.",
    *,
    retries: int = 1,
    engine: dict[str, Any] | None = None,
) -> tuple[Trajectory | Failure, list[tuple[Any, ...]], list[tuple[str, int]]]:
    """Continue an episode with a record. Return its result, the written record and the requests."""
    asked: list[tuple[str, int]] = []
    book = Notebook()

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        asked.append(("".join(map(chr, tokens)), params.max_tokens))
        return list(map(ord, script))

    async def main() -> Trajectory | Failure:
        awakened = await awake(ScriptedEngine(say), version=4)
        generator = Generator(
            awakened, LetterChat(), EngineConfig(max_completion_tokens=8, **(engine or {}))
        )
        rollout = Rollout(generator, tasks, RolloutConfig(retries=retries))
        rollout.restore(20, ())
        return await rollout.episode(TASK, env_seed=7, noise_seed=8, open_writer=book, record=past)

    return asyncio.run(main()), book.told, asked


HI = (says("hi"), says("go on"), over())


@pytest.mark.parametrize(
    "said, asked, written",
    [
        # nothing yet
        (("[hi]",), [("hi", 8), ("hiab.go on", 8)], [(1, "ab."), (2, "go on"), (3, "ab.")]),
        # in the middle of the first reply
        (
            ("[hi]", "cd"),
            [("hicd", 6), ("hicdab.go on", 8)],
            [(2, "ab."), (3, "go on"), (4, "ab.")],
        ),
        # a reply in two pieces, of which the second ended with the stop token: it was not answered
        # yet
        (("[hi]", "cd", "e."), [("hicde.go on", 8)], [(3, "go on"), (4, "ab.")]),
        # a reply that filled its room, and was not answered yet
        (("[hi]", "cdefgh", "ij"), [("hicdefghij.go on", 8)], [(3, ".go on"), (4, "ab.")]),
        # one token of room left
        (
            ("[hi]", "cdefghi"),
            [("hicdefghi", 1), ("hicdefghiy.go on", 8)],
            [(2, "y"), (3, ".go on"), (4, "y" * 8)],
        ),
        # answered
        (("[hi]", "cd.", "[go on]"), [("hicd.go on", 8)], [(3, "ab.")]),
        # in the second reply
        (("[hi]", "cd.", "[go on]", "e"), [("hicd.go one", 7)], [(4, "ab.")]),
        # all was said, but for the end
        (("[hi]", "cd.", "[go on]", "e."), [], []),
    ],
)
def test_an_episode_goes_on_from_its_own_tokens(said: Any, asked: Any, written: Any) -> None:
    script = "y" * 8 if said[-1] == "cdefghi" else "ab."
    past = EpisodeRecord(5, text(*said), None)
    outcome, told, questions = go_on(Tasks([*HI]), past, script)
    assert (
        isinstance(outcome, Trajectory)
        and outcome.episode == 5
        and outcome.pieces[: len(said)] == past.pieces
    )
    assert questions == asked
    assert told == [("begin", 5, True), *written, ("ended", "Trajectory")]
    assert {piece.version for piece in outcome.sampled} == {
        piece.version for piece in past.pieces if isinstance(piece, Sampled)
    } | ({4} if asked else set())


def test_a_context_that_was_full_stays_full() -> None:
    past = EpisodeRecord(5, text("[hihihihi]", "cdefgh.", "[x]"), None)
    outcome, told, asked = go_on(
        Tasks([says("hi" * 4), says("x"), over()]), past, engine={"max_context": 16}
    )
    assert isinstance(outcome, Trajectory) and outcome.stop == "max_tokens" and not asked
    assert told == [("begin", 5, True), ("ended", "Trajectory")]


@pytest.mark.parametrize(
    "scripts, said, why, lost",
    [
        (
            [says("ho")],
            ("[hi]", "cd"),
            "begin: NotReplayed: piece 0 has other tokens than the 2 on record",
            (1, 2),
        ),
        (
            [says("hi"), says("go")],
            ("[hi]", "cd.", "[go on]", "e"),
            "step 1: NotReplayed: piece 2 has other",
            (2, 4),
        ),
        (
            [says("hi"), over()],
            ("[hi]", "cd.", "[go on]", "e"),
            "replay: NotReplayed: 2 recorded pieces",
            (2, 4),
        ),
        ([EnvError("gone")], ("[hi]", "cd"), "begin: EnvError: gone", (1, 2)),
        # an opening where a reply is on record
        (
            [says("hi"), says("x")],
            ("[hi]", "cd.", "[x]", "[y]", "e."),
            "replay: NotReplayed: 2 recorded pieces",
            (2, 5),
        ),
    ],
)
def test_an_environment_that_says_something_else_is_begun_again_and_that_is_no_failure(
    scripts: Any, said: Any, why: str, lost: tuple[int, int]
) -> None:
    outcome, told, _ = go_on(
        Tasks(scripts, [*HI]), EpisodeRecord(5, text(*said), None, failures=0), retries=0
    )
    assert isinstance(outcome, Trajectory) and outcome.episode == 20
    assert (
        told[0] == ("begin", 5, True) and told[1][0] == "restarted" and told[1][1].startswith(why)
    )
    assert (
        told[1][2:] == lost
        and told[2] == ("begin", 20, False)
        and told[-1] == ("ended", "Trajectory")
    )


def test_a_failure_after_the_past_counts_with_those_before() -> None:
    past = EpisodeRecord(5, text("[hi]", "cd."), None, failures=1)
    outcome, told, _ = go_on(Tasks([says("hi"), EnvError("gone")]), past, retries=1)
    expected = Failure(TASK, "step 1", "EnvError: gone", turns=1, sampled_tokens=3)
    assert without_line(outcome) == expected
    assert told == [("begin", 5, True), ("ended", "Failure")]


def test_what_has_ended_is_taken_as_it_is() -> None:
    told_of = Trajectory(text("[hi]", "cd."), {"r": 1.0}, "done", TASK, 8, 5)
    assert go_on(Tasks(), EpisodeRecord(5, told_of.pieces, told_of)) == (told_of, [], [])
    given_up = Failure(TASK, "begin", "EnvError: gone")
    assert go_on(Tasks(), EpisodeRecord(5, (), given_up, failures=2)) == (given_up, [], [])
    of_text = replace(given_up, error=f"{UNREPEATED_TEXT} piece 2 has other tokens")
    assert go_on(Tasks(), EpisodeRecord(5, (), of_text, failures=1)) == (of_text, [], [])
    outcome, told, _ = go_on(
        Tasks([*HI]), EpisodeRecord(5, (), given_up, failures=1)
    )  # one attempt is left
    assert isinstance(outcome, Trajectory) and told[0] == ("begin", 20, False)
    outcome, told, _ = go_on(
        Tasks([*HI]), EpisodeRecord(5, (), Failure(TASK, "replay", "x"), failures=0), retries=0
    )
    assert isinstance(outcome, Trajectory) and told[0] == (
        "begin",
        20,
        False,
    )  # restarted, and killed again


class Shop(Env):
    """An environment that restores snapshots."""

    def snapshot(self) -> str:
        return str(len(self.heard))

    async def resume(self, state: str) -> None:
        self.heard.append(f"resumed at {state}")


class Shops(Tasks):
    def env(self, task: Task, seed: int) -> Shop:
        self.seeds.append(seed)
        return Shop(self.scripts.pop(0), self.heard)


def test_an_environment_with_snapshots_is_written_down_and_not_asked_again() -> None:
    tasks = Shops(
        [
            says("hi"),
            says(
                "go on",
            ),
            says("more"),
            over(),
        ]
    )
    outcome, told, _ = go_on(tasks, EpisodeRecord(5, (), None))
    assert isinstance(outcome, Trajectory)
    snapshots = [entry for entry in told if entry[0] == "snapshot"]
    assert [count for _, count, _ in snapshots] == [1, 3, 5]
    tasks = Shops([says("more"), over()])
    past = EpisodeRecord(
        5, text("[hi]", "cd.", "[go on]", "e"), None, snapshot=(3, json.dumps([[0.25], "2"]))
    )
    outcome, told, asked = go_on(tasks, past)
    assert isinstance(outcome, Trajectory) and outcome.pieces[:4] == past.pieces
    assert tasks.heard == ["resumed at 2", "eab.", "ab."] and asked == [
        ("hicd.go one", 7),
        ("hicd.go oneab.more", 8),
    ]
    assert outcome.turn_rewards == (0.25, 0.0, 0.0)
    assert [entry[:2] for entry in told if entry[0] == "snapshot"] == [("snapshot", 6)]


def test_a_snapshot_has_the_rewards_and_facts_until_then() -> None:
    """So an episode that a limit cuts off at once after a resume gets what it would have got."""
    more = Message("user", "go on, please")
    turn = Turn((more,), rewards={"r": 0.5}, facts={"calls": 2})
    _, told, _ = go_on(Shops([says("hi"), turn, over()]), EpisodeRecord(5, (), None))
    state = next(entry[2] for entry in told if entry[:2] == ("snapshot", 3))
    past = EpisodeRecord(5, text("[hi]", "ab.", "[go on, please]"), None, snapshot=(3, state))
    cut, _, asked = go_on(Shops([[]]), past, engine={"max_context": 16})
    assert isinstance(cut, Trajectory) and cut.stop == "max_tokens" and not asked
    assert cut.rewards == {"r": 0.5} and cut.facts["calls"] == 2
    ended, _, _ = go_on(Shops([over(1.0, errors=1)]), past)
    assert isinstance(ended, Trajectory) and ended.rewards == {"r": 1.0}
    assert (ended.facts["calls"], ended.facts["errors"]) == (2, 1)


def test_a_snapshot_that_the_past_has_outrun_is_caught_up_with() -> None:
    """Killed between a reply and its snapshot: the older snapshot replays the recorded reply."""
    tasks = Shops([says("go on"), over()])
    past = EpisodeRecord(
        5, text("[hi]", "cd.", "[go on]"), None, snapshot=(1, json.dumps([[], "1"]))
    )
    outcome, _, asked = go_on(tasks, past)
    assert isinstance(outcome, Trajectory) and outcome.pieces[:3] == past.pieces
    assert tasks.heard == ["resumed at 1", "cd.", "ab."] and asked == [("hicd.go on", 8)]


@pytest.mark.parametrize("state", ["no json", "[[], {}]", "[]", '[[], "x"] '])
def test_a_snapshot_that_cannot_be_used_restarts_the_episode(state: str) -> None:
    class Closed(Shop):
        async def resume(self, state: str) -> None:
            raise EnvError(f"no shop at {state}")

    class Closing(Shops):
        def env(self, task: Task, seed: int) -> Shop:
            return Closed(self.scripts.pop(0), self.heard)

    outcome, told, _ = go_on(
        Closing([], [*HI]),
        EpisodeRecord(5, text("[hi]", "c"), None, snapshot=(1, state)),
        retries=0,
    )
    assert isinstance(outcome, Trajectory) and told[1][0] == "restarted" and outcome.episode == 20


def test_a_group_goes_on_where_each_sibling_was_and_a_finished_one_is_taken_as_it_is() -> None:
    ended = Trajectory(text("[hi]", "cd."), {"r": 1.0}, "done", TASK, 8, 5)
    begun = EpisodeRecord(6, text("[hi]", "c"), None)
    tasks = Tasks([says("hi"), over()], [says("hi"), over()])

    async def main() -> tuple[Group, Group]:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        rollout = Rollout(Generator(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig())
        rollout.restore(7, ())
        past = (EpisodeRecord(5, ended.pieces, ended), begun)
        group = await rollout.group(GroupRequest(3, TASK, 0, 0, begun=True, past=past), size=3)
        done = tuple(EpisodeRecord(told.episode, told.pieces, told) for told in group.trajectories)
        again = await rollout.group(
            GroupRequest(3, TASK, 0, 0, begun=True, past=done, finished=True), size=3
        )
        return group, again

    group, again = asyncio.run(main())
    assert [told.episode for told in group.trajectories] == [5, 6, 7] and group.trajectories[
        0
    ] is ended
    assert again == group and not tasks.scripts


def test_a_group_keeps_the_episodes_that_were_added_to_it_before_a_resume() -> None:
    ended = Trajectory(text("[hi]", "cd."), {"r": 1.0}, "done", TASK, 8, 5)
    past = tuple(
        EpisodeRecord(number, ended.pieces, replace(ended, episode=number)) for number in range(3)
    )

    async def main() -> Group:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        rollout = Rollout(Generator(engine, LetterChat(), EngineConfig()), Tasks(), RolloutConfig())
        return await rollout.group(GroupRequest(3, TASK, 0, 0, begun=True, past=past), size=2)

    assert [each.episode for each in asyncio.run(main()).trajectories] == [0, 1, 2]


def test_a_task_that_no_attempt_could_finish_is_quarantined() -> None:
    async def main() -> set[str]:
        engine = await awake(ScriptedEngine(lambda tokens, params: [END]))
        tasks = Tasks(
            [EnvError("gone")], [says("hi"), over()], [EnvError("gone")], [EnvError("gone")]
        )
        rollout = Rollout(
            Generator(engine, LetterChat(), EngineConfig()), tasks, RolloutConfig(retries=1)
        )
        rollout.restore(0, [Task("toy", "train", 9)])
        for index in (1, 2):
            request = GroupRequest(index, Task("toy", "train", index), 0, 0)
            await rollout.group(request, size=1)
        return rollout.quarantined

    assert asyncio.run(main()) == {"toy/train/2", "toy/train/9"}
