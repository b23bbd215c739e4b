"""The options of a run on the command line: `--section.option value`, or a file of options."""

import argparse
import inspect
import re
import shutil
import sys
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

from unstale.config import ConfigError, RunConfig
from unstale.config.files import read_mapping
from unstale.config.names import RENAMED
from unstale.config.options import (
    Option,
    field_docs,
    former_name,
    merged,
    option_hint,
    options,
    override,
    read_file,
    reset_unread,
    section_of,
    sections,
)
from unstale.durability.console import Console
from unstale.durability.run_folder import CONFIG, dumps
from unstale.lint.policy_files import local_folder, positions
from unstale.recipes import make_recipe, recipe_names

SHORT = {"reward": "task.reward"}
"""Short names of options on the command line, each with the full name of the option."""
_COMMON = """
model model_download chat_template tools_in_prompt
runs name seed max_steps minutes trackers techniques
task.env task.isolate task.reward task.prompt_column task.system task.held_out_file
rollout.max_turns rollout.timeout_s
engine.backend engine.urls engine.max_running engine.max_context engine.temperature
engine.max_completion_tokens
schedule.max_staleness schedule.groups_per_step schedule.group_size
advantage.estimator old_logps.route correction.mode correction.low correction.high
objective.loss_type objective.clip_low objective.clip_high objective.kl_coef
trainer.dtype trainer.lr trainer.lora_rank trainer.max_tokens_per_microbatch
trainer.gradient_checkpointing checkpoint.interval eval.tasks eval.interval
"""
COMMON = frozenset(_COMMON.split())
"""The options that most users need. `--help` shows only these, `--help all` shows every option."""
MANY = 50
"""If a command has more arguments than this, it accepts all options of a run."""
_OWN_RECIPE = re.compile(r"[\w.]+:\w+")
FILES = (".toml", ".json")
"""Endings of the names of option files, which may be given in place of a recipe."""


def option_names() -> list[str]:
    """Return the names of the options of a run that a command line may set, including short
    names.
    """
    return [*SHORT, *(name for name in options() if name != "recipe")]


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the words of a command into those that are no options, and the values of options by
    name.

    A boolean option without a value is true. A value may begin with `--` if it is a text of several
    words. Raises `ConfigError` for a missing or wrong value.

    >>> split_options(["train", "retail", "--trainer.lr=1e-5", "--max_steps", "3"])
    (['train', 'retail'], {'trainer.lr': 1e-05, 'max_steps': 3})
    >>> split_options(["--engine.args", "--max-num-seqs 8", "--max_steps", "3"])
    ([], {'engine.args': '--max-num-seqs 8', 'max_steps': 3})
    """
    rest: list[str] = []
    values: dict[str, Any] = {}
    known = option_names()
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        name, has_value, text = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in known:
            rest.append(word)
            continue
        option = options()[SHORT.get(name, name)]
        if not has_value:
            lacks_value = not remaining or _is_option(remaining[0])
            if lacks_value and bool not in option.kinds:
                raise ConfigError(f"--{name} needs a value. One that begins with -- follows a =")
            text = "true" if lacks_value else remaining.popleft()
        values[option.name] = option.parse(text)
    return rest, values


def _is_option(word: str) -> bool:
    """Return True if a word of a command is the name of an option. Such a name has no spaces."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def refuse_unknown(words: Sequence[str], known: Sequence[str] = ()) -> NoReturn:
    """Raise `ConfigError` about unknown words of a command, and name similar ones in `known`."""
    if not (wrong := [word for word in words if word.startswith("-")]):
        raise ConfigError(f"{words[0]!r} is not expected here: options begin with --")
    known = known or [f"--{each}" for each in option_names()]
    raise ConfigError(" ".join(dict.fromkeys(_unknown(word, known) for word in wrong)))


def _unknown(word: str, known: Sequence[str]) -> str:
    """Return an error message about an unknown option, with its new name or with similar names."""
    name = word.partition("=")[0]
    if former := former_name(name.removeprefix("--").replace("-", "_")):
        return f"command line: {former} is now {RENAMED[former]}."
    hint = option_hint(name, known)
    if not hint:
        hint = "; --help lists the arguments"
        if len(known) > MANY:
            hint += ", and docs/other-trainers.md has the names of other trainers"
    return f"unknown argument {word}{hint}" + "." * (not hint.endswith("?"))


def take_file(chosen: argparse.Namespace) -> None:
    """If the argument `recipe` is a file of options, make it the argument `config` instead.

    Raises `ConfigError` if `--config` is given, too.
    """
    if not (chosen.recipe or "").endswith(FILES):
        return
    if chosen.config is not None:
        raise ConfigError(f"give one file of options, {chosen.recipe} or --config {chosen.config}")
    chosen.config, chosen.recipe = Path(chosen.recipe), None


def is_study(path: Path | None) -> bool:
    """Return True if a TOML file describes a study for `unstale compare`, by its table `study`."""
    if path is None or path.suffix != ".toml":
        return False
    try:
        return "study" in read_mapping(path)
    except ConfigError:
        return False  # the reader of option files has the message


def file_values(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the options in the option file and on the command line, by name. The latter win."""
    from_file = read_file(chosen.config) if chosen.config else {}
    if chosen.config and chosen.config.name == CONFIG and "recipe" in from_file:
        from_file = reset_unread(from_file)  # the file of a run has every option
    return merged(from_file, chosen.values)


def configure(chosen: argparse.Namespace) -> RunConfig:
    """Return the configuration of the recipe, with the options of the file and of the command
    line.
    """
    if is_study(chosen.config):
        raise ConfigError(
            f"{chosen.config} is a study: run it with unstale compare {chosen.config}"
        )
    return configure_recipe(chosen.recipe, file_values(chosen))


def configure_recipe(recipe: str | None, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a recipe, with other values for some options.

    `values` has these values by name. Without `recipe`, it also names the recipe. If it has all
    options, as a run's `config.json` does, the recipe is not called. Raises `ConfigError` if no
    recipe is named.
    """
    name = recipe or values.get("recipe")
    if name is None:
        known = ", ".join(recipe_names())
        raise ConfigError(f"no recipe is given; there are: {known}, MODULE:FUNCTION")
    values = {**values, "recipe": name}
    if recipe is None:
        config = override(RunConfig(recipe=name), values)
        if all(option.name in values for option in options().values() if option.is_in(config)):
            return config
    return fit_context(override(make_recipe(name), values), values)


def fit_context(config: RunConfig, named: Container[str]) -> RunConfig:
    """Return the configuration with `engine.max_context` lowered to the policy's longest context.

    It stays unchanged if that is not known, or if `engine.max_context` is in `named`, the options
    of the command and its file. The linter then refuses a context that is too long.
    """
    folder = local_folder(config)
    number = positions(folder)
    too_long = number is not None and config.engine.max_context > number
    if not number or not too_long or "engine.max_context" in named:
        return config
    _note(
        f"note: engine.max_context is {number} instead of {config.engine.max_context}, because the "
        f"policy in {folder} has no more positions"
    )
    return replace(config, engine=replace(config.engine, max_context=number))


@cache
def _note(text: str) -> None:
    """Print a note on standard error. A process prints the same note only once."""
    sys.stderr.write(f"{text}\n")


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output. NaN and infinity become null."""
    Console(soft_wrap=True).print_json(dumps(value))


def options_help(words: Sequence[str], values: dict[str, Any], whose: str = "a recipe") -> str:
    """Return the help of the options that a recipe uses, by section, with their present values.

    `words` are the words of the command, which may name a recipe or a file of options. Otherwise
    the heading has `whose`. If `words` has "all", every option is described, otherwise only common
    ones and those that the value of another option makes used.
    """
    plain = RunConfig(recipe="")
    known = recipe_names()
    named = next((word for word in words if word in known or _OWN_RECIPE.fullmatch(word)), None)
    file = next((Path(word.rpartition("=")[2]) for word in words if word.endswith(FILES)), None)
    values = merged(read_file(file), values) if file and not is_study(file) else values
    recipe = named or values.get("recipe")
    config = make_recipe(recipe) if recipe else RunConfig(recipe="")
    config = override(config, values)
    lines = [f"options of {file or recipe or whose}:"]
    num_hidden = num_left_out = 0
    for section, cls in sections().items():
        current = section_of(config, section)
        own = [each for each in options().values() if each.section == section]
        if current is None:  # a technique that is not chosen
            num_hidden += len(own)
            continue
        used = [each for each in own if each.name != "recipe" and current.applies(each.field)]
        num_hidden += len(own) - len(used)
        usual = section_of(plain, section)
        described = [
            each
            for each in used
            if "all" in words
            or each.name in COMMON
            or usual is None
            or each.owner is not cls
            or not usual.applies(each.field)
        ]
        num_left_out += len(used) - len(described)
        about = (inspect.getdoc(cls) or "").partition("\n")[0]
        if described:
            lines += ["", _fill(f"{section or 'run'}: {about}", 0, 2)]
        for option in described:
            lines += _option_help(option, config)
    if num_left_out:
        lines += ["", f"--help all describes {num_left_out} more options of this run."]
    lines += ["", f"{num_hidden} more options appear once an option that reads them is chosen,"]
    lines += ["as in: --old_logps.route ppo_ewma_async --help all"]
    return "\n".join(lines)


def _fill(text: str, indent: int, hanging: int) -> str:
    width = min(98, max(40, shutil.get_terminal_size().columns))
    return fill(
        text,
        width=width,
        initial_indent=" " * indent,
        subsequent_indent=" " * hanging,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _option_help(option: Option, config: RunConfig) -> list[str]:
    text = field_docs(option.owner)[option.field]
    value = str(option.of(config)) or "empty"
    about = _fill(f"{text} Now: {value}", 6, 6)
    names = [option.name, *(short for short, name in SHORT.items() if name == option.name)]
    values = option.values if len(option.values) < 50 else option.values.replace("|", " | ")
    return [_fill(f"{', '.join(f'--{name}' for name in names)} {values}", 2, 10), about]
