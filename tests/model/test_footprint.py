"""Test the predicted footprint: it is printed before a run, close to the real one, and checked."""

import gc
import shutil
from collections import namedtuple
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor
from torch.nn import Parameter

from tests.durability.test_resume import Toy, config, played
from tests.lint.test_learning import sample
from unstale.builders import build_advantage, build_scorer, build_trainer, load_policy
from unstale.builders.footprint import PROCESS_BYTES, predict_footprint, require_disk_to_resume
from unstale.cli import session
from unstale.config import (
    AuditConfig,
    CheckpointConfig,
    ClusterConfig,
    ConfigError,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.config.routes import live_versions
from unstale.durability.checkpoint import Checkpoints, Progress
from unstale.model import linear
from unstale.model.lora import Lora
from unstale.records import collate
from unstale.testing import tiny_policy
from unstale.trainer import train_on

Usage = namedtuple("Usage", "total used free")


@pytest.mark.costly
def test_a_run_prints_its_footprint_and_its_checkpoints_have_the_predicted_size(
    tmp_path: Path,
) -> None:
    made = replace(config(), audit=AuditConfig(), runs=tmp_path, name="run")
    out = StringIO()
    with played(Toy()):
        session.train(made, console=Console(file=out, width=500))
    assert "weights; expected memory 1.4 GB (trainer 0.7, engines 0.7)" in out.getvalue()
    assert "\nexpected disk 0.0 GB: 3 checkpoints" in out.getvalue()
    predicted = predict_footprint(made, tiny_policy()).checkpoint
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    tensors = [*newest.rglob("*.safetensors")]
    assert sum(path.stat().st_size for path in tensors) == pytest.approx(predicted, rel=0.6)


def test_the_trainer_takes_20_bytes_a_float32_weight_and_the_deltas() -> None:
    policy = tiny_policy()
    made = replace(config(), audit=AuditConfig())
    plain = replace(made, old_logps=OldLogpsConfig(route="rollout"))
    weights = sum(weight.numel() for weight in policy.model.parameters())
    bare = predict_footprint(plain, policy)
    assert bare.trainer - PROCESS_BYTES == pytest.approx(16 * weights)
    assert bare.checkpoint == 12 * weights
    audited = predict_footprint(replace(plain, audit=AuditConfig(share=0.5)), policy)
    assert audited.trainer > bare.trainer and audited.checkpoint > bare.checkpoint


def test_an_engine_keeps_float32_where_the_cpu_multiplies_bfloat16_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tiny_policy()
    weights = sum(weight.numel() for weight in policy.model.parameters())
    made = config()
    assert made.engine.dtype == "bfloat16"
    found = {}
    for multiplies in (True, False):
        monkeypatch.setattr(linear, "MULTIPLIES_BFLOAT16", multiplies)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        found[multiplies] = predict_footprint(made, policy).engines
    assert found[False] - found[True] == pytest.approx(2 * weights * made.engine.processes)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert predict_footprint(made, policy).engines == found[True], "a GPU multiplies bfloat16"


def test_trainer_ranks_divide_the_memory_and_write_differences() -> None:
    policy = tiny_policy()
    made = replace(config(), audit=AuditConfig(), old_logps=OldLogpsConfig(route="snapshot_old"))
    alone = replace(made, engine=replace(made.engine, dtype=made.trainer.dtype))
    one = predict_footprint(alone, policy)
    head = policy.model.get_output_embeddings().weight.numel()
    body = sum(weight.numel() for weight in policy.model.parameters()) - head
    gathered = 4 * (head + 2 * body / policy.model.config.num_hidden_layers)
    for count in (1, 2, 4):
        ranks = replace(alone, cluster=ClusterConfig(trainers=count))
        found = predict_footprint(ranks, policy)
        assert found.disk == one.disk and found.checkpoint == one.checkpoint
        copied = (4 + 8 + 4) * (head + body)  # weights, moments and weights of a pass
        divided = (one.trainer - PROCESS_BYTES + copied) / count + gathered * (count > 1)
        assert found.trainer - PROCESS_BYTES == pytest.approx(divided)
        assert found.driver - PROCESS_BYTES == 4 * (head + body)
        assert f"{count} trainer ranks of 0.7, the run's process 0.7, engines" in str(found)
        memory = count * found.trainer + found.driver + found.engines
        assert f"expected memory {memory / 1e9:.1f} GB (" in str(found)
    cluster = ClusterConfig(trainers=4, engine_hosts=2, address="head:6379")
    found = predict_footprint(replace(alone, cluster=cluster, deterministic=False), policy)
    line = "expected memory 0.7 GB (the run's process 0.7, engines 0.0), and 4 trainer ranks of 0.7"
    assert line in str(found) and found.engines == 0


def test_moments_of_8_bits_take_2_bytes_and_whole_experts_are_not_gathered() -> None:
    policy = tiny_policy(experts=8)
    made = replace(config(), audit=AuditConfig(), deterministic=False)
    in_bytes = replace(made, trainer=replace(made.trainer, optimizer="AdamW8bit"))
    weights = sum(weight.numel() for weight in policy.model.parameters())
    one, other = (predict_footprint(each, policy) for each in (made, in_bytes))
    assert one.trainer - other.trainer == pytest.approx(6 * weights)
    assert one.checkpoint - other.checkpoint == pytest.approx(6 * weights)
    gathered = [
        predict_footprint(replace(made, cluster=ClusterConfig(trainers=2, **options)), policy)
        for options in ({}, {"expert_parallel": True})
    ]
    experts = sum(
        weight.numel() for name, weight in policy.model.named_parameters() if ".experts." in name
    )
    assert gathered[0].trainer - gathered[1].trainer == pytest.approx(4 * experts)


@pytest.mark.parametrize("lora", [None, Lora(4)])
def test_a_rank_in_bfloat16_has_20_bytes_a_weight_and_two_copies(lora: Lora | None) -> None:
    """The passes gather a float32 part that another one is rounded into at random. Adapters are
    whole on every rank.

    One copy is of the published version, the other is what a checkpoint is written from.
    """
    policy = tiny_policy(dtype="bfloat16", lora=lora)
    route = OldLogpsConfig(route="rollout")
    made = replace(
        config(), audit=AuditConfig(), old_logps=route, cluster=ClusterConfig(trainers=4)
    )
    total = sum(weight.numel() for weight in policy.model.parameters())
    trained = sum(weight.numel() for weight in policy.weights().values())
    head = policy.model.get_output_embeddings().weight.numel()
    layers = 2 * (total - head) / policy.model.config.num_hidden_layers
    copied = (4 + 8 + 2) * trained  # by a checkpoint: float32 weights, moments, bfloat16 weights
    divided = 2 * (total - trained) if lora else 22 * total + copied
    whole = 20 * trained + copied if lora else 0
    found = predict_footprint(made, policy).trainer - PROCESS_BYTES
    assert found == pytest.approx(divided / 4 + whole + 2 * (head + layers))


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_ranks_copies_what_is_predicted(dtype: str, tmp_path: Path) -> None:
    made = RunConfig(
        recipe="generated",
        old_logps=OldLogpsConfig(route="snapshot_old"),
        trainer=TrainerConfig(dtype=dtype, lr=1e-6),
        audit=AuditConfig(share=0.0),
    )
    policy = load_policy(made)
    trainer, _ = build_trainer(made, policy, build_scorer(made, policy))
    with closing(trainer.old):
        trainer.old.before_publish()
        trainer.old.on_published(live={0})
        groups = sample(made, policy, [0])
        train_on(trainer, collate(build_advantage(made.advantage)(groups)))
        parts = {"trainer": trainer, "old": trainer.old}
        checkpoints = Checkpoints(tmp_path, parts, copies=True)
        before = places_and_sizes(every_tensor())
        snapshot = checkpoints.snapshot(Progress(1), trainer)
        added = places_and_sizes(every_tensor())
    copied = sum(size for place, size in added.items() if place not in before)
    assert snapshot.version == 0
    ranks = replace(made, cluster=ClusterConfig(trainers=1))
    local, on_rank = (predict_footprint(each, policy).trainer for each in (made, ranks))
    assert on_rank - local == pytest.approx(copied, rel=0.02)


def test_the_second_model_of_a_route_is_counted_in_its_own_processes() -> None:
    """Each rank has its part, gathered layers, and what one trainer rank sends of a version."""
    policy = tiny_policy(dtype="bfloat16")
    route = OldLogpsConfig(route="old_logit_model")
    made = replace(config(), audit=AuditConfig(), old_logps=route, deterministic=False)
    total = 2 * sum(weight.numel() for weight in policy.model.parameters())
    head = 2 * policy.model.get_output_embeddings().weight.numel()
    gathered = head + 2 * (total - head) / policy.model.config.num_hidden_layers
    alone = predict_footprint(made, policy)
    assert alone.scorers == 1 and alone.scorer - PROCESS_BYTES == pytest.approx(2 * total)
    assert "(trainer 0.7, 1 second model of 0.7, engines" in str(alone)
    three = OldLogpsConfig(route="old_logit_model", ranks=3)
    ranks = replace(made, old_logps=three, cluster=ClusterConfig(trainers=2))
    found = predict_footprint(ranks, policy)
    assert found.scorer - PROCESS_BYTES == pytest.approx(total / 3 + gathered + total / 2)
    text = "2 trainer ranks of 0.7, 3 ranks of the second model of 0.7, the run's process 0.7"
    assert text in str(found)
    memory = 2 * found.trainer + 3 * found.scorer + found.driver + found.engines
    assert f"expected memory {memory / 1e9:.1f} GB (" in str(found)
    elsewhere = replace(ranks, cluster=ClusterConfig(trainers=2, address="head:6379"))
    line = "and 2 trainer ranks of 0.7 and 3 ranks of the second model of 0.7 GB in the cluster"
    assert line in str(predict_footprint(elsewhere, policy))
    other = replace(made, old_logps=OldLogpsConfig(route="rollout"))
    assert predict_footprint(other, policy).scorers == 0


def test_a_short_run_needs_no_more_disk_than_its_steps_write() -> None:
    policy = tiny_policy()
    made = replace(config(), audit=AuditConfig(), old_logps=OldLogpsConfig(route="rollout"))
    short = replace(made, max_steps=4, checkpoint=CheckpointConfig(interval=1000))
    predicted = predict_footprint(short, policy)
    weights = sum(weight.numel() for weight in policy.model.parameters())
    assert predicted.kept == 2, "one before the first step, one at the end"
    assert predicted.disk <= 2 * predicted.checkpoint + (5 + 1) * 4 * weights
    assert predict_footprint(replace(short, max_steps=10_000), policy).kept == 3
    long = predict_footprint(replace(made, max_steps=10_000), policy)
    assert long.disk <= long.kept * long.checkpoint + (3 + 2) * 4 * weights, (
        "3 versions, 2 policies"
    )
    timed = replace(short, checkpoint=CheckpointConfig(interval=1000, minutes=1.0))
    assert predict_footprint(timed, policy).kept == 3


def test_a_disk_that_is_too_full_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 999, 999))
    made = replace(config(), runs=tmp_path / "runs", name="run")
    says = r"has 0\.00 GB free, but the run needs about .* GB \(3 checkpoints of .*--runs"
    with played(Toy()), pytest.raises(ConfigError, match=says):
        session.train(made, console=Console(file=StringIO()))
    assert not (tmp_path / "runs").exists()


@pytest.mark.costly
def test_a_run_is_not_resumed_on_a_disk_without_space_for_its_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(config(), runs=tmp_path, name="run", max_steps=4)
    made = replace(made, checkpoint=CheckpointConfig(interval=2))
    with played(Toy()):
        session.train(made, console=Console(file=StringIO()))
    run = tmp_path / "run"
    sizes = [
        sum(path.stat().st_size for path in each.rglob("*") if path.is_file())
        for each in (run / "checkpoints").iterdir()
    ]
    longer = replace(made, max_steps=5)
    assert len(sizes) == 2
    says = r"run has 0\.00 GB free, but the rest of the run needs about .* GB \(1 more checkpoints"
    for free, refused in ((max(sizes), True), (10**9, False)):
        usage = Usage(10**12, 10**12 - free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        with pytest.raises(ConfigError, match=says) if refused else nullcontext():
            require_disk_to_resume(longer, run, 4)
    # Trainer ranks write a version as a folder, with a file of each rank.
    parts = run / "versions" / "000009.parts"
    parts.mkdir()
    for rank in range(2):
        (parts / f"rank-{rank}").write_bytes(bytes(10**6))
    usage = Usage(10**12, 10**12 - max(sizes), 2 * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"\d+ versions"):
        require_disk_to_resume(longer, run, 4)
    shutil.rmtree(parts)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 9, 9))
    before = sorted(run.rglob("*"))
    with played(Toy()), pytest.raises(ConfigError, match="the rest of the run needs about"):
        session.resume(run, longer, console=Console(file=StringIO()))
    assert sorted(run.rglob("*")) == before


def test_what_an_interrupted_run_wrote_in_part_counts_as_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume removes it. Otherwise it could block the resume that would remove it."""
    tiny_policy().save(tmp_path / "policy")
    made = replace(config(), model=str(tmp_path / "policy"), max_steps=4)
    made = replace(made, checkpoint=CheckpointConfig(interval=2))
    run = tmp_path / "run"
    for name in ("step000002-version000002", "step000004-version000004.part"):
        (run / "checkpoints" / name / "trainer").mkdir(parents=True)
        (run / "checkpoints" / name / "trainer" / "file").write_bytes(bytes(10**6))
    (run / "versions").mkdir()
    (run / "versions" / "000005.part").write_bytes(bytes(10**6))
    policy = sum(path.stat().st_size for path in (tmp_path / "policy").glob("*.safetensors"))
    usage = Usage(10**12, 10**12 - policy, policy)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    require_disk_to_resume(made, run, 2)
    (run / "versions" / "000005.part").unlink()
    require_disk_to_resume(made, run, 2)
    shutil.rmtree(run / "checkpoints" / "step000004-version000004.part")
    with pytest.raises(ConfigError, match="1 more checkpoints"):
        require_disk_to_resume(made, run, 2)


@pytest.mark.costly
@pytest.mark.parametrize("dtype, deltas", [("float32", 2.0), ("bfloat16", 0.2)])
def test_a_trainer_holds_at_most_24_bytes_a_weight(dtype: str, deltas: float) -> None:
    """Count them before an optimizer step, when there are gradients, moments and a past version.

    All tensors of the process are counted, whoever refers to them.
    """
    earlier = every_tensor()
    made = RunConfig(
        recipe="generated",
        old_logps=OldLogpsConfig(route="snapshot_old"),
        trainer=TrainerConfig(dtype=dtype, lr=1e-6),
        audit=AuditConfig(share=0.0),
    )
    policy = load_policy(made)
    trainer, _ = build_trainer(made, policy, build_scorer(made, policy))
    weights = sum(weight.numel() for weight in policy.model.parameters())
    with closing(trainer.old):
        for step in range(2):
            trainer.old.before_publish()
            trainer.old.on_published(live=set(range(step + 1)))
            groups = sample(made, policy, [step])
            (minibatch,) = trainer.prepare(collate(build_advantage(made.advantage)(groups)))
            trainer.backward(minibatch)
            if step == 0:
                trainer.step()
                trainer.start_version()
        known = places_and_sizes(earlier)
        memory = places_and_sizes(every_tensor())
        held = sum(size for place, size in memory.items() if place not in known) / weights
        kept = trainer.metrics()["old_logps/memory_bytes"] / weights
    copies = {"float32": 4 + 4, "bfloat16": 2 + 4 + 2}[dtype]  # with a master, and one to score
    assert held == pytest.approx(copies + 4 + 8, abs=0.3)  # gradients, two moments
    assert 0 < kept < deltas and held + kept < 24
    assert predict_footprint(made, policy).trainer - PROCESS_BYTES == pytest.approx(
        (held + live_versions(made) * kept) * weights, rel=0.1
    )


def places_and_sizes(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each tensor's memory by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def every_tensor() -> list[Tensor]:
    """Return all tensors that Python code refers to, and their gradients."""
    gc.collect()
    # not subclasses: torch's compiler keeps tensors without memory
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, Parameter)]
    grads = [tensor.grad for tensor in tensors if tensor.is_leaf]
    return tensors + [grad for grad in grads if grad is not None]
