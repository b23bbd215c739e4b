"""`tree`: episodes that are forked from others of their group, or end early.

With these values of `branch`, finished episodes are forked. B continuations at each of N places
make M (1 + B N) episodes of M (ETTRL, arXiv 2508.11356):

`turn`: before a fixed reply.
`unlikely`: before the N sampled tokens with the lowest `behavior_logp`, for servers.
`peaks`: before the N tokens whose distribution had the largest entropy.

With these values, episodes are forked while they run. After every `every` tokens of a reply, and at
its end, each episode waits until all of the group do. Then a decision is made:

`entropy`: fork before the first token since the last decision whose entropy H is above `threshold`.
`confidence`: fork at this token, with clip(round(w h (1 - C)), 1, w) branches, w = 1 +
`continuations`. h is the mean H over `threshold`, at most 1, and C the mean probability of the
likeliest token. No tree gets more than half of the group (ECHO, arXiv 2602.02150).
`second`: fork before the first token with p2 > `least` and p1 - p2 < `margin`, where p1 and p2 are
the probabilities of the two likeliest tokens. The fork begins with the one that was not sampled, as
FORCED text (LATR).
`tool`: fork after the first `every` tokens of a reply to a tool's result, if
(u + 0.2 dH)(1 - 0.05 l) >= 0.5. u is random and uniform in [0, 1], dH the mean entropy of these
tokens minus that in the first reply, l the number of such forks in succession. With `roots` 1, dH
of the first episode decides that k sigmoid(-0.5 dH) + 1 of the group's k episodes start from the
prompt (AEPO, arXiv 2510.14545).
`none`: never fork.

`prune` ends episodes early at these decisions, without a reward. `mixed` keeps those whose
forecasts of success have a mean near 1/2, and prunes nothing in 1 of 8 decisions (ARRoL). A
forecast is a logistic regression on the entropy and log-probability of an episode's first tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from unstale.config.checks import (
    ConfigError,
    Count,
    Positive,
    PositiveInt,
    Range,
    Section,
    Share,
)
from unstale.config.techniques import Entry, chosen, refuse_slots
from unstale.records import Failure, Fork, Sampled, Trajectory, walk
from unstale.techniques.hooks import Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig
    from unstale.research.techniques.live_tree import LiveTree

REFUSED = {
    "allocator": "which chooses the number of episodes of a group, too",
    "distiller": "which is not built with it, because it gives every episode the same weight",
    "filter": "which may leave out an episode, and with it the tokens that its forks share",
    "limiter": "which counts the replies of an episode from its beginning",
    "recredit": "whose comparisons count a shared reply several times",
    "source": "which stores single episodes",
}
"""Reasons why techniques of some slots (kinds of techniques) cannot be used with trees, by slot."""


Branch = Literal["turn", "unlikely", "peaks", "entropy", "confidence", "second", "tool", "none"]
LIVE: Sequence[str] = ("entropy", "confidence", "second", "tool", "none")
"""Values of `tree.branch` with which episodes are forked or pruned while they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig(Section):
    """Episodes that are forked from others of their group, or pruned."""

    selector: ClassVar[str] = "branch"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = {
        "turn": ["turn"],
        "places": ["unlikely", "peaks"],
        "threshold": ["entropy", "confidence"],
        "least": ["second"],
        "margin": ["second"],
        **dict.fromkeys(("roots", "every", "prune", "spare", "keep", "distance"), LIVE),
    }

    branch: Branch = "turn"
    """The place at which an episode is forked. Finished episodes: before a reply (`turn`), or
    before the tokens that were the least likely (`unlikely`) or had the largest entropy (`peaks`).
    Running episodes: before a token with a large entropy (`entropy`), after tokens with a large
    entropy and a low confidence (`confidence`), at two likely tokens, with the one that was not
    sampled (`second`), after the first tokens of a reply to a tool's result (`tool`), or nowhere
    (`none`).
    """
    turn: Annotated[int, Range(2)] = 2
    """Only for `turn`: the number of the reply (from 1) that the forked episodes sample again. An
    episode with fewer replies is not forked.
    """
    places: PositiveInt = 3
    """Only for `unlikely` and `peaks`: the number of places at which each episode is forked."""
    continuations: PositiveInt = 1
    """Number of forked episodes at each place; for `confidence` the largest number."""
    every: PositiveInt = 32
    """Number of tokens of a reply between two decisions. With `tool`, the only decision comes after
    this number of tokens.
    """
    roots: Count = 0
    """Number of episodes of a group that start from the prompt. 0 is half of `schedule.group_size`,
    or all of it for `none`. With 1, `tool` computes the number from the first episode (AEPO).
    """
    threshold: Positive = 1.0
    """Only for `entropy`: entropy in nats above which a token is forked. For `confidence`: entropy
    that counts as full uncertainty.
    """
    least: Share = 0.1
    """Probability of the second likeliest token above which `second` forks."""
    margin: Share = 0.3
    """Largest difference of the two likeliest tokens' probabilities at which `second` forks."""
    prune: Literal["none", "confidence", "similar", "mixed"] = "none"
    """The episodes that end early, without a reward. `confidence`: those in the lowest quarter of
    their group's confidences at two successive decisions. `similar`: forks whose first tokens
    resemble those of their parent. `mixed`: all but the share `keep` with forecasts of success
    nearest 1/2.
    """
    spare: Share = 0.25
    """Probability with which an episode that `prune` selects continues after all. Its weight is
    then 1 / probability. 0 prunes all, which biases the gradient.
    """
    keep: Share = 0.5
    """Only for `mixed`: share of the episodes that continue."""
    distance: Share = 0.4
    """Only for `similar`: a fork is pruned if its edit distance to its parent, as a share of the
    tokens, is below this.
    """

    @property
    def leaves(self) -> int:
        """The largest number of episodes of one tree: the one that is forked and its forks."""
        return 1 + self.continuations * (1 if self.branch == "turn" else self.places)

    @property
    def is_live(self) -> bool:
        """True if episodes are forked or pruned while they run."""
        return self.branch in LIVE

    @property
    def reads_signals(self) -> bool:
        return self.is_live or self.branch == "peaks"


class Tree:
    """A technique that makes a group of several trees, each with one episode as its trunk."""

    def __init__(self, options: TreeConfig) -> None:
        self._options = options

    def roots(self, group_size: int) -> int:
        return max(1, group_size // self._options.leaves)

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork]:
        options = self._options
        forks: list[Fork] = []
        for trunk in rounds[0] if len(rounds) == 1 else ():
            if isinstance(trunk, Trajectory) and not trunk.branches:
                places = self._places(trunk)
                forks += [Fork(trunk.episode, at) for at in places * options.continuations]
        return forks

    def _places(self, trunk: Trajectory) -> list[int]:
        """Return the places at which an episode is forked, as numbers of tokens before the fork,
        ascending.
        """
        if self._options.branch == "turn":
            wanted = self._options.turn - 1
            return [start for start, _, turn in walk(trunk.pieces) if turn == wanted][:1]
        values: list[tuple[float, int]] = []
        for start, piece, _ in walk(trunk.pieces):
            if isinstance(piece, Sampled):
                row: Sequence[float] = piece.behavior_logp
                if self._options.branch == "peaks":
                    row = [-float(h) for h in piece.signals.entropy] if piece.signals else ()
                values += [(value, start + i) for i, value in enumerate(row)]
        # A fork before the first token would be an episode with its own beginning.
        return sorted(at for _, at in sorted(values[1:])[: self._options.places])


def _check(options: TreeConfig, config: RunConfig) -> None:
    size = config.schedule.group_size
    if options.is_live:
        _check_live(_complete(options, config), size)
    elif size % options.leaves or size == options.leaves:
        raise ConfigError(
            f"schedule.group_size must be a multiple of {options.leaves} and at least "
            f"{2 * options.leaves}, got {size}: each tree has {options.leaves} episodes, and a "
            "tree is compared with the others of its group"
        )
    if options.branch == "turn" and options.turn > config.rollout.max_turns:
        raise ConfigError(
            f"tree.turn must be at most rollout.max_turns = {config.rollout.max_turns}, got "
            f"{options.turn}: no episode has that many replies, so that none would be forked"
        )
    _check_techniques(config)
    check_sequences(config)


def _check_live(options: TreeConfig, size: int) -> None:
    fewest = 1 if options.branch == "tool" else 2
    if not fewest <= options.roots <= size:
        raise ConfigError(
            f"tree.roots must be from {fewest} to schedule.group_size ({size}), got "
            f"{options.roots}: a tree is compared with the others of its group"
        )
    if options.prune == "similar" and options.branch == "none":
        raise ConfigError(
            "tree.prune similar compares forks with their parents, and tree.branch none makes no "
            "forks: set --tree.branch second or entropy"
        )


def _complete(options: TreeConfig, config: RunConfig) -> TreeConfig:
    if not options.is_live:
        return options
    size = config.schedule.group_size
    half = size if options.branch == "none" else max(2, size // 2)
    return replace(options, roots=options.roots or half)


def _make(options: TreeConfig) -> Tree | LiveTree:
    if not options.is_live:
        return Tree(options)
    from unstale.research.techniques.live_tree import ForecastTree, LiveTree

    return ForecastTree(options) if options.prune == "mixed" else LiveTree(options)


def _check_techniques(config: RunConfig) -> None:
    """Raise `ConfigError` without `tree_advantage`, or for a technique that refuses forks."""
    entries = chosen(config.techniques)
    if "tree_advantage" not in [entry.name for entry in entries]:
        raise ConfigError(
            "the technique tree needs the technique tree_advantage, which gives a shared token one "
            f"advantage. Set --techniques '{config.techniques} tree_advantage'"
        )
    refuse_slots("tree", REFUSED, config)
    for entry in entries:
        if "trajectory_gradients" in entry.requires:
            raise ConfigError(
                f"the technique tree cannot be used with {entry.name}, which needs one advantage "
                "per episode: remove one of them from --techniques"
            )
        if entry.name == "novelty":
            raise ConfigError(
                "the technique tree cannot be used with novelty, which compares the probabilities "
                "of whole sequences under two policies: remove one of them from --techniques"
            )


def refuse_kept_sets(technique: str, config: RunConfig) -> None:
    """Raise `ConfigError` if sampling is restricted to part of the vocabulary (such as top-k).

    Such samples have no log-probability in another context, which REWRITTEN text needs.
    """
    if config.engine.truncated_by:
        raise ConfigError(
            f"the technique {technique} is impossible with {config.engine.truncated_by}, because "
            "text that was drawn from kept sets has no log-probability in another context. Sample "
            "from the whole vocabulary"
        )


def check_sequences(config: RunConfig, technique: str = "tree") -> None:
    """Raise `ConfigError` for options that need whole sequences, which forks do not have."""
    objective = config.objective
    if objective.loss_aggregation == "sequence_mean":
        raise ConfigError(
            f"the technique {technique} needs another objective.loss_aggregation than "
            "sequence_mean: a forked episode has only the end of a sequence. Set "
            "objective.loss_aggregation action_tokens"
        )
    if config.trainer.routing_replay:
        raise ConfigError(
            f"the technique {technique} needs trainer.routing_replay = false, got true: a forked "
            "episode has no record of the experts of its beginning"
        )
    over_tokens = (
        objective.ratio_unit != "token"
        or "sequence" in objective.inputs
        or objective.opsm_threshold
        or any(entry.slot in ("ratio", "controller") for entry in chosen(config.techniques))
    )
    if over_tokens and config.engine.truncated_by:
        raise ConfigError(
            f"the technique {technique} needs sampling from the whole vocabulary if a ratio "
            f"pi / pi_old is taken over several tokens, got {config.engine.truncated_by}: not "
            "built, because a forked episode has no kept sets of its beginning"
        )
    correction = config.correction
    if (
        config.old_logps.needs.inline
        and (correction.unit != "token" or correction.token_veto_threshold)
        and config.engine.truncated_by
    ):
        raise ConfigError(
            f"the technique {technique} needs sampling from the whole vocabulary if the route "
            f"{config.old_logps.route} is corrected over several tokens (correction.unit or "
            f"correction.token_veto_threshold), got {config.engine.truncated_by}: not built, "
            "because the route scores a forked episode's beginning in every training pass, without "
            "its kept sets"
        )


_PLACES = {
    "turn": "before reply {turn}, if it has that many",
    "unlikely": "before each of its {places} least likely tokens (a biased choice)",
    "peaks": "before each of its {places} tokens with the largest entropy (a biased choice)",
    "entropy": "while it runs, before a token with an entropy above {threshold:g} nats",
    "confidence": "while it runs, where entropy is large and confidence low",
    "second": "while it runs, with the other one of two likely tokens (a biased choice)",
    "tool": "while it runs, after the first {every} tokens of replies to tools, by their entropy",
}


def _describe(options: TreeConfig) -> str:
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    told = "no episode is forked"
    if options.branch != "none":
        place = _PLACES[options.branch].format(**values)
        told = f"each episode is forked {place}, into {options.continuations} more at each place"
    if options.prune != "none":
        chance = f"each survives with probability {options.spare:g} and the inverse as weight"
        told += f"; those chosen by `{options.prune}` end early: "
        told += chance if options.spare else "all of them, which biases the gradient"
    return f"{told}; a token that several episodes share is trained on once"


_MEASURED = """
The tokens of a tree against those of independent episodes depend on the length of the shared
beginning ([measured](trees.md#cost)). With exact values of all trees of a small problem (three
binary tokens), the variance of the gradient times its cost is that of independent episodes if the
shared beginning costs as much as four tokens, and no better below that: trees pay for long
beginnings, not by a better gradient.

Groups of 8 of scripted replies (`tests/techniques/test_live_tree.py`): `second` with `similar` and
`spare` 0 gives 55 different replies to 1,000 tokens, sampling 38, where the text after a choice
depends on it. `mixed` with `keep` 0.5 and `spare` 0 leaves 153 of 200 groups mixed with 64% of the
tokens of 8 episodes, where the first four tokens show the chance of success; 4 episodes at random
leave 130. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="tree",
    slot="strategy",
    rows=(5, 12, 14, 30, 43, 55),
    makes=_make,
    options=TreeConfig,
    changes=frozenset({"count"}),
    describe=_describe,
    requires=frozenset({"siblings"}),
    check=_check,
    complete=_complete,
    signals=lambda options: options.reads_signals,
    forks_after_turns=True,
    use="Episodes have a long beginning that is expensive to sample, such as many tool calls, or "
    "most of them show early that they fail. Use it with `tree_advantage`.",
    measured=_MEASURED,
    exactness="A shared token belongs to the episode that sampled it: it has one `behavior_logp`, "
    "one version, one old log-probability and one loss, so D and S do not change. A ratio over "
    "several tokens (units, vetoes, `gspo`, `minpro`) counts it in every episode that has it. KL "
    "and entropy terms weight a token by 1 / branches at each fork before it, and do not know of "
    "pruning. With `tree_advantage.rule loo`, `turn`, `entropy`, `confidence`, `tool` and pruning "
    "with a `spare` above 0 do not change the mean of the gradient, because they look only at "
    "tokens before the place. `unlikely`, `peaks`, `second` and `spare 0` do, and so does "
    "`roots 1`, by the number of trees.",
)
