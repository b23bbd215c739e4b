"""The techniques that change how long a run takes, in a simulation: `limits`, `segments`, `replay`.

The real code of each technique decides, as in a run. A simulation has no rewards. So each episode
that no limit cuts off counts as a success, and each group has a gradient.
"""

import heapq
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from random import Random
from typing import Any

from unstale.analysis.planner.assignments import value_kinds
from unstale.analysis.planner.workload import EpisodeShape, TurnShape
from unstale.config import ConfigError, RunConfig
from unstale.config.checks import Section
from unstale.config.names import nearest
from unstale.config.techniques import chosen
from unstale.records import (
    NO_BUDGET,
    Batch,
    EpisodeBudget,
    Group,
    GroupRequest,
    ScoredTrajectory,
    Task,
)
from unstale.rollout.segments import Age, BudgetUse
from unstale.techniques.hooks import Outcome
from unstale.techniques.limits import Limits, LimitsConfig, limit_of
from unstale.techniques.replay import ReplayConfig
from unstale.techniques.segments import Segments, SegmentsConfig, complete


@dataclass(frozen=True, slots=True)
class SimulatedTechniques:
    """The options of the techniques of a simulation. None stands for a technique that is not
    used.
    """

    limits: LimitsConfig | None = None
    segments: SegmentsConfig | None = None
    replay: ReplayConfig | None = None

    def __post_init__(self) -> None:
        if self.limits and self.segments:
            raise ConfigError("a run has limits or segments, not both: remove one of them")
        if self.limits and self.limits.scope != "run":
            raise ConfigError(
                f"limits.scope must be run in a simulation, got {self.limits.scope}: simulated "
                "tasks do not come again"
            )
        if self.limits and self.limits.extend:
            raise ConfigError(
                f"limits.extend must be 0 in a simulation, got {self.limits.extend}: texts and "
                "rewards decide which episodes get more turns"
            )
        if self.replay and (self.replay.rule, self.replay.episodes) != ("uniform", "all"):
            raise ConfigError(
                "replay.rule and replay.episodes must be uniform and all in a simulation, got "
                f"{self.replay.rule} and {self.replay.episodes}: rewards decide what the other "
                "values replay. With --like, --techniques '' leaves replay out"
            )

    @property
    def names(self) -> str:
        """The names of the techniques, separated by spaces as in a run's option `techniques`."""
        return " ".join(name for name in _OPTIONS if getattr(self, name))

    def options(self) -> dict[str, Any]:
        """Return the options of a run with these techniques by full name, without default values.

        >>> SimulatedTechniques(replay=ReplayConfig(max_age=9)).options()
        {'techniques': 'replay', 'replay.max_age': 9}
        """
        given: dict[str, Any] = {"techniques": self.names} if self.names else {}
        for name in self.names.split():
            section = getattr(self, name)
            for each in fields(section):
                value = getattr(section, each.name)
                if value != each.default:
                    given[f"{name}.{each.name}"] = value
        return given


NO_TECHNIQUES = SimulatedTechniques()
_OPTIONS: Mapping[str, type[Section]] = {
    "limits": LimitsConfig,
    "segments": SegmentsConfig,
    "replay": ReplayConfig,
}
AGENTMATH_CONTEXT, AGENTMATH_CALLS, AGENTMATH_EPISODES = 96_000, 96, 256
"""Tokens and tool calls of AgentMath's longest episode, and its number of episodes in flight. They
are the defaults of `segments` in a simulation without a recorded run.
"""
_CHANGES = frozenset({"tasks", "count", "turns", "groups"})
"""Values of `Entry.changes`, which names what a technique changes. A technique with one of these
also changes how long a run takes.
"""


def option_kinds() -> dict[str, Any]:
    """Return the types of the options of these techniques by full name, for numbers and for
    `segments.table`.
    """
    kinds = {
        f"{name}.{option}": kind
        for name, section in _OPTIONS.items()
        for option, kind in value_kinds(section).items()
        if kind in (int, float)
    }
    return {**kinds, "segments.table": str}


def choose(names: str, values: Mapping[str, Any]) -> SimulatedTechniques:
    """Return the techniques with these names, which are separated by spaces.

    `values` are options by full name. Raises `ConfigError` for a technique that cannot be
    simulated, and for an option of one that is not chosen.
    """
    for name in names.split():
        if name not in _OPTIONS:
            raise ConfigError(
                f"the technique {name} cannot be simulated{nearest(name, list(_OPTIONS))}"
            )
    for option in values:
        name = option.partition(".")[0]
        if name not in names.split():
            raise ConfigError(f"{option} needs --techniques {name}")
    sections: dict[str, Any] = {
        name: _OPTIONS[name](
            **{
                field.name: values[f"{name}.{field.name}"]
                for field in fields(_OPTIONS[name])
                if f"{name}.{field.name}" in values
            }
        )
        for name in names.split()
    }
    return SimulatedTechniques(**sections)


def of_run(config: RunConfig, techniques: SimulatedTechniques | None) -> SimulatedTechniques:
    """Return the techniques with which a recorded run is simulated: `techniques`, or else its own.

    The run's own limits are left out, because they have cut off the recorded episodes already.
    Raises `ConfigError` for techniques that cannot be simulated with these episodes.
    """
    own = config.technique_options
    if techniques is not None:
        for name in ("limits", "segments"):
            if getattr(techniques, name) and name in own:
                raise ConfigError(
                    f"--techniques cannot have {name} with this run: its {name} have cut off the "
                    f"recorded episodes already. Leave {name} out of --techniques"
                )
        return techniques
    other = [
        each.name
        for each in chosen(config.techniques)
        if each.changes & _CHANGES and each.name not in _OPTIONS
    ]
    if other:
        raise ConfigError(
            f"the run has techniques that cannot be simulated: {', '.join(other)}. Set "
            "--techniques '' to leave out all techniques of the run, or name those to simulate"
        )
    replay, segments = own.get("replay"), own.get("segments")
    if isinstance(segments, SegmentsConfig):
        segments = complete(segments, config)
        segments = replace(segments, table=segments.table.split()[-1])
    assert segments is None or isinstance(segments, SegmentsConfig)
    assert replay is None or isinstance(replay, ReplayConfig)
    return SimulatedTechniques(segments=segments, replay=replay)


class SimulatedLimits:
    """The limits on episodes that techniques set, adapted to the groups that were trained on.

    It has the methods of `unstale.loop.TechniqueHooks`. All advantages are 0.
    """

    max_replay_age = 0
    reads_states = False

    def __init__(self, techniques: SimulatedTechniques) -> None:
        self._limits = Limits(techniques.limits) if techniques.limits else None
        segments = techniques.segments and techniques.segments.within(
            context=AGENTMATH_CONTEXT, calls=AGENTMATH_CALLS, episodes=AGENTMATH_EPISODES
        )
        self._segments = Segments(segments) if segments else None
        self.slots = SimulatedSlots(segments.max_concurrent_episodes) if segments else None
        """The slots for episodes that run in segments. None without segments."""
        self._ended: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        """For each episode of a group: its number of turns, and True if it was cut off."""

    async def requests(self) -> AsyncIterator[GroupRequest]:
        for number in count():
            limits, segments = self._limits, self._segments
            yield GroupRequest(
                number,
                Task("simulated", "train", number),
                0,
                number,
                turn_limit=limits.turn_limit(number, "") if limits else None,
                budget=segments.episode_budget() if segments else NO_BUDGET,
            )

    def shorten(self, shapes: Sequence[EpisodeShape], request: GroupRequest) -> list[EpisodeShape]:
        """Return the episodes of a group, cut off at the limits of its request."""
        if self._limits is None and self._segments is None:
            return list(shapes)
        most = request.turn_limit.turns if request.turn_limit else None
        made = [shorten(shape, most, request.budget) for shape in shapes]
        for cut, whole in zip(made, shapes, strict=True):
            self._ended[request.number].append((len(cut.turns), cut != whole))
        return made

    async def more(self, request: GroupRequest, results: object) -> Sequence[None]:
        return ()

    def rounds(self, request: GroupRequest) -> None: ...

    def read_states(self, groups: Sequence[Group]) -> None: ...

    def credit(
        self, groups: Sequence[Group], *, progress: float, version: int, whole: bool
    ) -> tuple[list[ScoredTrajectory], dict[str, float]]:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        return [ScoredTrajectory(trajectory, (0.0,)) for trajectory in trajectories], {}

    def replayed(self, groups: Sequence[Group], step: int) -> Sequence[Batch]:
        return ()

    def prepared(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        return batch

    def trained(self, groups: Sequence[Group], step: int) -> None:
        outcomes = []
        for group in groups:
            ended = self._ended.pop(group.number, [])
            outcomes.append(
                Outcome(
                    task="",
                    num_batches=step - 1,
                    lag=0,
                    rewards=(1.0,) * len(ended),
                    failures=0,
                    tokens=0,
                    success_turns=tuple(turns for turns, is_cut in ended if not is_cut),
                    turn_limit=group.turn_limit.turns if group.turn_limit else 0,
                    cut_off=sum(is_cut for _, is_cut in ended),
                    budget=group.budget,
                )
            )
        for technique in (self._limits, self._segments):
            if technique is not None:
                technique.observe(outcomes)


def shorten(shape: EpisodeShape, most: int | None, budget: EpisodeBudget) -> EpisodeShape:
    """Return an episode that ends after `most` turns, or when its budget is used up.

    The budget limits tokens and tool calls. Raises `ConfigError` if it leaves no room for a reply.
    """
    budget_use = BudgetUse(budget)
    tokens = shape.prompt
    kept: list[TurnShape] = []
    for turn in shape.turns:
        if len(kept) == most or budget_use.stop(tokens):
            break
        reply = min(turn.reply, budget_use.reply_limit(tokens))
        kept.append(turn._replace(reply=reply))
        budget_use.count(reply)
        budget_use.count_calls(turn.calls)
        tokens += reply + turn.answer
    if not kept:
        raise ConfigError(
            f"a prompt of {shape.prompt} tokens leaves no room for a reply within the "
            f"{budget.context} tokens of segments.table: give larger steps"
        )
    return shape._replace(turns=tuple(kept))


def shorten_groups(
    groups: list[list[EpisodeShape]], options: LimitsConfig | None
) -> list[list[EpisodeShape]]:
    """Return groups of episodes, cut off by the limit on turns that `limits` would choose for them.

    Every `free_every`-th group is left whole. Without `options` all are.
    """
    if options is None:
        return groups
    turns = [len(shape.turns) for group in groups for shape in group]
    most = limit_of(turns, options.quantile)
    cut = [[shorten(shape, most, NO_BUDGET) for shape in group] for group in groups]
    free = range(0, len(groups), options.free_every)
    return [groups[number] if number in free else group for number, group in enumerate(cut)]


class SimulatedSlots:
    """The slots of running episodes, like `rollout.segments.EpisodeSlots`. Older episodes come
    first.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._order = count()
        self._waiting: list[tuple[Age, int, Callable[[], None]]] = []

    def take(self, age: Age, start: Callable[[], None]) -> None:
        """Call `start` as soon as the episode of this age has a slot (permission to run)."""
        if self._free:
            self._free -= 1
            start()
        else:
            heapq.heappush(self._waiting, (age, next(self._order), start))

    def give_back(self) -> None:
        if self._waiting:
            heapq.heappop(self._waiting)[2]()
        else:
            self._free += 1


@dataclass(frozen=True, slots=True)
class _Stored:
    tokens: int
    age: int
    """Staleness of the group's oldest token in the next batch, in versions."""


class SimulatedReplay:
    """The groups that earlier steps were trained on, kept for replay as numbers of tokens."""

    def __init__(self, options: ReplayConfig | None, seed: int) -> None:
        self._options = options
        self._random = Random(seed)
        self._stored: list[_Stored] = []

    def tokens(self, fresh: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens that replayed groups add to a batch. Store its fresh groups.

        `fresh` has, for each fresh group, its tokens and the staleness of its oldest token in
        versions.
        """
        options = self._options
        if options is None:
            return 0
        number = min(options.count(len(fresh)), len(self._stored))
        chosen = self._random.sample(self._stored, number)
        older = [replace(each, age=each.age + 1) for each in self._stored]
        older += [_Stored(tokens, age + 1) for tokens, age in fresh]
        young = [each for each in older if each.age <= options.max_age]
        self._stored = young[-options.capacity :]
        return sum(each.tokens for each in chosen)
