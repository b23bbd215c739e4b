"""Terminal tasks, and the interface of the sandboxes in which agents work on them.

To use other sandboxes, such as a remote service, write an object with the methods of `Runtime`,
which returns objects with those of `Sandbox`. Pass it to `TerminalTasks`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Ended = Literal["exited", "timeout", "output"]
TestsIn = Literal["agent", "own"]
"""The sandbox of the tests. `agent`: that of the agent, beside the processes that it left, as in
Harbor. `own`: one that is made from the files in its working directory when they are dead.
"""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a task: its content, and True if it is executable."""

    content: bytes
    executable: bool = False


Files = Mapping[str, File]
"""Path, relative to a folder -> file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """A task for an agent with a shell: an instruction, an environment and hidden tests."""

    name: str
    instruction: str
    environment: Files = field(default_factory=dict)
    """The files that `dockerfile` may copy (its build context)."""
    dockerfile: str = "FROM scratch\nWORKDIR /app\nCOPY . .\n"
    tests: Files
    """Hidden files, which appear in /tests after the agent's turn."""
    test_command: Sequence[str] = ("/tests/test.sh",)
    exit_code_decides: bool = False
    """True if the reward is 1 for exit code 0 of the tests, and otherwise 0. False if the tests
    write one of the `REWARD_FILES`.
    """
    env: Mapping[str, str] = field(default_factory=dict)
    test_env: Mapping[str, str] = field(default_factory=dict)
    agent_timeout_s: float = 900.0
    """Seconds that the agent's commands may take together."""
    test_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    storage_mb: int = 10_240
    memory_mb: int = 2048
    cpus: float = 1.0
    """Limits of a container. A process in namespaces has 2 GB of addresses."""
    agent_network: bool = False
    """True if the agent's commands may use the network, which namespaces do not have."""
    test_network: bool = False
    """True if the tests may use it."""
    states_network: bool = field(default=True, repr=False)
    """False if the task's folder does not state both. Left out of `repr`, which identifies the
    task.
    """
    workdir: str = ""
    """Folder of commands and tests, instead of the last WORKDIR of the Dockerfile."""
    image: str = ""
    """Name of an image to use instead of the Dockerfile, if the runtime supports images."""


_SIGNALLED = 128
"""Exit codes above this one mean that a signal ended the command."""
MAX_PROCESSES = 128
"""Largest number of processes in a sandbox."""
REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Files for the rewards: a number or a JSON object. The first one that exists counts,
as in Harbor.
"""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The output of a command (stdout and stderr together) and its exit code.

    The code is 128 + n after signal n. `ended` is `timeout` if the command was killed at its time
    limit, and `output` if its output was cut off.
    """

    output: str
    code: int
    ended: Ended

    @property
    def was_killed(self) -> bool:
        """True if a signal or the time limit ended the command."""
        return self.code > _SIGNALLED or self.ended == "timeout"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the tests, and the text of the first reward file.

    The text is empty if there is no file, if it is not a plain file, or if the tests were killed.
    In the last case, the file may have been written by code of the agent that the tests ran.
    """

    tests: CommandResult
    reward: str


class Sandbox(Protocol):
    """A sandbox in which the agent of one episode works."""

    async def run(self, command: str, *, seconds: float, output_kb: int) -> CommandResult:
        """Run a command of the agent in a shell, in the task's working directory.

        After `seconds` it is killed, and its output is cut off at `output_kb`. Its background
        processes live until `verify`. Raises `EnvError` if the sandbox has ended.
        """
        ...

    async def verify(self) -> Verdict:
        """End the agent's turn, run the hidden tests and return their result.

        With `TestsIn` own, all processes of the agent must have ended before the tests are written.
        Nothing that it wrote may be in the place of the tests, the reward files or the system's
        programs.
        """
        ...

    async def close(self) -> None:
        """End all processes and remove all files."""
        ...


class Runtime(Protocol):
    """Makes sandboxes."""

    def check(self, task: TerminalTask) -> None:
        """Raise `ConfigError`, with the reason, if a sandbox for this task cannot be made."""
        ...

    async def start(self, task: TerminalTask) -> Sandbox:
        """Return a new sandbox with the task's environment. Raises `EnvError` if it cannot be
        built.
        """
        ...
