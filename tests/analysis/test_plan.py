"""Test the planner.

Parameter counts are those of the real models. Costs equal values worked out by hand and measured
ones. A suggested plan fits the memory, keeps the given settings and can be run.
"""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from benchmarks import throttled
from benchmarks.long_context import saved_bytes, shape_of
from unstale.analysis.planner import publication
from unstale.analysis.planner.analytic import (
    REDUCE_S,
    AnalyticCosts,
    Placement,
    TrainingSetup,
    placements,
    scoring_devices,
)
from unstale.analysis.planner.candidates import PlanRequest, candidates
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.hardware import DEVICES, Device, Shares
from unstale.analysis.planner.measured import core_of, recorded_fleet, training_threads
from unstale.analysis.planner.models import PRESETS, Model
from unstale.analysis.planner.page import as_json, page
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.simulate import Constant, EpisodeShape, LogNormal, TurnShape, Workload
from unstale.analysis.planner.suggest import AVERAGE, NEAR, SimulatedCandidate, Suggestion, suggest
from unstale.analysis.planner.workload import EpisodeStats
from unstale.cli.main import main, parse
from unstale.cli.recipe_options import configure
from unstale.config import ConfigError, ScheduleConfig
from unstale.config.options import override
from unstale.config.routes import routes
from unstale.recipes import make_recipe
from unstale.weights import delta_sizes
from unstale.weights.codec import encode

ROOT = Path(__file__).parents[2]
SMALL = "layers=4,hidden=256,ffn=768,heads=4,kv_heads=2,head_dim=64,vocab=4096,tied=true"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, **HEADS, head_dim=16, tie_word_embeddings=True),
        Qwen3Config(**SIZES, **HEADS, head_dim=8, tie_word_embeddings=False),
        Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, tie_word_embeddings=True),
        Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, tie_word_embeddings=False, mlp_only_layers=[1]),
        Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True),
        LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False),
    ],
    ids=["tied", "untied", "experts-tied", "experts-mixed", "qwen2", "llama"],
)
def test_parameters_are_those_of_the_real_model(config: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    counted = Model.parse(str(tmp_path))
    assert counted.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert counted.matrices["head"] == (0 if config.tie_word_embeddings else 96 * 32)


@pytest.mark.parametrize(
    ("name", "all_of_them", "without_embedding"),
    [
        ("0.6B", 0.6, 0.44),
        ("1.7B", 1.7, 1.4),
        ("4B", 4.0, 3.6),
        ("8B", 8.2, 6.95),
        ("14B", 14.8, 13.2),
        ("32B", 32.8, 31.2),
        ("30B-A3B", 30.5, 29.9),
        ("235B-A22B", 235, 234),
    ],
)
def test_presets_have_the_parameters_of_their_model_cards(
    name: str, all_of_them: float, without_embedding: float
) -> None:
    model = Model.parse(name)
    body = model.parameters - model.matrices["embedding"] - model.matrices["head"]
    assert model.parameters / 1e9 == pytest.approx(all_of_them, rel=0.015)
    assert body / 1e9 == pytest.approx(without_embedding, rel=0.015)


def test_a_token_costs_what_is_worked_out_by_hand() -> None:
    """Two layers of width 8: attention 8 x 2 x (2 heads x 4 + 1 x 4) = 192, MLP 3 x 8 x 16 = 384,
    norms 16 + 8."""
    model = Model.parse("layers=2,hidden=8,ffn=16,heads=2,kv_heads=1,head_dim=4,vocab=10,tied=true")
    assert model.parameters == 10 * 8 + 2 * (192 + 384 + 16 + 8) + 8 == 1288
    assert model.kv_bytes == 2 * 2 * 2 * 4
    assert model.forward_flops(100) == 2 * 1288 + 2 * 100 * 2 * (
        2 * 2 * 4
    )  # scores and values: 2 x heads x head_dim
    sparse = replace(model, experts=4, active=2, expert_ffn=6, tied=False)
    experts = 2 * 4 * 3 * 8 * 6
    assert sparse.parameters == 1288 - 2 * 384 + experts + 2 * 4 * 8 + 80
    assert sparse.active_parameters == sparse.parameters - experts // 2 - 80
    assert sparse.read_bytes(1) == 2 * sparse.active_parameters
    assert sparse.read_bytes(2) == 2 * (
        sparse.parameters - experts / 4 - 80
    )  # a half of a half is passed by twice


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("5B", "did you mean"),
        ("layers=2,hiden=8", "did you mean hidden"),
        ("layers=2,hidden=8", "lacks ffn, heads, kv_heads"),
        (
            "layers=2,hidden=8,ffn=x,heads=2,kv_heads=1",
            "ffn must be a whole number of 0 or more, got 'x'",
        ),
        (
            "layers=2,hidden=8,ffn=8,heads=3,kv_heads=2",
            "heads must be a multiple of kv_heads, got 3 and 2",
        ),
        ("layers=2,hidden=8,ffn=8,heads=2,kv_heads=2,experts=4", "need active"),
    ],
)
def test_an_impossible_model_is_refused_with_the_cause(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Model.parse(text)


def test_an_unknown_architecture_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="mamba"):
        Model.parse(str(tmp_path))


def table_of_routes() -> dict[str, list[str]]:
    """Return the rows of the last table in benchmarks/results/routes-planner.md."""
    text = (ROOT / "benchmarks/results/routes-planner.md").read_text().split("## Every route")[1]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if "| `" in line
    ]
    return {row[0].strip("`"): row[1:] for row in rows}


def costs(route: str) -> AnalyticCosts:
    """Return costs of one core with the table's model: a forward pass takes 0.267 of a one-second
    step."""
    hand = Model.parse(
        "layers=8,hidden=448,ffn=1344,heads=8,kv_heads=4,head_dim=56,vocab=2048,tied=true"
    )
    batch = 4 * 320
    flops = batch * hand.forward_flops(160) / 0.267
    core = Device(
        name="core",
        flops=flops,
        bandwidth=1e10,
        memory=24e9,
        link=1e10,
        host_link=1e10,
        network=1e10,
    )
    setup = TrainingSetup(
        model=hand,
        device=core,
        shares=Shares(matmul=1, bandwidth=1, link=1, cores=1),
        lr=1e-6,
        rounding="nearest",
        episodes=EpisodeStats(tokens=320, longest=320, attended=160, prompt=64),
    )
    place = Placement(1, 1, 1, scorers=1)
    return AnalyticCosts(setup=setup, placement=place, route=route_cost(route), batch=batch, live=5)


@pytest.mark.parametrize("name", routes())
def test_routes_cost_what_was_measured(name: str) -> None:
    """Times within a tenth (small ones within a hundredth of a step), copies within a tenth."""
    extra, idle, copies, models, exact, *_ = table_of_routes()[name]
    priced, route = costs(name), route_cost(name)
    model = priced.setup.model
    assert model.parameters == 20_193_600
    encode_s = delta_sizes.encode_s(model.parameters, 1e-6) if route.needs.snapshots else 0.0
    took = sum(float(text.rstrip("%")) / 100 for text in (extra, idle))
    # The trainer's thread has what was measured of every route, and the deltas of two.
    assert priced.old_logps_s(1280, 3) + encode_s == pytest.approx(took, rel=0.1, abs=0.01)
    held = route.delta_bytes(model, live=5, rate=1e-6) + 4 * model.parameters * route.needs.averages
    assert held / model.copy_bytes == pytest.approx(float(copies), rel=0.1, abs=0.005)
    assert (route.needs.resident_models, route.exact) == (int(models), exact == "100%")


def test_snapshot_old_is_charged_passes_up_to_the_last_token_of_each_version() -> None:
    exact = route_cost("snapshot_old")
    assert [exact.forward_passes(versions) for versions in (0.5, 1, 2, 3)] == [1, 1, 1.5, 2]
    assert (
        exact.forward_passes(2, prompt_fraction=0.5) == 0.75 + 1.0
    )  # half is prompt: the first version ends at three quarters
    assert route_cost("interp_prox_loglinear").forward_passes(3) == 0


def test_stochastic_rounding_changes_a_third_of_the_weights_at_any_low_rate() -> None:
    """Two independent roundings of digits that are anywhere: the mean of 2 f (1 - f) is 1/3."""
    rng = np.random.default_rng(0)
    digits, count = rng.random(1_000_000), 1_000_000
    steps = (rng.random(count) < digits) ^ (rng.random(count) < digits)
    assert steps.mean() == pytest.approx(1 / 3, abs=0.002)
    bits = np.where(steps, 2 ** np.minimum(rng.geometric(0.5, count), 8) - 1, 0).astype(np.int16)
    rate = delta_sizes.delta_rate(1e-7, "stochastic")
    written = encode(torch.from_numpy(bits)).nbytes
    assert written == pytest.approx(delta_sizes.delta_bytes(count, rate), rel=0.15)
    assert delta_sizes.delta_rate(1e-7, "nearest") == 1e-7


@pytest.mark.parametrize("row", delta_sizes.TABLE, ids=lambda row: f"{row.rate:g}")
def test_deltas_are_as_long_as_the_codec_writes_them(row: delta_sizes.DeltaMeasurement) -> None:
    """Scattered words change by a XOR of few bits, as after an optimizer step."""
    random, count = np.random.default_rng(0), 1_000_000
    bits = (
        np.minimum(random.geometric(0.5, count), 8)
        if row.rate < 1e-4
        else random.integers(1, 10, count)
    )
    difference = np.where(random.random(count) < row.changed, 2**bits - 1, 0).astype(np.int16)
    written = encode(torch.from_numpy(difference)).nbytes
    assert written == pytest.approx(delta_sizes.delta_bytes(count, row.rate), rel=0.2)


def test_a_device_takes_the_time_that_its_data_sheet_gives() -> None:
    """Qwen3-4B on an H100: 2.4 ms to read 8.04 GB of weights, and 16,000 tokens of context."""
    model = PRESETS["4B"]
    setup = TrainingSetup(
        model=model,
        device=DEVICES["H100"],
        shares=Shares(matmul=1, decode=1, bandwidth=1, link=1, step_s=0),
        lr=1e-6,
        episodes=EpisodeStats(tokens=2000, longest=2000, attended=1000, prompt=200),
    )
    alone = AnalyticCosts(
        setup=setup, placement=Placement(4, 4, 1), route=route_cost("rollout"), batch=1e5, live=3
    )
    assert alone.step_s(16, 16_000) == pytest.approx((8.044936192e9 + 147456 * 16_000) / 3.35e12)
    assert alone.step_s(4096, 4096) == pytest.approx(
        4096 * model.forward_flops(1) / 989.4e12
    )  # computing binds
    optimizer = 30 * model.parameters / (4 * 3.35e12)
    assert alone.train_s(100_000) == pytest.approx(
        3 * 1e5 * model.forward_flops(1000) / (4 * 989.4e12) + optimizer
    )
    again = replace(alone, setup=replace(setup, gradient_checkpointing=True))
    assert again.train_s(100_000) - alone.train_s(100_000) == pytest.approx(
        alone.forward_s(100_000)
    )
    pair = replace(alone, placement=Placement(4, 2, 2))
    reduced = 2 * 36 * 16 * 2560 * 2 / 450e9 + 72 * REDUCE_S  # 2 (tp - 1) / tp is 1
    assert pair.step_s(16, 16_000) == pytest.approx(alone.step_s(16, 16_000) / 2 + reduced)


def published(model: str, placement: Placement, **changes: Any) -> AnalyticCosts:
    """Return the costs of a publication on H100s, with all of the links' bandwidth."""
    setup = TrainingSetup(
        model=PRESETS[model],
        device=DEVICES["H100"],
        shares=Shares(**{"link": 1, "cores": 1, **changes}),
        lr=1e-6,
        rounding="nearest",
        episodes=EpisodeStats(tokens=2000, longest=2000, attended=1000, prompt=200),
    )
    route = route_cost("snapshot_old")
    return AnalyticCosts(setup=setup, placement=placement, route=route, batch=1e5, live=3)


def test_engines_stand_still_only_while_they_load() -> None:
    """8.04 GB at 5 GB/s. Before, one core applies 4 G words in 2.0 s and checks 8.04 GB in 0.36 s,
    or writes 8.04 GB in 3.9 s."""
    one = published("4B", Placement(4, 1, 4))
    gb = 8.044936192
    assert one.load_s() == pytest.approx(gb / 4 / 5)  # each GPU reads its part
    decoded = delta_sizes.apply_s(PRESETS["4B"].parameters, 1e-6) + 0.045 * gb
    assert one.stage_s() == pytest.approx(decoded / 4)  # a core for each of four GPUs
    several = published("4B", Placement(4, 4, 1))
    assert several.stage_s() == pytest.approx(0.49 * gb)
    assert several.load_s() == pytest.approx(gb / 5)
    # The run's own process then applies the delta to its copy, on one core.
    serial = delta_sizes.apply_s(PRESETS["4B"].parameters, 1e-6)
    assert several.publish_s() - one.publish_s() == pytest.approx(serial)
    core = replace(one.setup.device, name="core")
    on_cores = replace(one, setup=replace(one.setup, device=core))
    assert on_cores.stage_s() == on_cores.probe_s() == 0
    assert on_cores.load_s() == pytest.approx(gb / 4 / 64)


@pytest.mark.parametrize(("model", "tp", "reference"), [("4B", 1, 3.0), ("30B-A3B", 4, 8.0)])
def test_the_measured_parts_of_a_publication_are_predicted(
    model: str, tp: int, reference: float
) -> None:
    """The standstills of benchmarks/results/standstill.md, whose steps slept for all bytes."""
    text = (ROOT / "benchmarks/results/standstill.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if f"| {model} |" in line]
    assert len(rows) >= 3
    for _, gb, way, speed, staged, _, _, standstill, *_ in rows:
        whole = way == "whole"
        place = Placement(4, 4 if whole else 1, tp)
        found = published(model, place, cores=1 / tp, loader_gb_s=float(speed))
        assert found.setup.model.copy_bytes / 1e9 == pytest.approx(float(gb), rel=0.01)
        assert found.load_s() == pytest.approx(float(standstill), rel=0.15)
        assert found.stage_s() == pytest.approx(float(staged), rel=0.15)
        assert publication.reference_s(found.setup.model) == pytest.approx(reference, rel=0.15)


def test_the_real_loop_at_throttled_speeds_takes_the_time_of_the_plan() -> None:
    """The measured table is within 15% of what it says was planned, and plans still say that."""
    text = (ROOT / "benchmarks/results/throttled.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.endswith("met |")]
    assert len(rows) == len(throttled.CASES)
    for case, cells in zip(throttled.CASES, rows, strict=True):
        planned = [throttled.SCALE * each for each in throttled.predict(case)]
        standstill, measured, step, measured_step = map(float, cells[3:7])
        assert (standstill, step) == (pytest.approx(planned[0], abs=0.05), round(planned[1], 1))
        assert measured == pytest.approx(standstill, rel=throttled.LIMIT)
        assert measured_step == pytest.approx(step, rel=throttled.LIMIT)


def test_a_version_travels_whole_or_as_a_delta_whichever_is_quicker() -> None:
    """16 devices: 8.04 GB over 50 GB/s take 0.16 s, and 3.9 s to write. A delta of about 9 MB takes
    no time to send, and 2.4 s to decode."""
    words = PRESETS["4B"].parameters
    quick = published("4B", Placement(8, 8, 1))
    travelled = delta_sizes.delta_bytes(words, 1e-6) / 50e9
    decoded = delta_sizes.apply_s(words, 1e-6) + 0.045 * 8.044936192
    assert quick.stage_s() == pytest.approx(travelled + decoded)
    none = replace(quick, route=route_cost("rollout"), placement=Placement(1, 8, 2))
    assert none.stage_s() == pytest.approx((0.49 + 1 / 100) * 8.044936192)


def test_experts_are_padded_and_divisors_of_their_number_preferred() -> None:
    """36 ranks hold 4 experts each, of 128: 144 of them. 32 hold 4 each without padding."""
    model = PRESETS["30B-A3B"]
    experts = model.matrices["experts"] / model.parameters
    assert model.padding(36) == pytest.approx(1 + experts / 8)
    assert model.padding(32) == model.padding(128) == PRESETS["4B"].padding(36) == 1
    setup = replace(asked().setup, model=model, gradient_checkpointing=True)
    found = list(placements(setup, route_cost("snapshot_old"), devices=64, max_staleness=2))
    assert {place.trainers for place in found} == {16, 32}
    # Where no divisor fits, other numbers are tried.
    found = list(placements(setup, route_cost("snapshot_old"), devices=15, max_staleness=2))
    assert found and all(128 % place.trainers for place in found)


def test_the_largest_passes_that_fit_are_proposed() -> None:
    """A training pass of 4B with checkpointing takes 0.36 MB a token. One without gradient takes
    0.18 MB a token, so that twice as many tokens fit into the memory of the former."""
    route = route_cost("snapshot_old")
    setup = replace(asked().setup, gradient_checkpointing=True)
    found = setup.with_largest_passes(4, route)
    assert (found.microbatch, found.scoring_pass) == (32_768, 131_072)
    assert found.fits(4, route)
    tight = replace(setup, shares=Shares(memory=0.37))
    found = tight.with_largest_passes(4, route)
    assert 4096 < found.microbatch < 32_768 and found.fits(4, route)
    assert found.microbatch < found.scoring_pass <= 4 * found.microbatch
    assert not replace(found, microbatch=2 * found.microbatch).fits(4, route)
    # Fewer passes gather weights less often.
    costs = published("4B", Placement(8, 8, 1))
    longer = replace(costs, setup=replace(costs.setup, microbatch=8192))
    assert longer.train_transfer_s(2**18) == costs.train_transfer_s(2**18) / 2


def test_eager_adds_what_does_not_fit_into_the_time_in_which_the_trainer_waits() -> None:
    late = replace(published("4B", Placement(4, 4, 1)), route=route_cost("eager"))
    passes = 0.9 * 1.5 + 0.1 * 2  # two versions, and a tenth is prompt
    everything = late.old_logps_s(100_000, 2)
    assert everything == pytest.approx(passes * late.forward_s(100_000))
    part = replace(late, absorbed_s=everything / 4)
    assert part.old_logps_s(100_000, 2) == pytest.approx(0.75 * everything)
    assert replace(late, absorbed_s=everything).old_logps_s(100_000, 2) == 0


def test_a_trainer_that_waits_scores_meanwhile(plan: Suggestion) -> None:
    """With one engine generation takes longer, and the trainer has time."""
    costs = replace(plan.best.candidate.costs, placement=Placement(7, 1, 1))
    narrow = replace(plan.best.candidate, costs=costs)
    eager, kept = narrow.with_route("eager"), narrow.with_route("snapshot_old")
    assert eager.costs.absorbed_s > 0 == kept.costs.absorbed_s
    assert eager.trainer_s < kept.trainer_s
    waits_s = kept.estimate.step_s - narrow.with_route("rollout").trainer_s
    assert eager.costs.absorbed_s == pytest.approx(waits_s, rel=0.3)


def test_adapters_train_a_model_on_one_gpu() -> None:
    """4B: 8 GB of weights, 0.5 GB of states, and an engine with 8 GB more.

    All weights take 72 GB, so they fit only if most of their state is in main memory.
    """
    large = asked(model=PRESETS["8B"], devices=1, route="snapshot_old", lags=(1,))
    with pytest.raises(ConfigError, match=r"Use --gpus 2, or train adapters: --lora-rank 16 fits"):
        suggest(large)
    request = asked(devices=1, route="snapshot_old", lags=(1,))
    whole = as_json(suggest(request))
    assert "--trainer.offload_optimizer true" in whole["command"]
    setup = replace(request.setup, lora_rank=16)
    assert setup.trained == 33_030_144
    held = setup.trainer_bytes(1, route_cost("snapshot_old")) - setup.activation_bytes
    assert held == pytest.approx(8.044936192e9 + 18 * 33_030_144)
    told = as_json(suggest(replace(request, setup=setup)))
    assert told["place"] | {"trainers": 1, "engines": 1, "tp": 1} == told["place"]
    assert "in turns" in told["suggestion"] and "old_logit_model" not in str(told["routes"])
    config = configure(parse(told["command"].split()[1:]))
    assert config.trainer.lora_rank == 16 and not config.cluster.trainers
    with pytest.raises(ConfigError, match=r"not fit 2 H100 .* or train adapters"):
        suggest(asked(model=PRESETS["14B"], devices=2, route="snapshot_old", lags=(1,)))


def test_a_token_sees_more_than_half_of_the_mean_episode() -> None:
    """Episodes of 100 and 900 tokens: (100^2 + 900^2) / (100 + 900) / 2 = 410; half of the mean is
    250."""
    recorded = tuple((EpisodeShape(tokens - 10, (TurnShape(10, 0, 0),)),) for tokens in (100, 900))
    found = EpisodeStats.of(Workload(recorded=recorded), group_size=1)
    share = (found.tokens - 100) / 800  # of long ones among those drawn
    assert (
        found.attended == pytest.approx((1e4 * (1 - share) + 81e4 * share) / found.tokens / 2)
        and found.attended > 380
    )


def test_training_and_engines_take_the_memory_that_is_added_up_by_hand() -> None:
    model = PRESETS["30B-A3B"]
    setup = TrainingSetup(
        model=model,
        device=DEVICES["H100"],
        shares=Shares(),
        lr=1e-6,
        episodes=EpisodeStats(tokens=4096, longest=4096, attended=2048, prompt=400),
        gradient_checkpointing=True,
    )
    layer = 2 * (8 * 2048 + (6 * 32 + 5 * 4) * 128 + 8 * (2 * 2048 + 4 * 768))
    activations = 4096 * (48 * 2 * 2048 + layer)
    assert setup.trainer_bytes(16, route_cost("rollout")) == pytest.approx(
        20 * model.parameters / 16 + model.gathered_bytes(2) + activations
    )
    assert setup.trainer_bytes(1, route_cost("rollout")) == pytest.approx(
        18 * model.parameters + activations  # one device holds a bfloat16 copy
    )
    more = setup.trainer_bytes(16, route_cost("ppo_ewma_async")) - setup.trainer_bytes(
        16, route_cost("rollout")
    )
    assert more == pytest.approx(
        6 * model.parameters / 16
    )  # a float32 average and a model to run it in
    assert setup.context_tokens(1) == pytest.approx((72e9 - model.copy_bytes) / model.kv_bytes)
    assert setup.context_tokens(8) == pytest.approx(
        (8 * 72e9 - model.copy_bytes) / (2 * model.kv_bytes)
    )  # 4 heads, 8 devices


@pytest.mark.parametrize(
    ("name", "devices", "by_hand"),
    [
        ("4B", 4, (20.1, 1.2, 2.0, 6.0)),
        ("4B", 24, (3.35, 1.2, 0.3, 1.0)),
        ("30B-A3B", 8, (76.3, 3.7, 7.6, 22.9)),
        ("30B-A3B", 24, (28.5, 3.7, 2.85, 8.5)),
        ("30B-A3B", 32, (19.1, 3.7, 1.9, 5.7)),
    ],
)
def test_sharded_memory_is_that_of_the_arithmetic_by_hand(
    name: str, devices: int, by_hand: tuple[float, float, float, float]
) -> None:
    """GB a device: 20 bytes a parameter, embedding and head and two layers, and the routes'.

    24 devices have 6 experts each, 144 in place of 128."""
    state, gathered, twin, averages = by_hand
    setup = replace(asked().setup, model=PRESETS[name])

    def gb(route: str) -> float:
        return (setup.trainer_bytes(devices, route_cost(route)) - setup.activation_bytes) / 1e9

    assert setup.computed_bytes(devices) / 1e9 == pytest.approx(gathered, abs=0.05)
    assert gb("rollout") == pytest.approx(state + gathered, abs=0.1)
    for route in ("interrupt_sync", "current_recompute", "old_logit_model"):
        assert gb(route) == gb("rollout")
    assert gb("snapshot_old") - gb("rollout") == pytest.approx(twin, abs=0.05)
    for route in ("ewma_prox", "ppo_ewma_async"):
        assert gb(route) - gb("rollout") == pytest.approx(averages, abs=0.05)


def test_a_pass_of_a_sharded_trainer_takes_its_transfers_where_they_are_longer() -> None:
    """30B-A3B on three nodes: 61 GB come in twice as bfloat16, and gradients once as float32."""
    setup = replace(asked().setup, model=PRESETS["30B-A3B"])
    link = 0.8 * 8 * 50e9  # eight ports of a node
    padded = 1 + 16 / 128 * setup.model.matrices["experts"] / setup.model.parameters
    gather = 23 / 24 * padded * setup.model.copy_bytes / link
    shapes = {"setup": setup, "route": route_cost("snapshot_old"), "batch": 1e6, "live": 3}
    costs = AnalyticCosts(placement=Placement(24, 4, 8), **shapes)
    few = 24 * 4096  # one microbatch on each device
    assert costs.train_s(few) - costs.optimizer_s == pytest.approx(4 * gather)
    assert costs.train_s(2 * few) - costs.optimizer_s == pytest.approx(8 * gather)
    # One long episode that is possible does not make the other passes longer.
    longer = replace(setup, episodes=setup.episodes._replace(longest=65_536))
    assert replace(costs, setup=longer).train_s(2 * few) == costs.train_s(2 * few)
    slow = replace(costs, setup=replace(setup, shares=Shares(matmul=0.01)))
    assert slow.train_s(few) - slow.optimizer_s == pytest.approx(3 * slow.forward_s(few))
    one_node = replace(costs, placement=Placement(8, 4, 8))
    alone = one_node.train_s(8 * 4096) - one_node.optimizer_s
    assert alone == pytest.approx(4 * 7 / 8 * setup.model.copy_bytes / (0.8 * 450e9))


def asked(**rest: Any) -> PlanRequest:
    """Plan Qwen3-4B on a node of H100s, with episodes of two short turns."""
    work = Workload(
        prompt_tokens=Constant(500),
        turns=Constant(2),
        reply_tokens=LogNormal(100, 0.5),
        tool_tokens=Constant(50),
        tool_s=Constant(1),
        max_tokens=4096,
    )
    episodes = EpisodeStats.of(work, group_size=2)
    setup = TrainingSetup(
        model=rest.pop("model", PRESETS["4B"]),
        device=rest.pop("device", DEVICES["H100"]),
        shares=Shares(),
        lr=1e-6,
        episodes=episodes,
    )
    given = {"devices": 8, "lags": (2,), "groups": (8,), "group_size": 2, "rounds": 2} | rest
    return PlanRequest(setup=setup, workload=work, **given)


@pytest.fixture(scope="module")
def plan() -> Suggestion:
    return suggest(asked())


def test_a_suggestion_fits_and_keeps_to_what_was_asked(plan: Suggestion) -> None:
    best = plan.best.candidate
    assert (
        best.placement.devices == 8
        and best.schedule.max_staleness == 2
        and best.schedule.groups_per_step == 8
    )
    assert best.costs.route.exact
    assert best.costs.setup.trainer_bytes(best.placement.trainers, best.costs.route) <= 0.9 * 80e9
    assert (
        best.costs.setup.context_tokens(best.placement.tp)
        >= best.max_running * best.costs.setup.episodes.tokens
    )
    assert plan.best.rate >= 0.95 * max(split.rate for split in plan.splits)
    assert plan.best.result.staleness_max <= plan.best.result.staleness_bound
    assert plan.synchronous
    assert plan.synchronous.result.staleness_max == 0 and plan.synchronous.rate < plan.best.rate
    assert [candidate.name for candidate in plan.routes] == list(routes())
    assert plan.simulated["snapshot_old"].rate <= 1.001 * plan.simulated["eager"].rate


def test_a_synchronous_plan_trains_and_samples_on_every_device(plan: Suggestion) -> None:
    """A step takes at least the time that all devices need for the tokens of 16 episodes."""
    assert plan.synchronous
    place, costs = plan.synchronous.candidate.placement, plan.synchronous.candidate.costs
    assert (place.trainers, place.engines * place.tp, place.devices, place.colocated) == (
        8,
        8,
        8,
        True,
    )
    assert costs.route == route_cost("current_recompute")
    assert (
        plan.synchronous.result.mean_step_s
        > costs.train_s(round(0.8 * costs.batch)) + costs.load_s()
    )


def test_the_rate_skips_the_filling_and_has_a_standard_error_over_rounds(plan: Suggestion) -> None:
    """Steps of 1, 1, 3, 1, 2, 1 s after filling are rounds of 5 and 4 s: 4.5 +- 0.5 (0.707 / sqrt
    2)."""
    steps = (9.0, 9.0, 9.0, 1.0, 1.0, 3.0, 1.0, 2.0, 1.0)
    rated = SimulatedCandidate(
        plan.best.candidate, replace(plan.best.result, steps_s=steps, filling=3)
    )
    assert rated.candidate.schedule.max_staleness == 2
    assert rated.spread == pytest.approx(0.5 / 4.5)
    assert rated.rate == pytest.approx(8 * 2 * rated.candidate.request.setup.episodes.tokens / 1.5)


def test_no_token_is_older_than_the_lag_that_was_asked_for() -> None:
    """With more than 5 of 8 groups ahead, tokens are a version older. max_staleness accounts for
    it."""
    found = suggest(asked(windows=(5,), route="snapshot_old"))
    schedule = found.best.candidate.schedule
    assert (schedule.lookahead_window, schedule.max_staleness, schedule.staleness_bound) == (
        5,
        1,
        2,
    )
    with pytest.raises(ConfigError, match="--window 5 with 8 groups a step needs --lag 2"):
        suggest(asked(windows=(5,), lags=(1,)))


def test_interrupt_sync_adds_scoring_if_generation_is_the_bottleneck(plan: Suggestion) -> None:
    """When generation is the bottleneck, scoring and the optimizer step add to it, and `load_s` has
    neither."""
    best = plan.best.candidate
    setup = replace(best.costs.setup, shares=Shares(loader_gb_s=1e3, cores=1e3))
    costs = replace(best.costs, setup=setup, placement=Placement(7, 1, 1))
    narrow = replace(best, costs=costs)
    free, closing = narrow.with_route("rollout"), narrow.with_route("interrupt_sync")
    assert closing.costs.load_s() == free.costs.load_s() and closing.costs.train_s(
        10**5
    ) == free.costs.train_s(10**5)
    stands = closing.costs.old_logps_s(round(closing.costs.batch), closing.estimate.versions)
    more = closing.estimate.step_s - free.estimate.step_s
    assert more == pytest.approx(stands + closing.costs.optimizer_s, rel=0.1) and stands > 0.05


def test_what_a_plan_says_has_its_numbers_and_can_be_run(plan: Suggestion) -> None:
    told = as_json(plan)
    name = plan.best.candidate.name
    exactness = next(reason for reason in told["reasons"] if reason.startswith(f"{name} is exact"))
    assert AVERAGE in exactness
    assert plan.best.result.bottleneck in told["reasons"]
    assert plan.synchronous
    ratio = plan.best.rate / plan.synchronous.rate
    assert any(f"is {ratio:.2f} times as fast" in reason for reason in told["reasons"])
    assert told["command"].startswith("unstale train llm --model FOLDER ")
    config = configure(parse(told["command"].split()[1:]))
    assert (config.schedule, config.old_logps.route) == (plan.best.candidate.schedule, name)
    assert (
        config.engine.max_running == plan.best.candidate.max_running and config.trainer.lr == 1e-6
    )
    assert (
        config.trainer.gradient_checkpointing
        == plan.best.candidate.costs.setup.gradient_checkpointing
    )
    assert config.cluster.trainers == plan.best.candidate.placement.trainers > 1
    assert any("tested on CPUs only" in each for each in told["missing"])
    rows = {row["route"]: row for row in told["routes"]}
    assert rows["ewma_prox"]["GPU GB"] == pytest.approx(6 * PRESETS["4B"].parameters / 1e9)
    # Deltas of stochastic rounding take 0.21 bytes a weight.
    held = (plan.best.candidate.costs.live - 1) * 0.21 * PRESETS["4B"].parameters / 1e9
    assert rows["snapshot_old"]["main GB"] == pytest.approx(held, rel=0.03)


def test_a_plan_has_room_for_the_longest_episode_that_can_be() -> None:
    """Up to 500 + 2 x 400 + 50 tokens, and the drawn ones are much shorter."""
    work = replace(asked().workload, reply_tokens=LogNormal(100, 0.5, max=400))
    assert work.longest == 1350
    assert replace(work, max_tokens=1000).longest == 1000
    unlimited = replace(work, turns=LogNormal(2, 0.5), tool_tokens=Constant(0))
    assert unlimited.longest == work.max_tokens == 4096
    recorded = ((EpisodeShape(10, (TurnShape(30, 0, 0),)), EpisodeShape(9, (TurnShape(5, 1),))),)
    assert Workload(recorded=recorded).longest == 40
    assert Workload(recorded=recorded).longest_reply == 30
    assert Workload(recorded=recorded).most_turns == 1
    assert (work.longest_reply, work.most_turns) == (400, 2)
    assert replace(work, max_tokens=200, prompt_tokens=Constant(9)).longest_reply == 200
    assert replace(unlimited, reply_tokens=LogNormal(100, 0.5)).longest_reply == 4096
    assert 8 < unlimited.most_turns < 20  # 3.7 standard deviations: 2 exp(0.5 * 3.7 - 0.125) = 11
    episodes = EpisodeStats.of(work, group_size=2)
    assert episodes.longest == 1350 and 1 < episodes.slowest < 1300 / episodes.tokens
    # An option of the command, memory of engines, and of the trainer's longest pass
    long = replace(work, reply_tokens=LogNormal(100, 0.5), max_tokens=10**6)
    setup = replace(asked().setup, episodes=EpisodeStats.of(long, group_size=2))
    assert setup.pass_tokens == 10**6 and setup.mean_pass_tokens == 4096
    assert setup.engine_sizes == [4, 8]  # 147 GB of keys and values, and 8 GB of weights
    shorter = replace(long, max_tokens=5000)
    setup = replace(setup, episodes=EpisodeStats.of(shorter, group_size=2))
    told = as_json(suggest(replace(asked(), setup=setup, workload=shorter)))
    config = configure(parse(told["command"].split()[1:]))
    assert config.engine.max_context == 5000
    assert (config.engine.max_completion_tokens, config.rollout.max_turns) == (5000, 2)
    (pass_tokens,) = re.findall(r"\(a pass of ([\d,]+) tokens\)", " ".join(told["reasons"]))
    assert int(pass_tokens.replace(",", "")) >= 5000


def test_the_command_of_a_plan_for_cores_divides_them() -> None:
    model = replace(Model.parse(SMALL), heads=2)  # so that an engine has at most 2 threads
    core = Device(
        name="core of this machine",
        flops=1e11,
        bandwidth=1e10,
        memory=4e9,
        link=1e10,
        host_link=1e10,
        network=1e10,
        node=1 << 30,
    )
    found = suggest(asked(model=model, device=core, devices=9))
    best = found.best.candidate
    place = best.placement
    assert place.engines > 1 and place.tp > 1
    told = as_json(found)
    config = configure(parse(told["command"].split()[1:]))
    assert config.engine.processes == place.engines and config.engine.threads == place.tp
    # The option is for all processes together, and a plan has the replies of one.
    assert config.engine.max_running == place.engines * best.max_running
    assert recorded_fleet(config).max_running == best.max_running
    threads = config.engine.processes * config.engine.threads + config.trainer.threads
    assert threads == 9 and config.cluster.trainers == 0
    console = Console(file=StringIO(), width=200)
    console.print(page(found))
    printed = console.file.getvalue()
    assert "on 9 cores of this machine: " in printed and " cores to train, " in printed
    assert "GPU" not in printed and "server" not in printed
    # The process of the second model has one core.
    route = route_cost("old_logit_model")
    assert scoring_devices(best.costs.setup, route, 6, max_staleness=2) == 1
    with pytest.raises(ConfigError, match=r"not fit 2 cores of this machine .* on each core"):
        suggest(asked(model=PRESETS["4B"], device=core, devices=2))


def test_a_plan_that_does_not_fit_names_the_gpus_that_would() -> None:
    """8 bytes x 30.5 G parameters are 244 GB, the movable model 61 GB. A device has 72 GB."""
    with pytest.raises(
        ConfigError, match=r"not fit 4 H100 .* Training takes 305 GB .* Use --gpus (\d+)"
    ) as told:
        suggest(asked(model=PRESETS["30B-A3B"], devices=4))
    needed = int(re.findall(r"--gpus (\d+)", str(told.value))[0])
    assert needed == 6
    enough = asked(model=PRESETS["30B-A3B"]).setup
    enough = replace(enough, gradient_checkpointing=True, offload=True)
    assert list(placements(enough, route_cost("snapshot_old"), max_staleness=2, devices=needed))
    assert not list(
        placements(enough, route_cost("snapshot_old"), max_staleness=2, devices=needed - 1)
    )
    on_devices = replace(enough, offload=False)
    fits = [on_devices.fits(count, route_cost("snapshot_old")) for count in (8, 16)]
    assert fits == [False, True], "672 GB"
    with pytest.raises(ConfigError, match=r"an engine 3920 GB for weights, .* larger devices"):
        suggest(asked(model=replace(PRESETS["235B-A22B"], experts=1100), devices=512))


def test_staleness_is_chosen_as_small_as_throughput_allows() -> None:
    """Tool calls of one second do not need eight batches in flight."""
    found = suggest(asked(lags=(1, 2, 8), windows=(1,), route="snapshot_old"))
    rates = {rated.candidate.schedule.max_staleness: rated.rate for rated in found.choices}
    chosen = found.best.candidate.schedule.max_staleness
    assert rates[chosen] >= NEAR * max(rates.values())
    assert all(rates[lag] < NEAR * max(rates.values()) for lag in rates if lag < chosen)


def test_the_command_answers_programs_and_people(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        SMALL,
        "--gpus",
        "2",
        "--lag",
        "1",
        "--groups",
        "2",
        "--group-size",
        "2",
        "--rounds",
        "2",
    ]
    words += [
        "--turns",
        "2",
        "--reply",
        "50",
        "--prompt",
        "100",
        "--answer",
        "20",
        "--route",
        "snapshot_old",
    ]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as left:
            main([*words, *more])
        assert left.value.code == 0
        printed = capsys.readouterr().out
        assert "--schedule.max_staleness 1" in printed and "snapshot_old" in printed
    assert json.loads(printed)["place"] == {
        "trainers": 1,
        "engines": 1,
        "tp": 1,
        "scorers": 0,
        "context": 1,
    }
    for wrong, message in (
        (["--route", "snapsht_old"], "did you mean snapshot_old"),
        (["--gpus", "0"], "--gpus: must be between 1 and 1000000, got 0"),
        (["--reply", "x"], "--reply"),
        (["--rounds", "1"], "--rounds: must be between 2 and 1000, got 1"),
        (["--window", "2"], "needs --lag 2"),
    ):
        with pytest.raises(SystemExit) as left:
            main([*words, *wrong])
        assert left.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


def test_the_speed_of_a_core_is_derived_from_a_recorded_run() -> None:
    """10 us per trained token are 3 forward passes of it by 5 threads; 2 us per reply in a decoding
    step are one, by 3 threads."""
    model = Model.parse("layers=2,hidden=8,ffn=16,heads=2,kv_heads=1,head_dim=4,vocab=10,tied=true")
    ran: Any = SimpleNamespace(
        workload=Workload(recorded=((EpisodeShape(10, (TurnShape(30, 0, 0),)),),)),
        costs=LinearCosts(train_token=1e-5, decode=1e-3, decode_reply=2e-6),
    )
    device, shares = core_of(ran, model, training=5, sampling=3)
    token = model.forward_flops(20)
    assert device.flops == pytest.approx(token / 2e-6 / 3)
    assert shares.decode == 1 and shares.step_s == 1e-3
    assert device.flops * shares.matmul == pytest.approx(3 * token / 1e-5 / 5)


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({}, 2),
        ({"schedule.max_staleness": 0}, 4),
        ({"schedule.max_staleness": 0, "trainer.compile": True}, 2),
        ({"schedule.max_staleness": 0, "cluster.trainers": 2}, 2),
        ({"trainer.threads": 3}, 3),
    ],
)
def test_the_threads_of_a_trainer_are_those_that_computed(
    options: dict[str, Any], threads: int
) -> None:
    """Of 4 cores, two engines have one each."""
    config = override(make_recipe("retail"), options | {"engine.processes": 2})
    assert training_threads(config, 4) == threads


@pytest.mark.parametrize(
    ("name", "devices", "by_hand"),
    [
        ("4B", 4, ((0.09, 0.2), 4.0)),
        ("4B", 24, ((0.02, 0.03), 0.7)),
        ("30B-A3B", 8, ((0.4, 0.8), 15.3)),
        ("30B-A3B", 24, ((0.1, 0.3), 5.1)),
        ("30B-A3B", 32, ((0.09, 0.2), 3.8)),
    ],
)
def test_main_memory_of_a_rank_is_that_of_the_arithmetic_by_hand(
    name: str, devices: int, by_hand: tuple[tuple[float, float], float]
) -> None:
    """GB a rank: 4 deltas of 2 to 5% changed weights, and float32 weights put aside in place, to
    which the bfloat16 weights of the past version are added."""
    (low, high), aside = by_hand
    model = PRESETS[name]

    def gb(rate: float, **options: Any) -> float:
        route = route_cost("snapshot_old", **options)
        assert route.device_bytes(model) == model.copy_bytes * (options.get("placement") != "own")
        return route.main_bytes(model, live=5, rate=rate) / devices / 1e9

    rates = [
        rate
        for rate in np.geomspace(1e-6, 1e-5, 50)
        if 0.02 < delta_sizes.changed_share(rate) < 0.05
    ]
    chain = [gb(rate) for rate in rates]
    assert 0.8 * low <= min(chain) and max(chain) <= 1.35 * high
    own = gb(1e-6, placement="own") - gb(1e-6)
    assert own == pytest.approx(1.5 * aside, rel=0.05)


@pytest.mark.parametrize(
    ("name", "trainers", "scorers", "by_hand"),
    [("4B", 4, 1, (14.1, 8.0)), ("30B-A3B", 24, 2, (17.8, 34.2)), ("30B-A3B", 8, 8, (53.4, 11.3))],
)
def test_memory_of_checkpoints_and_of_scoring_gpus_is_added_up_by_hand(
    name: str, trainers: int, scorers: int, by_hand: tuple[float, float]
) -> None:
    """GB: 14 bytes a parameter divided by trainers, and 2 by scorers, with gathered layers."""
    setup = replace(asked().setup, model=PRESETS[name])
    copied, scoring = by_hand
    assert setup.checkpoint_bytes(trainers) / 1e9 == pytest.approx(copied, rel=0.01)
    activations = setup.pass_tokens * setup.model.layer_bytes
    held = (setup.scorer_bytes(scorers) - activations) / 1e9
    assert held == pytest.approx(scoring, rel=0.01)
    assert setup.checkpoint_bytes(1) == 0


def test_scoring_gpus_have_memory_for_a_whole_pass() -> None:
    """They do not divide it: 131,072 tokens of 30B-A3B take two H100s to score."""
    route = route_cost("old_logit_model")
    short, long = (long_passes("30B-A3B", tokens, context=4) for tokens in (4096, 131_072))
    counts = [scoring_devices(each, route, 1, max_staleness=1) for each in (short, long)]
    assert counts == [1, 2]
    assert long.scorer_bytes(1) > long.memory >= long.scorer_bytes(2)


def long_passes(name: str, longest: int, **rest: Any) -> TrainingSetup:
    episodes = EpisodeStats(tokens=longest, longest=longest, attended=longest / 2, prompt=100)
    return replace(asked().setup, model=PRESETS[name], episodes=episodes, **rest)


def test_a_pass_of_131072_tokens_keeps_what_is_added_up_by_hand() -> None:
    """4B: 36 layer inputs of 2560 in bfloat16 are 24.2 GB, and one layer keeps 23.4 GB more."""
    setup = long_passes("4B", 131_072, gradient_checkpointing=True)
    layer = 2 * (8 * 2560 + (6 * 32 + 5 * 8) * 128 + 4 * 9728)
    assert setup.activation_bytes == 131_072 * (36 * 2 * 2560 + layer)
    assert setup.activation_bytes / 1e9 == pytest.approx(24.2 + 23.4, abs=0.1)
    for context in (2, 4, 8):
        divided = replace(setup, context=context)
        assert divided.activation_bytes == setup.activation_bytes / context
    assert setup.context_sizes == [1, 2, 4, 8, 16, 32]
    assert replace(setup, model=PRESETS["14B"]).context_sizes == [1, 2, 4, 8]  # 40 heads
    moe = long_passes("30B-A3B", 131_072, gradient_checkpointing=True)
    each = 2 * (8 * 2048 + (6 * 32 + 5 * 4) * 128 + 8 * (2 * 2048 + 4 * 768))
    assert moe.activation_bytes == 131_072 * (48 * 2 * 2048 + each)


@pytest.mark.parametrize(
    ("name", "trainers", "needed"),
    [("4B", 4, 1), ("4B", 2, 2), ("30B-A3B", 16, 2), ("32B", 24, 4)],
)
def test_the_smallest_context_that_fits_is_used(name: str, trainers: int, needed: int) -> None:
    """131,072 tokens on H100s with the second model of snapshot_old, and gradient checkpointing."""
    route = route_cost("snapshot_old")
    setup = long_passes(name, 131_072, gradient_checkpointing=True)
    fitting = [
        size for size in setup.context_sizes if replace(setup, context=size).fits(trainers, route)
    ]
    assert fitting[0] == needed
    work = Workload(prompt_tokens=Constant(100), reply_tokens=Constant(130_972))
    request = PlanRequest(setup=setup, workload=work, devices=trainers + 8, group_size=2)
    found = [
        each.costs.setup
        for each in candidates(request, "snapshot_old", ScheduleConfig(group_size=2))
        if each.placement.trainers == trainers
    ]
    assert found and {each.context for each in found} == {needed}
    if needed > 1:
        assert all(each.gradient_checkpointing for each in found)


def test_devices_that_divide_a_pass_exchange_heads_and_gather_more_often() -> None:
    """4B on 8 devices of a node: per token and layer q, k, v and the output, of 128 x 2 bytes."""
    setup = long_passes("4B", 131_072)
    shapes = {"route": route_cost("snapshot_old"), "batch": 1e6, "live": 3}
    alone = AnalyticCosts(setup=setup, placement=Placement(8, 4, 2), **shapes)
    pair = replace(alone, setup=replace(setup, context=2))
    tokens = 8 * 131_072
    sent = tokens / 8 * 36 * (2 * 32 + 2 * 8) * 128 * 2 / 2
    exchange_s = sent / (0.8 * 450e9)
    assert pair.train_compute_s(tokens) - alone.train_compute_s(tokens) == pytest.approx(
        2 * exchange_s
    )
    assert pair.train_transfer_s(tokens) == pytest.approx(2 * alone.train_transfer_s(tokens))


def test_a_plan_for_long_episodes_names_the_context() -> None:
    """30B-A3B with 131,072 tokens on 16 H100s: 8 train, of which 2 divide each pass."""
    work = Workload(prompt_tokens=Constant(72), reply_tokens=Constant(131_000))
    episodes = EpisodeStats.of(work, group_size=2)
    setup = replace(asked().setup, model=PRESETS["30B-A3B"], episodes=episodes)
    request = replace(asked(devices=16), setup=setup, workload=work, route="snapshot_old")
    told = as_json(suggest(replace(request, lags=(1,), groups=(2,))))
    assert told["place"]["context"] == 2 and "2 GPUs divide each pass" in told["suggestion"]
    assert "--cluster.context 2" in told["command"]
    assert "--trainer.share_prompts false" in told["command"]
    config = configure(parse(told["command"].split()[1:]))
    assert config.cluster.trainers % config.cluster.context == 0
    assert any("131,072 tokens, divided by 2 GPUs" in reason for reason in told["reasons"])


def test_a_state_in_main_memory_lets_one_gpu_train_4b() -> None:
    """A GPU has gradients (4 bytes) and bfloat16 weights, several also have float32 weights."""
    setup = asked(model=PRESETS["4B"]).setup
    offloaded = replace(setup, offload=True)
    parameters = PRESETS["4B"].parameters
    assert [setup.state_bytes(count) / parameters for count in (1, 8)] == [16, 20]
    assert [offloaded.state_bytes(count) / parameters for count in (1, 8)] == [4, 8]
    found = suggest(asked(model=PRESETS["4B"], devices=2, route="snapshot_old", lags=(1,)))
    costs = found.best.candidate.costs
    assert costs.placement.trainers == 1 and costs.setup.offload
    link = costs.setup.device.host_link * costs.setup.shares.link
    on_device = replace(costs, setup=replace(costs.setup, offload=False))
    assert costs.optimizer_s - on_device.optimizer_s == pytest.approx(24 * parameters / link)
    told = as_json(found)
    assert configure(parse(told["command"].split()[1:])).trainer.offload_optimizer
    assert any("48.3 GB of float32 weights and moments" in each for each in told["reasons"])
    assert "the optimizer's state in main memory" in told["suggestion"]


def test_a_plan_says_why_devices_cannot_train_in_turns() -> None:
    """Qwen3-8B with up to 131,072 tokens on 5 H100s: 4 train, in groups that divide a pass."""
    request = asked(devices=5, route="rollout", lags=(1,), groups=(2,))
    long = EpisodeStats(tokens=8000, longest=131_072, attended=4000, prompt=100)
    setup = replace(request.setup, model=PRESETS["8B"], episodes=long)
    plan = suggest(replace(request, setup=setup))
    assert plan.synchronous is None and plan.best.candidate.placement.trainers == 4
    told = as_json(plan)
    assert told["synchronous"] is None
    (reason,) = (each for each in told["reasons"] if "in turns" in each)
    assert reason.endswith(
        "is not possible: a pass over 131,072 tokens must be divided among 2 or 4 devices to fit, "
        "and 5 is no multiple of that"
    )


@pytest.mark.costly
@pytest.mark.parametrize("name", ["0.6B", "4B", "30B-A3B"])
def test_a_layer_keeps_the_bytes_that_a_pass_of_the_real_model_keeps(name: str) -> None:
    """Counted at the real widths, without computing: tensors that autograd saves, by layer."""
    model = PRESETS[name]
    counted = [saved_bytes(shape_of(model, layers), 1024) for layers in (1, 2)]
    layer = (counted[1] - counted[0]) / 1024
    # The kernel for CPUs keeps the attention output once.
    once = 2 * model.heads * model.head_dim
    assert layer == pytest.approx(model.layer_bytes - once, rel=0.01)
    inputs = [saved_bytes(shape_of(model, n), 1024, gradient_checkpointing=True) for n in (1, 2)]
    assert (inputs[1] - inputs[0]) / 1024 == 2 * model.hidden
