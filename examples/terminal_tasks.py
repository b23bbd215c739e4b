"""Endless sets of terminal tasks that a program makes: jobs in a shell, repairs, and issues.

    unstale train examples.terminal_tasks:train_jobs       # in a checkout, with the small model
    unstale train examples.terminal_tasks:train_repairs
    unstale train llm --model MODEL --task.env examples.terminal_tasks:jobs
    unstale attempt RUN llm --task.env examples.terminal_tasks:issues \\
        --stages examples/repair_stages.toml --judge REWARD_MODEL

A job is written in a file: what to compute of another file, and where to write it. A repair is a
small repository with a bug, and an issue about it. Both have hidden tests. Issues are repairs in
whose repository there are tests, too, which some wrong repairs pass. Each set has
demonstrations for a supervised start: their format is right, and most of their decisions are wrong,
so that reinforcement learning has to find the right ones.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from unstale.config import (
    EngineConfig,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    SftConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.envs import Message, NumberedTasks, ToolCall
from unstale.envs.sandboxes.namespaces import NamespaceRuntime
from unstale.envs.sandboxes.runtime import File, Runtime, TerminalTask
from unstale.envs.terminal import SYSTEM, TOOL, Commands, TerminalEnv
from unstale.records import Task

RIGHT = 0.3
"""Share of the decisions of a demonstration that are right."""
NAMES: tuple[str, ...] = ("parts", "sales", "notes", "items", "rooms", "trips")
NAMES += ("books", "cards", "boxes", "lamps", "seats", "teams")


@dataclass(frozen=True)
class Solved:
    """A task, and an episode that may solve it: commands with what the agent reads of each."""

    task: TerminalTask
    commands: Sequence[tuple[str, str]]


class MadeTasks(NumberedTasks):
    """Tasks that `make` draws. It gets a random generator, and the share of right decisions."""

    tools: tuple[Mapping[str, Any], ...] = (TOOL,)

    def __init__(self, name: str, make: Callable[[Random, float], Solved]) -> None:
        self.name = name
        self._make = make
        self._runtime: Runtime = NamespaceRuntime(storage_mb=8)

    def solved(self, task: Task, right: float = 1.0) -> Solved:
        """Return a task with an episode in which the share `right` of the decisions is right."""
        return self._make(Random(self.seed_of(task)), right)

    def env(self, task: Task, seed: int) -> TerminalEnv:
        """Return the environment of a task. `seed` is not used: the number decides everything."""
        return TerminalEnv(self.solved(task).task, self._runtime, Commands(5.0, 1))

    def demonstration(self, task: Task) -> tuple[Message, ...]:
        """Return the episode of an expert that makes mistakes."""
        solved = self.solved(task, RIGHT)
        messages = [Message("system", SYSTEM), Message("user", solved.task.instruction)]
        for command, output in solved.commands:
            call = ToolCall("bash", {"command": command})
            messages += [Message("assistant", "", (call,)), Message("tool", output)]
        return (*messages, Message("assistant", "Done."))


JOBS: Mapping[str, tuple[str, Callable[[list[int]], list[int]]]] = {
    "the largest number": ("sort -n {} | tail -n 1", lambda rows: [max(rows)]),
    "the smallest number": ("sort -n {} | head -n 1", lambda rows: [min(rows)]),
    "the count of lines": ("wc -l < {}", lambda rows: [len(rows)]),
    "all numbers from small to large": ("sort -n {}", sorted),
    "all numbers from large to small": ("sort -nr {}", lambda rows: sorted(rows, reverse=True)),
    "each number once": ("sort -nu {}", lambda rows: sorted({*rows})),
    "the first line": ("head -n 1 {}", lambda rows: rows[:1]),
    "the last line": ("tail -n 1 {}", lambda rows: rows[-1:]),
    "all lines but the first": ("tail -n +2 {}", lambda rows: rows[1:]),
    "all lines but the last": ("head -n -1 {}", lambda rows: rows[:-1]),
    "all lines backwards": ("tac {}", lambda rows: rows[::-1]),
}
"""What a job can want: the command, and the same in Python."""


def job(random: Random, right: float) -> Solved:
    """Draw a job: `job.txt` says what of a file with numbers is written to another file."""
    rows = [random.choice((random.randrange(2, 10), random.randrange(10, 100))) for _ in range(7)]
    rows.insert(random.randrange(1, 7), rows[0])  # so that one of them is there twice
    source, target = random.sample(NAMES, 2)
    wanted = random.choice([*JOBS])
    text = f"Write {wanted} of {source} to {target}."
    done = wanted if random.random() < right else random.choice([*JOBS])
    answer = "".join(f"{row}\n" for row in JOBS[wanted][1](rows))
    test = (
        f"#!/bin/sh\n[ ! -L {target} ] && cmp -s {target} /tests/answer && reward=1 || reward=0\n"
        "echo $reward > /logs/verifier/reward.txt\n"
    )
    task = TerminalTask(
        name="job",
        instruction="Do what job.txt says.",
        environment={
            "job.txt": File(f"{text}\n".encode()),
            source: File("".join(f"{row}\n" for row in rows).encode()),
        },
        tests={"test.sh": File(test.encode(), True), "answer": File(answer.encode())},
    )
    command = f"{JOBS[done][0].format(source)} > {target}"
    return Solved(task, (("cat job.txt", text), (command, "(no output)")))


OPERATORS = {
    "the sum": ("+", lambda a, b: a + b),
    "the difference": ("-", lambda a, b: a - b),
    "the product": ("*", lambda a, b: a * b),
    "the remainder": ("%", lambda a, b: a % b),
    "the larger one": (">", lambda a, b: a if a > b else b),
    "the smaller one": ("<", lambda a, b: a if a < b else b),
}
"""What a function can compute: the operator in its line, and the same in Python."""
VALUES = ((7, 3), (2, 9), (12, 5), (4, 4))

CHECK = '''"""Call the functions of shop.py where the right results are not known, and compare."""
import json, os, select, signal, shutil
want = open("/tests/want.json")
names, values = json.loads(want.readline())
shutil.rmtree("/tests", ignore_errors=True)
import ctypes
ctypes.CDLL(None).prctl(4, 0)  # the functions' process cannot trace this one
reading, writing = os.pipe()
if not os.fork():
    os.close(want.fileno())
    try:
        space = {}
        exec(open("/app/shop.py").read(), space)
        found = [[space[name](*pair) for pair in values] for name in names]
        os.write(writing, json.dumps(found).encode())
    finally:
        os._exit(0)
os.close(writing)
found = os.read(reading, 65536) if select.select([reading], [], [], 5)[0] else b""
try:
    os.kill(-1, signal.SIGKILL)  # all others, so that none can change the reward
except ProcessLookupError:
    pass
try:
    is_right = json.loads(found) == json.loads(want.readline())
except ValueError:
    is_right = False
for entry in os.scandir("/logs/verifier"):
    shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
with open("/logs/verifier/reward.txt", "x") as file:
    file.write(str(int(is_right)))
'''


def repair(random: Random, right: float) -> Solved:
    """Draw a repository with three functions, of which one has a wrong operator."""
    names, kinds = random.sample(NAMES, 3), random.choices([*OPERATORS], k=3)
    broken = random.randrange(3)
    wrong = random.choice([kind for kind in OPERATORS if kind != kinds[broken]])
    written = [wrong if place == broken else kind for place, kind in enumerate(kinds)]
    lines = [
        line
        for name, kind in zip(names, written, strict=True)
        for line in (f"def {name}(a, b):", _body(OPERATORS[kind][0]))
    ]
    kind = kinds[broken] if random.random() < right else random.choice([*OPERATORS])
    want = [[OPERATORS[each][1](*pair) for pair in VALUES] for each in kinds]
    rows = "\n".join(map(json.dumps, ([names, VALUES], want)))
    task = TerminalTask(
        name="repair",
        instruction=f"{names[broken]} in shop.py must return {kinds[broken]}.",
        environment={"shop.py": File("".join(f"{line}\n" for line in lines).encode())},
        tests={
            "test.sh": File(b"#!/bin/sh\nexec python3 -I -S /tests/check.py\n", True),
            "check.py": File(CHECK.encode()),
            "want.json": File(rows.encode()),
        },
    )
    number, name = 2 * broken + 2, names[broken]
    shown = f"{number - 1}:{lines[number - 2]}\n{number}-{lines[number - 1]}"
    command = f"sed -i '{number}c\\{_body(OPERATORS[kind][0])}' shop.py"
    return Solved(task, ((f"grep -nA1 {name} shop.py", shown), (command, "(no output)")))


def issue(random: Random, right: float) -> Solved:
    """Draw a repair whose repository has a test of each function, with equal arguments."""
    solved = repair(random, right)
    rows = solved.task.tests["want.json"].content.decode().splitlines()
    (names, values), want = map(json.loads, rows)
    lines = ["from shop import *"]
    for name, results in zip(names, want, strict=True):
        lines.append(f"assert {name}{tuple(values[-1])} == {results[-1]}")
    test = File("".join(f"{line}\n" for line in lines).encode())
    files = {**solved.task.environment, "test_shop.py": test}
    return replace(solved, task=replace(solved.task, environment=files))


def _body(operator: str) -> str:
    """Return the line of a function with an operator."""
    choice = f"a if a {operator} b else b" if operator in "<>" else f"a {operator} b"
    return f" return {choice}"


def jobs() -> MadeTasks:
    """Return the task set of jobs in a shell."""
    return MadeTasks("jobs", job)


def repairs() -> MadeTasks:
    """Return the task set of small repositories with a bug."""
    return MadeTasks("repairs", repair)


def issues() -> MadeTasks:
    """Return the task set of repairs with tests in the repository."""
    return MadeTasks("issues", issue)


def _run(tasks: str, start: int, trainer: TrainerConfig) -> RunConfig:
    return RunConfig(
        recipe=f"train_{tasks}",
        max_steps=45,
        task=TaskConfig(env=f"examples.terminal_tasks:{tasks}"),
        sft=SftConfig(steps=start, demonstrations=4096, batch=24, lr=2e-3),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=16, group_size=8),
        engine=EngineConfig(max_context=512, max_completion_tokens=64),
        rollout=RolloutConfig(max_turns=4),
        trainer=trainer,
        eval=EvalConfig(tasks=256, interval=15),
    )


def train_jobs() -> RunConfig:
    """Jobs in a shell, with the small model of the package and a supervised start."""
    return _run("jobs", 450, TrainerConfig(lr=1e-3, warmup_steps=3))


def train_repairs() -> RunConfig:
    """Small repositories with a bug, likewise."""
    return _run("repairs", 1500, TrainerConfig(lr=5e-4, warmup_steps=3))
