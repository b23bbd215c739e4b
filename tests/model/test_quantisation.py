"""Test that engine and trainer round weights and activations to the same numbers.

Every rounded number is the nearest that its format can represent with the scale of its block. Only
matrices in layers are rounded. The gradient is that of a layer with the rounded weights. A dense
and an MoE policy agree with an engine of the same format, and disagree with it without. In whole
runs every exact route is exact with the rounded passes.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.config import (
    ConfigError,
    EngineConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.engines.embedded.batcher import Batcher, SampleRequest
from unstale.engines.embedded.worker import build_runner
from unstale.model.forward import ForwardOptions
from unstale.model.policy import Policy
from unstale.model.quantisation import FORMATS, quantise_passes
from unstale.records import collate
from unstale.testing import episode, plain_logps, tiny_policy

KINDS = ("fp8", "int8", "int4", "nvfp4", "mxfp4")
BLOCKS = {"fp8": (128, 128), "int8": (1, 10**6), "int4": (1, 32)}


def values_of(kind: str) -> Tensor:
    """Return all numbers that a format can represent with the scale 1."""
    if kind != "fp8":
        largest = {"int8": 127, "int4": 7}[kind]
        return torch.arange(-largest, largest + 1).float()
    # 4 bits of exponent with bias 7, 3 bits of mantissa; the highest code is NaN
    numbers = [
        (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        for exponent, mantissa in product(range(16), range(8))
        if (exponent, mantissa) != (15, 7)
    ]
    return torch.tensor(sorted({*numbers, *(-number for number in numbers)}))


def matrix(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, columns, generator=noise)
        * torch.rand(rows, columns, generator=noise).exp2()
    )


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_number_is_the_nearest_of_its_format(kind: str) -> None:
    weight = matrix(150, 140)
    rounded = FORMATS[kind].weight(weight)
    allowed = values_of(kind)
    height, width = BLOCKS[kind]
    for top, left in product(range(0, 150, height), range(0, 140, width)):
        block = weight[top : top + height, left : left + width]
        scale = block.abs().max() / allowed.max()
        distance = (block / scale).flatten()[:, None] - allowed
        nearest = allowed[distance.abs().argmin(1)].view(block.shape) * scale
        found = rounded[top : top + height, left : left + width]
        # halfway between two values, either may be chosen
        error = (found - block).abs() - (nearest - block).abs()
        assert error.max() <= 1e-6 * block.abs().max()


E2M1 = {
    0.0: 0.0, 0.2: 0.0, 0.25: 0.0, 0.26: 0.5, 0.5: 0.5, 0.75: 1.0, 0.8: 1.0, 1.2: 1.0, 1.25: 1.0,
    1.3: 1.5, 1.75: 2.0, 2.4: 2.0, 2.5: 2.0, 2.6: 3.0, 3.4: 3.0, 3.5: 4.0, 4.9: 4.0, 5.0: 4.0,
    5.1: 6.0, 6.0: 6.0,
}  # fmt: skip
"""Numbers, and the values of e2m1 to which they are rounded. A tie goes to the even mantissa."""


@pytest.mark.parametrize("sign", [1, -1])
def test_fp4_rounds_by_the_table_of_e2m1(sign: int) -> None:
    row = sign * torch.tensor([*E2M1])  # the largest is 6, so the scale is 1 in both formats
    expected = sign * torch.tensor([*E2M1.values()])
    for kind, block in (("nvfp4", 16), ("mxfp4", 32)):
        assert torch.equal(FORMATS[kind].weight(row[None, -block:])[0], expected[-block:])


def test_mxfp4_has_powers_of_two_as_scales_and_cuts_off_what_is_above_six() -> None:
    for largest, scale in ((4.0, 1.0), (7.9, 1.0), (8.0, 2.0), (0.13, 1 / 32), (3.0, 0.5)):
        row = torch.zeros(1, 32)
        row[0, :3] = torch.tensor([largest, scale, -3 * scale])
        rounded = FORMATS["mxfp4"].weight(row)[0, :3] / scale
        kept = {4.0: 4, 7.9: 6, 8.0: 4, 0.13: 4, 3.0: 6}[largest]
        assert rounded.tolist() == [kept, 1, -3]
        assert FORMATS["mxfp4"].pack(row)[1].item() == scale


def test_nvfp4_has_scales_in_e4m3_times_one_of_the_matrix() -> None:
    row = torch.zeros(1, 48)
    row[0, 0], row[0, 16], row[0, 17], row[0, 32] = 6 * 448, 6 * 19, 38.0, 1e-4
    codes, scales = FORMATS["nvfp4"].pack(row)
    assert scales.tolist() == [[448, 20, 2.0**-9]], "19 lies between 18 and 20, and 20 is even"
    found = FORMATS["nvfp4"].weight(row)[0]
    assert found[[0, 16, 17, 32]].tolist() == [6 * 448, 120, 40, 0]
    assert torch.equal(FORMATS["nvfp4"].unpack(codes, scales, torch.float32)[0], found)
    tiny = FORMATS["nvfp4"].weight(row * 2.0**-80)
    assert torch.equal(tiny, found[None] * 2.0**-80), "the scale of the matrix follows its numbers"


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_twice_changes_nothing_and_zeros_remain(kind: str) -> None:
    rounded = FORMATS[kind].weight(matrix(40, 70))
    again = FORMATS[kind].weight(rounded)
    if kind == "nvfp4":  # its scale of the matrix is a quotient, whose last digit may change
        torch.testing.assert_close(again, rounded, rtol=1e-6, atol=0)
    else:
        assert torch.equal(again, rounded)
    assert not FORMATS[kind].weight(torch.zeros(3, 5)).any()
    stacked = torch.stack([matrix(40, 70, seed=1), 50 * matrix(40, 70, seed=2)])
    apart = torch.stack([FORMATS[kind].weight(expert) for expert in stacked])
    assert torch.equal(FORMATS[kind].weight(stacked), apart)


def test_each_token_is_rounded_apart_from_its_neighbours() -> None:
    rows = torch.stack([matrix(1, 200)[0], 1e4 * matrix(1, 200, seed=1)[0]])
    for kind in ("fp8", "int8"):
        both = FORMATS[kind].activations(rows)
        assert torch.equal(both[:1], FORMATS[kind].activations(rows[:1]))
        assert 0 < (both - rows).abs().max() / rows.abs().max() < 0.05
    assert torch.equal(FORMATS["int4"].activations(rows), rows)


def test_only_matrices_in_layers_are_rounded() -> None:
    policy = tiny_policy(experts=4)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    quantise_passes(policy.model, "int4", torch.float32)
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    kept = "embed_tokens lm_head norm gate.weight"
    for name, _ in policy.model.named_parameters():
        path, _, last = name.rpartition(".")
        module = policy.model.get_submodule(path)
        used = getattr(module, last)
        if isinstance(module, nn.Linear):  # int4 does not round the input
            used = module(torch.eye(module.in_features)).t()
        is_kept = any(part in name for part in kept.split())
        assert torch.equal(used, before[name]) == is_kept, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_rounded_weights(kind: str) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(48, 40)])})
    layer: Any = model["layers"][0]  # type: ignore[index]
    rows = matrix(6, 48).requires_grad_()
    plain = nn.Linear(48, 40)
    rounded_rows = FORMATS[kind].activations(rows.detach()).requires_grad_()
    with torch.no_grad():
        plain.weight.copy_(FORMATS[kind].weight(layer.weight))
        plain.bias.copy_(layer.bias)
    quantise_passes(model, kind, torch.float32)
    layer(rows).square().sum().backward()
    expected = plain(rounded_rows)
    expected.square().sum().backward()
    torch.testing.assert_close(layer(rows), expected)
    torch.testing.assert_close(dict(layer.named_parameters())["weight"].grad, plain.weight.grad)
    torch.testing.assert_close(rows.grad, rounded_rows.grad)


def sampled(folder: Path, policy: Policy, kind: str, dtype: str) -> list[tuple[list[int], Tensor]]:
    """Sample four replies from an engine. Return their tokens and their log-probabilities."""
    limits = {"max_slots": 4, "max_context": 128}
    batcher = Batcher(
        build_runner(folder, dtype=dtype, quantise=kind, **limits), **limits, keep_cache=False
    )
    with torch.inference_mode():
        batcher.load(dict(policy.model.state_dict()))
        for number in range(4):
            prompt = tuple(range(2 + number, 12 + number))
            batcher.submit(SampleRequest(number, prompt, 40, (), 1.0, seed=number))
        replies = {}
        while batcher.has_work:
            replies |= {reply.id: reply for reply in batcher.step()}
    return [
        ([*range(2 + number, 12 + number), *reply.tokens], torch.tensor(reply.behavior_logp))
        for number, reply in sorted(replies.items())
    ]


def log_d(policy: Policy, replies: list[tuple[list[int], Tensor]]) -> Tensor:
    """Return |log D| of all sampled tokens."""
    differences = [
        plain_logps(policy, tokens)[-len(behavior_logp) :] - behavior_logp
        for tokens, behavior_logp in replies
    ]
    return torch.cat(differences).abs()


@pytest.mark.costly
@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_format_on_both_sides_removes_the_discrepancy(
    tmp_path: Path, kind: str, experts: int
) -> None:
    policy = tiny_policy(experts=experts)
    policy.save(tmp_path)
    replies = sampled(tmp_path, policy, kind, "float32")
    engine_only = log_d(policy, replies)
    policy.set_forward_options(ForwardOptions(quantise=kind))
    both = log_d(policy, replies)
    assert engine_only.mean() > 5e-3
    assert both.median() < 1e-5
    assert both.mean() < 0.05 * engine_only.mean()


def test_no_rounded_copy_is_kept_for_the_backward_pass() -> None:
    """Ranks would otherwise hold the gathered weights of all layers at once."""
    policy = tiny_policy()
    policy.set_forward_options(ForwardOptions(quantise="int4"))
    weights = {parameter.data_ptr() for parameter in policy.model.parameters()}
    shapes = {parameter.shape for parameter in policy.model.parameters() if parameter.dim() == 2}
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape in shapes and tensor.data_ptr() not in weights:
            kept.append(tensor.shape)
        return tensor

    batch = collate([episode(0, [70, (20, 0)])])  # 96 rows, the height of no weight
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logps(batch, temperature=1.0).sum().backward()
    assert not kept


def test_the_trainer_rounds_the_weights_that_the_engine_received(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.save(tmp_path)
    replies = sampled(tmp_path, policy, "int4", "bfloat16")
    means = []
    for dtype in ("float32", "bfloat16"):
        fresh = Policy.load(tmp_path)
        fresh.set_forward_options(ForwardOptions(quantise="int4", published_dtype=dtype))
        means.append(log_d(fresh, replies).mean())
    assert means[1] < 0.8 * means[0]


def configure(folder: Path, *, engine: str, trainer: str = "none", **changes: Any) -> RunConfig:
    """Return a tiny run with formats for its engine and its trainer."""
    save_tiny(folder / "model")
    config = tiny_run(folder / "model", folder, **changes)
    return replace(
        config,
        engine=replace(config.engine, quantise=engine),
        trainer=replace(config.trainer, quantise=trainer),
    )


@pytest.mark.costly
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("route", ["snapshot_old", "interrupt_sync", "old_logit_model"])
def test_exact_routes_are_exact_with_rounded_passes(tmp_path: Path, route: str) -> None:
    old_logps = OldLogpsConfig(route=route)
    config = configure(tmp_path, engine="fp8", trainer="fp8", max_steps=5, old_logps=old_logps)
    rows = session.train(config, console=quiet()).metrics
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) < 1e-6
    assert max(row["correction/log_d_abs_mean"] for row in rows) < 1e-3
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0
    assert min(row["trainer/grad_norm"] for row in rows) > 0, "every version has other weights"


@pytest.mark.costly
@pytest.mark.usefixtures("forked_children")
def test_an_engine_that_rounds_alone_is_measured_as_discrepancy(tmp_path: Path) -> None:
    config = configure(tmp_path, engine="int4", max_steps=2)
    rows = session.train(config, console=quiet()).metrics
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert min(row["correction/log_d_abs_mean"] for row in rows) > 5e-3


def test_the_format_of_passes_cannot_be_changed() -> None:
    policy = tiny_policy()
    policy.set_forward_options(ForwardOptions(quantise="int4"))
    with pytest.raises(ValueError, match="cannot be changed once it is set"):
        policy.set_forward_options(ForwardOptions())


def test_combinations_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.quantise must be none with .* sglang"):
        EngineConfig(backend="sglang", urls="http://127.0.0.1:1", quantise="fp8")
    for kind in ("int8", "int4"):
        with pytest.raises(ConfigError, match=r"none or fp8 with .*vllm, got int.\. .*embedded"):
            EngineConfig(backend="vllm", quantise=kind)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engine\.dtype must be bfloat16 .*got float32: vLLM"):
        EngineConfig(backend="vllm", quantise="fp8", dtype="float32")
    with pytest.raises(ConfigError, match=r"trainer\.quantise must be none with trainer\.lora_r"):
        TrainerConfig(quantise="fp8", lora_rank=4)
    with pytest.raises(ConfigError, match=r"trainer\.quantise must be none with trainer\.compile"):
        TrainerConfig(quantise="fp8", compile=True)
    with pytest.raises(ConfigError, match=r"trainer\.quantise must be none or int8"):
        configure(tmp_path, engine="int8", trainer="fp8")
