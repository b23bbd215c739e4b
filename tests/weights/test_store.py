"""Test the version store.

Published weights are restored bit for bit, for any dtype, bit pattern, layout and order, also after
dropping and restoring. Each delta uses the smallest of three encodings. The live versions and the
newest are kept, and never change. A missing version is an error with numbers. Damaged bytes are
refused before memory is allocated. A thread makes the same chain, and its errors are raised.
"""

import gc
import threading
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from unstale.weights import store as stores
from unstale.weights.bits import checksum, words
from unstale.weights.codec import (
    Encoded,
    advance,
    apply,
    dumps,
    encode,
    file_of,
    loads,
    read_tensors,
)
from unstale.weights.store import Delta, VersionStore

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
)
PARTED = (torch.bfloat16, torch.float32, torch.complex64)
ODD = {
    2: [0x7FC1, 0x7F81, -0x8000, 1, -0x7FFF, 0x7F80, -0x80, 0x3F80],
    4: [0x7FC00001, 0x7F800001, -0x80000000, 1, 0x7F800000, -0x800000, 0x3F800000],
    8: [0x7FF8000000000001, 0x7FF0000000000001, -(2**63), 1, 0x7FF0000000000000, -1],
}
"""By width: NaN with payloads, -0.0, denormals, infinities, ordinary numbers."""


def bits(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: words(tensor).reshape(-1).tolist() for name, tensor in tensors.items()}


def odd_bits() -> dict[str, Tensor]:
    return {
        "a": torch.tensor(ODD[4], dtype=torch.int32).view(torch.float32),
        "b": torch.tensor(ODD[2], dtype=torch.int16).view(torch.bfloat16).reshape(2, 4),
    }


def ramp(step: int, *, size: int = 6000) -> dict[str, Tensor]:
    """Return bfloat16 weights of which a few change with every step."""
    start = torch.randn(size, generator=torch.Generator().manual_seed(0))
    moved = torch.rand(size, generator=torch.Generator().manual_seed(step)) < 0.02
    return {
        "w": torch.where(moved, start * (1 + step / 64), start).bfloat16(),
        "still": torch.ones(7),
    }


class Change(NamedTuple):
    """The difference of two versions: the share of changed words, and an unchanged beginning."""

    kind: Literal["any", "low", "odd"]
    share: float
    still: int = 0


WAYS = {
    "sparse": Change("any", 0.03, still=300),
    "packed": Change("low", 0.9),
    "raw": Change("any", 1.0),
}
"""A change that is smallest in each way: a few words behind a long gap, low bits everywhere, all
bits everywhere."""
CHANGES = st.builds(
    Change, st.sampled_from(["any", "low", "odd"]), st.floats(0, 1), st.integers(0, 600)
)


def drawn(data: st.DataObject, like: Tensor, count: int) -> Tensor:
    """Draw words of any bits, including special patterns; a few values are repeated."""
    low, high = span(like)
    odd = [0, 1] if like.dtype == torch.bool else ODD.get(words(like).element_size(), [0, -1, 1])
    few = data.draw(
        st.lists(st.integers(low, high) | st.sampled_from(odd), min_size=1, max_size=12)
    )
    return torch.tensor(few, dtype=words(like).dtype).repeat(count // len(few) + 1)[:count]


def span(like: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest word."""
    limits = torch.iinfo(words(like).dtype)
    return (0, 1) if like.dtype == torch.bool else (limits.min, limits.max)


def changed(data: st.DataObject, change: Change, before: Tensor, like: Tensor) -> Tensor:
    """Return the words of the next version."""
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    still = min(change.still, len(before))
    where = (
        still
        + torch.randperm(len(before) - still, generator=noise)[: round(change.share * len(before))]
    )
    low, high = span(like)
    after = before.clone()
    match change.kind:
        case "any":
            limits = (low, high + (like.dtype == torch.bool))
            after[where] ^= torch.randint(
                *limits, (len(where),), generator=noise, dtype=before.dtype
            )
        case "low":
            after[where] ^= torch.randint(
                1, min(high, 3) + 1, (len(where),), generator=noise, dtype=before.dtype
            )
        case "odd":
            after[where] = drawn(data, like, len(before))[where]
    return after


def history(data: st.DataObject, like: Tensor) -> list[dict[str, Tensor]]:
    """Return versions for which each encoding is smallest at least once, in any order."""
    sizes = {
        "w": data.draw(st.integers(600, 3000)),
        "short": data.draw(st.integers(0, 12)),
        "scalar": 1,
    }
    own = {name: drawn(data, like, size * (1 + like.is_complex())) for name, size in sizes.items()}
    versions = [own]
    for change in data.draw(
        st.permutations([*WAYS.values(), *data.draw(st.lists(CHANGES, max_size=3))])
    ):
        own = {name: changed(data, change, bits, like) for name, bits in own.items()}
        versions.append(own)
    return [{name: as_tensor(bits, like) for name, bits in version.items()} for version in versions]


def as_tensor(bits: Tensor, like: Tensor) -> Tensor:
    """Convert words to a tensor, the inverse of `words`. One element gives no dimension."""
    if like.is_complex():
        return torch.view_as_complex(bits.view(torch.float32).reshape(-1, 2)).squeeze()
    return bits.view(like.dtype).squeeze()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(words(one[name]), words(other[name])) for name in one
    )


@pytest.mark.costly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_come_back_in_any_order_after_dropping_and_restoring(
    dtype: torch.dtype,
) -> None:
    like, written = torch.empty(0, dtype=dtype), Counter[str]()

    @settings(max_examples=50)
    @given(data=st.data())
    def walk(data: st.DataObject) -> None:
        first, second = VersionStore(), VersionStore()
        versions = {3 * number: tensors for number, tensors in enumerate(history(data, like))}
        with closing(first), closing(second):
            for version, tensors in versions.items():
                first.put(version, tensors)
                if version:
                    written[first.delta(version).tensors["w"].kind] += 1
            for store in (first, second):
                if store is second:
                    store.restore(first.state())
                for version in data.draw(st.permutations(sorted(versions))):
                    assert same(store.tensors(version), versions[version])
                live = data.draw(st.sets(st.sampled_from(sorted(versions))))
                store.keep(live)
                versions = {
                    version: held
                    for version, held in versions.items()
                    if version in live | {max(versions)}
                }
                assert store.versions == tuple(versions)
            for version in reversed(versions):
                assert same(second.tensors(version), versions[version])

    walk()
    ways = ("sparse", "packed") if dtype == torch.bool else WAYS
    assert all(written[way] >= 25 for way in ways), written


def test_what_is_kept_outlives_the_weights_it_was_made_from() -> None:
    store, tensors = VersionStore(), odd_bits()
    expected = bits(tensors)
    store.put(4, tensors)
    for tensor in tensors.values():
        tensor.fill_(7.0)  # the trainer goes on
    store.put(5, tensors)
    back = store.tensors(4)
    assert bits(back) == expected
    assert back["b"].dtype == torch.bfloat16 and back["b"].shape == (2, 4)
    assert bits(store.tensors(5)) == bits(tensors)
    store.close()


def test_a_given_copy_is_moved_in_place_whatever_its_layout() -> None:
    one, two = (
        torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed in (1, 2)
    )
    mine = torch.zeros(40, 6, dtype=torch.bfloat16).t()
    wide = torch.zeros(6, 80, dtype=torch.bfloat16)[:, ::2]
    store = VersionStore({"t": mine, "s": wide})
    for version, tensor in enumerate((one, two, one.t().contiguous().t())):
        store.put(version, {"t": tensor, "s": tensor})
    for version, tensor in ((1, two), (0, one), (2, one)):
        store.move_to(version)
        assert torch.equal(mine, tensor) and torch.equal(wide, tensor) and store.at == version


def test_tied_weights_are_kept_once_and_come_back_under_both_names() -> None:
    def tied(value: float) -> dict[str, Tensor]:
        tensor = torch.full((1000,), value)
        return {"embed": tensor, "head": tensor}

    store = VersionStore()
    store.put(0, tied(1.0))
    store.put(1, tied(2.0))
    assert store.movable_bytes == 4000 and set(store.delta(1).tensors) == {"embed"}
    assert bits(store.tensors(0)) == bits(tied(1.0))
    with pytest.raises(ValueError, match=r"version 2 does not fit the store's weights: \['head'\]"):
        store.put(2, {"embed": torch.zeros(1000), "head": torch.ones(1000)})


def test_the_smallest_of_three_ways_is_taken() -> None:
    noise = torch.Generator().manual_seed(0)
    few = torch.where(torch.rand(9000, generator=noise) < 0.03, 1, 0).short()
    small = torch.randint(0, 4, (9000,), generator=noise).short()
    any_bits = torch.randint(-(2**15), 2**15, (9000,), generator=noise).short()
    sizes = {}
    for name, difference in {"sparse": few, "packed": small, "raw": any_bits}.items():
        encoded = encode(difference)
        assert encoded.kind == name and encoded.changed == difference.count_nonzero()
        back = torch.zeros_like(difference)
        apply(encoded, back)
        assert torch.equal(back, difference)
        sizes[name] = encoded.nbytes / 18000
    # by Shannon: H(0.03) = 0.194 of 16 bits to say where, 2 of 16 to say which of four
    assert 0.012 < sizes["sparse"] < 0.020 and 0.125 < sizes["packed"] < 0.150 and sizes["raw"] == 1
    assert encode(torch.zeros(9000, dtype=torch.int16)).nbytes == 0


def test_a_gap_of_any_length_is_found_again() -> None:
    for where in ([0], [254], [255], [256], [0, 255, 256, 510, 511], [509, 510, 765 + 511], [5000]):
        difference = torch.zeros(5001, dtype=torch.int32)
        difference[where] = -(2**31)
        encoded = encode(difference)
        assert encoded.kind == "sparse"
        back = torch.zeros_like(difference)
        apply(encoded, back)
        assert back.nonzero().squeeze(1).tolist() == where


def test_a_delta_leads_from_one_version_to_the_next_and_back_and_survives_writing() -> None:
    store = VersionStore()
    for version in range(3):
        store.put(version, ramp(version))
    delta = loads(dumps(store.delta(2)))
    assert len({dumps(delta) for _ in range(20)}) == 1
    assert delta == store.delta(2) and (delta.base, delta.version) == (1, 2)
    assert delta.checksum == checksum(ramp(2)) and delta.checksum != checksum(ramp(1))
    tensors = ramp(1)
    for expected in (ramp(2), ramp(1)):
        for name, encoded in delta.tensors.items():
            apply(encoded, words(tensors[name]))
        assert bits(tensors) == bits(expected)
    with pytest.raises(
        ValueError, match="6000 words of 2 bytes does not fit a tensor of 3 words of 4"
    ):
        apply(delta.tensors["w"], words(torch.zeros(3)))
    for version in (0, 3):
        with pytest.raises(
            LookupError, match=rf"no delta leads to version {version}: kept \[0, 1, 2\]"
        ):
            store.delta(version)


def test_deltas_that_meet_at_a_dropped_version_become_one_that_is_no_larger() -> None:
    store = VersionStore()
    for version in range(5):
        store.put(version, ramp(version))
    apart = sum(store.delta(version).nbytes for version in (2, 3, 4))
    store.tensors(3)
    store.keep({1})
    assert store.versions == (1, 4) and store.at == 4
    assert (store.delta(4).base, store.delta(4).checksum) == (1, checksum(ramp(4)))
    assert store.bytes == store.delta(4).nbytes < apart


def test_exactly_the_live_versions_and_the_newest_are_kept() -> None:
    store = VersionStore()
    for version in range(5):
        store.put(version, {"w": torch.full((3,), float(version))})
    store.keep({1, 3, 9})
    assert store.versions == (1, 3, 4)
    assert store.bytes == 2 * 12 and store.movable_bytes == 12
    store.keep(())
    assert store.versions == (4,) and store.bytes == 0


def test_a_missing_version_is_an_error_with_numbers() -> None:
    store = VersionStore()
    for version in range(3):
        store.put(version, ramp(version))
    store.keep({1})
    with pytest.raises(LookupError, match=r"version 0 is not stored, only \[1, 2\]"):
        store.tensors(0)


def test_a_version_never_changes_and_all_have_the_same_form() -> None:
    store, tensors = VersionStore(), odd_bits()
    store.put(1, tensors)
    store.put(1, odd_bits())  # the same bits, NaN and all
    store.put(2, odd_bits())
    with pytest.raises(
        ValueError, match=r"version 1 is stored already, with other weights: \['a'\]"
    ):
        store.put(1, tensors | {"a": torch.zeros_like(tensors["a"])})
    with pytest.raises(
        ValueError, match=r"version 1 is stored already, with other weights: \['b'\]"
    ):
        store.put(1, {"a": tensors["a"]})
    with pytest.raises(ValueError, match=r"version 3 does not fit the store's weights: \['b'\]"):
        store.put(3, tensors | {"b": tensors["b"].half()})
    with pytest.raises(ValueError, match="version 0 is older than the newest, 2"):
        store.put(0, tensors)
    assert store.versions == (1, 2)


def test_a_thread_makes_the_chain_that_the_caller_would_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller goes on meanwhile. What it asks next waits for the thread."""
    store, other = VersionStore(), VersionStore()
    go_on, encode_all = threading.Event(), stores.encode_all

    def slow(*arguments: Any) -> dict[str, Encoded]:
        assert go_on.wait(20), "begin_put waits for the compression"
        return encode_all(*arguments)

    monkeypatch.setattr(stores, "encode_all", slow)
    for version in range(4):
        go_on.clear()
        store.begin_keep({0, 2})
        store.begin_put(version, ramp(version))
        go_on.set()
        other.keep({0, 2})
        other.put(version, ramp(version))
        assert store.versions == other.versions
    one, two = store.state(), other.state()
    assert one["versions"] == [0, 2, 3] and one["checksum"] == two["checksum"]
    assert bits(one["movable"]) == bits(two["movable"]) and bits(one["shelf"]) == bits(two["shelf"])


def test_an_error_of_the_thread_is_raised_by_the_next_use(monkeypatch: pytest.MonkeyPatch) -> None:
    store = VersionStore()
    for version in range(2):
        store.put(version, ramp(version))

    def fail(*arguments: Any) -> dict[str, Encoded]:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(stores, "encode_all", fail)
        store.begin_put(2, ramp(2))
        store.begin_keep(())  # not begun
        with pytest.raises(OSError, match="no space left"):
            store.move_to(0)
        assert store.versions == (0, 1) and bits(store.tensors(0)) == bits(ramp(0))
        store.begin_put(2, ramp(2))
        with pytest.raises(OSError, match="no space left"):
            store.close()
    assert store.versions == ()


@pytest.mark.costly
def test_a_version_takes_the_memory_that_is_counted() -> None:
    draws = torch.Generator().manual_seed(0)
    before = torch.randn(200_000, generator=draws)
    after = before + 1e-6 * torch.randn(200_000, generator=draws)
    sizes = []
    for _ in range(3):  # the first packing also fills caches that stay
        store = VersionStore()
        store.put(0, {"w": before})
        gc.collect()
        tracemalloc.start(16)
        try:
            store.put(1, {"w": after})
            gc.collect()
            # Threads of earlier tests may allocate at the same time, even in these modules.
            ours = tracemalloc.Filter(True, "*/unstale/weights/*", all_frames=True)
            traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
            sizes.append(sum(trace.size for trace in traces))
        finally:
            tracemalloc.stop()
    assert store.delta(1).tensors["w"].kind == "packed"
    assert store.bytes <= min(sizes) < 1.1 * store.bytes


def test_a_state_goes_into_a_store_of_the_same_weights_only() -> None:
    store = VersionStore()
    store.put(1, ramp(1))
    with pytest.raises(
        ValueError, match=r"does not fit the store's weights: \['still', 'w', 'x'\]"
    ):
        VersionStore({"x": torch.zeros(1)}).restore(store.state())


def test_a_state_is_tensors_and_numbers(tmp_path: Path) -> None:
    store = VersionStore()
    for version in range(3):
        store.put(version, ramp(version))
    store.move_to(1)
    torch.save(store.state(), tmp_path / "state.pt")
    mine = {name: torch.zeros_like(tensor) for name, tensor in ramp(0).items()}
    other = VersionStore(mine)
    other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.at == 1 and bits(mine) == bits(ramp(1))
    other.move_to(2)
    assert bits(mine) == bits(ramp(2))
    assert isinstance(other.delta(2), Delta)


def test_damaged_bytes_are_refused() -> None:
    before, after = ramp(1), ramp(2)
    data = dumps(
        Delta(
            1,
            2,
            checksum(after),
            {name: encode(words(before[name]) ^ words(after[name])) for name in after},
        )
    )
    assert loads(data).version == 2
    for wrong in (
        b"",
        data[:-1],
        data + b"x",
        data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        b"\xff" * 64,
    ):
        with pytest.raises(ValueError, match="are not a delta, or are damaged"):
            loads(wrong)


def test_a_stream_that_claims_more_than_belongs_there_is_not_unpacked() -> None:
    """A zstandard frame states its unpacked size, and so much memory would be allocated."""
    lying = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    claims = Encoded("packed", 100, 2, 100, (lying, lying))
    with pytest.raises(ValueError, match="16777216 bytes, but must have 100 to 100"):
        apply(claims, torch.zeros(100, dtype=torch.int16))
    with pytest.raises(
        ValueError, match="of 100 words of 2 bytes changed, raw, in 1 streams of 2 bytes"
    ):
        Encoded("raw", 100, 2, 100, (b"ab",))
    beyond = encode(torch.tensor([0] * 99 + [1], dtype=torch.int16).repeat(9))
    with pytest.raises(ValueError, match="position 899 is outside a tensor of 800"):
        apply(replace(beyond, words=800), torch.zeros(800, dtype=torch.int16))


def test_deltas_of_parts_change_their_parts_only() -> None:
    before = {name: torch.randn(5, 3).to(dtype) for name, dtype in zip("abc", PARTED, strict=True)}
    after = {name: tensor + 1 for name, tensor in before.items()}
    weights = {name: tensor.clone() for name, tensor in before.items()}
    for rows in (slice(0, 3), slice(3, 5), slice(5, 5)):
        whole_rows = {name: words(after[name]).numel() // 5 for name in after}
        starts = {name: rows.start * width for name, width in whole_rows.items()}
        old, new = ({n: t[rows] for n, t in each.items()} for each in (before, after))
        encoded = {name: encode(words(old[name]) ^ words(new[name])) for name in new}
        part = loads(dumps(Delta(1, 2, checksum(new), encoded, starts)))
        assert part.starts == starts
        untouched = bits({name: tensor[rows.stop :] for name, tensor in weights.items()})
        advance(weights, part)
        assert bits({name: tensor[rows.stop :] for name, tensor in weights.items()}) == untouched
    assert bits(weights) == bits(after)
    for wrong in ({"a": 7}, {"a": -1}, {"a": True}, {"a": "0"}, {"d": 0}):
        with pytest.raises(ValueError, match=r"not a part of a, which has 15|parts of other weigh"):
            advance(weights, Delta(1, 2, 0, {"a": encode(torch.ones(9).int())}, wrong))
    assert bits(weights) == bits(after)


def test_a_delta_that_breaks_half_way_leaves_the_weights_as_they_were() -> None:
    before, after = ramp(1), ramp(2)
    whole = {name: encode(words(before[name]) ^ words(after[name])) for name in after}
    broken = whole | {"still": Encoded("packed", 7, 4, 7, (b"x", b"x", b"x", b"x"))}
    weights = ramp(1)
    with pytest.raises(ValueError, match="a stream "):
        advance(weights, Delta(1, 2, checksum(after), broken))
    assert bits(weights) == bits(before)


def test_a_state_that_is_not_whole_is_refused() -> None:
    store = VersionStore()
    for version in (1, 2, 3):
        store.put(version, ramp(version))
    store.move_to(1)
    sound = store.state()
    moved = {name: tensor + 1 for name, tensor in sound["movable"].items()}
    swapped = sound["shelf"] | {2: sound["shelf"][3], 3: sound["shelf"][2]}
    for wrong, match in (
        ({"shelf": {3: sound["shelf"][3]}}, "not whole"),
        ({"shelf": swapped}, "not whole"),
        ({"versions": [1, 3]}, "not whole"),
        ({"at": 7}, "is of version 7"),
        ({"at": 2}, "is not version 2"),
        ({"movable": moved}, "is not version 1"),
        ({"movable": moved, "checksum": checksum(moved)}, "is not version 1"),
    ):
        with pytest.raises(ValueError, match=match):
            VersionStore().restore(sound | wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_weights_are_a_file_of_their_own_memory(dtype: torch.dtype) -> None:
    """safetensors reads them, tied tensors twice. Contiguous tensors are not copied."""
    own = torch.arange(12).reshape(3, 4).to(dtype)
    tensors = {
        "byte": torch.ones(3, dtype=torch.uint8),
        "own": own,
        "tied": own,
        "turned": own.t(),
        "none": own[:0],
    }
    parts = file_of(tensors)
    read = load(b"".join(parts))
    assert read.keys() == tensors.keys()
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
    assert len(parts[0]) % 8 == 0 and sum(map(len, parts[1:])) == sum(
        tensor.nbytes for tensor in tensors.values()
    )
    before, one = b"".join(parts), torch.ones(3, 4).to(dtype)
    own.copy_(own + one if dtype != torch.bool else ~own)
    assert b"".join(parts) != before


def test_what_safetensors_has_no_name_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w is torch\.complex128, which is not one of .*bfloat16"):
        file_of({"w": torch.zeros(2, dtype=torch.complex128)})


def test_a_tensor_file_that_is_cut_short_or_damaged_is_refused_by_name(tmp_path: Path) -> None:
    """A part that is missing must not be read as zeros, which may be what was written."""
    tensors = {"a": torch.zeros(5), "b": torch.zeros(3, dtype=torch.int64)}
    whole = b"".join(file_of(tensors))
    path = tmp_path / "state.safetensors"
    path.write_bytes(whole)
    read = dict(read_tensors(path))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    huge = b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,9999999999999999]}}'
    cases = {
        whole[:-1]: "a has 19 of its 20 bytes",
        whole[:-25]: "b has 19 of its 24 bytes",
        whole[:40]: "its header has 32 of its",
        whole[:7] + b"\x7f" + whole[8:]: "its header has",
        len(huge).to_bytes(8, "little") + huge: "a has 0 of its 9,999,999,999,999,999 bytes",
        whole[:4]: "error",
        whole.replace(b"[5]", b"[6]"): "6 numbers of F32 do not take 20 bytes",
    }
    for data, match in cases.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"state\.safetensors is not a whole .*{match}"):
            list(read_tensors(path))
