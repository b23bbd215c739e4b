"""A directory in which runs share texts about their tasks."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from unstale.config.checks import ConfigError

KEPT = 8
"""Number of texts that a run keeps in the folder for each task. A newer one replaces an older."""
MOST_CHARACTERS = 20_000
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
        """Write this run's texts about a task, by episode. Return the different ones of others.

        Files that are no texts are skipped. Without a usable folder there are none.
        """
        if not self._folder:
            return []
        place = Path(self._folder) / blake2b(task.encode(), digest_size=8).hexdigest()
        try:
            place.mkdir(parents=True, exist_ok=True)
            for episode, text in own.items():
                path = place / f"{self._node}.{episode % KEPT}.json"
                part = path.with_suffix(".part")
                part.write_text(json.dumps({"task": task, "text": text}), encoding="utf-8")
                part.replace(path)
            return self._others(place, task)
        except OSError:
            self.lost += 1
            return []

    def _others(self, place: Path, task: str) -> list[str]:
        found: dict[str, None] = {}
        for path in sorted(place.glob("*.json")):
            if path.name.partition(".")[0] == self._node:
                continue
            try:
                message = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                continue
            match message:
                case {"task": str(of), "text": str(text)} if of == task:
                    if 0 < len(text) <= MOST_CHARACTERS:
                        found[text] = None
        return list(found)
