"""Folders of finished runs, for tests of comparisons and studies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.fake_run import FakeClock, fake_config
from unstale.config import EvalConfig
from unstale.durability.run_folder import RunLog, dumps


def trial(
    folder: Path,
    *,
    seed: int,
    evaluations: Sequence[float],
    step_s: float = 60.0,
    **recorded: float,
) -> None:
    """Write a finished run that was evaluated before the first step and after every step.

    Each step takes `step_s` seconds. `recorded` may have `tokens`, the sampled tokens of a step
    (default 50), and `kept`, the share of kept tokens (default 0.9).
    """
    clock = FakeClock()
    config = replace(
        fake_config(steps=len(evaluations) - 1, seed=seed), eval=EvalConfig(interval=1)
    )
    with RunLog.create(folder, config, clock=clock) as log:
        clock.now = 100.0  # the engine starts
        for step, success in enumerate(evaluations):
            if step:
                clock.now += step_s
            with log.span("eval"):
                clock.now += 30.0
            more = {
                "rollout/success_rate": success,
                "correction/kept_share": recorded.get("kept", 0.9),
                "rollout/sampled_tokens": recorded.get("tokens", 50.0),
            }
            log.write(step, {"eval/success_rate": success, **(more if step else {})})
        log.event("stopped", reason="finished")


def comparison(folder: Path, arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the folder of a comparison: for each arm and seed, a run with the
    arguments of `trial`.
    """
    runs = []
    for arm, trials in arms.items():
        for seed, found in enumerate(trials):
            runs.append({"arm": arm, "seed": seed, "folder": f"{arm}-seed{seed}"})
            trial(folder / f"{arm}-seed{seed}", seed=seed, **found)
    launched(folder)
    plan = {"runs": runs, "reference": "snapshot_old", "warnings": {}, "commands": []}
    (folder / "plan.json").write_text(dumps(plan))


def study_plan(
    folder: Path,
    settings: Mapping[str, Mapping[str, str]],
    *,
    planned: Sequence[tuple[str, str]] = (),
    commands: Sequence[str] = (),
) -> None:
    """Write the plan of a study: the positions of each setting's dials, and its differences."""
    plan = {"settings": settings, "planned": planned, "at": ["steps"], "commands": commands}
    (folder / "plan.json").write_text(dumps(plan))


def launched(folder: Path, *, jobs: int = 1, **facts: Any) -> None:
    """Record that every run of the folder was started while `jobs - 1` others were running."""
    with (folder / "launches.jsonl").open("a") as file:
        for run in sorted(path.name for path in folder.iterdir() if path.is_dir()):
            file.write(
                dumps({"kind": "began", "run": run, "jobs": jobs, "commit": "abc1234", **facts})
                + "\n"
            )
