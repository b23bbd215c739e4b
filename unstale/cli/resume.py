"""Read the configuration of a run to be resumed, and check the options that the user changes."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unstale.config import ConfigError, RunConfig
from unstale.config.checks import is_served
from unstale.config.given import HERE
from unstale.config.options import changed_options, stored_config
from unstale.config.tasks import find_spec
from unstale.config.techniques import chosen, outside_options
from unstale.durability.run_folder import CONFIG, RunFolder

FIXED = {
    "model": "the weights come from the checkpoint",
    "model_gguf": "the weights come from the checkpoint",
    "chat_template": "the open episodes were begun with it",
    "sft": "the weights come from the checkpoint",
    "chat_template_kwargs": "the open episodes were begun with them",
    "tools_in_prompt": "the open episodes were begun with it",
    "seed": "tasks, episodes and noise derive from it",
    "deterministic": "the two modes write different journals",
    "task": "the open episodes belong to that task set",
    "schedule.group_size": "the open groups have that many episodes",
    "selection.pool": "the statistics of tasks belong to that pool",
    "schedule.max_staleness": "the staleness bound of the queued groups was derived from it",
    "schedule.groups_per_step": "the staleness bound of the queued groups was derived from it",
    "schedule.lookahead_window": "the staleness bound of the queued groups was derived from it",
    "schedule.adaptive_window": "the staleness bound of the queued groups was derived from it",
    "schedule.resampled_groups": "the staleness bound of the queued groups was derived from it",
    "engine.max_context": "the open episodes were begun with that limit",
    "engine.max_completion_tokens": "the open replies were begun with that limit",
    "engine.temperature": "the open replies were sampled at it",
    "engine.logit_bias": "the open replies were sampled with it",
    "rollout.max_turns": "the open episodes were begun with that limit",
    "old_logps.route": "the checkpoint holds the state of that route",
    "trainer.optimizer": "the checkpoint holds the state of that optimizer",
    "trainer.weight_decay": "the checkpoint holds the state of that optimizer",
    "trainer.dtype": "the published versions have that precision",
    "trainer.lora_rank": "the checkpoint holds adapters of that rank",
    "trainer.lora_alpha": "the published versions are merged with it",
    "trainer.lora_targets": "the checkpoint holds adapters of those layers",
    "techniques": "the checkpoint holds their state",
    "audit.share": "the checkpoint holds the copies that the audit needs",
}
"""Options that must not change when a run is resumed, each with the reason. The name of a section
stands for all of its options.
"""

EFFECTS = {
    "max_steps": "the learning-rate schedule now ends there",
    "trainer.lr": "takes effect at the next step, with the optimizer's moments kept",
    "trainer.minibatches_per_batch": "the position in the learning-rate schedule moves, because it "
    "counts optimizer steps",
    "trainer.epochs_per_batch": "the position in the learning-rate schedule moves, because it "
    "counts optimizer steps",
}
"""Effects of changing an option when a run is resumed, for the message to the user.

Options with the usual effect are left out.
"""


def changes_to_run(run: Path, config: RunConfig) -> list[str]:
    """Return a sentence for each option that differs between `config` and the run in folder `run`.

    Raises `ConfigError` for an option that must not change.
    """
    named = {f"task.{name}": value for name, value in asdict(config.task).items()}
    named |= outside_options(config)
    return config_changes(load_config(run, named=named), config)


def config_changes(before: RunConfig, now: RunConfig) -> list[str]:
    """Return a sentence for each option that differs between a run's configuration and a new one.

    Raises `ConfigError` for an option that must not change when a run is resumed.
    """
    changed = []
    fixed = FIXED | {f"old_logps.{name}": why for name, why in now.old_logps.fixed.items()}
    for entry in chosen(now.techniques):
        fixed |= {f"{entry.name}.{option}": why for option, why in entry.fixed.items()}
    if "gae" in (before.advantage.estimator, now.advantage.estimator):
        for name in ("advantage.estimator", "critic.model"):
            fixed[name] = "the checkpoint holds the state of that critic, or of none"
    if now.deterministic:
        for name in ("cluster.trainers", "cluster.context"):
            fixed[name] = "sums over another number of ranks round differently"
    for name, (old, new) in changed_options(before, now).items():
        if name in ("runs", "name", "recipe"):
            continue
        if reason := fixed.get(name) or fixed.get(name.split(".")[0]):
            raise ConfigError(
                f"{name} cannot change from {_shown(old)} to {_shown(new)} in a resumed run: "
                f"{reason}"
            )
        effect = EFFECTS.get(name, "takes effect from here on")
        changed.append(f"{name} is {new}, it was {old}: {effect}")
    if changed and now.deterministic:
        changed.append("the result will differ from that of the unchanged run")
    return changed


def _shown(value: object) -> str:
    """Return the value of an option as text in one line. A chat template is shortened."""
    text = " ".join(str(value).split()) or "empty"
    return f"{text[:60]}..." if len(text) > 80 else text


def load_config(run: Path, *, named: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of the run in a folder, for a command that executes user code.

    `named` has the options in the command, by name. They must include the task set and the reward
    if these are a `module:function`, and URLs of endpoints. Otherwise a run folder from elsewhere
    could decide which code is executed, or who receives an API key. Raises `ConfigError` if one is
    missing.
    """
    config = read_config(run)
    unnamed = {name: value for name, value in _code(config) if name not in named}
    if lost := [name for name, value in unnamed.items() if HERE in value]:
        raise ConfigError(
            f"{run / CONFIG} names what a program gave in Python ({', '.join(lost)}), and this "
            "process does not have it. To resume, call unstale.resume(folder, config) with the "
            "same configuration; to evaluate, name a file or module for each"
        )
    if unnamed and named.get("task.env", config.task.env) == config.task.env:
        words = [word for name, value in unnamed.items() for word in (f"--{name}", value)]
        is_code = not all(
            is_served(value) or value.startswith("unix:") for value in unnamed.values()
        )
        what = "your own code. To run it" if is_code else "an endpoint. To use it"
        raise ConfigError(f"{run / CONFIG} names {what}, add {shlex.join(words)}")
    return config


def read_config(run: Path) -> RunConfig:
    """Return the configuration of the run in a folder, for a command that runs no user code.

    Other commands use `load_config`. Raises `ConfigError` if the folder has no run, or its
    configuration cannot be read.
    """
    folder = RunFolder(run)
    if links := sorted(path.name for path in run.iterdir() if path.is_symlink()):
        raise ConfigError(f"{run} holds links ({', '.join(links)}). Replace the links by files")
    row = folder.config()
    if folder.gaps:
        problem = "; ".join(folder.gaps)
        raise ConfigError(f"{run} cannot be resumed, evaluated or exported: {problem}")
    return replace(stored_config(row), runs=run.parent, name=run.name)


def require_named_trackers(config: RunConfig, named: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a tracker in `config` is user code that the command does not name.

    `config` comes from the run folder, and `named` has the options in the command, by name.
    """
    if ":" in config.trackers and "trackers" not in named:
        raise ConfigError(
            f"{config.runs / config.name / CONFIG} names your own code as a tracker. To run it, "
            f"add --trackers {shlex.quote(config.trackers)}; or give other trackers"
        )


def require_own_folder(config: RunConfig, named: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the command names another recipe or folder than those of the resumed
    run.

    `config` comes from the run folder, and `named` has the options in the command, by name.
    """
    if named.get("recipe", config.recipe) != config.recipe:
        raise ConfigError(
            f"a run resumes with its own recipe, {config.recipe}: leave out the recipe "
            f"{named['recipe']} or --resume"
        )
    folder = config.runs / config.name
    stored = RunFolder(folder).config()  # it may be the file of `--config`
    if "name" in named and named["name"] not in (config.name, stored.get("name")):
        raise ConfigError(
            f"--resume continues the run in its folder {folder}: leave out name, or take it out of "
            f"the file of options; got {named['name']}"
        )
    is_moved = "runs" in named and str(named["runs"]) != stored.get("runs")
    if is_moved and Path(named["runs"]).resolve() != config.runs.resolve():
        raise ConfigError(
            f"--resume continues the run in its folder {folder}: leave out runs, or take it out of "
            f"the file of options; got {named['runs']}"
        )


def resume_command(run: Path) -> str:
    """Return the shell command that resumes the run in a folder.

    It names user code, as `load_config` and `require_named_trackers` demand. For a run with Python
    objects as options, it is a call in Python. If the configuration cannot be read, the command
    names no user code.
    """
    words = ["unstale", "train", "--resume", str(run)]
    try:
        config = stored_config(RunFolder(run).config())
    except ConfigError:
        return shlex.join(words)
    if any(HERE in value for _, value in _code(config)):
        return f"unstale.resume({str(run)!r}, config) in Python, with the same config"
    for name, value in _code(config):
        words += [f"--{name}", value]
    if ":" in config.trackers:
        words += ["--trackers", config.trackers]
    return shlex.join(words)


def _code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the options of tasks and techniques that name code outside of this package, with their
    values.

    URLs of endpoints are included, because endpoints receive the user's API key.
    """
    task = config.task
    if find_spec(task.env) is None or HERE in task.env:
        yield "task.env", task.env
    reward = getattr(task, "reward", "")
    if reward and not reward.startswith("unstale."):
        yield "task.reward", reward
    for name in ("user", "judge"):
        if url := getattr(task, name, ""):
            yield f"task.{name}", url
    yield from outside_options(config).items()


def require_same_task(run: Path, config: RunConfig, *, named: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `config` has other options of the task than the run in a folder.

    The options in `named`, which the command gives, may differ.
    """
    stored = asdict(stored_config(RunFolder(run).config()).task)
    now = asdict(config.task)
    different = [
        name
        for name in stored.keys() | now.keys()
        if stored.get(name) != now.get(name) and not {f"task.{name}", "task.env"} & named.keys()
    ]
    if different:
        name = "env" if "env" in different else min(different)
        raise ConfigError(
            f"{run} was trained with task.{name} {stored.get(name)}, and {config.recipe} has "
            f"{now.get(name)}. Leave out the recipe, or add --task.{name} {now.get(name)}"
        )
