"""Test the embedded engine beyond the contract of all engines.

Numbers: float32 log-probabilities equal those of transformers to 1e-5, over turns, slot reuse and
weight changes, with our decoder, packed transformers and the fallback. Tokens depend only on
weights, context, seed and position. Work: a turn computes only new tokens, siblings share their
prompt, and dropped caches are counted. Process: it fails with an error, ends with its parent, and
ignores Ctrl-C.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.waits import LIMIT_S, wait_until_gone
from unstale.engines import EngineDied, SamplingParams
from unstale.engines.embedded import decoder, fallback, packed
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.embedded.kernels import Kernels
from unstale.engines.embedded.pages import Inputs, PagedCache, Pages, plan
from unstale.engines.embedded.runner import Step
from unstale.engines.embedded.sampling import draw, uniforms
from unstale.engines.embedded.worker import build_runner
from unstale.engines.registry import EngineOptions
from unstale.native import NotCompiled
from unstale.records import Sampled
from unstale.testing.architectures import ARCHITECTURES
from unstale.weights import child_process

pytestmark = pytest.mark.usefixtures("forked_children")

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.15,
}


def _qwen3(**changed: Any) -> Module:
    return Qwen3ForCausalLM(
        Qwen3Config(**{**SIZES, "head_dim": 16, "tie_word_embeddings": True, **changed})
    )


SLIDING: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
"""Layers of two kinds, one of which sees fewer tokens than a reply has."""
SOFT_CAPS = {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 3.0}
"""Scores so large that the cap changes them."""
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


MODELS: dict[str, Callable[[], Module]] = {
    "qwen3, tied": _qwen3,
    "qwen3, untied": lambda: _qwen3(tie_word_embeddings=False, num_key_value_heads=4),
    "qwen3, heads of 12, one of keys": lambda: _qwen3(head_dim=12, num_key_value_heads=1),
    "qwen3, heads of 6, by torch": lambda: _qwen3(head_dim=6),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, **SLIDING, **SOFT_CAPS)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **SLIDING)),
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16)),
    "qwen3 moe, weights that sum to 1, odd sizes": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{**SIZES, **EXPERTS, "moe_intermediate_size": 20}, head_dim=12, norm_topk_prob=True
        )
    ),
    "qwen3 moe, a layer without experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, mlp_only_layers=[0])
    ),
    "gpt-oss, with sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, **SLIDING, num_local_experts=4, num_experts_per_tok=2)
    ),
    "deepseek, values narrower than keys": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            **LATENT,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    ),
    "mamba, no parts after a beginning": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    ),
    "jamba, no parts after a beginning": lambda: JambaForCausalLM(
        JambaConfig(
            **{**SIZES, "num_experts_per_tok": 1},
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_dt_rank=4,
        )
    ),
    "qwen3 next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
            **EXPERTS,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    ),
    "gptj": lambda: GPTJForCausalLM(
        GPTJConfig(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=8,
            bos_token_id=0,
            eos_token_id=1,
        )
    ),
}


def _model(kind: str, *, seed: int = 0) -> Module:
    torch.manual_seed(seed)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def _weights(model: Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _batcher(
    folder: Path, *, dtype: str = "float32", max_slots: int = 8, keep_cache: bool = False
) -> Batcher:
    runner = build_runner(folder, dtype=dtype, max_slots=max_slots, max_context=512)
    return Batcher(runner, max_slots=max_slots, max_context=512, keep_cache=keep_cache)


def _live(folder: Path, *, kind: str = "qwen3, tied", **options: Any) -> tuple[Module, Batcher]:
    """Return a model and its sampler."""
    model = _model(kind)
    model.save_pretrained(folder)
    batcher = _batcher(folder, **options)
    with torch.inference_mode():
        batcher.load(_weights(model))
    return model, batcher


def _ask(
    number: int, tokens: Sequence[int], max_tokens: int = 8, *, temperature: float = 1.0
) -> SampleRequest:
    return SampleRequest(number, tuple(tokens), max_tokens, (), temperature, seed=number)


def _run(
    batcher: Batcher, *requests: SampleRequest, steps: int = 10**6
) -> dict[int, FinishedReply]:
    """Submit requests and step until all are done, or for `steps` steps."""
    for request in requests:
        batcher.submit(request)
    found: dict[int, FinishedReply] = {}
    with torch.inference_mode():
        while batcher.has_work and steps:
            found |= {reply.id: reply for reply in batcher.step()}
            steps -= 1
    return found


def _text(count: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def _error(
    model: Module, context: Sequence[int], reply: FinishedReply, *, temperature: float = 1.0
) -> float:
    """Return the largest difference from the model's own forward pass over context and reply."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *reply.tokens]]), use_cache=False).logits[
            0
        ]
    logp = (logits / temperature).log_softmax(-1)[len(context) - 1 : -1]
    own = logp.gather(1, torch.tensor(reply.tokens)[:, None])[:, 0]
    return (own - torch.tensor(reply.behavior_logp)).abs().max().item()


@pytest.mark.costly
@pytest.mark.parametrize("kind", MODELS)
def test_float32_log_probabilities_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Twelve episodes of three turns in eight slots, with suffixes, shared prompts, evictions and
    new weights."""
    _model(kind).save_pretrained(tmp_path)
    batcher = _batcher(tmp_path)
    opening = _text(20, seed=99)
    episodes = {number: [*opening, *_text(3 * number, seed=number)] for number in range(12)}
    for seed in (1, 2):
        model = _model(kind, seed=seed)
        with torch.inference_mode():
            batcher.load(_weights(model))
        for turn in range(3):
            asked = {
                number: _ask(number, tokens, 3 + number, temperature=0.6 + 0.1 * number)
                for number, tokens in episodes.items()
            }
            for number, reply in _run(batcher, *asked.values()).items():
                request = asked[number]
                assert reply.stop == "length" and len(reply.tokens) == request.max_tokens
                error = _error(model, request.tokens, reply, temperature=request.temperature)
                # A delta rule is computed in chunks or token by token, which round differently.
                assert error < (1e-4 if kind == "qwen3 next" else 1e-5)
                episodes[number] = [
                    *request.tokens,
                    *reply.tokens,
                    *_text(1 + turn * number, seed=turn),
                ]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("qwen3, tied", ""),
        ("qwen3, heads of 6, by torch", "a head size of 6 is not a multiple of 4"),
        ("llama", ""),
        (
            "gptj",
            "GPTJForCausalLM by transformers, one sequence at a time.* does not call transformers'",
        ),
    ],
)
def test_who_is_served_slowly_is_told_why(tmp_path: Path, kind: str, says: str) -> None:
    _model(kind).save_pretrained(tmp_path)
    warning = build_runner(
        tmp_path, dtype="float32", max_slots=2, max_context=64, device="cpu"
    ).warning
    assert re.search(says, warning)
    assert says or not warning or "do not compile" in warning


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3 moe", "qwen3 decoder"),
        ("qwen3 moe, a layer without experts", "transformers Qwen3MoeForCausalLM, packed"),
    ],
)
def test_experts_in_every_layer_are_decoded(kind: str, name: str, tmp_path: Path) -> None:
    _model(kind).save_pretrained(tmp_path)
    assert build_runner(tmp_path, dtype="float32", max_slots=2, max_context=64).name == name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: _qwen3(num_attention_heads=32, num_key_value_heads=32), "num_key_value_heads"),
        (lambda: _qwen3(head_dim=128), "head_dim"),
        (
            lambda: Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**{**SIZES, **EXPERTS, "num_experts": 16, "num_experts_per_tok": 8})
            ),
            "num_experts_per_tok",
        ),
    ],
)
def test_a_size_that_the_config_leaves_out_is_that_of_transformers(
    model: Callable[[], Module], name: str, tmp_path: Path
) -> None:
    made = model().eval()
    made.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config[name]
    path.write_text(json.dumps(config))
    batcher = _batcher(tmp_path)
    assert batcher.runner.name == "qwen3 decoder"
    with torch.inference_mode():
        batcher.load(_weights(made))
    text = _text(9, seed=1)
    assert _error(made, text, _run(batcher, _ask(0, text))[0]) < 1e-5


PACKED_QWEN3 = "transformers Qwen3ForCausalLM, packed"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rope_scaling": {"type": "default", "rope_theta": 5e5}}, "qwen3 decoder"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, PACKED_QWEN3),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, PACKED_QWEN3),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": DEFAULT_ROPE},
            PACKED_QWEN3,
        ),
    ],
)
def test_rotary_embeddings_are_those_of_transformers(
    settings: Mapping[str, Any], name: str, tmp_path: Path
) -> None:
    """Also if `config.json` has the older keys."""
    _model("qwen3, tied").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "max_position_embeddings": 512, **settings}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batcher = _batcher(tmp_path)
    assert batcher.runner.name == name
    with torch.inference_mode():
        batcher.load(_weights(model))
    prompt = _text(100, seed=3)
    assert _error(model, prompt, _run(batcher, _ask(0, prompt))[0]) < 1e-5


def test_experts_without_a_compiler_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*arguments: Any, **macros: int) -> Kernels:
        raise NotCompiled("no C compiler")

    monkeypatch.setattr(decoder, "Kernels", no_compiler)
    _model("qwen3 moe").save_pretrained(tmp_path)
    runner = build_runner(tmp_path, dtype="float32", max_slots=2, max_context=64)
    assert runner.name == "transformers Qwen3MoeForCausalLM, packed"


@pytest.mark.parametrize("kind", ["gemma2", "gpt-oss, with sinks"])
def test_packed_attention_without_a_compiler(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch computes windows, soft caps and sinks as `kernels.c` does, with a warning."""

    def no_compiler(*arguments: Any) -> Kernels:
        raise NotCompiled("no C compiler")

    monkeypatch.setattr(packed, "_compiled", no_compiler)
    model = _model(kind)
    model.save_pretrained(tmp_path)
    batcher = _batcher(tmp_path)
    assert "several times slower" in batcher.runner.warning
    with torch.inference_mode():
        batcher.load(_weights(model))
    prompts = {number: [*_text(70, seed=9), *_text(number, seed=number)] for number in range(4)}
    found = _run(batcher, *(_ask(number, prompt, 9) for number, prompt in prompts.items()))
    assert max(_error(model, prompts[number], reply) for number, reply in found.items()) < 1e-5


class _Leaky(LlamaForCausalLM):
    """A model in which each token depends on the token before it in a forward pass."""

    def forward(self, *, input_ids: Tensor, **options: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embedded + embedded.roll(1, 1), **options)


def test_a_model_that_mixes_packed_sequences_is_found_by_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model("llama").save_pretrained(tmp_path)
    model = _Leaky.from_pretrained(tmp_path)
    monkeypatch.setattr(packed, "load_model", lambda *arguments, **options: model)
    with pytest.raises(packed.CannotPack, match=r"log-probabilities differ by .* of a plain"):
        packed.PackedRunner(tmp_path, dtype=torch.float32, max_slots=2, max_context=64)


def test_attention_that_is_wrong_only_in_bfloat16_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = packed._Pages.attend

    def wrong(pages: packed._Pages, query: Tensor, *others: Any) -> Tensor:
        return attend(pages, query, *others) * (-1.0 if query.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(packed._Pages, "attend", wrong)
    _model("llama").save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"max_slots": 2, "max_context": 64}
    packed.PackedRunner(tmp_path, dtype=torch.float32, **sizes)
    with pytest.raises(packed.CannotPack, match="bfloat16 logits differ by"):
        packed.PackedRunner(tmp_path, dtype=torch.bfloat16, **sizes)


def test_a_rotary_embedding_that_depends_on_the_longest_position_is_found(tmp_path: Path) -> None:
    """Up to 64 positions the embedding is the same for all; beyond, one sequence changes others."""
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = Phi3Config(
        **SIZES, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=scaling
    )
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"dtype": "float32", "max_slots": 2}
    assert "packed" in build_runner(tmp_path, max_context=64, **sizes).name
    with pytest.raises(ValueError, match=r"longest position of a pass\. Lower engine\.max_context"):
        build_runner(tmp_path, max_context=256, **sizes)


def test_a_window_is_read_from_the_masks_at_the_full_context(tmp_path: Path) -> None:
    """The probe has 24 tokens; the window is longer, and the context is longer than that."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=100)).eval()
    model.save_pretrained(tmp_path)
    batcher = _batcher(tmp_path)
    with torch.inference_mode():
        batcher.load(_weights(model))
    context = _text(150, seed=1)
    reply = _run(batcher, _ask(0, context, 90))[0]
    assert _error(model, context, reply) < 1e-5


def test_a_long_context_is_computed_in_parts(tmp_path: Path) -> None:
    model = _model("qwen3, tied")
    model.save_pretrained(tmp_path)
    runner = build_runner(tmp_path, dtype="float32", max_slots=3, max_context=1400)
    batcher = Batcher(runner, max_slots=3, max_context=1400)
    with torch.inference_mode():
        batcher.load(_weights(model))
    long, short = _text(1300, seed=1), _text(30, seed=2)
    found = _run(batcher, _ask(0, long, 200), _ask(1, short, 5))
    assert (found[0].stop, len(found[0].tokens)) == ("length", 100)
    assert _error(model, long, found[0]) < 1e-5 and _error(model, short, found[1]) < 1e-5
    assert batcher.counters["prefill_tokens"] == 1330


def test_idle_slots_among_the_pages_change_nothing(tmp_path: Path) -> None:
    """First two of twelve episodes continue, on few of the used pages; then all do."""
    model, batcher = _live(tmp_path, max_slots=12)
    contexts = {number: _text(60 + 17 * number, seed=number) for number in range(12)}
    for numbers, count in ((range(12), 5), ((3, 9), 70), (range(12), 9)):
        found = _run(batcher, *(_ask(number, contexts[number], count) for number in numbers))
        assert max(_error(model, contexts[number], reply) for number, reply in found.items()) < 1e-5
        for number, reply in found.items():
            contexts[number] += reply.tokens


def test_pages_are_held_as_far_as_tokens_need_them() -> None:
    pages = Pages(max_slots=3, max_context=200)
    pages.hold(0, 65)
    pages.hold(1, 64)
    assert (pages.of[:2].tolist(), pages.span) == ([[1, 2, 0, 0], [3, 0, 0, 0]], 4)
    pages.hold(0, 1)
    pages.hold(2, 200)
    assert pages.of[2].tolist() == [2, 4, 5, 6], "the lowest that are free"
    for slot in range(3):
        pages.hold(slot, 0)
    assert pages.span == 1 and not pages.of.any()


def test_whole_pages_are_shared_and_written_to_by_nobody() -> None:
    pages = Pages(max_slots=4, max_context=200)
    pages.hold(0, 150)
    assert pages.share(0, 0, 150) is None and pages.of[0, :3].tolist() == [1, 2, 3], "with itself"
    assert pages.share(0, 1, 140) == (3, 4) and pages.of[1, :3].tolist() == [1, 2, 4], (
        "two whole ones, and its own"
    )
    assert pages.share(1, 2, 128) is None and pages.users[:5].tolist() == [0, 3, 3, 1, 1]
    assert pages.hold(1, 100) == (2, 4), "it goes on within a page of others: to a copy of it"
    assert pages.of[1, :3].tolist() == [1, 4, 0] and pages.hold(1, 90) is None
    pages.hold(0, 0)
    assert pages.of[2, :2].tolist() == [1, 2] and pages.users[:6].tolist() == [0, 2, 1, 0, 1, 0]
    for slot in range(4):
        pages.hold(slot, 0)
    assert not pages.users.any() and pages.span == 1


@pytest.mark.parametrize("kind", ["qwen3, tied", "mistral"])
def test_siblings_go_on_from_shared_pages_and_back_into_them(kind: str, tmp_path: Path) -> None:
    """Prompts of several pages; then each context is cut at another place within them and
    extended."""
    model, batcher = _live(tmp_path, kind=kind)
    prompt = _text(200, seed=1)
    _run(batcher, *(_ask(number, prompt, 70) for number in range(8)))
    asked = {
        number: _ask(number, [*prompt[: 90 + 13 * number], *_text(9, seed=number)], 80)
        for number in range(8)
    }
    found = _run(batcher, *asked.values())
    assert max(_error(model, asked[number].tokens, reply) for number, reply in found.items()) < 1e-5


def test_the_pool_of_pages_grows_no_further_than_slots_can_fill_it() -> None:
    cache = PagedCache([(1, 8)], max_slots=10, max_context=512, dtype=torch.float32)
    rooms = []
    for slot in range(10):
        for length in range(64, 513, 64):
            cache.keep(slot, length)
            rooms.append(cache.num_pages)
    assert sorted(set(rooms)) == [64, 81], (
        "each of ten slots has up to eight pages, and one page is nobody's"
    )


def test_rows_have_a_table_of_their_pages() -> None:
    pages = Pages(max_slots=4, max_context=1024)
    pages.hold(0, 10)
    pages.hold(1, 130)
    rows = torch.tensor([1, 0])
    shape, flat = plan(Step(rows, (), rows, torch.tensor([130, 10])), pages)
    inputs = Inputs.of(flat, shape)
    assert inputs.tables.shape == (8, 8), "both numbers are rounded up"
    assert inputs.tables[0].tolist() == [2, 3, 4, 0, 0, 0, 0, 0]
    assert inputs.tables[1].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert not inputs.tables[2:].any()
    shape, _ = plan(Step(rows, (), rows, torch.tensor([10, 512])), pages)
    assert (shape.rows, shape.reach) == (8, 16)


def test_a_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    _, batcher = _live(tmp_path)
    prompt = _text(40, seed=1)
    reply = _run(batcher, _ask(0, prompt, 10))[0]
    batcher.counters.clear()
    _run(batcher, _ask(1, [*prompt, *reply.tokens, *_text(5, seed=2)], 4))
    assert batcher.counters["cached_tokens"] == 49, (
        "all but the last sampled token, which was never fed back"
    )
    assert batcher.counters["prefill_tokens"] == 6


@pytest.mark.parametrize("kind", ["qwen3, tied", "llama"])
def test_siblings_share_their_opening(kind: str, tmp_path: Path) -> None:
    model, batcher = _live(tmp_path, kind=kind)
    prompt = _text(40, seed=1)
    found = _run(batcher, *(_ask(number, prompt, 4) for number in range(8)))
    assert batcher.counters["prefill_tokens"] == 40, (
        "computed once; the others copy all but the last token"
    )
    assert max(_error(model, prompt, reply) for reply in found.values()) < 1e-5
    assert len({tuple(reply.tokens) for reply in found.values()}) == 8, "each has its own noise"


@pytest.mark.parametrize("kind", ["qwen3, tied", "gemma2", "gptj", "qwen3 next"])
def test_after_a_load_contexts_are_computed_again_and_counted(kind: str, tmp_path: Path) -> None:
    """The second half of an interrupted reply is sampled by the second weights with a new cache."""
    old, new = _model(kind, seed=1), _model(kind, seed=2)
    old.save_pretrained(tmp_path)
    batcher = _batcher(tmp_path)
    with torch.inference_mode():
        batcher.load(_weights(old))
    prompt = _text(30, seed=3)
    _run(batcher, _ask(0, prompt, 50), steps=7)
    (first,) = batcher.interrupt()
    assert first.stop == "interrupted" and len(first.tokens) == 7
    assert batcher.counters["reprefill_tokens"] == 0
    with torch.inference_mode():
        batcher.load(_weights(new))
    context = [*prompt, *first.tokens]
    second = _run(batcher, _ask(0, context, 9))[0]
    assert batcher.counters["reprefill_tokens"] == 36 and batcher.counters["reprefill_s"] > 0
    assert _error(old, prompt, first) < 1e-4 and _error(new, context, second) < 1e-4


def test_with_a_kept_cache_whatever_stands_on_older_keys_is_not_clean(tmp_path: Path) -> None:
    """A continued reply, its next turn and its sibling are not clean; a new context is."""
    old, new = _model("qwen3, tied", seed=1), _model("qwen3, tied", seed=2)
    old.save_pretrained(tmp_path)
    prompt = _text(30, seed=3)

    def until_the_load(*, keep_cache: bool) -> tuple[Batcher, list[int]]:
        batcher = _batcher(tmp_path, keep_cache=keep_cache)
        with torch.inference_mode():
            batcher.load(_weights(old))
        _run(batcher, _ask(0, prompt, 50), steps=7)
        (first,) = batcher.interrupt()
        assert first.clean and len(first.tokens) == 7
        with torch.inference_mode():
            batcher.load(_weights(new))
        batcher.counters.clear()
        return batcher, [*prompt, *first.tokens]

    kept, context = until_the_load(keep_cache=True)
    second = _run(kept, _ask(0, context, 9))[0]
    assert not second.clean and _error(new, context, second) > 1e-3
    assert (kept.counters["cached_tokens"], kept.counters["prefill_tokens"]) == (36, 0), (
        "nothing is computed again"
    )
    assert kept.counters["reprefill_tokens"] == 0
    turn = [*context, *second.tokens, *_text(5, seed=4)]
    assert not _run(kept, _ask(1, turn, 3))[1].clean, (
        "its own new tokens were computed over the older ones"
    )
    assert not _run(kept, _ask(2, [*prompt, *_text(5, seed=5)], 3))[2].clean, (
        "the shared opening was copied"
    )
    fresh = _run(kept, _ask(3, _text(30, seed=6), 9))[3]
    normal, _ = until_the_load(keep_cache=False)
    assert fresh.clean and fresh == _run(normal, _ask(3, _text(30, seed=6), 9))[3]
    again = _run(normal, _ask(0, context, 9))[0]
    assert again.clean and _error(new, context, again) < 1e-5


def test_a_slot_given_to_a_new_context_is_clean_again(tmp_path: Path) -> None:
    old, new = _model("qwen3, tied", seed=1), _model("qwen3, tied", seed=2)
    old.save_pretrained(tmp_path)
    batcher = _batcher(tmp_path, max_slots=1, keep_cache=True)
    with torch.inference_mode():
        batcher.load(_weights(old))
        _run(batcher, _ask(0, _text(30, seed=3)))
        batcher.load(_weights(new))
    context = _text(40, seed=4)
    reply = _run(batcher, _ask(1, context))[1]
    assert reply.clean and _error(new, context, reply) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3, tied", "gemma3"])
def test_a_reply_goes_on_with_its_own_noise_whoever_runs_beside_it(
    kind: str, tmp_path: Path
) -> None:
    model = _model(kind)
    model.save_pretrained(tmp_path)
    prompt = _text(25, seed=1)

    def fresh() -> Batcher:
        batcher = _batcher(tmp_path)
        with torch.inference_mode():
            batcher.load(_weights(model))
        return batcher

    whole = _run(fresh(), _ask(5, prompt, 20))[5]
    others = [_ask(number, _text(10 + number, seed=number), 15) for number in range(5)]
    assert _run(fresh(), *others, _ask(5, prompt, 20))[5].tokens == whole.tokens
    batcher = fresh()
    _run(batcher, _ask(5, prompt, 20), steps=8)
    (part,) = batcher.interrupt()
    rest = _run(batcher, _ask(5, [*prompt, *part.tokens], 12))[5]
    assert len(part.tokens) == 8 and part.tokens + rest.tokens == whole.tokens


def test_bfloat16_is_near_but_not_the_same(tmp_path: Path) -> None:
    """The discrepancy D exists and has the size of bfloat16's rounding."""
    model, batcher = _live(tmp_path, dtype="bfloat16")
    prompts = {number: _text(12 + number, seed=number) for number in range(8)}
    found = _run(batcher, *(_ask(number, prompt, 12) for number, prompt in prompts.items()))
    errors = [_error(model, prompts[number], reply) for number, reply in found.items()]
    assert 1e-4 < max(errors) < 0.3


def test_a_processor_without_bfloat16_samples_in_it_nevertheless(
    folder: Path, update: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN reads the allowed instructions once, in the engine's process."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")

    async def live() -> None:
        async with _engine(folder, update, dtype="bfloat16") as engine:
            assert engine.runner == "qwen3 decoder"
            assert len((await engine.sample([1, 2, 3], _params(5))).piece.tokens) == 5

    asyncio.run(live())


def test_without_a_compiler_it_samples_the_same_and_says_that_it_is_slow(
    folder: Path, update: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sampled(**options: Any) -> Sampled:
        async with _engine(folder, update, **options) as engine:
            return (await engine.sample([1, 2, 3], _params(20))).piece

    by_kernels = asyncio.run(sampled())
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.warns(RuntimeWarning, match=r"several times slower.*'/nowhere/cc'"):
        by_torch = asyncio.run(sampled(threads=2))
    assert by_torch.tokens == by_kernels.tokens
    assert by_torch.behavior_logp == pytest.approx(by_kernels.behavior_logp, abs=1e-5)


@pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")), reason="no C compiler"
)
def test_a_kernel_refuses_what_does_not_lie_in_one_piece() -> None:
    kernels = Kernels(HEADS=1, KV_HEADS=1, HEAD_DIM=16, PAGE=64, RUN=8, LANES=16)
    both, out = torch.arange(-6.0, 6.0).view(2, 6), torch.empty(2, 3)
    kernels.gated(both, out, 2, 3)
    torch.testing.assert_close(out, F.silu(both[:, :3]) * both[:, 3:])
    with pytest.raises(ValueError, match="contiguous"):
        kernels.gated(both[:, ::2], out, 2, 3)


@pytest.mark.parametrize("kind", ["qwen3, tied", "llama"])
def test_weights_that_do_not_fit_are_refused_whole(kind: str, tmp_path: Path) -> None:
    model = _model(kind)
    model.save_pretrained(tmp_path)
    batcher = _batcher(tmp_path)
    weights = _weights(model)
    with torch.inference_mode():
        batcher.load(weights)
        with pytest.raises(ValueError, match=r"missing model.norm.weight"):
            batcher.load(
                {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
            )
        with pytest.raises(ValueError, match=r"unknown bias"):
            batcher.load({**weights, "bias": torch.zeros(1)})
        with pytest.raises(ValueError, match=r"model.norm.weight is \[3\], the model has \[48\]"):
            batcher.load({**weights, "model.norm.weight": torch.zeros(3)})
    reply = _run(batcher, _ask(0, [1, 2, 3]))[0]
    assert _error(model, [1, 2, 3], reply) < 1e-5


def test_a_tied_head_may_be_left_out_but_not_differ(tmp_path: Path) -> None:
    model = _model("qwen3, tied")
    model.save_pretrained(tmp_path)
    batcher = _batcher(tmp_path)
    weights = _weights(model)
    with torch.inference_mode():
        with pytest.raises(ValueError, match="are tied"):
            batcher.load({**weights, "lm_head.weight": weights["lm_head.weight"] + 1})
        batcher.load({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"})
    assert _error(model, [1, 2, 3], _run(batcher, _ask(0, [1, 2, 3]))[0]) < 1e-5


def test_draw_inverts_the_distribution_function() -> None:
    """A fine grid of noise draws each token as often as its probability requires."""
    logits = torch.tensor([2.0, -1.0, 0.0, -torch.inf, 1.0])
    noise = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    for temperature in (1.0, 0.5):
        tokens, logp = draw(logits.expand(10_000, -1), torch.full((10_000,), temperature), noise)
        wanted = (logits / temperature).softmax(-1)
        assert (torch.bincount(tokens, minlength=5) / 10_000 - wanted).abs().max() < 2e-4
        torch.testing.assert_close(logp, wanted.log()[tokens])


@pytest.mark.parametrize("length", [5, 64])
def test_a_norm_that_is_no_number_is_not_sampled_over(length: int, tmp_path: Path) -> None:
    """Full and partly filled pages: masked positions have no attention weight."""
    model = _model("qwen3, tied")
    model.save_pretrained(tmp_path)
    batcher = _batcher(tmp_path)
    weights = _weights(model)
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.full((16,), torch.nan)
    with torch.inference_mode():
        batcher.load(weights)
    with pytest.raises(FloatingPointError, match="the logits are not finite"):
        _run(batcher, _ask(0, _text(length, seed=1), 2))


def test_greedy_is_a_point_mass() -> None:
    logits, noise = torch.tensor([[0.0, 3.0], [0.0, 0.0]]), torch.tensor([0.01, 0.99]).double()
    tokens, logp = draw(logits, torch.tensor([0.0, 1.0]), noise)
    assert tokens.tolist() == [1, 1]
    assert logp.tolist() == pytest.approx([0.0, -np.log(2)])


def test_logits_that_are_not_finite_are_not_sampled_from() -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(torch.tensor([[0.0, torch.nan]]), torch.ones(1), torch.tensor([0.5]).double())


def test_noise_is_uniform_and_differs_by_seed_and_position() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100), 100)
    found = uniforms(seeds, positions)
    assert len(np.unique(found)) == 10_000 and found.min() > 0 and found.max() < 1
    counts = np.histogram(found, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 45, (
        "chi-square with 19 degrees of freedom, p < 0.001"
    )
    grid = found.reshape(100, 100)
    for one, next_one in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), next_one.ravel())[0, 1]) < 0.04
    assert uniforms(seeds[5:6], positions[5:6])[0] == found[5]


@asynccontextmanager
async def _engine(
    folder: Path, update: Mapping[str, Tensor], **options: Any
) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(
        EngineOptions(
            folder, **{"dtype": "float32", "max_running": 4, "max_context": 512, **options}
        )
    )
    try:
        await engine.start()
        await engine.load(update, 0)
        await engine.resume()
        yield engine
    finally:
        await engine.close()


def _params(max_tokens: int, *, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_tokens=(), seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    _model("qwen3, tied").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def update() -> Mapping[str, Tensor]:
    return _weights(_model("qwen3, tied"))


def test_a_day_in_the_life_of_the_process(folder: Path, update: Mapping[str, Tensor]) -> None:
    """Threads, Ctrl-C, more requests than slots, limits, cancellation and metrics of one
    process."""

    async def live() -> None:
        async with _engine(folder, update) as engine:
            assert engine.runner == "qwen3 decoder" and engine.vocab_size == VOCAB
            os.kill(engine.pid, signal.SIGINT)
            assert {"OMP_WAIT_POLICY=PASSIVE", "OMP_NUM_THREADS=1"} <= _environment(engine.pid)
            replies = await asyncio.gather(
                *(engine.sample([1, 2, 3], _params(5, seed=seed)) for seed in range(10))
            )
            assert [len(reply.piece.tokens) for reply in replies] == [5] * 10
            metrics = engine.metrics()
            assert (
                metrics["sampled_tokens"] == 50
                and metrics["prefill_tokens"] >= 3
                and metrics["busy_s"] > 0
            )
            assert 1 <= metrics["batch_size_mean"] <= 4
            assert engine.metrics()["sampled_tokens"] == 0, "counters start again"
            reply = await engine.sample([1] * 500, _params(100))
            assert (len(reply.piece.tokens), reply.stop) == (12, "length"), "the context is full"
            await _refuses(engine, [], "at least one token")
            await _refuses(engine, [1] * 512, "raise max_context")
            await _refuses(engine, [1, VOCAB], "does the tokenizer fit the model")
            await _cancel(engine)

    asyncio.run(live())


def test_a_reply_says_that_it_stands_on_a_kept_cache(
    folder: Path, update: Mapping[str, Tensor]
) -> None:
    async def live(*, keep_cache: bool) -> list[bool]:
        async with _engine(folder, update, keep_cache=keep_cache) as engine:
            first = await engine.sample([1, 2, 3], _params(20))
            await engine.interrupt()
            await engine.load(update, 1)
            await engine.resume()
            second = await engine.sample([1, 2, 3, *first.piece.tokens], _params(5))
            assert second.piece.version == 1
            return [first.piece.clean, second.piece.clean]

    assert asyncio.run(live(keep_cache=True)) == [True, False]
    assert asyncio.run(live(keep_cache=False)) == [True, True]


def _environment(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))


async def _refuses(engine: EmbeddedEngine, tokens: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        await engine.sample(tokens, _params(1))


async def _cancel(engine: EmbeddedEngine) -> None:
    """Cancelled requests free their slots. Otherwise four of them would delay the fifth."""
    async with asyncio.TaskGroup() as tasks:
        given_up = [
            tasks.create_task(engine.sample([1, 2, 3], _params(505, seed=seed)))
            for seed in range(4)
        ]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
    reply = await engine.sample([1, 2, 3], _params(2))
    assert len(reply.piece.tokens) == 2
    assert engine.metrics()["sampled_tokens"] < 500


def test_a_killed_process_fails_everyone_at_once(
    folder: Path, update: Mapping[str, Tensor]
) -> None:
    async def live() -> None:
        async with _engine(folder, update) as engine:
            pending = [
                asyncio.ensure_future(engine.sample([1], _params(500, seed=seed)))
                for seed in range(6)
            ]
            await engine.sample([1, 2], _params(1))
            os.kill(engine.pid, signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                ends = await asyncio.gather(*pending, return_exceptions=True)
            assert all(isinstance(end, EngineDied) and "signal 9" in str(end) for end in ends)
            for call in (
                engine.sample([1], _params(1)),
                engine.interrupt(),
                engine.load(update, 1),
                engine.resume(),
            ):
                with pytest.raises(EngineDied, match="signal 9"):
                    await call

    asyncio.run(live())


def test_a_start_that_fails_does_not_make_the_next_one_wait(
    folder: Path, update: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may refuse a new process, for instance because memory is short."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError("no process can be created")

    async def live() -> None:
        async with _engine(folder, update) as engine, asyncio.timeout(LIMIT_S):
            pending = asyncio.ensure_future(engine.sample([1], _params(500)))
            await engine.sample([1, 2], _params(1))
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDied, match="signal 9"):
                await pending
            with monkeypatch.context() as patch:
                patch.setattr(child_process.subprocess, "Popen", refuse)
                for _ in range(2):
                    with pytest.raises(OSError, match="no process can be created"):
                        await engine.start()
            await engine.start()
            await engine.load(update, 1)
            await engine.resume()
            assert (await engine.sample([1], _params(1))).piece.version == 1

    asyncio.run(live())


def test_a_failing_process_says_why(folder: Path, update: Mapping[str, Tensor]) -> None:
    async def live() -> None:
        broken = {name: tensor * torch.nan for name, tensor in update.items()}
        async with _engine(folder, broken) as engine:
            with pytest.raises(EngineDied, match="the logits are not finite"):
                await engine.sample([1, 2, 3], _params(4))

    asyncio.run(live())


_PARENT = """
import asyncio, sys
from pathlib import Path
from unstale.engines.embedded.decoder import Qwen3Runner
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions

async def live():
    engine = EmbeddedEngine(EngineOptions(Path(sys.argv[1]), max_running=2, max_context=64))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(live())
"""


@pytest.mark.costly
def test_the_process_does_not_outlive_a_killed_parent(folder: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_gone(pid)


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a model folder: it has no config.json"):
        EmbeddedEngine(EngineOptions(tmp_path))
    _qwen3(max_position_embeddings=100).save_pretrained(tmp_path)
    told = r"engine\.max_context is 2048, but the policy has 100 positions: set it to 100 or less"
    with pytest.raises(ValueError, match=told):
        EmbeddedEngine(EngineOptions(tmp_path))


TINY = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
TINY_ATTENTION = {
    **TINY,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 1,
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (FalconConfig(**TINY, num_attention_heads=4), "one sequence at a time"),
        (MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=64), ""),
        (BloomConfig(**TINY, n_head=4), "one sequence at a time"),
        (FalconConfig(**TINY, num_attention_heads=4, alibi=True), "one sequence at a time"),
        (
            Llama4TextConfig(
                **TINY_ATTENTION, head_dim=8, num_local_experts=2, attention_chunk_size=16
            ),
            "one sequence at a time",
        ),
        (ARCHITECTURES["Nemotron-H"].make().config, "each token takes a pass of all tokens"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else "",
)
def test_models_that_cannot_be_packed_are_slow(config: Any, says: str, tmp_path: Path) -> None:
    """Recurrent models are in `MODELS`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"max_slots": 2, "max_context": 64, "device": "cpu"}
    assert says in build_runner(tmp_path, dtype="float32", **sizes).warning


def test_a_model_that_looks_ahead_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ahead(*arguments: Any, **options: Any) -> Module:
        model: Any = _model("llama")
        forward = model.model.norm.forward
        model.model.norm.forward = lambda hidden: forward(hidden - hidden.mean(1, keepdim=True))
        return model  # type: ignore[no-any-return]

    ahead().save_pretrained(tmp_path)  # type: ignore[operator]
    for module in (packed, fallback):
        monkeypatch.setattr(module, "load_model", ahead)
    with pytest.raises(
        ValueError,
        match=r"cannot run LlamaForCausalLM.*One by one: .* changes the logits of earlier tokens",
    ):
        build_runner(tmp_path, dtype="float32", max_slots=2, max_context=64, device="cpu")


def test_before_start_nothing_works_and_close_is_harmless(folder: Path) -> None:
    async def live() -> None:
        engine = EmbeddedEngine(EngineOptions(folder))
        with pytest.raises(RuntimeError, match="has not been started"):
            await engine.sample([1], _params(1))
        await engine.close()

    asyncio.run(live())
