"""Example agents for the calculator's sums, and task sets made of them."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

from unstale.engines.http import Http
from unstale.envs.calculator import TOOL, calculate
from unstale.envs.external import ExternalAgent, role_url

SUMS = [f"{a} + {b}" for a in range(10, 14) for b in range(20, 24)]
SYSTEM = "Work it out with the tool, then give the number."


async def with_sdk(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Solve a sum with the OpenAI SDK and a tool."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {task}?"},
        ]
        for _ in range(4):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
            reply = completion.choices[0].message
            messages.append(reply)
            if not reply.tool_calls:
                return float(str(calculate(task)) in (reply.content or "").rstrip(".").split())
            for call in reply.tool_calls:
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": answer(call.function.arguments),
                    }
                )
    return 0.0


def answer(arguments: str) -> str:
    try:
        return str(calculate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error}"


def in_a_process(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Solve a sum in another process that uses plain HTTP."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("urllib_agent.py")),
        base_url,
        task,
        api_key,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout)


async def ask_as(base_url: str, api_key: str, role: str, *messages: Any) -> Any:
    """Return the policy's answer in a role, as a message."""
    client = Http(role_url(base_url, role), key=api_key)
    body = {"model": "policy", "messages": messages}
    answer = await client.call("POST", "/chat/completions", body)
    return answer["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def patient(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Make two calls, the second in a new context. The reward is the parity of the seed."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for question in (f"What is {task}?", "And what else?"):
            asked: list[Any] = [{"role": "user", "content": question}]
            await client.chat.completions.create(model="policy", messages=asked)
            await asyncio.sleep(0)
    return float(len(task) % 2)


def sdk_tasks() -> ExternalAgent:
    return ExternalAgent(with_sdk, SUMS[:12], held_out=SUMS[12:], name="sums")


def forking_tasks() -> ExternalAgent:
    return ExternalAgent(patient, SUMS, held_out=SUMS[:2], name="forks")
