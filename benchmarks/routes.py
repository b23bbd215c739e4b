"""What does each old-logit route cost, and how wrong is it? And does exactness cost more than the best average?

    python benchmarks/routes.py          # 10 minutes on one core; `--help` for smaller sizes

A random Qwen3 is trained by the project's own trainer: bfloat16 forward weights, float32 masters, AdamW. Its versions
are kept as full copies, which are the truth; they are then published to one route after the other, with trajectories
of several versions. Three tables: what the version store holds by learning rate, `snapshot_old` beside `ewma_prox`
in alternating repeats, and every route. Writes a dated file under benchmarks/results/.
"""

import argparse
import sys
import tempfile
import time
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from afterimage import audit
from afterimage.build import build_correction, build_objective, build_old_logps
from afterimage.config import CorrectionConfig, ObjectiveConfig, OldLogpsConfig, Route, TrainerConfig
from afterimage.launch.machine import commit, machine, versions
from afterimage.old_logps import Scoring
from afterimage.old_logps.rollout import Rollout
from afterimage.packing import Packed
from afterimage.policy import Policy
from afterimage.testing import tiny_policy
from afterimage.trainer import Rules, Trainer
from afterimage.trajectory import Batch, Credited, Given, Open, Piece, Sampled, Task, Trajectory, collate, walk
from afterimage.versions import VersionStore
from afterimage.versions.codec import words

CONSOLE = Console()
RESULTS = Path(__file__).parent / "results"
LIVE = 5
WARM = 3
"""Versions before the first that is measured: routes have what they need by then."""
RATES = (1e-6, 3e-6, 1e-5, 1e-4)
Plan = Sequence[tuple[float, int | None]]
"""(share of a trajectory's tokens, versions before the newest that sampled them; None: they were given)."""
MIXED: Plan = ((0.2, None), (0.3, 2), (0.1, None), (0.2, 1), (0.2, 0))
CUT: Plan = ((0.1, None), (0.1, 2), (0.8, 1))
EVEN: Plan = ((0.1, None), (0.4, 2), (0.5, 1))

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of a batch."""

    folder: Path
    """Where the model is, once `make` has made it."""
    layers: int
    hidden: int
    vocab: int
    sequences: int
    length: int
    warm_steps: int

    def make(self) -> None:
        """Random weights, the same each time."""
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

    @property
    def scoring(self) -> Scoring:
        return Scoring(1.0, TrainerConfig().micro_tokens)


@dataclass(frozen=True, slots=True)
class History:
    """Full copies of consecutive versions, and the seconds of the steps between them."""

    rate: float
    copies: list[Weights]
    step_s: list[float]


def train(size: Size, rate: float, versions: int) -> History:
    """One optimizer step per version, on random text with random advantages, after a few for Adam to settle."""
    policy = size.policy()
    scoring = size.scoring
    rules = Rules(
        correction=build_correction(CorrectionConfig(control="none")),
        objective=build_objective(ObjectiveConfig(kind="none")),
        temperature=1.0,
    )
    config = TrainerConfig(dtype="bfloat16", lr=rate, micro_tokens=scoring.micro_tokens)
    trainer = Trainer(policy, config, rules, Rollout(), num_steps=size.warm_steps + versions)
    history = History(rate, [], [])
    for number in range(size.warm_steps + versions):
        if number >= size.warm_steps:
            history.copies.append({name: tensor.clone() for name, tensor in policy.weights().items()})
        batch = collate(episodes(size, MIXED, version=policy.version, first=number * size.sequences))
        batch.behavior_logp.copy_(scoring(policy, batch, batch.sampled).logp)
        began = time.perf_counter()
        trainer.backward(trainer.prepare(batch).parts[0])
        trainer.step()
        history.step_s.append(time.perf_counter() - began)
        policy.version += 1
    return history


def episodes(size: Size, plan: Plan, *, version: int, first: int) -> list[Credited]:
    """Random trajectories of a batch that is trained on at `version`; siblings have opposite advantages."""
    made = []
    for number in range(first, first + size.sequences):
        noise = torch.Generator().manual_seed(number)
        pieces: list[Piece] = []
        for share, age in plan:
            tokens = tuple(torch.randint(size.vocab, (round(share * size.length),), generator=noise).tolist())
            own = Sampled(tokens, (-7.0,) * len(tokens), max(0, version - age)) if age is not None else None
            pieces.append(own or Given(tokens))
        trajectory = Trajectory(
            tuple(pieces), {"reward": 0.0}, "done", Task("random", "train", number), seed=number, episode=number
        )
        made.append(Credited(trajectory, (1.0 if number % 2 else -1.0,)))
    return made


def pieces_of(batches: Sequence[Sequence[Credited]], version: int) -> Iterator[Open]:
    """Everything that `version` samples, as it would arrive."""
    for credited in (credited for batch in batches for credited in batch):
        trajectory = credited.trajectory
        for start, piece, _ in walk(trajectory.pieces):
            if isinstance(piece, Sampled) and piece.version == version:
                yield Open(trajectory.episode, trajectory.tokens[: start + len(piece.tokens)], start, piece)


def copy_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(words(one[name]), words(two[name])) for name in one)


def store_row(history: History) -> str:
    """The store with five live versions: what differs, what it takes, and whether it is exact."""
    store, copies = VersionStore(), history.copies[:LIVE]
    for version, weights in enumerate(copies):
        store.put(version, weights)
    deltas = [store.delta(version) for version in range(1, LIVE)]
    began = time.perf_counter()
    store.move_to(0)
    walk_s = (time.perf_counter() - began) / len(deltas)
    exact = all(same(store.tensors(version), copies[version]) for version in (2, 0, 4, 1, 3))
    total = sum(encoded.words for encoded in deltas[0].tensors.values())
    shares = [sum(encoded.changed for encoded in delta.tensors.values()) / total for delta in deltas]
    kinds = Counter(encoded.kind for delta in deltas for encoded in delta.tensors.values())
    chosen = ", ".join(f"{kind} {kinds[kind]}" for kind in ("sparse", "packed", "raw") if kinds[kind])
    return (
        f"| {history.rate:g} | {min(shares):.1%} to {max(shares):.1%} | {store.bytes / copy_bytes(copies[0]):.3f} | "
        f"{'yes' if exact else 'NO'} | {chosen} | {store.encode_s / len(deltas):.2f} | {walk_s:.2f} |"
    )


@dataclass(slots=True)
class Played:
    """What a route took, version by version, and what it said of the last batch."""

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
    began = time.perf_counter()
    yield
    into.append(time.perf_counter() - began)


def advance(policy: Policy, history: History, version: int) -> None:
    """The policy is at a version, as after the step that led there."""
    policy.load_weights(history.copies[version])
    policy.version = version


def live(version: int) -> range:
    return range(max(0, version - LIVE + 1), version + 1)


def play(name: Route, size: Size, history: History, batches: Sequence[Sequence[Credited]]) -> Played:
    """Every version through a route, as the loop would bring it; one batch is asked about at each."""
    policy, played = size.policy(), Played()
    advance(policy, history, 0)
    route = build_old_logps(OldLogpsConfig(route=name), policy, size.scoring)
    for version in range(len(history.copies)):
        advance(policy, history, version)
        with timed(played.published_s):
            route.publishing(policy)
            route.published(policy, live(version))
        own = list(pieces_of(batches[version : version + 1], version))
        waiting = list(pieces_of(batches[version + 1 : version + 3], version))
        for piece in (*own, *waiting):
            route.arrived(piece)
        with timed(played.idle_s):
            while route.idle(policy):
                pass
        if name == "old_logit_model":
            time.sleep(median(history.step_s))  # its process works while the trainer does
        batch = collate(batches[version])
        with timed(played.logps_s):
            wanted = route.needs.now or route.needs.inline
            now = size.scoring(policy, batch, batch.sampled).logp if wanted else torch.empty(0)
            played.values, played.exact = route.logps(batch, now)
        if route.needs.inline:  # a training pass has `now` anyway
            played.logps_s[-1] = 0.0
        with timed(played.closing_s):
            if route.needs.closing:
                route.closing(policy, waiting)
        route.trained(policy, 1.0)
        played.costs = route.costs()
    played.models = route.needs.resident_models
    route.close()
    return played


def beside(size: Size, history: History, plan: Plan) -> dict[str, list[float]]:
    """`snapshot_old` over `ewma_prox`, version by version, whichever comes first taking turns."""
    policy = size.policy()
    advance(policy, history, 0)
    names: tuple[Route, Route] = ("snapshot_old", "ewma_prox")
    routes = {name: build_old_logps(OldLogpsConfig(route=name), policy, size.scoring) for name in names}
    ratios: dict[str, list[float]] = {"per forwarded token": [], "forward": [], "with publishing": [], "length": []}
    for version in range(len(history.copies)):
        advance(policy, history, version)
        batch = collate(episodes(size, plan, version=version, first=version * size.sequences))
        published: dict[str, list[float]] = {name: [] for name in names}
        asked: dict[str, list[float]] = {name: [] for name in names}
        forwarded = {}
        for name in names if version % 2 else names[::-1]:
            with timed(published[name]):
                routes[name].published(policy, live(version))
            with timed(asked[name]):
                routes[name].logps(batch, torch.empty(0))
            forwarded[name] = routes[name].costs()["forward_tokens"]
        if version >= WARM:
            forward = asked[names[0]][0] / asked[names[1]][0]
            ratios["forward"].append(forward)
            ratios["per forwarded token"].append(forward * forwarded[names[1]] / forwarded[names[0]])
            both = [asked[name][0] + published[name][0] for name in names]
            ratios["with publishing"].append(both[0] / both[1])
            ratios["length"].append(forwarded[names[0]] / forwarded[names[1]])
    return ratios


@torch.no_grad()
def score_alone(size: Size, history: History, batch: Batch, dtype: str) -> Tensor:
    """`[T]`: each token at the full copy of its own version, in a forward pass of its sequence alone."""
    model = size.policy(dtype)
    values = torch.zeros_like(batch.behavior_logp)
    for version in batch.version[batch.sampled].unique().tolist():
        model.load_weights(history.copies[version])
        for start, end in batch.spans():
            logp = model.logps(Packed(batch.tokens[start:end], (0, end - start)), temperature=1.0)
            here = batch.sampled[start:end] & (batch.version[start:end] == version)
            values[start:end] = torch.where(here, logp.float(), values[start:end])
    return values


def spoken(size: Size, history: History) -> list[list[Credited]]:
    """A batch per version; the last as a float32 engine with the versions' weights would have said it."""
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


def route_rows(size: Size, histories: Sequence[History]) -> list[str]:
    """Every route; seconds and bytes from the first history, the error from each."""
    rows: dict[Route, list[str]] = {name: [] for name in typing.get_args(Route)}
    for number, history in enumerate(histories):
        batches = spoken(size, history)
        batch = collate(batches[-1])
        truth = score_alone(size, history, batch, "bfloat16")
        last = len(history.copies) - 1
        newest = replace(batch, version=torch.where(batch.sampled, last, -1))
        now = score_alone(size, history, newest, "bfloat16")
        policy = size.policy()
        policy.load_weights(history.copies[last])
        noise = (size.scoring(policy, batch, batch.sampled).logp - now)[batch.sampled].std().item()
        for name, cells in rows.items():
            CONSOLE.print(f"lr {history.rate:g}: {name}")
            played = play(name, size, history, batches)
            if number == 0:
                step, copy = median(history.step_s), copy_bytes(history.copies[0])
                exact = played.exact[batch.sampled].float().mean().item()
                resident = played.costs.get("resident_bytes", 0.0) / copy
                cells += [f"{played.extra_s / step:+.1%}", f"{median(played.idle_s[WARM:]) / step:.1%}"]
                cells += [f"{resident:.2f}", str(played.models), f"{exact:.0%}"]
            tokens = audit.Tokens(
                played.values, truth, now, batch.behavior_logp, last - batch.version, batch.sequence, batch.sampled
            )
            error, leaks = audit.decomposition_error(tokens), audit.leaks(tokens, noise=noise)
            cells += [told(error, "{:.2e}"), f"{told(leaks.staleness, '{:.2f}')}, {told(leaks.discrepancy, '{:.2f}')}"]
    return [f"| `{name}` | " + " | ".join(cells) + " |" for name, cells in rows.items()]


def told(estimate: audit.Estimate | None, form: str) -> str:
    return "—" if estimate is None else form.format(estimate.value)


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(size: Size, rates: Sequence[float], repeats: int) -> list[str]:
    weights = sum(tensor.numel() for tensor in size.policy().weights().values())
    lines = [
        f"{weights:,} weights in bfloat16 ({size.layers} x {size.hidden}, vocabulary {size.vocab}), batches of "
        f"{size.sequences} trajectories of {size.length} tokens, one optimizer step a version, {LIVE} live versions.",
        "",
        "## The version store",
        "",
        "Copies are of the whole model, beyond the one movable copy. Seconds are of one version.",
        "",
        "| learning rate | words changed a step | resident copies | bitwise exact | written as (tensors) "
        "| encode s | walk s |",
        "|---|---|---|---|---|---|---|",
    ]
    histories = []
    for rate in rates:
        CONSOLE.print(f"training at lr {rate:g}")
        history = train(size, rate, WARM + repeats if rate == rates[0] else LIVE)
        lines.append(store_row(history))
        if rate in (rates[0], rates[-1]):
            histories.append(history)
    many = replace(size, sequences=4 * size.sequences)
    lines += [
        "",
        f"## `snapshot_old` over `ewma_prox`, at {rates[0]:g}",
        "",
        f"Medians of {repeats} alternating repeats of ratios, with their range. A repeat is one version: it is",
        f"published to both, then both score the same batch of {many.sequences} trajectories. Forward time includes",
        "restoring weights; publishing is the difference that is formed, or the update of the average.",
        "",
        "| trajectories | forwarded length | per forwarded token | forward time | with publishing |",
        "|---|---|---|---|---|",
    ]
    for what, plan in (("cut: a tenth, then most", CUT), ("two equal versions", EVEN)):
        CONSOLE.print(f"beside ewma_prox: {what}")
        ratios = beside(many, histories[0], plan)
        cells = [spread(ratios[key]) for key in ("per forwarded token", "forward", "with publishing")]
        lines.append(f"| {what} | {median(ratios['length']):.2f} | " + " | ".join(cells) + " |")
    step = median(histories[0].step_s)
    lines += [
        "",
        "## Every route",
        "",
        "Trajectories of three versions, the newest among them. Extra time is that of the trainer's thread, over the",
        f"step of `rollout` ({step:.2f} s); a route that works while the trainer waits has it under idle. Resident",
        "copies are beside the movable models. The error is the mean of abs(prox - old_logp) over action tokens, the",
        "truth from full copies, each sequence run alone: for exact routes it is bfloat16's packing noise. `mu` is a",
        "float32 engine's. The leaks are the shares of staleness (s) and of discrepancy (d) that land in the other",
        "factor; — where a factor is under ten times the noise. No engine runs beside: `old_logit_model` has a core.",
        "",
        "| route | extra time a step | idle time | resident copies | movable models | exact share | "
        + " | ".join(f"error at {history.rate:g} | leaks s, d" for history in histories)
        + " |",
        "|---|---|---|---|---|---|" + "---|---|" * len(histories),
    ]
    return lines + route_rows(size, histories)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 8), ("hidden", 448), ("vocab", 2048), ("sequences", 4), ("length", 320)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--warm-steps", type=int, default=4, help="optimizer steps before the first version")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-routes.md")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        size = Size(Path(folder), *(getattr(chosen, each.name) for each in fields(Size)[1:]))
        size.make()
        lines = measure(size, chosen.rates, chosen.repeats)
    head = [
        f"# What the routes cost, {date.today()}",
        "",
        f"`python benchmarks/routes.py {' '.join(sys.argv[1:])}`".replace(" `", "`") + f" at commit {commit()}, "
        f"{chosen.threads} of {machine()}, {versions()}, {(time.monotonic() - began) / 60:.1f} minutes.",
        "",
    ]
    text = "\n".join(head + lines) + "\n"
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(text)
    CONSOLE.print(f"{text}\n{chosen.out}", markup=False)


if __name__ == "__main__":
    main()
