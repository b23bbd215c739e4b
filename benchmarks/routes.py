"""Measure the cost and the error of each route to log-probabilities under the sampling weights.

    python -m benchmarks.routes          # under 8 minutes on two cores; `--help` for smaller sizes

A random Qwen3 is trained by the project's own trainer: bfloat16 forward weights, float32 masters,
AdamW. Full copies of its versions give the true values. The versions are then published to one
route after the other, with trajectories of several versions. There are four tables: the size of the
version store by learning rate; exact routes against `ewma_prox` (the best average) in alternating
repeats; every route; and the time that each route takes in steps of the real loop
(`benchmarks/route_steps.py`).
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import route_steps
from benchmarks.tables import CONSOLE, columns, picture, rotated, row, spread, write
from unstale.algorithms import audit
from unstale.builders import build_old_logps
from unstale.config import (
    CorrectionConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.config.routes import routes
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.old_logps import OldLogps
from unstale.old_logps.rollout import RolloutRoute
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import (
    Batch,
    ContextPiece,
    PendingPiece,
    Piece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
    walk,
)
from unstale.testing import tiny_policy
from unstale.trainer.local import LocalTrainer
from unstale.weights.bits import words
from unstale.weights.store import VersionStore

LIVE = 5
WARM = 3
"""Versions that are not measured, after which every route has the history that it needs."""
RATES = (1e-6, 3e-6, 1e-5, 1e-4)
RL_RATE = 1e-5
"""The highest usual learning rate for RL of all weights."""
STORE = (
    "lr",
    "words changed a step",
    "resident copies",
    "bitwise exact",
    "written as (tensors)",
    "encode s",
    "walk s",
)
ROUTE = (
    "route",
    "extra time a step",
    "idle time",
    "resident copies",
    "movable models",
    "exact share",
)
Goal = tuple[str, float, float]
"""`(name, measured value, highest allowed value)`."""
Plan = Sequence[tuple[float, int | None]]
"""`(share of a trajectory's tokens, versions before the newest that sampled them)`.

None marks tokens that the environment gave.
"""
MIXED: Plan = ((0.2, None), (0.3, 2), (0.1, None), (0.2, 1), (0.2, 0))
CUT: Plan = ((0.1, None), (0.1, 2), (0.8, 1))
EVEN: Plan = ((0.1, None), (0.4, 2), (0.5, 1))

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the model and of a batch."""

    folder: Path
    """Folder of the model, once `make` has written it."""
    layers: int
    hidden: int
    vocab: int
    sequences: int
    length: int
    warm_steps: int

    def make(self) -> None:
        """Write a model with random weights, the same each time."""
        config = Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=self.hidden // 8,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        Policy(Qwen3ForCausalLM(config), tiny_policy().tokenizer).save(self.folder)

    def policy(self, dtype: str = "bfloat16") -> Policy:
        return Policy.load(self.folder, dtype=dtype)

    def scorer(self, policy: Policy) -> LocalScorer:
        return LocalScorer(policy, 1.0, TrainerConfig().max_tokens_per_microbatch)

    @property
    def options(self) -> dict[str, Any]:
        """Return further options of the trainer."""
        return {}


@dataclass(frozen=True, slots=True)
class History:
    """Full copies of consecutive versions, and the seconds of the steps between them."""

    rate: float
    copies: list[Weights]
    step_s: list[float]


def make_trainer(size: Size, rate: float, num_steps: int) -> LocalTrainer:
    """Return the project's trainer, with a plain loss and float32 masters of bfloat16 weights."""
    config = RunConfig(
        recipe="",
        max_steps=num_steps,
        correction=CorrectionConfig(mode="none"),
        objective=ObjectiveConfig(loss_type="none"),
        trainer=TrainerConfig(dtype="bfloat16", rounding="nearest", lr=rate, **size.options),
    )
    return LocalTrainer(size.policy(), config, RolloutRoute())


def train(size: Size, rate: float, versions: int) -> History:
    """Train one step per version on random text with random advantages.

    A few steps before the first version let Adam's averages settle.
    """
    trainer = make_trainer(size, rate, size.warm_steps + versions)
    policy = trainer.policy
    scorer = size.scorer(policy)
    history = History(rate, [], [])
    for number in range(size.warm_steps + versions):
        if number >= size.warm_steps:
            history.copies.append(
                {name: tensor.clone() for name, tensor in policy.weights().items()}
            )
        batch = collate(
            episodes(size, MIXED, version=policy.version, first=number * size.sequences)
        )
        batch.behavior_logp.copy_(scorer.score(batch, batch.sampled).logp)
        with timed(history.step_s):
            trainer.backward(trainer.prepare(batch)[0])
            trainer.step()
        policy.version += 1
    return history


def episodes(size: Size, plan: Plan, *, version: int, first: int) -> list[ScoredTrajectory]:
    """Return random trajectories of a batch that is trained on at `version`.

    Siblings have opposite advantages.
    """
    made = []
    for number in range(first, first + size.sequences):
        noise = torch.Generator().manual_seed(number)
        pieces: list[Piece] = []
        for share, age in plan:
            tokens = tuple(
                torch.randint(size.vocab, (round(share * size.length),), generator=noise).tolist()
            )
            own = (
                Sampled(tokens, (-7.0,) * len(tokens), max(0, version - age))
                if age is not None
                else None
            )
            pieces.append(own or ContextPiece(tokens))
        made.append(scored(pieces, number))
    return made


def scored(pieces: Sequence[Piece], number: int) -> ScoredTrajectory:
    """Return a trajectory with an advantage of 1 or -1, by its number."""
    trajectory = Trajectory(
        tuple(pieces),
        {"reward": 0.0},
        "done",
        Task("random", "train", number),
        seed=number,
        episode=number,
    )
    return ScoredTrajectory(trajectory, (1.0 if number % 2 else -1.0,))


def pieces_of(
    batches: Sequence[Sequence[ScoredTrajectory]], version: int
) -> Iterator[PendingPiece]:
    """Return all pieces that `version` samples, as a route receives them."""
    for credited in (credited for batch in batches for credited in batch):
        trajectory = credited.trajectory
        for start, piece, _ in walk(trajectory.pieces):
            if isinstance(piece, Sampled) and piece.version == version:
                yield PendingPiece(
                    trajectory.episode, trajectory.tokens[: start + len(piece.tokens)], start, piece
                )


def past(batches: Sequence[Sequence[ScoredTrajectory]], version: int) -> list[PendingPiece]:
    """Return what earlier versions sampled for the batch of `version` and those after it."""
    waiting = batches[version : version + 3]
    return [piece for each in range(version) for piece in pieces_of(waiting, each)]


def copy_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(words(one[name]), words(two[name])) for name in one
    )


def store_row(history: History) -> tuple[str, float]:
    """Return the version store's row of the table, and how many full copies it is as large as.

    The store holds five live versions. The row has the share of changed weights, the size, and
    whether they are restored exactly.
    """
    store, copies = VersionStore(), history.copies[:LIVE]
    for version, weights in enumerate(copies):
        store.put(version, weights)
    deltas = [store.delta(version) for version in range(1, LIVE)]
    began = time.perf_counter()
    store.move_to(0)
    walk_s = (time.perf_counter() - began) / len(deltas)
    exact = all(same(store.tensors(version), copies[version]) for version in (2, 0, 4, 1, 3))
    total = sum(encoded.words for encoded in deltas[0].tensors.values())
    shares = [
        sum(encoded.changed for encoded in delta.tensors.values()) / total for delta in deltas
    ]
    kinds = Counter(encoded.kind for delta in deltas for encoded in delta.tensors.values())
    chosen = ", ".join(
        f"{kind} {kinds[kind]}" for kind in ("sparse", "packed", "raw") if kinds[kind]
    )
    resident = store.bytes / copy_bytes(copies[0])
    line = (
        f"| {history.rate:g} | {min(shares):.1%} to {max(shares):.1%} | {resident:.3f} | "
        f"{'yes' if exact else 'NO'} | {chosen} | {store.encode_s / len(deltas):.2f} | "
        f"{walk_s:.2f} |"
    )
    return line, resident


@dataclass(slots=True)
class Played:
    """A route's costs for each version, and its values for the last batch."""

    published_s: list[float] = field(default_factory=list)
    logps_s: list[float] = field(default_factory=list)
    closing_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    models: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    exact: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def extra_s(self) -> float:
        steps = zip(self.published_s, self.logps_s, self.closing_s, strict=True)
        return median([sum(step) for step in steps][WARM:])


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    settle()
    began = time.perf_counter()
    yield
    settle()
    into.append(time.perf_counter() - began)


def settle() -> None:
    """Wait until the GPU has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def advance(policy: Policy, history: History, version: int) -> None:
    """Give the policy the weights of a version."""
    policy.load_weights(history.copies[version])
    policy.version = version


def live(version: int) -> range:
    return range(max(0, version - LIVE + 1), version + 1)


def play(
    name: str, size: Size, history: History, batches: Sequence[Sequence[ScoredTrajectory]]
) -> Played:
    """Publish every version to a route, as the loop does, and request one batch at each."""
    policy, played = size.policy(), Played()
    advance(policy, history, 0)
    scorer = size.scorer(policy)
    route = build_old_logps(OldLogpsConfig(route=name), scorer)
    for version in range(len(history.copies)):
        advance(policy, history, version)
        with timed(played.published_s):
            route.before_publish()
            route.on_published(live(version))
        own = list(pieces_of(batches[version : version + 1], version))
        waiting = list(pieces_of(batches[version + 1 : version + 3], version))
        if route.needs.idle and route.needs.snapshots:
            route.on_wait(past(batches, version))
        for piece in (*own, *waiting):
            route.on_piece(piece)
        for piece in own:
            route.on_end([piece])
        with timed(played.idle_s):
            while route.score_while_idle():
                pass
        if name == "old_logit_model":
            time.sleep(median(history.step_s))  # its process works while the trainer does
        batch = collate(batches[version])
        with timed(played.logps_s):
            wanted = route.needs.now or route.needs.inline
            now = scorer.score(batch, batch.sampled).logp if wanted else torch.empty(0)
            played.values, played.exact = route.logps(batch, now)
        if route.needs.inline:  # a training pass has `now` anyway
            played.logps_s[-1] = 0.0
        with timed(played.closing_s):
            if route.needs.scores_before_update:
                route.before_update(waiting)
        route.trained(1.0)
        played.costs = route.costs()
    played.models = route.needs.resident_models
    route.close()
    return played


EXACT, AVERAGE = ("snapshot_old", "eager"), "ewma_prox"


def beside(size: Size, history: History, plan: Plan) -> dict[str, dict[str, list[float]]]:
    """Return the costs of exact routes over those of `ewma_prox`, by route and kind of cost.

    There is one ratio for each version. The routes take turns in running first. All work of the
    trainer's thread counts, also that of idle time.
    """
    policy = size.policy()
    advance(policy, history, 0)
    names = (*EXACT, AVERAGE)
    routes = {
        name: build_old_logps(OldLogpsConfig(route=name), size.scorer(policy)) for name in names
    }
    batches = [
        episodes(size, plan, version=version, first=version * size.sequences)
        for version in range(len(history.copies) + 2)
    ]
    ratios: dict[str, dict[str, list[float]]] = {
        name: {"forward": [], "per forwarded token": [], "with publishing": [], "length": []}
        for name in EXACT
    }
    for version in range(len(history.copies)):
        advance(policy, history, version)
        published: dict[str, list[float]] = {name: [] for name in names}
        scored: dict[str, list[float]] = {name: [] for name in names}
        forwarded = {}
        for name in rotated(names, version % len(names)):
            with timed(published[name]):
                routes[name].on_published(live(version))
            with timed(scored[name]):
                score(routes[name], batches, version)
            forwarded[name] = routes[name].costs()["forward_tokens"]
        for name in EXACT if version >= WARM else ():
            forward = scored[name][0] / scored[AVERAGE][0]
            length = forwarded[name] / forwarded[AVERAGE]
            both = [scored[each][0] + published[each][0] for each in (name, AVERAGE)]
            found = {"forward": forward, "per forwarded token": forward / length, "length": length}
            for what, ratio in {**found, "with publishing": both[0] / both[1]}.items():
                ratios[name][what].append(ratio)
    return ratios


def score(route: OldLogps, batches: Sequence[Sequence[ScoredTrajectory]], version: int) -> None:
    """Let a route score the batch of a version, and what was sampled before for later batches."""
    if route.needs.idle:
        route.on_wait(past(batches, version))
        route.on_end(list(pieces_of(batches[version : version + 1], version)))
    while route.score_while_idle():
        pass
    route.logps(collate(batches[version]), torch.empty(0))


@torch.no_grad()
def score_alone(size: Size, history: History, batch: Batch, dtype: str) -> Tensor:
    """Return `[T]`: each token's log-probability under its own version's full copy.

    Each sequence has a forward pass to itself.
    """
    model = size.policy(dtype)
    values = torch.zeros_like(batch.behavior_logp)
    for version in batch.version[batch.sampled].unique().tolist():
        model.load_weights(history.copies[version])
        for start, end in batch.spans():
            logp = model.logps(Packed(batch.tokens[start:end], (0, end - start)), temperature=1.0)
            here = batch.sampled[start:end] & (batch.version[start:end] == version)
            values[start:end] = torch.where(here, logp.float(), values[start:end])
    return values


def spoken(size: Size, history: History) -> list[list[ScoredTrajectory]]:
    """Return a batch for each version.

    The last batch has the log-probabilities that a float32 engine with these weights would return.
    """
    last = len(history.copies) - 1
    batches = [episodes(size, MIXED, version=v, first=v * size.sequences) for v in range(last + 1)]
    batch = collate(batches[last])
    heard = score_alone(size, history, batch, "float32")
    said = []
    for credited, (start, _) in zip(batches[last], batch.spans(), strict=True):
        trajectory, pieces = credited.trajectory, []
        for at, piece, _ in walk(trajectory.pieces):
            if isinstance(piece, Sampled):
                behavior = heard[start + at : start + at + len(piece.tokens)]
                piece = replace(piece, behavior_logp=tuple(behavior.tolist()))
            pieces.append(piece)
        said.append(replace(credited, trajectory=replace(trajectory, pieces=tuple(pieces))))
    return [*batches[:last], said]


@dataclass(slots=True)
class Line:
    """A route's row in the table of all routes.

    Seconds and bytes are from the first history, the error is from each.
    """

    cells: list[str] = field(default_factory=list)
    extra: float = 0.0
    """Additional time of the trainer, as a share of a step."""
    exact: bool = False
    errors: list[float] = field(default_factory=list)


def route_lines(size: Size, histories: Sequence[History]) -> dict[str, Line]:
    """Measure every route."""
    lines: dict[str, Line] = {name: Line() for name in list(routes())}
    for number, history in enumerate(histories):
        batches = spoken(size, history)
        batch = collate(batches[-1])
        truth = score_alone(size, history, batch, "bfloat16")
        last = len(history.copies) - 1
        newest = replace(batch, version=torch.where(batch.sampled, last, -1))
        now = score_alone(size, history, newest, "bfloat16")
        policy = size.policy()
        policy.load_weights(history.copies[last])
        seen = size.scorer(policy).score(batch, batch.sampled).logp
        noise = (seen - now)[batch.sampled].std().item()
        for name, line in lines.items():
            CONSOLE.print(f"lr {history.rate:g}: {name}")
            played = play(name, size, history, batches)
            if number == 0:
                step, copy = median(history.step_s), copy_bytes(history.copies[0])
                exact = played.exact[batch.sampled].float().mean().item()
                resident = played.costs.get("memory_bytes", 0.0) / copy
                line.extra, line.exact = played.extra_s / step, exact == 1
                line.cells += [f"{line.extra:+.1%}", f"{median(played.idle_s[WARM:]) / step:.1%}"]
                line.cells += [f"{resident:.2f}", str(played.models), f"{exact:.0%}"]
            tokens = audit.Tokens(
                played.values,
                truth,
                now,
                batch.behavior_logp,
                last - batch.version,
                batch.sequence,
                batch.sampled,
            )
            error, leaks = audit.decomposition_error(tokens), audit.leaks(tokens, noise=noise)
            line.errors.append(error.value if error else 0.0)
            leaked = [told(leak, "{:.2f}") for leak in (leaks.staleness, leaks.discrepancy)]
            line.cells += [told(error, "{:.2e}"), ", ".join(leaked)]
    return {str(name): line for name, line in lines.items()}


def judged(goal: Goal) -> str:
    """
    >>> judged(("copies", 0.2, 0.25)), judged(("time", 1.5, 1.1))
    ('- copies: met, 0.20 of at most 0.25', '- time: missed, 1.50 of at most 1.1')
    """
    what, found, most = goal
    return f"- {what}: {'met' if found <= most else 'missed'}, {found:.2f} of at most {most:g}"


def told(estimate: audit.Estimate | None, form: str) -> str:
    return "—" if estimate is None else form.format(estimate.value)


def beside_average(size: Size, history: History, repeats: int) -> tuple[list[str], list[Goal]]:
    """Return the table of exact routes over `ewma_prox`, and the goals for it."""
    many = replace(size, sequences=4 * size.sequences)
    lines = [
        f"## Exact routes over `{AVERAGE}`, at {history.rate:g}",
        "",
        f"Medians of {repeats} alternating repeats of ratios, with their range. A repeat is one "
        "version: it is",
        f"published to all routes, then all score the same batch of {many.sequences} trajectories. "
        "`eager` scores all that",
        "earlier versions sampled for later batches, too; this time counts, although a run does it "
        "mostly in idle time.",
        "Forward time includes restoring weights; publishing is the difference that is formed, or "
        "the update of",
        "the average.",
        "",
        *columns(
            "trajectories",
            "route",
            "forwarded length",
            "per forwarded token",
            "forward time",
            "with publishing",
        ),
    ]
    goals: list[Goal] = []
    for what, plan in (("cut: a tenth, then most", CUT), ("two equal versions", EVEN)):
        CONSOLE.print(f"beside {AVERAGE}: {what}")
        for name, ratios in beside(many, history, plan).items():
            per_token = ratios["per forwarded token"]
            cells = [
                spread(ratios[key])
                for key in ("length", "per forwarded token", "forward", "with publishing")
            ]
            lines.append(row(what, f"`{name}`", *cells))
            goals.append((f"time of `{name}` per forwarded token, {what}", median(per_token), 1.1))
            if round(median(ratios["length"]), 2) <= 1.2:
                goals.append((f"`{name}` in all, {what}", median(ratios["with publishing"]), 1.3))
    return lines, goals


def measure(size: Size, rates: Sequence[float], repeats: int) -> tuple[list[str], dict[str, Line]]:
    weights = sum(tensor.numel() for tensor in size.policy().weights().values())
    lines = [
        f"{weights:,} weights in bfloat16 ({size.layers} x {size.hidden}, vocabulary "
        f"{size.vocab}), batches of {size.sequences} trajectories of {size.length} tokens, one "
        f"optimizer step a version, {LIVE} live versions.",
        "",
        "## The version store",
        "",
        "Copies are of the whole model, beyond the one movable copy. Seconds are of one version.",
        "",
        *columns(*STORE),
    ]
    histories = []
    goals = list[Goal]()
    for rate in rates:
        CONSOLE.print(f"training at lr {rate:g}")
        history = train(size, rate, max(LIVE, WARM + repeats) if rate == rates[0] else LIVE)
        line, resident = store_row(history)
        lines.append(line)
        if rate <= RL_RATE:
            goals.append((f"resident copies at {rate:g}", resident, 0.25))
        if rate in (rates[0], rates[-1]):
            histories.append(history)
    table, its_goals = beside_average(size, histories[0], repeats)
    lines += ["", *table]
    goals += its_goals
    lines += ["", "Exact at or below the cost of an average:", "", *map(judged, goals)]
    step = median(histories[0].step_s)
    lines += [
        "",
        "## Every route",
        "",
        "Trajectories of three versions, the newest among them. Extra time is that of the "
        "trainer's thread, over the",
        f"step of `rollout` ({step:.2f} s); a route that works while the trainer waits has it "
        "under idle. Resident",
        "copies are beside the movable models. The error is the mean of abs(prox - old_logp) over "
        "action tokens, the",
        "truth from full copies, each sequence run alone: of exact routes at most bfloat16's "
        "packing noise. `mu` is a",
        "float32 engine's. The leaks are the shares of staleness (s) and of discrepancy (d) that "
        "land in the other",
        "factor; — where a factor is under ten times the noise. No engine runs beside: "
        "`old_logit_model` has a core.",
        "",
        *columns(
            *ROUTE,
            *(
                name
                for history in histories
                for name in (f"error at {history.rate:g}", "leaks s, d")
            ),
        ),
    ]
    found = route_lines(size, histories)
    return lines + [row(f"`{name}`", *line.cells) for name, line in found.items()], found


def draw(
    lines: Mapping[str, Line], rate: float, found: Mapping[str, Sequence[route_steps.Ran]]
) -> None:
    """Draw the cost against the error, and the routes' shares of real steps."""
    with picture("routes", panels=2, width=11.0, height=4.2) as (left, right):
        for number, (name, line) in enumerate(
            sorted(lines.items(), key=lambda item: item[1].errors[-1])
        ):
            mark = (
                "o" if line.exact else "+x"[number % 2]
            )  # of two that lie upon one another both are seen
            left.scatter(
                100 * line.extra, line.errors[-1], s=45, marker=mark, color=f"C{number}", label=name
            )
        least = min((line.errors[-1] for line in lines.values() if line.errors[-1]), default=1.0)
        left.set_yscale("symlog", linthresh=least)  # what is exact stands at 0
        left.set(
            ylim=(-least / 10, None),
            xlabel="extra time a step, % (one thread)",
            title="cost against error",
        )
        left.set_ylabel(f"mean |prox - old_logp| at lr {rate:g}")
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
        left.legend(title="dots are exact", title_fontsize=7, frameon=False, fontsize=7, **place)
        shares = {name: 100 * route_steps.share(rans) for name, rans in found.items() if rans}
        names = sorted(shares, key=lambda name: shares[name])
        right.barh(names, [shares[name] for name in names], color="C0")
        right.set_axisbelow(True)
        right.grid(axis="y", visible=False)
        right.grid(axis="x", alpha=0.25)
        right.tick_params(axis="y", labelsize=7)
        right.set(xlabel="% of a step of the retail recipe", title="the route's share, end to end")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("layers", 8),
        ("hidden", 448),
        ("vocab", 2048),
        ("sequences", 4),
        ("length", 320),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--warm-steps", type=int, default=4, help="optimizer steps before the first version"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument(
        "--threads", type=int, default=1, help="threads for the tables without an engine"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="real runs of every route; 0 turns them off"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each real run")
    parser.add_argument("--groups", type=int, default=6, help="groups per step of a real run")
    parser.add_argument("--exact", action="store_true", help=f"only exact routes over {AVERAGE}")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        size = Size(Path(folder), *(getattr(chosen, each.name) for each in fields(Size)[1:]))
        size.make()
        if chosen.exact:
            history = train(size, chosen.rates[0], WARM + chosen.repeats)
            table, goals = beside_average(size, history, chosen.repeats)
            write("exact-routes", "Exact routes over an average", [*table, "", *map(judged, goals)])
            return
        lines, routes = measure(size, chosen.rates, chosen.repeats)
    setting = route_steps.Setting(chosen.steps, chosen.groups)
    found = route_steps.measure(list(routes), chosen.rounds, setting)
    draw(routes, chosen.rates[-1], found)
    minutes = (time.monotonic() - began) / 60
    cores = f"{chosen.threads} core for the first three tables, all for the last"
    taken = f"{cores}; {minutes:.1f} minutes."
    last = route_steps.section(found, setting)
    write("routes", "What the routes cost", [taken, "", *lines, *last])


if __name__ == "__main__":
    main()
