"""Read a growing JSON-lines file in parts, each from where the last part ended."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from unstale.analysis.dashboard.folders import is_own_file
from unstale.durability.run_folder import Row

MAX_READ_BYTES = 4 << 20
"""Number of bytes read in one call, to limit the memory. A longer line is skipped and reported."""


@dataclass(slots=True)
class Tail:
    """A JSON-lines file, and the position in it from which `read` continues.

    When a run resumes, it replaces its files. `read` then begins at the start of the new file.
    """

    path: Path
    inode: int = 0
    offset: int = 0
    problem: str = ""
    """A sentence on what could not be read of the file. Empty if everything was read."""

    def read(self) -> tuple[list[Row], bool]:
        """Return the next rows, and True if all earlier rows are obsolete.

        Earlier rows are obsolete if the file was replaced, shortened or removed. The first call
        returns True, too. An incomplete last line is left for the next call. If the file cannot be
        opened, `problem` has the reason.
        """
        try:
            return self._read()
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror or error}"
            return [], False

    def _read(self) -> tuple[list[Row], bool]:
        if not is_own_file(self.path):
            gone = self.offset > 0
            self.inode = self.offset = 0
            if self.path.is_symlink():
                self.problem = f"{self.path.name} is a link, and links are not followed"
            return [], gone
        status = os.lstat(self.path)
        if status.st_ino == self.inode and status.st_size == self.offset:
            return [], False
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            is_new = status.st_ino != self.inode or status.st_size < self.offset
            if is_new:
                self.inode, self.offset, self.problem = status.st_ino, 0, ""
            file.seek(self.offset)
            data = file.read(MAX_READ_BYTES)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == MAX_READ_BYTES:
            self.problem = f"{self.path.name} has a line of more than {MAX_READ_BYTES >> 20} MiB"
            end = len(data)
        self.offset += end
        return [row for line in data[:end].splitlines() if (row := self._parse(line))], is_new

    def _parse(self, line: bytes) -> Row | None:
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            return row
        self.problem = f"{self.path.name} has lines that are not JSON objects; they were left out"
        return None
