"""Test what the terminal shows of failed episodes."""

from pathlib import Path

from tests.observe.test_health import Notes
from unstale.durability.run_folder import EVENTS, RunLog, read_jsonl
from unstale.observe.recorder import Outputs, Recorder
from unstale.records import Failure, Task

LONG = Failure(Task("sums", "train", 3), "begin", "EnvError: no reply fits")
OTHER = Failure(Task("sums", "train", 4), "begin", "EnvError: no reply fits")


def test_equal_failures_of_the_episodes_of_a_task_are_shown_once(tmp_path: Path) -> None:
    notes, log = Notes(), RunLog.create(tmp_path / "run")
    recorder = Recorder(Outputs(log, notes))
    for final in (False, True):
        for episode in range(8):
            recorder.failure(episode, LONG, final)
    recorder.failure(8, OTHER, False)
    recorder.held_out_failure(0, LONG, True)
    log.close()
    assert notes.notes == [
        "episode 0 of sums/train/3 failed in begin: EnvError: no reply fits",
        "episode 0 of sums/train/3 failed in begin: EnvError: no reply fits; it is not tried again",
        "episode 8 of sums/train/4 failed in begin: EnvError: no reply fits",
        "an episode of the held-out task sums/train/3 failed in begin: EnvError: no reply fits; "
        "it is not tried again",
    ]
    assert len(list(read_jsonl(tmp_path / "run" / EVENTS))) == 18
