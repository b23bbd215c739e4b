"""What is promised of the limits and the gradient weight beside the numbers of a token.

- The gradient weight is minus the derivative of the trainer's loss by the token's logp.
- It is left out if a technique or an aggregate of several tokens decides.
- A token is outside of the limits on D, S and D S that the run's options set.
- Options that cannot be read are a sentence, and the other numbers are there.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.analysis.test_dashboard import Client, served
from tests.support.fake_run import fake_run
from unstale.algorithms import corrections
from unstale.analysis.dashboard import limits
from unstale.analysis.dashboard.bounds import TrainedToken, bounds, explain, gradient
from unstale.analysis.dashboard.table import BadQuestion
from unstale.config import CorrectionConfig, ObjectiveConfig


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    fake_run(root / "first", steps=4, with_values=True)
    changed: dict[str, dict[str, Any]] = {
        "units": {"objective": {"unit": "turn"}, "correction": {"unit": "sequence"}},
        "technique": {"techniques": "minpro"},
        "broken": {"recipe": 7},
    }
    for name, changes in changed.items():
        run = shutil.copytree(root / "first", root / name)
        config = json.loads((run / "config.json").read_text())
        for section, values in changes.items():
            config[section] = config[section] | values if isinstance(values, dict) else values
        (run / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[Client]:
    with served(runs) as found:
        for name in ("first", "units", "technique", "broken"):
            found.when_read(name)
        yield found


def trained(answer: Any) -> list[dict[str, Any]]:
    """Return the values of each trained token of an episode."""
    return [
        dict(zip(piece["trained"], values, strict=True))
        for piece in answer["pieces"]
        if "trained" in piece
        for values in zip(*piece["trained"].values(), strict=True)
    ]


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("kind", ["ppo_clip", "dual_clip", "cispo", "none"])
def test_the_gradient_is_that_of_the_trainer_s_loss(kind: Any, cap: float) -> None:
    config = ObjectiveConfig(loss_type=kind).with_options(ratio_cap=cap)
    rng = np.random.default_rng(0)
    log_d, log_s, advantage = (torch.from_numpy(rng.normal(0, 0.6, 400)) for _ in range(3))
    weight = torch.from_numpy(rng.uniform(0.5, 2, 400))
    behavior = torch.full_like(log_d, -1.0)
    logp = behavior + log_d + log_s
    log_s.requires_grad_()
    loss = config.surrogate(log_s, advantage)
    factor = weight
    if cap:
        sampled = torch.ones(400, dtype=torch.bool)
        factor = weight * corrections.cap_ratio(logp.detach(), behavior, sampled=sampled, high=cap)
    (expected,) = torch.autograd.grad((factor * loss.loss).sum(), log_s)
    names = np.full(400, "kept", object)
    names[loss.clipped_low.numpy()] = "clipped_low"
    names[loss.clipped_high.numpy()] = "clipped_high"
    columns = (each.tolist() for each in (log_d, log_s.detach(), weight, advantage))
    found = [
        gradient(config, TrainedToken(*values))
        for values in zip(*columns, names.tolist(), strict=True)
    ]
    assert all(each is not None for each in found)
    values = [each[0] for each in found if each is not None]
    assert values == pytest.approx((-expected).tolist(), rel=1e-9)
    formulas = {each[1] for each in found if each is not None}
    assert any("limit of D S" in each for each in formulas) == bool(cap)
    assert (kind == "none") == (set(names) == {"kept"})


def test_a_mask_of_sequences_is_a_limit_of_d_s() -> None:
    config = ObjectiveConfig(opsm_threshold=0.1)
    limit = bounds(CorrectionConfig(mode="none"), config)[-1]
    assert (limit.on, limit.unit) == ("ds", "sequence")
    ((at, text),) = limit.ends()
    assert at == pytest.approx(math.exp(-0.1))
    assert text == "A token with D S below 0.904837 and negative advantage has no gradient."
    token = TrainedToken(0.0, -0.2, 1.0, -1.0, "clipped_low")
    found = gradient(config, token)
    assert found is not None and found[0] == 0
    weighted = ObjectiveConfig(loss_type="cispo", opsm_threshold=0.1)
    assert gradient(weighted, token) is None  # clipped or masked, the record does not say which


def test_tokens_that_are_not_in_the_loss_have_the_gradient_0() -> None:
    config = ObjectiveConfig()
    for outcome in ("vetoed", "masked", "dropped", "skipped"):
        token = TrainedToken(None, None, None, None, outcome)
        assert gradient(config, token) == (0.0, f"the token is {outcome}")
    kept = TrainedToken(0.0, 0.0, 1.0, 2.0, "kept")
    assert gradient(config, kept) == (
        2.0,
        "weight times S times advantage, before the division of the loss",
    )
    assert gradient(config, kept._replace(log_s=None)) is None
    assert gradient(config, kept._replace(log_s=9000.0)) is None
    assert gradient(replace(config, unit="turn"), kept) is None
    assert gradient(ObjectiveConfig(loss_type="gspo"), kept) is None


def test_a_token_is_outside_of_the_limits_on_each_ratio() -> None:
    correction = CorrectionConfig(mode="mask", low=0.5, high=2, token_veto_threshold=0.01)
    objective = ObjectiveConfig(loss_type="dual_clip", ratio_cap=4.0)
    names = ["veto of D", "limits of D", "limits of S", "limit of S if A < 0", "limit of D S"]
    assert [each.name for each in bounds(correction, objective)] == names
    tokens: dict[str, list[Any]] = {
        "log_d": [],
        "log_s": [],
        "weight": [],
        "advantage": [],
        "outcome": [],
    }
    for d, s in ((1, 1), (0.4, 1), (0.005, 1), (1, 1.3), (1, 3.1), (2, 2.1), (2.1, None)):
        tokens["log_d"].append(math.log(d))
        tokens["log_s"].append(None if s is None else math.log(s))
        tokens["weight"].append(1.0)
        tokens["advantage"].append(1.0)
        tokens["outcome"].append("kept")
    found = explain(correction, objective, {"tokens": tokens}, is_replaced=False)
    no, yes = False, True
    assert found["tokens"]["outside"] == [
        [no, no, no, no, no],
        [no, yes, no, no, no],
        [yes, yes, no, no, no],
        [no, no, yes, no, no],
        [no, no, yes, yes, no],
        [no, no, yes, no, yes],
        [no, yes, None, None, None],
    ]
    ends = [(row["low"], row["high"]) for row in found["limits"]]
    assert ends == [(0.01, None), (0.5, 2), (0.8, 1.28), (None, 3.0), (None, 4.0)]
    free = CorrectionConfig(mode="truncate", high=3.0)
    (only,) = bounds(free, ObjectiveConfig(loss_type="none"))
    assert (only.row()["low"], only.row()["high"]) == (None, 3.0)


def test_an_episode_has_the_limits_of_its_run(client: Client) -> None:
    answer = client.ask("episode", run="first", episode=5)
    training = answer["training"]
    assert [row["name"] for row in training["limits"]] == ["limits of D", "limits of S"]
    assert [(row["low"], row["high"]) for row in training["limits"]] == [(0.5, 2), (0.8, 1.28)]
    tokens = trained(answer)
    assert len(tokens) > 50
    for token in tokens:
        d, s = math.exp(token["log_d"]), math.exp(token["log_s"])
        assert token["outside"] == [not 0.5 <= d <= 2, not 0.8 <= s <= 1.28]
        formula = training["formulas"][token["formula"]]
        if token["outcome"] == "kept":
            assert token["gradient"] == pytest.approx(token["weight"] * s * token["advantage"])
            assert formula.startswith("weight times S times advantage")
        else:
            assert token["gradient"] == 0 and token["outcome"].partition("_")[0] in formula
    assert {True, False} == {side for token in tokens for side in token["outside"]}


def test_an_aggregate_or_a_technique_decides_for_several_tokens(client: Client) -> None:
    units = client.ask("episode", run="units", episode=5)
    assert [row["unit"] for row in units["training"]["limits"]] == ["sequence", "turn"]
    assert all(token["outside"] == [None, None] for token in trained(units))
    replaced = client.ask("episode", run="technique", episode=5)
    for answer in (units, replaced):
        kept = [token for token in trained(answer) if token["outcome"] == "kept"]
        assert kept and all(token["gradient"] is None for token in kept)


def test_options_that_cannot_be_read_are_a_sentence(client: Client, runs: Path) -> None:
    answer = client.ask("episode", run="broken", episode=5)
    assert answer["training"]["limits"] == []
    assert answer["training"]["problem"].startswith("the options of the run cannot be read")
    with pytest.raises(BadQuestion, match="cannot be read"):
        limits.own_config(runs / "broken")
    assert all("log_d" in token and "gradient" not in token for token in trained(answer))
