"""Search trees over whole answers: places of nodes, their rewards, and the best of a group."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.durability.journal import Journal, check
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
    assert grown(search, first, second, [answer(4, "e", 0.0)]) == []


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


CHECK = SearchConfig().requests[0]


def test_an_answer_of_another_policy_is_a_place_of_the_tree(tmp_path: Path) -> None:
    one, other = agent(tmp_path, "one"), agent(tmp_path, "other", number=30)
    grown(one, [answer(0, "low", 0.0), answer(1, "high", 1.0)])
    notes = set()
    for number in range(60):
        for fork in grown(other, [answer(100 + 32 * number, "no", 0.0)]):
            notes |= {fork.note.removesuffix(f"\n\n{CHECK}")} if fork else set()
    assert {f"{OTHER}high", f"{OTHER}low"} <= notes
    assert "\n\nAn earlier answer was:\nno" in notes


def test_parents_and_siblings_of_other_policies_count_in_the_reward(tmp_path: Path) -> None:
    """A foreign parent of 1/2 has children 1 and 0: 1.375 and -0.375, as with an own parent."""
    one, other = agent(tmp_path, "one"), agent(tmp_path, "other")
    grown(one, [answer(0, "half", 0.5)])
    said = Fork(3, 0, note=f"{OTHER}half\n\n{CHECK}")
    children = [answer(4, "a", 1.0, said), answer(5, "b", 0.0, said)]
    nodes = [answer(3, "no", 0.0), *children]

    def rewards(search: Search, *nodes: Trajectory) -> list[float]:
        context = replace(CONTEXT, metrics={})
        (changed,) = search.reward([Group(TASK, nodes)], context)
        assert context.metrics["search/other_share"] == float(search is other)
        return [each.reward for each in changed.trajectories]

    assert rewards(other, *nodes) == [0.0, 1.375, -0.375]
    assert rewards(other, *nodes[:2]) == [0.0, 1.25], "without siblings, only its parent counts"
    grown(other, nodes[:1], children)
    own = answer(1, "c", 1.0, Fork(0, 0, note=f"\n\nAn earlier answer was:\nhalf\n\n{CHECK}"))
    assert rewards(one, answer(0, "half", 0.5), own) == [0.5, 1.25], "beside the children of other"
    third = agent(tmp_path, "third")
    grown(one, [answer(0, "half", 0.5)], [own])
    context = replace(CONTEXT, metrics={})
    (changed,) = third.reward([Group(TASK, (answer(7, "d", 1.0, said),))], context)
    assert changed.trajectories[0].reward == pytest.approx(1 + 0.5 * (1 - (0.25 + 1 / 3)))


def test_a_resumed_group_has_the_same_draws_though_the_tree_has_grown(tmp_path: Path) -> None:
    one, other = agent(tmp_path, "one"), agent(tmp_path, "other")
    grown(one, [answer(50, "theirs", 0.5)])
    rounds = [[answer(0, "own", 0.5)]]
    before = []
    for number in range(1, 4):
        before.append(grown(other, *rounds))
        rounds.append([answer(number, f"own{number}", 0.5, *before[-1])])
    grown(one, *([answer(60 + i, f"more{i}", 1.0)] for i in range(8)))
    resumed = agent(tmp_path, "other")
    assert [grown(resumed, *rounds[:i]) for i in (1, 2, 3)] == before
    changed = [[answer(0, "own", 0.4)]]
    assert grown(resumed, *changed) != () and grown(resumed, *rounds[:1]) == before[0]


def tree_of(
    search: Search, seed: int, answer_to: Callable[[str], tuple[str, float]]
) -> list[float]:
    """Let a search make a group. Return the rewards. `answer_to` is the policy."""
    nodes: list[Trajectory] = []
    rounds: list[list[Trajectory]] = []
    forks: Sequence[Fork | None] = (None,)
    while forks:
        rounds.append([])
        for fork in forks:
            earlier = fork.note.split(" was:\n")[1][:POSITIONS] if fork else "b" * POSITIONS
            node = answer(seed * 8 + len(nodes), *answer_to(earlier), fork)
            nodes.append(replace(node, seed=seed * 100 + len(nodes)))
            rounds[-1].append(nodes[-1])
        forks = grown(search, *rounds)
    return [each.reward for each in nodes]


def test_an_agent_with_better_rewards_gets_more_of_the_draws(tmp_path: Path) -> None:
    """Each run makes the answers that are drawn for its own policy, and leaves the others."""
    made = {"good": 0, "bad": 0}
    for seed in range(10):
        pair = {name: agent(tmp_path / str(seed), name) for name in made}
        for visit in range(3):
            for name, search in pair.items():
                text = (f"{name}{seed}{visit}...."[:POSITIONS], float(name == "good"))
                rewards = tree_of(search, visit * 1001 + seed, lambda _, text=text: text)
                made[name] += len(rewards) - 1 if visit else 0
    assert made["good"] > 10 * made["bad"] > 0, made


@pytest.mark.costly
def test_policies_with_different_skills_reach_more_in_a_common_tree(tmp_path: Path) -> None:
    """One repairs the even positions, the other one the odd ones."""

    def repaired(fixes: range, random: Random) -> Callable[[str], tuple[str, float]]:
        def repair(earlier: str) -> tuple[str, float]:
            text = [*earlier]
            for place in fixes:
                text[place] = "a" if text[place] == "a" else random.choice(WORDS)
            return "".join(text), opened("".join(text))

        return repair

    found: dict[str, list[float]] = {"apart": [], "common": []}
    number = dict.fromkeys(found, 0)
    even, odd = range(0, POSITIONS, 2), range(1, POSITIONS, 2)
    for seed in range(40):
        for name in found:
            folder = tmp_path / f"{name}{seed}"
            x, y = (agent(folder / (who if name == "apart" else ""), who) for who in ("x", "y"))
            rewards = []
            for search, fixes, place in (
                (x, even, seed),
                (y, odd, seed + 1000),
                (x, even, seed + 2001),
            ):
                rewards += tree_of(search, place, repaired(fixes, Random(place)))
            found[name].append(max(rewards))
            number[name] += len(rewards)
    means = {name: round(fmean(values), 2) for name, values in found.items()}
    assert (means, number) == ({"apart": 0.44, "common": 0.52}, {"apart": 960, "common": 888})


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


@pytest.mark.usefixtures("forked_children")
@pytest.mark.costly
def test_two_runs_with_one_folder_train_their_policies_on_one_tree(tmp_path: Path) -> None:
    """The second run improves answers of the first one, and the first one, resumed, its answers."""
    save_tiny(tmp_path / "model")
    config = tiny_run(tmp_path / "model", tmp_path, max_steps=2)
    config = replace(config, schedule=replace(config.schedule, group_size=6))
    shared = {"techniques": "search", "deterministic": False, "search.folder": str(tmp_path / "x")}
    shared |= {"search.roles": "w4", "search.first": 1}
    one = override(config, {**shared, "search.node": "one", "name": "one"})
    other = override(config, {**shared, "search.node": "other", "name": "other", "max_steps": 8})
    runs = [session.train(each, console=quiet()) for each in (one, other)]
    runs.append(session.resume(runs[0].folder, replace(one, max_steps=8), console=quiet()))
    for run in runs[1:]:
        assert {row["old_logps/exact_share"] for row in run.metrics} == {1.0}
        assert max(row["search/other_share"] for row in run.metrics) > 0
        assert max(row["trainer/grad_norm"] for row in run.metrics) > 0
        assert run.metrics[-1]["search/lost"] == 0
        with Journal.read(run.folder) as reader:
            assert check(reader) == []
    assert {path.name.partition(".")[0] for path in (tmp_path / "x").glob("*/*.json")} == {
        "one",
        "other",
    }
