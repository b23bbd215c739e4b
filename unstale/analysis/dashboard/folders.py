"""Find the run folders below a root folder. Paths outside it and links are refused."""

import os
from collections.abc import Iterator
from pathlib import Path

from unstale.config import ConfigError
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS

MAX_DEPTH = 4
"""Number of levels of folders below the root in which runs are found. The runs of a comparison are
two or three levels down.
"""

MAX_RUNS = 2000
MAX_VISITED = 20_000
"""Largest number of folders that a search for runs visits. It limits the time if there are few
runs.
"""


class UnknownRun(LookupError):
    """Error: the dashboard's folder has no run with the requested name."""


class RunFolders:
    """The run folders below the folder `root`, by name.

    The name of a run is its path from the root, with `/` between the parts. Links are never
    followed. If the given folder is itself a run, it is the only run, and its name is that of the
    folder.
    """

    def __init__(self, root: Path) -> None:
        """Prepare the search below `root`. Raises `ConfigError` if `root` is not a folder."""
        if not root.is_dir():
            problem = "it is a file" if root.exists() else "it does not exist"
            raise ConfigError(f"{root} is not a folder of runs: {problem}")
        root = root.resolve()
        self._only = root.name if _is_run(root) else ""
        self.root = root.parent if self._only else root
        self.problem = ""
        """A sentence on why the last call of `names` did not find all runs. Empty if it did."""

    def names(self) -> list[str]:
        """Search for runs, and return their names in alphabetical order.

        The search ends after `MAX_RUNS` runs or `MAX_VISITED` folders, and `problem` then says so.
        """
        if self._only:
            return [self._only]
        found: list[str] = []
        self.problem = ""
        for number, (name, path) in enumerate(_folders(self.root, "", MAX_DEPTH)):
            is_run = _is_run(path)
            if number == MAX_VISITED or (is_run and len(found) == MAX_RUNS):
                self.problem = (
                    f"{self.root} has more than {MAX_RUNS:,} runs or {MAX_VISITED:,} folders: "
                    f"only the first {len(found):,} runs are shown; "
                    "start the dashboard on a folder in it"
                )
                break
            if is_run:
                found.append(name)
        links = [path.name for path in self.root.glob("*") if path.is_symlink() and _is_run(path)]
        if links and not self.problem:
            self.problem = (
                f"{', '.join(sorted(links)[:3])} is a link, and links are not followed: start the "
                "dashboard on the run itself"
            )
        return sorted(found)

    def path(self, name: str) -> Path:
        """Return the folder of the run `name`.

        Raises `UnknownRun` if no run has this name, or if a part of the path is a link.
        """
        parts = name.split("/")
        if len(parts) > MAX_DEPTH or (self._only and name != self._only):
            raise UnknownRun(f"there is no run {name!r}")
        path = self.root
        for part in parts:
            if part in ("", ".", "..") or "\\" in part or "\0" in part:
                raise UnknownRun(f"there is no run {name!r}")
            path = path / part
            if path.is_symlink():
                raise UnknownRun(f"{name!r} is a link, and links are not followed")
        if not _is_run(path):
            raise UnknownRun(f"there is no run {name!r}")
        return path


def _is_run(path: Path) -> bool:
    return any(is_own_file(path / name) for name in (CONFIG, METRICS, EVENTS))


def is_own_file(path: Path) -> bool:
    """Return True for a regular file that is not a link."""
    try:
        return not path.is_symlink() and path.is_file()
    except (OSError, ValueError):
        return False


def _folders(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each folder at most `depth` levels below `folder`.

    A name is `prefix` and the path below `folder`. Folders inside a run folder are left out.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return
    for name in names:
        path = folder / name
        yield prefix + name, path
        if depth > 1 and not _is_run(path):
            yield from _folders(path, f"{prefix}{name}/", depth - 1)
