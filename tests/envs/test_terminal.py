"""Terminal tasks: sandboxes in namespaces, hidden tests, and attacks on them."""

import asyncio
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.waits import wait_until
from unstale.builders.sampling import print_notice
from unstale.config import ConfigError, make_task
from unstale.durability.virtual_clock import run as run_loop
from unstale.envs import EnvError, Message, ToolCall, Turn
from unstale.envs.mixed import MixedTasks
from unstale.envs.registry import build_taskset
from unstale.envs.sandboxes.folders import read_folder, read_task
from unstale.envs.sandboxes.namespaces import NamespaceRuntime
from unstale.envs.sandboxes.runtime import (
    CommandResult,
    File,
    Runtime,
    TerminalTask,
    TestsIn,
    Verdict,
)
from unstale.envs.terminal import Commands, TerminalEnv, TerminalTasks
from unstale.isolation import isolate
from unstale.testing import check_env

SECRET = "the-hidden-answer"
CHECK = f"""#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat answer.txt)" = {SECRET} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def script(text: str) -> File:
    return File(text.encode(), executable=True)


def task(**changes: object) -> TerminalTask:
    """A task that an agent can only solve by reading its tests."""
    plain = TerminalTask(
        name="guess",
        instruction="Write the hidden answer to answer.txt.",
        environment={"notes.txt": File(b"nothing\n")},
        tests={"test.sh": script(CHECK)},
    )
    return replace(plain, **changes)


def play(
    each: TerminalTask,
    *commands: str,
    seconds: float = 5.0,
    run: Any = asyncio.run,
    runtime: Runtime | None = None,
) -> tuple[list[str], Turn]:
    """Run an episode. Return what the agent reads, and the last turn."""

    async def episode() -> tuple[list[str], Turn]:
        env = TerminalEnv(each, runtime or NamespaceRuntime(storage_mb=32), Commands(seconds, 4))
        try:
            await env.begin()
            read = []
            for command in commands:
                call = ToolCall("bash", {"command": command})
                turn = await env.step(Message("assistant", "", tool_calls=(call,)))
                read.append(turn.messages[0].content)
            last = await env.step(Message("assistant", "done"))
            with pytest.raises(EnvError, match="the episode has ended"):
                call = ToolCall("bash", {"command": "cat /tests/*"})
                await env.step(Message("assistant", "", tool_calls=(call,)))
            return read, last
        finally:
            await env.close()

    return run(episode())


def test_episode_is_the_same_under_the_virtual_clock() -> None:
    commands = ("ls -l --time-style=+ /app", f"printf {SECRET} > answer.txt", "cat answer.txt")
    assert play(task(), *commands, run=partial(run_loop, virtual=True)) == play(task(), *commands)


def test_commands_work_in_a_folder_that_stays() -> None:
    read, last = play(
        task(),
        "cat notes.txt; pwd",
        "echo 3 > n; false",
        "cat n; cat none",
        "echo it >&2; python3 -c 'print(6 * 7)'",
        f"printf {SECRET} > answer.txt",
    )
    assert read[:2] == ["nothing\n/app", "[exit code 1]"]
    assert read[2] == "3\ncat: none: No such file or directory\n[exit code 1]"
    assert read[3:] == ["it\n42", "(no output)"]
    assert dict(last.rewards) == {"reward": 1.0}
    assert last.facts["tool_calls"] == 5.0


def test_limits_of_time_and_output_are_told() -> None:
    read, last = play(task(), "echo begun; sleep 60", "yes", "echo alive", seconds=0.5)
    assert read[0] == "begun\n[killed at the time limit]"
    assert read[1].endswith("y\n[more output was cut off]\n[exit code 137]") and len(read[1]) < 5000
    assert read[2] == "alive"
    assert dict(last.rewards) == {"reward": 0.0}


def test_time_limit_of_the_agent_ends_its_turn() -> None:
    async def episode() -> Turn:
        env = TerminalEnv(task(agent_timeout_s=0.0), NamespaceRuntime())
        await env.begin()
        call = ToolCall("bash", {"command": "echo late > answer.txt"})
        turn = await env.step(Message("assistant", "", tool_calls=(call,)))
        await env.close()
        return turn

    turn = asyncio.run(episode())
    assert turn.done and turn.facts["out_of_time"] == 1.0 and turn.facts["tool_calls"] == 0.0


def test_a_call_may_take_as_long_as_the_limits_of_the_tasks(tmp_path: Path) -> None:
    """An image is built, and tests run, for longer than other environments may take."""
    harbor(tmp_path / "some/one", **{"task.toml": "[verifier]\ntimeout_sec = 3000\n"})
    options = make_task(f"terminal:{tmp_path}/some", isolate="process")
    tasks = build_taskset(options)
    mixed = MixedTasks("both", [TerminalTasks("other", [task()]), tasks])
    found = [each.longest_call_s for each in (tasks, isolate(tasks, options), mixed)]
    assert found == [6000.0] * 3


def test_commands_of_one_reply_share_the_time_limit_of_the_agent() -> None:
    calls = tuple(ToolCall("bash", {"command": each}) for each in ("sleep 60", "echo 1 > late"))

    async def episode() -> list[Turn]:
        env = TerminalEnv(task(agent_timeout_s=0.5), NamespaceRuntime())
        await env.begin()
        turns = [await env.step(Message("assistant", "", tool_calls=calls)) for _ in range(2)]
        await env.close()
        return turns

    first, last = asyncio.run(episode())
    assert [each.content for each in first.messages] == [
        "[killed at the time limit]",
        "[not run: the time limit is reached]",
    ]
    assert last.done and last.facts["out_of_time"] == 1.0


class SlowSandbox:
    """A sandbox, and the runtime that returns it, in which each command takes 40 s."""

    def check(self, task: TerminalTask) -> None:
        pass

    async def start(self, task: TerminalTask) -> "SlowSandbox":
        return self

    async def run(self, command: str, *, seconds: float, output_kb: int) -> CommandResult:
        await asyncio.sleep(40)
        return CommandResult("", 0, "exited")

    async def verify(self) -> Verdict:
        return Verdict(CommandResult("", 0, "exited"), "1")

    async def close(self) -> None:
        pass


def test_only_commands_take_time_of_the_agents_limit() -> None:
    async def episode() -> list[Turn]:
        env = TerminalEnv(task(agent_timeout_s=60.0), SlowSandbox())
        await env.begin()
        turns = []
        for _ in range(3):
            await asyncio.sleep(1000)  # for the engine, or for other episodes of a tree
            call = ToolCall("bash", {"command": "true"})
            turns.append(await env.step(Message("assistant", "", tool_calls=(call,))))
        return turns

    turns = run_loop(episode(), virtual=True)
    assert [turn.done for turn in turns] == [False, False, True]
    assert turns[-1].facts["out_of_time"] == 1.0 and turns[-1].facts["tool_calls"] == 2.0


FAKE_PYTEST = "import os; open('/logs/verifier/reward.txt', 'w').write('1'); os._exit(0)"
WATCHER = (
    "setsid bash -c 'while true; do cp /tests/* /app/; echo 1 > /logs/verifier/reward.txt; "
    'sed -n "s/.*= \\(the[a-z-]*\\).*/\\1/p" /tests/test.sh > answer.txt; done\' &>/dev/null &'
)
ATTACKS = {
    "read the tests": f"grep -rl {SECRET} / 2>/dev/null; ls -R /tests; find / -name 'test.sh'",
    "write the reward first": "echo 1 > /logs/verifier/reward.txt; ls /logs/verifier",
    "replace the reward's folder": "mv /logs /was; rm -rf /logs/verifier; mkdir -p /logs/verifier",
    "FIFO for the reward": "mkfifo /logs/verifier/reward.txt; rm -rf /logs; mkfifo /logs",
    "link to the reward": "ln -s /app/mine /logs/verifier/reward.txt; echo 1 > /app/mine",
    "hard link to the reward": "echo 1 > m; ln m /logs/verifier/reward.txt",
    "link in place of the tests": "mkdir own; rmdir /tests; ln -s /app/own /tests",
    "hard link to the tests": "ln /tests/test.sh here; ln /usr/bin/bash own",
    "a watching process": WATCHER,
    "planted programs": "for n in bash cat mkdir python3; do printf '#!/bin/sh\\necho 1 > "
    "/logs/verifier/reward.txt' > $n; chmod +x $n; cp $n /usr/bin/ /bin/ /python/bin/; done; "
    "export PATH=/app:$PATH; mkdir -p ~/bin; cp bash ~/bin",
    "planted start files": "for f in .bashrc .profile .bash_profile .bash_login .bash_env; do "
    "echo 'echo 1 > /logs/verifier/reward.txt; exit' > ~/$f; done; "
    "echo /app/x.so > /etc/ld.so.preload; mv /etc /was; mkdir /etc",
    "mount over the tests": "mount -t tmpfs x /tests; unshare -Urm true; mount -o remount,rw /",
    "a new root": "chroot / true; pivot_root / /app",
    "fill the disk": "head -c 1G /dev/zero > big; for i in $(seq 20000); do echo > f$i; done",
    "fork bomb": ":(){ :|:& };: ; :",
    "end the holder": "kill -9 -1; kill -9 1; kill -9 $PPID",
    "trace the first process": 'python3 -c "import ctypes; '
    'print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"; cat /proc/1/mem | head -c 1',
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_fails(name: str) -> None:
    """Each leaves the reward at 0, shows nothing of the tests, and does not stop the verdict."""
    read, last = play(task(), ATTACKS[name], "cat /app/* /logs/verifier/* 2>/dev/null; echo alive")
    assert SECRET not in "".join(read)
    assert "test.sh" not in read[0] or "No such file" in read[0]
    assert dict(last.rewards) == {"reward": 0.0}
    assert last.facts["no_reward"] == 0.0, "the tests ran and wrote their reward"


SERVER = "mkfifo in out; setsid bash -c 'while read x < in; do echo $x > out; done' &>/dev/null &"
ASK_SERVER = 'echo here > in && read -t 9 answer < out && [ "$answer" = here ]'


@pytest.mark.parametrize("tests_in", ["agent", "own"])
def test_running_server_answers_tests_in_the_agents_sandbox_only(tests_in: TestsIn) -> None:
    code = f"#!/bin/bash\n(sleep 2; kill $$) &\n{ASK_SERVER}; echo $((1 - $?)) > /logs/verifier/"
    hidden = {"test.sh": script(f"{code}reward.txt\n")}
    runtime = NamespaceRuntime(tests_in=tests_in)
    _, last = play(task(tests=hidden), SERVER, "ls /tests /logs/verifier", runtime=runtime)
    assert dict(last.rewards) == {"reward": float(tests_in == "agent")}


def test_agent_never_sees_the_tests_that_run_in_its_sandbox() -> None:
    runtime = NamespaceRuntime(tests_in="agent")
    attacks = [text for name, text in ATTACKS.items() if name != "fork bomb"]
    read, last = play(task(), *attacks, "cat /tests/*; echo alive", runtime=runtime)
    assert SECRET not in "".join(read) and read[-1].endswith("alive")
    assert last.done and last.facts["no_reward"] == 0.0


def test_root_of_the_machine_is_not_in_reach() -> None:
    own = Path(__file__)
    read, _ = play(task(), f"cat {own}; ls /work /proc/1/root; id -u; cat /etc/shadow", "ls /")
    assert "No such file" in read[0] and "Terminal tasks" not in read[0]
    assert not {"work", "mnt", ".old"} & set(read[1].split())


PYTHON_TEST = b"""
import pathlib, pytest
def test_answer():
    assert pathlib.Path("answer.txt").read_text() == "%s"
""" % SECRET.encode()
PYTEST = script(
    "#!/bin/bash\npython3 -m pytest -q /tests/test_it.py && echo 1 > /logs/verifier/reward.txt "
    "|| echo 0 > /logs/verifier/reward.txt\n"
)


@pytest.mark.parametrize("module", ["pytest", "sitecustomize", "usercustomize", "conftest", "os"])
def test_planted_modules_are_not_imported_by_the_tests(module: str) -> None:
    """`pytest` is none of the package's programs, so a stand-in of the tests is imported."""
    stand_in = b"import runpy, sys\nrunpy.run_path(sys.argv[-1])['test_answer']()\n"
    hidden = {"test.sh": PYTEST, "test_it.py": File(PYTHON_TEST), "pytest.py": File(stand_in)}
    dockerfile = "FROM scratch\nWORKDIR /app\nENV PYTHONPATH=/app PATH=/app:/bin BASH_ENV=/app/b\n"
    plant = (
        f'echo "{FAKE_PYTEST}" > {module}.py; echo "echo 1 > /logs/verifier/reward.txt; exit" > b; '
        f"d=~/.local/lib/python3.{sys.version_info.minor}/site-packages; mkdir -p $d; "
        f"cp {module}.py $d; echo 'import {module}' > $d/a.pth; touch pytest.ini"
    )
    _, last = play(task(dockerfile=dockerfile, tests=hidden), plant)
    assert dict(last.rewards) == {"reward": 0.0} and last.facts["no_reward"] == 0.0
    _, last = play(task(dockerfile=dockerfile, tests=hidden), f"printf {SECRET} > answer.txt")
    assert dict(last.rewards) == {"reward": 1.0}


BAD_REWARDS = {
    "none": "true",
    "FIFO": "mkfifo /logs/verifier/reward.txt",
    "link": "echo 1 > /app/mine; ln -s /app/mine /logs/verifier/reward.txt",
    "folder": "mkdir /logs/verifier/reward.json",
    "text": "echo one > /logs/verifier/reward.txt",
    "infinite": "echo '{\"a\": 1e999}' > /logs/verifier/reward.json",
    "large": "yes 1 | head -c 3000000 > /logs/verifier/reward.txt",
}


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_reward_file_that_cannot_be_read_counts_as_0(name: str) -> None:
    hidden = {"test.sh": script(f"#!/bin/bash\n{BAD_REWARDS[name]}\n")}
    _, last = play(task(tests=hidden))
    assert dict(last.rewards) == {"reward": 0.0} and last.facts["no_reward"] == 1.0


@pytest.mark.parametrize(("text", "missing"), [("exit 1", 0.0), ("no-such-program", 1.0)])
def test_missing_program_of_the_tests_is_told_apart_from_a_failure(
    text: str, missing: float
) -> None:
    hidden = {"test.sh": script(f"#!/bin/bash\n{text}\n")}
    _, last = play(task(tests=hidden, exit_code_decides=True))
    assert dict(last.rewards) == {"reward": 0.0} and last.facts["no_reward"] == missing


def test_process_of_the_tests_cannot_change_the_reward_later() -> None:
    late = "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n(sleep 0.2; echo 1 > reward.txt) &\n"
    _, last = play(task(tests={"test.sh": script(late)}, test_timeout_s=1.0))
    assert dict(last.rewards) == {"reward": 0.0}
    slow = script('#!/bin/bash\necho \'{"a": 0.5, "b": true}\' > /logs/verifier/reward.json\n')
    _, last = play(task(tests={"test.sh": slow}))
    assert dict(last.rewards) == {"a": 0.5, "b": 1.0}


@pytest.mark.parametrize("name", ["fork bomb", "planted programs", "trace the first process"])
def test_attacks_as_an_ordinary_user_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, the sandbox has the user of this process.

    A fork bomb that goes on leaves the agent no process for its next command.
    """
    if os.getuid() or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("only root can become another user, which needs a Python that it can read")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    other = {"user": 65_534, "group": 65_534, "extra_groups": []}
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, **other))
    read, last = play(task(), ATTACKS[name], "id -u; cat /app/* 2>/dev/null; echo alive")
    assert SECRET not in "".join(read) and ("0\n" in read[1] or name == "fork bomb")
    assert dict(last.rewards) == {"reward": 0.0} and last.facts["no_reward"] == 0.0


def test_closed_sandbox_leaves_no_process() -> None:
    async def episode() -> Sequence[str]:
        env = TerminalEnv(task(), NamespaceRuntime())
        await env.begin()
        call = ToolCall("bash", {"command": "sleep 4242 & sleep 4242 &"})
        await env.step(Message("assistant", "", tool_calls=(call,)))
        await_processes(some=True)
        await env.close()
        return processes()

    assert not asyncio.run(episode())


def test_threads_do_not_grow_with_the_sandboxes() -> None:
    """Each thread would compete with the run's event loop for the interpreter lock."""

    async def threads(number: int) -> int:
        runtime = NamespaceRuntime(storage_mb=8)
        sandboxes = await asyncio.gather(*(runtime.start(task()) for _ in range(number)))
        running = [
            asyncio.create_task(each.run("echo; sleep 4242", seconds=0.5, output_kb=1))
            for each in sandboxes
        ]
        await asyncio.sleep(0.1)
        found = threading.active_count()
        assert [result.ended for result in await asyncio.gather(*running)] == ["timeout"] * number
        await asyncio.gather(*(each.close() for each in sandboxes))
        return found

    few = asyncio.run(threads(2))
    assert asyncio.run(threads(6)) == few


def test_command_that_is_cancelled_does_not_keep_its_sandbox() -> None:
    async def episode() -> Sequence[str]:
        sandbox = await NamespaceRuntime().start(task())
        running = asyncio.create_task(sandbox.run("sleep 4242", seconds=99, output_kb=1))
        await asyncio.to_thread(await_processes, some=True)
        running.cancel()
        await sandbox.close()
        with pytest.raises(EnvError, match="the sandbox has ended"):
            await sandbox.run("true", seconds=9, output_kb=1)
        return processes()

    assert not asyncio.run(episode())


def test_sandboxes_close_beside_many_files_and_when_they_are_cancelled() -> None:
    """`select` fails with descriptors from 1024 on, which 256 sandboxes reach."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this machine does not allow 2,048 open files")

    async def episode() -> None:
        env = TerminalEnv(task(), NamespaceRuntime())
        await env.begin()
        closing = asyncio.create_task(env.close())
        await asyncio.sleep(0)
        closing.cancel()

    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with ExitStack() as files:
            for _ in range(1024):
                files.enter_context(open(os.devnull))
            before = num_files()
            asyncio.run(episode())
            wait_until(lambda: num_files() <= before, f"{before} files, not {num_files()}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.costly
def test_killed_run_leaves_no_process() -> None:
    """A run that is killed while a command runs, and another one while it waits for the policy."""
    code = (
        "import asyncio, sys\nfrom tests.envs.test_terminal import *\nasync def main():\n"
        " sandbox = await NamespaceRuntime().start(task())\n"
        " await sandbox.run('sleep 4242 & sleep 4242 &', seconds=9, output_kb=1)\n"
        " print('.', flush=True)\n"
        " await sandbox.run(sys.argv[1], seconds=99, output_kb=1)\n"
        " await asyncio.sleep(99)\nasyncio.run(main())\n"
    )
    for command in ("sleep 4242", "true"):
        run = subprocess.Popen([sys.executable, "-c", code, command], stdout=subprocess.PIPE)
        assert run.stdout and run.stdout.read(1) == b"."
        await_processes(some=True)
        run.kill()
        run.wait()
        run.stdout.close()
        await_processes(some=False)


def await_processes(*, some: bool, seconds: int = 4242) -> None:
    """Wait until the programs are loaded, or until none is left."""
    for _ in range(200):
        if bool(processes(seconds)) == some:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(processes(seconds))} processes")


def processes(seconds: int = 4242) -> list[str]:
    """Return the command lines of this machine's processes that `sleep` started for so long."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(each.read_text())
        except OSError:
            continue
    return [line for line in found if line.startswith(f"sleep\000{seconds}")]


def harbor(folder: Path, **files: str) -> Path:
    """Write a task folder in the form of Harbor."""
    texts = {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[environment]\nstorage_mb = 9',
        "instruction.md": "<!-- harbor-canary GUID 1 -->\nWrite the answer.\n",
        "environment/Dockerfile": "FROM scratch\nARG N=2\nENV WHO=me \\\n  COUNT=$N\n"
        'WORKDIR /app\nCOPY a.txt sub ./\nADD ["*.md", "docs/"]\nRUN echo $WHO ${COUNT} > who\n'
        'RUN ["cp", "who", "/srv/who"]\nCMD ["bash"]\n',
        "environment/a.txt": "a",
        "environment/sub/b.txt": "b",
        "environment/read.md": "c",
        "tests/test.sh": CHECK,
        "solution/solve.sh": f"printf {SECRET} > answer.txt",
        **files,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_harbor_folder(tmp_path: Path) -> None:
    each = read_task(harbor(tmp_path / "one"))
    assert (each.name, each.instruction) == ("one", "Write the answer.")
    assert (each.agent_timeout_s, each.storage_mb) == (60.0, 9)
    read, last = play(each, "ls -R . ; cat who /srv/who; echo $WHO $COUNT")
    names = read[0].split()
    assert {"a.txt", "b.txt", "./docs:", "read.md"} <= {*names} and "Dockerfile" not in names
    assert names[-6:] == ["me", "2"] * 3
    assert last.rewards["reward"] == 0.0
    solve = (tmp_path / "one/solution/solve.sh").read_text()
    assert play(each, solve)[1].rewards["reward"] == 1.0


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", (False, True)),
        ("[environment]\nallow_internet = true\n", (True, True)),
        ("[environment]\nallow_internet = false\n", (False, False)),
        ("[verifier]\nnetwork_mode = 'no-network'\n", (False, False)),
        ("[environment]\nnetwork_mode='public'\n[agent]\nnetwork_mode='no-network'", (False, True)),
        ("[verifier]\nnetwork_mode = 'public'\n", (False, True)),
    ],
)
def test_network_is_what_the_task_allows_in_each_phase(
    tmp_path: Path, text: str, allowed: tuple[bool, bool]
) -> None:
    each = read_task(harbor(tmp_path / "one", **{"task.toml": text}))
    assert (each.agent_network, each.test_network) == allowed


def test_start_of_a_run_tells_which_tasks_do_not_state_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harbor(tmp_path / "some/silent")
    harbor(tmp_path / "some/half", **{"task.toml": "[verifier]\nnetwork_mode = 'no-network'\n"})
    harbor(tmp_path / "some/clear", **{"task.toml": "[environment]\nallow_internet = false\n"})
    print_notice(build_taskset(make_task(f"terminal:{tmp_path}/some")))
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith("note: The tests run in the agent's sandbox, as in Harbor")
    assert ". 2 of 3 tasks do not state whether they use a network" in told
    assert "the tests get one, and the agent gets none. 1 of 3 tasks run in namesp" in told
    harbor(tmp_path / "all/clear", **{"task.toml": "[environment]\nallow_internet = false\n"})
    print_notice(build_taskset(make_task(f"terminal:{tmp_path}/all", tests_in="own")))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_programs_of_this_machine_are_refused_in_containers(runtime: str) -> None:
    with pytest.raises(ConfigError, match=f"host_programs must be false with .* = {runtime}"):
        make_task("terminal:folder", runtime=runtime, host_programs=True)


def test_reward_json_counts_before_reward_txt() -> None:
    both = script(
        "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\necho 0.5 > /logs/verifier/reward.json\n"
    )
    assert dict(play(task(tests={"test.sh": both}))[1].rewards) == {"reward": 0.5}


def test_workdir_of_the_task_takes_the_place_of_the_dockerfiles(tmp_path: Path) -> None:
    text = "[environment]\nworkdir = '/srv/here'\nmemory = '1G'\ncpus = 2\n"
    each = read_task(harbor(tmp_path / "one", **{"task.toml": text}))
    assert (each.memory_mb, each.cpus) == (1024, 2.0)
    assert play(each, "pwd")[0] == ["/srv/here"]


def test_terminal_bench_folder(tmp_path: Path) -> None:
    yaml = "instruction: |-\n  Write it.\nparser_name: pytest\nmax_agent_timeout_sec: 90.0\n"
    for name, text in {
        "task.yaml": yaml,
        "Dockerfile": "FROM scratch\nWORKDIR /app\nCOPY . .\n",
        "docker-compose.yaml": "services:\n  client:\n    build: .\n",
        "solution.sh": f"printf {SECRET} > answer.txt",
        "run-tests.sh": "python3 $TEST_DIR/test_it.py",
        "tests/test_it.py": f"assert open('answer.txt').read() == '{SECRET}'",
        "data.txt": "7",
    }.items():
        (tmp_path / "two" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "two" / name).write_text(text)
    each = read_task(tmp_path / "two")
    read, last = play(each, "ls")
    assert read[0].split() == ["Dockerfile", "data.txt"], "no tests and no solution"
    assert last.rewards["reward"] == 0.0
    assert play(each, f"printf {SECRET} > answer.txt")[1].rewards["reward"] == 1.0


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"environment/Dockerfile": "FROM a\nFROM b\n"}, "'FROM b' cannot be obeyed"),
        ({"environment/Dockerfile": "FROM a\nCOPY --from=x a b\n"}, "only files of the build"),
        ({"environment/Dockerfile": "FROM a\nADD https://x y\n"}, "only files of the build"),
        ({"environment/Dockerfile": "FROM a\nCOPY none .\n"}, "environment folder has no none"),
        ({"environment/Dockerfile": "FROM a\nRUN <<EOF\nls\nEOF\n"}, "'RUN <<EOF' cannot"),
        ({"environment/Dockerfile": "FROM a\nUSER me\n"}, "'USER me' cannot be obeyed"),
        ({"environment/Dockerfile": "FROM a\nENV A=${B:-1}\n"}, "more than a name"),
        ({"environment/Dockerfile": "FROM a\nHEALTHCHECK NONE\n"}, "HEALTHCHECK NONE"),
        ({"environment/Dockerfile": "FROM ubuntu:24.04\n"}, "needs the image ubuntu:24.04"),
        ({"environment/docker-compose.yaml": "services:"}, "docker-compose.yaml is not supported"),
        ({"task.toml": "[environment]\ngpus = 1\n"}, "gpus is not supported"),
        ({"task.toml": "[[steps]]\nname = 'a'\n"}, "steps is not supported"),
        ({"task.toml": "[agent]\nuser = 'me'\n"}, "agent.user must be root"),
        ({"task.toml": "[agent]\nnetwork_mode = 'allowlist'\n"}, "public or no-network: allowlist"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'\n"}, "environment_mode must be"),
        ({"task.toml": "[verifier.env]\nKEY = '${KEY}'\n"}, "KEY is a variable of the host"),
        ({"task.toml": "version = "}, "cannot be read"),
    ],
)
def test_what_a_sandbox_cannot_give_is_refused_by_name(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    harbor(tmp_path / "train/one", **files)
    with pytest.raises(ConfigError, match=says):
        build_taskset(make_task(f"terminal:{tmp_path}/train", runtime="namespaces"))


def test_all_folders_that_cannot_be_used_are_named_at_once(tmp_path: Path) -> None:
    harbor(tmp_path / "few/good")
    harbor(tmp_path / "few/gpu", **{"task.toml": "[environment]\ngpus = 1\n"})
    harbor(tmp_path / "few/image", **{"environment/Dockerfile": "FROM ubuntu:24.04\n"})
    for number in range(22):
        (tmp_path / f"many/{number:02}").mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        build_taskset(make_task(f"terminal:{tmp_path}/few", runtime="namespaces"))
    first, gpu, image = str(refused.value).splitlines()
    assert first.startswith(f"2 folders in {tmp_path}/few cannot be used as tasks")
    assert gpu.startswith("  gpu: ") and gpu.endswith("gpus is not supported")
    assert image.startswith("  image: image needs the image ubuntu:24.04")
    with pytest.raises(ConfigError) as refused:
        read_folder(tmp_path / "many")
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("22 folders") and lines[20].startswith("  19: ")
    assert lines[21:] == ["  and 2 more"]


def test_failed_command_of_the_dockerfile_is_shown() -> None:
    async def begin() -> None:
        broken = task(dockerfile="FROM scratch\nRUN echo no >&2; exit 3\n")
        await TerminalEnv(broken, NamespaceRuntime()).begin()

    with pytest.raises(EnvError, match=r"RUN .* ended with 3 \(no network\): no"):
        asyncio.run(begin())


def test_folders_are_a_task_set(tmp_path: Path) -> None:
    harbor(tmp_path / "train/one")
    harbor(tmp_path / "train/two", **{"environment/Dockerfile": "FROM ubuntu:24.04\n"})
    harbor(tmp_path / "eval/three")
    options = make_task(
        f"terminal:{tmp_path}/train", held_out_folder=f"{tmp_path}/eval", host_programs=True
    )
    tasks = build_taskset(options)
    assert [each.name for each in read_folder(tmp_path / "train")] == ["one", "two"]
    assert len(tasks.held_out(9)) == 1
    assert {tasks.data_of(each)["name"] for each in islice(tasks.train(0), 2)} == {"one", "two"}
    check_env(tasks, episodes=2, max_turns=2)


def test_tests_in_a_folder_that_agents_can_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harbor(tmp_path / "tasks/one")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(ConfigError, match="tests would not be hidden"):
        build_taskset(make_task(f"terminal:{tmp_path}/tasks"))


def test_example_of_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "terminal.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    example: dict[str, Any] = {}
    exec(block, example)
    assert [each.env for each in islice(example["tasks"].train(0), 1)] == ["files"]
    assert play(example["touch"])[1].rewards["reward"] == 0.0
    assert play(example["touch"], "touch done")[1].rewards["reward"] == 1.0


def test_runtime_of_ones_own_checks_its_tasks() -> None:
    class Refusing(NamespaceRuntime):
        def check(self, task: TerminalTask) -> None:
            raise ConfigError(f"not {task.name}")

    with pytest.raises(ConfigError, match="not guess"):
        TerminalTasks("own", [task()], runtime=Refusing())
