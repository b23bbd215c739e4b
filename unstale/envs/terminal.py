"""Terminal tasks: the agent works with a shell in a sandbox, and hidden tests give the reward.

`--task.env terminal:FOLDER` reads folders of Harbor or Terminal-Bench. `TerminalTasks` takes tasks
that a Python program made, and another runtime (maker of sandboxes). See docs/terminal.md.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from unstale.config import ConfigError, TaskConfig
from unstale.config.checks import Positive, PositiveInt
from unstale.config.tasks import EnvSpec
from unstale.envs import EnvError, ListedTasks, Message, Turn, read_rewards, tool_schema
from unstale.envs.question import ToolRunner
from unstale.envs.sandboxes.containers import ContainerRuntime
from unstale.envs.sandboxes.folders import read_folder
from unstale.envs.sandboxes.namespaces import NamespaceRuntime, readable_folders
from unstale.envs.sandboxes.runtime import (
    CommandResult,
    Runtime,
    Sandbox,
    TerminalTask,
    TestsIn,
    Verdict,
)
from unstale.records import Task

_NOT_FOUND = (126, 127)
"""Exit codes of a shell whose program is missing, or cannot be run."""
SYSTEM = "Work with the tool. When the task is done, answer without a call."
TOOL = tool_schema(
    "bash",
    "Run a command in a shell. Each call starts in the same folder; files and processes stay.",
    {"command": {"type": "string", "description": "For example ls -l."}},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalConfig(TaskConfig):
    """Folders with tasks for an agent with a shell. Hidden tests give the reward."""

    env: str = "terminal:FOLDER"
    """`terminal:` and the folder that has the folders of the training tasks."""
    held_out_folder: str = ""
    """Folder that has the folders of the held-out tasks. Empty means that there are none."""
    runtime: Literal["auto", "namespaces", "podman", "docker"] = "auto"
    """What makes the sandboxes. `auto` takes kernel namespaces for each task whose Dockerfile needs
    no image, or for all with `host_programs`, and containers of podman or docker for the others.
    """
    host_programs: bool = False
    """Let the programs of this machine stand in for the image that a Dockerfile's FROM names."""
    tests_in: TestsIn = "agent"
    """Sandbox of the tests. `agent`, as in Harbor: that of the agent. Its installed packages and
    running servers are there, but a process that it left can read the tests and write the reward.
    `own`: another one, with the files of the working directory; the agent's root is read-only then.
    """
    command_s: Positive = 180.0
    """Seconds after which a command of the agent is killed, or earlier at the task's own limit for
    all its commands.
    """
    output_kb: PositiveInt = 4
    """Size in kB from which on the output of a command is cut off."""
    storage_mb: PositiveInt = 256
    """Largest size in MB of the files of a sandbox, which are in memory. In a container: of each
    file, on disk. A task can have less.
    """

    def check_combination(self) -> None:
        super(TerminalConfig, self).check_combination()
        if self.host_programs and self.runtime in ("podman", "docker"):
            raise ConfigError(
                "task.host_programs must be false with task.runtime = "
                f"{self.runtime}, whose containers have the programs of an image"
            )


@dataclass(frozen=True, slots=True)
class Commands:
    """Limits of each command of the agent: its time in seconds and the size of its output in kB."""

    seconds: float = 180.0
    output_kb: int = 4


@dataclass(frozen=True, slots=True)
class AutoRuntime:
    """A runtime that makes sandboxes in namespaces for tasks that need no image, and in containers
    for other tasks.
    """

    namespaces: NamespaceRuntime
    containers: ContainerRuntime
    _chosen: dict[int, tuple[TerminalTask, NamespaceRuntime | ContainerRuntime]] = field(
        default_factory=dict, init=False
    )
    """`id` of a task -> the task, so that no other one gets this id, and what it needs."""

    def check(self, task: TerminalTask) -> None:
        """Raise `ConfigError` if a task needs an image, and no container can be started."""
        try:
            self.namespaces.check(task)
            self._chosen[id(task)] = task, self.namespaces
        except ConfigError as why:
            try:
                self.containers.check(task)
            except ConfigError as error:
                raise ConfigError(f"{why}. In its place, {error}") from None
            self._chosen[id(task)] = task, self.containers

    async def start(self, task: TerminalTask) -> Sandbox:
        return await self.chosen(task).start(task)

    def chosen(self, task: TerminalTask) -> NamespaceRuntime | ContainerRuntime:
        """Return what makes the sandboxes of a task. Its Dockerfile is read once."""
        if id(task) not in self._chosen:
            self.check(task)
        return self._chosen[id(task)][1]


class TerminalTasks(ListedTasks):
    """Terminal tasks, given as lists. `runtime` makes the sandboxes."""

    tools: tuple[Mapping[str, Any], ...] = (TOOL,)

    def __init__(
        self,
        name: str,
        train: Sequence[TerminalTask],
        held_out: Sequence[TerminalTask] = (),
        *,
        runtime: Runtime | None = None,
        commands: Commands | None = None,
    ) -> None:
        """Check the tasks. Raises `ConfigError` if `runtime` cannot make a sandbox for one of
        them.
        """
        self.name = name
        self._runtime = runtime or NamespaceRuntime()
        self._commands = commands or Commands()
        self._tasks = {"train": train, "held_out": held_out}
        for task in (*train, *held_out):
            self._runtime.check(task)
        self.longest_call_s = 2 * max(
            (
                max(each.build_timeout_s, each.agent_timeout_s, each.test_timeout_s)
                for each in (*train, *held_out)
            ),
            default=0.0,
        )
        """Seconds that a call of an environment may take, since the sandboxes have limits of their
        own: that of a task, and as long for calls of podman and for the build of another episode.
        """
        self.data = {split: [*map(_row, count(), tasks)] for split, tasks in self._tasks.items()}

    def notice(self) -> str:
        """Return a warning for the start of a run. "" if there is nothing to warn of.

        It names tasks whose tests can be reached by the agent's processes, and tasks with another
        network than their folder allows.
        """
        tasks = [each for split in self._tasks.values() for each in split]
        silent = sum(not each.states_network for each in tasks)
        runtime = self._runtime
        chosen = runtime.chosen if isinstance(runtime, AutoRuntime) else lambda task: runtime
        offline = sum(
            isinstance(chosen(each), NamespaceRuntime)
            for each in tasks
            if each.agent_network or each.test_network
        )
        lines = []
        if any(getattr(chosen(each), "tests_in", "own") == "agent" for each in tasks):
            lines.append(
                "The tests run in the agent's sandbox, as in Harbor: a process that the agent left "
                "can read them and write the reward. --task.tests_in own prevents that, and then "
                "agents can install nothing in the system and leave no server running"
            )
        if silent:
            lines.append(
                f"{silent} of {len(tasks)} tasks do not state whether they use a network "
                "(network_mode or allow_internet of task.toml): where it is missing, the tests get "
                "one, and the agent gets none"
            )
        if offline:
            lines.append(
                f"{offline} of {len(tasks)} tasks run in namespaces, which have no network, and "
                "expect one, mostly for their tests"
            )
        return ". ".join(lines)

    def env(self, task: Task, seed: int) -> "TerminalEnv":
        """Return the environment of a task. `seed` is not used, because nothing in it is random."""
        chosen = self._tasks[task.split][self.data_of(task)["number"]]
        return TerminalEnv(chosen, self._runtime, self._commands)


def _row(number: int, task: TerminalTask) -> dict[str, Any]:
    """Return a record that identifies a task: its number, its name and a digest of its content."""
    digest = hashlib.sha256(repr(task).encode()).hexdigest()
    return {"number": number, "name": task.name, "digest": digest}


class TerminalEnv:
    """The environment of one task. The agent's turn ends with a reply without a tool call, or at
    its time limit.

    Only commands take time of this limit. An episode also waits for weights, for the engine and for
    other episodes of its tree, which says nothing about the agent.
    """

    def __init__(
        self,
        task: TerminalTask,
        runtime: Runtime,
        commands: Commands | None = None,
        system: str = SYSTEM,
    ) -> None:
        self._task = task
        self._runtime = runtime
        self._commands = commands or Commands()
        self._system = system
        self._runner = ToolRunner(TOOL, self._run)
        self._sandbox: Sandbox | None = None
        self._is_over = False
        self._used_s = 0.0
        """Seconds that the agent's commands took."""

    async def begin(self) -> Turn:
        self._sandbox = await self._runtime.start(self._task)
        return Turn((Message("system", self._system), Message("user", self._task.instruction)))

    async def step(self, reply: Message) -> Turn:
        if self._is_over:  # the tests are there
            raise EnvError("the episode has ended")
        is_late = self._used_s >= self._task.agent_timeout_s
        if reply.tool_calls and not is_late:
            answers = await self._runner.answer(reply.tool_calls)
            return Turn(answers, facts=self._runner.facts())
        self._is_over = True
        verdict = await self._opened().verify()
        rewards, problem = _rewards(self._task, verdict)
        facts = {"no_reward": float(problem), "out_of_time": float(is_late), **self._runner.facts()}
        return Turn((), done=True, rewards=rewards, facts=facts)

    async def check(self, command: str) -> bool:
        """Return True if a command ends with exit code 0 in the sandbox, such as the tests of a
        repository.

        The policy does not see it, and it takes no time of the agent's limit. What it writes stays.
        """
        limits = self._commands
        result = await self._opened().run(
            command, seconds=limits.seconds, output_kb=limits.output_kb
        )
        return result.code == 0 and result.ended != "timeout"

    async def close(self) -> None:
        if self._sandbox:
            await self._sandbox.close()

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise EnvError("the episode has not begun")
        return self._sandbox

    async def _run(self, command: str) -> str:
        if "\0" in command:
            raise ValueError("a command cannot have the character NUL")
        limits, loop = self._commands, asyncio.get_running_loop()
        seconds = min(limits.seconds, self._task.agent_timeout_s - self._used_s)
        if seconds <= 0:
            return "[not run: the time limit is reached]"
        sandbox, begun = self._opened(), loop.time()
        result = await sandbox.run(command, seconds=seconds, output_kb=limits.output_kb)
        self._used_s += loop.time() - begun
        return _shown(result)


def _shown(result: CommandResult) -> str:
    """Return the text that the agent gets as result of a command."""
    lines = [result.output.rstrip("\n")] if result.output.strip() else []
    if result.ended == "output":
        lines.append("[more output was cut off]")
    if result.ended == "timeout":
        lines.append("[killed at the time limit]")
    elif result.code:
        lines.append(f"[exit code {result.code}]")
    return "\n".join(lines) or "(no output)"


def _rewards(task: TerminalTask, verdict: Verdict) -> tuple[dict[str, float], bool]:
    """Return an episode's rewards, and True if the tests wrote none that can be read, or if their
    exit code is that of a missing program.

    The reward is then 0. An error would let the agent avoid the result of a task that it fails.
    """
    if task.exit_code_decides:
        passed = verdict.tests.code == 0 and verdict.tests.ended != "timeout"
        return {"reward": float(passed)}, verdict.tests.code in _NOT_FOUND
    try:
        value = json.loads(verdict.reward)
        rewards = read_rewards(value if isinstance(value, dict) else {"reward": value})
    except (ValueError, RecursionError, EnvError):
        rewards = {}
    return rewards or {"reward": 0.0}, not rewards


def _make(options: TerminalConfig) -> TerminalTasks:
    folders = [options.env.partition(":")[2], options.held_out_folder]
    isolated = options.runtime in ("podman", "docker")  # agents see no folder of this machine
    for folder in () if isolated else filter(None, folders):
        path = Path(folder).resolve()
        if hiding := [each for each in readable_folders() if path.is_relative_to(each)]:
            raise ConfigError(
                f"{folder} is in {hiding[0]}, which agents can read, so its tests would not be "
                "hidden: move it to another folder"
            )
    runtime = make_runtime(options)
    train, held_out = (
        read_folder(Path(folder), runtime.check) if folder else [] for folder in folders
    )
    commands = Commands(options.command_s, options.output_kb)
    return TerminalTasks("terminal", train, held_out, runtime=runtime, commands=commands)


def make_runtime(options: TerminalConfig) -> Runtime:
    """Return what makes the sandboxes of a task set with these options."""
    limits = (options.storage_mb, options.tests_in)
    namespaces = NamespaceRuntime(options.host_programs, *limits)
    if options.runtime == "namespaces":
        return namespaces
    if options.runtime == "auto":
        return AutoRuntime(namespaces, ContainerRuntime("", *limits))
    return ContainerRuntime(options.runtime, *limits)


ENV = EnvSpec("terminal", _make, TerminalConfig, takes_source=True)
