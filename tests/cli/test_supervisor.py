"""Test the process that supervises a command.

It ends code that holds Python's global lock, and names it. A process that ends without a word gives
an exit code that is not 0, and one message.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from tests.support.forked import Forked
from tests.support.waits import LIMIT_S, wait_until
from unstale import stop_signals
from unstale.durability.run_folder import RunLog, read_jsonl
from unstale.envs.guard import Watchdog
from unstale.frames import lines_of_dump

pytestmark = pytest.mark.usefixtures("forked_children")

HEAD = """
import os, re, signal, sys, threading, time
from unstale.cli import supervisor
from unstale.stop_signals import beat, begin_run, note_end, stop_signals

supervisor.GRACE_S, supervisor.SILENT_S, supervisor.TICK_S = 0.3, 0.2, 0.1
code = supervisor.supervise()
if code is not None:
    sys.exit(code)
begin_run(sys.argv[1], "to continue: again", 0.8)

def reward():
    print("begins", flush=True)
    BODY

with stop_signals():
    thread = threading.Thread(target=reward)
    thread.start()
    thread.join()
note_end(0)
"""
ENDLESS = 're.match(r"(a+)+$", "a" * 60 + "!")'


def started(body: str, folder: Path) -> "subprocess.Popen[str]":
    RunLog.create(folder / "run", {})
    program = folder / "task.py"
    program.write_text(HEAD.replace("BODY", body))
    return subprocess.Popen(
        [sys.executable, str(program), str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def wait_for_line(output: IO[str] | None) -> None:
    assert output and output.readline() == "begins\n"


def last_event(folder: Path) -> tuple[str, str, str]:
    *_, last = read_jsonl(folder / "run" / "events.jsonl")
    return last["kind"], last["reason"], last["detail"]


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("os._exit(0)", 1, "with exit code 0 before .*: os._exit.0. was called: .*in reward: os._"),
        ("os._exit(7)", 7, "with exit code 7 before"),
        ("os.kill(os.getpid(), 9)", 137, r"by signal 9 \(SIGKILL\): os.kill.* in reward: os.kill"),
        ("import ctypes; ctypes.string_at(0)", 139, r"signal 11 \(SIGSEGV\): .*in reward: import"),
        ('os.execv("/bin/true", ["true"])', 1, "with exit code 0 before the command had finished"),
        (f"beat(); {ENDLESS}", 1, r"code blocked the process for 1 s: .*in reward: beat\(\); re\."),
    ],
)
def test_a_process_that_ends_without_a_word_or_never_moves_is_named(
    body: str, code: int, says: str, tmp_path: Path
) -> None:
    with started(body, tmp_path) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    shown = errors.splitlines()[-1]
    assert shown.startswith("the run failed: ") and shown.endswith("; to continue: again")
    kind, reason, detail = last_event(tmp_path)
    assert (kind, reason) == ("stopped", "failed") and detail in shown
    error = (tmp_path / "run" / "error.txt").read_text().strip()
    assert error == detail
    assert re.search(says, error), error


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_code_that_holds_the_global_lock(
    by: signal.Signals, tmp_path: Path
) -> None:
    with started(ENDLESS, tmp_path) as process:
        wait_for_line(process.stdout)
        time.sleep(0.2)
        for _ in range(2):
            assert process.poll() is None
            process.send_signal(by)
            time.sleep(0.5)  # signals that arrive together count as one
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "ended at once by a second signal, to which it did not react: " in errors
    assert "in reward: re.match(" in errors
    assert last_event(tmp_path)[1] == "Ctrl-C"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return", 0),
        ("note_end(3); os._exit(0)", 3),  # the command has said its code
        ("beat(); beat(last=True); time.sleep(1.5)", 0),  # no sign of life is expected
        ("beat(); os.kill(os.getpid(), signal.SIGSTOP); beat(last=True)", 0),
    ],
)
def test_a_command_that_ends_in_order_keeps_its_exit_code(
    body: str, code: int, tmp_path: Path
) -> None:
    with started(body, tmp_path) as process:
        if "STOP" in body:
            wait_for_line(process.stdout)
            time.sleep(1.5)
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGCONT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (code, "")
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_the_command_ends_with_its_supervisor(tmp_path: Path) -> None:
    with started("time.sleep(600)", tmp_path) as process:
        wait_for_line(process.stdout)
        process.kill()
        assert process.communicate(timeout=LIMIT_S) == ("", "")  # the child closes its output


REWARD = """
import os
calls = []

def leaves(reply, row):
    calls.append(reply)
    if len(calls) > 4:
        os._exit(0)
    return float(len(calls) % 2)
"""


def test_a_reward_that_leaves_python_ends_the_run_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(9)))
    words = ["train", "calculator", "--task.env=dataset:rows.jsonl", "--name=run", "--max_steps=9"]
    words += ["--task.held_out_share=0.5"]
    words += ["--task.reward=leaving:leaves", "--engine.max_completion_tokens=8"]
    with Forked([*words, "--eval.tasks=0"], cwd=tmp_path, forks_children=True) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "os._exit(0) was called: leaving.py, line 8, in leaves: os._exit(0)" in errors
    assert last_event(tmp_path / "runs")[1] == "failed"


HANGS = f"""
import re, sys, threading
from pathlib import Path
from unstale import stop_signals
from unstale.durability import virtual_clock
from unstale.envs import guard

stop_signals.HANG_S, guard._TICK_S = 0.6, 0.1

def reward():
    {ENDLESS}

async def main():
    if sys.argv[2] == "hangs":
        await guard.call(reward)

with stop_signals.noted_hangs(Path(sys.argv[1])):
    virtual_clock.run(main())
"""


@pytest.mark.parametrize("kind", ["hangs", "works"])
def test_without_a_supervisor_a_hang_is_written_into_a_file(kind: str, tmp_path: Path) -> None:
    program, found = tmp_path / "script.py", tmp_path / "hang.txt"
    program.write_text(HANGS)
    with subprocess.Popen(
        [sys.executable, str(program), str(found), kind],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        if kind == "works":
            assert process.wait(LIMIT_S) == 0 and not found.exists()
            return
        try:
            wait_until(lambda: found.exists() and "in reward" in found.read_text(), "the lines")
            assert process.poll() is None, "the process of the user is not ended"
        finally:
            process.kill()
    lines = lines_of_dump(found.read_text())
    assert any(re.search(r"script.py, line 11, in reward: re.match", line) for line in lines), lines


def test_the_watch_begins_before_the_first_code_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code may hold the lock from its first call on, so that no thread sends a sign of life."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setattr(stop_signals, "_supervisor", (os.getpid(), writing))
    with Watchdog():
        assert os.read(reading, 10) == b"\n"
    os.close(reading)
    os.close(writing)
