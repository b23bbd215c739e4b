"""Compare exact old log-probabilities of a pretrained model with plain transformers.

The model is SmolLM2-135M-Instruct, in float32. A run of several versions trains on replies of which
some were interrupted by an update, and short runs on forked episodes and on text whose context was
edited. The largest error of old log-probabilities against float64 may exceed that of plain float32
passes on the same tokens by 1e-5 nats. The direct difference of the two is larger than 1e-5, about
2e-5: two correct computations in float32 add numbers in different orders, and each is off from
float64 by up to 2e-5. It is printed (`-rP`). The engine's log-probability shows which
version sampled a token: it is off by rounding alone under that version's weights, and not under
others'.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unstale.cli.session import train
from unstale.config import (
    AuditConfig,
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.options import override
from unstale.envs.dataset import DatasetConfig
from unstale.old_logps.snapshot_old import SnapshotOld
from unstale.records import Batch, Provenance, Trajectory
from unstale.rollout.texts import PolicyTexts
from unstale.weights.recording import RECORDED, Recorded

STEPS = 8
TOLERANCE = 1e-5
"""Nats by which old log-probabilities may be worse than plain float32 passes."""
DIRECT = 4e-5
"""Largest difference in nats from plain float32 passes: the sum of both errors against float64."""


def digits_share(reply: str, row: Any) -> float:
    """Return the share of a reply's characters that are digits, which differs within a group."""
    return sum(map(str.isdigit, reply)) / max(1, len(reply))


def configured(folder: Path, tmp_path: Path) -> RunConfig:
    """Return a run of `STEPS` steps with tokens up to 2 versions old, and long replies."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {
            "prompt": f"Count from {i} to {i + 20}, then say why you like numbers.",
            "then": ["Which of them do you like most?"],
        }
        for i in range(40)
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return RunConfig(
        recipe="llm",
        model=str(folder),
        runs=tmp_path,
        name="run",
        max_steps=STEPS,
        deterministic=True,
        task=DatasetConfig(env=f"dataset:{prompts}", reward=f"{__name__}:digits_share"),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=2),
        engine=EngineConfig(dtype="float32", max_completion_tokens=64, max_context=192),
        trainer=TrainerConfig(dtype="float32", lr=1e-5),
        audit=AuditConfig(record=True),
        eval=EvalConfig(tasks=0),
        checkpoint=CheckpointConfig(interval=STEPS),
    )


class Plain:
    """The recorded versions of a model, run by transformers alone."""

    def __init__(self, folder: Path, recorded: Recorded) -> None:
        from transformers import AutoModelForCausalLM

        self._recorded = recorded
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logps(self, batch: Batch, dtype: torch.dtype, *, older: int = 0) -> Tensor:
        """Return the log-probability `[T]` of each sampled token under its version's weights.

        With `older`, the weights are those of so many versions before, but not before the first.
        """
        found = torch.zeros(len(batch.tokens), dtype=torch.float64)
        for version in batch.version[batch.sampled].unique().tolist():
            weights = self._recorded.weights(max(version - older, 0))
            self._model.float().load_state_dict(weights, strict=False)
            self._model.to(dtype)
            for start, end in batch.spans():
                here = batch.sampled[start:end] & (batch.version[start:end] == version)
                if here.any():
                    logps = self._sequence(batch.tokens[start:end])
                    found[start:end] = torch.where(here, logps, found[start:end])
        return found

    def _sequence(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self._model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double()
        logps = logits.log_softmax(-1).gather(1, tokens[1:, None].long())[:, 0]
        return torch.cat([logps.new_zeros(1), logps])


def mixed_turns(batch: Batch) -> int:
    """Return the number of replies that have tokens of two versions."""
    columns = (batch.sequence, batch.turn, batch.version)
    places = {place for place in zip(*(c.tolist() for c in columns), strict=True) if place[1] >= 0}
    return len(places) - len({place[:2] for place in places})


class Answers:
    """Batches of a run, and the route's answers: log-probabilities, and which are exact."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Batch, Tensor, Tensor]] = []
        logps = SnapshotOld.logps

        def kept(route: SnapshotOld, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
            values, exact = logps(route, batch, now)
            self.found.append((replace(batch), values.double(), exact))
            return values, exact

        monkeypatch.setattr(SnapshotOld, "logps", kept)

    def require_plain(self, plain: Plain) -> list[Tensor]:
        """Compare all answers with plain passes. Return the true values at each batch's tokens.

        Largest errors are compared over all batches: one batch has few tokens, and its largest
        error is that of one of them.
        """
        found, direct, largest, plain_largest = [], 0.0, 0.0, 0.0
        for batch, values, exact in self.found:
            assert torch.equal(exact, batch.sampled)
            at = batch.sampled
            true, rounded = (
                plain.logps(batch, each)[at] for each in (torch.float64, torch.float32)
            )
            error, plain_error = (values[at] - true).abs(), (rounded - true).abs()
            assert error.mean() <= 2 * plain_error.mean()
            largest = max(largest, float(error.max()))
            plain_largest = max(plain_largest, float(plain_error.max()))
            direct = max(direct, float((values[at] - rounded).abs().max()))
            found.append(true)
        sys.stdout.write(
            f"largest error against float64: {largest:.2g} nats, of plain float32 "
            f"{plain_largest:.2g}; largest difference of the two {direct:.2g}\n"
        )
        assert largest <= plain_largest + TOLERANCE
        assert direct <= DIRECT
        return found


@pytest.mark.slow
def test_old_logps_of_a_pretrained_model_equal_plain_transformers(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(monkeypatch)
    run = train(configured(pretrained, tmp_path))
    plain = Plain(pretrained, Recorded(run.folder / RECORDED))
    batches = [batch for batch, *_ in answers.found]
    assert len(batches) == STEPS
    assert sum(map(mixed_turns, batches)) > 0, "no reply was interrupted"
    assert {v for batch in batches for v in batch.version[batch.sampled].tolist()} >= {0, 1, 2}
    for batch, true in zip(batches, answers.require_plain(plain), strict=True):
        at = batch.sampled
        sampled_with = (batch.behavior_logp[at].double() - true).abs()
        later = batch.version[at] > 0
        other = (
            batch.behavior_logp[at].double() - plain.logps(batch, torch.float64, older=1)[at]
        ).abs()
        assert sampled_with.max() < 1e-3
        assert not later.any() or other[later].mean() > 20 * sampled_with[later].mean()


def short(folder: Path, tmp_path: Path, **values: Any) -> RunConfig:
    """Return a run of 3 steps with one group each, whose episodes have two short replies."""
    config = configured(folder, tmp_path)
    options = {
        "max_steps": 3,
        "task.follow_up_column": "then",
        "schedule.groups_per_step": 1,
        "schedule.max_staleness": 1,
        "schedule.group_size": 4,
        "engine.max_completion_tokens": 16,
        "engine.max_context": 640,  # of advice: instructions and the whole attempt
        "checkpoint.interval": 3,
    }
    return override(config, {**options, **values})


def require_owned(batch: Batch) -> int:
    """Check that an equal beginning has each shared token as a sampled one. Return their number."""
    spans, shared = batch.spans(), (batch.provenance == Provenance.SHARED).nonzero()[:, 0].tolist()
    for place in shared:
        start = max(first for first, _ in spans if first <= place)
        at, beginning = place - start, batch.tokens[start : place + 1]
        assert any(
            batch.sampled[first + at]
            and torch.equal(batch.tokens[first : first + at + 1], beginning)
            for first, end in spans
            if first + at < end
        )
        assert not batch.sampled[place]
    return len(shared)


@pytest.mark.slow
def test_shared_beginnings_of_a_pretrained_model_have_exact_old_logps(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(monkeypatch)
    tree = {"techniques": "tree tree_advantage", "tree.turn": 2}
    run = train(short(pretrained, tmp_path, **tree))
    answers.require_plain(Plain(pretrained, Recorded(run.folder / RECORDED)))
    batches = [batch for batch, *_ in answers.found]
    assert len(batches) == 3 and all(map(require_owned, batches))
    assert {v for batch in batches for v in batch.version[batch.sampled].tolist()} >= {0, 1}


def advise(self: PolicyTexts, text: Trajectory) -> str:
    return '{"cause": "words", "advice": "answer with digits", "step": 2}'


@pytest.mark.slow
def test_rewritten_text_of_a_pretrained_model_has_exact_old_logps_in_both_contexts(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reply was sampled with advice, and is trained on without it."""
    monkeypatch.setattr(PolicyTexts, "written", advise)
    answers = Answers(monkeypatch)
    run = train(short(pretrained, tmp_path, techniques="retry", **{"objective.placed": "guided"}))
    true = answers.require_plain(Plain(pretrained, Recorded(run.folder / RECORDED)))
    batches = [batch for batch, *_ in answers.found]
    assert len(batches) == 9, "of each step: sampled text, placed text, and that with its advice"
    for number in range(0, 9, 3):
        here, advised = batches[number + 1], batches[number + 2]
        assert int(here.sampled.sum()) == int(advised.sampled.sum()) > 0
        sampled_with = advised.behavior_logp[advised.sampled].double() - true[number + 2]
        assert sampled_with.abs().max() < 1e-3, "the engine read the advice"
        assert (true[number + 1] - true[number + 2]).abs().mean() > 0.01, "and without it differs"
