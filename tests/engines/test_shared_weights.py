"""Test weights shared by memory with servers on this host, updated in place by deltas."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from unstale.engines.embedded import shared_weights
from unstale.engines.embedded.shared_weights import WEIGHTS, SharedWeights
from unstale.testing import nudge, tiny_policy
from unstale.weights.codec import advance, checksum
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
        OSError, match=r"take 36 bytes, .* only 1,048,576 in .*memory and 524,288 in"
    ):
        shared.write({"w": torch.ones(9)})


_PROGRAM = """
import sys, torch
from unstale.engines.embedded.shared_weights import SharedWeights
shared = SharedWeights()
shared.write({"w": torch.ones(3)})
print(shared.folder, flush=True)
sys.stdin.read()
"""


def test_the_next_process_removes_what_a_killed_one_left() -> None:
    def begin() -> tuple["subprocess.Popen[str]", Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (killed, left), (living, kept) = begin(), begin()
    with killed, living:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert (left / WEIGHTS).exists()
        shared = SharedWeights()
        shared.write({"w": torch.ones(3)})
        assert shared.folder.is_dir() and not left.exists() and (kept / WEIGHTS).exists()
        shared.close()
    assert not kept.exists()
