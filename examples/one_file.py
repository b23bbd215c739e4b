"""Asynchronous RL with exact old log-probabilities: the whole algorithm in one file.

    python examples/one_file.py                  # the small model of this repository, a minute
    python examples/one_file.py --model FOLDER   # any chat model of Hugging Face

It needs only torch and transformers. Read it from top to bottom: a task, a reply, the engine that
samples it, the trainer that learns from it, and the loop in which both run side by side.

A token of a reply has three log-probabilities:

    behavior_logp    the engine's, when it sampled the token
    old_logp         the trainer's, with the same version of the weights
    logp             the trainer's, with the weights that it changes now

They divide the importance ratio of the token into two factors with different causes:

    exp(logp - behavior_logp) = D * S
    D = exp(old_logp - behavior_logp)    discrepancy: two programs, the same weights
    S = exp(logp - old_logp)             staleness: one program, two versions of the weights

D is an error of the system. It is a weight of the token, and a token with a large error is dropped.
S is what the policy has learned since the token was sampled. It is clipped, as in PPO.
The engine does not wait for the trainer. So one reply may be sampled by several versions of the
weights, and the trainer has none of them when it is trained on. `old_logp` is then missing. Here it
is exact: past versions are kept, and each token is scored by the version that sampled it.

Left out, compared with the package: episodes of several turns, more than one engine or trainer,
packed sequences, other objectives and ways to find `old_logp`, checkpoints, and most metrics.
"""

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim
from transformers import AutoModelForCausalLM, AutoTokenizer

Weights = Mapping[str, Tensor]  # of one version, by name; they never change


@dataclass(frozen=True)
class Options:
    """The options of a run. Each is a flag of the command."""

    model: str = str(Path(__file__).parents[1] / "unstale/recipes/base_policy")
    steps: int = 24
    groups_per_step: int = 4
    group_size: int = 8  # replies to one prompt, whose rewards are compared
    max_tokens: int = 64  # of a reply
    max_staleness: int = 2  # optimizer steps between sampling a token and training on it
    lr: float = 5e-4
    grad_clip: float = 1.0
    d_low: float = 0.5  # tokens with a D outside of d_low .. d_high are dropped
    d_high: float = 2.0
    clip_low: float = 0.2  # S is clipped to 1 - clip_low .. 1 + clip_high
    clip_high: float = 0.28
    engine_dtype: str = "bfloat16"  # the trainer computes in float32
    seed: int = 0


def make_prompt(number: int, seed: int) -> str:
    """Return the prompt of a group."""
    return "What is {} + {}?".format(*random.Random(f"{seed} {number}").sample(range(100), 2))


def reward_of(text: str) -> float:
    """Return the share of a reply's characters that are digits. So every model can learn."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


@dataclass(frozen=True)
class Reply:
    """A prompt and one reply to it: T tokens, of which the last R were sampled."""

    tokens: Tensor  # [T]
    behavior_logp: Tensor  # [R] the engine's log-probability of each sampled token
    version: Tensor  # [R] the version of the weights that sampled it
    reward: float = 0.0
    advantage: float = 0.0

    @property
    def start(self) -> int:  # the position of the first sampled token
        return len(self.tokens) - len(self.version)


def with_advantages(group: Sequence[Reply]) -> list[Reply]:
    """Compare the replies to one prompt, as GRPO does (arXiv 2402.03300).

    The advantage is the reward minus the group's mean, divided by the group's standard deviation.
    The first reward is subtracted from all, so that equal rewards give exactly 0.
    """
    rewards = torch.tensor([r.reward - group[0].reward for r in group], dtype=torch.float64)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    return [replace(reply, advantage=a) for reply, a in zip(group, advantages, strict=True)]


class Engine:
    """Samples replies with its own copy of the model, in its own thread and precision."""

    def __init__(self, model: Any, ends: Sequence[int]) -> None:
        self.model = model
        self.ends = torch.tensor(ends, dtype=torch.long)  # the tokens that end a reply
        self.version = -1
        self.published: tuple[int, Weights] = (-1, {})

    def publish(self, version: int, weights: Weights) -> None:
        self.published = (version, weights)  # one assignment: the engine's thread sees both or none

    def load_newest(self) -> bool:
        """Load the published weights. Return False if the model has them already."""
        version, weights = self.published
        if version == self.version:
            return False
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name])  # rounds them to the engine's dtype
        self.version = version
        return True

    @torch.no_grad()
    def sample_group(self, prompt: Tensor, seed: int, options: Options) -> list[Reply]:
        """Sample G replies to a prompt `[P]`, a token of each at a time."""
        draw = torch.Generator().manual_seed(seed)
        tokens = prompt.repeat(options.group_size, 1)  # [G, P], and a column for each new token
        lengths = torch.zeros(options.group_size, dtype=torch.long)
        ended = torch.zeros(options.group_size, dtype=torch.bool)
        logps: list[Tensor] = []
        versions: list[int] = []
        cache = None
        while len(versions) < options.max_tokens and not ended.all():
            if self.load_newest():  # new weights in the middle of the replies
                cache = None  # keys and values of older weights belong to no single version
            new = tokens if cache is None else tokens[:, -1:]
            out = self.model(input_ids=new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logp = out.logits[:, -1].float().log_softmax(-1)  # [G, vocabulary]
            chosen = torch.multinomial(logp.exp(), 1, generator=draw)  # [G, 1]
            tokens = torch.cat([tokens, chosen], 1)
            logps.append(logp.gather(1, chosen))
            versions.append(self.version)
            lengths += ~ended
            ended |= torch.isin(chosen[:, 0], self.ends)
        behavior_logp, version = torch.cat(logps, 1), torch.tensor(versions)
        return [
            Reply(tokens[i, : len(prompt) + n], behavior_logp[i, :n], version[:n])
            for i, n in enumerate(lengths.tolist())
        ]


def token_logps(model: Callable[..., Any], tokens: Tensor, start: int) -> Tensor:
    """Return the log-probability of each of `tokens[start:]`, given all tokens before it."""
    index = torch.arange(start - 1, len(tokens) - 1)  # each is predicted at the position before it
    logits = model(input_ids=tokens[None], use_cache=False, logits_to_keep=index).logits[0]
    return logits.gather(1, tokens[start:, None]).squeeze(1) - logits.logsumexp(-1)


class Trainer:
    """The policy in float32, its optimizer, and the past versions of its weights."""

    def __init__(self, model: Any, options: Options) -> None:
        self.model = model
        self.options = options
        self.optimizer = optim.AdamW(model.parameters(), options.lr, weight_decay=0.0, fused=True)
        self.version = 0  # the number of optimizer steps so far
        self.past: dict[int, Weights] = {}
        self.keep_version()

    def keep_version(self) -> None:
        """Copy the weights of this version. Forget the one of which no token can come any more."""
        weights = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        self.past[self.version] = weights
        self.past.pop(self.version - self.options.max_staleness - 1, None)

    @torch.no_grad()
    def old_logps(self, reply: Reply) -> Tensor:
        """Return `old_logp` `[R]`: each token is scored by the version that sampled it.

        This takes a forward pass for each version, up to the last token of that version.
        """
        old_logp = torch.zeros_like(reply.behavior_logp)
        for version in reply.version.unique().tolist():

            def past_model(weights: Weights = self.past[version], **inputs: Any) -> Any:
                return torch.func.functional_call(self.model, dict(weights), (), inputs)

            own = (reply.version == version).nonzero().squeeze(1)
            end = reply.start + int(own.max()) + 1
            old_logp[own] = token_logps(past_model, reply.tokens[:end], reply.start)[own]
        return old_logp

    def loss(self, reply: Reply, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the loss of a reply, and log D and log S of its tokens, `[2, R]`."""
        options = self.options
        old_logp = self.old_logps(reply)
        logp = token_logps(self.model, reply.tokens, reply.start)
        log_d = old_logp - reply.behavior_logp
        log_s = logp - old_logp  # only this has a gradient: errors of D must not be learned
        inside = (log_d >= math.log(options.d_low)) & (log_d <= math.log(options.d_high))
        weight = torch.where(inside, log_d.exp(), 0.0)
        s = log_s.exp()
        clipped = s.clamp(1 - options.clip_low, 1 + options.clip_high)
        gain = torch.minimum(s * reply.advantage, clipped * reply.advantage)
        # The mean is over all sampled tokens of the batch, and so the same if one is dropped.
        loss = -(weight.double() * (1 / num_tokens) * gain).sum()
        return loss, torch.stack([log_d, log_s.detach()])

    def backward(self, batch: Sequence[Reply]) -> tuple[float, Tensor]:
        """Add up the gradient of a batch. Return its loss, and log D and log S of its tokens."""
        num_tokens = sum(len(reply.version) for reply in batch)
        total, ratios = 0.0, [torch.empty(2, 0)]
        for reply in batch:
            if reply.advantage != 0:  # it is 0 if all rewards of a group are equal
                loss, log_ratios = self.loss(reply, num_tokens)
                loss.backward()
                total += loss.item()
                ratios.append(log_ratios)
        return total, torch.cat(ratios, 1)

    def step(self) -> None:
        """Take an optimizer step, which makes a new version of the weights."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self.keep_version()


def train(
    engine: Engine,
    trainer: Trainer,
    sample: Callable[[int], list[Reply]],
    report: Callable[[int, Sequence[Reply], float, Tensor], None],
) -> None:
    """Train on groups of replies while the engine samples the next ones.

    Step k trains version k. Its groups may start once version k - max_staleness is published, so
    none of their tokens is older. `sample(n)` returns group n, and runs in the engine's thread.
    """
    options = trainer.options
    groups: deque[Future[list[Reply]]] = deque()
    started = 0
    with ThreadPoolExecutor(max_workers=1) as engine_thread:
        for step in range(options.steps):
            engine.publish(trainer.version, trainer.past[trainer.version])
            allowed = min(step + options.max_staleness + 1, options.steps) * options.groups_per_step
            groups.extend(engine_thread.submit(sample, n) for n in range(started, allowed))
            started = allowed
            finished = [groups.popleft().result() for _ in range(options.groups_per_step)]
            batch = [reply for group in finished for reply in with_advantages(group)]
            loss, log_ratios = trainer.backward(batch)
            report(step, batch, loss, log_ratios)
            trainer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # half of the cores for each side
    load = AutoModelForCausalLM.from_pretrained
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    trainer = Trainer(load(options.model, dtype=torch.float32).eval(), options)
    ends = trainer.model.generation_config.eos_token_id
    model = load(options.model, dtype=getattr(torch, options.engine_dtype)).eval()
    engine = Engine(model, ends if isinstance(ends, list) else [ends])
    began = time.monotonic()

    def sample(number: int) -> list[Reply]:
        chat = [{"role": "user", "content": make_prompt(number, options.seed)}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        group = engine.sample_group(prompt, options.seed + number, options)
        texts = [tokenizer.decode(each.tokens[each.start :], True) for each in group]
        return [replace(each, reward=reward_of(t)) for each, t in zip(group, texts, strict=True)]

    def report(step: int, batch: Sequence[Reply], loss: float, log_ratios: Tensor) -> None:
        staleness = step - torch.cat([reply.version for reply in batch]).double()
        mixed = sum(len(reply.version.unique()) > 1 for reply in batch)
        log_d, log_s = log_ratios.abs().mean(1).tolist()
        print(
            f"step {step + 1:3d}  {time.monotonic() - began:5.1f} s  "
            f"reward {sum(reply.reward for reply in batch) / len(batch):.3f}  "
            f"staleness {staleness.mean():.2f} (at most {staleness.max():.0f})  "
            f"of several versions {mixed / len(batch):4.0%}  "
            f"|log D| {log_d:.4f}  |log S| {log_s:.4f}  loss {loss:+.4f}"
        )

    train(engine, trainer, sample, report)


if __name__ == "__main__":
    main()
