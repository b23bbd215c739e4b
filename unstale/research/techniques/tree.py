"""`tree`: episodes that are forked from others of their group, and share their beginning.

`turn`: each finished episode is forked before a fixed reply. The place does not depend on how the
episode went on, so it adds no bias. `unlikely`: each finished episode is forked before its N
sampled tokens with the lowest `behavior_logp`, which takes the place of the largest entropy. With B
continuations, M roots become M (1 + B N) episodes (arXiv 2508.11356). These places are chosen when
the episode is known, which biases the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from unstale.config.checks import ConfigError, PositiveInt, Range, Section
from unstale.config.techniques import Entry, chosen, refuse_slots
from unstale.records import Failure, Fork, Sampled, Trajectory, walk
from unstale.techniques.hooks import Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig

REFUSED = {
    "allocator": "which chooses the number of episodes of a group, too",
    "distiller": "which gives every episode the same weight",
    "filter": "which may leave out an episode, and with it the tokens that its forks share",
    "limiter": "which counts the replies of an episode from its beginning",
    "recredit": "whose comparisons count a shared reply several times",
    "source": "which stores single episodes",
}
"""Slots whose techniques cannot be used with trees, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig(Section):
    """Episodes that are forked from others of their group (ETTRL, arXiv 2508.11356)."""

    selector: ClassVar[str] = "branch"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = {"turn": ["turn"], "places": ["unlikely"]}

    branch: Literal["turn", "unlikely"] = "turn"
    """The places of forks: before a reply, or before the tokens that were the least likely."""
    turn: Annotated[int, Range(2)] = 2
    """Only for `turn`: the number of the reply that the forked episodes sample anew. An episode
    with fewer replies is not forked.
    """
    places: PositiveInt = 3
    """Only for `unlikely`: the number of places at which each episode is forked."""
    continuations: PositiveInt = 1
    """Number of forked episodes at each place."""

    @property
    def leaves(self) -> int:
        """The largest number of episodes of one tree, with the one that is forked."""
        return 1 + self.continuations * (self.places if self.branch == "unlikely" else 1)


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
        """Return the numbers of tokens before the forks of an episode, in order."""
        if self._options.branch == "turn":
            wanted = self._options.turn - 1
            return [start for start, _, turn in walk(trunk.pieces) if turn == wanted][:1]
        logps: list[tuple[float, int]] = []
        for start, piece, _ in walk(trunk.pieces):
            if isinstance(piece, Sampled):
                logps += [(logp, start + i) for i, logp in enumerate(piece.behavior_logp)]
        # A fork before the first token would be an episode with its own beginning.
        return sorted(at for _, at in sorted(logps[1:])[: self._options.places])


def _check(options: TreeConfig, config: RunConfig) -> None:
    size = config.schedule.group_size
    if size % options.leaves or size == options.leaves:
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


def _check_techniques(config: RunConfig) -> None:
    """Raise `ConfigError` without `tree_advantage`, or for a technique that cannot be used with
    forks.
    """
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


def check_sequences(config: RunConfig, technique: str = "tree") -> None:
    """Refuse what a shared token lacks, or would be counted in several times."""
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
            f"pi / pi_old is taken over several tokens, got {config.engine.truncated_by}: a forked "
            "episode has no kept sets of its beginning"
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
            f"correction.token_veto_threshold), got {config.engine.truncated_by}: the route scores "
            "a forked episode's beginning in every training pass, without its kept sets"
        )


def _describe(options: TreeConfig) -> str:
    if options.branch == "turn":
        place = f"before reply {options.turn}, if it has that many"
    else:
        place = f"before each of its {options.places} least likely tokens (a biased choice)"
    return (
        f"each episode that begins a tree is forked {place}, into {options.continuations} more at "
        "each place; a token that several episodes share is trained on once"
    )


_MEASURED = """
The tokens of a tree against those of independent episodes depend on the length of the shared
beginning. With exact values of all trees of a small problem (three binary tokens), the variance of
the gradient times its cost is that of independent episodes if the shared beginning costs as much as
four tokens, and no better below that: trees pay for long beginnings, not by a better gradient. It
has not been measured on the desks.
"""

ENTRY = Entry(
    name="tree",
    slot="strategy",
    rows=(43,),
    makes=Tree,
    options=TreeConfig,
    changes=frozenset({"count"}),
    describe=_describe,
    requires=frozenset({"siblings"}),
    check=_check,
    use="Episodes have a long beginning that is expensive to sample, such as many tool calls. Use "
    "it with `tree_advantage`.",
    measured=_MEASURED,
    exactness="A shared token belongs to the episode that sampled it: it has one `behavior_logp`, "
    "one version, one old log-probability and one loss, so D and S do not change. A ratio over "
    "several tokens (units, vetoes, `gspo`, `minpro`) counts it in every episode that has it. KL "
    "and entropy terms weight a token by 1 / branches at each fork before it. `branch turn` "
    "does not change the mean of the gradient; `branch unlikely` does (`tree_advantage`). The "
    "paper takes the tokens with the largest entropy.",
)
