"""The version store.

Pinned: what comes back is what was published, bit for bit; exactly the live versions and the newest are kept; a
version never changes; a missing one is an error with numbers.
"""

import pytest
import torch

from afterimage.versions import VersionStore


def odd_bits() -> dict[str, torch.Tensor]:
    """NaN payloads, -0.0, denormals, infinities, in two dtypes."""
    words = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x00000001, 0x7F800000, 0x3F800000], dtype=torch.int64)
    narrow = torch.tensor([0x7FC1, -0x8000, 0x0001, 0x7F80], dtype=torch.int16)
    return {"a": words.to(torch.int32).view(torch.float32), "b": narrow.view(torch.bfloat16).reshape(2, 2)}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_what_comes_back_is_what_was_published_bit_for_bit() -> None:
    store, tensors = VersionStore(), odd_bits()
    store.put(4, tensors)
    expected = {name: bits(tensor) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.fill_(7.0)  # the trainer goes on
    back = store.tensors(4)
    assert {name: bits(tensor) for name, tensor in back.items()} == expected
    assert back["b"].dtype == torch.bfloat16 and back["b"].shape == (2, 2)


def test_exactly_the_live_versions_and_the_newest_are_kept() -> None:
    store = VersionStore()
    for version in range(5):
        store.put(version, {"w": torch.full((3,), float(version))})
    store.keep({1, 3, 9})
    assert store.versions == (1, 3, 4)
    assert store.bytes == 3 * 3 * 4
    store.keep(())
    assert store.versions == (4,)


def test_a_missing_version_is_an_error_with_numbers() -> None:
    store = VersionStore()
    store.put(2, {"w": torch.zeros(1)})
    with pytest.raises(LookupError, match=r"version 1 is gone, kept \[2\]"):
        store.tensors(1)


def test_a_version_never_changes() -> None:
    store, tensors = VersionStore(), odd_bits()
    store.put(0, tensors)
    store.put(0, odd_bits())  # the same bits, NaN and all
    with pytest.raises(ValueError, match=r"version 0 is published already, with other weights: \['a'\]"):
        store.put(0, tensors | {"a": tensors["a"].clone().fill_(0.0)})
    with pytest.raises(ValueError, match=r"\['b'\]"):
        store.put(0, {"a": tensors["a"]})


def test_a_store_goes_on_from_its_state() -> None:
    store = VersionStore()
    store.put(1, odd_bits())
    store.put(2, {"w": torch.ones(2)})
    other = VersionStore()
    other.restore(store.state())
    assert other.versions == (1, 2)
    assert bits(other.tensors(1)["a"]) == bits(odd_bits()["a"])
