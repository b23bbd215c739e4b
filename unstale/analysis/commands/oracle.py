"""The command `oracle`: check that the tests of task folders reward the solution that each has."""

import argparse
import asyncio
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import get_args

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import COUNT, JSON, argument, command, console_of
from unstale.config import ConfigError
from unstale.envs import EnvError, Message, ToolCall
from unstale.envs.sandboxes.folders import read_task
from unstale.envs.sandboxes.runtime import Runtime, TerminalTask, TestsIn
from unstale.envs.terminal import Commands, TerminalConfig, TerminalEnv, make_runtime

_PLACE = "d=/solution; mkdir -p $d 2>/dev/null || d=/tmp/solution; "
"""The folder of the solution, as in Harbor, or another one if the root is read-only."""
_PIECE = 16_000
"""Number of bytes of a file that one command writes. Each takes 4 characters of the command, which
may have at most 128 KiB.
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of one task folder. `untouched` is the reward without its solution, and `solved`
    the reward with it. None if the task was not run.
    """

    name: str
    verdict: str
    why: str = ""
    untouched: float | None = None
    solved: float | None = None


async def check_folders(folders: Sequence[Path], runtime: Runtime, at_once: int) -> list[Checked]:
    """Return the results of task folders, in their order. Up to `at_once` are checked at a time."""
    slots = asyncio.Semaphore(at_once)

    async def check(each: Path) -> Checked:
        async with slots:
            return await _check(each, runtime)

    return await asyncio.gather(*map(check, folders))


async def _check(folder: Path, runtime: Runtime) -> Checked:
    try:
        task = read_task(folder)
        runtime.check(task)
    except ConfigError as error:
        return Checked(folder.name, "refused", str(error).replace(f"{folder}", "").strip("/: "))
    commands = list(_solution(folder))
    if not commands:
        return Checked(folder.name, "no solution")
    try:
        untouched, _ = await _reward(task, runtime, ())
        solved, why = await _reward(task, runtime, commands)
    except EnvError as error:
        return Checked(folder.name, "not run", str(error).strip().splitlines()[-1])
    if solved < 1:
        return Checked(folder.name, "fails", why[-300:], untouched, solved)
    if untouched >= 1:
        return Checked(folder.name, "passes untouched", "", untouched, solved)
    return Checked(folder.name, "passes", "", untouched, solved)


async def _reward(
    task: TerminalTask, runtime: Runtime, commands: Sequence[str]
) -> tuple[float, str]:
    """Run these commands in episodes. Return the smallest reward, and the output of the last
    command, or the reason why there is no reward.
    """
    env, output = TerminalEnv(task, runtime, Commands(task.agent_timeout_s, 64)), ""
    try:
        await env.begin()
        for text in (*commands, ""):
            calls = (ToolCall("bash", {"command": text}),) if text else ()
            turn = await env.step(Message("assistant", "", calls))
            if turn.done:
                break
            output = turn.messages[0].content
        if turn.facts["no_reward"]:
            output = "the tests gave no reward that can be read"
        return min(turn.rewards.values()), output
    finally:
        await env.close()


def _solution(folder: Path) -> Iterator[str]:
    """Yield the commands that write the solution of a task and run it. A task without a solution
    has no commands.
    """
    source, main = folder / "solution", "solve.sh"
    if not (source / main).is_file():
        source, main = folder, "solution.sh"
    if not (source / main).is_file():
        return
    files = filter(Path.is_file, source.rglob("*")) if source != folder else [source / main]
    for path in sorted(files):
        name, content = str(path.relative_to(source)), path.read_bytes()
        at = f'"$d"/{quote(name)}'
        yield f'{_PLACE}mkdir -p "$d"/{quote(str(Path(name).parent))}; : > {at}; chmod 755 {at}'
        for start in range(0, len(content), _PIECE):
            text = "".join(f"\\{byte:03o}" for byte in content[start : start + _PIECE])
            yield f"{_PLACE}printf '{text}' >> {at}"
    config = folder / "task.toml"
    read = tomllib.loads(config.read_text("utf-8")) if config.is_file() else {}
    env = read.get("solution", {}).get("env", {})
    given = "".join(f"export {name}={quote(str(value))}; " for name, value in env.items())
    yield f'{_PLACE}{given}bash "$d"/{main}'


def _oracle(chosen: argparse.Namespace) -> int:
    if not chosen.folder.is_dir():
        raise ConfigError(f"there is no folder {chosen.folder} with tasks")
    options = TerminalConfig(
        env=f"terminal:{chosen.folder}",
        runtime=chosen.runtime,
        tests_in=chosen.tests_in,
        host_programs=chosen.host_programs,
    )
    folders = sorted(filter(Path.is_dir, chosen.folder.iterdir()))
    found = asyncio.run(check_folders(folders, make_runtime(options), chosen.at_once))
    counts = Counter(each.verdict for each in found)
    if chosen.json:
        print_json({"tasks": [asdict(each) for each in found], "counts": dict(counts)})
    else:
        console = console_of(chosen)
        for each in found:
            rewards = "" if each.solved is None else f" ({each.untouched:g}, {each.solved:g})"
            text = f"{each.name}: {each.verdict}{rewards} {each.why}".strip()
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        total = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
        console.print(f"{len(found)} folders: {total}", highlight=False)
    return int(set(counts) != {"passes"})


add = command(
    "oracle",
    "check that the tests of task folders reward their solutions, and nothing else",
    argument("folder", type=Path, help="a folder with folders of Harbor or Terminal-Bench"),
    argument("--runtime", default="auto", choices=("auto", "namespaces", "podman", "docker")),
    argument("--tests-in", default="agent", choices=get_args(TestsIn), help="default: agent"),
    argument("--host-programs", action="store_true", help="as task.host_programs"),
    argument("--at-once", type=COUNT, default=2, metavar="N", help="tasks at once; default: 2"),
    JSON,
)(_oracle)
