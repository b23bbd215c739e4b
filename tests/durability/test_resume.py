"""Test resuming with a scripted engine and a real trainer under the virtual clock.

A deterministic run that is killed anywhere and resumed ends equal to an undisturbed one. An
ordinary run loses nothing of its journal, trains on nothing twice, keeps the staleness bound and
repeats no version, also from an older checkpoint when the newest is damaged. Environments that
cannot replay, snapshots, finished groups, quarantined tasks and changed options each have a test.
"""

import asyncio
import queue
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rich.console import Console

from tests.cli.test_run import small
from tests.support.forked import Forked
from tests.support.waits import wait_until
from tests.test_loop import Numbers, Quiet, TwoTurns, configure, toy_machine
from unstale.builders import LocalComponents, build_old_logps
from unstale.cli import main, recipe_options, session
from unstale.cli.main import parse
from unstale.cli.resume import (
    config_changes,
    load_config,
    require_named_trackers,
    resume_command,
)
from unstale.cli.session import RunSession
from unstale.config import (
    AuditConfig,
    CheckpointConfig,
    ConfigError,
    EvalConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
    make_task,
)
from unstale.config.options import override
from unstale.durability import checkpoint, checkpoint_files, compare_runs, virtual_clock
from unstale.durability.checkpoint import Checkpoints
from unstale.durability.journal import JOURNAL, TOKEN_SAMPLES, Journal, check, writer
from unstale.durability.resume import restore
from unstale.durability.run_folder import RunLog, read_jsonl
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import EnvError, Message, Turn
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Task
from unstale.rollout.timeouts import first_error
from unstale.trainer.local import LocalTrainer

pytestmark = pytest.mark.usefixtures("forked_children")

STEPS = 4


async def slowly(tokens: Sequence[int], params: SamplingParams) -> None:
    """Return the virtual time of a token: seven times as long in one task in seven."""
    await asyncio.sleep(0.07 if tokens[1] == 5 else 0.01)


@dataclass
class Toy:
    """The components of a run, kept over its restarts."""

    taskset: Callable[[], Numbers] = lambda: Numbers(count())
    machines: list[LocalComponents] = field(default_factory=list)
    parts: Callable[[], dict[str, Any]] = dict
    """Further arguments of `toy_machine`."""

    def machine(self, config: RunConfig, *kept: object, **_: object) -> LocalComponents:
        def route(scorer: Scorer, engine: ScriptedEngine) -> OldLogps:
            return build_old_logps(config.old_logps, scorer, lockstep=config.deterministic)

        made = {"delay": slowly, "route": route, **self.parts()}
        self.machines.append(toy_machine(config, self.taskset(), **made))
        return self.machines[-1]

    def begin(self, folder: Path, config: RunConfig) -> None:
        self._live(RunSession(config, RunLog.create(folder, config), self.machine(config)))

    def go_on(self, folder: Path, config: RunConfig) -> None:
        self._live(RunSession(config, RunLog.reopen(folder), None))

    def require_equal_resume(self, folder: Path, config: RunConfig, call: str, number: int) -> None:
        """Check that a run that is killed and resumed equals one that is not, bit for bit.

        It is killed before call `number` of `call`. The runs are `folder/whole` and `folder/run`.
        """
        self.begin(folder / "whole", config)
        with killed(call, number):
            self.begin(folder / "run", config)
        self.go_on(folder / "run", config)
        assert compare_runs.differences(folder / "whole", folder / "run") == []

    def _live(self, lives: RunSession) -> None:
        try:
            while not lives.run_segment(Quiet()):  # type: ignore[arg-type]
                pass
        finally:
            lives.log.close()


@contextmanager
def played(toy: Toy) -> Iterator[Toy]:
    """Build runs from `toy` and on the virtual clock."""
    run = virtual_clock.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "build_components", toy.machine)
        patch.setattr(session.virtual_clock, "run", lambda main, **_: run(main, virtual=True))
        yield toy


@pytest.fixture
def toy() -> Iterator[Toy]:
    with played(Toy()) as toy:
        yield toy


class Killed(BaseException):
    """Raised in place of the death of the process."""


MOMENTS: tuple[tuple[Any, str], ...] = (
    (Journal, "transaction"),
    (Journal, "flush"),
    (checkpoint, "write_checkpoint"),
    (checkpoint, "flush_to_disk"),
    (checkpoint_files, "flush_to_disk"),
    (Checkpoints, "prune"),
    (Checkpoints, "write_version"),
    (LocalTrainer, "prepare"),
    (LocalTrainer, "step"),
    (ScriptedEngine, "load"),
    (ScriptedEngine, "resume"),
    (RunLog, "write"),
    (Checkpoints, "snapshot"),
    (LocalTrainer, "backward"),
)
"""Calls before which a run is killed: something changes for good in each, or goes on beside what
does."""


@contextmanager
def killed(name: str = "", number: int = 0) -> Iterator[None]:
    """End the process before call `number` of one of `MOMENTS`. Uncommitted rows are lost."""
    passed: Counter[str] = Counter()
    dead = False

    def moment(real: Callable[..., Any], called: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal dead
            passed[called] += 1
            dead = dead or (called == name and passed[called] == number)
            if dead:
                raise Killed(called)
            return real(*arguments, **keywords)

        return call

    def commit(self: Journal, *arguments: Any) -> None:
        if not dead:
            committing(self, *arguments)

    def close(self: Journal) -> None:
        while dead:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        closing(self)

    committing, closing = Journal._commit, Journal.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            writer, "WINDOW_S", 30.0 if number % 2 else 0.0
        )  # all or nothing of what no barrier was after
        patch.setattr(Journal, "_commit", commit)
        patch.setattr(Journal, "close", close)
        for owner, called in MOMENTS:
            patch.setattr(owner, called, moment(getattr(owner, called), called))
        if not name:
            yield
            return
        with pytest.raises((Killed, BaseExceptionGroup)) as end:
            yield
        assert isinstance(first_error(end.value), Killed), end.value
        assert dead, f"there is no call {number} of {name}"


def config(*, every: int = 2, deterministic: bool = False, **schedule: int) -> RunConfig:
    made = configure(steps=STEPS, every=every, deterministic=deterministic, **schedule)
    return replace(made, trainer=TrainerConfig(lr=1e-2), audit=AuditConfig(share=0.5))


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "metrics.jsonl"))


def require_sound(folder: Path, *, bound: int = 1) -> None:
    """Check the properties of every finished run, however often it was killed."""
    with Journal.read(folder) as reader:
        assert check(reader) == []
        consumed = [group.step for group in reader.groups() if group.ended == "consumed"]
        assert sorted(consumed) == [step for step in range(1, STEPS + 1) for _ in range(2)]
        trained = {group.number: group.step for group in reader.groups() if group.step}
        values = reader.token_steps()
        assert {number: steps[0] for number, steps in values.items()} == trained
        again = sorted(number for number, steps in values.items() for _ in steps[1:])
        assert again == sorted(reader.replayed())
        versions, marks = reader.versions(), reader.checkpoints()
        written = [event["step"] for event in reader.events() if event["kind"] == "step"]
        sampled = {row["step"]: row for row in reader.token_samples()}
        steps = [event["step"] for event in reader.events() if event["kind"] == TOKEN_SAMPLES]
    assert steps == sorted(set(steps)) and steps == list(sampled) and steps
    assert versions == sorted(set(versions)) and marks[-1].step == STEPS
    assert written == [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    assert max(row["schedule/staleness_max"] for row in rows(folder)) <= bound
    assert all(row["old_logps/exact_share"] == 1 for row in rows(folder))
    errors = [
        row["audit/logp_error_abs_mean"]
        for row in rows(folder)
        if "audit/logp_error_abs_mean" in row
    ]
    assert errors and max(errors) < 1e-5


def test_two_deterministic_runs_are_equal_and_sound(toy: Toy, tmp_path: Path, whole: Path) -> None:
    toy.begin(tmp_path / "run", config(deterministic=True))
    assert compare_runs.differences(whole, tmp_path / "run") == []
    require_sound(tmp_path / "run")


KILLS = [
    ("transaction", 120),
    ("flush", 11),
    ("write_checkpoint", 3),
    ("flush_to_disk", 14),
    ("prune", 3),
    ("write_version", 4),
    ("prepare", 3),
    ("step", 4),
    ("load", 4),
    ("resume", 4),
    ("write", 3),
    ("snapshot", 3),
    ("backward", 3),
]
"""One of each of `MOMENTS`, after the first checkpoint."""
AGAIN = [("flush", 2), ("transaction", 2), ("write_version", 1)]
"""Where its next life is killed."""


@pytest.mark.costly
@pytest.mark.parametrize("name, number", KILLS)
def test_a_deterministic_run_ends_equal_wherever_it_is_killed(
    toy: Toy, tmp_path: Path, whole: Path, name: str, number: int
) -> None:
    made, folder = config(deterministic=True), tmp_path / "run"
    with killed(name, number):
        toy.begin(folder, made)
    with killed(*AGAIN[number % 3]):
        toy.go_on(folder, made)
    toy.go_on(folder, made)
    assert compare_runs.differences(whole, folder) == []
    require_sound(folder)


def test_a_deterministic_run_ends_equal_cut_off_at_every_checkpoint(
    toy: Toy, tmp_path: Path, whole: Path
) -> None:
    """Each restart has only the run folder."""
    made, folder = config(deterministic=True), tmp_path / "run"
    lives, log = 0, RunLog.create(folder, made)
    machine: LocalComponents | None = toy.machine(made)
    while True:
        lives += 1
        done = RunSession(made, log, machine).run_segment(Quiet())  # type: ignore[arg-type]
        log.close()
        if done:
            break
        machine, log = None, RunLog.reopen(folder)
    assert lives == 1 + STEPS / 2 and compare_runs.differences(whole, folder) == []


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed deterministic run that replays groups."""
    folder = tmp_path_factory.mktemp("runs") / "replaying"
    with played(Toy()) as toy:
        toy.begin(folder, replay_config())
    return folder


def replay_config(*, deterministic: bool = True) -> RunConfig:
    made = config(deterministic=deterministic)
    return override(made, {"techniques": "replay", "replay.max_age": 3})


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("call", "number"), [("prepare", 3), ("flush", 7)])
def test_a_killed_run_leaves_the_same_groups_out(
    toy: Toy, tmp_path: Path, call: str, number: int
) -> None:
    made = override(config(deterministic=True), {"schedule.resampled_groups": 2})
    toy.require_equal_resume(tmp_path, made, call, number)
    steps = [row for row in rows(tmp_path / "run") if row["step"]]
    left_out = {row["step"]: row["schedule/resampled_groups"] for row in steps}
    assert any(left_out.values())
    with Journal.read(tmp_path / "run") as reader:
        taken = Counter(group.step for group in reader.groups() if group.step is not None)
    size = made.schedule.groups_per_step
    assert taken == {step: size + count for step, count in left_out.items()}


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_killed_run_draws_the_random_bits_of_rounding_again(
    toy: Toy, tmp_path: Path, dtype: str
) -> None:
    """Weight decay changes the weights, since the episodes of the toy have no advantage."""
    options = {
        "trainer.dtype": dtype,
        "trainer.rounding": "stochastic",
        "trainer.weight_decay": 0.02,
    }
    made = override(config(deterministic=True), options)
    toy.require_equal_resume(tmp_path, made, "prepare", 3)
    moved = [row["trainer/moved_weight_share"] for row in rows(tmp_path / "run") if row["step"]]
    assert len(moved) == STEPS and min(moved) > 0


@pytest.mark.costly
def test_a_killed_run_that_distils_keeps_the_teacher_of_an_earlier_step(
    toy: Toy, tmp_path: Path
) -> None:
    """Weight decay moves the policy away from its teacher."""
    options = {
        "techniques": "distil",
        "distil.teacher": "start",
        "distil.refresh": 3,
        "trainer.weight_decay": 0.02,
    }
    made = override(config(deterministic=True), options)
    toy.require_equal_resume(tmp_path, made, "prepare", 4)
    apart = [row["distil/divergence"] for row in rows(tmp_path / "run") if row["step"]]
    assert len(apart) == STEPS and apart[0] == 0 and apart[3] == 0 and apart[1] != 0


@pytest.mark.costly
@pytest.mark.parametrize("name, number", [("prepare", 3), ("transaction", 120)])
def test_a_run_that_replays_groups_ends_equal_wherever_it_is_killed(
    toy: Toy, tmp_path: Path, replaying: Path, name: str, number: int
) -> None:
    folder = tmp_path / "run"
    with killed(name, number):
        toy.begin(folder, replay_config())
    toy.go_on(folder, replay_config())
    assert compare_runs.differences(replaying, folder) == []
    require_sound(folder)


def test_stored_groups_keep_their_age_when_versions_get_new_numbers(
    toy: Toy, tmp_path: Path
) -> None:
    """The loop asserts the age bound, which counts batches and not version numbers."""
    folder = tmp_path / "run"
    with killed("step", 4):
        toy.begin(folder, replay_config(deterministic=False))
    toy.go_on(folder, replay_config(deterministic=False))
    require_sound(folder)
    with Journal.read(folder) as reader:
        assert reader.versions()[-1] > STEPS and reader.replayed(STEPS)
    assert rows(folder)[-1]["replay/age_max"] <= 3


def test_statistics_of_tasks_count_batches_when_versions_get_new_numbers(
    toy: Toy, tmp_path: Path
) -> None:
    """The weights of version 0 become version 4, so the last groups are of version 10 or 11."""
    made = override(
        config(every=100), {"techniques": "beta_sampler", "selection.pool": 20, "max_steps": 8}
    )
    with killed("step", 4):
        toy.begin(tmp_path / "run", made)
    toy.go_on(tmp_path / "run", made)
    machine = toy.machines[-1]
    assert (machine.policy.version, machine.policy.version_gaps) == (12, ((4, 4),))
    (sampler,) = machine.techniques.stateful.values()
    assert sampler.state()["num_batches"] in (6, 7)


def test_a_run_that_replays_groups_records_which_and_keeps_both_bounds(replaying: Path) -> None:
    """Groups that the journal lists were trained on before. They pin no version."""
    written = rows(replaying)
    with Journal.read(replaying) as reader:
        first = {each.number: each.step for each in reader.groups()}
        replayed = {step: reader.replayed(step) for step in range(1, STEPS + 1)}
    assert sum(map(len, replayed.values())) > 2
    for row in written:
        numbers = replayed[row["step"]]
        assert row["replay/groups"] == len(numbers)
        assert all((first[number] or STEPS) < row["step"] for number in numbers)
        assert row["rollout/episodes"] == 6
        if numbers:
            assert 1 <= row["replay/age_max"] <= 3 and row["replay/exact_share"] == 1
    assert max(row["old_logps/versions"] for row in written) <= 3


def pieces(folder: Path) -> set[tuple[Any, ...]]:
    with Journal.read(folder) as reader:
        return set(
            reader.rows("SELECT episode, position, tokens, version, behavior_logp FROM pieces")
        )


def finished(folder: Path) -> dict[int, Any]:
    with Journal.read(folder) as reader:
        return {
            group.number: reader.group(group.number)
            for group in reader.groups()
            if group.finished is not None
        }


SCHEDULES: list[dict[str, int]] = [
    {},
    {"lookahead_window": 4},
    {"max_staleness": 2},
    {"max_staleness": 0},
    {"max_staleness": 2, "adaptive_window": True},
]


@pytest.mark.costly
@pytest.mark.parametrize(
    "name, number, schedule",
    [
        (*kill, SCHEDULES[place % len(SCHEDULES)])
        for place, kill in enumerate(KILLS)
        if kill[0] != "prepare"
    ],
)
def test_an_ordinary_run_loses_nothing_wherever_it_is_killed(
    toy: Toy, tmp_path: Path, name: str, number: int, schedule: dict[str, int]
) -> None:
    made, folder = config(**schedule), tmp_path / "run"
    with killed(name, min(number, 2) if name == "prune" else number):
        toy.begin(folder, made)
    held, done = pieces(folder), finished(folder)
    with killed(*AGAIN[number % 3]):
        toy.go_on(folder, made)
    held, done = held | pieces(folder), done | finished(folder)
    toy.go_on(folder, made)
    require_sound(folder, bound=made.schedule.staleness_bound)
    assert held and held <= pieces(folder)
    assert all(finished(folder)[number] == group for number, group in done.items())


def test_versions_whose_training_was_lost_keep_their_numbers_and_their_pieces(
    toy: Toy, tmp_path: Path
) -> None:
    """Killed three versions after the only checkpoint: its weights become version 4; 1 to 3 are not
    reused."""
    made, folder = config(every=100, max_staleness=2), tmp_path / "run"
    with killed("step", 4):
        toy.begin(folder, made)
    with Journal.read(folder) as reader:
        assert reader.versions() == [0, 1, 2, 3] and [
            mark.version for mark in reader.checkpoints()
        ] == [0]
    toy.go_on(folder, made)
    require_sound(folder, bound=2)
    with Journal.read(folder) as reader:
        assert reader.versions() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        marks = [(mark.step, mark.version) for mark in reader.checkpoints()]
        trained_on = [
            told
            for step in range(1, STEPS + 1)
            for group in reader.consumed(step)
            for told in group.trajectories
        ]
    used = {version for told in trained_on for version in told.versions}
    assert marks == [(0, 0), (0, 4), (4, 8)] and {1, 2, 3} & used
    assert toy.machines[-1].policy.version_gaps == ((4, 4),)


def damage(folder: Path, name: str) -> None:
    path = folder / "checkpoints" / name / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.costly
@pytest.mark.parametrize("deterministic", [True, False])
def test_from_a_damaged_checkpoint_a_run_falls_back_to_the_one_before(
    toy: Toy, tmp_path: Path, whole: Path, deterministic: bool
) -> None:
    made, folder = config(deterministic=deterministic), tmp_path / "run"
    with killed("write", 4):
        toy.begin(folder, made)
    with Journal.read(folder) as reader:
        mark = reader.checkpoints()[-1]
        assert mark.step == 4 and sum(group.ended == "consumed" for group in reader.groups()) == 8
    held = pieces(folder)
    damage(folder, mark.name)
    toy.go_on(folder, made)
    told = [
        event
        for event in read_jsonl(folder / "events.jsonl")
        if event["kind"] == "checkpoint_unsound"
    ]
    assert [event["name"] for event in told] == [mark.name] and "state.safetensors" in told[0][
        "error"
    ]
    require_sound(folder)
    if deterministic:
        assert compare_runs.differences(whole, folder) == []
    else:
        assert held <= pieces(folder)


def test_a_resume_that_lacks_memory_keeps_the_newest_checkpoint(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = config(), tmp_path / "run"
    with killed("write", 4):
        toy.begin(folder, made)
    before = sorted((folder / "checkpoints").rglob("*"))
    held, read, calls = pieces(folder), checkpoint_files.load_file, count()

    def load_file(path: Path) -> Any:
        if next(calls) == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "load_file", load_file)
        with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator: can.t allocate"):
            toy.go_on(folder, made)
    assert sorted((folder / "checkpoints").rglob("*")) == before
    toy.go_on(folder, made)
    require_sound(folder)
    assert held <= pieces(folder)


def test_without_a_sound_checkpoint_a_run_cannot_go_on(toy: Toy, tmp_path: Path) -> None:
    made, folder = config(), tmp_path / "run"
    with killed("step", 4):
        toy.begin(folder, made)
    with Journal.read(folder) as reader:
        for mark in reader.checkpoints():
            damage(folder, mark.name)
    with pytest.raises(
        checkpoint.CheckpointError, match="no sound checkpoint to resume from"
    ) as error:
        toy.go_on(folder, made)
    said = str(error.value)
    assert "state.safetensors was changed after it was written" in said
    assert said.endswith("Restore the folder from a copy, or start a new run")


def test_the_journal_of_another_run_is_refused_and_the_own_one_still_serves(
    toy: Toy, tmp_path: Path
) -> None:
    made, folders = config(), (tmp_path / "run", tmp_path / "other")
    for folder in folders:
        with killed("step", 4):
            toy.begin(folder, made)
    own, other = ({path.name: path.read_bytes() for path in journal_files(f)} for f in folders)
    put_journal(folders[0], other)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"run/journal\.sqlite is the journal of another run"
    ):
        toy.go_on(folders[0], made)
    assert {path.name: path.read_bytes() for path in journal_files(folders[1])} == other
    put_journal(folders[0], own)
    toy.go_on(folders[0], made)
    require_sound(folders[0])


def journal_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{JOURNAL}*") if not path.name.endswith("-shm")]


def put_journal(folder: Path, files: dict[str, bytes]) -> None:
    for path in folder.glob(f"{JOURNAL}*"):
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_a_checkpoint_of_other_options_names_those_that_decide(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise KeyError("exp_avg")

    stored: Any = SimpleNamespace(checkpoint=None)
    checkpoints: Any = SimpleNamespace(restore=fail)
    absent: Any = None
    says = r"does not fit the options of the run \(KeyError: 'exp_avg'\).*: model, trainer.optim"
    with pytest.raises(checkpoint.CheckpointError, match=says):
        restore(stored, checkpoints, tmp_path, absent, (absent, absent))


class Numbered(Numbers):
    """A task set whose environments receive the number of the restart."""

    def __init__(
        self, environment: Callable[[Task, int], TwoTurns], life: int, tasks: Iterator[int]
    ) -> None:
        super().__init__(tasks)
        self.environment, self.life = environment, life

    def env(self, task: Task, seed: int) -> TwoTurns:
        return self.environment(task, self.life)


@contextmanager
def played_with(
    environment: Callable[[Task, int], TwoTurns], tasks: Callable[[], Iterator[int]]
) -> Iterator[Toy]:
    toy = Toy()
    toy.taskset = lambda: Numbered(environment, len(toy.machines), tasks())
    with played(toy):
        yield toy


class Fickle(TwoTurns):
    """A task set with other tasks after each restart."""

    def __init__(self, task: Task, life: int) -> None:
        super().__init__(task)
        self.life = life

    async def begin(self) -> Turn:
        return Turn((Message("user", str(self.task.index + self.life)),))


def test_an_environment_that_does_not_replay_restarts_its_episode_and_has_not_failed(
    tmp_path: Path,
) -> None:
    with played_with(Fickle, count) as toy:
        with killed("step", 1):  # one task in seven is being played
            toy.begin(tmp_path / "run", config())
        with Journal.read(tmp_path / "run") as reader:
            begun = {episode for (episode,) in reader.rows("SELECT DISTINCT episode FROM pieces")}
            ended = {kept.trajectory.episode for kept in reader.trajectories()}
        toy.go_on(tmp_path / "run", config())
    require_sound(tmp_path / "run")
    with Journal.read(tmp_path / "run") as reader:
        restarted = reader.rows("SELECT episode, reason, turns FROM restarts")
        assert {episode for episode, _, _ in restarted} == begun - ended != set()
        assert all(
            "NotReplayed: piece 0 has other tokens than the 2 on record" in reason
            for _, reason, _ in restarted
        )
        assert reader.rows("SELECT count(*) FROM failures") == [(0,)]
    told = [
        event
        for event in read_jsonl(tmp_path / "run" / "events.jsonl")
        if event["kind"] == "episode_restarted"
    ]
    assert len(told) == len(restarted)


class Snapshotted(TwoTurns):
    """An environment that restores snapshots and must not be asked again for a past reply."""

    asked: ClassVar[list[int]] = []

    def __init__(self, task: Task, life: int) -> None:
        super().__init__(task)
        self.life = life

    async def begin(self) -> Turn:
        self.asked.append(self.life)
        return await super().begin()

    def snapshot(self) -> str:
        return str(self.said)

    async def resume(self, state: str) -> None:
        self.said = int(state)


@pytest.mark.costly
def test_an_environment_with_snapshots_is_not_asked_again(tmp_path: Path) -> None:
    Snapshotted.asked.clear()
    with played_with(Snapshotted, count) as toy:
        made = config(deterministic=True)
        toy.begin(tmp_path / "whole", made)
        toy.machines.clear()
        Snapshotted.asked.clear()
        with killed("step", 2):
            toy.begin(tmp_path / "run", made)
        with Journal.read(tmp_path / "run") as reader:
            snapshots = reader.rows("SELECT DISTINCT episode FROM snapshots")
        assert snapshots and Snapshotted.asked.count(0) >= len(snapshots)
        toy.go_on(tmp_path / "run", made)
        assert compare_runs.differences(tmp_path / "whole", tmp_path / "run") == []
        Snapshotted.asked.clear()
        toy.machines.clear()
        ordinary = config()
        with killed("step", 2):
            toy.begin(tmp_path / "ordinary", ordinary)
        with Journal.read(tmp_path / "ordinary") as reader:
            *_, episodes = reader.counts()
            (written,) = reader.rows(  # an episode that has ended has no snapshot any more
                "SELECT count(*) FROM (SELECT episode FROM snapshots UNION "
                "SELECT episode FROM trajectories)"
            )[0]
        toy.go_on(tmp_path / "ordinary", ordinary)
    require_sound(tmp_path / "ordinary")
    with Journal.read(tmp_path / "ordinary") as reader:
        assert (
            Snapshotted.asked.count(1)
            == reader.counts()[2] - written
            >= reader.counts()[2] - episodes
        )


class Broken(TwoTurns):
    def __init__(self, task: Task, life: int) -> None:
        super().__init__(task)

    async def begin(self) -> Turn:
        if self.task.index == 2:
            raise EnvError("out of order")
        return await super().begin()


@pytest.mark.costly
def test_a_quarantined_task_is_not_handed_out_again_in_any_life(tmp_path: Path) -> None:
    folder, made = tmp_path / "run", config()
    with played_with(Broken, lambda: cycle(range(5))) as toy:
        with killed("write", 2):
            toy.begin(folder, made)
        with Journal.read(folder) as reader:
            assert {task.key for task in reader.given_up(0)} == {"numbers/train/2"}
        toy.go_on(folder, made)
        assert toy.machines[-1].taskset is not toy.machines[0].taskset
    with Journal.read(folder) as reader:
        handed = Counter(group.task.index for group in reader.groups())
        places = [group.place for group in reader.groups()]
        assert check(reader) == []
    assert handed[2] == 1 and min(handed[index] for index in (0, 1, 3, 4)) >= 2
    assert places == sorted(set(places)) and [place % 5 for place in places].count(2) == 1


def changed(**changes: Any) -> RunConfig:
    """Return a changed config: `schedule__lookahead_window=3` sets `schedule.lookahead_window`."""
    made = configure()
    for name, value in changes.items():
        section, _, knob = name.rpartition("__")
        made = replace(
            made,
            **{section: getattr(made, section).with_options(**{knob: value})}
            if section
            else {knob: value},
        )
    return made


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"model": "elsewhere"},
            "model cannot change from base to elsewhere in a resumed run: the weights",
        ),
        (
            {"seed": 1},
            "seed cannot change from 0 to 1 in a resumed run: tasks, episodes and noise",
        ),
        ({"deterministic": True}, "deterministic cannot change from False to True"),
        (
            {"task": make_task("retail")},
            r"task\.env cannot change from tests:numbers to retail .* open episodes",
        ),
        (
            {"schedule__max_staleness": 3},
            r"schedule\.max_staleness cannot change from 1 to 3 "
            r".* staleness bound of the queued groups",
        ),
        (
            {"schedule__lookahead_window": 3},
            r"schedule\.lookahead_window cannot change from 1 to 3",
        ),
        ({"schedule__group_size": 4}, r"schedule\.group_size cannot change from 3 to 4"),
        ({"schedule__groups_per_step": 3}, r"schedule\.groups_per_step cannot change"),
        ({"trainer__weight_decay": 0.5}, r"trainer\.weight_decay cannot change"),
        ({"engine__max_context": 128}, r"engine\.max_context cannot change"),
        ({"engine__max_completion_tokens": 7}, r"engine\.max_completion_tokens cannot change"),
        ({"engine__temperature": 0.5}, r"engine\.temperature cannot change"),
        ({"rollout__max_turns": 3}, r"rollout\.max_turns cannot change"),
        (
            {"old_logps__route": "interrupt_sync"},
            r"old_logps\.route cannot change from snapshot_old to interrupt_sync",
        ),
        ({"trainer__optimizer": "SGD"}, r"trainer\.optimizer cannot change from AdamW to SGD"),
        ({"trainer__dtype": "bfloat16"}, r"trainer\.dtype cannot change"),
        ({"audit__share": 0.1}, r"audit\.share cannot change"),
    ],
)
def test_what_a_run_has_to_keep_is_refused_with_the_reason(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        config_changes(configure(), changed(**changes))


def test_an_option_of_the_task_set_cannot_change() -> None:
    before, now = (replace(configure(), task=make_task("retail", level=level)) for level in "12")
    with pytest.raises(ConfigError, match=r"task\.level cannot change from 1 to 2"):
        config_changes(before, now)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({}, []),
        ({"runs": Path("elsewhere"), "name": "other"}, []),
        (
            {"max_steps": 20},
            ["max_steps is 20, it was 12: the learning-rate schedule now ends there"],
        ),
        (
            {"trainer__lr": 0.1},
            [
                "trainer.lr is 0.1, it was 0.0003: takes effect at the next step, with the "
                "optimizer's moments"
            ],
        ),
        (
            {"trainer__minibatches_per_batch": 2},
            [
                "trainer.minibatches_per_batch is 2, it was 1: the position in the learning-rate "
                "schedule"
            ],
        ),
        ({"checkpoint__keep": 3}, ["checkpoint.keep is 3, it was 2: takes effect from here on"]),
        (
            {"trackers": "wandb", "eval__interval": 2},
            ["trackers is wandb", "eval.interval is 2, it was 0: takes effect from here on"],
        ),
    ],
)
def test_what_a_run_may_change_is_said_in_words(changes: dict[str, Any], says: list[str]) -> None:
    told = config_changes(configure(), changed(**changes))
    assert len(told) == len(says) and all(
        one.startswith(other) for one, other in zip(told, says, strict=True)
    )


def test_a_deterministic_run_that_was_changed_is_another_run() -> None:
    told = config_changes(changed(deterministic=True), changed(deterministic=True, trainer__lr=0.1))
    assert told[-1] == "the result will differ from that of the unchanged run"


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.err.count("\n") == 1
    return captured.err


class Examined(Numbers):
    """A task set with held-out tasks."""

    def held_out(self, number: int) -> list[Task]:
        return [Task("numbers", "held_out", index) for index in range(number)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_that_goes_on_after_its_end_keeps_its_final_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Also if a first attempt to go on ended before the metrics were logged again."""
    folder = tmp_path / "run"
    made = replace(config(deterministic=deterministic), eval=EvalConfig(tasks=3))

    async def fail(_: object) -> None:
        raise ValueError("no model")

    with played(Toy(lambda: Examined(count()))) as toy:
        toy.begin(folder, made)
        last = rows(folder)[-1]
        assert last["step"] == STEPS and "eval/reward_mean" in last
        longer = replace(made, max_steps=STEPS + 2)
        with monkeypatch.context() as patch, pytest.raises(ExceptionGroup):
            patch.setattr(ScriptedEngine, "start", fail)
            toy.go_on(folder, longer)
        toy.go_on(folder, longer)
    with Journal.read(folder) as reader:
        logged = reader.steps()
        assert check(reader) == []
    for written in (rows(folder), logged):
        assert [row["step"] for row in written] == list(range(STEPS + 3))
        evaluated = {name: value for name, value in last.items() if name.startswith("eval/")}
        again = written[STEPS]
        assert evaluated.items() <= again.items() and again["time_s"] > last["time_s"]
        evaluations = [row["step"] for row in written if "eval/version" in row]
        assert evaluations == [0, STEPS, STEPS + 2]


def test_what_cannot_be_gone_on_with_is_one_line(
    tmp_path: Path, toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = small(tmp_path, task=make_task("retail"))
    assert "nowhere is not a run folder" in complaint(capsys, "train", "--resume", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty is not a run folder: it has no config.json" in complaint(
        capsys, "train", "--resume", "empty"
    )
    RunLog.create(tmp_path / "early", made).close()
    (tmp_path / "early" / "checkpoints" / "step000000-version000000").mkdir(parents=True)
    said = complaint(capsys, "train", "--resume", "early")
    assert "early has checkpoints but no journal.sqlite: its episodes are lost" in said
    with Journal(tmp_path / "early" / JOURNAL) as journal:
        asyncio.run(journal.checkpoint("one", step=3, version=3))
        journal.write(3, {})
    with RunLog(tmp_path / "early") as log:
        log.event("stopped", reason="finished")
    said = complaint(capsys, "train", "--resume", "early")
    assert "the run in early is finished; to continue it, raise --max_steps" in said
    assert "leave out retail or --resume" in complaint(
        capsys, "train", "retail", "--resume", "early"
    )
    for option, given in (("name", "other"), ("runs", "elsewhere")):
        said = complaint(capsys, "train", "--resume", "early", f"--{option}", given)
        assert f"continues the run in its folder early: leave out {option}, or take it" in said
        assert f"got {given}" in said
    said = complaint(capsys, "train", "--resume", "early", "--runs", str(tmp_path))
    assert "the run in early is finished" in said  # another name of the same folder
    (tmp_path / "own.toml").write_text('recipe = "retail"')
    said = complaint(capsys, "train", "--resume", "early", "--config", "own.toml")
    assert "a run resumes with its own recipe, toy: leave out the recipe retail" in said
    said = complaint(capsys, "train", "--resume", "early", "--config", "early/config.json")
    assert "the run in early is finished" in said
    assert "seed cannot change from 0 to 3" in complaint(
        capsys, "train", "--resume", "early", "--seed", "3"
    )
    (tmp_path / "early" / "config.json").write_text('{"recipe": 3}')
    assert "config.json" in complaint(capsys, "train", "--resume", "early")


def test_the_printed_command_names_own_code_again(tmp_path: Path) -> None:
    reward = {"env": "dataset:my data.jsonl", "reward": "harm:mine"}
    for name, changes in (
        ("plain", {"task": make_task("retail")}),
        ("own task", {"task": TaskConfig(env="harm:Tasks")}),
        ("reward", {"task": make_task(**reward)}),
        ("both", {"task": make_task(**reward), "trackers": "csv,harm:make tracker"}),
    ):
        run = tmp_path / name
        made = RunLog.create(run, replace(small(tmp_path, **changes), name=name))
        made.close()
        program, *words = shlex.split(resume_command(run))
        chosen = parse(words)
        assert (program, chosen.verb, chosen.resume) == ("unstale", "train", run)
        stored = load_config(run, named=chosen.values)
        require_named_trackers(stored, chosen.values)
        assert not config_changes(stored, override(stored, chosen.values))
    assert resume_command(tmp_path / "plain") == f"unstale train --resume {tmp_path}/plain"
    assert resume_command(tmp_path / "none") == f"unstale train --resume {tmp_path}/none"


def test_code_that_a_run_folder_names_is_not_imported_unless_it_is_named_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "harm", None)  # an import of it raises
    RunLog.create(tmp_path / "run", small(tmp_path, task=TaskConfig(env="harm:Tasks"))).close()
    said = complaint(capsys, "train", "--resume", str(tmp_path / "run"))
    assert "names your own code. To run it, add --task.env harm:Tasks" in said
    said = complaint(
        capsys, "train", "--resume", str(tmp_path / "run"), "--task.env", "other:Tasks"
    )
    assert "task.env cannot change from harm:Tasks to other:Tasks" in said
    said = complaint(capsys, "train", "--resume", str(tmp_path / "run"), "--task.env", "harm:Tasks")
    assert "'harm:Tasks' cannot be made: ModuleNotFoundError: import of harm halted" in said


KNOBS = [
    "--deterministic",
    "true",
    "--minutes",
    "0",
    "--max_steps",
    "3",
    "--checkpoint.interval",
    "2",
    "--eval.tasks",
    "0",
    "--schedule.groups_per_step",
    "2",
    "--schedule.group_size",
    "2",
    "--schedule.max_staleness",
    "1",
    "--engine.max_completion_tokens",
    "8",
    "--engine.max_context",
    "512",
    "--engine.max_running",
    "8",
    "--rollout.max_turns",
    "3",
]


def kill_after_a_step(words: list[str], run: Path) -> None:
    """Begin a run by the command line, and kill it when it has logged a step."""
    metrics = run / "metrics.jsonl"
    with Forked(words) as process:

        def has_a_row() -> bool:
            assert process.poll() is None, process.communicate()
            return metrics.exists() and len(metrics.read_text().splitlines()) >= 1

        wait_until(has_a_row, "the first row of metrics")
        process.kill()


@pytest.mark.parametrize(
    "options", [(), ("--engine.top_p", "0.8"), ("--eval.top_p", "0.8", "--eval.tasks", "3")]
)
@pytest.mark.costly
def test_a_run_killed_with_sigkill_and_resumed_is_the_run_that_was_not(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Everything is real: the engine process, the command line, the signal."""

    def parse(*arguments: str) -> RunConfig:
        return recipe_options.configure(main.parse(arguments))

    def begin(name: str) -> list[str]:
        return ["train", "retail", "--runs", str(tmp_path), "--name", name, *KNOBS, *options]

    whole = session.train(parse(*begin("whole")), console=Console(file=StringIO()))
    kill_after_a_step(begin("killed"), tmp_path / "killed")
    made = load_config(tmp_path / "killed", named={})
    resumed = session.resume(tmp_path / "killed", made, console=Console(file=StringIO()))
    assert [row["step"] for row in resumed.metrics if row["step"]] == [1, 2, 3]
    assert compare_runs.differences(whole.folder, resumed.folder) == []
    with pytest.raises(ConfigError, match="is finished"):
        session.resume(tmp_path / "killed", made, console=Console(file=StringIO()))


def test_checkpoints_are_also_made_by_the_clock(toy: Toy, tmp_path: Path) -> None:
    made = replace(config(), checkpoint=CheckpointConfig(interval=100, minutes=1e-9))
    toy.begin(tmp_path / "run", made)
    with Journal.read(tmp_path / "run") as reader:
        assert [row.step for row in reader.checkpoints()] == list(range(STEPS + 1))
    with pytest.raises(ConfigError, match=r"checkpoint\.minutes must be 0 in a deterministic run"):
        replace(made, deterministic=True)
