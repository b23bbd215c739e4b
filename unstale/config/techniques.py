"""The techniques of a run: their declarations, and checks. Importing this does not import torch.

A technique changes one part of training, such as the learning rate of a step. Each technique is one
file of `unstale/techniques` or `unstale/research/techniques`, which declares it in `ENTRY`, or an
entry point of another distribution. The option `techniques` chooses some by name. The options of a
technique are a section with its name, as in `--ess_lr.base 0.5`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from unstale.config.checks import ConfigError, Section
from unstale.config.names import RENAMED_TECHNIQUES, nearest
from unstale.config.plugins import Plugins, declared, missing_annexes

if TYPE_CHECKING:
    from unstale.config import RunConfig

Slot = Literal[
    "sampler",
    "allocator",
    "strategy",
    "source",
    "limiter",
    "reward",
    "filter",
    "estimator",
    "recredit",
    "shaper",
    "ratio",
    "objective",
    "distiller",
    "controller",
    "diagnostic",
]
"""The part of training that a technique changes:

sampler: which task comes next.
allocator: how many episodes a task gets.
strategy: where episodes are forked from others of their group.
source: which stored groups are added to the fresh groups of a batch.
limiter: how long an episode may be, and how long it runs at a time.
reward: the reward of an episode.
filter: which episodes of a group are trained on.
estimator: the advantage of an episode, instead of `advantage.estimator`.
recredit: the advantage of each turn, from the advantages of episodes.
shaper: the advantage of each token.
ratio: the importance ratio of each token.
objective: the loss of each token.
distiller: a divergence from a teacher, which is added to the loss of each token.
controller: the size of an optimizer step.
diagnostic: nothing; the technique adds metrics.
"""
EXCLUSIVE: frozenset[Slot] = frozenset(
    {"sampler", "allocator", "strategy", "limiter", "estimator", "ratio", "objective", "distiller"}
)
"""Slots (kinds of techniques) of which a run may have at most one technique. Several techniques of
another slot act in the order in which the option `techniques` names them.
"""
ON_BATCH: frozenset[Slot] = frozenset(
    {"reward", "filter", "estimator", "recredit", "shaper", "source"}
)
"""Slots (kinds of techniques) whose techniques get the groups of a batch before its gradient is
computed.
"""
Change = Literal["tasks", "count", "turns", "groups", "reward", "advantage", "objective", "step"]
"""The part of training that a technique changes, such as the `count` of episodes of a task, or an
optimizer `step`.
"""
Need = Literal[
    "siblings",
    "reference",
    "entropy",
    "trajectory_gradients",
    "pool",
    "texts",
    "halves",
    "rewards",
]
"""A need of a technique: `siblings` is a group of several episodes, `reference` a copy of the
first policy in memory, `entropy` the entropy of every token (one more forward pass per batch),
`trajectory_gradients` the gradient of every sequence (one more backward pass per sequence), `pool`
a pool of tasks that come again, `texts` a task set with a text of each task, `rewards` the
environment's rewards while a group is sampled, `halves` the gradients of two halves of a step's
groups (one more copy of the gradient in memory).
"""
Evidence = Literal["code", "paper", "notes", "abstract", "own reading"]
"""Where a technique's formula comes from: the authors' code, their paper, notes of others, only the
paper's abstract, or our reading where these leave something open (`own reading`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The declaration of a technique: its name, options, texts and needs."""

    name: str
    """The name in the option `techniques`, which is also the name of the file or entry point, and
    of the section of options.
    """
    slot: Slot
    rows: tuple[int, ...] = ()
    """The numbers of the technique's rows in the table of `unstale techniques --all`."""
    makes: Callable[[Any], Any]
    """A function that returns the technique as an object. Its argument is an instance of the class
    `options`.
    """
    options: type[Section]
    changes: frozenset[Change]
    describe: Callable[[Any], str]
    """A function that returns the linter's sentence on the technique. Its argument is the
    technique's options.
    """
    use: str
    """When to use the technique: one or two sentences."""
    measured: str
    """The effect of the technique that was measured, in Markdown, even if there was none."""
    exactness: str
    """The effect of the technique on the expected gradient, D and S, in one or two sentences for
    the docs.
    """
    requires: frozenset[Need] = frozenset()
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Options of the technique that must not change when a run is resumed, each with the reason."""
    evidence: Evidence = "code"
    by_group: Callable[[Any], bool] = lambda options: False
    """A function that returns True if the technique treats each group of a batch separately, given
    its options. It may then get a part of the batch (`trainer.stream`). Used only for slots in
    `ON_BATCH`.
    """
    check: Callable[[Any, "RunConfig"], None] = lambda options, config: None
    """A function that raises `ConfigError` if the technique cannot be used in a run. Its arguments
    are the technique's options and the run's.
    """
    complete: Callable[[Any, "RunConfig"], Any] = lambda options, config: options
    """A function that returns the technique's options, in which defaults that depend on the run are
    filled in.
    """
    without_labels: bool = False
    """True if the technique replaces the environment's rewards by others that need no solution of
    the task.
    """
    signals: Callable[[Any], bool] = lambda options: False
    """A function that returns True if the technique reads signals, given its options. These are
    figures of the distributions from which the engine drew the tokens, such as their entropy.
    """
    needs_repeats: Callable[[Any], str] = lambda options: ""
    """A function that returns the name of an option of the technique which needs tasks that come
    again (a pool, or a list that repeats). Empty if none does.
    """
    task_methods: Callable[[Any], Sequence[str]] = lambda options: ()
    """A function that returns the names of methods of the task set, given the technique's options.
    The technique needs one of them. Empty if it needs none.
    """

    outside: Callable[[Any], Mapping[str, str]] = lambda options: {}
    """A function from the technique's options to those that name the user's code or an endpoint, by
    name. The command that resumes a run must repeat them.
    """
    forks_after_turns: bool = False
    """True if the technique forks episodes after turns. The states of their environments after each
    turn are then kept until the group ends.
    """

    @property
    def needs(self) -> list[str]:
        """The technique's needs with its default options, as words."""
        methods = " or ".join(f"{each}()" for each in self.task_methods(self.options()))
        return [*sorted(self.requires), *([f"{methods} of the tasks"] if methods else [])]

    @property
    def formula(self) -> str:
        """The docstring of the technique's module in Markdown: what it does, its formula and its
        source.

        A line that begins with a value of an option and a colon becomes an item of a list.
        """
        module = import_module(self.makes.__module__)
        text = (module.__doc__ or "").partition(": ")[2].strip()
        return "\n\n".join(map(_with_items, (text[:1].upper() + text[1:]).split("\n\n")))


ADDED = Plugins("unstale.techniques", Entry)
SECTIONS: set[str] = set()
"""The names of all fields of `RunConfig`, which a technique must not have. The module of
`RunConfig` adds them.
"""


def _with_items(paragraph: str) -> str:
    """Return a paragraph whose lines such as "`mean`: ..." became items of a Markdown list."""
    before, *items = re.split(r"(?:^|\n)(?=`\w+`(?:, `\w+`)*: )", paragraph)
    listed = "\n".join("* " + item.replace("\n", "\n  ") for item in items)
    return "\n\n".join(filter(None, (before, listed)))


@cache
def techniques() -> Mapping[str, Entry]:
    """Return every technique by name, in alphabetical order."""
    own = {entry.name: entry for entry in declared("unstale.techniques", "ENTRY")}
    return dict(sorted({**ADDED.load_all([*own, *SECTIONS, *RENAMED_TECHNIQUES]), **own}.items()))


def chosen(names: str) -> tuple[Entry, ...]:
    """Return the techniques that `names`, the value of the option `techniques`, names, in this
    order.

    Raises `ConfigError` for an unknown name, for a name that occurs twice, and for two techniques
    of one of the slots in `EXCLUSIVE`.
    """
    known = techniques()
    words = names.split()
    for word in words:
        if word in RENAMED_TECHNIQUES:
            raise ConfigError(f"techniques: {word} is now {RENAMED_TECHNIQUES[word]}")
        if word not in known:
            ADDED.load(word)  # raises an error if a broken package adds it
            hint = nearest(word, list(known))
            if "," in word:
                hint = f"; separate the names by spaces: --techniques {names.replace(',', ' ')!r}"
            raise ConfigError(f"techniques cannot have {word!r}{hint}{missing_annexes()}")
        if words.count(word) > 1:
            raise ConfigError(f"techniques has {word} twice, got {names!r}: remove one")
    entries = tuple(known[word] for word in words)
    for slot in sorted(EXCLUSIVE):
        if len(rivals := [entry.name for entry in entries if entry.slot == slot]) > 1:
            raise ConfigError(
                f"techniques has {' and '.join(rivals)}, got {names!r}: each is the {slot} of the "
                "run, which can have one. Keep one of them"
            )
    return entries


def complete_options(names: str, given: Mapping[str, Section]) -> dict[str, Section]:
    """Return the options of each technique in `names`, by technique. `given` has the options of
    some techniques.

    Others get their defaults. Raises `ConfigError` if `given` has a technique that is not in
    `names`.
    """
    entries = chosen(names)
    for name in given:
        if name in RENAMED_TECHNIQUES:
            raise ConfigError(f"technique_options: {name} is now {RENAMED_TECHNIQUES[name]}")
        if name not in [entry.name for entry in entries]:
            both = " ".join([*names.split(), name])
            raise ConfigError(
                f"{name} has options, but is not chosen: techniques is {names!r}. "
                f"Set --techniques '{both}'"
            )
    return {entry.name: given.get(entry.name) or entry.options() for entry in entries}


def check_needs(config: "RunConfig") -> None:
    """Raise `ConfigError` if the run does not meet a need of a chosen technique."""
    size = config.schedule.group_size
    for entry in chosen(config.techniques):
        entry.check(config.technique_options[entry.name], config)
        estimates = entry.slot == "strategy" and "advantage" in entry.changes
        if (estimates or entry.slot == "estimator") and config.advantage != type(
            config.advantage
        )():
            raise ConfigError(
                f"the technique {entry.name} replaces advantage.estimator, got "
                f"{config.advantage.estimator}: leave all options of `advantage` at their defaults"
            )
        if entry.signals(config.technique_options[entry.name]):
            _require_signals(entry.name, config)
        if "pool" in entry.requires and not config.selection.pool:
            raise ConfigError(
                f"the technique {entry.name} needs selection.pool > 0, got 0: it needs "
                "earlier results of a task. Set --selection.pool to the number of tasks"
            )
        if "siblings" in entry.requires and size < 2:
            raise ConfigError(
                f"the technique {entry.name} needs schedule.group_size >= 2, got {size}: it "
                "compares the episodes of a task"
            )
        if "trajectory_gradients" in entry.requires and config.cluster.trainers:
            raise ConfigError(
                f"the technique {entry.name} needs cluster.trainers = 0, got "
                f"{config.cluster.trainers}: ranks do not compute the gradient of one sequence"
            )
        if "halves" in entry.requires and config.cluster.trainers:
            raise ConfigError(
                f"the technique {entry.name} needs cluster.trainers = 0, got "
                f"{config.cluster.trainers}: ranks do not compute the gradient of half a step"
            )
        if "halves" in entry.requires and config.schedule.groups_per_step < 2:
            raise ConfigError(
                f"the technique {entry.name} needs schedule.groups_per_step >= 2, got "
                f"{config.schedule.groups_per_step}: it compares two halves of a step's groups"
            )


def _require_signals(technique: str, config: "RunConfig") -> None:
    if config.engine.backend != "embedded":
        raise ConfigError(
            f"the technique {technique} with these options needs engine.backend = embedded, got "
            f"{config.engine.backend}: not built for servers, which do not return the entropy of a "
            "token's distribution"
        )
    if config.engine.truncated_by:
        raise ConfigError(
            f"the technique {technique} with these options needs sampling from the whole "
            f"vocabulary, got {config.engine.truncated_by}: entropies of kept sets are not built"
        )


def reads_signals(config: "RunConfig") -> bool:
    """Return True if a chosen technique reads signals, figures of the distributions that were
    sampled.
    """
    options = config.technique_options
    return any(entry.signals(options[entry.name]) for entry in chosen(config.techniques))


def require_sequences(config: "RunConfig", size: int, option: str) -> None:
    """Raise `ConfigError` if a batch may have fewer sequences than minibatches.

    `size` is the smallest number of episodes of a group, and `option` the option that sets it.
    """
    fewest = size * config.schedule.groups_per_step
    if config.trainer.minibatches_per_batch > fewest:
        raise ConfigError(
            f"trainer.minibatches_per_batch must be <= {fewest} ({option} * "
            f"schedule.groups_per_step), got {config.trainer.minibatches_per_batch}"
        )


def require_value(
    technique: str, option: str, value: object, allowed: Sequence[str], reason: str
) -> None:
    """Raise `ConfigError` if an option has a value with which `technique` cannot be used.

    `value` is its value, `allowed` are the values that are possible, and `reason` ends the message.
    """
    if value not in allowed:
        *others, last = allowed
        words = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(
            f"the technique {technique} needs {option} = {words}, got {value}: {reason}"
        )


def refuse_slots(technique: str, refused: Mapping[str, str], config: "RunConfig") -> None:
    """Raise `ConfigError` if a chosen technique is of a slot (kind) that `technique` does not
    allow.

    `refused` has these slots, each with the end of the message.
    """
    for entry in chosen(config.techniques):
        if reason := refused.get(entry.slot):
            raise ConfigError(
                f"the technique {technique} cannot be used with {entry.name}, {reason}: remove one "
                "of them from --techniques"
            )


def needs_reference(config: "RunConfig") -> bool:
    """Return True if the trainer must keep a copy of the policy from which the run starts."""
    requires = (entry.requires for entry in chosen(config.techniques))
    return config.objective.kl_coef > 0 or any("reference" in needs for needs in requires)


def needed_methods(config: "RunConfig") -> dict[str, Sequence[str]]:
    """Return technique -> names of methods of the task set, of which the technique needs one."""
    found = {
        entry.name: entry.task_methods(config.technique_options[entry.name])
        for entry in chosen(config.techniques)
    }
    return {name: methods for name, methods in found.items() if methods}


def outside_options(config: "RunConfig") -> dict[str, str]:
    """Return the options of the chosen techniques that name the user's code or an endpoint."""
    return {
        f"{entry.name}.{option}": value
        for entry in chosen(config.techniques)
        for option, value in entry.outside(config.technique_options[entry.name]).items()
    }


def completed_options(config: "RunConfig") -> dict[str, Any]:
    """Return the options of each chosen technique, by name. Defaults that depend on the run are
    filled in.
    """
    options = config.technique_options
    return {
        each.name: each.complete(options[each.name], config) for each in chosen(config.techniques)
    }


def describe(config: "RunConfig") -> Sequence[str]:
    """Return the linter's sentences on the chosen techniques, in their order."""
    known = techniques()
    options = completed_options(config)
    return [f"{name}: {known[name].describe(each)}" for name, each in options.items()]
