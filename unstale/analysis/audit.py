"""Measure the error of every route on the tokens of one recorded run.

A route is a method to obtain old log-probabilities. For each route, the recorded weights are loaded
version by version, and the route is called as in training. It returns old log-probabilities of the
batches that were trained on. These are compared with the true ones, computed with the recorded
weights that sampled each token. A recording does not contain the times at which tokens arrived. So
the route `eager`, which scores while the trainer waits, is given time to score all tokens.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from unstale.algorithms import audit as pure
from unstale.analysis.dashboard.frozen import write_report
from unstale.analysis.report.audited import COLUMNS, cells
from unstale.builders import (
    build_old_logps,
    build_scorer,
    load_policy,
)
from unstale.config import ConfigError, OldLogpsConfig, nearest
from unstale.config.options import stored_config
from unstale.config.routes import routes
from unstale.durability.console import Console
from unstale.durability.run_folder import AUDIT, Row, RunFolder, dumps, write_whole
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps, has_clean_behavior
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch, PendingPiece, Provenance, Sampled
from unstale.techniques.hooks import Techniques
from unstale.trainer.auditor import (
    Audited,
    Truth,
    figures,
    join,
    packing_noise,
    score_truth,
    spread,
    with_error,
)
from unstale.trainer.rules import LossSpec
from unstale.weights.recording import RECORDED, Recorded

POINTS = 400
"""Number of tokens per route (method to compute `old_logp`) whose log D = old_logp - behavior_logp
and log S = logp - old_logp are stored for plots.
"""


def audit(
    run: Path,
    *,
    routes: Sequence[str] = (),
    alphas: Sequence[float] = (0.5,),
    console: Console | None = None,
) -> Row:
    """Measure the error of methods to compute `old_logp`, called routes, on a recorded run.

    Without `routes`, all are measured. `alphas` are further settings of the routes `interp_prox_*`,
    which mix two policies with a constant weight alpha. Writes `audit.json`, `audit.md` and the
    report, and returns the content of `audit.json`. Batches that need a version that was not
    recorded are skipped. Raises `ConfigError` if the run was not recorded, or for an unknown route.
    """
    console = console or Console(soft_wrap=True)
    config = stored_config(RunFolder(run).config())
    try:
        recorded = Recorded(run / RECORDED)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    rules = LossSpec(config.correction, config.objective, Techniques.of(config))
    options = variants(config.old_logps, routes, alphas)
    rows: list[Row] = []
    refused: dict[str, str] = {}
    with Progress(console=console, transient=True) as progress:
        total = len(recorded.steps) * (1 + len(options))
        bar = progress.add_task("true values", total=total)
        advance = partial(progress.advance, bar)
        policy = load_policy(config)
        policy.open_pictures(run)
        policy.require_base(recorded.base)
        scorer = build_scorer(config, policy)
        replay = Replay.of(recorded, policy, scorer, rules=rules, advance=advance)
        for option in options:
            progress.update(bar, description=str(option))
            try:
                old = build_old_logps(option, build_scorer(config, policy))
            except ConfigError as error:
                refused[str(option)] = str(error)
                progress.advance(bar, len(recorded.steps))
            else:
                rows.append({"route": str(option), **replay.play(old, advance=advance)})
    result = {**replay.facts(), "run": run.resolve().name, "routes": rows, "not_built": refused}
    write_whole(run / AUDIT, dumps(result) + "\n")
    write_whole((run / AUDIT).with_suffix(".md"), _markdown(result))
    console.print(_table(result))
    console.print(f"{_about(result)}\nreport     {write_report(run)}", highlight=False)
    return result


def variants(
    own: OldLogpsConfig, names: Sequence[str], alphas: Sequence[float]
) -> list[OldLogpsConfig]:
    """Return the settings to measure of each route (method to compute `old_logp`) in `names`.

    Without `names`, all routes are measured. The run's own route has the options `own`, others
    their defaults. Some routes have several settings, such as one for each of `alphas`. Raises
    `ConfigError` for an unknown route.
    """
    for name in names:
        if name not in routes():
            raise ConfigError(f"there is no route {name!r}{nearest(name, list(routes()))}")
    settings: list[OldLogpsConfig] = []
    for name in routes():
        if not names or name in names:
            config = own if name == own.route else OldLogpsConfig(route=name)
            settings += [config, *config.variants(alphas)]
    return list(dict.fromkeys(settings))


def segments(batch: Batch) -> Iterator[PendingPiece]:
    """Yield the sampled tokens of a batch in pieces.

    A piece has successive tokens of one turn that the same version of the weights sampled.
    """
    keys = torch.stack([batch.turn, batch.version, batch.clean.long(), batch.provenance])
    table = batch.routed_experts
    experts_of = table.sequences if table else [{}] * batch.num_sequences
    for episode, (start, end), recorded in zip(
        batch.episodes, batch.spans(), experts_of, strict=True
    ):
        episode_keys = keys[:, start:end]
        changes = (episode_keys[:, 1:] != episode_keys[:, :-1]).any(0).nonzero().squeeze(1) + 1
        for first, last in pairwise([0, *changes.tolist(), end - start]):
            if not batch.sampled[start + first]:
                continue
            at = slice(start + first, start + last)
            _, version, clean, provenance = episode_keys[:, first].tolist()
            piece = Sampled(
                tuple(batch.tokens[at].tolist()),
                tuple(batch.behavior_logp[at].tolist()),
                version=version,
                clean=bool(clean),
                provenance=Provenance(provenance),
                routed_experts=recorded.get(version),
                kept_sets=batch.kept_sets.at(at) if batch.kept_sets else None,
            )
            text = tuple(batch.tokens[start : start + last].tolist())
            yield PendingPiece(episode, text, first, piece)


@dataclass(slots=True)
class Spent:
    """The costs of a route (a way to compute `old_logp`): its time, and costs that it reports."""

    seconds: float = 0.0
    summed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    held: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def clock(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def add(self, old: OldLogps) -> None:
        for name, value in old.costs().items():
            if name.endswith(("_s", "forward_tokens")):
                self.summed[name] += value
            else:  # not a sum: the largest number of bytes, and the last value of ages and shares
                self.held[name] = max(value, self.held.get(name, 0.0)) if "bytes" in name else value


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded run, with true old log-probabilities, that is repeated for each route in turn.

    A route is a method to compute `old_logp`. `policy` has the weights of the version that the
    repetition has reached.
    """

    recorded: Recorded
    policy: Policy
    rules: LossSpec
    truths: dict[int, list[Truth]]
    """Version of the weights -> the batches whose training began from it, with their true
    `old_logp`.
    """
    now: dict[int, tuple[float, int]]
    """Version -> seconds and forward tokens that scoring its batches (see `truths`) with its
    weights took.
    """
    pieces: dict[int, list[PendingPiece]]
    noise: float

    @classmethod
    def of(
        cls,
        recorded: Recorded,
        policy: Policy,
        scorer: Scorer,
        *,
        rules: LossSpec,
        advance: Callable[[], None],
    ) -> "Replay":
        """Compute the true `old_logp` of every recorded token, with which routes are compared.

        A token is scored with the recorded weights that sampled it. `scorer` computes
        log-probabilities with the weights in `policy`. `advance` is called after each step, for the
        progress bar.
        """
        noise = 0.0
        truths: dict[int, list[Truth]] = defaultdict(list)
        now: dict[int, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        pieces: dict[int, list[PendingPiece]] = defaultdict(list)
        for step in recorded.steps:
            trained = recorded.batch(step)
            batch = trained.batch
            with scorer.reading(recorded.weights):
                true = score_truth(scorer, batch)
            policy.load_weights(recorded.weights(trained.version))
            began = time.perf_counter()
            scored = scorer.score(batch, batch.sampled)
            seconds, tokens = now[trained.version]
            now[trained.version] = (
                seconds + time.perf_counter() - began,
                tokens + scored.forward_tokens,
            )
            noise = max(noise, packing_noise(scorer, batch, scored.logp))
            truths[trained.version].append(
                Truth(batch, trained.version, true.logp, scored.logp, trained.version_gaps)
            )
            policy.version_gaps = max(policy.version_gaps, trained.version_gaps, key=len)
            for piece in segments(batch):
                pieces[piece.piece.version].append(piece)
            advance()
        return cls(recorded, policy, rules, dict(truths), dict(now), dict(pieces), noise)

    @property
    def in_order(self) -> list[Truth]:
        """All batches, with their true `old_logp`, in the order of training."""
        return [truth for version in sorted(self.truths) for truth in self.truths[version]]

    @property
    def path(self) -> list[int]:
        """The recorded versions, up to the last one from which a batch was trained."""
        return [version for version in self.recorded.versions if version <= max(self.truths)]

    def play(self, old: OldLogps, *, advance: Callable[[], None]) -> Row:
        """Repeat the run with the route `old`, a way to get `old_logp`. Return its errors and
        costs.

        `old` is closed at the end. `advance` is called after each batch.
        """
        spent = Spent()
        audited: list[Audited] = []
        claims: list[Tensor] = []
        try:
            for version, following in zip(self.path, [*self.path[1:], None], strict=True):
                self._arrive(old, version, spent)
                kept = 1.0
                for truth in self.truths.get(version, ()):
                    values, exact = self._ask(old, truth, spent)
                    audited.append(truth.compare(values, self.rules))
                    claims.append(exact)
                    if self.rules.uses_sequences:
                        values = truth.batch.of_owners(values)
                    keep = self.rules.correct(values, truth.batch).keep
                    kept = keep[truth.batch.sampled].double().mean().item()
                    advance()
                spent.add(old)
                if following is not None:
                    self.policy.load_weights(self.recorded.weights(following))
                    with spent.clock():
                        old.trained(kept)
        finally:
            old.close()
        return self._row(join(audited), claims, spent)

    def _arrive(self, old: OldLogps, version: int, spent: Spent) -> None:
        """Load `version` of the weights, and give the route `old` (way to get `old_logp`) the
        tokens that this version sampled.
        """
        self.policy.load_weights(self.recorded.weights(version))
        self.policy.version = version
        later = [
            truth.batch for at, truths in self.truths.items() if at >= version for truth in truths
        ]
        live = {
            held
            for batch in later
            for held in batch.version[batch.sampled].unique().tolist()
            if held <= version
        }
        with spent.clock():
            old.before_publish()
            old.on_published(live | {version})
            if old.needs.idle and old.needs.snapshots:
                old.on_wait(self._waiting(live - {version}, later))
            for piece in self.pieces.get(version, ()):
                old.on_piece(piece)
            while old.score_while_idle():
                pass

    def _waiting(self, versions: Collection[int], later: Sequence[Batch]) -> list[PendingPiece]:
        """Return the pieces (successive sampled tokens) of `versions` that belong to episodes in
        the batches `later`.
        """
        episodes = {episode for batch in later for episode in batch.episodes}
        return [
            piece
            for version in versions
            for piece in self.pieces.get(version, ())
            if piece.episode in episodes
        ]

    def _ask(self, old: OldLogps, truth: Truth, spent: Spent) -> tuple[Tensor, Tensor]:
        reads = old.needs.now or old.needs.inline
        with spent.clock():
            answer = old.logps(truth.batch, truth.logp if reads else torch.empty(0))
            if old.needs.scores_before_update:
                passed = frozenset(truth.batch.episodes)
                held = self.pieces.get(truth.version, [])
                old.before_update([piece for piece in held if piece.episode not in passed])
        if old.needs.now:
            seconds, tokens = self.now[truth.version]
            spent.seconds += seconds
            spent.summed["forward_tokens"] += tokens
        return answer

    def _row(self, audited: Audited, claims: Sequence[Tensor], spent: Spent) -> Row:
        tokens = audited.tokens
        batches = [truth.batch for truth in self.in_order]
        claimed = torch.cat(
            [exact[batch.sampled] for exact, batch in zip(claims, batches, strict=True)]
        )
        checked = torch.cat(
            [exact[has_clean_behavior(batch)] for exact, batch in zip(claims, batches, strict=True)]
        )
        wrong = tokens.error.abs()[checked]
        by_lag = {
            lag: {**with_error("error", estimate), "tokens": estimate.tokens}
            for lag, estimate in pure.error_by_lag(tokens).items()
        }
        chosen = spread(len(tokens), POINTS, shift=0.0)
        return {
            **figures(audited, self.noise),
            **with_error(
                "error_ratio", pure.error_ratio(tokens, replace(tokens, prox=tokens.logp))
            ),
            "exact_fraction": claimed.double().mean().item(),
            "claimed_error_max": wrong.max().item() if len(wrong) else None,
            "seconds": spent.seconds,
            "costs": {**spent.summed, **spent.held},
            "by_lag": by_lag,
            "points": _points(log_d=tokens.log_d_hat[chosen], log_s=tokens.log_s_hat[chosen]),
        }

    def facts(self) -> Row:
        """Return figures of the recorded run, such as its numbers of steps and tokens, and sampled
        points of the true log D and log S.
        """
        truths = self.in_order
        tokens = join([truth.compare(truth.old_logp, self.rules) for truth in truths]).tokens
        chosen = spread(len(tokens), POINTS, shift=0.0)
        return {
            "steps": len(truths),
            "sequences": sum(truth.batch.num_sequences for truth in truths),
            "tokens": len(tokens),
            "tokens_by_lag": {
                str(lag): int((tokens.lag == lag).sum()) for lag in tokens.lag.unique().tolist()
            },
            "skipped_steps": self.recorded.skipped_steps,
            "missing_versions": self.recorded.missing_versions,
            "noise": self.noise,
            "dtype": str(self.policy.dtype).removeprefix("torch."),
            "points": _points(
                lag=tokens.lag[chosen], log_d=tokens.log_d[chosen], log_s=tokens.log_s[chosen]
            ),
        }


def _points(**columns: Tensor) -> dict[str, list[float]]:
    return {
        name: [float(f"{value:.5g}") for value in column.tolist()]
        for name, column in columns.items()
    }


def _about(result: Row) -> str:
    lags = ", ".join(f"{count} of lag {lag}" for lag, count in result["tokens_by_lag"].items())
    text = (
        f"{result['tokens']} action tokens of {result['steps']} batches ({lags}), "
        f"{result['dtype']} forward weights; "
        f"the same tokens in another packing differ by {result['noise']:.1g}."
    )
    if skipped := result["skipped_steps"]:
        text += (
            f" {len(skipped)} of {result['steps'] + len(skipped)} recorded batches were skipped, "
            f"because they need versions that were not recorded ({RECORDED}/versions lacks "
            f"{', '.join(map(str, result['missing_versions']))})."
        )
    for route, reason in result["not_built"].items():
        text += f" {route} was not built: {reason}."
    return text


def _table(result: Row) -> Table:
    """Return a table of the main columns. `audit.md` has all columns, with standard errors."""
    table = Table(
        title=f"old logits of {result['run']} against full copies", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    shown = [i for i, column in enumerate(COLUMNS) if column.brief]
    for i in shown:
        table.add_column(COLUMNS[i].name, overflow="fold", justify="right" if i else "left")
    for row in result["routes"]:
        texts = cells(row)
        table.add_row(*(texts[i].split(" ±")[0] for i in shown))
    return table


def _markdown(result: Row) -> str:
    rows = [
        [column.name for column in COLUMNS],
        ["---"] * len(COLUMNS),
        *map(cells, result["routes"]),
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"* {column.name}: {column.about}" for column in COLUMNS if column.about]
    title = f"# Old logits of {result['run']}"
    return "\n".join([title, "", _about(result), "", *lines, "", *notes, ""])
