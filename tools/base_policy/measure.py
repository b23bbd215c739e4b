"""Measure a policy's success and its errors with Hugging Face `generate`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.envs.desk import shipped_desks
from unstale.records import Task


@dataclass(frozen=True, slots=True)
class Played:
    """One measured episode."""

    task: Task
    kind: str
    success: bool
    done: bool
    malformed: int
    """Tool calls that could not be parsed."""
    errors: int
    """Tool calls that the desk refused."""
    messages: tuple[Message, ...]


def play(
    model: Any, tokenizer: Any, tasks: Sequence[Task], *, temperature: float, seed: int = 0
) -> list[Played]:
    """Play tasks of a desk at level 1; `temperature` 0 is greedy."""
    return asyncio.run(_play(model, tokenizer, tasks, (temperature, seed)))


async def _play(
    model: Any, tokenizer: Any, tasks: Sequence[Task], how: tuple[float, int]
) -> list[Played]:
    taskset = shipped_desks(level="1")[tasks[0].env]
    chat = Chat(tokenizer, taskset.tools)
    torch.manual_seed(how[1])
    envs = [taskset.env(task, 0) for task in tasks]
    turns = [await env.begin() for env in envs]
    messages_of = [list(turn.messages) for turn in turns]
    context = [list(chat.encode_prompt(turn.messages)) for turn in turns]
    running = list(range(len(tasks)))
    for _ in range(14):
        replies = _reply(model, tokenizer, [context[i] for i in running], how[0])
        for i, reply in zip(list(running), replies, strict=True):
            message = chat.parse(reply)
            turns[i] = await envs[i].step(message)
            messages_of[i] += [message, *turns[i].messages]
            if turns[i].done:
                running.remove(i)
                continue
            ended = reply[-1:] == list(chat.stop_tokens)
            context[i] += [*reply, *chat.encode_continuation(turns[i].messages, ended=ended)]
        if not running:
            break
    played = []
    for task, turn, messages in zip(tasks, turns, messages_of, strict=True):
        calls = [call for message in messages for call in message.tool_calls]
        malformed = sum(bool(call.error) for call in calls)
        success = turn.done and turn.rewards["success"] == 1.0
        kind = "+".join(request.kind for request in taskset.scenario(task).requests)
        errors = int(turn.facts.get("tool_errors", 0)) - malformed
        played.append(Played(task, kind, success, turn.done, malformed, errors, tuple(messages)))
    return played


@torch.no_grad()
def _reply(
    model: Any, tokenizer: Any, contexts: list[list[int]], temperature: float
) -> list[list[int]]:
    """Return one reply per context, in batches of similar length."""
    order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]))
    replies: list[list[int]] = [[] for _ in contexts]
    for start in range(0, len(order), 128):
        rows = order[start : start + 128]
        length = max(len(contexts[i]) for i in rows)
        pad = tokenizer.pad_token_id
        tokens = torch.tensor([[pad] * (length - len(contexts[i])) + contexts[i] for i in rows])
        mask = torch.tensor(
            [[0] * (length - len(contexts[i])) + [1] * len(contexts[i]) for i in rows]
        )
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        out = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=32,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
            **sampling,
        )
        for i, row in zip(rows, out[:, length:].tolist(), strict=True):
            end = (
                row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            )
            replies[i] = row[:end]
    return replies


def table(played: Sequence[Played]) -> str:
    """Format the success, overall and by kind of request, and the numbers of errors."""
    kinds = sorted({episode.kind for episode in played})
    malformed = sum(episode.malformed for episode in played)
    refused = sum(episode.errors for episode in played)
    unfinished = sum(not episode.done for episode in played)
    lines = [
        f"success {_share(played)}; calls malformed {malformed}, refused by the desk {refused}; "
        f"unfinished {unfinished}"
    ]
    for kind in kinds:
        lines.append(
            f"  {kind:20} {_share([episode for episode in played if episode.kind == kind])}"
        )
    return "\n".join(lines)


def _share(played: Sequence[Played]) -> str:
    return f"{sum(episode.success for episode in played) / len(played):6.1%} of {len(played)}"
