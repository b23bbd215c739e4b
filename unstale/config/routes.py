"""The options and declarations of old-logit routes. Importing it does not import torch.

A route is a method to obtain `old_logp`: the trainer's log-probability of each token under the
weights that sampled it. Each route is one file of `unstale/old_logps`. It declares its options,
needs, costs and documentation in a subclass of `OldLogpsConfig`. The command line's help, the
linter, the planner, the audit, recipes and docs read these declarations.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from unstale.config.checks import ConfigError, OneOf, Section, unknown_option

if TYPE_CHECKING:
    from unstale.config import RunConfig

ROUTES_PACKAGE = "unstale.old_logps"

Forwards = Literal["none", "one", "versions"]

ALWAYS_ONE = "1 by construction"
WHOLE_RATIO = "the whole ratio: numerics and learning in one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a route needs from the training loop, and what it costs."""

    now: bool = False
    """True if `logps` uses its argument `now`, which costs a forward pass of the current weights
    per batch.
    """
    inline: bool = False
    """True if the values depend on the weights of each training pass. `logps` is then called in
    every pass, on its sequences, and not once per batch.
    """
    snapshots: bool = False
    """True if the route keeps past versions of the weights, as differences between versions. A
    batch without tokens of the newest version may then be scored before `published` is called for
    that version, unless `trained_weights` is set.
    """
    resident_models: int = 0
    """Number of additional models that the route holds in memory."""
    trained_weights: bool = False
    """True if the route puts past versions into the trained model for a moment to score with them.
    """
    averages: int = 0
    """Number of moving averages of the weights that the route holds, each a float32 copy."""
    closing: bool = False
    """True if generation must be paused and `closing` called before the weights of a version
    change.
    """
    idle: bool = False
    """True if the method `idle` must be called while the trainer waits for episodes."""
    whole_batch: bool = False
    """True if `logps` must be called with the whole batch, not with some groups of it."""
    own_process: bool = False
    """True if the route's models are in another process, which computes its forward passes."""
    forwards: Forwards = "none"
    """Forward passes per batch that a route needs: none, one, or one for each version in the batch.
    """

    def placed(self, placement: str) -> "Needs":
        """Return the needs of a route with a second model, for its option `placement`."""
        if placement == "twin":
            return self
        return replace(self, resident_models=0, trained_weights=True)


@dataclass(frozen=True, slots=True)
class Meaning:
    """The policy that a route uses as the old policy pi_old, and what the two ratios then contain.

    The discrepancy D is pi_old / mu, where mu is the engine's policy that sampled the token. The
    staleness ratio S is pi / pi_old, where pi is the current policy.
    """

    symbol: str
    policy: str
    d: str
    s: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDocs:
    """A description of a route: a row of the table in docs/old-logps.md, a sentence for reports."""

    policy: str
    """The policy, or its weights, that the route uses as the old policy."""
    exact: str
    holds: str
    costs: str
    choose: str
    """The situation in which a user should choose the route."""
    report: str


def _own_options() -> dict[str, set[str]]:
    """Return the names of all routes, each with its options that not every route has."""
    common = {"route", "baseline"}
    return {
        name: {option.name for option in fields(spec)} - common for name, spec in routes().items()
    }


@dataclass(frozen=True, kw_only=True)
class OldLogpsConfig(Section):
    """The method (route) to obtain old log-probabilities. See docs/old-logps.md.

    `OldLogpsConfig(route="ewma_prox", beta=0.75)` returns an instance of that route's class.
    """

    selector: ClassVar[str] = "route"

    route: Annotated[str, OneOf(_own_options)] = "snapshot_old"
    """Method by which old log-probabilities are computed. The exact ones are `snapshot_old`,
    `old_logit_model`, `interrupt_sync`, and `eager` with the fallback `snapshot_old` (the default)
    or `interrupt_sync`.
    """
    baseline: bool = False
    """Allow a route that makes a ratio always 1 or delays the clip, for use as a baseline."""

    makes: ClassVar[Any]
    """The class that computes the old log-probabilities. It is called with a scorer."""
    docs: ClassVar[RouteDocs]
    requires: ClassVar[Mapping[str, Any]] = {}
    """Options by full name, with the values that a run must have to use this route."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """Options of this route that differ from their defaults in its recipe."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Options of this route that must not change when a run is resumed: name -> reason."""
    to_free_s: ClassVar[Mapping[str, Any]] = {}
    """Options by full name, with values that let the staleness ratio S differ from 1. The linter
    suggests them where S would always be 1.
    """
    exactness: ClassVar[str] = "no: a stand-in (--audit.share 0.05 measures how wrong)"
    """The linter's answer to the question whether the route is exact, unless it is a plain yes."""

    def __new__(cls, route: str = "", **options: Any) -> "OldLogpsConfig":
        """Make an instance of the class of the route `route`.

        Raises `ConfigError` for an unknown route or an option that the route lacks.
        """
        if cls is OldLogpsConfig:
            chosen = route or cls.route
            OneOf(_own_options).check("old_logps.route", chosen)
            cls = routes()[chosen]
        elif route and route != cls.route:
            raise ConfigError(
                f"the route is {cls.route}: change it with with_options(route={route!r})"
            )
        known = [option.name for option in fields(cls)]
        for name in options:
            if name in known:
                continue
            if owners := cls.readers(name):
                raise ConfigError(
                    f"old_logps.{name} is an option of {', '.join(owners)}; "
                    f"old_logps.route is {cls.route}"
                )
            raise ConfigError(unknown_option(f"old_logps.{name}"))
        return object.__new__(cls)

    @property
    def needs(self) -> Needs:
        needs: Needs = self.makes.needs
        return needs

    @property
    def exact(self) -> bool:
        """True if every value is the trainer's log-probability under the weights that sampled.

        Tokens sampled while the engine kept the cache of older weights are excepted.
        """
        return False

    @property
    def partly_exact(self) -> bool:
        """True if the route gives exact values to all tokens, or to some of them."""
        return self.exact

    @property
    def decay(self) -> float | None:
        """The decay of the route's moving average. None if there is none or its decay varies."""
        return None

    @property
    def resets(self) -> bool:
        """True if the route restarts its moving average when the correction keeps few tokens."""
        return False

    @property
    def copies_limit_gb(self) -> float:
        """The memory limit, in GB, for full copies of past weights. 0 means no limit."""
        return 0.0

    @property
    def shares_deltas(self) -> bool:
        """True if the route keeps differences between versions that engines could also load."""
        return False

    @property
    def scoring_ranks(self) -> int:
        """The number of ranks besides the trainer's that score, in a run with trainer ranks."""
        return 0

    def updates_per_version(self, run: "RunConfig") -> int:
        """Return how often the route updates its moving average while one version is current."""
        return 1

    def weight_of_now(self, run: "RunConfig") -> float | None:
        """Return the weight of the current policy pi in a route that mixes pi and mu.

        mu is the engine's policy that sampled the token. None if the route does not mix them, or if
        the weight differs between tokens.
        """
        return None

    def s_of(self, ratio: float, run: "RunConfig") -> float:
        """Return the staleness ratio S of a token of the largest lag.

        `ratio` is the token's whole ratio pi / mu = D S. The default is `ratio` itself: all
        staleness is in S. An approximate route may leave a part of it in D.
        """
        return ratio

    def meaning(self, run: "RunConfig") -> Meaning:
        raise NotImplementedError

    def variants(self, alphas: Sequence[float]) -> "list[OldLogpsConfig]":
        """Return more settings of this route that `unstale audit` compares.

        `alphas` are the weights of the current policy to try, for routes that mix two policies.
        """
        return []

    def make(self, scorer: Any, *, lockstep: bool) -> Any:
        """Create the object that computes old log-probabilities with a scorer.

        With `lockstep` its results do not depend on the speed of another process.
        """
        return self.makes(scorer)

    def make_on_rank(self, scorer: Any, *, lockstep: bool) -> Any:
        """Create the part of the route that each trainer rank has. It is the whole route, unless
        the route has `scoring_ranks`.
        """
        return self.make(scorer, lockstep=lockstep)

    @classmethod
    def classes(cls) -> "Sequence[type[OldLogpsConfig]]":
        return [OldLogpsConfig, *routes().values()]

    def changed(self) -> dict[str, Any]:
        """Return the options, by name, that differ from their defaults."""
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.name != "route" and getattr(self, option.name) != option.default
        }

    def with_options(self, **changes: Any) -> Any:
        """Return these settings with other values. The route may change, too.

        An option that the new route lacks is dropped if it has its default. Otherwise a
        `ConfigError` is raised.
        """
        values = {"route": self.route, **self.changed(), **changes}
        defaults = {
            (field.name, field.default) for spec in routes().values() for field in fields(spec)
        }
        spec = routes().get(values["route"], OldLogpsConfig)
        known = {field.name for field in fields(spec)}
        return OldLogpsConfig(
            **{
                name: value
                for name, value in values.items()
                if name in known or (name, value) not in defaults
            }
        )

    def __str__(self) -> str:
        """Return the route's name and the options that differ from their defaults.

        >>> print(OldLogpsConfig(route="ewma_prox", beta=0.75))
        ewma_prox beta=0.75
        """
        return " ".join(
            [self.route, *(f"{name}={value}" for name, value in self.changed().items())]
        )


class ExactSpec(OldLogpsConfig):
    """Options of an exact route: values are log-probabilities under the weights that sampled."""

    @property
    def exact(self) -> bool:
        return True

    def cost(self, run: "RunConfig") -> str:
        raise NotImplementedError

    def meaning(self, run: "RunConfig") -> Meaning:
        fresh = run.schedule.staleness_bound == 0 and run.trainer.minibatches_per_batch == 1
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
    """Describe the old policy and both ratios of a route that uses a moving average of weights.

    `age` says in words how old the average is, and `averages` is the number of averages.
    `placement` is the route's option.
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
    """Return the age, in versions, that a moving average with fixed decay tends to."""
    assert spec.decay is not None, spec
    return spec.decay / (1 - spec.decay) / spec.updates_per_version(run)


def live_versions(run: "RunConfig") -> int:
    """Return the largest number of versions whose tokens wait for training at the same time."""
    return run.schedule.staleness_bound + 1


Spec = TypeVar("Spec", bound=type[OldLogpsConfig])

_registered: dict[str, type[OldLogpsConfig]] = {}
_exact: dict[type[OldLogpsConfig], bool] = {}
"""The routes that were asked for: True if one is exact with all settings of its options."""


def register_route(spec: Spec) -> Spec:
    """Register the options class of a route under its name. Used as a decorator."""
    name = str(spec.route)
    if _registered.setdefault(name, spec).__module__ != spec.__module__:
        raise ValueError(f"route {name} is registered already, by {_registered[name].__module__}")
    _registered[name] = spec
    return spec


def unregister_route(name: str) -> None:
    """Remove a route from the registry. Undoes `register_route`."""
    del _registered[name]


@cache
def _import_routes() -> None:
    """Import every module of `unstale.old_logps`, so that each route is registered."""
    package = importlib.import_module(ROUTES_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            importlib.import_module(f"{ROUTES_PACKAGE}.{module.name}")


def routes() -> dict[str, type[OldLogpsConfig]]:
    """Return the options class of every route, by name: exact routes first, then alphabetically."""
    _import_routes()
    exact = {name for name, spec in _registered.items() if issubclass(spec, ExactSpec)}
    return {
        name: _registered[name] for name in [*sorted(exact), *sorted(_registered.keys() - exact)]
    }


def exact_routes() -> list[str]:
    """Return the names of the routes that are exact with all settings of their options."""
    return [name for name, spec in routes().items() if _is_exact(spec)]


def _is_exact(spec: type[OldLogpsConfig]) -> bool:
    if spec not in _exact:
        _exact[spec] = spec().exact and not hasattr(spec, "fallback")
    return _exact[spec]
