"""Measure scripted policies and trained ones on the three domains of tau2-bench.

    python -m benchmarks.tau2 [FOLDER ...] [--attempts 4] [--saved runs/tau2] [--splits test train]

FOLDER is a run folder or a model folder. The context is 24,576 tokens, or as many as the model has
positions. A chat template that renders no tools gets their schemas as text in the system prompt.
`--no-document` leaves out the domain's policy document, for models with too few positions for it.
With `--small` FOLDER is one of a small policy that sees no policy document
(`benchmarks.tau2_policy`). The customer is scripted. Of the scripted policies, `reference solution`
makes the calls that tau2 records for the task, and `only talk` makes none. Finished episodes are
kept in the folder of `--saved`: if the command is killed, repeat it. It needs tau2-bench
(docs/libraries.md). The table is written to `results/tau2.md`.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, cast

from benchmarks.tables import CONSOLE, RESULTS
from unstale.cli.evaluate import evaluate as evaluate_policy
from unstale.cli.grades import EvalResult
from unstale.cli.saved_episodes import open_saved
from unstale.cli.trained import policy_folder
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.durability.machine import commit, machine
from unstale.engines import Stopwatch
from unstale.envs import Message, ToolCall
from unstale.envs.registry import build_taskset
from unstale.recipes import make_recipe
from unstale.records import Task, Trajectory
from unstale.research.envs.tau2 import Tau2Config
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import evaluate

OPTIONS = {
    "task.env": "tau2:all",
    "eval.tasks": 100,
    "rollout.max_turns": 10,
    "rollout.timeout_s": 600.0,
    "engine.max_context": 24576,
    "engine.max_completion_tokens": 64,
    "engine.dtype": "float32",
    "tools_in_prompt": True,
}
SMALL = {
    "task.policy_document": False,
    "rollout.max_turns": 20,
    "engine.max_context": 2048,
    "engine.max_completion_tokens": 128,
}
"""The options that differ for a policy of `benchmarks.tau2_policy`."""
SPLITS = ("test", "train")
AT_ONCE = 4
"""Number of episodes that a scripted policy plays at a time."""
DONE = Message("assistant", "It is done.")

SCRIPTS_VERSION = 1
"""Raise it if a scripted policy changes. Saved episodes of another version are then refused."""

Replies = Callable[[Any], Iterator[Message]]


def reference_solution(task: Any) -> Iterator[Message]:
    """Yield the replies that make the calls of a task's solution, the customer's included."""
    for action in task.evaluation_criteria.actions or ():
        if action.requestor == "user":
            yield Message("assistant", f"Please use {action.name} now.")
        else:
            yield Message("assistant", "", (ToolCall(action.name, action.arguments),))


SCRIPTED: dict[str, Replies] = {
    "reference solution": reference_solution,
    "only talk": lambda task: iter(()),
}


class ScriptedRollout:
    """Plays episodes with the replies of a scripted policy, as `Rollout` does with a model's."""

    def __init__(self, tasks: Any, replies: Replies) -> None:
        self._tasks = tasks
        self._replies = replies
        self._free = asyncio.Semaphore(AT_ONCE)
        self.wait_times = Stopwatch("generation_wait", "tool_wait")

    async def episode(self, task: Task, *, env_seed: int, noise_seed: int) -> Trajectory:
        async with self._free:
            env = self._tasks.env(task, env_seed)
            turn = await env.begin()
            for reply in self._replies(self._tasks.part_of(task).data_of(task)):
                if not turn.done:
                    turn = await env.step(reply)
            while not turn.done:
                turn = await env.step(DONE)
        return Trajectory((), dict(turn.rewards), "done", task, noise_seed)


def measure_scripted(config: RunConfig, name: str, attempts: int, saved: Path) -> EvalResult:
    """Return the result of a scripted policy.

    Policy and customer are deterministic, so one episode of a task counts as all attempts at it.
    """
    taskset = build_taskset(config.task)
    tasks = taskset.held_out(config.eval.tasks)

    def progress(text: str, *, done: int, total: int, detail: object = None) -> None:
        if done % 20 == 0:
            CONSOLE.print(f"{name}: {done} of {total}")

    async def play() -> list[bool | None]:
        rollout = cast(Rollout, ScriptedRollout(taskset, SCRIPTED[name]))
        return await evaluate(rollout, tasks, seed=0, progress=progress, finished=episodes)

    with open_saved(saved, config, script=name, script_version=SCRIPTS_VERSION) as episodes:
        graded = asyncio.run(play())
    graded = [success for success in graded for _ in range(attempts)]
    return EvalResult.of(graded, attempts, [task.env for task in tasks for _ in range(attempts)])


def rows(policy: str, split: str, result: EvalResult, attempts: int) -> Iterator[str]:
    """Yield the lines of the table for a policy on a split."""
    for env, part in {**result.by_env, "all": result}.items():
        cells = [
            f"{mean.value:.1%} ({mean.low:.1%} to {mean.high:.1%})"
            for mean in part.rows([attempts]).values()
        ]
        yield f"| {policy} | {split} | {env} | {part.tasks} | {' | '.join(cells)} |"


def fit_context(config: RunConfig, folder: Path) -> RunConfig:
    """Return the options with a context that is at most the number of the model's positions."""
    file = policy_folder(folder) / "config.json"
    if not file.is_file():
        return config
    most = config.engine.max_context
    positions = json.loads(file.read_text()).get("max_position_embeddings", most)
    return override(config, {"engine.max_context": min(most, positions)})


def measure(
    config: RunConfig, folders: Sequence[Path], attempts: int, saved: Path
) -> Iterator[str]:
    """Yield the lines of the table. `saved` is the folder with the finished episodes."""
    split = cast(Tau2Config, config.task).eval_split
    end = ".jsonl" if split == "test" else f"-{split}.jsonl"
    for name in SCRIPTED:
        file = saved / f"{name.replace(' ', '-')}{end}"
        base = override(config, {"model": "base"})
        yield from rows(name, split, measure_scripted(base, name, attempts, file), attempts)
    for folder in folders:
        name = folder.resolve().name
        file = saved / f"policy-{name}{end}"
        fitted = fit_context(config, folder)
        result = evaluate_policy(folder, fitted, attempts=attempts, save=file, console=CONSOLE)
        yield from rows(name, split, result, attempts)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policies", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--attempts", type=int, default=4)
    parser.add_argument("--saved", type=Path, default=Path("runs/tau2"))
    parser.add_argument("--tasks", type=int, default=OPTIONS["eval.tasks"])
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["test"])
    parser.add_argument("--no-document", action="store_true")
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args(words)
    options = OPTIONS | (SMALL if chosen.small else {}) | {"eval.tasks": chosen.tasks}
    if chosen.no_document:
        options["task.policy_document"] = False
    chosen.saved.mkdir(parents=True, exist_ok=True)
    measured: list[str] = []
    try:
        for split in chosen.splits:
            config = override(make_recipe("llm"), {**options, "task.eval_split": split})
            measured += measure(config, chosen.policies, chosen.attempts, chosen.saved)
    except ConfigError as error:
        parser.error(str(error))
    heads = [f"{name}{chosen.attempts}" for name in ("avg@", "pass@", "pass^")]
    lines = [
        f"# Policies on tau2-bench, {date.today()}",
        "",
        f"Success on tau2's tasks, {chosen.attempts} attempts at each, with a scripted customer. "
        f"The scripted policies are deterministic: one attempt counts as all. "
        f"`python -m benchmarks.tau2` at commit {commit()}, {machine()}.",
        "",
        f"| policy | split | domain | tasks | {' | '.join(heads)} |",
        "|---" * 7 + "|",
        *measured,
    ]
    text = "\n".join(lines) + "\n"
    CONSOLE.print(text, markup=False)
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = "tau2-policy" if chosen.small else "tau2"
    (RESULTS / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
