"""Test trainer ranks that are Ray actors.

They train as one process does, also while a checkpoint is written. A rank that is killed is
noticed, and new ranks continue from the checkpoint, bit for bit.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cluster.conftest import NODE_MEMORY
from unstale.builders import build_rank, load_policy
from unstale.cluster import ranks as ranks_module
from unstale.cluster import session
from unstale.cluster.ranked_trainer import (
    RankedAuditor,
    RankedCheckpoints,
    RankedOldLogps,
    RankedTrainer,
)
from unstale.cluster.ranks import Ranks, RanksDied
from unstale.cluster.ranks_worker import Rank
from unstale.config import AuditConfig, ConfigError, OldLogpsConfig, RunConfig, TrainerConfig
from unstale.durability.checkpoint import Progress
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.records import Batch, collate
from unstale.testing import episode, tiny_policy
from unstale.trainer import train_on


def batch_of(step: int) -> Batch:
    """Return a batch with tokens of the last two versions."""
    plans = [[9, (6, max(0, step - 1)), 4, (5, step)] for _ in range(6)]
    return collate(
        [episode(10 * step + i, plan, advantage=i - 2.5) for i, plan in enumerate(plans)]
    )


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    tiny_policy(seed=3).save(tmp_path / "policy")
    return RunConfig(
        recipe="",
        model=str(tmp_path / "policy"),
        max_steps=4,
        deterministic=True,
        old_logps=OldLogpsConfig(route="snapshot_old"),
        audit=AuditConfig(share=0.5),
        trainer=TrainerConfig(lr=1e-4, max_tokens_per_microbatch=48),
    )


class Driver:
    """The components of a training loop over ranks."""

    def __init__(self, ranks: Ranks, config: RunConfig, run: Path) -> None:
        self.ranks = ranks
        self.trainer = RankedTrainer(ranks, load_policy(config))
        self.old = RankedOldLogps(self.trainer, config.old_logps.needs)
        self.auditor = RankedAuditor(self.trainer)
        self.checkpoints = RankedCheckpoints(self.trainer, run)

    def step(self) -> None:
        """Publish the version and train on a batch, which makes the next."""
        version = self.trainer.version
        self.old.on_published({max(0, version - 1), version})
        self.auditor.on_published({max(0, version - 1), version})
        train_on(self.trainer, batch_of(version))
        assert self.trainer.metrics()["old_logps/exact_share"] == 1.0
        assert self.trainer.metrics()["audit/logp_error_abs_mean"] == 0.0
        self.trainer.start_version()


@contextmanager
def driver(
    count: int, config: RunConfig, run: Path, build: Callable[..., Rank] = build_rank
) -> Iterator[Driver]:
    ranks = Ranks(count)
    try:
        ranks.make(partial(build, config))
        yield Driver(ranks, config, run)
    finally:
        ranks.close()


def make_slow_writer(hold: Path) -> Callable[..., Rank]:
    """Return a `build_rank` for ranks that write no checkpoint while the file `hold` exists."""

    class SlowWriter(Rank):  # here, because Ray then pickles it by value
        def write(self) -> str:
            while hold.exists():
                time.sleep(0.02)
            return Rank.write(self)

    def build(config: RunConfig, peers: RankGroup) -> Rank:
        rank = build_rank(config, peers)
        return SlowWriter(rank.policy, rank.trainer, rank.auditor)

    return build


def make_peerless() -> Any:
    """Return a `MakeRank` for ranks of which the second dies while the first waits for it."""

    class Peerless:  # here, because Ray then pickles it by value
        def wait(self) -> None:
            if dist.get_rank() == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        def fail(self) -> None:
            raise ValueError(f"rank {dist.get_rank()} has no data")

    return lambda peers: Peerless()


def test_a_rank_that_dies_in_a_collective_is_not_an_error_of_another() -> None:
    ranks = Ranks(2)
    try:
        ranks.make(make_peerless())
        with pytest.raises(ValueError, match="has no data"):
            ranks.call("fail")
        with pytest.raises(RanksDied, match=r"a trainer rank died \(wait\)"):
            ranks.call("wait")
    finally:
        ranks.close()


def make_busy() -> Any:
    """Return a `MakeRank` for ranks that answer no call at once."""

    class Busy:  # here, because Ray then pickles it by value
        def __getattr__(self, name: str) -> Any:
            return lambda: time.sleep(0.2)

    return lambda peers: Busy()


def test_new_ranks_and_resumes_have_the_time_of_a_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks_module, "LEAST_CALL_S", 0.0)
    monkeypatch.setattr(ranks_module, "SLOWER", 0)
    ranks = Ranks(1)
    try:
        for _ in range(2):
            ranks.make(make_busy())
            for name in ("load", "restore", "recover") * 2:
                ranks.call(name)
            ranks.call("step")
            with pytest.raises(RanksDied, match=r"did not answer within 0 s \(step\)"):
                ranks.call("step")
    finally:
        ranks.close()


def make_reporter() -> Any:
    """Return a `MakeRank` for ranks that report the GPUs of all of them."""

    class Reporter:  # here, because Ray then pickles it by value
        def gpus(self) -> list[str]:
            found = [""] * dist.get_world_size()
            dist.all_gather_object(found, os.environ["CUDA_VISIBLE_DEVICES"])
            return found

    return lambda peers: Reporter()


def test_each_rank_has_one_of_the_gpus_of_the_trainer(disconnected: None) -> None:
    session.connect(gpus=["4", "6"], num_gpus=2, object_store_memory=NODE_MEMORY)
    ranks = Ranks(2)
    try:
        ranks.make(make_reporter())
        assert sorted(ranks.call("gpus")) == ["4", "6"]
    finally:
        ranks.close()
    assert os.environ.get("CUDA_VISIBLE_DEVICES", "") == ""


def test_more_trainers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = session.connect()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(ConfigError, match=r"3 trainer ranks .* need 3 GPUs, but .* has 2"):
        Ranks(3)


def learn_alone(config: RunConfig) -> dict[str, Tensor]:
    rank = build_rank(config, SINGLE_PROCESS)
    for version in range(4):
        live = {max(0, version - 1), version}
        rank.on_published(live)
        rank.audit_published(live)
        for number in range(rank.prepare(batch_of(version))):
            rank.backward(number)
            rank.step()
        rank.policy.version += 1
    return {name: tensor.clone() for name, tensor in rank.policy.whole_weights()}


def test_killed_ranks_are_replaced_by_others_that_continue_bitwise(
    config: RunConfig, tmp_path: Path
) -> None:
    alone = learn_alone(config)
    hold = tmp_path / "hold"
    with driver(2, config, tmp_path, make_slow_writer(hold)) as run:
        for _ in range(2):
            run.step()
        hold.touch()
        snapshot = run.checkpoints.snapshot(Progress(2), run.trainer)
        with ThreadPoolExecutor(1) as files:
            writing = files.submit(run.checkpoints.write, snapshot)
            for _ in range(2):  # the ranks train on while the checkpoint is written
                run.step()
            assert not writing.done()
            hold.unlink()
            name = writing.result()
        undisturbed = run.trainer.weights()
        assert run.trainer.version == 4
        os.kill(run.ranks.call("pid"), signal.SIGKILL)
        with pytest.raises(RanksDied, match="a trainer rank died"):
            run.step()
    for name_of, tensor in alone.items():
        assert (undisturbed[name_of] - tensor).abs().max() < 1e-6
    with driver(2, config, tmp_path) as run:
        run.checkpoints.restore(run.checkpoints.load(name))
        assert run.trainer.version == 2
        for _ in range(2):
            run.step()
        again = run.trainer.weights()
    assert all(torch.equal(again[name], tensor) for name, tensor in undisturbed.items())
    with driver(3, config, tmp_path) as run:
        run.checkpoints.restore(run.checkpoints.load(name))
        for _ in range(2):
            run.step()
        other = run.trainer.weights()
    assert all((other[name] - t).abs().max() < 1e-6 for name, t in undisturbed.items())
