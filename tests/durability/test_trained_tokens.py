"""Test the values of trained tokens in the journal.

They are those of a plain forward pass with the weights of the recorded versions, and flags follow
the formulas. A value that is exactly 0 stays 0. The share of groups is chosen by their numbers. A
resume removes the values of steps that are trained again. Damaged rows are found. Exports have the
values. A limit on bytes per token is pinned.
"""

import asyncio
import json
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unstale
from tests.durability.test_journal import group, record, said
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.config import AuditConfig, JournalConfig, ObjectiveConfig
from unstale.durability import compare_runs
from unstale.durability.journal import (
    JOURNAL,
    Journal,
    JournalError,
    TrainedTokens,
    check,
    content,
    token_rows,
)
from unstale.durability.journal.token_rows import pack_tokens, unpack_tokens
from unstale.model.policy import Policy
from unstale.records import Piece, Sampled
from unstale.testing import plain_logps
from unstale.token_values import TokenFlag, TokenValues, keeps_tokens
from unstale.weights.recording import RECORDED, Recorded

NAMES = ("log_d", "log_s", "weight", "advantage", "entropy", "flags")


def values(  # noqa: PLR0913 - each names one property of the values
    episode: int = 0,
    *,
    group: int = 0,
    num_tokens: int = 2,
    minibatch: int | None = 0,
    scored: bool = True,
    seed: int = 0,
) -> TokenValues:
    """Return random values, of the size that a bfloat16 trainer has."""
    rng = np.random.default_rng([seed, episode])
    unknown = np.full(num_tokens, np.nan, np.float32)

    def normal(size: float) -> np.ndarray:
        return rng.normal(0, size, num_tokens).astype(np.float32)

    log_d = normal(0.01)
    entropy = np.where(rng.random(num_tokens) < 0.1, np.abs(normal(1)), np.nan)
    return TokenValues(
        group=group,
        episode=episode,
        route="snapshot_old" if scored else "interp_prox_linear",
        minibatch=minibatch,
        log_d=log_d if scored else unknown,
        log_s=unknown if minibatch is None else normal(0.05),
        weight=np.exp(log_d) if scored else unknown,
        advantage=np.full(num_tokens, rng.normal(), np.float32),
        entropy=unknown if minibatch is None else entropy.astype(np.float32),
        flags=rng.integers(0, 128, num_tokens).astype(np.uint8),
    )


def train_with(journal: Journal, number: int, *tokens: TokenValues, step: int) -> None:
    journal.commit([group(number)], step=step, version=step - 1, tokens=tokens)
    asyncio.run(journal.checkpoint(f"of {step}", step=step, version=step))


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, max_size=20), st.sampled_from([None, 0, 3]))
def test_values_come_back_with_the_error_of_float16_and_zeros_stay(
    numbers: list[float], minibatch: int | None
) -> None:
    count = len(numbers)
    mine = replace(values(7, num_tokens=count, minibatch=minibatch, seed=1), group=4)
    exact = np.array(numbers, np.float32)
    mine = replace(mine, log_d=exact, advantage=exact)
    if minibatch is not None:
        mine = replace(mine, log_s=-exact)
    other = values(9, group=4, num_tokens=3, scored=False, minibatch=None)
    found = unpack_tokens(pack_tokens([mine, other]), group=4, route="r")
    assert [(each.episode, each.minibatch, each.group, each.route) for each in found] == [
        (7, minibatch, 4, "r"),
        (9, None, 4, "r"),
    ]
    for before, after in zip((mine, other), found, strict=True):
        for name in NAMES:
            one, two = getattr(before, name), getattr(after, name)
            assert one.dtype == two.dtype and one.shape == two.shape
            if name in ("advantage", "flags"):
                assert one.tobytes() == two.tobytes()
                continue
            assert (np.isnan(one) == np.isnan(two)).all() and ((one == 0) == (two == 0)).all()
            one, two = one[~np.isnan(one)].astype(float), two[~np.isnan(two)].astype(float)
            assert (np.abs(one - two) <= np.maximum(np.abs(one) * 2**-11, 2**-24)).all()
            assert (np.sign(one) == np.sign(two)).all()


def test_differences_of_logps_are_exact_where_two_programs_differ_by_rounding() -> None:
    """A difference of two float32 between 0.5 and 64 is a multiple of 2^-24, as float16 is."""
    rng = np.random.default_rng(0)
    behavior = -rng.uniform(0.5, 20, 10_000).astype(np.float32)
    steps = rng.integers(-8, 9, 10_000)
    old = behavior + (steps * np.spacing(behavior)).astype(np.float32)
    log_d = old - behavior
    log_d = np.where(np.abs(log_d) < 2**-13, log_d, 0).astype(np.float32)
    mine = replace(values(num_tokens=10_000), log_d=log_d)
    (found,) = unpack_tokens(pack_tokens([mine]), group=0, route="")
    assert (found.log_d == log_d).all() and (log_d != 0).sum() > 8000


def test_the_share_of_groups_is_chosen_by_their_numbers() -> None:
    assert not any(keeps_tokens(number, 0.0) for number in range(100))
    assert all(keeps_tokens(number, 1.0) for number in range(100))
    assert not keeps_tokens(-1, 1.0)
    kept = {s: {n for n in range(1000) if keeps_tokens(n, s)} for s in (0.1, 0.25, 0.5)}
    assert kept[0.1] < kept[0.25] < kept[0.5]
    for share, numbers in kept.items():
        for start in range(0, 900, 50):
            assert abs(len(numbers & {*range(start, start + 100)}) - 100 * share) <= 2


def test_values_are_read_before_the_checkpoint_and_removed_by_a_rewind(tmp_path: Path) -> None:
    """A group that is replayed has a row for each step."""
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        for number in range(3):
            record(journal, group(number))
        train_with(journal, 0, values(0), values(1), step=1)
        again = replace(values(1), route="stored")
        train_with(journal, 1, values(2, group=1), again, step=2)
        journal.commit([group(2)], step=3, version=2, tokens=[values(4, group=2)])
        journal.flush()
        with Journal.read(tmp_path) as read:
            assert check(read) == [] and read.token_steps() == {0: [1, 2], 1: [2], 2: [3]}
            found = read.trained_tokens(0)
            assert [(each.episode, each.step, each.version, each.route) for each in found] == [
                (0, 1, 0, "snapshot_old"),
                (1, 1, 0, "snapshot_old"),
                (1, 2, 1, "stored"),
            ]
            assert [each.episode for each in read.trained_tokens(0, 2)] == [1]
            assert [each.step for each in read.trained_tokens(0, episode=1)] == [1, 2]
            assert read.trained_tokens(9) == []
            assert found[0].behavior_logp.tolist() == [-0.5, -0.25]
            old_logp = np.array([-0.5, -0.25]) + values(0).log_d
            assert np.allclose(found[0].old_logp, old_logp, atol=1e-4)
            assert np.allclose(found[0].logp - found[0].old_logp, values(0).log_s, atol=1e-4)
            assert content(read)["token_values"] == 10
            assert content(read)["groups_with_token_values"] == 3
        journal.rewind(1, everything=False)
        with Journal.read(tmp_path) as read:
            assert read.token_steps() == {0: [1, 2], 1: [2]} and check(read) == []
        journal.rewind(0, everything=True)
    with Journal.read(tmp_path) as read:
        assert read.token_steps() == {0: [1]} and check(read) == []


DAMAGES = (
    ("UPDATE trained_tokens SET step = 9", "1 rows of trained_tokens changed after"),
    ("UPDATE trained_tokens SET tokens = x'ffff'", "cannot be decompressed"),
    ("DELETE FROM trained_tokens", "trained_tokens has 0 rows, but 1 were written"),
    (
        "DELETE FROM finished WHERE number = 0",
        "row 1 of trained_tokens belongs to a row of finished that is missing",
    ),
    (
        "UPDATE pieces SET num_tokens = 3 WHERE episode = 1 AND version IS NOT NULL",
        "group 0, step 1: the trained tokens of episode 1 are 2, but the group has 3 sampled",
    ),
)


@pytest.mark.parametrize("statement, says", DAMAGES)
def test_damaged_rows_are_found(tmp_path: Path, statement: str, says: str) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        record(journal, group(0))
        train_with(journal, 0, values(0), values(1), step=1)
    with Journal.read(tmp_path) as read:
        assert check(read) == []
    with closing(sqlite3.connect(tmp_path / JOURNAL)) as connection:
        connection.execute(statement)
        connection.commit()
    with Journal.read(tmp_path) as read:
        assert any(says in problem for problem in check(read))
        if statement.startswith("UPDATE"):
            with pytest.raises(JournalError, match=r"changed after (it|they)"):
                read.trained_tokens(0)


WRONG = (
    ([values(0, num_tokens=3)], "episode 0 has 2 sampled tokens, but the values of 3"),
    ([values(5)], "episode 5 is not one of its group"),
)


@pytest.mark.parametrize("tokens, says", WRONG)
def test_values_of_other_tokens_than_the_groups_are_refused_by_a_reader(
    tmp_path: Path, tokens: list[TokenValues], says: str
) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        record(journal, group(0))
        train_with(journal, 0, *tokens, step=1)
    with Journal.read(tmp_path) as read:
        with pytest.raises(JournalError, match=says):
            read.trained_tokens(0)
        (problem,) = check(read)
        assert problem.startswith("group 0, step 1: the trained tokens of episode")


@pytest.mark.parametrize("cut", [0, 3, 20, -1])
def test_a_row_that_is_cut_or_too_long_is_refused(tmp_path: Path, cut: int) -> None:
    data = zlib.decompress(pack_tokens([values(0), values(1)]), wbits=-zlib.MAX_WBITS)
    data = data[:cut] if cut >= 0 else data + b"\0"
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = packer.compress(data) + packer.flush()
    with pytest.raises(ValueError, match=r"end after|bytes follow its token values"):
        unpack_tokens(packed, group=0, route="")


def test_a_row_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_tokens([values(0), values(1)])
    size = len(zlib.decompress(packed, wbits=-zlib.MAX_WBITS))
    monkeypatch.setattr(token_rows, "MAX_BYTES", size)
    assert len(unpack_tokens(packed, group=0, route="")) == 2
    monkeypatch.setattr(token_rows, "MAX_BYTES", size - 1)
    with pytest.raises(ValueError, match=f"its token values exceed {size - 1} bytes"):
        unpack_tokens(packed, group=0, route="")


def test_a_row_that_was_cut_after_it_was_compressed_is_refused() -> None:
    packed = pack_tokens([values(0), values(1)])
    with pytest.raises(ValueError, match="its token values are incomplete"):
        unpack_tokens(packed[:-4], group=0, route="")


def test_values_that_cannot_be_packed_end_the_run(tmp_path: Path) -> None:
    wrong = replace(values(0), minibatch=1 << 20)
    with (
        pytest.raises(JournalError, match=r"journal\.sqlite failed"),
        Journal(tmp_path / JOURNAL) as journal,
    ):
        record(journal, group(0))
        train_with(journal, 0, wrong, step=1)


def test_long_replies_of_a_bfloat16_trainer_cost_under_7_bytes_a_token() -> None:
    """All values differ, so that only the flags and the advantage can be compressed."""
    episodes = [values(number, num_tokens=4000) for number in range(4)]
    episodes = [replace(each, flags=each.flags & np.uint8(1)) for each in episodes]
    assert len(pack_tokens(episodes)) / (4 * 4000) < 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_tiny(path)
    return path


def trained(folder: Path, runs: Path, *, share: float = 1.0) -> Path:
    """Train for some steps and record every version. Some tokens of the run are stale."""
    config = tiny_run(
        folder,
        runs,
        max_steps=8,
        audit=AuditConfig(record=True),
        objective=ObjectiveConfig(clip_low=0.05, clip_high=0.05, ratio_cap=1.04),
        journal=JournalConfig(token_share=share),
    )
    return unstale.train(config).folder


@pytest.fixture(scope="module")
def ran(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(folder, tmp_path_factory.mktemp("runs"))


class Truth:
    """Plain forward passes with recorded weights."""

    def __init__(self, folder: Path, run: Path) -> None:
        self._recorded = Recorded(run / RECORDED)
        self._policy = Policy.load(folder)

    def logps(self, tokens: tuple[int, ...], version: int) -> np.ndarray:
        self._policy.load_weights(self._recorded.weights(version))
        return plain_logps(self._policy, tokens).numpy()


def every(run: Path) -> list[TrainedTokens]:
    with Journal.read(run) as read:
        assert check(read) == []
        return [each for number in read.token_steps() for each in read.trained_tokens(number)]


@pytest.mark.costly
def test_values_are_those_of_a_plain_pass_with_the_weights_of_each_version(
    folder: Path, ran: Path
) -> None:
    truth = Truth(folder, ran)
    stale = fresh = clipped = capped = 0
    with Journal.read(ran) as read:
        groups = {row.number: row for row in read.groups()}
        trained = [number for number, row in groups.items() if row.step is not None]
        assert sorted(read.token_steps()) == trained
        for number in trained:
            for each in read.trained_tokens(number):
                row, episode = groups[number], read.episode(each.episode).trajectory
                assert (each.step, each.version, each.route) == (
                    row.step,
                    row.version,
                    "snapshot_old",
                )
                sampled = [
                    (start + k, piece.version)
                    for start, piece in starts(episode.pieces)
                    for k in range(len(piece.tokens))
                ]
                at = np.array([place for place, _ in sampled])
                versions = np.array([version for _, version in sampled])
                needed = {int(version) for version in versions} | {each.version}
                logps = {v: truth.logps(episode.tokens, v)[at] for v in needed}
                old = np.array([logps[int(v)][k] for k, v in enumerate(versions)], np.float64)
                behavior = np.array([x for p in episode.sampled for x in p.behavior_logp])
                assert each.behavior_logp.tolist() == behavior.astype(np.float32).tolist()
                if each.minibatch is None:  # its rewards are equal, so nothing was computed
                    assert np.isnan([each.log_d, each.log_s, each.weight, each.entropy]).all()
                    assert set(each.outcome) == {"skipped"} and not each.advantage.any()
                    continue
                assert each.minibatch == 0 and each.has(TokenFlag.EXACT).all()
                assert np.abs(each.old_logp - old).max() < 2e-5
                log_s = logps[each.version] - old
                assert (np.abs(each.log_s - log_s) <= 2e-5 + 2**-11 * np.abs(log_s)).all()
                # A token of the newest version has the same old_logp and logp, bit for bit.
                current = versions == each.version
                assert (each.log_s[current] == 0).all()
                assert (each.log_s[~current] != 0).any() or current.all()
                stale, fresh = stale + (~current).sum(), fresh + current.sum()
                clipped += check_flags(each, log_s, each.old_logp - behavior)
                capped += each.has(TokenFlag.CAPPED).sum()
    assert stale > 100 and fresh > 50 and clipped > 10 and capped > 10


def starts(pieces: Sequence[Piece]) -> list[tuple[int, Sampled]]:
    found, start = [], 0
    for piece in pieces:
        if isinstance(piece, Sampled):
            found.append((start, piece))
        start += len(piece.tokens)
    return found


def check_flags(each: TrainedTokens, log_s: np.ndarray, log_d: np.ndarray) -> int:
    """Compare flags with the formulas, except at tokens within rounding of a limit."""
    ratio = np.exp(log_s)
    expected = {
        TokenFlag.CLIPPED_LOW: ((each.advantage < 0) & (ratio < 0.95), ratio - 0.95),
        TokenFlag.CLIPPED_HIGH: ((each.advantage > 0) & (ratio > 1.05), ratio - 1.05),
        TokenFlag.CAPPED: (np.exp(log_s + log_d) > 1.04, np.exp(log_s + log_d) - 1.04),
    }
    for flag, (truth, margin) in expected.items():
        clear = np.abs(margin) > 1e-4
        assert (each.has(flag) == truth)[clear].all()
    assert not each.has(TokenFlag.VETOED | TokenFlag.MASKED | TokenFlag.DROPPED).any()
    assert np.abs(each.weight - np.exp(log_d)).max() < 1e-3
    return int(each.has(TokenFlag.CLIPPED_LOW | TokenFlag.CLIPPED_HIGH).sum())


@pytest.mark.costly
def test_the_share_changes_nothing_but_the_kept_groups(
    folder: Path, ran: Path, tmp_path: Path
) -> None:
    kept = {}
    for share in (0.0, 0.4):
        other = trained(folder, tmp_path / str(share), share=share)
        different = compare_runs.differences(ran, other)
        tables = {text.partition(" of the journal")[0] for text in different}
        assert tables == {"trained_tokens", "counts"}, different
        with Journal.read(ran) as all_of, Journal.read(other) as some:
            steps = all_of.token_steps()
            kept[share] = some.token_steps()
            assert kept[share] == {n: s for n, s in steps.items() if keeps_tokens(n, share)}
            for number in kept[share]:
                pairs = zip(all_of.trained_tokens(number), some.trained_tokens(number), strict=True)
                assert all(one.log_s.tobytes() == two.log_s.tobytes() for one, two in pairs)
    assert not kept[0.0] and 4 <= len(kept[0.4]) <= 9


def test_an_export_has_the_values_of_its_tokens(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        json.loads(line) for line in said(capsys, "export-trajectories", str(ran)).splitlines()
    ]
    found = {each.episode: each for each in every(ran)}
    seen = 0
    for row in lines:
        assert {len(row[name]) for name in ("token", "behavior_logp")} == {len(row["token"])}
        mine = found.get(row["episode"])
        if mine is None:
            assert row["route"] is None and row["log_d"] is None and row["outcome"] is None
            continue
        at = [i for i, value in enumerate(row["behavior_logp"]) if value is not None]
        expected = [None if np.isnan(value) else value for value in mine.log_d.tolist()]
        assert [row["log_d"][i] for i in at] == expected
        assert (row["minibatch"] is None) == (None in expected)
        assert [row["outcome"][i] for i in at] == mine.outcome
        assert [row["exact"][i] for i in at] == [row["minibatch"] is not None] * len(at)
        assert row["log_d"][0] is None and len(row["log_s"]) == len(row["token"])
        entropies = [value for value in row["entropy"] if value is not None]
        assert len(entropies) == np.isfinite(mine.entropy).sum()
        seen += 1
    assert seen == len(found) > 20
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "rows.parquet"
    said(capsys, "export-trajectories", str(ran), "--format", "parquet", "--out", str(out))
    rows = [{**row, "rewards": dict(row["rewards"])} for row in parquet.read_table(out).to_pylist()]
    assert rows == lines
