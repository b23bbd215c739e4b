"""Make a small policy for tau2-bench from the reference solutions of its training tasks.

    python -m benchmarks.tau2_policy FOLDER [--steps 1200]

The policy has 1.2 million parameters and sees no policy document. It practises conversations with
the scripted customer, all of tau2's split `train`. Conversations of more than 2,048 tokens are left
out. FOLDER/untrained gets the policy before practice, and FOLDER/practice the one after it.
It needs tau2-bench (docs/libraries.md). To train that one further, and to measure all of them:

    unstale train llm --config benchmarks/tau2_policy.toml --model FOLDER/practice --runs FOLDER \\
        --name rl
    python -m benchmarks.tau2 FOLDER/untrained FOLDER/practice FOLDER/rl/policy --small \\
        --splits test train --tasks 60
"""

import argparse
import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.tables import CONSOLE
from benchmarks.tau2 import DONE, reference_solution
from tools.base_policy.model import adopt, make_model
from tools.base_policy.practice import ConversationExamples, Example
from tools.base_policy.tokenizer import make_tokenizer
from tools.base_policy.train import Stage, train_on
from unstale.config import SHIPPED_POLICIES, make_task
from unstale.envs import Message, ToolCall
from unstale.envs.registry import build_taskset
from unstale.records import Task

DOMAINS = ("airline", "retail", "telecom")
POSITIONS = 2048
"""Positions of the model, in tokens."""
VOCABULARY = 2048
LINE = Message("assistant", "", (ToolCall("get_details_by_id", {"id": "L1002"}),))
"""The call that reads the line of telecom's customer. It is the same line in all tasks."""
CHECKS = Message(
    "assistant",
    "Please use check_network_status, check_network_mode_preference, check_sim_status, "
    "check_apn_settings, check_wifi_calling_status, check_data_restriction_status, "
    "check_vpn_status now.",
)
"""A request for all checks of the phone that need no argument and show a fault."""
ORDER = (
    "toggle_airplane_mode",
    "reseat_sim_card",
    "send_payment_request",
    "make_payment",
    "resume_line",
    "reset_apn_settings",
    "reboot_device",
    "enable_roaming",
    "toggle_roaming",
    "refuel_data",
    "toggle_data",
    "toggle_data_saver_mode",
    "set_network_mode_preference",
    "disconnect_vpn",
    "toggle_wifi_calling",
    "grant_app_permission",
    "transfer_to_human_agents",
)
"""The order of telecom's repairs in demonstrations. tau2's solutions have them in random order, and
a policy would have to learn which of them are left.
"""


def demonstration(domain: str, task: Any) -> Iterator[Message]:
    """Yield the replies of a demonstration: tau2's reference solution of a task.

    The solutions of telecom only change things. So they come after a look at the line's record
    and at the phone: without it, nothing would show which solution is the right one. Their
    changes are made in the order of `ORDER`.
    """
    replies = reference_solution(task)
    if domain != "telecom":
        yield from replies
        return
    yield LINE
    yield CHECKS
    yield from sorted(replies, key=lambda reply: ORDER.index(tool_of(reply)))


def tool_of(reply: Message) -> str:
    """Return the tool that a reply of a solution calls, or that it asks the customer to use."""
    if reply.tool_calls:
        return reply.tool_calls[0].name
    return reply.content.removeprefix("Please use ").removesuffix(" now.")


def conversations(domain: str) -> Iterator[list[Message]]:
    """Yield the conversation of each training task of a domain whose demonstration succeeds."""
    taskset: Any = build_taskset(make_task(f"tau2:{domain}", policy_document=False))

    async def play(index: int) -> tuple[list[Message], float]:
        task = Task(taskset.name, "train", index)
        env = taskset.env(task, 0)
        turn = await env.begin()
        messages = list(turn.messages)
        replies = demonstration(domain, taskset.data_of(task))
        while not turn.done:
            reply = next(replies, DONE)
            turn = await env.step(reply)
            messages += [reply, *turn.messages]
        return messages, turn.rewards["state"]

    for index in range(len(taskset.data["train"])):
        messages, reward = asyncio.run(play(index))
        if reward == 1.0:
            yield messages


def texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts of a conversation, split at special tokens, to train a tokenizer on."""
    for message in messages:
        yield message.role + "\n"
        yield message.content
        for call in message.tool_calls:
            yield f'\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}\n'


def draw(domains: Sequence[Sequence[Example]]) -> Iterator[Example]:
    """Yield examples without end: one of each domain in turn, each round in a new order."""
    rounds = [_in_new_orders(examples, seed) for seed, examples in enumerate(domains)]
    while True:
        for examples in rounds:
            yield next(examples)


def _in_new_orders(examples: Sequence[Example], seed: int) -> Iterator[Example]:
    for turn in count():
        yield from Random(f"tau2/{seed}/{turn}").sample(examples, len(examples))


def practise(folder: Path, stage: Stage) -> None:
    """Write the folders of the policy before and after practice."""
    played = {domain: list(conversations(domain)) for domain in DOMAINS}
    tokenizer = make_tokenizer(
        (text for each in played.values() for messages in each for text in texts(messages)),
        VOCABULARY,
    )
    examples = []
    for domain, each in played.items():
        maker = ConversationExamples(tokenizer, build_taskset(make_task(f"tau2:{domain}")).tools)
        made = [maker.conversation(messages) for messages in each]
        examples.append([example for example in made if len(example.tokens) <= POSITIONS])
        longest = max(len(example.tokens) for example in made)
        CONSOLE.print(
            f"{domain}: {len(made)} solutions succeed, {len(examples[-1])} have at most "
            f"{POSITIONS} tokens, the longest has {longest}"
        )
    torch.set_num_threads(1)
    model = make_model(tokenizer, seed=0)
    model.set_attn_implementation("sdpa")  # twice as fast as eager on sequences of this length
    save_policy(model, tokenizer, folder / "untrained")
    adopt(model, tokenizer, SHIPPED_POLICIES["base-desks"])

    def report(name: str, step: int, loss: float, tokens_per_s: float) -> None:
        if step % 10 == 0:
            CONSOLE.print(f"{name} {step}: loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s")

    train_on(model, draw(examples), stage, report=report)
    save_policy(model, tokenizer, folder / "practice")


def save_policy(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write the folder of a policy. It exists only when it is complete."""
    partial = folder.with_name(f"{folder.name}.part")
    model.to(torch.float32).save_pretrained(partial)  # type: ignore[arg-type]
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    chosen = parser.parse_args(words)
    stage = Stage(
        name="practice", steps=chosen.steps, learning_rate=chosen.lr, tokens=chosen.tokens
    )
    practise(chosen.folder, stage)


if __name__ == "__main__":
    main()
