"""Test `examples/one_file.py`: it computes what the package computes, bit for bit.

* A run of the file with weight updates in the middle of replies is repeated by the package's
  trainer, from the sampled tokens on. In every step `old_logp`, D, S, the gradients and the new
  weights have the same bits.
* For other models they differ by rounding alone.
* It imports nothing but torch and transformers, and has at most 300 lines.
* As a command it trains the small model and prints a line for each step.

The bits are equal where both call the same functions of torch with the same shapes. So the widths
of the model are no multiples of 16, and the package does not use its own kernels. Every sequence
has 32 tokens and a pass of its own, and the package adds no padding.
"""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from examples import one_file
from tests.support.tiny_runs import save_tiny
from unstale.algorithms.advantages import grpo_advantage
from unstale.builders import build_old_logps
from unstale.config import (
    SHIPPED_POLICY,
    CorrectionConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.model.kernels import fits
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import (
    Batch,
    ContextPiece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.trainer.local import LocalTrainer

OPTIONS = one_file.Options(
    steps=5,
    groups_per_step=2,
    group_size=4,
    max_tokens=24,
    max_staleness=2,
    lr=3e-3,
    d_low=0.99,
    d_high=1.01,
)
PROMPT = 8
"""Tokens of a prompt. With `max_tokens` they make 32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose widths are no multiples of 16."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    config = Qwen3Config.from_pretrained(folder)
    config.update(
        {"hidden_size": 40, "head_dim": 10, "intermediate_size": 88, "initializer_range": 0.1}
    )
    torch.manual_seed(3)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class ScriptedEngine(one_file.Engine):
    """An engine that loads each version at a given token, so that a run is always the same.

    Of step k, group 2 k is sampled by version k - 2. In group 2 k + 1, version k - 1 takes over in
    the middle of the replies.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, ends=[])
        self.history: dict[int, one_file.Weights] = {}
        self.changed = Condition()
        self.group = self.token = 0

    def publish(self, version: int, weights: one_file.Weights) -> None:
        with self.changed:
            self.history[version] = weights
            self.changed.notify_all()

    def load_newest(self) -> bool:
        step, odd = divmod(self.group, 2)
        due = max(self.version, 0, step - 2 + odd * (self.token // 12))
        self.token += 1
        with self.changed:
            assert self.changed.wait_for(lambda: due in self.history, timeout=60)
            self.published = (due, self.history[due])
        return super().load_newest()

    def sample(self, number: int) -> list[one_file.Reply]:
        """Sample a group. The reward is the share of even tokens."""
        self.group, self.token = number, 0
        prompt = torch.randint(2, 64, (PROMPT,), generator=torch.Generator().manual_seed(number))
        group = self.sample_group(prompt, number, OPTIONS)
        rewards = [(each.tokens[PROMPT:] % 2 == 0).double().mean().item() for each in group]
        return [replace(each, reward=r) for each, r in zip(group, rewards, strict=True)]


def to_batch(replies: Sequence[one_file.Reply]) -> Batch:
    """Return replies as a batch of the package."""
    scored = []
    for number, reply in enumerate(replies):
        pieces: list[Any] = [ContextPiece(tuple(reply.tokens[: reply.start].tolist()))]
        sampled = reply.tokens[reply.start :]
        for version in reply.version.unique_consecutive().tolist():
            of_version = reply.version == version
            logps = reply.behavior_logp[of_version].tolist()
            pieces.append(Sampled(tuple(sampled[of_version].tolist()), tuple(logps), version))
        task = Task("even", "train", number)
        trajectory = Trajectory(
            tuple(pieces), {"even": reply.reward}, "done", task, seed=number, episode=number
        )
        scored.append(ScoredTrajectory(trajectory, (reply.advantage,)))
    return collate(scored)


class Package:
    """The trainer of the package, with the route `snapshot_old` and the options of the file."""

    def __init__(self, folder: Path) -> None:
        self.policy = Policy.load(folder, device="cpu")
        config = RunConfig(
            recipe="",
            max_steps=OPTIONS.steps,
            correction=CorrectionConfig(low=OPTIONS.d_low, high=OPTIONS.d_high),
            trainer=TrainerConfig(lr=OPTIONS.lr, max_tokens_per_microbatch=1, share_prompts=False),
        )
        self.old = build_old_logps(
            OldLogpsConfig(route="snapshot_old"), LocalScorer(self.policy, 1.0, 1)
        )
        self.old.on_published({0})
        self.trainer = LocalTrainer(self.policy, config, self.old)

    def finish_step(self) -> None:
        self.trainer.step()
        self.trainer.start_version()
        version = self.trainer.version
        self.old.on_published(set(range(max(0, version - OPTIONS.max_staleness), version + 1)))


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) for name, value in ours.items()
    )


def test_every_value_of_a_run_has_the_bits_of_the_package(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert not fits(model.model.embed_tokens.weight)
    trainer = one_file.Trainer(model, OPTIONS)
    engine = ScriptedEngine(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    package = Package(folder)
    lags, mixed = set(), 0
    dropped, clipped = [], []

    def compare(
        step: int, replies: Sequence[one_file.Reply], loss: float, log_ratios: Tensor
    ) -> None:
        nonlocal mixed
        rewards = torch.tensor([each.reward for each in replies], dtype=torch.float64)
        group = torch.arange(len(replies)) // OPTIONS.group_size
        advantages = torch.tensor([each.advantage for each in replies])
        torch.testing.assert_close(advantages, grpo_advantage(rewards, group).float())
        batch = to_batch(replies)
        (minibatch,) = package.trainer.prepare(batch)
        sampled = batch.sampled
        old_logp = torch.cat([trainer.old_logps(each) for each in replies])
        assert torch.equal(minibatch.old_logp[sampled], old_logp)
        log_d = minibatch.old_logp - batch.behavior_logp
        assert torch.equal(log_d[sampled], log_ratios[0])
        logp = [
            package.policy.logps(to_batch([each]), temperature=1.0).detach()[PROMPT:]
            for each in replies
        ]
        assert torch.equal(torch.cat(logp) - old_logp, log_ratios[1])
        package.trainer.backward(minibatch)
        # The package sums over all 32 tokens, with 0 for those of the prompt: another order.
        assert package.trainer.metrics()["objective/loss"] == pytest.approx(loss, rel=1e-14)
        gradients = [
            {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            for model in (package.policy.model, trainer.model)
        ]
        assert same(*gradients)
        metrics = package.trainer.metrics()
        dropped.append(1 - metrics["correction/kept_share"])
        clipped.append(metrics["objective/clip_share"])
        package.finish_step()
        lags.update((step - batch.version[sampled]).tolist())
        mixed += sum(len(each.version.unique()) > 1 for each in replies)

    one_file.train(engine, trainer, engine.sample, compare)
    assert lags == {0, 1, 2}
    assert mixed == OPTIONS.group_size * (OPTIONS.steps - 2)
    assert max(dropped) > 0.05
    assert max(clipped) > 0.05
    assert same(package.policy.weights(), trainer.past[OPTIONS.steps])
    assert not same(trainer.past[OPTIONS.steps], trainer.past[OPTIONS.steps - 1])


def test_the_kernels_of_the_package_differ_by_rounding_alone() -> None:
    """The small model has widths for which the package uses its own kernels."""
    policy = Policy.load(SHIPPED_POLICY, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_POLICY, dtype=torch.float32).eval()
    tokens = torch.randint(3, 1000, (45,), generator=torch.Generator().manual_seed(0))
    ours = one_file.token_logps(model, tokens, 5)
    reply = one_file.Reply(tokens, torch.zeros(40), torch.zeros(40, dtype=torch.long))
    theirs = policy.logps(to_batch([reply]), temperature=1.0)[5:]
    assert (ours - theirs).abs().max() < 1e-4
    gradients = []
    for logp, each in ((ours, model), (theirs, policy.model)):
        logp.sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in each.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_it_needs_only_torch_and_transformers_and_300_lines() -> None:
    text = Path(one_file.__file__).read_text()
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    assert names - sys.stdlib_module_names == {"torch", "transformers"}
    assert len(text.splitlines()) <= 300


def test_the_command_trains_the_small_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--steps 2 --groups_per_step 1 --group_size 4 --max_tokens 8"
    monkeypatch.setattr(sys, "argv", ["one_file.py", *flags.split()])
    threads = torch.get_num_threads()
    one_file.main()
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == ["step   1", "step   2"]
    assert all(re.search(r"reward \d\.\d{3}  staleness [01]\.00", line) for line in lines)


def test_equal_rewards_give_the_advantage_0() -> None:
    reply = one_file.Reply(torch.zeros(3), torch.zeros(1), torch.zeros(1), reward=0.1)
    assert [each.advantage for each in one_file.with_advantages([reply] * 7)] == [0.0] * 7
