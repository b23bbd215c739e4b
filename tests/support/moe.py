"""A tiny MoE policy for whole runs, and tasks that its replies solve more or less well."""

from pathlib import Path

from tests.support.toy import ToyEnv, ToyTasks
from unstale.envs import Message, Turn
from unstale.records import Task
from unstale.testing import tiny_policy


def save_moe(folder: Path) -> None:
    """Save a policy with 8 experts in each layer, whose chat template marks turns."""
    policy = tiny_policy(seed=5, experts=8)
    policy.tokenizer.chat_template = (
        "{% for message in messages %}w2 {{ message['content'] }}w1 {% endfor %}"
        "{% if add_generation_prompt %}w2 {% endif %}"
    )
    policy.save(folder)


class EvenEnv(ToyEnv):
    """An environment that pays the share of words of the last reply with an even number."""

    async def step(self, reply: Message) -> Turn:
        turn = await super().step(reply)
        words = [word for word in reply.content.split() if word[1:].isdigit()]
        even = sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
        return Turn(turn.messages, done=turn.done, rewards={"even": even} if turn.done else {})


class EvenTasks(ToyTasks):
    """Tasks whose rewards differ within a group, so that every step changes the weights."""

    def env(self, task: Task, seed: int) -> EvenEnv:
        return EvenEnv(task, self)
