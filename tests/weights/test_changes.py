"""Test how changed words are found, and which checksums a delta may have.

Compiled code, with and without the compress instructions, and NumPy return the same bytes. Every
tensor comes back bit for bit: of any dtype and bits, empty, without dimensions, and too large for
both encodings to be tried. Versions that differ in shape or dtype are refused. Without a compiler a
warning is given. A checksum of an unknown kind is refused by name.
"""

import re
import tracemalloc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unstale.native import compile_library
from unstale.weights import bits, changes, codec
from unstale.weights.bits import bytes_of, checksum, has_checksum, sum64, words
from unstale.weights.changes import (
    apply_changes,
    apply_on_device,
    apply_planes,
    find_changes,
    find_changes_on_device,
    merge_changes,
    positions_of,
    split_planes,
)
from unstale.weights.codec import (
    Delta,
    advance,
    apply,
    dumps,
    encode,
    encode_all,
    encode_between,
    loads,
)

WIDTHS = {torch.int8: 1, torch.int16: 2, torch.int32: 4, torch.int64: 8}
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let NumPy find the changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_library", lambda: None)
        yield


@contextmanager
def without_compress() -> Iterator[None]:
    """Use the code for processors without the compress instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            changes,
            "compile_library",
            lambda source: compile_library(source, ("-U__AVX512VBMI2__",)),
        )
        changes._library.cache_clear()
        try:
            yield
        finally:
            changes._library.cache_clear()


def two_versions(data: st.DataObject, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Draw words, and others that differ in some places: few, none, all, or behind long gaps."""
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    bits = torch.iinfo(dtype)
    before = torch.randint(bits.min, bits.max, (count,), generator=noise, dtype=dtype)
    share = data.draw(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]))
    where = torch.rand(count, generator=noise) < share
    where[: data.draw(st.integers(0, count))] = False
    other = torch.randint(bits.min, bits.max, (count,), generator=noise, dtype=dtype)
    return before, torch.where(where, other, before)


@pytest.mark.costly
@given(st.data(), st.sampled_from(list(WIDTHS)), st.integers(0, 3000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_compiled_code_and_numpy_return_the_same_bytes(
    data: st.DataObject, dtype: torch.dtype, count: int, as_difference: bool
) -> None:
    before, after = two_versions(data, dtype, count)
    pair = (before ^ after, None) if as_difference else (before, after)
    limit = data.draw(st.integers(0, count))
    found = [(find_changes(*pair, limit), split_planes(*pair))]
    for other in (without_compress, without_compiler):
        with other():
            found.append((find_changes(*pair, limit), split_planes(*pair)))
    (first, planes), *others = found
    assert first.count == int((before != after).sum())
    assert len(first.planes) == (dtype.itemsize if first.count <= limit else 0)
    for each, its_planes in others:
        assert each.count == first.count
        assert each.gaps.tolist() == first.gaps.tolist()
        assert [plane.tolist() for plane in each.planes] == [p.tolist() for p in first.planes]
        assert [plane.tolist() for plane in its_planes] == [plane.tolist() for plane in planes]


@given(st.data(), st.sampled_from(list(WIDTHS)), st.integers(1, 3000))
@settings(max_examples=40, deadline=None)
def test_changes_are_applied_and_merged_alike_with_and_without_a_compiler(
    data: st.DataObject, dtype: torch.dtype, count: int
) -> None:
    """Merged changes are those that are found in the XOR of both differences."""
    pairs = [two_versions(data, dtype, count) for _ in range(2)]
    one, two = (before ^ after for before, after in pairs)
    both = [find_changes(each, None, count) for each in (one, two)]
    expected = one ^ two
    found = find_changes(expected, None, count)
    for context in (nullcontext, without_compiler):
        with context():
            merged = merge_changes(*both, count)
            target = torch.zeros(count, dtype=dtype)
            for each in both:
                apply_changes(target, each)
            planes = torch.zeros(count, dtype=dtype)
            apply_planes(planes, split_planes(expected, None))
        assert merged.count == found.count and merged.gaps.tolist() == found.gaps.tolist()
        assert [p.tolist() for p in merged.planes] == [p.tolist() for p in found.planes]
        assert torch.equal(target, expected) and torch.equal(planes, expected)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shares", [(0.01, 0.01), (0.1, 0.1, 0.1), (0.2, 0.3), (0.9, 0.01), (0, 0)])
@pytest.mark.parametrize("count", [3, 200, 70_000])
def test_a_merged_difference_is_the_encoded_one(
    count: int, shares: Sequence[float], compiled: bool
) -> None:
    noise = torch.Generator().manual_seed(count)
    differences = [
        torch.randint(1, 4, (count,), generator=noise, dtype=torch.int16)
        * (torch.rand(count, generator=noise) < share)
        for share in shares
    ]
    differences.append(differences[0].clone())  # the changes of the first are taken back
    with nullcontext() if compiled else without_compiler():
        merged = codec.merge([encode(each) for each in differences])
    total = differences[0]
    for each in differences[1:]:
        total = total ^ each
    assert merged == encode(total)


def test_all_weights_as_a_difference_are_applied_without_a_copy() -> None:
    tensor = torch.arange(1 << 20)
    encoded, target = codec.whole(tensor), torch.zeros_like(tensor)
    tracemalloc.start()
    try:
        apply(encoded, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.equal(target, tensor) and peak < encoded.nbytes / 8


def test_differences_of_other_sizes_are_not_merged() -> None:
    parts = [encode(torch.ones(count, dtype=torch.int16)) for count in (5, 6)]
    with pytest.raises(ValueError, match=re.escape("differences of other tensors: [5, 6] words")):
        codec.merge(parts)


@pytest.mark.parametrize("damage", ["gap", "count"])
@pytest.mark.parametrize("compiled", [True, False])
def test_damaged_changes_are_neither_applied_nor_merged(damage: str, compiled: bool) -> None:
    sound = find_changes(torch.tensor([0, 3, 0, 5], dtype=torch.int16), None, 4)
    bad = replace(sound, gaps=sound.gaps + 2) if damage == "gap" else replace(sound, count=3)
    target = torch.zeros(4, dtype=torch.int16)
    with nullcontext() if compiled else without_compiler():
        for call in (
            lambda: apply_changes(target, bad),
            lambda: merge_changes(sound, bad, 4),
            lambda: merge_changes(bad, sound, 4),
        ):
            with pytest.raises(ValueError, match=r"positions? "):
                call()
    assert not target.any()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)
    before = {f"w{i}": torch.randn(500 * i, generator=noise).bfloat16() for i in range(8)}
    after = {
        name: (words(tensor) ^ (torch.arange(len(tensor)) % 50 == 0)).view(torch.bfloat16)
        for name, tensor in before.items()
    }
    delta = Delta(1, 2, checksum(after), encode_all(before, after, before))
    recorded = checksum(before), sum64([*before.values()])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(bits, "MIN_SHARED_BYTES", 0)
    assert (checksum(before), sum64([*before.values()])) == recorded
    assert all(has_checksum(before, each) for each in recorded)
    broken = replace(delta.tensors["w7"], streams=(b"", *delta.tensors["w7"].streams[1:]))
    held = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(ValueError, match="a stream cannot be read"):
        advance(held, replace(delta, tensors={**delta.tensors, "w7": broken}))
    assert checksum(held) == checksum(before), "a delta that cannot be read changes nothing"
    advance(held, delta)
    assert checksum(held) == checksum(after)


@given(
    st.data(),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (0,), (3, 0), (1,), (7,), (40, 60)]),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_any_bits_of_any_dtype_and_shape_come_back(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...], threads: int
) -> None:
    like = torch.zeros(shape, dtype=dtype)
    count = like.nbytes
    raw = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), np.uint8)
    noise = np.random.default_rng(data.draw(st.integers(0, 99)))
    changed = np.where(noise.random(count) < data.draw(st.floats(0, 1)), 255 - raw, raw)
    if dtype == torch.bool:
        raw, changed = raw & 1, changed & 1
    before, after = ({"a": from_bytes(each, like), "b": like} for each in (raw, changed))
    old_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        encoded = encode_all(before, after, before)
    finally:
        torch.set_num_threads(old_threads)
    delta = loads(dumps(Delta(1, 2, checksum(after), encoded)))
    advance(before, delta)
    assert bytes(bytes_of(before["a"])) == changed.tobytes()
    apply(delta.tensors["a"], words(before["a"]))
    assert bytes(bytes_of(before["a"])) == raw.tobytes()


def from_bytes(data: np.ndarray, like: Tensor) -> Tensor:
    made = like.clone()
    bytes_of(made)[:] = data.tobytes()
    return made


@pytest.mark.parametrize(("kind", "most", "share"), [("packed", 4, 0.54), ("sparse", 2**15, 0.4)])
def test_a_large_tensor_is_encoded_in_the_way_that_is_smaller_for_a_sample(
    monkeypatch: pytest.MonkeyPatch, kind: str, most: int, share: float
) -> None:
    noise = torch.Generator().manual_seed(0)
    count = codec.EXACT_WORDS + 3
    before = torch.randint(-(2**15), 2**15, (count,), generator=noise, dtype=torch.int16)
    difference = torch.randint(1, most, (count,), generator=noise, dtype=torch.int16)
    after = before ^ torch.where(torch.rand(count, generator=noise) < share, difference, 0)
    encoded = encode_between(before, after)
    assert encoded.kind == kind
    monkeypatch.setattr(codec, "EXACT_WORDS", count)
    assert encode_between(before, after) == encoded
    apply(encoded, before)
    assert torch.equal(before, after)


@pytest.mark.parametrize("at_end", [False, True])
def test_changes_at_one_end_of_a_large_tensor_are_sampled(
    monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    """The words in the middle are equal: they alone would speak for `sparse`."""
    noise = torch.Generator().manual_seed(0)
    count = codec.EXACT_WORDS + 3
    before = torch.randint(-(2**15), 2**15, (count,), generator=noise, dtype=torch.int16)
    difference = torch.randint(1, 4, (count,), generator=noise, dtype=torch.int16)
    difference[torch.rand(count, generator=noise) > 0.95] = 0
    difference[int(0.37 * count) :] = 0
    after = before ^ (difference.flip(0) if at_end else difference)
    encoded = encode_between(before, after)
    assert encoded.kind == "packed"
    monkeypatch.setattr(codec, "EXACT_WORDS", count)
    assert encode_between(before, after) == encoded
    apply(encoded, before)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "after",
    [
        torch.zeros(1000, dtype=torch.int16),
        torch.zeros(500, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros((10, 100), dtype=torch.int32),
    ],
)
def test_versions_of_other_shape_or_dtype_are_refused(after: Tensor) -> None:
    before = torch.zeros(1000, dtype=torch.int32)
    message = re.escape(f"[1000] of torch.int32 before, {list(after.shape)} of {after.dtype} after")
    for compare in (encode_between, split_planes, lambda *pair: find_changes(*pair, 1000)):
        for each in (nullcontext, without_compiler):
            with each(), pytest.raises(ValueError, match=message):
                compare(before, after)
    with pytest.raises(ValueError, match="differ in shape or dtype"):
        encode_all({"w": before}, {"w": after}, ["w"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(10, dtype=torch.int32)[::2],
        torch.zeros((2, 5), dtype=torch.int32),
        torch.zeros(10),
        torch.zeros(10, dtype=torch.int32, device="meta"),
    ],
)
def test_tensors_that_compiled_code_cannot_read_are_refused(tensor: Tensor) -> None:
    for pair in ((tensor, tensor), (tensor, None)):
        with pytest.raises(ValueError, match=r"need contiguous integer tensors \[n\] on the CPU"):
            find_changes(*pair, 10)
        with pytest.raises(ValueError, match=r"need contiguous integer tensors \[n\] on the CPU"):
            split_planes(*pair)


def test_without_a_compiler_a_warning_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/does/not/exist")
    before, after = torch.zeros(100).int(), torch.arange(100).int()
    compile_library.cache_clear()
    changes._library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"NumPy, several times slower.*does/not/exist"):
            encoded = encode_between(before, after)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert encode_between(before, after) == encoded
    finally:
        compile_library.cache_clear()
        changes._library.cache_clear()
    monkeypatch.undo()
    assert encode_between(before, after) == encoded


@pytest.mark.costly
@settings(max_examples=60)
@given(
    bits=st.sampled_from([8, 16, 32, 64]),
    gaps=st.lists(st.integers(0, 600), min_size=1, max_size=40),
    seed=st.integers(0, 2**31),
)
def test_code_for_any_device_finds_the_same_changes(bits: int, gaps: list[int], seed: int) -> None:
    """The code for GPUs, on the CPU."""
    noise = np.random.default_rng(seed)
    where = np.cumsum(np.array(gaps) + 1) - 1
    difference = np.zeros(where[-1] + 1 + seed % 300, f"i{bits // 8}")
    low, high = np.iinfo(difference.dtype).min, np.iinfo(difference.dtype).max
    difference[where] = noise.integers(low, high, len(where), difference.dtype, endpoint=True) | 1
    tensor = torch.from_numpy(difference)
    for limit in (len(where), len(where) - 1):
        expected = find_changes(tensor, None, limit)
        found = find_changes_on_device(tensor, limit)
        assert found.count == expected.count == len(where)
        assert found.gaps.tolist() == expected.gaps.tolist()
        assert [each.tolist() for each in found.planes] == [
            each.tolist() for each in expected.planes
        ]
    found = find_changes(tensor, None, len(where))
    assert positions_of(found.gaps, len(where), len(tensor)).tolist() == where.tolist()
    with pytest.raises(ValueError, match="outside a tensor"):
        positions_of(found.gaps, len(where), int(where[-1]))
    with pytest.raises(ValueError, match=r"positions for \d+ changed words"):
        positions_of(found.gaps, len(where) - 1, len(tensor))
    target = torch.zeros_like(tensor)
    apply_on_device([target], [found])
    assert torch.equal(target, tensor)


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(list(WIDTHS)),
    st.lists(st.tuples(st.integers(0, 900), st.sampled_from([0.0, 0.01, 0.3, 1.0])), min_size=1),
)
def test_code_for_gpus_handles_several_tensors_at_once(
    data: st.DataObject, dtype: torch.dtype, parts: list[tuple[int, float]]
) -> None:
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bits = torch.iinfo(dtype)
    before, after = {}, {}
    for number, (count, share) in enumerate(parts):
        old = torch.randint(bits.min, bits.max, (count, 2), generator=noise, dtype=dtype)
        changed = torch.rand(old.shape, generator=noise) < share
        before[str(number)], after[str(number)] = old, torch.where(changed, old ^ 3, old)
    if len(parts) > 1:  # one of another layout
        before["1"] = before["1"].t().contiguous().t()
    encoded = codec._encode_group(before, after)
    assert encoded == encode_all(before, after, before)
    names = [name for name, each in encoded.items() if each.kind == "sparse" and each.streams]
    if names:
        apply_on_device(
            [before[name] for name in names], [codec._changes_of(encoded[name]) for name in names]
        )
    assert all(torch.equal(before[name], after[name]) for name in names)


def test_nothing_is_changed_by_damaged_changes() -> None:
    targets = [torch.zeros(4, dtype=torch.int16) for _ in range(2)]
    found = find_changes(torch.tensor([0, 0, 0, 0, 7], dtype=torch.int16), None, 5)
    sound = find_changes(torch.tensor([0, 5, 0, 7], dtype=torch.int16), None, 4)
    with pytest.raises(ValueError, match="position 4 is outside a tensor of 4 words"):
        apply_on_device(targets, [sound, found])
    assert not any(target.any() for target in targets)


def test_tensors_on_a_device_are_grouped_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_GROUP_WORDS", 10)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 2}
    tensors = {name: torch.zeros(size, dtype=torch.int16) for name, size in sizes.items()}
    tensors["other"] = torch.zeros(3, dtype=torch.int8)
    assert list(codec._groups(tensors)) == [["a", "b"], ["c"], ["d"], ["e"], ["other"]]


def mixed(lanes: Sequence[int]) -> int:
    """Return the sum of words, each mixed with its place, in Python's integers."""
    total = 0
    for place, lane in enumerate(lanes):
        z = lane ^ (place + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += z ^ z >> 31
    return total % 2**64


@pytest.mark.parametrize("compiled", [True, False])
def test_a_sum_is_over_the_words_of_all_tensors(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(changes, "_library", lambda: None)
        monkeypatch.setattr(changes, "MAX_SUM_WORDS", 7)
    noise = torch.Generator().manual_seed(0)
    long = torch.randint(-(2**15), 2**15, (402,), generator=noise).short()
    unaligned = torch.frombuffer(bytearray(long.numpy().tobytes()), dtype=torch.int16, offset=2)
    assert torch.equal(unaligned, long[1:])
    tensors = {"b": torch.tensor([1.5, -2.0, 0.0]), "a": unaligned}
    data = [bytes(bytes_of(tensors["a"])) + bytes(6), bytes(bytes_of(tensors["b"])) + bytes(4)]
    assert len(data[0]) % 8 == len(data[1]) % 8 == 0
    recorded = f"sum64:{mixed(np.frombuffer(b''.join(data), np.uint64).tolist()):016x}"
    assert has_checksum(tensors, recorded) and has_checksum(tensors | {"a": long[1:]}, recorded)
    for name in tensors:
        for place in (0, -1):
            other = {key: tensor.clone() for key, tensor in tensors.items()}
            other[name].view(-1)[place] += 1
            assert not has_checksum(other, recorded)
    swapped = tensors | {"a": tensors["a"].flip(0)}
    assert not has_checksum(swapped, recorded)


@pytest.mark.parametrize("unknown", ["sum64:xyz", "sha256:00", "tensors:12", 3290418943, None])
def test_an_unknown_kind_of_checksum_is_refused_by_name(unknown: object) -> None:
    weights = {"w": torch.arange(6).float()}
    encoded = encode_all(weights, weights, weights)
    file = dumps(Delta(1, 2, unknown, encoded))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"its checksum is .*, but must be tensors: or sum64:"):
        loads(file)
