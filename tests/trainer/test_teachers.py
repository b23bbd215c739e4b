"""Test distillation in the trainer: teachers of every kind, lessons, and what is refused.

Promises: the gradient is that of the divergence from unpacked forward passes, for one or several
teachers, with and without text that only the teacher reads, in one pass or many, with LoRA and
over several minibatches. The teacher has no gradient. A refreshed teacher is restored bit for bit.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.test_techniques import PLANS
from unstale.algorithms.distillation import mixed_divergence
from unstale.builders import build_old_logps
from unstale.config import (
    ConfigError,
    CorrectionConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, Lesson, collate
from unstale.techniques.distil import DistilConfig
from unstale.techniques.hooks import Techniques
from unstale.testing import checkpoint_round_trip, episode, nudge, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer

HINT = (3, 1, 4)


def a_batch(lessons: tuple[Lesson, ...] = ()) -> Batch:
    batch = collate([episode(i, plan, advantage=value) for i, (plan, value) in enumerate(PLANS)])
    return replace(batch, lessons=lessons)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two teachers, as model folders."""
    made = []
    for number in range(2):
        teacher = tiny_policy(dtype="float64")
        nudge(teacher, seed=30 + number)
        teacher.save(tmp_path / f"teacher{number}")
        made.append(str(tmp_path / f"teacher{number}"))
    return made


def make(
    policy: Policy | None = None,
    *,
    route: str = "snapshot_old",
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> LocalTrainer:
    """Return a trainer at version 1 that takes plain gradient steps with lr 1."""
    policy = policy or tiny_policy(dtype="float64")
    config = RunConfig(
        recipe="",
        max_steps=10,
        correction=CorrectionConfig(mode="truncate", high=1e6),
        objective=ObjectiveConfig(loss_type="none"),
        trainer=TrainerConfig(
            **{"optimizer": "SGD", "lr": 1.0, "grad_clip": 1e9, "dtype": "float32"}
            | (trainer or {})
        ),
        techniques="distil",
        technique_options={"distil": DistilConfig(**options)},
    )
    old = build_old_logps(OldLogpsConfig(route=route), LocalScorer(policy, 1.0, 64))
    old.on_published(live={0})
    nudge(policy, seed=1)
    policy.version = 1
    old.on_published(live={0, 1})
    return LocalTrainer(policy, config, old, techniques=Techniques.of(config))


def gradient(trainer: LocalTrainer, batch: Batch) -> Tensor:
    for part in trainer.prepare(batch):
        trainer.backward(part)
    weights = [each for each in trainer.policy.model.parameters() if each.requires_grad]
    return torch.cat([each.grad.flatten() for each in weights])


def distributions(policy: Policy, tokens: list[int]) -> Tensor:
    """Return the log-probabilities of all tokens at each position, `[T, V]`, from one pass."""
    ids = torch.tensor([tokens])
    logits = policy.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return torch.cat([logits[:1] * 0, logits[:-1]]).log_softmax(-1)


def rows(policy: Policy, batch: Batch, *, taught: bool = False) -> list[Tensor]:
    """Return the distributions at the sampled tokens of each sequence."""
    found = []
    for i, (start, end) in enumerate(batch.spans()):
        tokens, sampled = batch.tokens[start:end].tolist(), batch.sampled[start:end]
        added: tuple[int, ...] = ()
        if taught and batch.lessons:
            lesson = batch.lessons[i]
            added = lesson.tokens
            tokens[lesson.start : lesson.start] = added
        every = distributions(policy, tokens)[len(added) :]
        found.append(every[sampled])
    return found


def expected(
    trainer: LocalTrainer, teachers: list[Policy], batch: Batch, beta: float | None
) -> Tensor:
    """Return the gradient of the mean divergence, or (beta None) of the sampled reverse KL."""
    numbers = [each.teacher for each in batch.lessons] or [0] * batch.num_sequences
    total = torch.zeros((), dtype=torch.float64)
    ours = rows(trainer.policy, batch)
    for i, (start, end) in enumerate(batch.spans()):
        with torch.no_grad():
            taught = rows(teachers[numbers[i]], batch, taught=True)[i]
        if beta is not None:
            total = total + mixed_divergence(ours[i], taught, beta=beta).sum()
            continue
        sampled = batch.sampled[start:end]
        token = batch.tokens[start:end][sampled][:, None]
        logp, of_teacher = (each.gather(1, token).squeeze(1) for each in (ours[i], taught))
        ratio = (logp.detach() - batch.behavior_logp[start:end][sampled]).exp()
        total = total - (ratio * (of_teacher - logp.detach()) * logp).sum()
    weights = [each for each in trainer.policy.model.parameters() if each.requires_grad]
    parts = torch.autograd.grad(total / batch.sampled.sum(), weights, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(w) if part is None else part).flatten()
            for w, part in zip(weights, parts, strict=True)
        ]
    )


def load(folder: str) -> Policy:
    return Policy.load(folder, dtype="float64")


FORMS = {"sampled": None, "reverse": 1.0, "forward": 0.0, "mixed": 0.3}


def options_of(divergence: str) -> dict[str, Any]:
    beta = {"beta": 0.3} if divergence == "mixed" else {}
    return {"divergence": divergence, **beta}


@pytest.mark.parametrize("divergence", FORMS)
def test_the_gradient_is_that_of_the_divergence(divergence: str, folders: list[str]) -> None:
    trainer, batch = make(teacher=folders[0], **options_of(divergence)), a_batch()
    wanted = expected(trainer, [load(folders[0])], batch, FORMS[divergence])
    torch.testing.assert_close(gradient(trainer, batch), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.costly(cases=2)
@pytest.mark.parametrize("divergence", ["sampled", "forward"])
@pytest.mark.parametrize("route", ["snapshot_old", "current_recompute", "rollout"])
def test_lessons_choose_the_teacher_and_what_it_reads(
    divergence: str, route: str, folders: list[str]
) -> None:
    lessons = (Lesson(1), Lesson(0, start=2, tokens=HINT), Lesson(1, start=1, tokens=HINT[:1]))
    named = f"a={folders[0]} b={folders[1]}"
    trainer = make(teacher=named, route=route, **options_of(divergence))
    batch = a_batch(lessons)
    wanted = expected(trainer, [load(each) for each in folders], batch, FORMS[divergence])
    torch.testing.assert_close(gradient(trainer, batch), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("divergence", ["sampled", "reverse"])
def test_the_policy_itself_is_a_teacher_that_has_no_gradient(divergence: str) -> None:
    trainer = make(teacher="self", context="the answer", **options_of(divergence))
    batch = a_batch(tuple(Lesson(0, start=1, tokens=HINT) for _ in PLANS))
    teacher = trainer.policy.twin()
    wanted = expected(trainer, [teacher], batch, FORMS[divergence])
    torch.testing.assert_close(gradient(trainer, batch), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("divergence", ["sampled", "mixed"])
def test_passes_minibatches_and_epochs_do_not_change_what_is_learned(
    divergence: str, folders: list[str]
) -> None:
    """In each minibatch the reward is that of the policy at this pass, not before the batch."""
    one = make(teacher=folders[0], **options_of(divergence))
    wanted = gradient(one, a_batch())
    small = make(
        teacher=folders[0], trainer={"max_tokens_per_microbatch": 8}, **options_of(divergence)
    )
    torch.testing.assert_close(gradient(small, a_batch()), wanted, rtol=1e-6, atol=1e-9)
    twice = make(teacher=folders[0], trainer={"epochs_per_batch": 2}, **options_of(divergence))
    first, second = twice.prepare(a_batch())
    twice.backward(first)
    twice.step()
    wanted = expected(twice, [load(folders[0])], a_batch(), FORMS[divergence])
    twice.optimizer.zero_grad()
    twice.backward(second)
    weights = [each.grad.flatten() for each in twice.policy.model.parameters()]
    torch.testing.assert_close(torch.cat(weights), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("divergence", ["sampled", "forward"])
def test_adapters_are_trained_towards_the_teacher(
    divergence: str, folders: list[str], tmp_path: Path
) -> None:
    tiny_policy(dtype="float64").save(tmp_path / "base")
    policy = Policy.load(tmp_path / "base", dtype="float64", lora=Lora(4))
    trainer = make(policy, teacher=folders[0], **options_of(divergence))
    wanted = expected(trainer, [load(folders[0])], a_batch(), FORMS[divergence])
    torch.testing.assert_close(gradient(trainer, a_batch()), wanted, rtol=1e-6, atol=1e-9)


def test_rewards_count_as_often_as_asked(folders: list[str]) -> None:
    plain = gradient(make(teacher=folders[0]), a_batch())
    both = gradient(make(teacher=folders[0], coef=0.5, advantage_coef=2.0), a_batch())
    doubled = replace(a_batch(), advantage=2 * a_batch().advantage)
    config = make(teacher=folders[0])
    of_rewards = LocalTrainer(
        config.policy,
        RunConfig(
            recipe="",
            correction=CorrectionConfig(mode="truncate", high=1e6),
            objective=ObjectiveConfig(loss_type="none"),
        ),
        config.old,
    )
    wanted = 0.5 * plain + gradient(of_rewards, doubled)
    torch.testing.assert_close(both, wanted, rtol=1e-5, atol=1e-7)


def test_a_refreshed_teacher_follows_the_policy_and_is_restored() -> None:
    trainer = make(teacher="start", refresh=2, advantage_coef=1.0)
    metrics = []
    for _ in range(3):
        train_on(trainer, a_batch())
        metrics.append(trainer.metrics()["distil/divergence"])
    assert metrics[0] == 0 and metrics[1] != 0 and metrics[2] == 0
    state = checkpoint_round_trip(trainer.state())
    train_on(trainer, a_batch())
    wanted = [each.clone() for each in trainer.policy.weights().values()]
    other = make(teacher="start", refresh=2, advantage_coef=1.0)
    other.restore(state)
    train_on(other, a_batch())
    assert all(map(torch.equal, other.policy.weights().values(), wanted))


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    teacher = tiny_policy()
    teacher.tokenizer.add_tokens(["another"])
    teacher.save(tmp_path / "other")
    with pytest.raises(ConfigError, match="another tokenizer than the policy"):
        make(teacher=str(tmp_path / "other"))
