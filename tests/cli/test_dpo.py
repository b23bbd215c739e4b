"""Test the command `dpo`: pairs from journals, the loss and its gradient, and the model folder.

- pairs are successes and failures of one group with the same prompt, each episode once;
- loss and gradient are those of the formula of TRL's `DPOTrainer` (`sigmoid`), written here, for
  any cut into microbatches;
- episodes with a fork or placed text are left out and counted;
- `engine.logit_bias` belongs to the policy and to the reference;
- successes become likelier than failures, equally in two equal commands;
- what cannot be trained on is refused.
"""

import asyncio
import json
import shutil
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli.dpo import RECORD, DpoOptions, DpoStep, dpo
from unstale.config import ConfigError, RunConfig, TrainerConfig
from unstale.config.options import override
from unstale.durability.journal import JOURNAL, Journal
from unstale.model.policy import Policy
from unstale.records import (
    ContextPiece,
    Fork,
    Group,
    GroupRequest,
    Piece,
    Placed,
    Provenance,
    Sampled,
    Task,
    Trajectory,
)

TASK = Task("toy", "train", 0)
Talk = tuple[tuple[int, ...], tuple[int, ...], float]
"""The prompt, the sampled tokens and the reward of an episode."""
GROUPS: tuple[tuple[Talk, ...], ...] = (
    (((2, 7), (20, 21), 1.0), ((2, 7), (30, 31, 32), 0.0), ((2, 7), (33,), 0.0)),
    (((2, 8), (22, 23), 1.0), ((2, 9), (34, 35), 0.0)),  # other prompts
    (((2, 5), (24,), 1.0), ((2, 5), (25,), 1.0)),  # no failure
    (((2, 6), (26, 27), 0.0), ((2, 6), (28, 20, 21, 29), 1.0)),
)
PAIRS = ((GROUPS[0][0], GROUPS[0][1]), (GROUPS[3][1], GROUPS[3][0]))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    """A run folder with the groups. Episodes have a second turn, of one token, and a long end."""
    groups = []
    for number, talks in enumerate(GROUPS):
        told = []
        for sibling, (prompt, reply, reward) in enumerate(talks):
            sampled = Sampled(reply, (-1.0,) * len(reply), version=3)
            end = (ContextPiece((4, 4)), Sampled((9,), (-1.0,), 4))
            pieces = (ContextPiece(prompt), sampled, *end)
            told.append(an_episode(10 * number + sibling, pieces, reward))
        groups.append(told)
    return write_run(tmp_path_factory.mktemp("run"), policy, groups)


def an_episode(
    number: int, pieces: tuple[Piece, ...], reward: float, fork: Fork | None = None
) -> Trajectory:
    rewards = {"reward": reward}
    return Trajectory(pieces, rewards, "done", TASK, seed=number, episode=number, fork=fork)


def write_run(folder: Path, policy: Path, groups: Sequence[Sequence[Trajectory]]) -> Path:
    """Write a run folder with groups of episodes."""
    shutil.copy(policy / "tokenizer.json", folder)
    with Journal(folder / JOURNAL) as journal:
        for number, told in enumerate(groups):
            journal.add_request(GroupRequest(number, TASK, seed=5, place=number))
            for sibling, each in enumerate(told):
                page = journal.begin(
                    number, sibling, episode=each.episode, seed=each.seed, fork=each.fork
                )
                for position, piece in enumerate(each.pieces):
                    page.write_piece(position, piece)
                page.write_outcome(each)
            asyncio.run(journal.finish(Group(TASK, tuple(told), number=number)))
    return folder


def options_of(policy: Path, folder: Path, **changes: object) -> RunConfig:
    trainer = TrainerConfig(lr=3e-3, minibatches_per_batch=1, grad_clip=1e9)
    config = tiny_run(policy, folder, max_steps=12, deterministic=False, trainer=trainer)
    return override(config, changes)


def trained(config: RunConfig, run: Path, folder: Path, **options: float) -> list[DpoStep]:
    told = Console(file=StringIO())
    return [*dpo(config, [run], folder, DpoOptions(**options), console=told)]  # type: ignore[arg-type]


def sums(policy: Policy, temperature: float) -> Tensor:
    """Return log pi of the sampled tokens of each pair's success and failure, `[2 n]`."""
    found = []
    for prompt, reply, _ in (each for pair in PAIRS for each in pair):
        tokens = torch.tensor([[*prompt, *reply, 4, 4, 9]])
        logits = policy.model(input_ids=tokens, use_cache=False).logits[0, :-1] / temperature
        logp = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
        learnt = [*range(len(prompt) - 1, len(prompt) + len(reply) - 1), tokens.shape[1] - 2]
        found.append(logp[learnt].sum())
    return torch.stack(found)


@pytest.mark.costly
@pytest.mark.parametrize("size", [1, 4096])
def test_loss_and_gradient_are_those_of_trl(
    policy: Path, finished: Path, tmp_path: Path, size: int
) -> None:
    changes = {"max_steps": 2, "trainer.max_tokens_per_microbatch": size}
    config = options_of(policy, tmp_path, **changes)
    first, second = trained(config, finished, tmp_path / "out", beta=0.7)
    assert first.loss == pytest.approx(0.6931472, abs=1e-6) and first.margin == 0
    # as in TRL: -logsigmoid(beta * ((pi_w - pi_l) - (ref_w - ref_l)))
    start = Policy.load(policy)
    reference = sums(start, config.engine.temperature).detach()
    logp = sums(start, config.engine.temperature)
    ratio = (logp[0::2] - logp[1::2]) - (reference[0::2] - reference[1::2])
    (-F.logsigmoid(0.7 * ratio)).mean().backward()
    gradients = [each.grad for each in start.model.parameters() if each.grad is not None]
    norm = torch.cat([each.flatten() for each in gradients]).norm().item()
    assert first.grad_norm == pytest.approx(norm, rel=1e-4)
    # the weights after the first step have the second's loss
    once = override(config, {"max_steps": 1})
    trained(once, finished, tmp_path / "once", beta=0.7)
    moved = sums(Policy.load(tmp_path / "once"), config.engine.temperature)
    margin = 0.7 * ((moved - reference)[0::2] - (moved - reference)[1::2])
    assert second.loss == pytest.approx(-F.logsigmoid(margin).mean().item(), abs=1e-5)
    assert second.margin == pytest.approx(margin.mean().item(), abs=1e-5)


def test_successes_become_likelier_and_equal_commands_are_equal(
    policy: Path, finished: Path, tmp_path: Path
) -> None:
    config = options_of(policy, tmp_path)
    steps = trained(config, finished, tmp_path / "one", batch=1)
    assert [each.step for each in steps] == list(range(1, 13))
    assert steps[-1].loss < 0.5 * steps[0].loss and steps[-1].accuracy == 1
    assert trained(config, finished, tmp_path / "two", batch=1) == steps
    record = json.loads((tmp_path / "one" / RECORD).read_text())
    assert record["pairs"] == 2 and record["options"] == {"beta": 0.1, "batch": 1}
    one, two = (Policy.load(tmp_path / name).weights() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_forks_and_hinted_episodes_are_left_out_and_counted(policy: Path, tmp_path: Path) -> None:
    prompt, hint = ContextPiece((2, 7)), Placed((40, 41), Provenance.FORCED)
    reply = Sampled((20, 21, 22), (-1.0,) * 3, 0)
    trunk = an_episode(0, (prompt, reply), 1.0)
    shares, hinted = Fork(0, 4), Fork(0, 2, (hint,))
    told = [
        trunk,
        an_episode(1, (*shares.prefix_of(trunk.pieces), Sampled((30,), (-1.0,), 0)), 0.0, shares),
        an_episode(2, (*hinted.prefix_of(trunk.pieces), Sampled((31,), (-1.0,), 0)), 0.0, hinted),
        an_episode(3, (prompt, hint, Sampled((32,), (-1.0,), 0)), 0.0),
    ]
    config = options_of(policy, tmp_path)
    (tmp_path / "none").mkdir()
    none = write_run(tmp_path / "none", policy, [told])
    with pytest.raises(
        ConfigError, match=r"no group has .*\(3 episodes with a fork or placed text"
    ):
        trained(config, none, tmp_path / "out")
    (tmp_path / "one").mkdir()
    plain = an_episode(4, (prompt, Sampled((33,), (-1.0,), 0)), 0.0)
    run = write_run(tmp_path / "one", policy, [[*told, plain]])
    told_of = Console(file=StringIO(), width=200)
    dpo(config, [run], tmp_path / "out", DpoOptions(), console=told_of)
    assert isinstance(told_of.file, StringIO)
    assert "1 pairs; 3 episodes with a fork or placed text are left out" in told_of.file.getvalue()


def test_log_probabilities_have_the_logit_bias_of_the_recipe(
    policy: Path, finished: Path, tmp_path: Path
) -> None:
    biased = options_of(policy, tmp_path, **{"max_steps": 2, "engine.logit_bias": "30=3"})
    plain = options_of(policy, tmp_path, max_steps=2)
    one, other = (
        trained(config, finished, tmp_path / name)
        for name, config in (("biased", biased), ("plain", plain))
    )
    assert one[0].margin == other[0].margin == 0  # the reference has the bias, too
    assert abs(one[0].grad_norm - other[0].grad_norm) > 1e-3


def test_what_cannot_be_trained_on_is_refused(policy: Path, finished: Path, tmp_path: Path) -> None:
    def refused(message: str, run: Path = finished, **changes: object) -> None:
        with pytest.raises(ConfigError, match=message):
            trained(options_of(policy, tmp_path, **changes), run, tmp_path / "out")

    refused("dpo needs objective.kl_coef = 0", **{"objective.kl_coef": 0.1})
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    words = json.loads((other / "tokenizer.json").read_text())
    words["model"]["vocab"]["another"] = 64
    (other / "tokenizer.json").write_text(json.dumps(words))
    refused("other has another tokenizer than the policy", run=other)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("is not a run folder", run=empty)
    with pytest.raises(ConfigError, match="--beta must be > 0"):
        DpoOptions(beta=0.0)
