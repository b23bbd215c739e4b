"""Test weights shared by memory with servers on this host, updated in place by deltas."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked import Forked
from tests.support.waits import wait_until
from unstale.engines import shared_weights
from unstale.engines.shared_weights import WEIGHTS, SharedWeights
from unstale.testing import nudge, tiny_policy
from unstale.weights.bits import checksum
from unstale.weights.codec import advance
from unstale.weights.store import VersionStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_is_in_the_file(dtype: torch.dtype) -> None:
    policy, shared = tiny_policy(), SharedWeights()
    policy.model.to(dtype)
    store = VersionStore(policy.twin().weights())
    store.put(0, policy.weights())
    shared.write(policy.weights())
    file = shared.folder / WEIGHTS
    node = file.stat().st_ino
    for version in (1, 2):
        nudge(policy, seed=version)
        store.put(version, policy.weights())
        advance(shared.weights, store.delta(version))
        assert checksum(load_file(file)) == checksum(shared.weights) == checksum(policy.weights())
    assert file.stat().st_ino == node, "it was written again"
    with pytest.raises(ValueError, match="checksum differs"):
        advance(shared.weights, store.delta(1))
    assert checksum(load_file(file)) == checksum(policy.weights())
    shared.close()
    assert not file.parent.exists()


def test_what_has_no_elements_is_handed_too() -> None:
    shared = SharedWeights()
    given = {
        "none": torch.empty(0, 3),
        "one": torch.ones(()),
        "few": torch.arange(5, dtype=torch.uint8),
    }
    shared.write(given)
    assert all(
        torch.equal(tensor, given[name])
        for name, tensor in load_file(shared.folder / WEIGHTS).items()
    )
    shared.close()


def test_without_room_in_memory_it_is_on_disk_and_without_any_room_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir(), disk.mkdir()
    free = {memory: 1 << 20, disk: 1 << 30}
    monkeypatch.setattr(shared_weights, "MEMORY", memory)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free[place]))
    shared = SharedWeights()
    shared.write({"w": torch.ones(9)})
    assert shared.folder.parent == disk and not [*memory.iterdir()]
    shared.close()
    assert not [*disk.iterdir()]
    free[disk] = 1 << 19
    with pytest.raises(
        OSError, match=r"take 100 bytes, .* only 1,048,576 in .*memory and 524,288 in"
    ):
        shared.write({"w": torch.ones(9)})


_PROGRAM = """
import os, pathlib, time, torch
from unstale.engines import shared_weights
from unstale.engines.shared_weights import SharedWeights
shared_weights.MEMORY = pathlib.Path(os.environ["PLACE"])
shared = SharedWeights()
shared.write({"w": torch.ones(3)})
print(shared.folder, flush=True)
while not os.path.exists(os.environ["END"]):
    time.sleep(0.01)
"""


def test_the_next_process_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A place of its own: in /dev/shm a test in another process may be the next one.
    monkeypatch.setattr(shared_weights, "MEMORY", tmp_path)
    end = tmp_path / "end"

    def folder(process: Forked) -> Path:
        def has_written() -> bool:
            assert process.poll() is None, process.output()
            return process.output()[0].endswith("\n")

        wait_until(has_written, "the name of the folder")
        return Path(process.output()[0].strip())

    env = {**os.environ, "END": str(end), "PLACE": str(tmp_path)}
    with Forked(_PROGRAM, env=env) as killed, Forked(_PROGRAM, env=env) as living:
        left, kept = folder(killed), folder(living)
        killed.kill()
        killed.wait()
        assert (left / WEIGHTS).exists()
        shared = SharedWeights()
        shared.write({"w": torch.ones(3)})
        assert shared.folder.is_dir() and not left.exists() and (kept / WEIGHTS).exists()
        shared.close()
        end.touch()
        assert living.wait(60) == 0
    assert not kept.exists()
