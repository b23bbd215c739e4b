"""Search trees over whole answers: places of nodes, their rewards, and the best of a group."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.records import ContextPiece, Fork, Group, Sampled, Task, Trajectory
from unstale.research.techniques.search import OTHER, Search, SearchConfig, role_of
from unstale.techniques.hooks import CreditContext

TASK = Task("lock", "train", 0)
CONTEXT = CreditContext(0.0, 0, lambda task: task.key)
POSITIONS, WORDS = 8, "abcd"


class Letters:
    """Texts whose tokens are characters."""

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


TEXTS: Any = Letters()


def answer(number: int, text: str, reward: float, fork: Fork | None = None) -> Trajectory:
    own = Sampled(tuple(map(ord, text)), (-1.0,) * len(text), 0)
    pieces = (ContextPiece((1, 2)), own)
    return Trajectory(pieces, {"r": reward}, "done", TASK, number, number, fork=fork)


def grown(search: Search, *rounds: Sequence[Trajectory]) -> Sequence[Fork | None]:
    return asyncio.run(search.forks(rounds, TEXTS))


def improves(number: int) -> Fork:
    return Fork(number, 0, note="an answer")


def test_the_reward_of_an_improvement_is_that_of_the_paper() -> None:
    """Parent 1/2, children 1 and 0: 1.375 and -0.375, with the rewards of the environment."""
    children = [answer(1, "b", 1.0, improves(0)), answer(2, "c", 0.0, improves(0))]
    group = Group(TASK, (answer(0, "a", 0.5), *children))
    (changed,) = Search(SearchConfig()).reward([group], CONTEXT)
    assert [each.reward for each in changed.trajectories] == [0.5, 1.375, -0.375]
    single = Group(TASK, group.trajectories[:2])
    (changed,) = Search(SearchConfig()).reward([single], CONTEXT)
    assert changed.trajectories[1].reward == 1.25, "without siblings, only its parent counts"
    assert CONTEXT.metrics["search/improvement_mean"] == 0.5


def test_the_prompt_of_a_node_ends_with_the_answer_that_it_improves_and_a_request() -> None:
    options = SearchConfig(roles="Check it.|Again.", first=1, number=7)
    found = set()
    for seed in range(20):
        fork = grown(Search(options), [replace(answer(3, "no", 0.0), seed=seed)])[0]
        if fork is None:
            continue
        assert (fork.parent, fork.at, fork.text, fork.writes) == (3, 0, (), False)
        found.add(fork.note)
        assert role_of(answer(4, "x", 0.0, fork), options.requests) in (0, 1)
    earlier = "\n\nAn earlier answer was:\nno\n\n"
    assert found == {f"{earlier}Check it.", f"{earlier}Again."}


def test_a_group_ends_when_it_has_its_number_of_answers() -> None:
    search = Search(SearchConfig(number=3))
    first = [answer(0, "a", 0.5), answer(1, "b", 0.0)]
    second = [answer(2, "c", 0.0), answer(3, "d", 0.0)]
    assert len(grown(search, first)) == 2 and len(grown(search, first, second)) == 1
    assert grown(search, first, second, [answer(4, "e", 0.0)]) == ()


def test_nodes_are_added_where_rewards_are_high() -> None:
    search = Search(SearchConfig(first=2, number=1, at_once=1))
    good, bad = answer(0, "good", 1.0), answer(1, "bad", 0.0)
    parents: list[Any] = []
    for seed in range(200):
        (fork,) = grown(search, [replace(good, seed=seed), bad])
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
    search = Search(SearchConfig(number=6))
    for seed in range(100):
        random = Random(seed)
        nodes: list[Trajectory] = []
        rounds: list[list[Trajectory]] = []
        forks: Sequence[Fork | None] = (None, None)
        while forks:
            rounds.append([])
            for fork in forks:
                text = drawn(random)
                if fork is not None:
                    parent = next(each for each in nodes if each.episode == fork.parent)
                    text = improved(TEXTS.text(parent.sampled[0].tokens), random)
                node = answer(len(nodes), text, opened(text), fork)
                nodes.append(replace(node, seed=seed * 100 + len(nodes)))
                rounds[-1].append(nodes[-1])
            forks = grown(search, *rounds)
        assert len(nodes) == 8
        best["search"].append(max(each.reward for each in nodes))
        best["plain"].append(max(opened(drawn(random)) for _ in range(8)))
    found = {name: round(fmean(values), 2) for name, values in best.items()}
    assert found == {"search": 0.67, "plain": 0.48}


def agent(folder: Path, name: str, **options: Any) -> Search:
    values = {"first": 1, "number": 7, "at_once": 1, "folder": str(folder), "node": name}
    return Search(SearchConfig(**{**values, **options}))


def test_an_answer_of_another_policy_is_a_place_of_the_tree(tmp_path: Path) -> None:
    one, other = agent(tmp_path, "one"), agent(tmp_path, "other")
    grown(one, [answer(0, "low", 0.0), answer(1, "high", 1.0)])
    notes = set()
    for seed in range(40):
        (fork,) = grown(other, [replace(answer(3, "no", 0.0), seed=seed)])
        notes |= {fork.note.partition("\n\n" + SearchConfig().requests[0])[0]} if fork else set()
    earlier = "\n\nAn earlier answer was:\nno"
    assert {note for note in notes if note.startswith(OTHER)} == {
        f"{OTHER}high",
        f"{OTHER}high\n\n{SearchConfig().requests[1]}",
    }, "the best one of a round"
    assert any(note.startswith(earlier) for note in notes)
    said = Fork(3, 0, note=f"{OTHER}high\n\n{SearchConfig().requests[0]}")
    nodes = [answer(3, "no", 0.0), answer(4, "a", 1.0, said), answer(5, "b", 0.0, said)]
    context = replace(CONTEXT, metrics={})
    (changed,) = other.reward([Group(TASK, tuple(nodes))], context)
    assert [each.reward for each in changed.trajectories] == [0.0, 1.5, -0.5], "no parent's reward"
    assert context.metrics["search/other_share"] == 1
    (changed,) = other.reward([Group(TASK, tuple(nodes[:2]))], context)
    assert changed.trajectories[1].reward == 1.0, "nothing to compare with"


def best_of(search: Search, fixes: Sequence[int], seed: int) -> float:
    """Return the best share of right positions in a group of 8. The policy repairs `fixes`."""
    random = Random(seed)
    nodes: list[Trajectory] = []
    rounds: list[list[Trajectory]] = []
    forks: Sequence[Fork | None] = (None,)
    while forks:
        rounds.append([])
        for fork in forks:
            text = ["b"] * POSITIONS
            if fork is not None:
                text = [*fork.note.split(" was:\n")[1][:POSITIONS]]
            for place in fixes:
                text[place] = "a" if text[place] == "a" else random.choice(WORDS)
            node = answer(len(nodes), "".join(text), opened("".join(text)), fork)
            nodes.append(replace(node, seed=seed * 100 + len(nodes)))
            rounds[-1].append(nodes[-1])
        forks = grown(search, *rounds)
    return max(each.reward for each in nodes)


@pytest.mark.costly
def test_policies_with_different_skills_reach_more_in_a_common_tree(tmp_path: Path) -> None:
    """One repairs the even positions, the other one the odd ones."""
    found: dict[str, list[float]] = {"apart": [], "common": []}
    for seed in range(40):
        for name in found:
            folder = tmp_path / f"{name}{seed}"
            pair = [agent(folder / (who if name == "apart" else ""), who) for who in ("x", "y")]
            even, odd = range(0, POSITIONS, 2), range(1, POSITIONS, 2)
            best = [best_of(pair[0], even, seed), best_of(pair[1], odd, seed + 1000)]
            found[name].append(max([*best, best_of(pair[0], even, seed + 2000)]))
    means = {name: round(fmean(values), 2) for name, values in found.items()}
    assert means == {"apart": 0.44, "common": 0.6}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"search.folder": "x"}, "search.folder and search.node are given together"),
        (
            {"search.folder": "x", "search.node": "y", "deterministic": True},
            "deterministic must be false with search.folder",
        ),
        ({"search.first": 9}, "must be at most schedule.group_size"),
        ({"search.roles": " | "}, "search.roles must have a request"),
        ({"techniques": "search replay"}, "cannot be used with replay"),
    ],
)
def test_what_a_search_lacks_is_refused_with_the_reason(
    options: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        override(RunConfig(recipe="x"), {"techniques": "search"} | options)
