"""Routes to old log-probabilities: their options, and what each declares about itself.

A route is one file of `unstale.old_logps`. Its class of options is a subclass of `OldLogpsConfig`
that also declares its needs, costs, meaning and documentation. Help, the linter, the planner, the
audit, recipes and docs read these declarations. Nothing here imports torch.
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
    """`logps` reads `now`, which takes a forward pass of the current weights per batch."""
    inline: bool = False
    """`logps` depends on `now` and the batch alone, and is called in every training pass."""
    snapshots: bool = False
    """It keeps the weights of every live version, as deltas in main memory.

    A batch without a token of the newest version may then be scored before that is `published`.
    """
    resident_models: int = 0
    """Additional models in memory."""
    averages: int = 0
    """Float32 copies of the weights."""
    closing: bool = False
    """`closing` is called before each optimizer step that ends a version. Generation is paused."""
    idle: bool = False
    """`idle` is called while the trainer waits for episodes."""
    own_process: bool = False
    """Its models and forward passes are in another process."""
    forwards: Forwards = "none"
    """Forward passes per batch: none, one, or one per version over the sequences that hold it."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The proxy that replaces the old policy, and the resulting meaning of D and S."""

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
    """Return the names of the routes, and the options of each that not all routes have."""
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
    """Allow settings that the linter refuses because a ratio is always 1, as a baseline."""

    makes: ClassVar[Any]
    """The class of the route, made from a scorer."""
    docs: ClassVar[RouteDocs]
    requires: ClassVar[Mapping[str, Any]] = {}
    """Other options, by full name, that a run with this route needs."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """Options of the route in its recipe."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Options of the route that cannot change when a run is resumed, and why."""
    to_free_s: ClassVar[str] = ""
    """Options that keep S from being always 1, for the linter's fix."""
    exactness: ClassVar[str] = "no: a stand-in (--audit.share 0.05 measures how wrong)"
    """The share of tokens with an exact old log-probability, unless it is all."""

    def __new__(cls, route: str = "", **options: Any) -> "OldLogpsConfig":
        """Choose the class of the route. Raises `ConfigError` for an unknown route or option."""
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
        """True if every clean token gets the trainer's log-probability at its version."""
        return False

    @property
    def partly_exact(self) -> bool:
        """True if it aims at exact values, for all tokens or a share of them."""
        return self.exact

    @property
    def decay(self) -> float | None:
        """The fixed decay of its average; None without an average or if the decay varies."""
        return None

    @property
    def resets(self) -> bool:
        """True if its average is reset when too few tokens are kept."""
        return False

    @property
    def copies_limit_gb(self) -> float:
        """The memory limit for full copies of versions in GB; 0 has no limit."""
        return 0.0

    @property
    def shares_deltas(self) -> bool:
        """True if the deltas between versions that it keeps can be published."""
        return False

    def updates_per_version(self, run: "RunConfig") -> int:
        """Return how often its average is updated from one version to the next."""
        return 1

    def weight_of_now(self, run: "RunConfig") -> float | None:
        """Return the weight of the current policy in the proxy.

        None if it differs between tokens, or if the proxy is no mixture of mu and pi.
        """
        return None

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
        """Return these settings with other values, of another route too."""
        return OldLogpsConfig(**{"route": self.route, **self.changed(), **changes})

    def __str__(self) -> str:
        """Return the route and the options that differ from their defaults.

        >>> print(OldLogpsConfig(route="ewma_prox", beta=0.75))
        ewma_prox beta=0.75
        """
        return " ".join(
            [self.route, *(f"{name}={value}" for name, value in self.changed().items())]
        )


class ExactSpec(OldLogpsConfig):
    """A route that gives every clean token its exact old log-probability."""

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
    """Return the meaning of a moving average of the weights."""
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
    """Return the age, in versions, that an average of fixed decay tends to."""
    assert spec.decay is not None, spec
    return spec.decay / (1 - spec.decay) / spec.updates_per_version(run)


def live_versions(run: "RunConfig") -> int:
    """Return the number of versions whose tokens can be waiting at the same time."""
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
    """Forget a route."""
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
    """Return the routes that are exact for every clean token, with any options."""
    return [
        name for name, spec in routes().items() if spec().exact and not hasattr(spec, "fallback")
    ]
