"""Run `check_engine` on the scripted engine and on the embedded engine with each runner."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from unstale.engines import Engine, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions
from unstale.engines.scripted import ScriptedEngine
from unstale.testing import check_engine

pytestmark = pytest.mark.usefixtures("forked_children")

POSITIONS = 1536
COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
MODELS: dict[str, Callable[[], Module]] = {
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**COMMON, **SIZES, head_dim=8, tie_word_embeddings=True)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **SIZES, tie_word_embeddings=False)),
    "gptj, one sequence at a time": lambda: GPTJForCausalLM(
        GPTJConfig(**COMMON, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=POSITIONS)
    ),
}


WEIGHTS = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}
"""What the fake pretends to have."""


def _digits(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return a token that depends on the length so far: an endless, aperiodic sequence."""
    return [(len(tokens) + index) ** 2 % 61 for index in range(params.max_tokens)]


async def _tick(tokens: Sequence[int], params: SamplingParams) -> None:
    await asyncio.sleep(0)


def test_scripted_engine_keeps_the_contract() -> None:
    check_engine(
        lambda: ScriptedEngine(_digits, token_delay=_tick, parameters=WEIGHTS), update=WEIGHTS
    )


@pytest.mark.parametrize("kind", MODELS)
def test_embedded_engine_keeps_the_contract(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    model.save_pretrained(tmp_path)
    check_engine(lambda: _embedded(tmp_path), update=_weights(model))


def test_embedded_engine_keeps_the_contract_in_lockstep(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3"]()
    model.save_pretrained(tmp_path)
    check_engine(lambda: _embedded(tmp_path, lockstep=True), update=_weights(model))


def test_a_pool_of_one_engine_keeps_the_contract() -> None:
    def make() -> Engine:
        engine = ScriptedEngine(_digits, token_delay=_tick, parameters=WEIGHTS)
        return EnginePool([engine], Recovery(lambda version: WEIGHTS, restarts=3))

    check_engine(make, update=WEIGHTS)


def _embedded(folder: Path, *, lockstep: bool = False) -> Engine:
    return EmbeddedEngine(
        EngineOptions(
            folder, dtype="float32", max_running=4, max_context=POSITIONS, lockstep=lockstep
        )
    )


def _weights(model: Module) -> Mapping[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


class _Untagged(ScriptedEngine):
    """An engine that keeps the old version number after a load."""

    async def load(self, update: Mapping[str, Tensor], version: int) -> None:
        await super().load(update, 3)


class _Deaf(ScriptedEngine):
    """An engine that acknowledges an interrupt but continues its replies."""

    async def interrupt(self) -> None:
        self._open.clear()


@pytest.mark.parametrize(
    ("broken", "mistake"),
    [(_Untagged, "is the version stamped"), (_Deaf, "must return after all pending samples")],
)
def test_the_suite_names_the_mistake(broken: type[ScriptedEngine], mistake: str) -> None:
    with pytest.raises(AssertionError, match=mistake):
        check_engine(lambda: broken(_digits, token_delay=_tick, parameters=WEIGHTS), update=WEIGHTS)
