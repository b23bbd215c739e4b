"""Weights for servers on this host: the file is the memory, a delta is in it, and a killed process leaves nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from afterimage.engines.handed import WEIGHTS, Handed
from afterimage.testing import nudge, tiny_policy
from afterimage.versions import VersionStore
from afterimage.versions.codec import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_is_in_the_file(dtype: torch.dtype) -> None:
    policy, handed = tiny_policy(), Handed()
    policy.model.to(dtype)
    store = VersionStore(policy.twin().weights())
    store.put(0, policy.weights())
    handed.put(policy.weights())
    file = handed.folder / WEIGHTS
    node = file.stat().st_ino
    for version in (1, 2):
        nudge(policy, seed=version)
        store.put(version, policy.weights())
        handed.advance(store.delta(version))
        assert checksum(load_file(file)) == checksum(handed.weights) == checksum(policy.weights())
    assert file.stat().st_ino == node, "it was written again"
    with pytest.raises(ValueError, match="checksum differs"):
        handed.advance(store.delta(1))
    assert checksum(load_file(file)) == checksum(policy.weights())
    handed.close()
    assert not file.parent.exists()


def test_what_has_no_elements_is_handed_too() -> None:
    handed = Handed()
    given = {"none": torch.empty(0, 3), "one": torch.ones(()), "few": torch.arange(5, dtype=torch.uint8)}
    handed.put(given)
    assert all(torch.equal(tensor, given[name]) for name, tensor in load_file(handed.folder / WEIGHTS).items())
    handed.close()


_PROGRAM = """
import sys, torch
from afterimage.engines.handed import Handed
handed = Handed()
handed.put({"w": torch.ones(3)})
print(handed.folder, flush=True)
sys.stdin.read()
"""


def test_the_next_process_removes_what_a_killed_one_left() -> None:
    def begin() -> tuple["subprocess.Popen[str]", Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (killed, left), (living, kept) = begin(), begin()
    with killed, living:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert (left / WEIGHTS).exists()
        handed = Handed()
        assert handed.folder.is_dir() and not left.exists() and (kept / WEIGHTS).exists()
        handed.close()
    assert not kept.exists()
