"""Test the sandbox.

Every limit holds for every isolation method of this machine. A method reports what it does not
prevent. The program and its children are killed with the caller.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sandbox_attacks import (
    NAMESPACES,
    NO_NAMESPACES,
    OUTSIDE,
    alive,
    protected_paths,
)
from tests.support.waits import LIMIT_S, until, wait_until
from tests.test_docs import blocks
from unstale.cli.recipe_options import split_options
from unstale.config import ConfigError, TaskConfig
from unstale.durability.virtual_clock import run as run_loop
from unstale.envs import EnvError, Message, ToolCall, Turn, python_tool, sandbox
from unstale.envs.python_tool import PythonTasks
from unstale.envs.registry import build_taskset
from unstale.envs.sandbox import Limits, ProgramResult, SandboxError, _Way
from unstale.envs.sandboxed import landlock_version
from unstale.records import Task

ROOT = Path(__file__).parents[2]
WAYS = [
    _Way(kind, isolated, own_user)
    for kind, isolated in (("bubblewrap", False), ("limits", True), ("limits", False))
    for own_user in (True, False)
]
FOREVER = "import time\nwhile True: time.sleep(1)"


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Way:
    """Yield every isolation method, also those that this machine would not select."""
    tried: _Way = request.param
    if tried.own_user and os.getuid():
        pytest.skip("only root can become another user")
    monkeypatch.setattr(sandbox, "_way", lambda: tried)
    try:
        execute("")
    except (SandboxError, FileNotFoundError) as error:
        pytest.skip(f"not on this machine: {error}")
    return tried


def execute(
    program: str | list[str], *, stdin: str = "", files: dict[str, str] | None = None, **used: float
) -> ProgramResult:
    limits = Limits(**{"seconds": LIMIT_S, **used})  # type: ignore[arg-type]
    return asyncio.run(sandbox.run(program, stdin=stdin, files=files or {}, limits=limits))


def over_time(program: str) -> ProgramResult:
    """Run a program that does not end, for as long as it needs to print something."""
    for seconds in (0.5, 2.0, 8.0, 32.0, 128.0):
        done = execute(program, seconds=seconds)
        if done.stdout:
            break
    return done


def shut_in(way: _Way) -> bool:
    """Return True if the program has its own namespaces."""
    return way.isolated or way.kind == "bubblewrap"


def until_gone(marker: str) -> None:
    """Wait until no process has this word in its command."""
    wait_until(lambda: not alive(marker), "the end of the program")


@pytest.fixture
def marker() -> Iterator[str]:
    word = f"marker-{uuid.uuid4().hex}"
    yield word
    for pid in alive(word):
        os.kill(pid, signal.SIGKILL)


def test_a_program_reads_computes_and_says(way: _Way) -> None:
    code = (
        "import sys, numbers_of\n"
        "print(sum(map(int, input().split())) + numbers_of.more)\n"
        "sys.exit(3)"
    )
    done = execute(code, stdin="4 5", files={"numbers_of.py": "more = 33"})
    assert done == ProgramResult("42\n", "", 3, "exited")
    assert execute(["cat", "a b"], files={"a b": "żółw\n"}).stdout == "żółw\n"
    assert execute("import os; os.abort()").code == 128 + signal.SIGABRT
    assert "ZeroDivisionError" in execute("1 / 0").stderr


def test_it_begins_in_an_empty_folder_of_its_own(way: _Way) -> None:
    code = (
        "import os; print(os.listdir()); open('left', 'w').write('x'); print(open(0).read() == '')"
    )
    assert [execute(code).stdout for _ in range(2)] == ["[]\nTrue\n"] * 2


@pytest.mark.parametrize("loop", [FOREVER, "while True: pass"])
def test_the_clock_ends_a_loop(way: _Way, loop: str, marker: str) -> None:
    done = over_time(f"print('begun', flush=True)\n'{marker}'\n{loop}")
    assert (done.stdout, done.code, done.ended) == ("begun\n", 128 + signal.SIGKILL, "timeout")
    until_gone(marker)


def test_memory_is_refused(way: _Way) -> None:
    code = "held = bytearray(100 << 20)\nprint('held', flush=True)\nheld += bytearray(300 << 20)"
    done = execute(code, memory_mb=300)
    assert done.stdout == "held\n" and "MemoryError" in done.stderr and done.code == 1


UNMAPPED = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
held = []
for make in (lambda: os.ftruncate(os.memfd_create("x"), 1 << 20),
             lambda: libc.shmget(0, 40 << 20, 0o1600) >= 0 or 1 / 0,
             lambda: libc.msgget(0, 0o1600) >= 0 or 1 / 0):
    try:
        make()
        held.append(make)
    except (OSError, ZeroDivisionError):
        pass
from multiprocessing import RawArray
import mmap
mmap.mmap(-1, 1 << 20)
print(len(held), os.uname().machine)
"""


def test_memory_that_is_not_mapped_is_refused(way: _Way) -> None:
    """The limit of the address space does not count it. Anonymous mappings remain possible."""
    if not sandbox._is_filtered(way):
        pytest.skip("this kernel has no filters of system calls")
    assert execute(UNMAPPED).stdout.split()[0] == "0"


FORKS = """
import os, signal, sys, time
children = []
try:
    while len(children) < 40:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        children.append(child)
except BlockingIOError:
    print(len(children))
"""


def test_a_fork_bomb_goes_no_further_than_its_limit(way: _Way, marker: str) -> None:
    done = execute(f"'{marker}'{FORKS}", processes=8)
    if way.counts_processes:
        assert done == ProgramResult("7\n", "", 0, "exited")
    else:
        assert "any number of processes" in sandbox.weaknesses()
    until_gone(marker)


def test_a_big_file_is_cut(way: _Way) -> None:
    code = (
        "with open('big', 'wb') as big:\n"
        " for _ in range(64): big.write(bytes(1 << 16)); big.flush()"
    )
    done = execute(code, file_mb=2)
    assert done.code == 1 and ("File too large" in done.stderr or "No space left" in done.stderr)
    many = "for name in range(9): open(str(name), 'wb').write(bytes(1 << 20))"
    assert execute(many, file_mb=16).code == 0
    assert (
        (execute(many, file_mb=4).code == 0)
        == (way.kind == "limits")
        == ("number of files" in sandbox.weaknesses())
    )


def test_output_beyond_what_is_kept_is_cut_off(way: _Way) -> None:
    done = execute("import sys\nprint('x' * 5000)\nprint('e' * 10, file=sys.stderr)", output_kb=2)
    assert done == ProgramResult("x" * 2048, "e" * 10 + "\n", 0, "output")
    assert execute("print('x' * 2047)", output_kb=2).ended == "exited"
    endless = execute("while True: print('x' * 1000)", output_kb=2, file_mb=1)
    assert endless.stdout == ("x" * 1000 + "\n") * 2 + "x" * 46 and endless.ended == "output"


def test_nobody_is_reached_over_the_network(way: _Way) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import socket\n"
            f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)\n"
            "print('reached')"
        )
        reached = execute(code).stdout == "reached\n"
    assert reached == (not shut_in(way) and landlock_version() < 4)
    assert ("the network" in sandbox.weaknesses()) == (not shut_in(way))
    assert ("except for TCP" in sandbox.weaknesses()) == (not shut_in(way) and not reached)


def test_environment_variables_stay_outside(way: _Way, marker: str) -> None:
    script = (
        "import asyncio, sys\nfrom unstale.envs import sandbox\n"
        f"sandbox._way = lambda: sandbox._Way{(way.kind, way.isolated, way.own_user)}\n"
        "print(asyncio.run(sandbox.run(sys.argv[1])).stdout)"
    )
    code = (
        "import glob, os\nprint('TOKEN' in os.environ)\nfound = b''\n"
        "for path in glob.glob('/proc/[0-9]*/environ'):\n"
        " try: found += open(path, 'rb').read()\n"
        " except OSError: pass\n"
        f"print({marker[:20]!r} + {marker[20:]!r} in found.decode(errors='replace'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, code],
        env={**os.environ, "TOKEN": marker},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert told[0] == "False"
    weak = not (shut_in(way) or way.own_user)
    assert (told[1] == "True") == weak == ("your user's other processes" in sandbox.weaknesses())


def test_a_program_can_make_no_namespaces_and_no_mounts(way: _Way) -> None:
    done = execute(NAMESPACES)
    assert done.stdout.splitlines() == NO_NAMESPACES, done.stderr
    assert "namespaces" not in sandbox.weaknesses()


def test_a_program_can_write_in_its_folder_only(way: _Way, tmp_path: Path) -> None:
    if way.kind == "limits" and not landlock_version():
        pytest.skip("this kernel has no Landlock")
    command = [sys.executable, "-c", OUTSIDE, *protected_paths(tmp_path)]
    assert execute(command) == ProgramResult("done\n", "", 0, "exited")
    assert (tmp_path / "file").exists() and not [*(tmp_path / "folder").iterdir()]
    if not way.own_user:  # the output is a file of this process's user
        said = execute(["sh", "-c", "echo said > /dev/stdout; echo not > /dev/stderr"])
        assert (said.stdout, said.stderr) == ("said\n", "not\n")


PLAIN_USER = "54321"


@pytest.fixture(scope="module")
def plain_user() -> Iterator[tuple[list[str], Path]]:
    """Yield the command of a Python that an ordinary user runs, and a folder of that user."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    command = ["env", f"TMPDIR={folder}", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1"]
    pythons = [sys.executable, *sorted(map(str, Path("/usr/bin").glob("python3.??")))]
    if not os.getuid():
        if not shutil.which("setpriv"):
            pytest.skip("setpriv is not installed")
        os.chown(folder, int(PLAIN_USER), int(PLAIN_USER))
        user = ["setpriv", "--reuid", PLAIN_USER, "--regid", PLAIN_USER, "--clear-groups"]
        command = [*user, *command]
    works = "import sys, unstale.envs.sandbox; sys.exit(sys.version_info < (3, 11))"
    try:
        for python in pythons:
            if not subprocess.run([*command, python, "-c", works], capture_output=True).returncode:
                yield [*command, python], folder
                return
        pytest.skip("no Python of this machine can be run by another user, with this package")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("kind", "isolated"), [("limits", True), ("limits", False), ("bubblewrap", False)]
)
def test_a_program_of_an_ordinary_user_leaves_nothing_outside(
    plain_user: tuple[list[str], Path], kind: str, isolated: bool
) -> None:
    """It writes no file outside its folder, nothing in /proc, and leaves no process behind."""
    command, parent = plain_user
    folder = parent / f"{kind}-{isolated}"
    folder.mkdir()
    os.chown(folder, *[parent.stat().st_uid] * 2)
    done = subprocess.run(
        [*command, "-m", "tests.support.sandbox_attacks", str(folder), kind, str(isolated)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    if "unavailable" in result:
        pytest.skip(f"not on this machine: {result['unavailable']}")
    assert result["user"] != 0
    assert result["namespaces"].splitlines() == NO_NAMESPACES
    assert result["left"] == []
    assert not [*parent.glob("unstale-sandbox-*")]
    if kind == "limits" and result["landlock"] < 6:
        pytest.skip(f"Landlock version {result['landlock']}: files and processes are not protected")
    assert (result["outside"], result["signals"]) == ("done\n", "")
    assert (folder / "file").exists() and not [*(folder / "folder").iterdir()]


def test_root_without_bubblewrap_is_refused_unless_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(sandbox.ALLOW_WEAK)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_way", lambda: _Way("limits", isolated=True))
    for refused in (lambda: execute("print(1)"), lambda: build_taskset(TaskConfig(env="python"))):
        with pytest.raises(ConfigError, match=r"as root without bubblewrap.*--allow-weak-sandbox"):
            refused()
    monkeypatch.setattr(sandbox, "_way", lambda: _Way("bubblewrap"))
    build_taskset(TaskConfig(env="python"))
    monkeypatch.setattr(sandbox, "_way", lambda: _Way("limits", isolated=True))
    monkeypatch.setenv(sandbox.ALLOW_WEAK, "")  # restored after the test
    (_, values) = split_options(["--allow-weak-sandbox", "--max_steps", "1"])
    assert values == {"allow_weak_sandbox": True, "max_steps": 1}
    sandbox.allow_weak()
    build_taskset(TaskConfig(env="python"))


def test_folders_of_killed_callers_are_removed(way: _Way, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\nfrom unstale.envs import sandbox\n"
        "asyncio.run(sandbox.run(sys.argv[1], limits=sandbox.Limits(seconds=300)))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)

    def left() -> set[Path]:
        return set(tmp_path.glob("unstale-sandbox-*"))

    command = [sys.executable, "-c", script]
    with subprocess.Popen([*command, FOREVER], cwd=ROOT, env=environment) as caller:
        wait_until(
            lambda: any((path / "work").exists() for path in left()), "the folder of a program"
        )
        caller.kill()
    assert left()
    subprocess.run([*command, "print(1)"], cwd=ROOT, env=environment, check=True)
    assert not left()


def test_what_a_user_of_its_own_leaves_is_removed(way: _Way) -> None:
    if not way.own_user or way.kind == "bubblewrap":
        pytest.skip("files outside stay with a user of this process, or cannot be made")
    name = f"/tmp/left-{uuid.uuid4().hex}"
    code = (
        "import os, subprocess, sys\nfrom contextlib import suppress\nwith suppress(OSError):\n"
        f" os.mkdir({name!r})\n open({name + '/x'!r}, 'w')\nwith suppress(OSError):\n"
        f" subprocess.Popen([sys.executable, '-c', {FOREVER!r}, {name!r}], start_new_session=True)"
    )
    assert execute(code).code == 0
    assert not Path(name).exists() and not alive(name)


def test_other_processes_cannot_be_ended(way: _Way) -> None:
    with subprocess.Popen([sys.executable, "-c", FOREVER]) as other:
        execute(f"import os; os.kill({other.pid}, 9)")
        weak = not (shut_in(way) or way.own_user or landlock_version() >= 6)
        if not weak:
            assert other.poll() is None
        other.kill()
        assert weak == ("ending them" in sandbox.weaknesses())


def test_bubblewrap_shows_only_what_is_installed(way: _Way, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("do not read")
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        f"for path in ({str(secret)!r}, os.path.expanduser('~root/.profile'), '/etc/passwd', "
        "'/etc/shadow'):\n"
        "  try: print(open(path).read())\n  except OSError: pass\n"
        "for place in ('/', '/usr', '/usr/lib', '/etc', '/dev', '/dev/shm', '/proc', '/home', "
        f"{str(tmp_path)!r},\n"
        "              sys.prefix, sys.base_prefix):\n"
        "  try: Path(place, 'left').write_text('x'); print('wrote', place)\n  except OSError: "
        "pass\n"
    )
    if way.kind == "limits":
        assert ("reading and writing files" in sandbox.weaknesses()) == (not landlock_version())
        return
    assert execute(code) == ProgramResult("", "", 0, "exited")
    assert not (tmp_path / "left").exists()


def test_what_a_program_began_ends_with_it(way: _Way, marker: str) -> None:
    code = (
        "import subprocess, sys\n"
        "for apart in (False, True):\n"
        f"  subprocess.Popen([sys.executable, '-c', {FOREVER!r}, {marker!r}], "
        "start_new_session=apart)"
    )
    done = execute(code)
    assert done.ended == "exited" and ("PermissionError" in done.stderr) == (not shut_in(way))
    until_gone(marker)
    assert "stay behind" not in sandbox.weaknesses()


def test_a_cancelled_caller_takes_the_program_along(way: _Way, marker: str) -> None:
    async def main() -> None:
        program = f"'{marker}'\n{FOREVER}"
        task = asyncio.create_task(sandbox.run(program, limits=Limits(seconds=300)))
        await until(lambda: bool(alive(marker)), "the program")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    until_gone(marker)


def test_a_caller_that_is_killed_takes_the_program_along(way: _Way, marker: str) -> None:
    script = (
        "import asyncio, sys\nfrom unstale.envs import sandbox\n"
        f"sandbox._way = lambda: sandbox._Way{(way.kind, way.isolated, way.own_user)}\n"
        "asyncio.run(sandbox.run(sys.argv[1], limits=sandbox.Limits(seconds=300)))"
    )
    program = f"'{marker}'\nopen('begun', 'w')\n{FOREVER}"
    with subprocess.Popen([sys.executable, "-c", script, program], cwd=ROOT) as caller:
        command = f"-s\0-c\0'{marker}'"  # not its caller's, which has the word too
        wait_until(lambda: bool(alive(command)), "the program")
        caller.kill()
    until_gone(marker)


def test_programs_wait_for_their_turn_and_cancelled_ones_never_begin(marker: str) -> None:
    async def main() -> int:
        program = f"'{marker}'\n{FOREVER}"
        tasks = [
            asyncio.create_task(sandbox.run(program, limits=Limits(seconds=300))) for _ in range(40)
        ]
        await until(lambda: bool(alive(marker)), "the program")
        for task in tasks:
            task.cancel()
        return sum(
            isinstance(end, asyncio.CancelledError)
            for end in await asyncio.gather(*tasks, return_exceptions=True)
        )

    assert asyncio.run(main()) == 40
    until_gone(marker)
    assert execute("print(1)").stdout == "1\n"


def test_it_works_under_the_virtual_clock() -> None:
    async def main() -> list[ProgramResult]:
        return await asyncio.gather(*(sandbox.run(f"print({number} ** 2)") for number in range(3)))

    assert [done.stdout for done in run_loop(main(), virtual=True)] == ["0\n", "1\n", "4\n"]


def test_the_same_program_says_the_same(way: _Way) -> None:
    code = "print(set('abcdef'), hash('x'))\n1 / 0"
    assert execute(code) == execute(code)


def test_what_cannot_be_run_is_an_error_and_no_outcome(way: _Way) -> None:
    with pytest.raises(SandboxError, match=r"no-such-program was not started: .*No such file"):
        execute(["no-such-program"])
    assert issubclass(SandboxError, EnvError)
    for name in ("", "..", "a/b", "/etc/passwd"):
        with pytest.raises(ValueError, match="plain names"):
            execute("", files={name: ""})
    for limit in ("seconds", "memory_mb", "processes"):
        with pytest.raises(ValueError, match=rf"limits\.{limit} must be > 0"):
            Limits(**{limit: 0})


def test_bubblewrap_can_be_insisted_on(way: _Way) -> None:
    asked = sandbox.run("print(1)", require="bubblewrap")
    if way.kind == "bubblewrap":
        assert asyncio.run(asked).stdout == "1\n"
    else:
        with pytest.raises(ValueError, match="bubblewrap is required"):
            asyncio.run(asked)


def test_the_example_of_the_docs() -> None:
    (code,) = blocks("docs/security.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[:4] == ["42", " 0 exited", "MemoryError", sandbox.kind()]
    assert done.stdout.splitlines()[4] == sandbox.weaknesses()


@pytest.mark.parametrize("index", range(8))
def test_a_puzzle_is_solved_by_running_code(index: int) -> None:
    task = Task("python", "train", index)
    question, answer = PythonTasks().puzzle(task)
    sums = re.search(r"(\d+) \*\* (\d+)", question)
    words = re.search(r"of (\D+) are|is (\D+) without", question)
    if sums:
        value = f"{sums[1]} ** {sums[2]}"
        code = (
            f"print(sum(map(int, str({value}))))"
            if "digits" in question
            else f"print({value} % 97)"
        )
    else:
        assert words
        text = (words[1] or words[2]).replace(" ", "")
        code = f"print('{text}'[::{3 if words[1] else -1}])"
    calls = (ToolCall("python", {"code": code}), ToolCall("python", {"code": "1 / 0"}))

    async def play(final: str) -> tuple[tuple[Message, ...], Turn]:
        env = PythonTasks().env(task, 0)
        assert (await env.begin()).messages[-1].content == question
        told = await env.step(Message("assistant", "", calls))
        return told.messages, await env.step(Message("assistant", final))

    told, won = asyncio.run(play(f"It is {answer}."))
    assert [message.content for message in told] == [
        answer,
        "Error: ZeroDivisionError: division by zero",
    ]
    assert won.done and won.rewards == {"success": 1.0}
    assert won.facts == {"tool_calls": 2.0, "tool_errors": 1.0}
    assert asyncio.run(play("It is something else."))[1].rewards == {"success": 0.0}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (ToolCall("shell", {"code": "1"}), "the tool is python"),
        (ToolCall("python", {"code": 1}), "code must be a string"),
        (ToolCall("python", {"code": "1", "more": 2}), "python takes code"),
        (ToolCall("", {}, error="the call is not JSON"), "the call is not JSON"),
        (ToolCall("python", {"code": "#" * 5000}), "may have 4000 characters"),
        (ToolCall("python", {"code": "\0"}), "embedded null byte"),
        (ToolCall("python", {"code": "'\ud800'"}), "UnicodeEncodeError"),
        (ToolCall("python", {"code": "raise SystemExit(3)"}), "exit code 3"),
        (ToolCall("python", {"code": "while True: pass"}), "took longer than 0.5 s"),
    ],
)
def test_a_call_that_does_not_work_is_answered(
    call: ToolCall, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.5 if "0.5 s" in says else LIMIT_S
    monkeypatch.setattr(python_tool, "LIMITS", Limits(seconds=seconds))

    async def play() -> str:
        env = PythonTasks().env(Task("python", "train", 0), 0)
        await env.begin()
        return (await env.step(Message("assistant", "", (call,)))).messages[0].content

    answer = asyncio.run(play())
    assert answer.startswith("Error: ") and re.search(says, answer)


def test_the_strongest_way_is_chosen_and_root_never_runs_a_program_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works: list[_Way] = []

    def attempt(way: _Way, job: object, stop: threading.Event) -> ProgramResult:
        if way not in works:
            raise SandboxError("refused")
        return ProgramResult("", "", 0, "exited")

    def chosen(*ways: _Way, uid: int) -> _Way:
        works[:] = ways
        monkeypatch.setattr(os, "getuid", lambda: uid)
        return sandbox._way.__wrapped__()

    monkeypatch.setattr(sandbox, "_run", attempt)
    monkeypatch.setattr("shutil.which", lambda name: name)
    bare, apart, other = (
        _Way("limits"),
        _Way("limits", isolated=True),
        _Way("limits", own_user=True),
    )
    assert chosen(bare, apart, _Way("bubblewrap"), uid=1000) == _Way("bubblewrap")
    assert chosen(bare, apart, uid=1000) == apart
    assert chosen(bare, uid=1000) == bare
    assert chosen(bare, apart, other, uid=0) == apart
    assert chosen(bare, other, uid=0) == other
    with pytest.raises(SandboxError, match="no sandbox can be made on this machine"):
        chosen(bare, uid=0)
