"""Example agents for the calculator's sums, and task sets made of them.

As a program, this runs the agent of one client after two attempts with wrong keys, and prints its
reward:

    python -m tests.support.scripted_agents with_sdk BASE_URL "10 + 20" KEY
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

from tests.support.waits import LIMIT_S
from unstale.envs.calculator import TOOL, calculate
from unstale.envs.external import ExternalAgent, role_url

FUNCTION = TOOL["function"]
OWN_TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
"""The calculator in the form of Anthropic's API."""
SUMS = [f"{a} + {b}" for a in range(10, 14) for b in range(20, 24)]
SYSTEM = "Work it out with the tool, then give the number."


async def with_sdk(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Solve a sum with the OpenAI SDK and a tool."""
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, timeout=LIMIT_S
    ) as client:
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


async def with_anthropic(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Solve a sum with Anthropic's SDK and a tool, as `with_sdk` does with OpenAI's."""
    import anthropic

    async with anthropic.AsyncAnthropic(
        base_url=base_url, api_key=api_key, max_retries=0, timeout=LIMIT_S
    ) as client:
        messages: list[Any] = [{"role": "user", "content": f"What is {task}?"}]
        asked: dict[str, Any] = {"model": "policy", "system": SYSTEM, "tools": [OWN_TOOL]}
        for _ in range(4):
            counted = await client.messages.count_tokens(messages=messages, **asked)
            reply = await client.messages.create(messages=messages, max_tokens=64, **asked)
            assert counted.input_tokens == reply.usage.input_tokens
            messages.append({"role": "assistant", "content": reply.content})
            if reply.stop_reason != "tool_use":
                return float(reply.content[0].text == "It is 30.")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": str(calculate(block.input["expression"])),
                }
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    return 0.0


async def with_litellm(  # noqa: PLR0913 - an agent, and how it calls
    base_url: str,
    task: str,
    seed: int,
    api_key: str,
    *,
    api: str = "openai",
    streamed: bool = True,
) -> float:
    """Solve a sum with litellm, as a client of one of the APIs."""
    import litellm

    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"What is {task}?"},
    ]
    for _ in range(4):
        reply = await litellm.acompletion(
            model=f"{api}/policy",
            api_base=base_url,
            api_key=api_key,
            messages=messages,
            tools=[TOOL],
            stream=streamed,
            max_retries=0,
            timeout=LIMIT_S,
        )
        if streamed:
            reply = litellm.stream_chunk_builder([chunk async for chunk in reply])
        said = reply.choices[0].message
        messages.append(said.model_dump())
        if not said.tool_calls:
            return float(said.content == "It is 30.")
        for call in said.tool_calls:
            result = answer(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
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
    from unstale.engines.http import Http  # it loads torch, which programs of clients do not need

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


def main(client: str, base_url: str, task: str, api_key: str) -> float:
    """Return the reward of an agent. Before, the endpoint has to refuse its client twice."""
    agent = globals()[client]
    for wrong in ("no", api_key[:-1]):
        try:
            asyncio.run(agent(base_url, task, 0, wrong))
        except Exception as error:  # noqa: BLE001 - each client has its own class
            assert getattr(error, "status_code", None) == 401, error
        else:
            raise AssertionError(f"the key {wrong} was accepted")
    return asyncio.run(agent(base_url, task, 0, api_key))


if __name__ == "__main__":
    sys.stdout.write(f"\n{main(*sys.argv[1:])}\n")
