"""Test the costs of divided models, 8-bit moments, adapters, critics and sequences run apart.

Bytes are compared with those that trainers of small models hold. What the trainer refuses is not
planned.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.analysis.test_plan import asked
from tests.model.test_footprint import every_tensor, places_and_sizes
from tests.support.ranks import run_ranks
from unstale.analysis.planner.analytic import AnalyticCosts, Placement, TrainingSetup
from unstale.analysis.planner.candidates import candidates
from unstale.analysis.planner.hardware import DEVICES, Shares
from unstale.analysis.planner.models import PRESETS, Model
from unstale.analysis.planner.page import as_json
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.suggest import suggest
from unstale.analysis.planner.workload import EpisodeStats
from unstale.builders import build_scorer, build_trainer
from unstale.cli.main import main, parse
from unstale.cli.recipe_options import configure
from unstale.config import (
    AdvantageConfig,
    AuditConfig,
    ConfigError,
    CriticConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.model.lora import Lora
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.policy import Policy
from unstale.model.sharding import local
from unstale.records import Batch, Group, ScoredTrajectory, Task, collate
from unstale.testing import episode, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "8-bit": {"optimizer": "AdamW8bit"},
    "adapters": {"lora_rank": 8},
    "own critic": {"critic": "own"},
    "two copies": {"ranks": 4, "replicas": 2},
    "8-bit in two copies": {"ranks": 4, "replicas": 2, "optimizer": "AdamW8bit"},
    "experts": {"ranks": 4, "expert_parallel": True},
    "adapters on ranks": {"ranks": 4, "lora_rank": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    kinds: dict[str, PreTrainedConfig] = {
        "dense": Qwen3Config(**SHAPE),
        "moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
    }
    for name, config in kinds.items():
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        made.save_pretrained(path / name)
        tiny_policy().tokenizer.save_pretrained(path / name)
    return path


def model_of(case: dict[str, Any], folder: Path) -> Path:
    return folder / ("moe" if case.get("expert_parallel") else "dense")


def batch() -> Batch:
    tokens = [episode(i, [8, (6, 0)], advantage=1.0 - 2 * (i % 2)) for i in range(4)]
    group = Group(Task("toy", "train", 0), tuple(each.trajectory for each in tokens))
    scored = [ScoredTrajectory(each.trajectory, each.advantage) for each in tokens]
    return collate(scored, groups=[group])


def held_bytes(peers: RankGroup, folder: Path, case: dict[str, Any]) -> int:
    """Return the bytes of weights, gradients and moments that a trainer holds before a step."""
    before = sum(places_and_sizes(every_tensor()).values())
    peers = replace(
        peers.in_replicas(case.get("replicas", 1)),
        divides_experts=case.get("expert_parallel", False),
    )
    critic = case.get("critic")
    config = RunConfig(
        recipe="",
        old_logps=OldLogpsConfig(route="rollout"),
        audit=AuditConfig(),
        advantage=AdvantageConfig(estimator="gae") if critic else AdvantageConfig(),
        critic=CriticConfig(model=critic) if critic else CriticConfig(),
        trainer=TrainerConfig(
            dtype="bfloat16",
            optimizer=case.get("optimizer", "AdamW"),
            lora_rank=case.get("lora_rank", 0),
        ),
    )
    lora = Lora(config.trainer.lora_rank) if config.trainer.lora_rank else None
    folder = model_of(case, folder)
    policy = Policy.load(folder, dtype="bfloat16", device="cpu", lora=lora, peers=peers)
    trainer, _ = build_trainer(config, policy, build_scorer(config, policy))
    train_on(trainer, batch())
    (minibatch,) = trainer.prepare(batch())
    trainer.backward(minibatch)
    if peers.count > 1:
        return of_rank(trainer)
    return sum(places_and_sizes(every_tensor()).values()) - before


def of_rank(trainer: LocalTrainer) -> int:
    """Return the bytes of this rank's parts of weights, gradients and moments."""
    optimizer = trainer.optimizer
    masters = [each for group in optimizer.param_groups for each in group["params"]]
    grads = [each.grad for each in masters if each.grad is not None]
    moments = [each for state in optimizer.state.values() for each in state.values()]
    everything = (*trainer.policy.model.parameters(), *masters, *grads, *moments)
    parts = [local(each.detach()) for each in everything if isinstance(each, torch.Tensor)]
    return sum({each.data_ptr(): each.numel() * each.itemsize for each in parts}.values())


def setup_of(case: dict[str, Any], folder: Path) -> TrainingSetup:
    planned = {name: value for name, value in case.items() if name != "ranks"}
    model = Model.from_folder(model_of(case, folder))
    episodes = EpisodeStats(tokens=0, longest=0, attended=0, prompt=0)
    return TrainingSetup(
        model=model,
        device=DEVICES["H100"],
        shares=Shares(),
        lr=1e-6,
        episodes=episodes,
        microbatch=0,
        scoring_pass=0,
        **planned,
    )


@cache
def measured(folder: Path, name: str) -> int:
    case = CASES[name]
    if ranks := case.get("ranks"):
        return max(run_ranks(ranks, held_bytes, folder, case))
    return held_bytes(SINGLE_PROCESS, folder, case)


@pytest.mark.costly(cases=2)
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_holds_the_bytes_that_are_planned(name: str, folder: Path) -> None:
    """Gathered layers are left out: a rank frees them after each pass."""
    case = CASES[name]
    setup, devices = setup_of(case, folder), case.get("ranks", 1)
    planned = setup.trainer_bytes(devices, route_cost("rollout"))
    if devices > 1:
        planned -= setup.computed_bytes(devices)
    assert planned == pytest.approx(measured(folder, name), rel=0.15)


def costs_of(model: str, placement: Placement, **rest: Any) -> AnalyticCosts:
    episodes = EpisodeStats(tokens=4096, longest=4096, attended=2048, prompt=400)
    setup = replace(asked().setup, model=PRESETS[model], episodes=episodes, **rest)
    return AnalyticCosts(
        setup=setup, placement=placement, route=route_cost("rollout"), batch=1e6, live=3
    )


def test_a_copy_on_each_node_gathers_within_it_and_sums_gradients_between() -> None:
    """4B on two nodes: 8 GB come in over NVLink, and 2 GB of gradients go round the copies."""
    one = costs_of("4B", Placement(16, 4, 2))
    two = replace(one, setup=replace(one.setup, replicas=2))
    tokens, copy = 16 * 4096, one.setup.model.copy_bytes
    gather = 7 / 8 * copy / (0.8 * 450e9)
    between = 2 / 2 * 2 * copy / 8 / (0.8 * 50e9)
    assert two.train_transfer_s(tokens) == pytest.approx(4 * gather + between)
    assert one.train_transfer_s(tokens) == pytest.approx(4 * 15 / 16 * copy / (0.8 * 400e9))
    route = route_cost("snapshot_old")
    freed = two.setup.trainer_bytes(16, route) - one.setup.trainer_bytes(16, route)
    assert freed == pytest.approx((20 + 2) / 16 * copy / 2)
    found = [
        each.costs.setup.replicas
        for each in candidates(asked(devices=24), "rollout", ScheduleConfig(group_size=2))
        if each.placement.trainers == 16
    ]
    assert {*found} == {1, 2}


def test_whole_experts_are_not_gathered_and_tokens_travel() -> None:
    """30B-A3B on 8 GPUs: per token and layer, 8 states of 2048 go to 7 of 8 GPUs, and back."""
    gathered = costs_of("30B-A3B", Placement(8, 4, 2))
    whole = replace(gathered, setup=replace(gathered.setup, expert_parallel=True))
    model, tokens = gathered.setup.model, 8 * 4096
    left = 1 - model.matrices["experts"] / model.parameters
    assert left == pytest.approx(0.05, abs=0.01)
    assert whole.train_transfer_s(tokens) == pytest.approx(left * gathered.train_transfer_s(tokens))
    sent = 4096 * 48 * 2 * 8 * 2048 * 2 * 7 / 8 / (0.8 * 450e9)
    extra = whole.train_compute_s(tokens) - gathered.train_compute_s(tokens)
    assert extra == pytest.approx(2 * sent)
    short, long = (
        [costs.train_s(count * tokens) for costs in (gathered, whole)] for count in (1, 8)
    )
    assert short[1] < short[0] and long[1] < long[0]
    saved = gathered.setup.computed_bytes(8) - whole.setup.computed_bytes(8)
    assert saved == pytest.approx(2 * 2 * model.matrices["experts"] / 48)


def test_a_critic_takes_a_pass_and_a_model_of_its_own_as_much_again() -> None:
    without = costs_of("4B", Placement(1, 1, 1))
    trunk, own = (
        replace(without, setup=replace(without.setup, critic=c)) for c in ("trunk", "own")
    )
    tokens = 2**17
    forecast = without.forward_s(tokens)
    assert trunk.train_s(tokens) == pytest.approx(without.train_s(tokens) + forecast)
    assert own.train_s(tokens) == pytest.approx(2 * without.train_s(tokens) + forecast)
    assert trunk.setup.context_sizes == [1] != without.setup.context_sizes
    many = replace(own.setup, device=replace(own.setup.device, memory=1e15))
    assert many.fits(1, own.route) and not many.fits(2, own.route), "refused on ranks"


def test_sequences_apart_gather_weights_for_each() -> None:
    packed = costs_of("4B", Placement(8, 4, 2), microbatch=32_768)
    apart = replace(packed, setup=replace(packed.setup, model=replace(PRESETS["4B"], apart=True)))
    tokens = 8 * 32_768
    assert apart.train_transfer_s(tokens) == pytest.approx(8 * packed.train_transfer_s(tokens))
    assert apart.setup.context_sizes == [1]
    found = apart.setup.with_largest_passes(8, apart.route)
    assert (found.microbatch, found.scoring_pass) == (4096, 4096)


def test_what_is_chosen_is_in_the_command_and_what_is_refused_is_not_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = asked(devices=2, lags=(1,), route="snapshot_old")
    setup = replace(request.setup, optimizer="AdamW8bit", critic="trunk", lora_rank=4)
    told = as_json(suggest(replace(request, setup=setup)))
    config = configure(parse(told["command"].split()[1:]))
    assert config.trainer.optimizer == "AdamW8bit" and config.advantage.estimator == "gae"
    assert config.critic.model == "trunk" and "a critic (trunk)" in told["suggestion"]
    one = ["plan", "--model", "30B-A3B", "--gpus", "16", "--lora-rank", "8"]
    with pytest.raises(SystemExit):
        main(one)
    assert "a model with experts" in capsys.readouterr().err
    with pytest.raises(ConfigError) as refused:
        suggest(asked(model=PRESETS["30B-A3B"], devices=4))
    assert "adapters" not in str(refused.value)
