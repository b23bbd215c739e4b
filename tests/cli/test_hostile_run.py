"""Test that code of a task which is run by a command neither ends it in silence nor its terminal.

It prints, raises and returns texts that control a terminal, and it changes the process.
"""

import os
import signal
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.cli.test_hostile_texts import CONTROL, EVIL
from tests.support.forked import Forked
from tests.support.waits import LIMIT_S, wait_until
from unstale.config.run import SHIPPED_POLICIES
from unstale.durability.run_folder import read_jsonl

pytestmark = pytest.mark.usefixtures("forked_children")

TASK = """
import itertools, os, sys
from pathlib import Path
from unstale.envs import Message, NumberedTasks, Turn, tool_schema

EVIL = {evil!r}
calls = itertools.count()


class Env:
    async def begin(self):
        print("begins" + EVIL, flush=True)
        return Turn((Message("user", "say" + EVIL),))

    async def step(self, reply):
        number = next(calls)
        sys.stderr.write("step" + EVIL + "\\n")
        if number == 6:
            raise ValueError("bad" + EVIL)
        if number == 7:
            return Turn((), done=True, rewards={{"x" + EVIL: "y" + EVIL}})
        if not reply.content and not number % 3:
            return Turn((Message("tool", "result" + EVIL),))
        {body}
        return Turn((), done=True, rewards={{"right" + EVIL: number % 2}}, facts={{"f" + EVIL: 1}})


class Tasks(NumberedTasks):
    name = "hostile"
    tools = (tool_schema("add", "Add" + EVIL, {{}}),)

    def env(self, task, seed):
        return Env()
"""


def run(folder: Path, body: str = "pass") -> tuple[int | None, str]:
    (folder / "hostile.py").write_text(TASK.format(evil=EVIL, body=body))
    words = ["train", "calculator", "--task.env=hostile:Tasks", "--name=run", "--max_steps=2"]
    words += ["--schedule.groups_per_step=2", "--schedule.group_size=2", "--eval.tasks=0"]
    words += ["--engine.max_completion_tokens=4", "--tools_in_prompt=true"]
    with Forked(words, cwd=folder, forks_children=True) as process:
        output = "".join(process.communicate(timeout=LIMIT_S))
        return process.returncode, output


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("pass", 0, r"begins\x1b]0;t\x07"),
        ("sys.__stdout__.close(); sys.stdout = None", 0, "finished: all 2 steps are done"),
        ("os.close(1) if number == 3 else None", 0, "finished: all 2 steps are done"),
        ("os.mkdir(str(number)); os.chdir(str(number))", 1, "changed the working folder of the"),
        ("sys.setrecursionlimit(10**9)", 0, "finished: all 2 steps are done"),
    ],
)
@pytest.mark.costly(cases=1)
def test_no_code_of_a_task_controls_the_terminal_or_ends_the_output(
    body: str, code: int, says: str, tmp_path: Path
) -> None:
    returned, output = run(tmp_path, body)
    assert returned == code, output
    assert says in output and not CONTROL.search(output), output
    last = list(read_jsonl(tmp_path / "runs" / "run" / "events.jsonl"))[-1]
    assert last["reason"] == ("failed" if code else "finished")


def test_a_server_shows_no_raw_control_character(tmp_path: Path) -> None:
    model = tmp_path / f"model{EVIL.replace('/', '')}"
    model.symlink_to(SHIPPED_POLICIES["base"])
    with Forked(["serve", str(model), "calculator"], cwd=tmp_path, forks_children=True) as process:
        wait_until(
            lambda: "API key" in process.output()[0] or process.poll() is not None,
            "the address of the server",
        )
        words = process.output()[0].split()
        url, key = next(word for word in words if word.startswith("http")), words[5]
        body = f'{{"model": "x{EVIL}", "messages": "y"}}'.encode("unicode_escape")
        request = Request(f"{url}/chat/completions", body, {"Authorization": f"Bearer {key}"})
        with pytest.raises(HTTPError):
            urlopen(request)
        os.kill(process.pid, signal.SIGINT)
        output = "".join(process.communicate(timeout=LIMIT_S))
    assert "API key" in output and not CONTROL.search(output), output
