"""Evaluate a trained policy on held-out tasks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from unstale.builders import build_rollout, build_sampler, for_evaluation
from unstale.cli.failures import RunFailed
from unstale.cli.grades import EvalResult
from unstale.cli.process import limit_threads
from unstale.cli.saved_episodes import open_saved
from unstale.cli.session import require_config
from unstale.cli.trained import policy_folder
from unstale.cli.turn_limits import learned_limit
from unstale.config import ConfigError, RunConfig
from unstale.durability import virtual_clock
from unstale.durability.console import Console
from unstale.engines.pool import Recovery, supervise
from unstale.envs import Taskset
from unstale.envs.registry import held_out_tasks
from unstale.model.loading import DTYPES
from unstale.model.policy import Policy
from unstale.observe.live import LiveDisplay
from unstale.records import Task
from unstale.rollout import evaluation
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import FinishedEpisodes, attempts_at
from unstale.rollout.generator import Generator
from unstale.rollout.timeouts import first_error
from unstale.stop_signals import stop_signals
from unstale.weights.publish import DirectPublisher

T = TypeVar("T")


def evaluate(  # noqa: PLR0913 - options of a command
    trained: Path | str,
    config: RunConfig | None = None,
    *,
    attempts: int | None = None,
    save: Path | str | None = None,
    limit_turns: bool = False,
    console: Console | None = None,
    **wrong: Any,
) -> EvalResult:
    """Measure the success of a policy on held-out tasks, with `attempts` episodes for each task.

    `trained` is a run folder or a model folder. `config` has the tasks, their number
    (`eval.tasks`), the sampling options (such as `eval.temperature`) and the default of `attempts`
    (`eval.samples`). Its policy is not used. Finished episodes are added to the file `save`, and
    those that are in it already are not run again. `limit_turns` limits the turns by the successes
    of the run `trained`, as `learned_limit` does. Raises `ConfigError` for wrong settings, and
    `RunFailed` if a component fails later.
    """
    config = require_config(config, wrong)
    attempts = config.eval.samples if attempts is None else attempts
    limit = learned_limit(Path(trained), config) if limit_turns else None
    held_out = HeldOut.of(trained, config, attempts)

    async def grade(rollout: Rollout, progress: Callable[..., None]) -> list[bool | None]:
        rollout.turn_limit = limit
        return await evaluation.evaluate(
            rollout,
            held_out.tasks,
            seed=config.seed,
            progress=progress,
            finished=finished,
            trial=not finished.successes,
        )

    shared = {"turn limit": str(limit)} if limit else {}
    saved = (
        open_saved(Path(save), held_out.config, **shared)
        if save
        else nullcontext(FinishedEpisodes())
    )
    with saved as finished:
        graded = held_out.run(grade, console=console)
    result = EvalResult.of(graded, attempts, [task.env for task in held_out.tasks])
    means = finished.means(attempts_at(held_out.tasks))
    return replace(result, reward=means["reward"], turns=means["turns"], tokens=means["tokens"])


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The parts of an evaluation: a policy, held-out tasks, and an engine that samples replies."""

    config: RunConfig
    policy: Policy
    taskset: Taskset
    generator: Generator
    tasks: Sequence[Task]
    """The held-out tasks. Each is repeated as often as it is attempted."""

    @classmethod
    def of(cls, trained: Path | str, config: RunConfig, attempts: int) -> Self:
        """Load the policy of the run folder or model folder `trained`, and the held-out tasks of
        `config`.

        Raises `ConfigError` for wrong settings.
        """
        if config.eval.tasks < 1:
            raise ConfigError(f"eval.tasks must be >= 1 to evaluate, got {config.eval.tasks}")
        if attempts < 1:
            raise ConfigError(f"attempts must be >= 1, got {attempts}")
        config = config.with_policy(policy_folder(Path(trained)))
        limit_threads()
        policy, taskset, generator = build_sampler(config)
        tasks = held_out_tasks(taskset, config.eval.tasks)
        repeated = [task for task in tasks for _ in range(attempts)]
        return cls(config, policy, taskset, generator, repeated)

    def run(
        self,
        work: Callable[[Rollout, Callable[..., None]], Coroutine[Any, Any, T]],
        *,
        console: Console | None = None,
    ) -> T:
        """Start the engine, run `work` and return its result. The engine samples as the options of
        the evaluation say.

        `work` receives the object that runs episodes, and a function that shows progress. Raises
        `RunFailed` if a component fails.
        """

        async def main() -> T:
            async with running_generator(self.config, self.policy, self.generator) as generator:
                sampling = for_evaluation(generator, self.config.eval)
                make = build_rollout(self.config, self.taskset)
                rollout = make(sampling, self.taskset, self.config.rollout)
                with LiveDisplay(self.config, console=console or Console()) as display:
                    async with rollout.resources:
                        return await work(rollout, display.phase)

        return run_until_complete(main())


@asynccontextmanager
async def running_generator(
    config: RunConfig,
    policy: Policy,
    generator: Generator,
    *,
    on_event: Callable[..., None] = lambda kind, **_: None,
) -> AsyncIterator[Generator]:
    """Return a context in which the engine runs with the policy's weights.

    Its value is a generator, which samples replies with the engine. If the engine crashes, it is
    restarted, at most `engine.restarts` times, and `on_event` is called.
    """
    recovery = Recovery(lambda version: policy.weights(), config.engine.restarts, on_event)
    engine = supervise(generator.engine, recovery)
    try:
        await engine.start()
        publisher = DirectPublisher(engine, dtype=policy.travel_dtype(DTYPES[config.engine.dtype]))
        publisher.prepare(policy)
        await publisher.publish()
        yield replace(generator, engine=engine)
    finally:
        await engine.close()


def run_until_complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop and return its result.

    A `ConfigError` of the coroutine is raised unchanged. Any other error is raised as `RunFailed`.
    """

    async def main() -> T:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
        return task.result()

    try:
        with stop_signals():
            return virtual_clock.run(main())
    except ExceptionGroup as failures:
        error = first_error(failures)
        if isinstance(error, ConfigError):
            raise error from error.__cause__
        raise RunFailed(f"{type(error).__name__}: {error}") from error
