"""A configuration that the linter passes in silence can learn.

Configurations are generated from all options that matter to learning. Those without a finding
train on scripted episodes with mixed rewards. Within three steps the weights must change.
"""

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import count, islice
from typing import Any

import pytest
import torch

from unstale.builders import build_advantage, build_scorer, build_trainer, load_policy
from unstale.config import ConfigError, RunConfig, TrainerConfig
from unstale.config.checks import Range
from unstale.config.options import Option, changed_options, options, override
from unstale.config.routes import routes
from unstale.lint import check
from unstale.lint.noise import NOISE
from unstale.model.policy import Policy
from unstale.records import (
    ContextPiece,
    Group,
    PendingPiece,
    Piece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
    walk,
)
from unstale.trainer.local import LocalTrainer

STEPS = 3
SECTIONS = ("schedule", "advantage", "old_logps", "correction", "objective", "trainer")
OTHERS = ("max_steps", "engine.dtype", "engine.temperature", "engine.max_context")
FIXED = (
    "trainer.compile",
    "trainer.threads",
    "trainer.lora_targets",
    "trainer.optimizer",
)
"""Options of speed, and those that the linter does not read: a wrong name ends a run at once."""
INTEGERS = (0, 1, 2, 3, 5, 8, 40, 300, 100_000)
OPTIMIZERS = ("AdamW", "Adam", "SGD", "RMSprop")


def drawn(option: Option, rng: random.Random) -> Any:
    """Return an allowed value of an option: its ends, or one of any size between them."""
    if option.name == "trainer.optimizer":
        return rng.choice(OPTIMIZERS)
    if option.choices:
        return rng.choice(option.choices)
    if bool in option.kinds:
        return rng.random() < 0.5
    ranges = [rule for rule in getattr(option.kind, "__metadata__", ()) if isinstance(rule, Range)]
    allowed = ranges[0] if ranges else Range()
    if int in option.kinds:
        return rng.choice([each for each in INTEGERS if each >= allowed.low])
    ends = [end for end in (allowed.low, allowed.high) if abs(end) < float("inf")]
    if ends and rng.random() < 0.2:
        return rng.choice(ends)
    value = 10 ** rng.uniform(-9, 3)
    if allowed.high == 1:
        return 1 - min(1.0, value) if rng.random() < 0.5 else min(1.0, value)
    return max(allowed.low, value) + (value if allowed.low == 1 else 0)


def configurations() -> Iterator[RunConfig]:
    """Yield valid configurations: the defaults with one to five other values."""
    known = [option for option in options().values() if option.section in SECTIONS]
    known = [option for option in known if option.name not in FIXED]
    known += [options()[name] for name in (*OTHERS, "trainer.optimizer")]
    seen: set[RunConfig] = set()
    for seed in count():
        rng = random.Random(seed)
        values = {
            option.name: drawn(option, rng) for option in rng.sample(known, rng.randint(1, 5))
        }
        route = values.get("old_logps.route", rng.choice(list(routes())))
        if "old_logps.route" in values or any(name.startswith("old_logps.") for name in values):
            values["old_logps.route"] = route
        try:
            config = override(RunConfig(recipe="generated"), values)
        except ConfigError:
            continue
        if config not in seen:
            seen.add(config)
            yield config


def sample(config: RunConfig, policy: Policy, numbers: Sequence[int]) -> list[Group]:
    """Return groups of siblings with mixed rewards and two turns that the policy "sampled".

    The engine's log-probabilities have the noise of its precision.
    """
    groups = [scripted(number, config.schedule.group_size, policy.version) for number in numbers]
    items = [item for group in groups for item in group.trajectories]
    batch = collate([ScoredTrajectory(item, (0.0,)) for item in items])
    logp = policy.score(
        batch,
        batch.sampled,
        temperature=config.engine.temperature,
        max_tokens_per_microbatch=4096,
    ).logp
    size = NOISE if "bfloat16" in (config.engine.dtype, config.trainer.dtype) else 1e-6
    logp += size * torch.randn(logp.shape, generator=torch.Generator().manual_seed(numbers[0]))
    spans = iter(batch.spans())
    return [
        replace(
            group,
            trajectories=tuple(
                _with_logps(item, logp[slice(*next(spans))].tolist()) for item in group.trajectories
            ),
        )
        for group in groups
    ]


def scripted(number: int, size: int, version: int) -> Group:
    """Return a group of random tokens, whose log-probabilities are still missing."""
    rng = random.Random(number)
    task = Task("scripted", "train", number)
    siblings = []
    for sibling in range(min(size, 3)):
        pieces: list[Piece] = []
        for context, reply in ((6, 7), (3, 4 + sibling)):
            pieces.append(ContextPiece(tuple(rng.randrange(5, 900) for _ in range(context))))
            tokens = tuple(rng.randrange(5, 900) for _ in range(reply))
            pieces.append(Sampled(tokens, (0.0,) * reply, version))
        reward = {"task": float((number + sibling) % 2)}
        episode = 10 * number + sibling
        siblings.append(Trajectory(tuple(pieces), reward, "done", task, seed=0, episode=episode))
    return Group(task, tuple(siblings), number=number)


def _with_logps(item: Trajectory, logps: Sequence[float]) -> Trajectory:
    pieces = tuple(
        replace(piece, behavior_logp=tuple(logps[start : start + len(piece.tokens)]))
        if isinstance(piece, Sampled)
        else piece
        for start, piece, _ in walk(item.pieces)
    )
    return replace(item, pieces=pieces)


def pieces_of(groups: Sequence[Group], version: int) -> list[PendingPiece]:
    return [
        PendingPiece(item.episode, item.tokens, start, piece)
        for group in groups
        for item in group.trajectories
        for start, piece, _ in walk(item.pieces)
        if isinstance(piece, Sampled) and piece.version == version
    ]


@cache
def initial_policy(options: TrainerConfig) -> Policy:
    return load_policy(RunConfig(recipe="generated", trainer=options))


def learns(config: RunConfig) -> bool:
    """Return True if a gradient changes the weights within three scripted steps."""
    options = config.trainer
    adapters = {"lora_rank": options.lora_rank, "lora_alpha": options.lora_alpha}
    kind = TrainerConfig(dtype=options.dtype, **adapters)
    policy = copy.deepcopy(initial_policy(kind))
    trainer, _ = build_trainer(config, policy, build_scorer(config, policy))
    before = {name: each.clone() for name, each in trainer.state()["weights"].items()}
    lag = min(config.schedule.staleness_bound, 1)
    groups_per_step = min(config.schedule.groups_per_step, 2)
    waiting: dict[int, list[Group]] = {}
    with closing(trainer.old):
        for step in range(STEPS):
            trainer.old.before_publish()
            trainer.old.on_published(live=set(range(step + 1)))
            for due in range(step and step + lag, step + lag + 1):
                numbers = range(due * groups_per_step, (due + 1) * groups_per_step)
                waiting[due] = sample(config, policy, numbers)
                for piece in pieces_of(waiting[due], step):
                    trainer.old.on_piece(piece)
            groups = waiting.pop(step)
            later = [group for groups in waiting.values() for group in groups]
            take_step(config, trainer, groups, pieces_of(later, step))
            after = trainer.state()["weights"]
            moved = any(not torch.equal(each, before[name]) for name, each in after.items())
            if moved and trainer.metrics()["trainer/grad_norm"] > 0:
                return True
            trainer.start_version()
    return False


def take_step(
    config: RunConfig, trainer: LocalTrainer, groups: list[Group], unscored: list[PendingPiece]
) -> None:
    scored = build_advantage(config.advantage)(groups)
    for number, minibatch in enumerate(trainer.prepare(collate(scored))):
        trainer.backward(minibatch)
        if number == 0:
            trainer.old.before_update(unscored)
        trainer.step()


def is_silent(config: RunConfig) -> bool:
    verdict = check(config)
    return not verdict.refusals and not verdict.warnings


def require_learning(configs: Iterable[RunConfig]) -> int:
    """Assert that all configurations without a finding learn. Return their number."""
    silent = [config for config in configs if is_silent(config)]
    for config in silent:
        assert learns(config), changed_options(RunConfig(recipe="generated"), config)
    return len(silent)


@pytest.mark.costly
def test_a_configuration_without_a_finding_learns() -> None:
    in_process = (each for each in configurations() if not each.old_logps.needs.own_process)
    assert require_learning(islice(in_process, 50)) >= 15


@pytest.mark.slow
def test_many_configurations_without_a_finding_learn() -> None:
    assert require_learning(islice(configurations(), 500)) >= 200


def test_configurations_that_cannot_learn_get_a_finding_and_keep_their_weights() -> None:
    """Otherwise the property would hold for any linter."""
    for values in (
        {"schedule.group_size": 1},
        {"correction.token_veto_threshold": 1.0},
        {"trainer.lr": 1e-30},
        {"correction.low": 1.0, "correction.high": 1.0},
    ):
        config = override(RunConfig(recipe="generated"), values)
        assert not is_silent(config) and not learns(config), values
