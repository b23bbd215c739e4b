"""What is promised of the page D against S.

- Counts are of all tokens; a sample of points and the tokens that were not read are stated.
- Limits of tokens that an address has select exactly these tokens.
"""

import math
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analysis.test_dashboard import Client, served
from tests.support.fake_run import fake_run
from unstale.analysis.dashboard import factors, limits
from unstale.analysis.dashboard.factors import Brush, TokenCache, TokenChoice
from unstale.durability.journal import JOURNAL, Journal
from unstale.records import Sampled, walk
from unstale.token_values import TokenFlag


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    fake_run(root / "first", steps=6, with_values=True)
    fake_run(root / "engine", steps=3, route="rollout", with_values=True)
    return root


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[Client]:
    with served(runs) as found:
        found.when_read("first")
        yield found


def columns_of(run: Path) -> dict[str, Any]:
    """Return the trained tokens of a run by the journal's own reader."""
    found: dict[str, list[Any]] = {}
    with Journal.read(run) as journal:
        for group in journal.token_steps():
            for each in journal.trained_tokens(group):
                places, versions = [], []
                for start, piece, _ in walk(journal.pieces(each.episode)):
                    if isinstance(piece, Sampled):
                        places += range(start, start + len(piece.tokens))
                        versions += [piece.version] * len(piece.tokens)
                row = {name: getattr(each, name) for name in ("log_d", "log_s", "flags")}
                row |= {"token": np.array(places), "lag": each.version - np.array(versions)}
                row |= {"outcome": np.array(each.outcome), "advantage": each.advantage}
                row |= {"episode": np.full(len(places), each.episode)}
                row |= {"step": np.full(len(places), each.step)}
                for name, values in row.items():
                    found.setdefault(name, []).append(values)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def test_counts_are_of_all_tokens_and_points_are_a_stated_sample(
    client: Client, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "MAX_POINTS", 100)
    whole = columns_of(runs / "first")
    placed = ~np.isnan(whole["log_s"])
    found = client.ask("factors", run="first")
    assert found["total"] == found["read"] == found["chosen"] == len(placed)
    assert found["placed"] == placed.sum() < len(placed)
    assert sum(count for *_, count in found["counts"]) == placed.sum()
    for name in ("log_d", "log_s"):
        in_marginal = sum(sum(each["counts"]) for each in found["marginals"][name])
        assert in_marginal == (~np.isnan(whole[name])).sum()
    apart = ~placed & ~np.isnan(whole["log_d"])
    dropped = apart & (whole["outcome"] == "masked")
    assert found["without_s"] == {"tokens": apart.sum(), "dropped": dropped.sum()}
    assert 0 < dropped.sum() < apart.sum()
    lags, counts = np.unique(whole["lag"][placed], return_counts=True)
    assert found["by_lag"] == [[int(a), int(b)] for a, b in zip(lags, counts, strict=True)]
    for lag, each in zip(lags, found["marginals"]["log_s"], strict=True):
        assert (each["lag"], sum(each["counts"])) == (lag, (placed & (whole["lag"] == lag)).sum())
    points = found["points"]
    assert {len(values) for values in points.values()} == {100}
    where = {
        (e, t): i for i, (e, t) in enumerate(zip(whole["episode"], whole["token"], strict=True))
    }
    rows = [where[pair] for pair in zip(points["episode"], points["token"], strict=True)]
    assert len(set(rows)) == 100
    for name in ("log_d", "log_s", "lag", "step"):
        assert (whole[name][rows] == np.array(points[name], whole[name].dtype)).all()
    shown = [found["outcomes"][each] for each in points["outcome"]]
    assert shown == whole["outcome"][rows].tolist()
    cells = {tuple(each[:2]) for each in found["counts"]}
    assert len(cells) > 100  # so every point is of another cell
    columns = [factors._cell(points[name], found["axes"][name]) for name in ("log_d", "log_s")]
    sample = [(int(d), int(s)) for d, s in zip(*columns, strict=True)]
    assert len(set(sample)) == 100 and set(sample) <= cells


@pytest.mark.parametrize(
    ("choice", "where"),
    [
        ({"step_min": 3, "step_max": 4}, lambda t: (t["step"] >= 3) & (t["step"] <= 4)),
        ({"lag_min": 2}, lambda t: t["lag"] >= 2),
        ({"lag_max": 1, "step_min": 2}, lambda t: (t["lag"] <= 1) & (t["step"] >= 2)),
        ({"exact": "approximated"}, lambda t: (t["flags"] & int(TokenFlag.EXACT)) == 0),
        ({"exact": "exact", "step_max": 5}, lambda t: (t["flags"] % 2 == 1) & (t["step"] <= 5)),
    ],
)
def test_a_filter_chooses_the_tokens_that_it_names(
    client: Client, runs: Path, choice: dict[str, Any], where: Any
) -> None:
    whole = columns_of(runs / "first")
    chosen = where(whole)
    found = client.ask("factors", run="first", **choice)
    assert 0 < found["chosen"] == chosen.sum() < len(chosen)
    assert found["placed"] == (chosen & ~np.isnan(whole["log_s"])).sum()


def test_a_brush_selects_exactly_the_tokens_inside(client: Client, runs: Path) -> None:
    whole = columns_of(runs / "first")
    edge = float(whole["log_s"][np.nanargmax(whole["log_s"])])
    for brush in (
        {"s_min": 0.15},
        {"d_min": -0.004, "d_max": 0.001, "s_min": -0.2, "s_max": 0},
        {"s_min": edge},
        {"d_max": -5},
        {"d_min": math.log(2)},
    ):
        low, high = brush.get("d_min", -np.inf), brush.get("d_max", np.inf)
        inside = (whole["log_d"] >= low) & (whole["log_d"] <= high)
        of = ~np.isnan(whole["log_d"])
        if "s_min" in brush or "s_max" in brush:
            inside &= whole["log_s"] >= brush.get("s_min", -np.inf)
            inside &= whole["log_s"] <= brush.get("s_max", np.inf)
            of &= ~np.isnan(whole["log_s"])
        picked = client.ask("factors", run="first", **brush)["selected"]
        assert (picked["tokens"], picked["of"]) == (inside.sum(), of.sum())
        names, numbers = np.unique(whole["outcome"][inside], return_counts=True)
        assert picked["outcomes"] == dict(zip(names.tolist(), numbers.tolist(), strict=True))
        assert picked["episodes"] == len(np.unique(whole["episode"][inside]))
        assert sum(row["tokens"] for row in picked["rows"]) == inside.sum()
        assert sum(picked["outcomes"].values()) == inside.sum()
        for row in picked["rows"]:
            own = inside & (whole["episode"] == row["episode"])
            limited = {f"log_{name[0]}" for name in brush}
            size = np.max([np.abs(whole[name]) for name in sorted(limited)], axis=0)
            at = own & (whole["token"] == row["token"])
            assert at.sum() == 1 and size[at] == size[own].max() and own.sum() == row["tokens"]
            (log_s,) = whole["log_s"][at].tolist()
            assert row["log_s"] == (None if math.isnan(log_s) else log_s)
    assert client.ask("factors", run="first")["selected"] is None


def test_a_run_with_more_tokens_is_read_evenly_and_memory_is_bounded(runs: Path) -> None:
    cache = TokenCache(limit=1500)
    whole = cache.read(runs / "first", TokenChoice())
    assert whole.read.num_tokens == whole.read.num_all == len(whole)
    assert 0 < cache.num_tokens <= 1500
    part = cache.read(runs / "first", TokenChoice(), limit=len(whole) // 2)
    assert len(part) == part.read.num_tokens <= len(whole) // 2 and part.read.num_all == len(whole)
    assert part.steps == [1, 5]  # every second row
    answer = factors.answer(part, Brush(), limits.of_run(runs / "first"))
    assert (answer["total"], answer["read"]) == (len(whole), len(part))
    again = cache.read(runs / "first", TokenChoice())
    assert sum(part.log_d.sum() for part in again.placed) == pytest.approx(
        sum(part.log_d.sum() for part in whole.placed)
    )


@pytest.mark.parametrize(("share", "steps"), [(0.99, 5), (0.7, 4), (0.5, 3), (0.01, 1)])
def test_no_more_rows_are_left_out_than_the_limit_needs(
    tmp_path: Path, share: float, steps: int
) -> None:
    """Six rows of 100 tokens each. A row is always read, so that an answer is not empty."""

    class Rows:
        num_token_values = 1

        def rows(self, *_: Any) -> list[tuple[int, ...]]:
            return [(step, step, 100, 0) for step in range(6)]

        def wrap_errors(self, _: str) -> Any:
            return nullcontext()

    found = factors.find_rows(Rows(), TokenChoice(), limit=int(600 * share))  # type: ignore[arg-type]
    assert found.num_tokens == 100 * steps and found.num_all == 600
    gaps = np.diff([row.step for row in found.rows])
    assert steps == 1 or gaps.max() - gaps.min() <= 1


def test_the_limits_of_a_run_are_lines_with_a_sentence(client: Client) -> None:
    found = client.ask("factors", run="first")
    places = [(line["on"], round(math.exp(line["at"]), 6)) for line in found["lines"]]
    assert places == [("d", 0.5), ("d", 2), ("s", 0.8), ("s", 1.28)]
    assert all(line["text"] in found["sentences"] for line in found["lines"])
    engine = client.ask("factors", run="engine")
    assert any("both discrepancy and staleness" in text for text in engine["sentences"])


def test_a_wrong_choice_of_tokens_is_refused_with_a_reason(client: Client) -> None:
    for params, sentence in (
        ({"s_min": "x"}, "s_min must be a number"),
        ({"s_min": "nan"}, "s_min must be a finite number"),
        ({"d_min": "1", "d_max": "0"}, "d_min must be <= d_max, got 1 and 0"),
        ({"lag_min": "2", "lag_max": "1"}, "lag_min must be <= lag_max"),
        ({"exact": "x"}, "exact must be one of all, exact, approximated"),
    ):
        assert sentence in client.ask("factors", 400, run="first", **params)["error"]


def test_a_damaged_row_is_a_sentence(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "first", tmp_path / "runs" / "first")
    with closing(sqlite3.connect(tmp_path / "runs" / "first" / JOURNAL)) as journal:
        journal.execute("UPDATE trained_tokens SET route = 'x' WHERE step = 4")
        journal.commit()
    with served(tmp_path / "runs") as client:
        error = client.ask("factors", 409, run="first")["error"]
        assert "the trained tokens of group 4 in step 4: they changed" in error
        assert client.ask("factors", run="first", step_max=3)["placed"] > 0
    with closing(sqlite3.connect(tmp_path / "runs" / "first" / JOURNAL)) as journal:
        journal.execute("UPDATE pieces SET num_tokens = 1000000000000 WHERE episode = 1")
        journal.commit()
    with served(tmp_path / "runs") as client:
        error = client.ask("factors", 409, run="first", step_max=1)["error"]
        assert re.search(r"episode 1 has \d{13} sampled tokens, but the values of", error)


def test_a_run_without_values_or_options_says_so(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "runs" / "plain", steps=2)
    with served(tmp_path / "runs") as client:
        found = client.ask("factors", run="plain")
        assert (found["total"], found["points"]["log_d"], found["counts"]) == (0, [], [])
        (run / "config.json").write_text('{"recipe": "x", "nonsense": 1}')
        problem = client.ask("factors", run="plain")["problem"]
        assert problem.startswith("the options of the run cannot be read: ")
        (run / JOURNAL).unlink()
        assert "is missing" in client.ask("factors", 409, run="plain")["error"]
