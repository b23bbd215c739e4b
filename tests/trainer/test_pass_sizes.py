"""Test the largest pass that fits into memory, and the bytes from which it follows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests.trainer.test_trainer import a_batch, learn, make, weights
from unstale.analysis.planner.models import Model
from unstale.config import ConfigError, RunConfig, TrainerConfig
from unstale.model import pass_size
from unstale.model.pass_size import free_bytes, largest_pass, layer_bytes, token_bytes
from unstale.model.policy import Policy
from unstale.testing import tiny_policy
from unstale.trainer.passes import pass_tokens

GPU = torch.device("cuda", 0)


def saved_bytes(policy: Policy, tokens: int) -> int:
    """Return the bytes that a pass keeps for its backward pass, without weights and head."""
    weights = {each.untyped_storage().data_ptr() for each in policy.model.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no other tensor gets its address
        return tensor

    ids = torch.arange(tokens)[None] % 40
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        policy.model.base_model(input_ids=ids, position_ids=torch.arange(tokens)[None])
    return sum(sizes.values())


def test_the_bytes_of_a_token_are_those_that_a_pass_keeps() -> None:
    policy = tiny_policy()
    sizes = pass_size._sizes_of(policy.model)
    few, many = (saved_bytes(policy, tokens) for tokens in (256, 512))
    counted = (many - few) / 256
    assert 0.7 * counted <= token_bytes(sizes, checkpointing=False, word=4) <= 2 * counted


def test_the_planner_and_the_trainer_have_one_formula() -> None:
    model = Model.parse("0.6B")
    assert model.layer_bytes == layer_bytes(model)
    assert token_bytes(model, checkpointing=True) < token_bytes(model, checkpointing=False) / 5
    # All 28 layers keep their input, and one at a time everything.
    kept = 28 * 2 * model.hidden + model.layer_bytes
    assert token_bytes(model, checkpointing=True) == kept


class _Sized(torch.nn.Module):
    """A model of the sizes of Qwen3-4B that has no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        )
        self.q_norm = torch.nn.LayerNorm(128, device="meta")


def test_the_largest_pass_of_4b_weights_fills_the_memory() -> None:
    model = _Sized()
    planned = Model.parse("4B")

    def tokens(free_gb: float, *, checkpointing: bool = False, trains: bool = True) -> int:
        options = {"checkpointing": checkpointing, "trains": trains}
        return largest_pass(model, free=free_gb * 1e9, word=2, **options)

    pass_size.MOST["meta"] = pass_size.MOST["cuda"]
    try:
        for free_gb in (20, 40):
            one = token_bytes(planned, checkpointing=False)
            assert free_gb * 1e9 / one - 256 < tokens(free_gb) <= free_gb * 1e9 / one
        assert tokens(20, checkpointing=True) > 8 * tokens(20)
        assert tokens(2, trains=False) > 20 * tokens(2)
        assert tokens(1000, trains=False) == pass_size.MOST["cuda"] and tokens(0) == 256
    finally:
        del pass_size.MOST["meta"]


def test_what_the_first_step_allocates_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    one = token_bytes(pass_size._sizes_of(policy.model), checkpointing=False, word=4)
    weights = sum(each.numel() for each in policy.model.parameters())
    config = RunConfig(recipe="x", trainer=TrainerConfig(max_tokens_per_microbatch=0))
    # A quarter of what is left after the step is for activations.
    free = weights * (12 + 3 * 4) + 4 * 1000 * one
    monkeypatch.setattr(pass_size, "_free_main_memory", lambda: free)
    assert pass_tokens(policy, config, trains=True) == 768  # 1000, in whole steps of 256
    in_bytes = replace(config, trainer=replace(config.trainer, optimizer="AdamW8bit"))
    monkeypatch.setattr(pass_size, "_free_main_memory", lambda: free - 6 * weights)
    assert pass_tokens(policy, in_bytes, trains=True) == 768
    assert pass_tokens(policy, config, trains=True) == 768 - 256 * (6 * weights > 4 * 232 * one)
    assert pass_tokens(policy, config, trains=False) > 768
    fixed = replace(config, trainer=TrainerConfig(max_tokens_per_microbatch=77))
    assert pass_tokens(policy, fixed, trains=True) == 77


def test_a_container_with_less_memory_than_the_machine_decides(tmp_path: Path) -> None:
    for name, text in (
        ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    2000 kB\n"),
        ("sys/fs/cgroup/memory.max", "max\n"),
        ("sys/fs/cgroup/memory.current", "900000\n"),
        ("sys/fs/cgroup/memory.stat", "anon 500000\ninactive_file 300000\nactive_file 100000\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert pass_size._free_main_memory(tmp_path) == 2_048_000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1500000\n")
    assert pass_size._free_main_memory(tmp_path) == 1_000_000


def test_cached_memory_of_torch_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert free_bytes(GPU, reserved=12, ranks=4) == 0.75 * (20 - 12)


def test_ranks_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_size, "_free_main_memory", lambda: 1000)
    assert free_bytes(torch.device("cpu"), reserved=50, ranks=4) == 0.25 * (250 - 50)


def test_a_chosen_size_trains_as_a_given_one() -> None:
    trainers = [make(tiny_policy(), max_tokens_per_microbatch=size) for size in (0, 8192)]
    for trainer in trainers:
        learn(trainer, a_batch())
    chosen, given = (weights(trainer.policy) for trainer in trainers)
    assert torch.equal(chosen, given)
    name = "trainer/max_tokens_per_microbatch"
    assert trainers[0].metrics()[name] >= 256 and name not in trainers[1].metrics()


def test_a_deterministic_run_needs_a_given_size() -> None:
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch must be > 0 in a determin"):
        RunConfig(
            recipe="x", deterministic=True, trainer=TrainerConfig(max_tokens_per_microbatch=0)
        )
