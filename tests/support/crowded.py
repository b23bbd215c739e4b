"""A run with 1,024 file descriptors, to which clients without the token open 1,100 connections.

`main` trains one step and prints what these clients and the agents received.
"""

import asyncio
import json
import resource
import subprocess
import sys
from collections import Counter
from io import StringIO
from pathlib import Path

import httpx2 as httpx
from rich.console import Console

from tests.support.waits import LIMIT_S
from unstale.cli import session
from unstale.config import EngineConfig, EvalConfig, RunConfig, ScheduleConfig, TaskConfig
from unstale.envs.external import ExternalAgent

LIMIT = 1024
NUM_STRANGERS = 1100
CROWD = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
print("connected", flush=True)
sys.stdin.read()
for each in held:
    each.setblocking(False)
    try:
        head = each.recv(100)
        print(head.split(b" ")[1].decode() if head else "closed")
    except BlockingIOError:
        print("open")
    except OSError:
        print("closed")
"""
ASK = {"model": "policy", "messages": [{"role": "user", "content": "one"}]}
statuses: list[int] = []
"""HTTP statuses of the answers to clients with the token."""
strangers: list[str] = []
"""Result of each connection without the token: a status, "closed" or "open"."""
has_crowd = False


async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Call the policy once before clients without the token connect, and twice afterwards.

    Only the first agent starts these clients.
    """
    global has_crowd
    is_first, has_crowd = not has_crowd, True
    key = {"Authorization": f"Bearer {api_key}"}
    url = f"{base_url}/chat/completions"
    async with httpx.AsyncClient(headers=key, timeout=LIMIT_S) as early:
        statuses.append((await early.post(url, json=ASK)).status_code)
        if not is_first:
            return 1.0
        port = base_url.split(":")[2].split("/")[0]
        crowd = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CROWD, port, str(NUM_STRANGERS)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert crowd.stdin and crowd.stdout
        assert await crowd.stdout.readline() == b"connected\n"
        statuses.append((await early.post(url, json=ASK)).status_code)
        async with httpx.AsyncClient(headers=key, timeout=LIMIT_S) as late:
            statuses.append((await late.post(url, json=ASK)).status_code)
    crowd.stdin.close()
    strangers.extend((await crowd.stdout.read()).decode().split())
    await crowd.wait()
    return 0.0


def tasks() -> ExternalAgent:
    return ExternalAgent(agent, ["one", "two"], name="crowded")


def main(folder: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    config = RunConfig(
        recipe="crowded",
        runs=Path(folder),
        name="run",
        max_steps=1,
        task=TaskConfig(env="tests.support.crowded:tasks"),
        schedule=ScheduleConfig(max_staleness=0, groups_per_step=1, group_size=2),
        engine=EngineConfig(max_completion_tokens=8, max_context=128),
        eval=EvalConfig(tasks=0),
    )
    run = session.train(config, console=Console(file=StringIO()))
    result = {
        "strangers": Counter(strangers),
        "statuses": statuses,
        "steps": [row["step"] for row in run.metrics],
        "failed": run.metrics[-1]["rollout/failed_episodes"],
    }
    sys.stdout.write(json.dumps(result))
