"""The command `push-to-hub`: export the policy of a run with a model card, also to the hub."""

import re
import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, ModelCardData

from unstale.cli.trained import POLICY, policy_folder
from unstale.config import SHIPPED_POLICIES, ConfigError
from unstale.config.checks import require_empty_folder
from unstale.config.hub import hub_errors
from unstale.durability.machine import commit, versions
from unstale.observe.report.gather import Gathered, gather

CARD = "README.md"


def push_to_hub(
    run: Path | str, folder: Path | str | None = None, *, repo: str = "", public: bool = False
) -> str:
    """Export a run's policy and its model card. Return the folder, or the address on the hub.

    The model is written to a new or empty `folder`, to the repository `repo` (`org/name`) of the
    Hugging Face hub, or to both. Raises `ConfigError` for a run without a policy, a folder with
    files, or an error of the hub.
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
    """Return the model card of a run's policy, with metadata for the Hugging Face hub."""
    gathered = gather(run)
    base = str(gathered.setting("policy", "base"))
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", base) and not Path(base).exists()
    data = ModelCardData(
        base_model=base.partition("@")[0] if is_on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "unstale"],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2] or gathered.name}",
        "This policy was trained with reinforcement learning by unstale.",
        _table(
            ("setting", "value"),
            {
                "base model": _base_words(base, gathered.started.get("policy_origin", {})),
                "task": gathered.setting("task.env"),
                "steps": _steps(gathered),
                "advantage": gathered.setting("advantage.estimator"),
                "objective": gathered.setting("objective.kind"),
                "old log-probabilities": gathered.route,
                "episodes per task": gathered.setting("schedule.group_size"),
                "tasks per step": gathered.setting("schedule.groups_per_step"),
                "largest allowed staleness": gathered.setting("schedule.max_staleness"),
                "learning rate": gathered.setting("trainer.lr"),
                "LoRA rank": gathered.setting("trainer.lora_rank") or "none: all weights",
                "seed": gathered.setting("seed"),
            },
        ),
        "## Figures",
        _table(("figure", "value"), _figures(gathered)),
        "## Versions",
        f"unstale {version('unstale')}{f' at {commit()}' if commit() else ''}, {versions()}.",
    ]
    if command := gathered.started.get("command"):
        parts += ["## Command", f"```sh\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def _base_words(base: str, origin: dict[str, str]) -> str:
    """Return the name of a base model. `origin` describes its GGUF file, if it came from one."""
    if origin:
        return "{file} (GGUF, {quantisation}, SHA-256 {sha256})".format_map(origin)
    return f"the small model of the package (`{base}`)" if base in SHIPPED_POLICIES else base


def _steps(run: Gathered) -> str:
    is_whole = run.stopped.get("reason") == "finished"
    return f"{run.steps}" if is_whole else f"{run.steps} of {run.planned}: the run did not finish"


def _figures(run: Gathered) -> dict[str, object]:
    """Return held-out success and mean reward, at the start and at the end of the run."""
    figures: dict[str, object] = {}
    if run.evaluations:
        for when, each in (("before", run.evaluations[0]), ("after", run.evaluations[-1])):
            tasks = f" on {each.tasks} tasks" if each.tasks else ""
            share = f"{each.share} ({each.about})" if each.about else each.share
            figures[f"held-out success {when} training"] = f"{share}{tasks}, step {each.step}"
    if rewards := run.series("reward/mean"):
        figures[f"mean reward at step {rewards[0][0]}"] = f"{rewards[0][1]:.3g}"
        figures[f"mean reward at step {rewards[-1][0]}"] = f"{rewards[-1][1]:.3g}"
    if run.seconds:
        figures["hours of training"] = f"{run.seconds / 3600:.2g}"
    return figures


def _table(head: tuple[str, str], rows: dict[str, object]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    cells = {name: str(value).replace("|", r"\|") for name, value in rows.items()}
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in cells.items()])
