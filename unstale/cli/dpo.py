"""The command `dpo`: train a recipe's policy on pairs of episodes from journals (arXiv 2305.18290).

A pair is a success and a failure of one group that began with the same prompt. Its loss is

    -log sigmoid(beta * ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l))))

where w is the success and l the failure. log pi is the sum over an episode's sampled tokens, and
ref the policy before the first step. The loss does not depend on the policy that sampled the
episodes. Both log-probabilities are at `engine.temperature`, with `engine.logit_bias`, over the
whole vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from unstale.algorithms.objectives import Surrogate
from unstale.builders import load_policy
from unstale.cli.sft import plain_trainer, require_plain
from unstale.config import ConfigError, ObjectiveConfig, RunConfig
from unstale.config.checks import require_empty_folder
from unstale.durability.console import Console
from unstale.durability.journal import JOURNAL, JournalReader
from unstale.durability.run_folder import TOKENIZER, dumps
from unstale.model.forward import Scored
from unstale.model.policy import Policy
from unstale.records import (
    ROUNDED,
    Batch,
    Placed,
    Sampled,
    ScoredTrajectory,
    Trajectory,
    collate,
)
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer
from unstale.trainer.passes import pass_tokens

RECORD = "dpo.json"
"""Name of the file, next to the trained model, with the options and the metrics of every step."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A success and a failure of one group, which began with the same prompt."""

    success: Trajectory
    failure: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoOptions:
    """Options of the command `dpo` besides those of a run: beta of the loss, and pairs in a
    batch.
    """

    beta: float = 0.1
    batch: int = 16

    def __post_init__(self) -> None:
        if not self.beta > 0 or self.batch < 1:
            raise ConfigError(
                f"--beta must be > 0 and --batch >= 1, got {self.beta:g} and {self.batch}"
            )


@dataclass(frozen=True, slots=True)
class DpoStep:
    """The metrics of one optimizer step, computed with the weights before it."""

    step: int
    loss: float
    """Mean loss of the batch's pairs."""
    accuracy: float
    """Share of pairs with a margin above 0."""
    margin: float
    """Mean of the argument of the sigmoid in the loss (see the module)."""
    grad_norm: float


def dpo(
    config: RunConfig,
    runs: Sequence[Path],
    folder: Path | str,
    options: DpoOptions,
    *,
    console: Console | None = None,
) -> Sequence[DpoStep]:
    """Train a policy on the pairs in the journals of `runs`, and write it to a new or empty folder.

    `config` has the policy, the options of `trainer` and the number of optimizer steps
    (`config.max_steps`). Return the metrics of each step. Raises `ConfigError` before training if
    an option is wrong, a run has another tokenizer, or there is no pair.
    """
    folder = Path(folder)
    config = config.with_policy(config.model)
    require_empty_folder(folder)
    require_plain(config, "dpo")
    console = console or Console(soft_wrap=True)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    policy = load_policy(config)
    pairs: list[Pair] = []
    num_skipped = 0
    for run in runs:
        some, skipped = _pairs(run, policy, config.engine.max_context)
        pairs += some
        num_skipped += skipped
    left_out = f"{num_skipped} episodes with a fork or placed text are left out"
    if not pairs:
        raise ConfigError(
            f"{', '.join(map(str, runs))}: no group has a success and a failure with one prompt "
            f"({left_out})"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from error
    console.print(f"{len(pairs)} pairs; {left_out}", highlight=False)
    figures = learn(config, policy, pairs, options, console=console)
    policy.save(folder)
    record = {"options": asdict(options), "runs": [*map(str, runs)], "pairs": len(pairs)}
    (folder / RECORD).write_text(dumps({**record, "steps": [asdict(each) for each in figures]}))
    return figures


def learn(
    config: RunConfig,
    policy: Policy,
    pairs: Sequence[Pair],
    options: DpoOptions,
    *,
    console: Console,
) -> list[DpoStep]:
    """Train a policy on pairs for `config.max_steps` optimizer steps.

    Return the metrics of each.
    """
    objective = _WeightedLogp()
    trainer = plain_trainer(
        replace(config, objective=ObjectiveConfig(loss_aggregation="constant", constant=1.0)),
        policy,
        objective,
    )
    policy.check_length(config.engine.max_context)
    score = partial(
        policy.score,
        temperature=config.engine.temperature,
        max_tokens_per_microbatch=pass_tokens(policy, config, trains=False),
    )
    reference = [_logps(score, _batch([pair])) for pair in pairs]
    order = _order(len(pairs), config.seed)
    figures = []
    for step in range(1, config.max_steps + 1):
        chosen = [next(order) for _ in range(min(options.batch, len(pairs)))]
        wanted = torch.cat([reference[number] for number in chosen])
        batch = _batch([pairs[number] for number in chosen], version=trainer.version)
        figures.append(_step(trainer, score, batch, wanted, options.beta, step))
        if step % max(1, config.max_steps // 20) == 0 or step == config.max_steps:
            last = figures[-1]
            console.print(
                f"step {step}: loss {last.loss:.4f}, accuracy {last.accuracy:.0%}, margin "
                f"{last.margin:.3f}, gradient norm {last.grad_norm:.3g}",
                highlight=False,
            )
    return figures


def pair_loss(logp: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss `[n]` and the margin `[n]` of each of n pairs. The loss is -log
    sigmoid(margin).

    `logp` and `reference` `[2 n]` have log pi and log ref of each pair's success, then of its
    failure.

    >>> loss, margin = pair_loss(torch.tensor([-1.0, -4.0]), torch.tensor([-2.0, -3.0]), 0.5)
    >>> margin.item(), round(loss.item(), 4)
    (1.0, 0.3133)
    """
    gain = (logp - reference).view(-1, 2)
    margin = beta * (gain[:, 0] - gain[:, 1])
    return -torch.nn.functional.logsigmoid(margin), margin


class _WeightedLogp:
    """The objective -w log pi of each token. Its weight w is in `Batch.advantage`."""

    def surrogate(self, log_ratio: Tensor, batch: Batch, options: ObjectiveConfig) -> Surrogate:
        nowhere = torch.zeros_like(batch.sampled)
        logp = torch.where(batch.sampled, log_ratio, 0.0)
        return Surrogate(-batch.advantage * logp, nowhere, nowhere)


def _step(  # noqa: PLR0913 - what a step needs
    trainer: LocalTrainer,
    score: Callable[..., Scored],
    batch: Batch,
    reference: Tensor,
    beta: float,
    step: int,
) -> DpoStep:
    """Take an optimizer step, and return its metrics.

    A forward pass before it gives the derivative of the loss by each log pi, which becomes the
    weight of its tokens. So the two sequences of a pair may be in different microbatches.
    """
    logp = _logps(score, batch).requires_grad_()
    loss, margin = pair_loss(logp, reference, beta)
    (slope,) = torch.autograd.grad(loss.mean(), logp)
    # the trainer divides by the number of sequences
    weight = -slope * len(slope)
    advantage = torch.where(batch.sampled, weight[batch.sequence], 0.0).to(batch.advantage)
    train_on(trainer, replace(batch, advantage=advantage))
    grad_norm = trainer.metrics()["trainer/grad_norm"]
    accuracy = (margin > 0).double().mean().item()
    return DpoStep(step, loss.mean().item(), accuracy, margin.mean().item(), grad_norm)


def _logps(score: Callable[..., Scored], batch: Batch) -> Tensor:
    """Return log pi of each sequence, summed over its sampled tokens, in float64."""
    logp = torch.where(batch.sampled, score(batch, batch.sampled).logp.double(), 0.0)
    return torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.sequence, logp)


def _batch(pairs: Sequence[Pair], *, version: int = 0) -> Batch:
    """Return pairs as a batch of sequences: the success of each pair, then its failure.

    `version` becomes the version of all sampled tokens.
    """
    both = [each for pair in pairs for each in (pair.success, pair.failure)]
    batch = collate([ScoredTrajectory(each, (1.0,)) for each in both])
    sampled = batch.sampled
    return replace(
        batch,
        # log pi is taken over the vocabulary, and no distribution of an engine is compared
        kept_sets=None,
        behavior_logp=torch.zeros_like(batch.behavior_logp),
        version=torch.where(sampled, version, -1),
        episodes=tuple(range(len(both))),
    )


def _pairs(run: Path, policy: Policy, max_tokens: int) -> tuple[list[Pair], int]:
    """Return the pairs of a run, each episode in at most one, and the number of episodes left out.

    Episodes that were forked or have placed text are left out, because the policy did not sample
    all of them. Raises `ConfigError` if the run has another tokenizer, or an episode is too long.
    """
    from tokenizers import Tokenizer

    path = run / TOKENIZER
    if not path.is_file() or not (run / JOURNAL).is_file():
        raise ConfigError(f"{run} is not a run folder: it has no {TOKENIZER} or no {JOURNAL}")
    if Tokenizer.from_file(str(path)).get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"{run} has another tokenizer than the policy {policy.model.name_or_path}"
        )
    groups: dict[tuple[int, str], list[Trajectory]] = {}
    num_skipped = 0
    with JournalReader(run / JOURNAL) as journal:
        for stored in journal.trajectories():
            trajectory = _until_last_reply(stored.trajectory)
            if trajectory.fork or any(isinstance(each, Placed) for each in trajectory.pieces):
                num_skipped += 1
            elif trajectory.pieces:
                if len(trajectory) > max_tokens:
                    raise ConfigError(
                        f"{run}: episode {trajectory.episode} has {len(trajectory)} tokens, more "
                        f"than engine.max_context = {max_tokens}; raise it"
                    )
                groups.setdefault((stored.group, trajectory.role), []).append(trajectory)
    return [pair for group in groups.values() for pair in _of_group(group)], num_skipped


def _of_group(group: Sequence[Trajectory]) -> Iterator[Pair]:
    """Yield the pairs in a group of conversations, in all of which the policy has the same role."""
    won = [each for each in group if _is_success(each)]
    lost = [each for each in group if not _is_success(each)]
    for success in won:
        same = [each for each in lost if each.pieces[0].tokens == success.pieces[0].tokens]
        if same:
            lost.remove(same[0])
            yield Pair(success, same[0])


def _is_success(trajectory: Trajectory) -> bool:
    """Return True if the episode was a success.

    If the policy has a role in it and there is no fact `success`, the reward of the role decides.
    """
    if trajectory.role and "success" not in trajectory.facts:
        return trajectory.role_reward >= 1 - ROUNDED
    return trajectory.success


def _until_last_reply(trajectory: Trajectory) -> Trajectory:
    """Return an episode without the environment's tokens after the last reply."""
    sampled = [place for place, each in enumerate(trajectory.pieces) if isinstance(each, Sampled)]
    return replace(trajectory, pieces=trajectory.pieces[: sampled[-1] + 1 if sampled else 0])


def _order(count: int, seed: int) -> Iterator[int]:
    """Yield the numbers below `count` in random order, again and again, each time in another
    order.
    """
    generator = Random(f"dpo/{seed}")
    while True:
        yield from generator.sample(range(count), count)
