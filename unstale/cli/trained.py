"""Find the policy and the configuration of a run folder or model folder. Imports no torch."""

import argparse
import shlex
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from unstale.cli.recipe_options import configure, file_values, fit_context
from unstale.cli.resume import load_config, require_same_task, resume_command
from unstale.config import SHIPPED_POLICIES, ConfigError, RunConfig
from unstale.config.gguf import gguf_file
from unstale.config.hub import is_hub_name, model_folder, require_model
from unstale.config.options import override
from unstale.durability.journal import JOURNAL
from unstale.durability.run_folder import EVENTS

POLICY = "policy"
"""Name of the folder in a run folder that has the trained model."""


def policy_folder(trained: Path) -> Path:
    """Return the model folder of a run's policy. If `trained` is not a run folder, return it
    unchanged.

    Raises `ConfigError` for a run without a trained policy.
    """
    if (trained / POLICY).is_dir():
        return trained / POLICY
    if any((trained / name).exists() for name in (EVENTS, JOURNAL)):
        raise ConfigError(
            f"{trained} has no trained policy: a run saves it at its end, and this one is in "
            "progress, was killed or failed. Wait for its end if it is in progress, otherwise "
            f"resume it with {resume_command(trained)}. The policy of a checkpoint is written by "
            f"{shlex.join(['unstale', 'export', str(trained)])} FOLDER"
        )
    return trained


def _require_model(folder: Path, *, download: bool, gguf: str) -> None:
    """Raise `ConfigError` unless `folder` is a model folder, a GGUF file or the name of a known
    model.

    `gguf` is the name of a GGUF file in the folder, or empty. With `download`, a model of the hub
    need not be in the local cache. Nothing is downloaded here.
    """
    if str(folder) in SHIPPED_POLICIES or (folder / "config.json").is_file():
        return
    if gguf_file(str(folder), gguf):
        return
    if is_hub_name(str(folder)):
        try:
            if not download:
                model_folder(str(folder), download=False)
        except ConfigError as error:
            problem = str(error).removeprefix("policy: ")
            raise ConfigError(
                f"{folder} is neither a run folder nor a model folder: it does not exist here. If "
                f"it names a model of the hub: {problem}"
            ) from error
        return
    problem = "it does not exist"
    if folder.exists():
        problem = "it has no config.json" if folder.is_dir() else "it is a file"
    raise ConfigError(f"{folder} is neither a run folder nor a model folder: {problem}")


def fetch_policy(config: RunConfig, named: Container[str]) -> RunConfig:
    """Download or convert the policy if needed. Return the configuration with `fit_context`
    applied.

    `named` has the options in the command. Raises `ConfigError` if there is no such model.
    """
    require_model(config.pretrained_folder)
    return fit_context(config, named)


def configure_trained(chosen: argparse.Namespace) -> RunConfig:
    """Return the configuration with which the policy of a run or model folder is evaluated or
    served.

    Raises `ConfigError` for a model folder without a recipe, or if the recipe's task is not that of
    the run.
    """
    values = file_values(chosen)
    if policy_folder(chosen.trained) == chosen.trained:
        if chosen.recipe is None and "recipe" not in values:
            _require_model(
                chosen.trained,
                download=bool(values.get("model_download")),
                gguf=values.get("model_gguf", ""),
            )
            raise ConfigError(
                f"{chosen.trained} is a model, so the task is not known: name a recipe, as "
                f"in `unstale {chosen.verb} {chosen.trained} retail`"
            )
        chosen.values["model"] = str(chosen.trained)
        config = configure(chosen)
        _require_model(chosen.trained, download=config.model_download, gguf=config.model_gguf)
        return fetch_policy(config, file_values(chosen))
    if chosen.recipe is None and "recipe" not in values:
        stored = load_config(chosen.trained, named=values)
        # the run has saved its policy as an ordinary folder with its template
        return override(replace(stored, model_gguf="", chat_template=""), values)
    config = configure(chosen)
    require_same_task(chosen.trained, config, named=chosen.values)
    return config
