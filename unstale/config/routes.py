"""The options and declarations of routes. Importing it does not import torch.

A route is a way to get the trainer's log-probability of each token under the weights that sampled
it. It is one file of `unstale.old_logps`, with a subclass of `OldLogpsConfig` that declares its
options, needs, costs and documentation. Help, the linter, the planner, the audit, recipes and docs
read these declarations.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from unstale.config.checks import ConfigError, OneOf, Section, nearest

if TYPE_CHECKING:
    from unstale.config import RunConfig

ROUTES_PACKAGE = "unstale.old_logps"

Forwards = Literal["none", "one", "versions"]

ALWAYS_ONE = "1 by construction"
WHOLE_RATIO = "the whole ratio: numerics and learning in one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The needs and costs of a route."""

    now: bool = False
    """`logps` reads the argument `now`: a forward pass of the current weights per batch."""
    inline: bool = False
    """`logps` needs no other weights than the current ones. It is called in every training pass."""
    snapshots: bool = False
    """The route keeps the weights of every version that waiting tokens have, as deltas.

    A batch without a token of the newest version may then be scored before that is `published`.
    """
    resident_models: int = 0
    """Additional models in memory."""
    averages: int = 0
    """Float32 copies of the weights."""
    closing: bool = False
    """Before an optimizer step that ends a version, generation is paused for a `closing` call."""
    idle: bool = False
    """True if the route's method `idle` must be called while the trainer waits for episodes."""
    own_process: bool = False
    """The route's models and forward passes are in another process."""
    forwards: Forwards = "none"
    """Forward passes per batch: none, one, or one per version over sequences with its tokens."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The policy that a route takes for the old policy pi_old, and the meaning of both ratios.

    D is pi_old / mu, where mu sampled the token. S is pi / pi_old, where pi is the policy now.
    """

    symbol: str
    policy: str
    d: str
    s: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDocs:
    """A row of the table in docs/old-logps.md, and a sentence for reports."""

    policy: str
    """The weights or the policy that replace the old policy."""
    exact: str
    holds: str
    costs: str
    choose: str
    """When to choose it."""
    report: str


def _own_options() -> dict[str, set[str]]:
    """Return each route by name, with the options that only some routes have."""
    common = {"route", "baseline"}
    return {
        name: {option.name for option in fields(spec)} - common for name, spec in routes().items()
    }


@dataclass(frozen=True, kw_only=True)
class OldLogpsConfig(Section):
    """The route to the trainer's log-probability at the sampling version. See docs/old-logps.md.

    `OldLogpsConfig(route="ewma_prox", beta=0.75)` makes an instance of that route's class.
    """

    selector: ClassVar[str] = "route"

    route: Annotated[str, OneOf(_own_options)] = "snapshot_old"
    """Route by name. Exact: `snapshot_old`, `old_logit_model`, `interrupt_sync`."""
    baseline: bool = False
    """Allow, as a baseline, a ratio that is always 1 or a clip that acts later than it says."""

    makes: ClassVar[Any]
    """The class of the route, made from a scorer."""
    docs: ClassVar[RouteDocs]
    requires: ClassVar[Mapping[str, Any]] = {}
    """Other options, by full name, that a run with this route needs."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """Options of the route in its recipe."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Options of the route that cannot change when a run is resumed, and why."""
    to_free_s: ClassVar[Mapping[str, Any]] = {}
    """Options, by full name, with which S is not always 1. The linter suggests them."""
    exactness: ClassVar[str] = "no: a stand-in (--audit.share 0.05 measures how wrong)"
    """Answer to "is it exact?" in the linter's page, if the answer is not a plain yes."""

    def __new__(cls, route: str = "", **options: Any) -> "OldLogpsConfig":
        """Make an instance of the route's class. Raises `ConfigError` for an unknown option."""
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
            raise ConfigError(f"unknown option old_logps.{name}{nearest(name, known)}")
        return object.__new__(cls)

    @property
    def needs(self) -> Needs:
        needs: Needs = self.makes.needs
        return needs

    @property
    def exact(self) -> bool:
        """True if every token gets the trainer's log-probability under the weights that sampled it.

        Tokens sampled while weights changed are excepted."""
        return False

    @property
    def partly_exact(self) -> bool:
        """True if the route gives exact values to all tokens or to a share of them."""
        return self.exact

    @property
    def decay(self) -> float | None:
        """The fixed decay of the route's average. None without an average or if it varies."""
        return None

    @property
    def resets(self) -> bool:
        """True if the route resets its average when the correction keeps too few tokens."""
        return False

    @property
    def copies_limit_gb(self) -> float:
        """The memory limit for full copies of versions in GB; 0 has no limit."""
        return 0.0

    @property
    def shares_deltas(self) -> bool:
        """True if the route keeps weight deltas that can be published to engines."""
        return False

    def updates_per_version(self, run: "RunConfig") -> int:
        """Return how often the route's average is updated from one version to the next."""
        return 1

    def weight_of_now(self, run: "RunConfig") -> float | None:
        """Return the weight of the current policy pi in the route's mixture of pi and mu.

        None if it differs between tokens, or if the route does not mix the two.
        """
        return None

    def s_of(self, ratio: float, run: "RunConfig") -> float:
        """Return S of a token of the largest lag, from pi / mu.

        By default all of it, as for a route whose D contains no staleness.
        """
        return ratio

    def meaning(self, run: "RunConfig") -> Meaning:
        raise NotImplementedError

    def variants(self, alphas: Sequence[float]) -> "list[OldLogpsConfig]":
        """Return further settings of this route for `unstale audit`."""
        return []

    def make(self, scorer: Any, *, lockstep: bool) -> Any:
        """Make the route. With `lockstep` nothing depends on the speed of another process."""
        return self.makes(scorer)

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
        """Return these settings with other values. `route` may change too.

        An option that the route lacks is ignored if it has its default: this resets it.
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
        """Return the route and the options that differ from their defaults.

        >>> print(OldLogpsConfig(route="ewma_prox", beta=0.75))
        ewma_prox beta=0.75
        """
        return " ".join(
            [self.route, *(f"{name}={value}" for name, value in self.changed().items())]
        )


class ExactSpec(OldLogpsConfig):
    """A route with exact values: log-probabilities under the weights that sampled each token."""

    @property
    def exact(self) -> bool:
        return True

    def cost(self, run: "RunConfig") -> str:
        raise NotImplementedError

    def meaning(self, run: "RunConfig") -> Meaning:
        fresh = run.schedule.staleness_bound == 0 and run.trainer.minibatches_per_batch == 1
        stale = "learning alone: one program, two weights"
        return Meaning(
            symbol="pi_v",
            policy="the trainer's own weights of the version that sampled the token",
            d="numerics alone: the same weights, two programs",
            s="learning alone: 1 here, because nothing is stale" if fresh else stale,
            cost=self.cost(run),
        )


def meaning_of_average(run: "RunConfig", *, age: str, averages: int) -> Meaning:
    """Return the meaning of a route that scores with a moving average of the weights."""
    averaged = "adapters, of A and of B apart" if run.trainer.lora_rank else "weights"
    return Meaning(
        symbol="ewma",
        policy=f"a moving average of the {averaged}, whose age in versions {age}",
        d="numerics, and staleness as far as the average misses the token's age",
        s="learning since the average",
        cost=f"{averages} averaged and one movable copy of the weights; "
        "one more forward pass a batch",
    )


def age_of_average(spec: OldLogpsConfig, run: "RunConfig") -> float:
    """Return the age, in versions, that an average with a fixed decay approaches."""
    assert spec.decay is not None, spec
    return spec.decay / (1 - spec.decay) / spec.updates_per_version(run)


def live_versions(run: "RunConfig") -> int:
    """Return the maximum number of versions whose tokens wait for training at the same time."""
    return run.schedule.staleness_bound + 1


Spec = TypeVar("Spec", bound=type[OldLogpsConfig])

_registered: dict[str, type[OldLogpsConfig]] = {}


def register_route(spec: Spec) -> Spec:
    """Register a route under the default of its `route` option. Used as a decorator."""
    name = str(spec.route)
    if _registered.setdefault(name, spec).__module__ != spec.__module__:
        raise ValueError(f"route {name} is registered already, by {_registered[name].__module__}")
    _registered[name] = spec
    return spec


def unregister_route(name: str) -> None:
    """Undo `register_route`."""
    del _registered[name]


@cache
def _import_routes() -> None:
    """Import every module of `unstale.old_logps`, which registers the routes."""
    package = importlib.import_module(ROUTES_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            importlib.import_module(f"{ROUTES_PACKAGE}.{module.name}")


def routes() -> dict[str, type[OldLogpsConfig]]:
    """Return the class of every route by name: exact ones first, then in alphabetical order."""
    _import_routes()
    exact = {name for name, spec in _registered.items() if issubclass(spec, ExactSpec)}
    return {
        name: _registered[name] for name in [*sorted(exact), *sorted(_registered.keys() - exact)]
    }


def exact_routes() -> list[str]:
    """Return the names of the routes that are exact whatever their options."""
    return [
        name for name, spec in routes().items() if spec().exact and not hasattr(spec, "fallback")
    ]
