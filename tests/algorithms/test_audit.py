"""Test the audit.

Fitted leaks have the theoretical value for each approximation, also with correlated factors and
noise. Undefined statistics are None. The auditor reports zero error for the exact route and the
true error for others. A recorded run can be replayed for every route on the same tokens.
"""

import json
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from unstale.algorithms import audit
from unstale.algorithms.audit import Tokens
from unstale.analysis.audit import audit as audit_run
from unstale.analysis.audit import segments
from unstale.builders import build_old_logps
from unstale.cli import session
from unstale.cli.main import main
from unstale.config import (
    AuditConfig,
    ConfigError,
    CorrectionConfig,
    EngineConfig,
    EvalConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.config.options import stored_config
from unstale.durability.run_folder import plain
from unstale.model.policy import Policy
from unstale.old_logps import Needs, OldLogps
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch, PendingPiece, collate
from unstale.testing import episode, nudge, plain_logps, tiny_policy
from unstale.trainer.auditor import Auditor, Truth, packing_noise, score_truth
from unstale.trainer.local import LossSpec
from unstale.weights.recording import RECORDED, Recorded, RecordedBatch, Recording

pytestmark = pytest.mark.usefixtures("forked_children")

NOISE = 1e-5
SCORING = (1.0, 4096)
RULES = LossSpec(CorrectionConfig(low=0.9, high=1.1), ObjectiveConfig())


def tokens(
    stand_in: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    number: int = 4000,
    mixed: float = 0.0,
    lag: int = 2,
) -> Tokens:
    """Return a synthetic batch of known factors. `mixed` correlates log D with log S."""
    noise = torch.Generator().manual_seed(number)

    def normal(size: float) -> Tensor:
        return size * torch.randn(number, generator=noise, dtype=torch.float64)

    old, log_s = -1 - normal(1.0).abs(), normal(0.03) - 0.002
    log_d = normal(0.01) + 0.001 + mixed * log_s
    now, mu = old + log_s, old - log_d
    seen = old + normal(
        NOISE
    )  # the truth is measured in another packing than what the stand-in saw
    return Tokens(
        stand_in(mu, now, old),
        seen,
        now,
        mu,
        torch.arange(number) % 2 + lag - 1,
        torch.arange(number) // 20,
        torch.ones(number, dtype=torch.bool),
    )


@pytest.mark.parametrize("mixed", [0.0, 0.3, -0.9])
@pytest.mark.parametrize(
    ("stand_in", "s", "d"),
    [
        (lambda mu, now, old: old, 0, 0),
        (lambda mu, now, old: mu, 0, 1),
        (lambda mu, now, old: now, 1, 0),
        (lambda mu, now, old: mu + 0.3 * (now - mu), 0.3, 0.7),
        (lambda mu, now, old: mu + 0.8 * (now - mu) + 0.004, 0.8, 0.2),
    ],
)
def test_leaks_are_what_the_theory_says(
    stand_in: Callable[[Tensor, Tensor, Tensor], Tensor], s: float, d: float, mixed: float
) -> None:
    found = audit.leaks(tokens(stand_in, mixed=mixed), noise=NOISE)
    assert found.staleness and found.discrepancy
    assert (found.staleness.value, found.discrepancy.value) == pytest.approx((s, d), abs=1e-3)
    assert found.staleness.se is not None and found.staleness.se < 1e-3


@pytest.mark.costly
@given(seed=st.integers(0, 10**6), s=st.floats(-0.5, 1.5), d=st.floats(-0.5, 1.5))
def test_leaks_lie_within_their_standard_errors(seed: int, s: float, d: float) -> None:
    """An independent error per sequence widens the interval and leaves the estimate unbiased."""
    noise = torch.Generator().manual_seed(seed)
    made = tokens(lambda mu, now, old: old + s * (now - old) - d * (old - mu))
    own = 0.01 * torch.randn(200, generator=noise, dtype=torch.float64)
    found = audit.leaks(replace(made, prox=made.prox + own[made.sequence]), noise=NOISE)
    for estimate, true in ((found.staleness, s), (found.discrepancy, d)):
        assert estimate is not None and estimate.se is not None
        assert 1e-3 < estimate.se < 0.1 and abs(estimate.value - true) < 5 * estimate.se


def test_what_cannot_be_told_is_none() -> None:
    made = tokens(lambda mu, now, old: mu)
    alone = audit.leaks(
        tokens(lambda mu, now, old: now), noise=2e-3
    )  # log D varies by 0.01, log S by 0.03
    assert alone.discrepancy is None and alone.staleness is not None
    assert alone.staleness.value == pytest.approx(1, abs=1e-3)
    assert audit.leaks(made, noise=0.01) == audit.Leaks(None, None)
    assert audit.leaks(tokens(lambda mu, now, old: mu, number=99)) == audit.Leaks(None, None)
    fresh = replace(made, lag=torch.zeros_like(made.lag))
    assert audit.leaks(fresh) == audit.Leaks(None, None)
    nothing = replace(made, sampled=torch.zeros_like(made.sampled))
    assert audit.decomposition_error(nothing) is None and audit.factor_correlation(nothing) is None
    assert audit.error_by_lag(nothing) == {}
    assert audit.error_ratio(made, replace(made, prox=made.old_logp)) is None


def test_factors_of_one_ratio_are_correlated_and_constant_ones_are_not() -> None:
    for alpha in (0.2, 0.5, 0.9):
        made = tokens(lambda mu, now, old, a=alpha: mu + a * (now - mu))
        assert audit.factor_correlation(made, noise=NOISE) == pytest.approx(1)
    for stand_in in (lambda mu, now, old: mu, lambda mu, now, old: now):
        assert audit.factor_correlation(tokens(stand_in), noise=NOISE) is None
    exact = audit.factor_correlation(tokens(lambda mu, now, old: old), noise=NOISE)
    assert exact is not None and abs(exact) < 0.1


def test_errors_are_means_with_clustered_standard_errors() -> None:
    """Two sequences of two and one tokens, errors 1, 3 and 5: mean 3, residual sums -2 and 2."""
    values = torch.tensor([[1.0, 9.0, -3.0], [5.0, 9.0, 9.0]])
    padded = Tokens(
        values, torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3),
        torch.tensor([[0, 0, 1], [1, 0, 0]]), torch.tensor([[0, 0, 0], [1, 1, 1]]),
        torch.tensor([[True, False, True], [True, False, False]]),
    )  # fmt: skip
    error = audit.decomposition_error(padded)
    assert error is not None and (error.value, error.tokens) == (3.0, 3)
    assert error.se == pytest.approx((2 * (2**2 + 2**2)) ** 0.5 / 3)
    by_lag = audit.error_by_lag(padded)
    assert {lag: (one.value, one.tokens) for lag, one in by_lag.items()} == {
        0: (1.0, 1),
        1: (4.0, 2),
    }
    assert by_lag[0].se is None
    both = audit.join([padded, padded])
    assert (
        len(both) == 6
        and both.sequence.tolist() == [0, 0, 1, 2, 2, 3]
        and both.sampled.dtype == torch.bool
    )
    ratio = audit.error_ratio(padded, replace(padded, prox=2 * values))
    assert ratio is not None and (ratio.value, ratio.se) == (0.5, 0.0)
    with pytest.raises(ValueError, match="same tokens"):
        audit.error_ratio(padded, both)


def test_agreement_is_about_the_tokens_that_a_threshold_acts_on() -> None:
    yes, no = torch.tensor([True] * 3 + [False] * 97), torch.zeros(100, dtype=torch.bool)
    everywhere = torch.ones(100, dtype=torch.bool)
    assert audit.agreement(yes, yes, sampled=everywhere) == 1
    assert audit.agreement(yes, no, sampled=everywhere) == 0  # 97% of the tokens are treated alike
    assert audit.agreement(no, no, sampled=everywhere) is None
    assert audit.agreement(yes, no, sampled=~yes) is None
    assert audit.agreement(yes, yes.roll(1), sampled=everywhere) == pytest.approx(2 / 3)


def sampled_batch(policy: Policy, number: int, copies: dict[int, Policy], *, far: float) -> Batch:
    """Return eight episodes with tokens of the live versions. mu is the true log-probability,
    shifted by `far`."""
    newest, oldest = max(copies), min(copies)
    plans = [[3, (20, max(oldest, newest - i % 3)), 2, (20, newest)] for i in range(8)]
    batch = collate(
        [episode(100 * number + i, plan, advantage=(-1.0) ** i) for i, plan in enumerate(plans)]
    )
    truth = torch.zeros(len(batch.tokens))
    for start, end in batch.spans():
        for version, copy in copies.items():
            where = torch.zeros_like(batch.sampled)
            where[start:end] = batch.version[start:end] == version
            truth = torch.where(
                where,
                torch.nn.functional.pad(
                    plain_logps(copy, batch.tokens[start:end].tolist()), (start, len(truth) - end)
                ).float(),
                truth,
            )
    noise = torch.Generator().manual_seed(number)
    mu = truth + far * torch.randn(len(truth), generator=noise)
    return replace(batch, behavior_logp=torch.where(batch.sampled, mu, 0.0))


def audited(
    route: str, *, steps: int = 4, share: float = 0.5
) -> tuple[list[dict[str, float]], Auditor]:
    """Train tiny policies for `steps` with the audit on. Return the audited batches by step."""
    policy = tiny_policy()
    old = build_old_logps(OldLogpsConfig(route=route), LocalScorer(policy, *SCORING))  # type: ignore[arg-type]
    auditor = Auditor(LocalScorer(policy, *SCORING), old, RULES, share=share)
    rows, copies = [], dict[int, Policy]()
    for version in range(steps):
        if version:
            nudge(policy, seed=version, size=0.004)
        policy.version = version
        copies = {held: copy for held, copy in copies.items() if held > version - 3} | {
            version: policy.twin()
        }
        for part in (old, auditor):
            part.on_published(set(copies))  # type: ignore[attr-defined]
        batch = sampled_batch(policy, version, copies, far=0.05)
        rows.append(auditor.look(batch, answer(old, policy, batch)))
    old.close()
    return rows, auditor


def answer(old: OldLogps, policy: Policy, batch: Batch) -> Tensor:
    """Return the route's log-probabilities as the trainer requests them before the first step."""
    if old.needs.inline:
        return torch.empty(0)
    now = (
        LocalScorer(policy, *SCORING).score(batch, batch.sampled).logp
        if old.needs.now
        else torch.empty(0)
    )
    return old.logps(batch, now)[0]


def test_the_auditor_finds_an_exact_route_exact() -> None:
    rows, auditor = audited("snapshot_old")
    for row in rows:
        assert row["audit/logp_error_abs_mean"] < 1e-6
    assert (rows[-1]["audit/staleness_leak"], rows[-1]["audit/discrepancy_leak"]) == pytest.approx(
        (0, 0), abs=1e-3
    )
    assert rows[-1]["audit/mask_f1"] == 1
    points = auditor.scatter_sample()
    assert len(points) == 64 and all(
        point["log_d"] == pytest.approx(point["true_log_d"], abs=1e-5) for point in points
    )
    assert {point["lag"] for point in points} == {0, 1, 2}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("route", "s", "d"),
    [("rollout", 0, 1), ("current_recompute", 1, 0), ("interp_prox_loglinear", None, None)],
)
def test_the_auditor_finds_a_stand_in_wrong(route: str, s: float | None, d: float | None) -> None:
    rows, _ = audited(route)
    assert (
        rows[-1]["audit/logp_error_abs_mean"] > 1e-3
        and rows[-1]["audit/logp_error_abs_mean_se"] > 0
    )
    assert rows[-1]["audit/logp_error_abs_mean"] > 100 * rows[-1]["audit/logp_noise_rms"]
    if s is not None:
        assert (
            rows[-1]["audit/staleness_leak"],
            rows[-1]["audit/discrepancy_leak"],
        ) == pytest.approx((s, d), abs=1e-3)
        assert "audit/log_d_log_s_corr" not in rows[-1]
    assert rows[-1]["audit/logp_error_abs_mean/lag_2"] > 1e-3


@pytest.mark.costly
def test_the_auditor_looks_at_its_share_only_and_keeps_what_is_live() -> None:
    rows, auditor = audited("rollout", share=0.25)
    assert [row["audit/tokens"] for row in rows] == [
        80
    ] * 4  # two of eight episodes, 40 action tokens each
    size = sum(tensor.nbytes for tensor in tiny_policy().weights().values())
    assert [row["audit/memory_bytes"] for row in rows] == [
        size * (copies + 1) for copies in (1, 2, 3, 3)
    ]
    assert sorted(auditor.state()["copies"]) == [1, 2, 3]
    rows, auditor = audited("rollout", share=0.0)
    assert rows == [{}] * 4 and auditor.scatter_sample() == [] and not auditor.state()["copies"]


def test_an_auditor_without_the_version_says_so_and_a_restored_one_has_it() -> None:
    policy = tiny_policy()
    old = build_old_logps(OldLogpsConfig(route="rollout"), LocalScorer(policy, *SCORING))
    first, second = (
        Auditor(LocalScorer(policy, *SCORING), old, RULES, share=1.0) for _ in range(2)
    )
    batch = collate([episode(1, [3, (9, 0)]), episode(2, [3, (9, 0)])])
    with pytest.raises(LookupError, match="version 0"):
        first.look(batch, batch.behavior_logp)
    first.on_published({0})
    second.restore(first.state())
    one, other = (part.look(batch, batch.behavior_logp) for part in (first, second))
    assert one["audit/logp_error_abs_mean"] == other["audit/logp_error_abs_mean"] > 0


def test_noise_is_the_root_mean_square_between_two_packings() -> None:
    policy = tiny_policy()
    batch = collate([episode(i, [4, (30 + i, 0)]) for i in range(6)])
    logp = LocalScorer(policy, *SCORING).score(batch, batch.sampled).logp
    assert packing_noise(LocalScorer(policy, *SCORING), batch, logp) < 1e-5
    spread = 0.02 * (-1.0) ** torch.arange(len(logp))
    assert packing_noise(LocalScorer(policy, *SCORING), batch, logp + spread) == pytest.approx(
        0.02, rel=1e-3
    )


def test_tokens_of_no_versions_policy_have_no_truth() -> None:
    policy = tiny_policy()
    batch = collate([episode(1, [3, (9, 0), 2, (5, 0, False)])])
    scorer = LocalScorer(policy, *SCORING)
    with scorer.reading(lambda _: policy.weights()):
        true = score_truth(scorer, batch)
    assert (true.logp != 0).sum() == 9
    found = Truth(batch, 0, true.logp, true.logp).compare(batch.behavior_logp, RULES)
    assert len(found.tokens) == 9 and found.dropped.shape == (2, 9)


def test_a_recording_gives_back_what_was_written(tmp_path: Path) -> None:
    policy = tiny_policy(dtype="bfloat16")
    batch = collate([episode(7, [3, (4, 0), 2, (5, 1)]), episode(9, [2, (3, 1, False)])])
    recording = Recording(tmp_path)
    recording.version(1, policy.whole_weights())
    recording.batch(RecordedBatch(5, 1, batch))
    with pytest.raises(FileNotFoundError, match=r"lacks versions \[0\], and each of the 1 rec"):
        Recorded(tmp_path)
    recording.version(0, policy.whole_weights())
    recorded = Recorded(tmp_path)
    assert (recorded.versions, recorded.steps) == ([0, 1], [5])
    assert (recorded.skipped_steps, recorded.missing_versions) == ([], [])
    again = recorded.batch(5)
    assert (again.step, again.version, again.batch.offsets, again.batch.episodes) == (
        5,
        1,
        batch.offsets,
        (7, 9),
    )
    for name in (
        "tokens",
        "sampled",
        "behavior_logp",
        "version",
        "turn",
        "provenance",
        "clean",
        "advantage",
    ):
        assert torch.equal(getattr(again.batch, name), getattr(batch, name))
    assert all(
        torch.equal(tensor, policy.weights()[name]) for name, tensor in recorded.weights(1).items()
    )
    assert not list(tmp_path.rglob("*.part"))
    with pytest.raises(FileNotFoundError, match=r"--audit\.record true"):
        Recorded(tmp_path / "elsewhere")


def test_segments_are_the_pieces_of_a_batch() -> None:
    batch = collate(
        [episode(3, [2, (4, 0), (3, 1), 2, (5, 1)]), episode(8, [1, (2, 1), (3, 1, False)])]
    )
    found = list(segments(batch))
    assert [
        (one.episode, one.start, len(one.piece.tokens), one.piece.version, one.piece.clean)
        for one in found
    ] == [
        (3, 2, 4, 0, True),
        (3, 6, 3, 1, True),
        (3, 11, 5, 1, True),
        (8, 1, 2, 1, True),
        (8, 3, 3, 1, False),
    ]
    for one in found:
        assert one.tokens[one.start :] == one.piece.tokens
    assert found[2].tokens == tuple(batch.tokens[:16].tolist())


def test_a_stored_configuration_is_read_again() -> None:
    config = RunConfig(
        recipe="toy", runs=Path("x"), old_logps=OldLogpsConfig(route="ewma_prox", beta=0.75)
    )
    stored = json.loads(json.dumps(plain(config)))
    assert stored_config(stored) == config
    assert str(config.old_logps) == "ewma_prox beta=0.75"
    with pytest.raises(ConfigError, match="unknown option colour"):
        stored_config({**stored, "colour": "red"})
    earlier = {**stored, "schedule": {"window": 4}, "steps": 7}
    del earlier["max_steps"]
    assert stored_config(earlier).schedule.lookahead_window == 4
    assert stored_config(earlier).max_steps == 7
    with pytest.raises(ConfigError, match=r"config\.json"):
        stored_config({})
    for knob, value in {
        "max_steps": 3.0,
        "seed": True,
        "name": 3,
        "runs": 3,
        "minutes": "1",
        "deterministic": 1,
    }.items():
        with pytest.raises(ConfigError, match=rf"config\.json, {knob} (cannot|must) be"):
            stored_config({**stored, knob: value})
    assert stored_config({**stored, "minutes": 2}).minutes == 2.0


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = RunConfig(
        recipe="toy",
        runs=tmp_path_factory.mktemp("runs"),
        name="run",
        max_steps=4,
        task=TaskConfig(env="tests.support.toy:ToyTasks"),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=4),
        engine=EngineConfig(max_completion_tokens=8, max_context=128, max_running=16),
        trainer=TrainerConfig(lr=1e-3),
        objective=ObjectiveConfig(entropy_coef=0.05),  # so that every sequence has a gradient
        audit=AuditConfig(share=0.5, record=True),
        eval=EvalConfig(tasks=0),
    )
    return session.train(config, console=Console(file=StringIO())).folder


@pytest.mark.costly
def test_a_recorded_run_is_audited_on_every_route(recorded_run: Path) -> None:
    rows = [json.loads(line) for line in (recorded_run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["audit/logp_error_abs_mean"] < 1e-5 and row["audit/tokens"] > 0 for row in rows)
    exact = ["snapshot_old", "interrupt_sync", "eager"]
    routes = ["rollout", "current_recompute", *exact, "interp_prox_loglinear", "ewma_prox"]
    out = StringIO()
    found = audit_run(
        recorded_run, routes=routes, alphas=[0.25], console=Console(file=out, width=100)
    )
    by_route = {row["route"]: row for row in found["routes"]}
    assert by_route.keys() == {*routes, "interp_prox_loglinear alpha=0.25"}
    for route, s, d in (("rollout", 0, 1), ("current_recompute", 1, 0), ("snapshot_old", 0, 0)):
        row = by_route[route]
        assert (row["staleness_leak"], row["discrepancy_leak"]) == pytest.approx((s, d), abs=1e-3)
    constant = by_route["interp_prox_loglinear alpha=0.25"]
    assert (constant["staleness_leak"], constant["discrepancy_leak"]) == pytest.approx(
        (0.25, 0.75), abs=1e-3
    )
    assert constant["log_d_log_s_corr"] == pytest.approx(1, abs=1e-6)
    for route in exact:
        assert (
            by_route[route]["logp_error_abs_mean"] < 1e-6 and by_route[route]["exact_fraction"] == 1
        )
        assert by_route[route]["claimed_error_max"] < 1e-5
    assert by_route["current_recompute"]["error_ratio"] == pytest.approx(1)
    assert by_route["ewma_prox"]["logp_error_abs_mean"] > 1e-5
    assert by_route["rollout"]["logp_error_abs_mean_se"] > 0
    trained = sum(
        int(Recorded(recorded_run / "recorded").batch(step).batch.sampled.sum())
        for step in (1, 2, 3, 4)
    )
    assert found["tokens"] == trained == sum(found["tokens_by_lag"].values())
    assert json.loads((recorded_run / "audit.json").read_text())["routes"][0]["route"] == "eager"
    assert "| snapshot_old |" in (recorded_run / "audit.md").read_text()
    assert "snapshot_old" in out.getvalue() and str(
        recorded_run / "report.html"
    ) in out.getvalue().replace("\n", "")
    assert "Audit of the old log-probabilities" in (recorded_run / "report.html").read_text()


def test_batches_without_one_of_their_versions_are_skipped_and_counted(
    recorded_run: Path, tmp_path: Path
) -> None:
    """A run that was killed while it recorded a version lacks its file for ever."""
    run = shutil.copytree(recorded_run, tmp_path / "run")
    last = Recorded(run / RECORDED).batch(4).version
    (run / RECORDED / "versions" / f"{last:06d}.safetensors").unlink()
    out = StringIO()
    found = audit_run(run, routes=["rollout"], console=Console(file=out, width=1000))
    assert (found["steps"], found["skipped_steps"], found["missing_versions"]) == (3, [4], [last])
    says = (
        "1 of 4 recorded batches were skipped, because they need versions that were not recorded "
        f"(recorded/versions lacks {last})."
    )
    assert says in out.getvalue() and says in (run / "audit.md").read_text()
    assert found["tokens"] == sum(
        int(Recorded(run / RECORDED).batch(step).batch.sampled.sum()) for step in (1, 2, 3)
    )


class Listens(OldLogps):
    """A route that records its calls in order."""

    needs = Needs(closing=True, idle=True)

    scorer: Scorer

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []
        self.arrivals = 0

    def on_published(self, live: Collection[int]) -> None:
        self.heard.append(("published", self.scorer.version, sorted(live)))

    def on_piece(self, piece: PendingPiece) -> None:
        self.arrivals += 1

    def score_while_idle(self) -> bool:
        self.heard.append(("idle", self.arrivals))
        self.arrivals = 0
        return self.heard[-2][0] != "idle"

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        assert not len(now)
        self.heard.append(("logps",))
        return batch.behavior_logp, torch.zeros_like(batch.sampled)

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        assert self.scorer.weights_match_version
        self.heard.append(("closing", {piece.piece.version for piece in unscored}, len(unscored)))

    def trained(self, kept: float) -> None:
        assert not self.scorer.weights_match_version and 0.9 < kept <= 1
        weights = self.scorer.weights()
        self.heard.append(("trained", float(next(iter(weights.values())).double().sum())))

    def close(self) -> None:
        self.heard.append(("close",))


@pytest.mark.costly
def test_a_replayed_route_hears_what_it_would_have_heard(
    recorded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    route, recorded = Listens(), Recorded(recorded_run / "recorded")

    def build(config: OldLogpsConfig, scorer: Scorer) -> Listens:
        route.scorer = scorer
        return route

    monkeypatch.setattr("unstale.analysis.audit.build_old_logps", build)
    audit_run(recorded_run, routes=["rollout"], console=Console(file=StringIO()))
    batches = [recorded.batch(step) for step in recorded.steps]
    pieces = [piece for trained in batches for piece in segments(trained.batch)]
    expected: list[tuple[object, ...]] = []
    for version in range(4):
        needed = {
            held
            for at in batches[version:]
            for held in at.batch.version.unique().tolist()
            if held >= 0
        }
        of_version = sum(piece.piece.version == version for piece in pieces)
        passed = batches[version].batch.episodes
        waiting = sum(
            piece.piece.version == version and piece.episode not in passed for piece in pieces
        )
        expected += [
            ("published", version, sorted({held for held in needed if held <= version} | {version}))
        ]
        expected += [("idle", of_version), ("idle", 0), ("logps",)]
        expected += [("closing", {version} if waiting else set(), waiting)]
        if version < 3:
            expected += [("trained", weigh(recorded, version + 1))]
    assert route.heard == [*expected, ("close",)]


def weigh(recorded: Recorded, version: int) -> float:
    """Return the summary of a version's weights that `Listens` records."""
    policy = Policy.load(RunConfig(recipe="toy").policy_folder)
    policy.load_weights(recorded.weights(version))
    return float(next(iter(policy.weights().values())).double().sum())


@pytest.mark.costly
def test_a_route_that_cannot_be_built_is_named(
    recorded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> OldLogps:
        raise ConfigError("not enough memory")

    monkeypatch.setattr("unstale.analysis.audit.build_old_logps", refuse)
    found = audit_run(recorded_run, routes=["rollout"], console=Console(file=StringIO()))
    assert found["not_built"] == {"rollout": "not enough memory"} and found["routes"] == []
    assert "not enough memory" in (recorded_run / "report.html").read_text()


def test_what_cannot_be_audited_says_why(recorded_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean ewma_prox"):
        audit_run(recorded_run, routes=["ewma_pro"])
    (tmp_path / "config.json").write_text((recorded_run / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"--audit\.record true"):
        audit_run(tmp_path)
    with pytest.raises(ConfigError, match="not a run folder"):
        audit_run(tmp_path / "nowhere")
    with pytest.raises(SystemExit) as left:
        main(["audit", str(recorded_run), "--routes", "rollout", "--alpha", "half"])
    assert left.value.code == 2


def test_a_token_without_a_truth_does_not_spoil_the_verdict_on_its_neighbours() -> None:
    """With one unclean token per sequence, the true decision on the other tokens does not count it
    as 0."""
    batch = collate([episode(0, [3, (4, 0), (2, 0, False)])])
    exact = batch.behavior_logp + 0.01 * batch.sampled
    correction = CorrectionConfig(mode="mask", low=0.9, high=1.1, unit="sequence")
    rules = LossSpec(correction, ObjectiveConfig())
    truth = torch.where(batch.clean & batch.sampled, exact, 0.0)
    audited = Truth(batch, 1, truth, exact).compare(exact, rules)
    assert audited.dropped.shape == (2, 4) and not audited.dropped.any()
