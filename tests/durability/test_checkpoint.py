"""Test checkpoints.

A state is restored bit for bit. An interrupted save leaves older checkpoints intact and no partial
one. A lack of memory is no damage. Changed files and wrong manifests are refused by name. Versions
are rebuilt from a checkpoint and later publications, also after pruning.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.forked import run_forked
from unstale.durability import checkpoint_files
from unstale.durability.checkpoint import CheckpointError, Checkpoints, Progress
from unstale.model.policy import Policy
from unstale.testing import nudge, tiny_policy
from unstale.weights.bits import checksum
from unstale.weights.codec import all_of
from unstale.weights.store import VersionStore


class Part:
    """A component whose state is the given value."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.held = held

    def state(self) -> Mapping[str, Any]:
        return self.held

    def restore(self, state: Mapping[str, Any]) -> None:
        self.held = state


NAN = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
"""Two not-a-numbers that are not alike."""


def nasty() -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "nan": NAN,
        "signs": torch.tensor([0.0, -0.0, math.inf, -math.inf]),
        "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "point": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "nothing": torch.empty(0, dtype=torch.int64),
        "long": torch.tensor([2**62, -(2**63)]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "truth": torch.tensor([True, False]),
        "strided": torch.arange(12.0).view(3, 4).t()[1:],
        "double": torch.tensor(0.1, dtype=torch.float64),
    }
    numbers = [
        0.1,
        -0.0,
        math.nan,
        math.inf,
        -math.inf,
        5e-324,
        2**70,
        True,
        None,
        "ü/\u2028 \\u0000",
        "",
    ]
    return {
        "tensors": tensors,
        "numbers": numbers,
        3: {-1: [], "": {}},
        "a/b": {"c": ((1, (2.0,)), [])},
    }


def same(one: Any, other: Any) -> bool:
    """Compare bit for bit. Tuples are restored as lists."""
    match one:
        case Tensor():
            return (
                isinstance(other, Tensor)
                and (one.dtype, one.shape) == (other.dtype, other.shape)
                and one.contiguous().view(-1).view(torch.uint8).tolist()
                == other.view(-1).view(torch.uint8).tolist()
            )
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def held(run: Path, policy: Policy, *, keep: int = 2, every_version: bool = True) -> Checkpoints:
    trainer = Part(
        {
            "weights": dict(policy.weights()),
            "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
        }
    )
    parts = {"trainer": trainer, "old": Part(nasty())}
    return Checkpoints(run, parts, keep=keep, every_version=every_version)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_nasty_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    parts = {"trainer": Part(nasty()), "old": Part(nasty()), "empty": Part({})}
    checkpoints, policy = Checkpoints(tmp_path, parts), tiny_policy(dtype="bfloat16")
    name = checkpoints.save(Progress(7, {"loss": math.nan, "lag": {"0": 3}, "n": 2}), policy)
    read = checkpoints.load(name)
    assert name == "step000007-version000000" == names(tmp_path)[0]
    assert (read.progress.step, read.version) == (7, 0) and same(
        {"loss": math.nan, "lag": {"0": 3}, "n": 2}, read.progress.row
    )
    assert (
        same(nasty(), read.states["trainer"])
        and same(nasty(), read.states["old"])
        and read.states["empty"] == {}
    )
    assert checksum(read.policy) == checksum(policy.weights())
    for part in parts.values():
        part.held = {}
    checkpoints.restore(read)
    assert same(nasty(), parts["old"].held)


def test_a_run_with_other_parts_is_refused(tmp_path: Path) -> None:
    name = Checkpoints(tmp_path, {"old": Part({})}).save(Progress(), tiny_policy())
    other = Checkpoints(tmp_path, {"old": Part({}), "auditor": Part({})})
    with pytest.raises(
        CheckpointError,
        match=r"the checkpoint has the states \['old'\], but the run has \['auditor', 'old'\]",
    ):
        other.restore(other.load(name))


@pytest.mark.parametrize(
    "state", [{"a": {1, 2}}, {"a": {(1, 2): 3}}, {"a": {True: 1}}, {"a": b"bytes"}]
)
def test_what_no_checkpoint_can_hold_is_refused_before_it_is_lost(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=r"/old/a is a \w+, which cannot be saved"):
        Checkpoints(tmp_path, {"old": Part(state)}).save(Progress(), tiny_policy())


class Cut(BaseException):
    """Raised in place of the death of the process."""


def test_a_save_that_is_cut_off_anywhere_leaves_the_older_ones_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy()
    checkpoints = held(tmp_path, policy)
    first = checkpoints.save(Progress(1), policy)
    nudge(policy, seed=1)
    policy.version = 1
    real, calls, limit = (
        {name: getattr(os, name) for name in ("fsync", "rename", "mkdir", "open")},
        0,
        0,
    )

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == limit:
                raise Cut
            return real[name](*arguments, **keywords)

        return call

    cuts = 0
    while True:
        calls, limit = 0, limit + 1
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, counted(name))
            try:
                name = checkpoints.save(Progress(2), policy)
            except Cut:
                cuts += 1
                again = held(tmp_path, policy)
            else:
                break
        whole = [name for name in names(tmp_path) if not name.endswith(".part")]
        assert whole in ([first], [first, "step000002-version000001"])
        for each in whole:
            again.load(each)
        assert checksum(again.weights(0)) == checksum(again.load(first).policy)
    assert cuts > 12 and names(tmp_path) == [first, name]
    assert checksum(checkpoints.load(name).policy) == checksum(policy.weights())


def test_a_disk_that_gives_back_something_else_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bent(path: Path) -> None:
        flush_to_disk(path)
        if path.suffix == ".safetensors" and path.parent.name == "trainer":
            path.write_bytes(path.read_bytes()[:-1] + b"!")

    flush_to_disk = checkpoint_files.flush_to_disk
    monkeypatch.setattr(checkpoint_files, "flush_to_disk", bent)
    with pytest.raises(CheckpointError, match="reads back differently than it was written"):
        held(tmp_path, tiny_policy()).save(Progress(), tiny_policy())
    assert names(tmp_path) == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


SHORTAGES = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("not enough memory: you tried to allocate 8 bytes"),
    RuntimeError("unable to mmap 8 bytes from file <state.safetensors>: No such device (19)"),
    RuntimeError("unable to open file <state.safetensors>: Too many open files (24)"),
)


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_lack_of_memory_or_files_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortage: RuntimeError
) -> None:
    def fail(path: Path) -> None:
        raise shortage

    checkpoints = held(tmp_path, tiny_policy())
    name = checkpoints.save(Progress(), tiny_policy())
    monkeypatch.setattr(checkpoint_files, "load_file", fail)
    with pytest.raises(RuntimeError) as raised:
        checkpoints.load(name)
    assert raised.value is shortage


def test_a_missing_file_is_refused_in_a_folder_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has the texts by which errors of connections and memory are known."""

    def fail(path: Path) -> None:
        raise RuntimeError(f"unable to open file <{path}>: No such file or directory (2)")

    run = tmp_path / "gloo, out of memory"
    checkpoints = held(run, tiny_policy())
    name = checkpoints.save(Progress(), tiny_policy())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "load_file", fail)
        with pytest.raises(CheckpointError, match="cannot be read: RuntimeError"):
            checkpoints.load(name)
    (run / "checkpoints" / name / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: FileNotFoundError"):
        checkpoints.load(name)


FILES = ("manifest.json", "state.safetensors", "trainer")


@pytest.mark.parametrize(
    "damage", [flip, truncate, Path.unlink, lambda path: path.write_bytes(b"")]
)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_as_it_was_written_is_refused_by_name(
    tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    checkpoints = held(tmp_path, tiny_policy())
    checkpoint = checkpoints.save(Progress(), tiny_policy())
    folder = tmp_path / "checkpoints" / checkpoint
    path = next((folder / name).glob("*.safetensors")) if name == "trainer" else folder / name
    damage(path)
    with pytest.raises(CheckpointError, match=f"{checkpoint} cannot be read: .*") as error:
        checkpoints.load(checkpoint)
    assert name == "manifest.json" or path.name in str(error.value)


def test_a_file_too_many_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = held(tmp_path, tiny_policy())
    name = checkpoints.save(Progress(), tiny_policy())
    (tmp_path / "checkpoints" / name / "trainer" / "more.pt").touch()
    with pytest.raises(CheckpointError, match=r"do not belong here: \['trainer/more\.pt'\]"):
        checkpoints.load(name)


def lie(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change an entry of a manifest and update its checksum."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())["body"]
    change(body)
    text = json.dumps(body)
    path.write_text(json.dumps({"checksum": zlib.crc32(text.encode()), "body": body}))


def shape(body: dict[str, Any], told: list[Any]) -> None:
    body["shapes"][next(iter(body["shapes"]))] = told


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "huge": lambda body: shape(body, ["float32", 2**40, 2**20]),
    "other": lambda body: shape(body, ["float32", 3]),
    "negative": lambda body: shape(body, ["float32", -3]),
    "no numbers": lambda body: shape(body, ["float32", "3"]),
    "no dtype": lambda body: shape(body, ["load", 3]),
    "no such dtype": lambda body: shape(body, ["float99", 3]),
    "no words": lambda body: shape(body, [3, 3]),
    "shapes of nothing": lambda body: body["shapes"].update({"/trainer/none": ["float32", 3]}),
    "not what the tree wants": lambda body: body["shapes"].clear(),
    "format": lambda body: body.update(format=2),
    "no weights": lambda body: body.update(policy={"w": "float32"}),
    "weights in no dtype": lambda body: body["policy"].update(dict.fromkeys(body["policy"], "nn")),
    "a difference from nothing": lambda body: body.update(
        states={"difference": "/old", "from": "w", "of": ["raw", 1, 4, 0, 0]}
    ),
    "no format": lambda body: body.pop("format"),
    "a path outside": lambda body: body["files"].update({"../../../etc/passwd": [1, 1]}),
    "no files": lambda body: body.update(files=None),
    "no tree": lambda body: body.update(states={"call": "os.system"}),
    "no pairs": lambda body: body.update(states={"of": [[1, 2, 3]]}),
    "no float": lambda body: body.update(states={"float": "1e"}),
    "unhashable": lambda body: body.update(states={"of": [[[], 1]]}),
    "a tensor that is not there": lambda body: body.update(states={"tensor": "/etc/passwd"}),
    "no progress": lambda body: body.update(progress=3),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    checkpoints = held(tmp_path, tiny_policy())
    checkpoint = checkpoints.save(Progress(), tiny_policy())
    lie(tmp_path / "checkpoints" / checkpoint, LIES[name])
    with pytest.raises(CheckpointError, match=f"{checkpoint} cannot be read"):
        checkpoints.load(checkpoint)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    checkpoints = held(tmp_path, tiny_policy())
    name = checkpoints.save(Progress(), tiny_policy())
    (tmp_path / "checkpoints" / name / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        checkpoints.load(name)


def publish(
    checkpoints: Checkpoints, policy: Policy, store: VersionStore | None, *, full: bool
) -> dict[str, Tensor]:
    """Publish the next version as the publisher does, and return its weights."""
    nudge(policy, seed=policy.version, size=1e-4)
    policy.version += 1
    delta = None
    if store is not None:
        store.put(policy.version, policy.weights())
        delta = None if full else store.delta(policy.version)
    checkpoints.write_version(policy.version, policy.weights(), delta)
    return {name: tensor.clone() for name, tensor in policy.weights().items()}


def test_every_version_is_read_back_as_a_delta_or_in_full_and_across_pruning(
    tmp_path: Path,
) -> None:
    policy = tiny_policy(dtype="bfloat16")
    checkpoints, store = held(tmp_path, policy), VersionStore(policy.twin().weights())
    checkpoints.save(Progress(0), policy)
    store.put(0, policy.weights())
    checkpoints.write_version(
        0, policy.weights()
    )  # the checkpoint's own too: it may turn out unsound
    copies = {0: {name: tensor.clone() for name, tensor in policy.weights().items()}}
    for version in range(1, 13):
        copies[version] = publish(checkpoints, policy, store, full=version % 3 == 0)
        if version in (4, 8):
            checkpoints.save(Progress(version), policy)
        for number, copy in copies.items():
            assert checksum(checkpoints.weights(number)) == checksum(copy)
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "versions").iterdir()}
    assert sizes["000001"] < sizes["000003"] / 4
    checkpoints.prune()
    assert names(tmp_path) == ["step000004-version000004", "step000008-version000008"]
    assert sorted(path.stem for path in (tmp_path / "versions").iterdir()) == [
        f"{n:06d}" for n in range(5, 13)
    ]
    for number in range(4, 13):
        assert checksum(checkpoints.weights(number)) == checksum(copies[number])
    for number, says in (
        (3, "is older than every checkpoint on disk"),
        (13, "is not on disk: the newest before it is 12"),
    ):
        with pytest.raises(LookupError, match=f"version {number} {says}"):
            checkpoints.weights(number)


@pytest.mark.parametrize("damage", [flip, truncate, lambda path: path.write_bytes(b"")])
def test_a_version_that_is_not_as_it_was_written_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    policy = tiny_policy()
    checkpoints = held(tmp_path, policy)
    checkpoints.save(Progress(0), policy)
    publish(checkpoints, policy, None, full=True)
    damage(tmp_path / "versions" / "000001.safetensors")
    with pytest.raises(CheckpointError, match=r"versions/000001\.safetensors cannot be read"):
        checkpoints.weights(1)


def test_a_delta_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    policy = tiny_policy(dtype="bfloat16")
    checkpoints, store = held(tmp_path, policy), VersionStore(policy.twin().weights())
    checkpoints.save(Progress(0), policy)
    store.put(0, policy.weights())
    for _ in range(2):
        publish(checkpoints, policy, store, full=False)
    (tmp_path / "versions" / "000001.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"it starts from version 1, but the one before it is 0"
    ):
        checkpoints.weights(2)


@pytest.mark.parametrize("is_first_divided", [True, False])
def test_a_version_replaces_that_of_another_number_of_ranks(
    tmp_path: Path, is_first_divided: bool
) -> None:
    """A crash may have left it, before the journal recorded the version."""
    policy = tiny_policy()
    checkpoints = held(tmp_path, policy)
    checkpoints.save(Progress(0), policy)
    for is_divided in (is_first_divided, not is_first_divided):
        nudge(policy, seed=int(is_divided))
        weights = policy.weights()
        starts = dict.fromkeys(weights, 0) if is_divided else None
        checkpoints.write_delta(replace(all_of(1, weights), starts=starts))
        assert checksum(checkpoints.weights(1)) == checksum(weights)
        assert checkpoints.versions == [1]


def test_only_the_newest_versions_stay_if_no_older_one_is_read(tmp_path: Path) -> None:
    policy = tiny_policy()
    checkpoints = held(tmp_path, policy, every_version=False)
    checkpoints.save(Progress(0), policy)
    for _ in range(4):
        last = publish(checkpoints, policy, None, full=True)
    assert checkpoints.versions == [3, 4]
    assert checksum(checkpoints.weights(4)) == checksum(last)
    with pytest.raises(LookupError, match="version 2 is not on disk"):
        checkpoints.weights(2)


def test_a_checkpoint_that_cannot_be_removed_is_named_once_and_keeps_no_versions(
    tmp_path: Path,
) -> None:
    policy = tiny_policy()
    checkpoints = held(tmp_path, policy, keep=1)
    first = checkpoints.save(Progress(0), policy)
    folder = tmp_path / "checkpoints" / first
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")  # `rmtree` removes no links
    (tmp_path / "checkpoints" / "notes").mkdir()
    causes = []
    for step in (1, 2):
        publish(checkpoints, policy, None, full=True)
        name = checkpoints.save(Progress(step), policy)
        causes.append(checkpoints.prune())
        assert checkpoints.versions == []
    assert list(causes[0]) == [first] and "symbolic link" in causes[0][first]
    assert causes[1] == {}
    assert names(tmp_path) == ["notes", first, name]


def test_a_checkpoint_that_cannot_be_removed_replaces_none(tmp_path: Path) -> None:
    """It is newer than the one from which a deterministic run continues."""
    policy = tiny_policy()
    checkpoints = held(tmp_path, policy, keep=1)
    first = checkpoints.save(Progress(0), policy)
    policy.version = 5
    newer = checkpoints.save(Progress(5), policy)
    folder = tmp_path / "checkpoints" / newer
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert list(checkpoints.prune([first])) == [newer]
    policy.version = 2
    second = checkpoints.save(Progress(2), policy)
    assert checkpoints.prune() == {}
    assert names(tmp_path) == [second, newer]


def test_only_what_the_journal_knows_is_kept(tmp_path: Path) -> None:
    """A checkpoint missing from the journal was written just before a crash."""
    policy = tiny_policy()
    checkpoints = held(tmp_path, policy, keep=1)
    known = []
    for step in range(3):
        known.append(checkpoints.save(Progress(step), policy))
        policy.version += 1
    (tmp_path / "checkpoints" / "step000009-version000009.part").mkdir()
    checkpoints.prune(known[:2])
    assert names(tmp_path) == known[1:2]


class Grown:
    """Weights of a made-up model with Adam's moments, and a version store that is one step old."""

    version = 1

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.master = {f"w{i}": torch.randn(count // 4, generator=draw) for i in range(4)}
        self.moments = {
            i: {"a": self.master[f"w{i}"] * 2, "b": self.master[f"w{i}"] * 3} for i in range(4)
        }
        self.dtype = dtype
        self.store = VersionStore()
        self.store.put(0, self.weights())
        for weight in self.master.values():
            weight[:100] += 1

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.to(self.dtype) for name, weight in self.master.items()}

    def parts(self) -> dict[str, Any]:
        trainer = Part({"weights": self.master, "optimizer": {"state": self.moments}})
        return {"trainer": trainer, "old": self.store}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_takes_at_most_13_bytes_a_weight_besides_the_deltas(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    count = 400_000
    grown = Grown(dtype, count)
    held = {name: tensor.clone() for name, tensor in grown.store.tensors(0).items()}
    checkpoints = Checkpoints(tmp_path, grown.parts())
    snapshot = checkpoints.snapshot(Progress(1), grown)
    grown.store.put(1, grown.weights())  # the store's copy moves while the checkpoint is written
    name = checkpoints.write(snapshot)
    files = [path for path in (tmp_path / "checkpoints" / name).rglob("*") if path.is_file()]
    assert 12 * count < sum(path.stat().st_size for path in files) < 12.5 * count
    read = checkpoints.load(name)
    assert same(grown.master, read.states["trainer"]["weights"])
    assert same(grown.moments, read.states["trainer"]["optimizer"]["state"])
    assert same(grown.weights(), read.policy) and same(grown.weights(), checkpoints.weights(1))
    assert same(held, read.states["old"]["movable"])


MEMORY = """
import os
from pathlib import Path
import torch
from tests.durability.test_checkpoint import Grown
from unstale.durability.checkpoint import Checkpoints, Progress

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
run, count = Path(os.environ["RUN"]), 12_000_000
grown = Grown(torch.float32, count)
checkpoints = Checkpoints(run, grown.parts())
small = Grown(torch.float32, 8)
Checkpoints(run / "small", small.parts()).save(Progress(), small)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS:")
checkpoints.save(Progress(1), grown)
checkpoints.write_version(1, grown.weights())
print((status("VmHWM:") - before) / count)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with /proc")
def test_a_checkpoint_and_a_version_are_written_without_copies_of_the_model(tmp_path: Path) -> None:
    told = run_forked(MEMORY, env={**os.environ, "RUN": str(tmp_path)})
    assert float(told) < 10  # bytes a weight; it was 38
