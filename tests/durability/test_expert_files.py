"""Test the files with routed experts: what is written is read, and damage is a missing record."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.waits import LIMIT_S
from unstale.durability.journal import JOURNAL, Journal, JournalError, writer
from unstale.durability.journal.expert_files import ROUTED_EXPERTS, ExpertFiles
from unstale.records import GroupRequest, Sampled, Task
from unstale.routed_experts import RoutedExperts

TASK = Task("retail", "train", 17)


def piece(first: int, *, version: int = 0, experts: int = 8, token: int = 5) -> Sampled:
    """Return four tokens with the experts of rows `first` to `first + 3`."""
    rows = (np.arange(24) + first).reshape(4, 3, 2) % experts
    routed_experts = RoutedExperts(first, rows.astype(np.uint8 if experts < 255 else np.int16))
    return Sampled((token,) * 4, (-1.0,) * 4, version, routed_experts=routed_experts)


def written(folder: Path, *pieces: Sampled) -> ExpertFiles:
    """Write pieces at positions 0, 2, 4, ... of episode 7 in group 3."""
    files = ExpertFiles(folder / "routes")
    for number, each in enumerate(pieces):
        files.write(3, 7, 2 * number, each)
    files.close()
    return ExpertFiles(folder / "routes")


def found(files: ExpertFiles, position: int, each: Sampled) -> RoutedExperts | None:
    return files.find(files.read(3), 7, position, each)


@pytest.mark.parametrize("experts", [8, 500])
def test_what_is_written_is_read(tmp_path: Path, experts: int) -> None:
    pieces = [piece(0, experts=experts), piece(9, version=1, experts=experts)]
    files = written(tmp_path, *pieces)
    for number, each in enumerate(pieces):
        routed_experts = found(files, 2 * number, each)
        assert (
            routed_experts
            and each.routed_experts
            and routed_experts.start == each.routed_experts.start
        )
        assert routed_experts.experts.dtype == each.routed_experts.experts.dtype
        assert (routed_experts.experts == each.routed_experts.experts).all()
    assert files.read(4) == {}


def test_other_tokens_or_another_version_have_no_routes(tmp_path: Path) -> None:
    files = written(tmp_path, piece(0))
    assert found(files, 0, piece(0))
    assert found(files, 0, piece(0, token=6)) is None
    assert found(files, 0, piece(0, version=1)) is None
    assert found(files, 2, piece(0)) is None


def test_the_last_record_of_a_piece_counts(tmp_path: Path) -> None:
    files = ExpertFiles(tmp_path)
    for first in (0, 5):
        files.write(3, 7, 0, piece(first))
    files.flush()
    routed_experts = found(files, 0, piece(0))
    files.close()
    assert routed_experts and routed_experts.start == 5


def test_any_damage_or_cut_loses_records_and_never_changes_one(tmp_path: Path) -> None:
    pieces = [piece(0), piece(9, version=1)]
    files = written(tmp_path, *pieces)
    path = tmp_path / "routes" / "group-000003.bin"
    whole = path.read_bytes()

    def sound() -> int:
        number = 0
        for place, each in enumerate(pieces):
            routed_experts = found(files, 2 * place, each)
            assert (
                routed_experts is None
                or (routed_experts.experts == each.routed_experts.experts).all()
            )  # type: ignore[union-attr]
            number += routed_experts is not None
        return number

    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert sound() == (size >= len(whole) // 2)
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        assert sound() < 2


@pytest.mark.parametrize("lost", [1, 30, 80])
def test_records_after_a_kill_while_writing_can_be_read(tmp_path: Path, lost: int) -> None:
    written(tmp_path, piece(0), piece(9, version=1))
    path = tmp_path / "routes" / "group-000003.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-lost])
    files = ExpertFiles(tmp_path / "routes")
    for place in (4, 6):
        files.write(3, 7, place, piece(place))
    files.close()
    assert {key.position for key in files.read(3)} == {0, 4, 6}
    assert path.stat().st_size == size // 2 * 3


def test_a_reader_reads_the_file_of_a_group_once(tmp_path: Path) -> None:
    with Journal(
        tmp_path / JOURNAL, routed_experts=ExpertFiles(tmp_path / ROUTED_EXPERTS)
    ) as journal:
        journal.add_request(GroupRequest(3, TASK, seed=5, place=6))
        for episode in (7, 8):
            page = journal.begin(3, episode - 7, episode=episode, seed=1)
            page.write_piece(0, piece(episode))
        journal.flush()
    with Journal.read(tmp_path, routed_experts=True) as reader:
        for episode in (7, 8):
            (read,) = reader.pieces(episode)
            assert isinstance(read, Sampled) and read.routed_experts
            assert read.routed_experts.start == episode
            (tmp_path / ROUTED_EXPERTS / "group-000003.bin").unlink(missing_ok=True)


@contextmanager
def hanging_disk(file: Path) -> Iterator[None]:
    """Make a file whose reading does not end within the context, as on a disk without answers."""
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    try:
        yield
    finally:
        descriptor = os.open(file, os.O_RDWR)
        file.unlink()
        os.close(descriptor)


def test_a_disk_that_does_not_answer_ends_barriers_and_the_journal_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STUCK_S", 0.2)
    stuck = r"the journal .* failed: no routed experts could be written for 0.2 s"
    with hanging_disk(tmp_path / ROUTED_EXPERTS / "group-000003.bin"):
        with (
            pytest.raises(JournalError, match=stuck),
            Journal(
                tmp_path / JOURNAL, routed_experts=ExpertFiles(tmp_path / ROUTED_EXPERTS)
            ) as journal,
        ):
            journal.add_request(GroupRequest(3, TASK, seed=5, place=6))
            journal.begin(3, 0, episode=7, seed=1).write_piece(0, piece(0))
            (thread,) = (thread for thread in threading.enumerate() if thread.name == "routes")
            assert thread.daemon  # it keeps no process from ending
            for barrier in (journal.flush, lambda: asyncio.run(journal.barrier())):
                with pytest.raises(JournalError, match=stuck):
                    barrier()
        with Journal.read(tmp_path) as reader:
            assert len(reader.pieces(7)) == 1
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("before_the_end", [False, True])
def test_an_error_of_the_last_routes_is_raised_at_the_end_of_the_journal(
    tmp_path: Path, before_the_end: bool
) -> None:
    (tmp_path / ROUTED_EXPERTS).write_text("a file where the folder should be")
    routed_experts = ExpertFiles(tmp_path / ROUTED_EXPERTS)
    with (
        pytest.raises(JournalError, match=r"the journal .* failed: .*File exists"),
        Journal(tmp_path / JOURNAL, routed_experts=routed_experts) as journal,
    ):
        journal.add_request(GroupRequest(3, TASK, seed=5, place=6))
        journal.begin(3, 0, episode=7, seed=1).write_piece(0, piece(0))
        if before_the_end:
            routed_experts.flush()


def test_an_error_of_the_routes_is_raised_once(tmp_path: Path) -> None:
    (tmp_path / ROUTED_EXPERTS).write_text("a file where the folder should be")
    with Journal(
        tmp_path / JOURNAL, routed_experts=ExpertFiles(tmp_path / ROUTED_EXPERTS)
    ) as journal:
        journal.add_request(GroupRequest(3, TASK, seed=5, place=6))
        journal.begin(3, 0, episode=7, seed=1).write_piece(0, piece(0))
        with pytest.raises(JournalError, match="File exists"):
            journal.flush()


def test_files_of_old_checkpoints_are_removed(tmp_path: Path) -> None:
    files = ExpertFiles(tmp_path, keep=2)
    for group in range(4):
        files.write(group, 7, 0, piece(0))
    for group in range(4):
        files.consumed([group])
    files.close()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["group-000002", "group-000003"]


def test_a_file_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"{self.name} is read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    errors: list[Exception] = []
    files = ExpertFiles(tmp_path, keep=1)
    files.on_error = errors.append
    files.write(0, 7, 0, piece(0))
    files.consumed([0])
    files.consumed([1])
    files.close()
    assert [str(error) for error in errors] == ["group-000000.bin is read-only"]


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "routes").write_text("a file where the folder should be")
    errors: list[Exception] = []
    files = ExpertFiles(tmp_path / "routes")
    files.on_error = errors.append
    files.write(3, 7, 0, piece(0))
    files.close()
    assert len(errors) == 1
