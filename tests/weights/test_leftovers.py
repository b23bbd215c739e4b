"""Temporary folders of killed processes are removed, and those of running ones are kept."""

import os
import time
from pathlib import Path

from unstale.weights.leftovers import hold_lock, remove_leftovers


def test_a_folder_is_removed_once_nobody_holds_its_lock(tmp_path: Path) -> None:
    folder = tmp_path / "unstale-a"
    folder.mkdir()
    with hold_lock(folder):
        remove_leftovers(tmp_path, "unstale-")
        assert folder.exists()
    remove_leftovers(tmp_path, "other-")
    assert folder.exists()
    remove_leftovers(tmp_path, "unstale-")
    assert not folder.exists()


def test_a_folder_without_a_lock_is_kept_for_an_hour(tmp_path: Path) -> None:
    """Its process may be about to lock it, or was killed before it could."""
    (new, old) = (tmp_path / "unstale-new", tmp_path / "unstale-old")
    for folder in (new, old):
        folder.mkdir()
        (folder / "lock.new").touch()
    os.utime(old, (time.time() - 3700,) * 2)
    remove_leftovers(tmp_path, "unstale-")
    assert new.exists() and not old.exists()
