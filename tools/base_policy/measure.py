"""How often a policy succeeds, and where it fails: whole episodes in lockstep, with Hugging Face `generate`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.envs.retail import RetailTasks
from unstale.records import Task


@dataclass(frozen=True, slots=True)
class Played:
    """One measured episode."""

    task: Task
    kind: str
    success: bool
    done: bool
    malformed: int
    """Calls that were no calls."""
    errors: int
    """Calls the desk could not carry out."""
    messages: tuple[Message, ...]


def play(
    model: Any, tokenizer: Any, tasks: Sequence[Task], *, temperature: float, seed: int = 0
) -> list[Played]:
    """Play these tasks of the demo's level; `temperature` 0 is greedy."""
    return asyncio.run(_play(model, tokenizer, tasks, (temperature, seed)))


async def _play(
    model: Any, tokenizer: Any, tasks: Sequence[Task], how: tuple[float, int]
) -> list[Played]:
    taskset = RetailTasks(level=1)
    chat = Chat(tokenizer, taskset.tools)
    torch.manual_seed(how[1])
    envs = [taskset.env(task, 0) for task in tasks]
    turns = [await env.begin() for env in envs]
    said = [list(turn.messages) for turn in turns]
    context = [list(chat.encode_prompt(turn.messages)) for turn in turns]
    open_ = list(range(len(tasks)))
    for _ in range(14):
        replies = _reply(model, tokenizer, [context[i] for i in open_], how[0])
        for i, reply in zip(list(open_), replies, strict=True):
            message = chat.parse(reply)
            turns[i] = await envs[i].step(message)
            said[i] += [message, *turns[i].messages]
            if turns[i].done:
                open_.remove(i)
                continue
            ended = reply[-1:] == list(chat.stop_tokens)
            context[i] += [*reply, *chat.encode_continuation(turns[i].messages, ended=ended)]
        if not open_:
            break
    played = []
    for task, turn, messages in zip(tasks, turns, said, strict=True):
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
    """One reply to each context, in batches of like length."""
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
            input_ids=tokens, attention_mask=mask, max_new_tokens=32, pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id, **sampling,
        )  # fmt: skip
        for i, row in zip(rows, out[:, length:].tolist(), strict=True):
            end = (
                row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            )
            replies[i] = row[:end]
    return replies


def table(played: Sequence[Played]) -> str:
    """Success overall and by kind of request, and what went wrong in form."""
    kinds = sorted({episode.kind for episode in played})
    lines = [f"success {_share(played)}; calls malformed {sum(e.malformed for e in played)}, refused by the desk "
             f"{sum(e.errors for e in played)}; unfinished {sum(not e.done for e in played)}"]  # fmt: skip
    for kind in kinds:
        lines.append(
            f"  {kind:20} {_share([episode for episode in played if episode.kind == kind])}"
        )
    return "\n".join(lines)


def _share(played: Sequence[Played]) -> str:
    return f"{sum(episode.success for episode in played) / len(played):6.1%} of {len(played)}"
