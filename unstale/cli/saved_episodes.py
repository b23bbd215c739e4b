"""The file of `eval --save`: finished episodes of an evaluation, one JSON line each.

An evaluation that is repeated with the same file does not run these episodes again. The first line
describes the policy and the options that all episodes of the file share.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import IO, Any

from unstale.config import ConfigError, RunConfig
from unstale.config.options import options
from unstale.durability.run_folder import plain
from unstale.records import Trajectory
from unstale.rollout.evaluation import FIGURES, Attempt, FinishedEpisodes

SHARED = (
    "seed",
    "chat_template",
    "chat_template_kwargs",
    "tools_in_prompt",
    "rollout.max_turns",
    "engine.backend",
    "engine.dtype",
    "engine.quantise",
    "engine.max_context",
    "engine.temperature",
    "engine.top_p",
    "engine.top_k",
    "engine.min_p",
    "engine.logit_bias",
    "eval.temperature",
    "eval.top_p",
    "eval.top_k",
    "eval.min_p",
    "engine.max_completion_tokens",
)
"""Options outside the section `task` that must be the same for all episodes of a file."""
NO_CHANGE = (
    "task.isolate",
    "task.workers",
    "task.worker_memory_gb",
    "task.judge_tokens",
    "task.latency_s",
    "task.latency_sigma",
)
"""Options of the section `task` that do not change its episodes, such as the number of
processes.
"""
POLICY_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of the files in a model folder that decide about its episodes: weights, configuration,
tokenizer and chat template.
"""


class SavedEpisodes(FinishedEpisodes):
    """The finished episodes of an evaluation, which are also in a file."""

    def __init__(self, file: IO[str], earlier: FinishedEpisodes) -> None:
        super().__init__()
        self.successes |= earlier.successes
        self.figures |= earlier.figures
        self._file = file

    def add(self, attempt: Attempt, episode: Trajectory) -> None:
        """Record a finished episode. The method returns when the episode is on disk.

        `attempt` is the task and the number of the attempt at this task.
        """
        super().add(attempt, episode)
        task, number = attempt
        row = {"task": task, "attempt": number, "success": episode.success}
        row |= self.figures[attempt]
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def describe_evaluation(config: RunConfig) -> dict[str, Any]:
    """Return what all episodes of an evaluation share: options, and checksums of the policy and the
    data.
    """
    shared = {
        name: plain(option.of(config))
        for name, option in options().items()
        if name in SHARED or (option.section == "task" and name not in NO_CHANGE)
        if option.is_in(config)
    }
    folder = config.policy_folder
    described = {
        "policy": _checksum(path for kind in POLICY_FILES for path in folder.glob(kind)),
        **shared,
    }
    data = Path(config.task.env.partition(":")[2])
    if data.is_file():
        described["task data"] = _checksum([data])
    held_out = Path(getattr(config.task, "held_out_file", ""))
    if held_out.is_file():
        described["held-out data"] = _checksum([held_out])
    skills = Path(getattr(config.task, "skills", ""))
    if skills.is_file():
        described["skills"] = _checksum([skills])
    return described


@contextmanager
def open_saved(path: Path, config: RunConfig, **more: str | int) -> Iterator[SavedEpisodes]:
    """Open or create the file of saved episodes for an evaluation. Return a context with its
    episodes.

    `more` is further data that all episodes share. An incomplete last line is removed, as a killed
    command may leave one. Raises `ConfigError` if the file cannot be used or belongs to another
    evaluation. The file is then unchanged.
    """
    described = json.loads(json.dumps(describe_evaluation(config) | more))
    sections = ("task", "engine", "eval")
    defaults = {
        f"{section}.{option.name}": option.default
        for section in sections
        for option in fields(getattr(config, section))
        if f"{section}.{option.name}" in described and option.default is not MISSING
    }
    try:
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.split(b"\n")[:-1]
        earlier = _read(path, lines, described, defaults) if content else FinishedEpisodes()
        if whole != content:
            os.truncate(path, len(whole))
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path} cannot be used: {error.strerror or error}") from error
    with file:
        if not content:
            file.write(json.dumps(described) + "\n")
        yield SavedEpisodes(file, earlier)


def _read(
    path: Path, lines: list[bytes], described: Mapping[str, Any], defaults: Mapping[str, Any]
) -> FinishedEpisodes:
    """Return the finished episodes in the lines of a file.

    The first line must have the content `described`. Options that it lacks are taken from
    `defaults`. Raises `ConfigError` if it differs.
    """
    try:
        if not lines:
            raise ValueError("its first line is not complete")
        rows = [json.loads(line) for line in lines]
        stored = rows[0]
        earlier = FinishedEpisodes()
        for row in rows[1:]:
            attempt = (row["task"], row["attempt"])
            earlier.successes[attempt] = bool(row["success"])
            # An earlier version of the package wrote fewer figures.
            known = {name: float(row[name]) for name in FIGURES if name in row}
            earlier.figures[attempt] = known
        # An earlier version of the package lacked some options. They had their defaults.
        stored |= {name: value for name, value in defaults.items() if name not in stored}
        names = [
            name for name in {**stored, **described} if stored.get(name) != described.get(name)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--save {path} is not a file of `unstale eval --save` "
            f"({type(error).__name__}: {error}); name a new file"
        ) from None
    if names:
        old, new = stored.get(names[0]), described.get(names[0])
        raise ConfigError(
            f"--save {path} has episodes with {names[0]} {old}, and this command has {new}; "
            "name a new file, or repeat the earlier command"
        )
    return earlier


def _checksum(paths: Iterable[Path]) -> str:
    """Return a SHA-256 checksum over the names and the contents of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
