"""What a terminal task is, and the interface of the places where its agent works.

A runtime of your own, such as a service with remote sandboxes, has the methods of `Runtime` and
returns objects with those of `Sandbox`. Give it to `TerminalTasks`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Ended = Literal["exited", "timeout", "output"]


@dataclass(frozen=True, slots=True)
class File:
    """A file of a task: its content, and whether it can be executed."""

    content: bytes
    executable: bool = False


Files = Mapping[str, File]
"""Files by their path, relative to the folder that has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """A task with an instruction, an environment and hidden tests."""

    name: str
    instruction: str
    environment: Files = field(default_factory=dict)
    """The build context, in which `dockerfile` copies."""
    dockerfile: str = "FROM scratch\nWORKDIR /app\nCOPY . .\n"
    tests: Files
    """Hidden files. They are at /tests when the agent's turn is over."""
    test_command: Sequence[str] = ("/tests/test.sh",)
    exit_code_decides: bool = False
    """True if the reward is 1 for the exit code 0 of the tests. Otherwise they write a file of
    `REWARD_FILES`.
    """
    env: Mapping[str, str] = field(default_factory=dict)
    test_env: Mapping[str, str] = field(default_factory=dict)
    agent_timeout_s: float = 900.0
    """Seconds that the agent's commands may take together."""
    test_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    storage_mb: int = 10_240
    image: str = ""
    """A ready image, used instead of the Dockerfile where images can be had."""


REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Files in which tests write rewards, a JSON object or a number. The first that exists counts."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The output of a command, stdout and stderr together, and its exit code.

    The code is 128 + n after signal n. `ended` is `timeout` if the command was killed at its time
    limit, and `output` if its output was cut off.
    """

    output: str
    code: int
    ended: Ended


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said: their own result, and the text of the first reward file.

    The text is empty without a file, if it is no plain file, and if the tests were killed: code of
    the agent that they ran may have written it and killed them.
    """

    tests: CommandResult
    reward: str


class Sandbox(Protocol):
    """A place in which the agent of one episode works."""

    async def run(self, command: str, *, seconds: float, output_kb: int) -> CommandResult:
        """Run a command of the agent in a shell, in the task's working directory.

        Processes that it leaves in the background stay until `verify`. Raises `EnvError` if the
        sandbox has ended.
        """
        ...

    async def verify(self) -> Verdict:
        """End the agent's turn and run the hidden tests.

        No process of the agent may be alive when the tests arrive, and nothing that it wrote may
        be in the place of the tests, of the reward files or of the system's programs.
        """
        ...

    async def close(self) -> None:
        """End all processes and remove all files."""
        ...


class Runtime(Protocol):
    """A way to make sandboxes."""

    def check(self, task: TerminalTask) -> None:
        """Raise `ConfigError` if the task needs what this runtime cannot give, and name it."""
        ...

    async def start(self, task: TerminalTask) -> Sandbox:
        """Build the environment of a task and return a sandbox. Raises `EnvError` if it fails."""
        ...
