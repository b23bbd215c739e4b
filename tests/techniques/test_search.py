"""Search trees over whole answers: places of nodes, their rewards, and the best of a group."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest

from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.records import ContextPiece, Fork, Group, Provenance, Sampled, Task, Trajectory
from unstale.research.techniques.search import Search, SearchConfig, role_of
from unstale.techniques.hooks import CreditContext

TASK = Task("lock", "train", 0)
CONTEXT = CreditContext(0.0, 0, lambda task: task.key)
POSITIONS, WORDS = 8, "abcd"


class LetterWriter:
    """A writer whose tokens are characters."""

    tokens = 0

    async def write(self, instructions: str, seed: int, **texts: str) -> str:
        raise AssertionError("a search writes nothing outside of episodes")

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))


WRITER = LetterWriter()


def answer(number: int, text: str, reward: float, fork: Fork | None = None) -> Trajectory:
    prompt = ContextPiece(WRITER.encode("open"))
    pieces = (
        prompt,
        *(fork.text if fork else ()),
        Sampled(WRITER.encode(text), (-1.0,) * len(text), 0),
    )
    return Trajectory(pieces, {"r": reward}, "done", TASK, number, number, fork=fork)


def test_the_reward_of_an_improvement_is_that_of_the_paper() -> None:
    """Parent 1/2, children 1 and 0: 1.375 and -0.375, with the rewards of the environment."""
    children = [answer(1, "b", 1.0, Fork(0, 4)), answer(2, "c", 0.0, Fork(0, 4))]
    group = Group(TASK, (answer(0, "a", 0.5), *children))
    (changed,) = Search(SearchConfig()).reward([group], CONTEXT)
    assert [each.reward for each in changed.trajectories] == [0.5, 1.375, -0.375]
    single = Group(TASK, group.trajectories[:2])
    (changed,) = Search(SearchConfig()).reward([single], CONTEXT)
    assert changed.trajectories[1].reward == 1.25, "without siblings, only its parent counts"
    assert CONTEXT.metrics["search/improvement_mean"] == 0.5


def test_a_node_begins_with_the_answer_that_it_improves_and_the_request_of_a_role() -> None:
    options = SearchConfig(roles="Check it.|Again.", first=1)
    found = set()
    for seed in range(20):
        fork = Search(options).grow([replace(answer(3, "no", 0.0), seed=seed)], 8, WRITER)[0]
        if fork is None:
            continue
        assert (fork.parent, fork.at) == (3, 4)
        assert fork.text[0].provenance == Provenance.FORCED
        found.add(WRITER.text(fork.text[0].tokens))
        texts = [WRITER.encode("Check it.\n"), WRITER.encode("Again.\n")]
        assert role_of(answer(4, "x", 0.0, fork), texts) in (0, 1)
    assert found == {"An earlier answer: no\nCheck it.\n", "An earlier answer: no\nAgain.\n"}


def test_a_resumed_group_gets_the_nodes_that_it_lacks() -> None:
    search = Search(SearchConfig(at_once=3))
    first = [answer(0, "a", 0.5), answer(1, "b", 0.0)]
    whole = search.grow(first, 8, WRITER)
    assert len(whole) == 3
    begun = [answer(2, "c", 0.0, whole[0])]
    assert list(search.grow([*first, *begun], 8, WRITER)) == list(whole[1:])


def test_nodes_are_added_where_rewards_are_high() -> None:
    search = Search(SearchConfig(first=2, at_once=1))
    good, bad = answer(0, "good", 1.0), answer(1, "bad", 0.0)
    parents: list[Any] = []
    for seed in range(200):
        (fork,) = search.grow([replace(good, seed=seed), bad], 3, WRITER)
        parents.append(fork and fork.parent)
    assert parents.count(0) > 2 * parents.count(1)


def opened(text: str) -> float:
    return fmean(letter == "a" for letter in text)


def test_the_best_of_a_search_is_above_the_best_of_independent_answers() -> None:
    """An improvement keeps the right positions of the answer that it reads."""

    def drawn(random: Random) -> str:
        return "".join(random.choice(WORDS) for _ in range(POSITIONS))

    def improved(text: str, random: Random) -> str:
        return "".join(each if each == "a" else random.choice(WORDS) for each in text)

    best: dict[str, list[float]] = {"search": [], "plain": []}
    search = Search(SearchConfig())
    for seed in range(100):
        random = Random(seed)
        nodes: list[Trajectory] = []
        forks: Sequence[Fork | None] = (None, None)
        while forks:
            for fork in forks:
                text = drawn(random)
                if fork is not None:
                    parent = next(each for each in nodes if each.episode == fork.parent)
                    text = improved(WRITER.text(parent.sampled[0].tokens), random)
                node = answer(len(nodes), text, opened(text), fork)
                nodes.append(replace(node, seed=seed * 100 + len(nodes)))
            forks = search.grow(nodes, 8, WRITER)
        assert len(nodes) == 8
        best["search"].append(max(each.reward for each in nodes))
        best["plain"].append(max(opened(drawn(random)) for _ in range(8)))
    found = {name: round(fmean(values), 2) for name, values in best.items()}
    assert found == {"search": 0.69, "plain": 0.48}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"search.first": 9}, "search.first must be at most schedule.group_size"),
        ({"search.roles": " | "}, "search.roles must have a request"),
        ({"techniques": "search replay"}, "cannot be used with replay"),
        ({"engine.top_p": 0.9}, "search cannot be used with engine.top_p"),
    ],
)
def test_what_a_search_lacks_is_refused_with_the_reason(
    options: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        override(RunConfig(recipe="x"), {"techniques": "search"} | options)
