"""Test how weights of a divided model leave the trainer ranks: no rank has more than it must.

The engines, the saved policy and ranks that only score get each rank's part, and no rank gathers
anything. A recording and a failed batch are written by the first rank, one whole tensor at a time.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from tests.trainer.test_ranks import SMALL, batch_of, components, masters
from unstale.builders import build_scorer, build_trainer
from unstale.cluster.ranked_trainer import RankedTrainer
from unstale.cluster.ranks import Ranks
from unstale.cluster.ranks_worker import PublishedPart, Rank
from unstale.cluster.scoring_ranks import ScoringRank
from unstale.cluster.weight_objects import Part, read_delta
from unstale.config import OldLogpsConfig
from unstale.durability.checkpoint import Checkpoints, Progress
from unstale.model.lora import Lora
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.policy import Policy
from unstale.model.sharding import gather_whole
from unstale.testing import nudge, tiny_policy
from unstale.weights.recording import WENT_WRONG, FailedStep

VERSIONS = 3


@dataclass(frozen=True)
class Kind:
    """A model that ranks divide."""

    dtype: str = "float32"
    lora: Lora | None = None
    experts: int = 0

    def load(
        self, folder: Path, peers: RankGroup = SINGLE_PROCESS, *, trained: bool = True
    ) -> Policy:
        folder = folder / ("moe" if self.experts else "dense")
        return Policy.load(folder, dtype=self.dtype, lora=self.lora, peers=peers, trained=trained)


KINDS = {
    "tied": Kind(),
    "bfloat16": Kind(dtype="bfloat16"),
    "lora": Kind(dtype="bfloat16", lora=Lora(4)),
    "moe": Kind(dtype="bfloat16", experts=4),
}
"""The models of `tiny_policy` have one weight for embedding and head. The third of three ranks has
none of the 4 experts.
"""


@dataclass
class Gathered:
    """The bytes of gathered tensors: those that exist now, and the most at one time."""

    now: int = 0
    most: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


@contextmanager
def watch_gathers() -> Iterator[Gathered]:
    found = Gathered()
    full_tensor = DTensor.full_tensor

    def gather(tensor: DTensor, **options: Any) -> Tensor:
        whole = full_tensor(tensor, **options)
        found.add(whole.nbytes)
        weakref.finalize(whole, found.add, -whole.nbytes)
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", gather)
        yield found


Posted = tuple[PublishedPart, list[Part]]
"""The parts of a version's weights that one rank gives."""


@dataclass
class Given:
    """The parts that one rank gave of every version, and the true weights of every version."""

    posted: list[Posted] = field(default_factory=list)
    now: Posted | None = None
    """Its part of the last version, as a difference from zeros."""
    wholes: list[dict[str, Tensor]] = field(default_factory=list)


def give(peers: RankGroup, folder: Path, runs: Path) -> dict[str, Given]:
    return {name: give_kind(kind, peers, folder, runs / name) for name, kind in KINDS.items()}


def give_kind(kind: Kind, peers: RankGroup, folder: Path, run: Path) -> Given:
    """Publish and record versions that differ in all words, and then in few."""
    policy = kind.load(folder, peers)
    config = replace(SMALL, old_logps=OldLogpsConfig(route="rollout"))
    rank = Rank(policy, *build_trainer(config, policy, build_scorer(config, policy)))
    rank.open_run(run, 2)
    rank.record(run)
    given = Given()
    for version, size in enumerate((0.02, 0.02, 1e-4)):
        nudge(policy, seed=version, size=size)
        policy.version = version
        with watch_gathers() as gathered:
            given.posted.append(copied(rank.publish((), version - 1)))
            given.now = copied(rank.weight_part())
        assert gathered.most == 0
        with watch_gathers() as gathered:
            rank.audit_published([version])
        wholes = {name: tensor.clone() for name, tensor in policy.whole_weights()}
        largest = max(tensor.nbytes for tensor in wholes.values())
        assert gathered.most == (0 if kind.lora else largest) and gathered.now == 0
        given.wholes.append(wholes)
    return given


def copied(posted: Posted) -> Posted:
    size, parts = posted
    return size, [part.copy() for part in parts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies")
    tiny_policy(seed=3).save(path / "dense")
    tiny_policy(seed=3, experts=4).save(path / "moe")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ranks(folder: Path, runs: Path) -> list[dict[str, Given]]:
    """Return what each of two ranks gave, for each kind of model."""
    return run_ranks(2, give, folder, runs)


class PostedParts:
    """`Ranks` of which only the results of `weight_part` are there."""

    scorers = None

    def __init__(self, posted: Sequence[Posted]) -> None:
        self._posted = posted

    def later(self, name: str, *_: Any) -> None:
        assert name == "follow_version"

    def call_parts(self, name: str) -> tuple[list[PublishedPart], list[list[Part]]]:
        assert name == "weight_part"
        return [size for size, _ in self._posted], [parts for _, parts in self._posted]

    def fetch(self, parts: list[Part], limit_s: float) -> list[Part]:
        return parts


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("name", KINDS)
def test_the_saved_policy_is_bitwise_that_of_whole_weights(
    name: str, ranks: list[dict[str, Given]], folder: Path, tmp_path: Path
) -> None:
    """The driver gets each rank's part. It saves the same files as from weights of one process."""
    kind = KINDS[name]
    posted = [rank[name].now for rank in ranks]
    truth = ranks[0][name].wholes[-1]
    policy = kind.load(folder)
    fake: Any = PostedParts([each for each in posted if each])
    trainer = RankedTrainer(cast(Ranks, fake), policy)
    trainer.update_policy()
    policy.save(tmp_path / "saved")
    expected = kind.load(folder)
    expected.load_weights(truth)
    expected.save(tmp_path / "expected")
    assert contents(tmp_path / "saved") == contents(tmp_path / "expected")
    assert all(torch.equal(trainer.weights()[name], tensor) for name, tensor in truth.items())
    loaded = Policy.load(tmp_path / "saved", dtype=kind.dtype)
    assert kind.lora or all(torch.equal(loaded.weights()[n], t) for n, t in truth.items())
    lacking: Any = PostedParts([each for each in posted[:1] if each])
    if not kind.lora:
        with pytest.raises(RuntimeError, match=r"the trainer ranks returned \d+ of \d+ words"):
            RankedTrainer(cast(Ranks, lacking), policy).update_policy()


@pytest.mark.parametrize("name", KINDS)
def test_a_recording_has_the_whole_weights(
    name: str, ranks: list[dict[str, Given]], runs: Path
) -> None:
    for version, truth in enumerate(ranks[0][name].wholes):
        written = load_file(runs / name / "versions" / f"{version:06d}.safetensors")
        assert written.keys() == truth.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in truth.items())


def follow(peers: RankGroup, folder: Path, given: Mapping[str, Sequence[Given]]) -> None:
    """Check that ranks that divide a model otherwise get every version, bit for bit."""
    for name, ranks in given.items():
        policy = KINDS[name].load(folder, peers, trained=False)
        scoring = ScoringRank(policy, build_scorer(SMALL, policy))
        for version in range(VERSIONS):
            posted = [rank.posted[version] for rank in ranks]
            parts = [read_delta(part) for size, part in posted if size.words]
            assert {size.base for size, _ in posted} == {version - 1}
            with watch_gathers() as gathered:
                scoring.advance(version - 1, version, parts)
            assert gathered.most == 0
            truth = ranks[0].wholes[version]
            for key, tensor in policy.whole_weights():
                assert torch.equal(tensor, truth[key]), f"{name}, version {version}, {key}"
        with pytest.raises(ValueError, match="from version 1, but the model has version 2"):
            scoring.advance(1, 2, parts)
        with pytest.raises(ValueError, match=r"has 0 weights for .* rank, which holds \d+"):
            scoring.advance(-1, 3, [])


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_ranks_that_only_score_takes_the_parts(
    count: int, ranks: list[dict[str, Given]], folder: Path
) -> None:
    given = {name: [rank[name] for rank in ranks] for name in KINDS}
    if count == 1:
        follow(SINGLE_PROCESS, folder, given)
    else:
        run_ranks(count, follow, folder, given)


def train_experts(peers: RankGroup, folder: Path, run: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Train on a batch, and restore the checkpoint from before. Return weights and gradient."""
    trainer, parts = components(peers, folder / "moe", SMALL)
    before = masters(trainer)
    checkpoints = Checkpoints(run, parts, peers=peers)
    name = checkpoints.save(Progress(), trainer.policy)
    trainer.old.on_published([0])
    (minibatch,) = trainer.prepare(batch_of(0))
    trainer.backward(minibatch)
    found = [
        gather_whole(p.grad).flatten().clone()  # the step clips gradients in place
        for p in trainer.policy.model.parameters()
        if p.grad is not None
    ]
    trainer.step()
    after = masters(trainer)
    checkpoints.restore(checkpoints.load(name))
    restored = masters(trainer)
    assert all(torch.equal(restored[name], tensor) for name, tensor in before.items())
    return after, torch.cat(found)


@pytest.mark.costly
def test_a_rank_without_experts_trains_and_writes_checkpoints(folder: Path, tmp_path: Path) -> None:
    """The third of three ranks has none of the 4 experts of a layer."""
    alone, gradient = train_experts(SINGLE_PROCESS, folder, tmp_path / "alone")
    for weights, found in run_ranks(3, train_experts, folder, tmp_path / "ranks"):
        assert (found - gradient).norm() < 1e-5 * gradient.norm()
        assert all((weights[name] - tensor).abs().max() < 1e-5 for name, tensor in alone.items())


def fail(peers: RankGroup, folder: Path, run: Path) -> tuple[str, str]:
    """Save a batch at which ranks stop: first where that is impossible. Return both messages."""
    policy = KINDS["bfloat16"].load(folder, peers)
    trainer, auditor = build_trainer(SMALL, policy, build_scorer(SMALL, policy))
    rank = Rank(policy, trainer, auditor)
    rank.on_published([0])
    batch = batch_of(0)
    rank.prepare(replace(batch, advantage=torch.full_like(batch.advantage, torch.inf)))
    with pytest.raises(FloatingPointError):
        rank.backward(0)
    with watch_gathers() as gathered:
        refused = rank.save_failed_batch(run / "missing")
        saved = rank.save_failed_batch(run)
    wholes = {name: tensor.clone() for name, tensor in policy.whole_weights()}
    assert gathered.most == max(tensor.nbytes for tensor in wholes.values())
    if peers.rank == 0:
        weights = dict(FailedStep.load(run / WENT_WRONG).weights)
        assert weights.keys() == wholes.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in wholes.items())
    return refused, saved


def test_a_failed_batch_is_saved_and_a_disk_error_holds_up_no_rank(
    folder: Path, tmp_path: Path
) -> None:
    (refused, saved), others = run_ranks(2, fail, folder, tmp_path)
    assert refused.startswith("the batch could not be saved: ") and "unstale replay" in saved
    assert others == ("", "")
