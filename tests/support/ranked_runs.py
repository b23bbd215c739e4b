"""Short runs with trainer ranks, and a check of their journals at the end."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from unstale.cli import session
from unstale.config import (
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
)
from unstale.durability.journal import Journal, check
from unstale.durability.run_folder import RunFolder
from unstale.recipes.retail import retail


def config(
    runs: Path,
    name: str,
    *,
    trainers: int = 2,
    context: int = 1,
    steps: int = 4,
) -> RunConfig:
    """Return the configuration of a deterministic run with a checkpoint after every second step."""
    base = retail()
    return replace(
        base,
        runs=runs,
        name=name,
        max_steps=steps,
        minutes=0,
        deterministic=True,
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=4),
        eval=EvalConfig(tasks=0),
        checkpoint=CheckpointConfig(interval=2),
        engine=replace(base.engine, dtype="float32"),
        trainer=replace(
            base.trainer,
            dtype="float32",
            max_tokens_per_microbatch=512,
            warmup_steps=0,
            lr_schedule="constant",
        ),
        cluster=ClusterConfig(trainers=trainers, context=context),
    )


def train(made: RunConfig, console: Console | None = None) -> Path:
    """Return the folder of the run. Without a console nothing is printed."""
    return session.train(made, console=console or Console(file=StringIO())).folder


def require_complete(folder: Path, *, steps: int) -> None:
    """Check that a run lost no group of episodes, and trained on none twice."""
    trained_steps = [row["step"] for row in RunFolder(folder).metrics() if row["step"]]
    assert trained_steps == list(range(1, steps + 1))
    with Journal.read(folder) as journal:
        assert journal.unsound() == [] and check(journal) == []
        groups = [group for step in range(1, steps + 1) for group in journal.consumed(step)]
        trained = [each.episode for group in groups for each in group.trajectories]
        handed_out = {group.number for group in journal.groups()}
    assert trained and len(trained) == len(set(trained))
    assert handed_out == set(range(max(handed_out) + 1))
