"""The options of routes and what is known about each. Importing this does not import torch.

A route is a method to obtain `old_logp`: the trainer's log-probability of each token under the
weights that sampled it, or an approximation. Each route is one file of `unstale/old_logps`. It
declares its options, needs, costs and documentation in a subclass of `OldLogpsConfig`. The command
line's help, the linter, the planner, the audit, recipes and docs read these classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from unstale.config.checks import OneOf
from unstale.config.plugins import added_names
from unstale.config.variants import VariantSection

if TYPE_CHECKING:
    from unstale.config import RunConfig

Forwards = Literal["none", "one", "versions"]

ALWAYS_ONE = "1 by construction"
WHOLE_RATIO = "the whole ratio: numerics and learning in one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The requirements of a route (a method to compute `old_logp`): what the training loop must
    provide, and the resources that it takes.
    """

    now: bool = False
    """True if the method `logps` of the route (method to compute `old_logp`) uses its argument
    `now`: the log-probabilities under the current weights. They take one forward pass per batch.
    """
    inline: bool = False
    """True if old log-probabilities depend on the weights of each training pass. The route's method
    `logps` is then called in every pass, on the sequences of that pass, and not once per batch.
    """
    snapshots: bool = False
    """True if the route (method to compute `old_logp`) keeps past versions of the weights, as
    differences between versions. Unless `trained_weights` is set, it can then compute `old_logp` of
    a batch before the newest version is published, if that version sampled none of the tokens.
    """
    resident_models: int = 0
    """Number of models, besides the trained one, that the route (method to compute `old_logp`)
    keeps in memory.
    """
    trained_weights: bool = False
    """True if the route (method to compute `old_logp`) loads past versions into the trained model
    while it computes log-probabilities with them.
    """
    averages: int = 0
    """Number of moving averages of the weights that the route (method to compute `old_logp`) keeps.
    Each is a float32 copy.
    """
    whole_versions: bool = False
    """True if the copies of the weights that `averages` counts are past versions instead. Each
    publication replaces one.
    """
    closing: bool = False
    """True if generation must be paused, and the route's method `before_update` be called, before
    an optimizer step changes the weights.
    """
    idle: bool = False
    """True if the route's method `score_while_idle` must be called while the trainer waits for
    episodes. Unless `snapshots` is set, `before_update` is then called before an optimizer step
    changes the weights.
    """
    whole_batch: bool = False
    """True if the route's method `logps`, which returns `old_logp`, needs all groups of a batch in
    one call.
    """
    own_process: bool = False
    """True if the models that compute `old_logp` are in another process."""
    forwards: Forwards = "none"
    """Number of forward passes per batch for `old_logp`: none, one, or one for each version that
    sampled tokens of the batch.
    """

    @property
    def scores_before_update(self) -> bool:
        """True if the route's method `before_update` must be called. The route keeps no past
        weights, so it must compute `old_logp` before the weights change.
        """
        return self.closing or (self.idle and not self.snapshots)

    def placed(self, placement: str) -> "Needs":
        """Return these needs as they are for a value of the option `placement`.

        With `twin`, the route has a second model. With `own`, the trained model takes its place.
        """
        if placement == "twin":
            return self
        return replace(self, resident_models=0, trained_weights=True)


@dataclass(frozen=True, slots=True)
class Meaning:
    """Texts on the old policy pi_old of a route, and on what D and S contain with it.

    The discrepancy is D = pi_old / mu, where mu is the engine's policy that sampled the token. The
    staleness ratio is S = pi / pi_old, where pi is the current policy.
    """

    symbol: str
    policy: str
    d: str
    s: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDocs:
    """The texts about a route (a method to compute `old_logp`) in docs/old-logps.md."""

    policy: str
    """The policy, or its weights, under which the route computes `old_logp`."""
    exact: str
    holds: str
    costs: str
    choose: str
    """The situation in which a user should choose this route."""


@dataclass(frozen=True, kw_only=True)
class OldLogpsConfig(VariantSection):
    """The method (route) to obtain old log-probabilities. See docs/old-logps.md.

    `OldLogpsConfig(route="ewma_prox", beta=0.75)` returns an instance of that route's class.

    A new route is a subclass that sets `route` and `docs`, defines `meaning`, and sets `makes` to a
    subclass of `OldLogps`, or defines `make` and `needs`.
    """

    selector: ClassVar[str] = "route"
    package: ClassVar[str] = "unstale.old_logps"
    registered: ClassVar[dict[str, "type[OldLogpsConfig]"]] = {}
    group: ClassVar[str] = "unstale.routes"

    route: Annotated[str, OneOf(lambda: OldLogpsConfig.own_options())] = "snapshot_old"
    """Method by which old log-probabilities are computed. These routes are exact: `snapshot_old`
    (the default), `old_logit_model`, `interrupt_sync`, and `eager` unless its fallback is
    `ewma_prox`.
    """
    baseline: bool = False
    """Allow a route that serves only as a baseline in comparisons: it keeps D = pi_old / mu or S =
    pi / pi_old at 1, or leaves so much of pi / mu in D that the clip on S acts late.
    """

    makes: ClassVar[Any]
    """The class that computes old log-probabilities, a subclass of `OldLogps`. Its argument is a
    scorer, the object that runs forward passes.
    """
    docs: ClassVar[RouteDocs]
    requires: ClassVar[Mapping[str, Any]] = {}
    """Options that must have a certain value with this route, by full name, each with this
    value.
    """
    recipe: ClassVar[Mapping[str, Any]] = {}
    """Options that the recipe of this route sets to other values than their defaults."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Options of this route that must not be changed when a run is resumed, each with the
    reason.
    """
    to_free_s: ClassVar[Mapping[str, Any]] = {}
    """Options by full name, with values for which S = pi / pi_old is not always 1. The linter
    suggests them if it would be.
    """
    exactness: ClassVar[str] = "no: a stand-in (--audit.share 0.05 measures how wrong)"
    """The linter's text on whether the old log-probabilities are exact, if the options make this
    route inexact.
    """

    def __new__(cls, route: str = "", **options: Any) -> "OldLogpsConfig":
        return object.__new__(cls.chosen_class(route, options))

    @property
    def needs(self) -> Needs:
        needs: Needs = self.makes.needs
        return needs

    @property
    def exact(self) -> bool:
        """True if each old log-probability is computed under the weights that sampled its token.

        This does not hold for tokens that were sampled with a KV cache of older weights.
        """
        return False

    @property
    def partly_exact(self) -> bool:
        """True if at least some old log-probabilities are computed under the weights that sampled
        the token.
        """
        return self.exact

    @property
    def decay(self) -> float | None:
        """The decay of the moving average of weights that serves as the old policy.

        None if the route has no such average, or its decay varies.
        """
        return None

    @property
    def resets(self) -> bool:
        """True if the moving average of weights starts again when the correction drops many
        tokens.
        """
        return False

    @property
    def shares_deltas(self) -> bool:
        """True if the route keeps differences between weight versions. Engines could load these,
        too.
        """
        return False

    @property
    def scoring_ranks(self) -> int:
        """Number of ranks, besides the trainer's, that only compute old log-probabilities."""
        return 0

    def updates_per_version(self, run: "RunConfig") -> int:
        """Return how often a moving average of the weights is updated before a new version is
        published.
        """
        return 1

    def weight_of_now(self, run: "RunConfig") -> float | None:
        """Return the weight of the current policy pi in the old policy, if that is a mix of pi and
        mu.

        mu is the engine's policy that sampled the token. None if the old policy is not such a mix,
        or if the weight differs between tokens.
        """
        return None

    def s_of(self, ratio: float, run: "RunConfig") -> float:
        """Return S = pi / pi_old of a token with the largest staleness that the run allows.

        `ratio` is the token's pi / mu = D S. The default is `ratio` itself, because all staleness
        is in S. With an approximate route, a part of it may be in D.
        """
        return ratio

    def meaning(self, run: "RunConfig") -> Meaning:
        """Return what D and S are with this route, in words. Each route defines it."""
        raise NotImplementedError

    def variants(self, alphas: Sequence[float]) -> "list[OldLogpsConfig]":
        """Return other settings of this route, which `unstale audit` compares with it.

        `alphas` are weights of the current policy to try, for routes that mix it with another.
        """
        return []

    @classmethod
    def variants_by_name(cls, *, added: bool = True) -> Mapping[str, Any]:
        known = super().variants_by_name(added=added)
        return dict(
            sorted(known.items(), key=lambda item: (not issubclass(item[1], ExactSpec), item[0]))
        )

    def make(self, scorer: Any, *, lockstep: bool) -> Any:
        """Return a new object that computes `old_logp`. `scorer` runs its forward passes.

        If the object has a child process, `lockstep` makes the trainer wait for this process.
        Results then do not depend on its speed.
        """
        return self.makes(scorer)

    def make_on_rank(self, scorer: Any, *, lockstep: bool) -> Any:
        """Return a new object that does a trainer rank's part of computing `old_logp`.

        The result is that of `make`, unless separate ranks compute `old_logp` (`scoring_ranks`).
        """
        return self.make(scorer, lockstep=lockstep)


@dataclass(frozen=True, kw_only=True)
class HasPlacement:
    """The option `placement` of routes that compute with other weights than the trainer's."""

    makes: ClassVar[Any]
    placement: Literal["twin", "own"] = "twin"
    """Which model computes log-probabilities under past versions or averages of the weights: `twin`
    a second model, `own` the trained model, whose own weights are in main memory meanwhile. `own`
    is slower, needs no second model, and keeps averages in main memory.
    """

    @property
    def needs(self) -> Needs:
        return self.makes.needs.placed(self.placement)

    def make(self, scorer: Any, *, lockstep: bool) -> Any:
        return self.makes(scorer, placement=self.placement)


class ExactSpec(OldLogpsConfig):
    """Options of an exact route: it computes `old_logp` under the weights that sampled the
    token.
    """

    @property
    def exact(self) -> bool:
        return True

    def cost(self, run: "RunConfig") -> str:
        raise NotImplementedError

    def meaning(self, run: "RunConfig") -> Meaning:
        fresh = run.schedule.staleness_bound == 0 and run.trainer.steps_per_batch == 1
        stale = "learning alone: one program, two weights"
        return Meaning(
            symbol="pi_old",
            policy="the trainer's own weights of the version that sampled the token",
            d=ALWAYS_ONE
            if run.engine.bitwise
            else "numerics alone: the same weights, two programs",
            s="learning alone: 1 here, because nothing is stale" if fresh else stale,
            cost=self.cost(run),
        )


def meaning_of_average(
    run: "RunConfig", *, age: str, averages: int, placement: str = "twin"
) -> Meaning:
    """Return the texts on a route whose old policy is a moving average of the weights.

    `age` completes the text "whose age in versions ...". `averages` is the number of averages, and
    `placement` the value of the route's option of this name.
    """
    copies = f"{averages} averaged and one movable copy of the weights"
    if placement == "own":
        copies = f"{averages} averaged copies of the weights in main memory"
    averaged = "adapters, of A and of B apart" if run.trainer.lora_rank else "weights"
    return Meaning(
        symbol="ewma",
        policy=f"a moving average of the {averaged}, whose age in versions {age}",
        d="numerics, and staleness as far as the average misses the token's age",
        s="learning since the average",
        cost=f"{copies}; one more forward pass a batch",
    )


def age_of_average(spec: OldLogpsConfig, run: "RunConfig") -> float:
    """Return the mean age, in versions, of the weights in a moving average after many updates.

    The route must have an average with a fixed decay.
    """
    assert spec.decay is not None, spec
    return spec.decay / (1 - spec.decay) / spec.updates_per_version(run)


def live_versions(run: "RunConfig") -> int:
    """Return the largest number of weight versions that have sampled tokens which still wait for
    training.
    """
    return run.schedule.staleness_bound + 1


def routes() -> Mapping[str, type[OldLogpsConfig]]:
    """Return the options class of each route (`old_logp` method) by name, exact ones first."""
    return OldLogpsConfig.variants_by_name()


def route_names() -> list[str]:
    """Return the names of all routes (methods to compute `old_logp`). Plugins are not imported."""
    known = OldLogpsConfig.variants_by_name(added=False)
    return list(dict.fromkeys([*known, *added_names(OldLogpsConfig.group)]))


def exact_routes() -> list[str]:
    """Return the names of the routes whose `old_logp` is exact whatever their options are."""
    return [name for name, spec in routes().items() if _is_exact(spec)]


@cache
def _is_exact(spec: type[OldLogpsConfig]) -> bool:
    return spec().exact and not hasattr(spec, "fallback")
