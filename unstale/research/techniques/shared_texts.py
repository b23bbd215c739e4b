"""A directory in which runs share texts about their tasks."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from unstale.config.checks import ConfigError

KEPT = 8
"""Number of texts that a run keeps in the folder for each task. A newer one replaces an older."""
MOST_CHARACTERS = 200_000
"""Largest number of characters of a text that is read from the folder."""


def check_node(technique: str, folder: str, node: str) -> None:
    """Raise `ConfigError` unless both a folder and a run's name there are given, or neither."""
    is_name = node.replace("-", "a").isalnum()
    if bool(folder) != bool(node) or (node and not is_name):
        raise ConfigError(
            f"{technique}.folder and {technique}.node are given together, and {technique}.node has "
            f"letters, digits and - only, got {folder!r} and {node!r}"
        )


class SharedTexts:
    """The texts of several runs by task. Each run writes its own, and reads those of the others."""

    def __init__(self, folder: str, node: str) -> None:
        """Share texts in `folder` as the run `node`. An empty folder has none."""
        self._folder, self._node = folder, node
        self.lost = 0
        """Number of times that the folder could not be used."""

    def exchange(self, task: str, own: Mapping[int, str]) -> list[str]:
        """Write this run's texts about a task, by episode. Return the texts of other runs, each
        once.

        Files that are no texts are skipped. Without a usable folder there are none.
        """
        texts = {str(episode % KEPT): {"text": text} for episode, text in own.items()}
        if not self._folder or not self.write(task, texts):
            return []
        found: dict[str, None] = {}
        for run, _, message in self.read(task):
            text = message.get("text")
            if run != self._node and isinstance(text, str) and 0 < len(text) <= MOST_CHARACTERS:
                found[text] = None
        return list(found)

    def write(self, task: str, messages: Mapping[str, Mapping[str, Any]]) -> bool:
        """Write this run's messages about a task, by name. They replace earlier ones. Return False
        if writing fails.
        """
        place = self._place(task)
        try:
            place.mkdir(parents=True, exist_ok=True)
            for name, message in messages.items():
                path = place / f"{self._node}.{name}.json"
                part = path.with_suffix(".part")
                part.write_text(json.dumps({"task": task, **message}), encoding="utf-8")
                part.replace(path)
        except OSError:
            self.lost += 1
            return False
        return True

    def read(self, task: str) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Return all messages about a task, those of this run included: run, name and message.

        Files that are no messages are skipped.
        """
        found: list[tuple[str, str, Mapping[str, Any]]] = []
        try:
            for path in sorted(self._place(task).glob("*.json")):
                try:
                    message = json.loads(path.read_text(encoding="utf-8"))
                except ValueError:
                    continue
                if isinstance(message, dict) and message.get("task") == task:
                    run, _, name = path.stem.partition(".")
                    found.append((run, name, message))
        except OSError:
            self.lost += 1
        return found

    def _place(self, task: str) -> Path:
        return Path(self._folder) / blake2b(task.encode(), digest_size=8).hexdigest()
