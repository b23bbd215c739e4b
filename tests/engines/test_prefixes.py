"""Test the record of cached prefixes: what an episode's tokens keep, and what is forgotten."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstale.engines import SamplingParams, check_request, prefixes
from unstale.engines.prefixes import CachedPrefixes, EpisodeTokens, add_blocks, hash_blocks


@pytest.mark.costly
@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=6))
def test_tokens_that_grow_have_the_hashes_of_the_whole(parts: list[list[int]]) -> None:
    tokens, whole = EpisodeTokens(), list[int]()
    for part in parts:
        assert add_blocks(tokens, part, hash_blocks(tokens)) == hash_blocks([*whole, *part])
        tokens.extend(part)
        whole += part
        assert hash_blocks(tokens) == hash_blocks(whole)


def test_a_copy_of_an_episodes_tokens_is_a_plain_list() -> None:
    copy = pickle.loads(pickle.dumps(EpisodeTokens([1, 2])))
    assert copy == [1, 2] and type(copy) is list


def test_each_token_is_checked_once_and_a_wrong_one_always() -> None:
    params = SamplingParams(max_tokens=1, stop_tokens=())
    tokens = EpisodeTokens([1, 2])
    assert tokens.unchecked(8) == [1, 2]
    check_request(tokens, params, vocab_size=8)
    assert tokens.unchecked(8) == []
    assert tokens.unchecked(2) == [1, 2]
    tokens.append(9)
    for _ in range(2):
        with pytest.raises(ValueError, match="the model has 0 to 7"):
            check_request(tokens, params, vocab_size=8)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=3)), max_size=30))
def test_adding_only_new_blocks_gives_the_same_sets_as_adding_all(
    grown: list[tuple[int, list[int]]],
) -> None:
    """Four episodes grow by blocks, and begin alike. The sets forget after four blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_MAX_BLOCKS", 8)
        seen = CachedPrefixes()
        newer, older = set[int](), set[int]()
        episodes: list[list[int]] = [[], [], [], []]
        for number, added in grown:
            episodes[number] += [token for token in added for _ in range(prefixes.BLOCK)]
            blocks = hash_blocks(episodes[number])
            seen.add(blocks)
            newer.update(blocks)
            if len(newer) > 4:
                newer, older = set(), newer
            assert (seen._newer, seen._older) == (newer, older)


def test_the_older_half_of_the_prefixes_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_MAX_BLOCKS", 8)
    seen = CachedPrefixes()
    sequences = [hash_blocks(range(first, first + 48)) for first in range(5)]
    for blocks in sequences:
        seen.add(blocks)
        assert seen.length(blocks) == 48
    assert [seen.length(blocks) for blocks in sequences] == [0, 0, 48, 48, 48]
