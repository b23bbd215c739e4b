"""The command `push-to-hub`: write a run's policy and a model card to a folder or Hugging Face's
hub.
"""

import re
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, ModelCardData

from unstale.cli.trained import POLICY, policy_folder
from unstale.config import SHIPPED_POLICIES, ConfigError
from unstale.config.checks import require_empty_folder
from unstale.config.hub import hub_errors
from unstale.durability.machine import commit, versions
from unstale.durability.run_folder import EVENTS, Row, RunFolder
from unstale.observe.held_out import held_out
from unstale.observe.run_rows import flatten, last_stop, step_of
from unstale.observe.words import number

CARD = "README.md"


def push_to_hub(
    run: Path | str, folder: Path | str | None = None, *, repo: str = "", public: bool = False
) -> str:
    """Write the policy of a run and its model card. Return the folder, or the address on the hub.

    They are written to a new or empty `folder`, to the repository `repo` (`org/name`) of the hub,
    or to both. Raises `ConfigError` for a run without a policy, a folder with files, or an error of
    the hub.
    """
    run = Path(run)
    if not folder and not repo:
        raise ConfigError("push-to-hub needs --folder, --repo, or both")
    policy = policy_folder(run)
    if policy == run or not (policy / "config.json").is_file():
        raise ConfigError(f"{run} has no {POLICY} folder: a run saves its policy when it ends")
    if folder:
        require_empty_folder(Path(folder))
    with TemporaryDirectory() as made:
        whole = Path(folder) if folder else Path(made)
        shutil.copytree(policy, whole, dirs_exist_ok=True)
        (whole / CARD).write_text(model_card(run, repo), encoding="utf-8")
        return _upload(whole, repo, private=not public) if repo else str(whole)


def _upload(folder: Path, repo: str, *, private: bool) -> str:
    api = HfApi()
    with hub_errors(f"{repo} cannot be written on the hub"):
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload the policy")
    return str(address)


def model_card(run: Path, repo: str = "") -> str:
    """Return the model card of a run's policy as Markdown, with metadata for the hub."""
    folder = RunFolder(run)
    options, log = flatten(folder.config()), list(folder.rows(EVENTS))
    rows = sorted((row for row in folder.metrics() if step_of(row) > 0), key=step_of)
    started: Row = next((row for row in reversed(log) if row.get("kind") == "started"), {})
    base = str(options.get("model", "base"))
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", base) and not Path(base).exists()
    data = ModelCardData(
        base_model=base.partition("@")[0] if is_on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "unstale"],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2] or run.resolve().name}",
        "This policy was trained with reinforcement learning by unstale.",
        _table(
            ("setting", "value"),
            {
                "base model": _base_words(base, started.get("policy_origin", {})),
                "task": options.get("task.env"),
                "steps": _steps(rows, options, log),
                "advantage": options.get("advantage.estimator"),
                "objective": options.get("objective.loss_type"),
                "old log-probabilities": options.get("old_logps.route"),
                "episodes per task": options.get("schedule.group_size"),
                "tasks per step": options.get("schedule.groups_per_step"),
                "largest allowed staleness": options.get("schedule.max_staleness"),
                "learning rate": options.get("trainer.lr"),
                "LoRA rank": options.get("trainer.lora_rank") or "none: all weights",
                "seed": options.get("seed"),
            },
        ),
        "## Figures",
        _table(("figure", "value"), _figures(rows, log)),
        "## Versions",
        f"unstale {version('unstale')}{f' at {commit()}' if commit() else ''}, {versions()}.",
    ]
    if command := started.get("command"):
        parts += ["## Command", f"```sh\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def _base_words(base: str, origin: dict[str, str]) -> str:
    """Return the name of a base model for the model card.

    `origin` describes its GGUF file, if any.
    """
    if origin:
        return "{file} (GGUF, {quantisation}, SHA-256 {sha256})".format_map(origin)
    return f"the small model of the package (`{base}`)" if base in SHIPPED_POLICIES else base


def _steps(rows: Sequence[Row], options: Row, log: Sequence[Row]) -> str:
    steps = step_of(rows[-1]) if rows else 0
    is_whole = last_stop(log).get("reason") == "finished"
    return (
        f"{steps}"
        if is_whole
        else f"{steps} of {options.get('max_steps', '?')}: the run did not finish"
    )


def _figures(rows: Sequence[Row], log: Sequence[Row]) -> dict[str, object]:
    """Return held-out success and mean reward of a run, each at its start and its end, by name."""
    figures: dict[str, object] = {}
    evaluations = held_out(event for event in log if event.get("kind") == "eval")
    for when, each in zip(("before", "after"), (*evaluations[:1], *evaluations[-1:]), strict=False):
        tasks = f" on {each.tasks} tasks" if each.tasks else ""
        share = f"{each.share} ({each.about})" if each.about else each.share
        figures[f"held-out success {when} training"] = f"{share}{tasks}, step {each.step}"
    rewards = [row for row in rows if number(row.get("reward/mean")) is not None]
    for row in (*rewards[:1], *rewards[-1:]):
        figures[f"mean reward at step {step_of(row)}"] = f"{row['reward/mean']:.3g}"
    if seconds := max((number(row.get("time_s")) or 0.0 for row in rows), default=0.0):
        figures["hours of training"] = f"{seconds / 3600:.2g}"
    return figures


def _table(head: tuple[str, str], rows: dict[str, object]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    cells = {name: str(value).replace("|", r"\|") for name, value in rows.items()}
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in cells.items()])
