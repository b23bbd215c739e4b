"""Test moving averages that are kept in main memory (`old_logps.placement = own`).

Old log-probabilities are bitwise those of averages next to a second model, for whole weights in two
precisions and for adapters, also after a checkpoint. The trained weights are unchanged. The planner
counts the averages as main memory.
"""

from collections.abc import Callable

import pytest
import torch

from unstale.analysis.planner.models import PRESETS
from unstale.analysis.planner.route_costs import route_cost
from unstale.builders import build_old_logps
from unstale.builders.footprint import predict_footprint
from unstale.config import OldLogpsConfig, RunConfig
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import collate
from unstale.testing import episode, nudge, tiny_policy

CASES: list[tuple[dict[str, object], Callable[[], Policy]]] = [
    ({"route": "ewma_prox"}, lambda: tiny_policy(dtype="bfloat16")),
    ({"route": "ppo_ewma_async", "averages": 2}, tiny_policy),
    ({"route": "eager", "fallback": "ewma_prox"}, lambda: tiny_policy(lora=Lora(4))),
]


def follow(route: OldLogps, policy: Policy, versions: range) -> list[torch.Tensor]:
    """Publish versions and score a batch with tokens of the last three. Return the values."""
    found = []
    for version in versions:
        nudge(policy, seed=version)
        policy.version = version
        route.on_published(live={version})
        plan = [4, (5, max(0, version - 2)), 2, (3, version)]
        batch = collate([episode(i, plan) for i in range(3)])
        before = {name: tensor.clone() for name, tensor in policy.weights().items()}
        found.append(route.logps(batch, torch.empty(0))[0])
        assert all(torch.equal(before[name], each) for name, each in policy.weights().items())
        route.trained(1.0)
    return found


@pytest.mark.costly
@pytest.mark.parametrize(("options", "make_policy"), CASES, ids=["bfloat16", "two", "adapters"])
def test_the_values_are_bitwise_those_of_a_second_model(
    options: dict[str, object], make_policy: Callable[[], Policy]
) -> None:
    def make(placement: str) -> tuple[OldLogps, Policy]:
        policy = make_policy()
        spec = OldLogpsConfig(**options, placement=placement)  # type: ignore[arg-type]
        return build_old_logps(spec, LocalScorer(policy, 1.0, 48)), policy

    (twin, one), (own, other) = make("twin"), make("own")
    assert twin.needs.resident_models == 1 and not twin.needs.trained_weights
    assert own.needs.resident_models == 0 and own.needs.trained_weights
    expected = follow(twin, one, range(4))
    for values, there in zip(expected, follow(own, other, range(4)), strict=True):
        assert torch.equal(values, there) and values.any()
    assert own.costs() == twin.costs()
    state = own.state()
    again, policy = make("own")
    policy.load_weights(other.weights())
    again.restore(state)
    last = follow(twin, one, range(4, 6))
    for values, there in zip(last, follow(again, policy, range(4, 6)), strict=True):
        assert torch.equal(values, there)


@pytest.mark.parametrize(("route", "averages"), [("ewma_prox", 1), ("ppo_ewma_async", 3)])
def test_the_planner_counts_averages_where_they_are(route: str, averages: int) -> None:
    model = PRESETS["4B"]
    options = {"averages": averages} if averages > 1 else {}
    twin, own = (route_cost(route, placement=place, **options) for place in ("twin", "own"))
    count = model.parameters
    assert twin.device_bytes(model) == (2 + 4 * averages) * count
    assert twin.main_bytes(model, live=3, rate=1e-6) == 0
    assert own.device_bytes(model) == 0
    # the averages, and the trained float32 weights while they score
    assert own.main_bytes(model, live=3, rate=1e-6) == 4 * (averages + 1) * count


def test_the_predicted_memory_of_a_run_includes_every_average() -> None:
    policy = tiny_policy()
    size = sum(weight.nbytes for weight in policy.weights().values())

    def trainer(**options: object) -> float:
        config = RunConfig(recipe="", old_logps=OldLogpsConfig(**options))  # type: ignore[arg-type]
        return predict_footprint(config, policy).trainer

    one = trainer(route="ppo_ewma_async")
    assert trainer(route="ppo_ewma_async", averages=3) - one == 2 * size
    # the trained weights are put aside, in place of a second model
    assert trainer(route="ppo_ewma_async", placement="own") == one
