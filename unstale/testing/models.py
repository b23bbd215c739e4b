"""Small models, episodes and changes of weights for tests."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.nn import Module
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from unstale.durability.checkpoint import Checkpoints, Progress
from unstale.kept_sets import KeptSets
from unstale.model.expert_products import ON_GPU
from unstale.model.loading import DTYPES
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.records import ContextPiece, Piece, Sampled, ScoredTrajectory, Task, Trajectory


def tiny_policy(
    *,
    seed: int = 0,
    dtype: str = "float32",
    lora: Lora | None = None,
    experts: int = 0,
    num_words: int = 64,
) -> Policy:
    """Return a small random Qwen3 model with `num_words` words, on the CPU.

    The model's distribution over words is not uniform. With `experts`, it is a Qwen3-MoE with so
    many experts in each layer, of which each token uses two. The values of a sequence then do not
    depend on other sequences of the pass.
    """
    words = {f"w{i}": i for i in range(num_words)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    shape: dict[str, Any] = {
        "vocab_size": num_words,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    model: PreTrainedModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            routed: dict[str, Any] = {
                "num_experts": experts,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            }
            config = Qwen3MoeConfig(**shape, **routed, moe_intermediate_size=32)
            model = Qwen3MoeForCausalLM(config)
            model.set_experts_implementation(ON_GPU)
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
    Module.to(model, DTYPES[dtype])
    policy = Policy(model, tokenizer, lora=lora)
    policy.independent_rows = experts > 0
    return policy


def plain_logps(
    policy: Policy,
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    kept_sets: KeptSets | None = None,
) -> Tensor:
    """Return the log-probability in nats of each token of one sequence, `[T]`.

    They are computed by a plain forward pass. The value of the first token is 0. With `kept_sets`,
    a token's log-probability is taken among the tokens of its set, as after truncated sampling.
    """
    row = torch.tensor([tokens], device=policy.device)
    with torch.no_grad():
        logits = policy.model(input_ids=row, use_cache=False).logits[0, :-1]
    for at in range(1, len(tokens) if kept_sets else 0):
        assert kept_sets
        if len(ids := kept_sets.at([at]).ids):
            outside = torch.ones(logits.shape[1], dtype=torch.bool)
            outside[torch.from_numpy(ids).long()] = False
            logits[at - 1, outside.to(logits.device)] = -torch.inf
    logp = (
        torch.log_softmax(logits.double() / temperature, -1).gather(1, row[0, 1:, None]).squeeze(1)
    )
    return torch.cat([logp.new_zeros(1), logp])


def episode(
    number: int,
    plan: Sequence[int | tuple[int, int] | tuple[int, int, bool]],
    *,
    advantage: float = 1.0,
) -> ScoredTrajectory:
    """Return an episode of random tokens. `plan` lists its parts.

    In `plan`, `n` stands for n context tokens. `(n, version)` and `(n, version, clean)` stand for n
    tokens sampled by a version. `clean` is False if the KV cache was of older weights; the default
    is True. Tokens and `behavior_logp` depend only on `number` and `plan`.
    """
    noise = torch.Generator().manual_seed(number)
    pieces: list[Piece] = []
    for item in plan:
        count, *how = (item,) if isinstance(item, int) else item
        tokens = tuple(torch.randint(2, 64, (count,), generator=noise).tolist())
        if how:
            behavior_logp = tuple((-1 - torch.rand(count, generator=noise) * 4).tolist())
            pieces.append(
                Sampled(tokens, behavior_logp, how[0], clean=bool(how[1]) if len(how) > 1 else True)
            )
        else:
            pieces.append(ContextPiece(tokens))
    task = Task("random", "train", number)
    trajectory = Trajectory(
        tuple(pieces), {"reward": 1.0}, "done", task, seed=number, episode=number
    )
    return ScoredTrajectory(trajectory, (advantage,))


def with_kept_sets(item: ScoredTrajectory, *, vocab: int = 64) -> ScoredTrajectory:
    """Return the episode `item` with random kept sets: the tokens among which each one was sampled.

    One token's set contains the whole vocabulary. The sets depend only on the episode's number and
    the place in the episode.
    """
    pieces: list[Piece] = []
    for place, piece in enumerate(item.trajectory.pieces):
        if isinstance(piece, Sampled):
            noise = np.random.default_rng([item.trajectory.episode, place])
            sets = []
            for token in piece.tokens:
                others = noise.choice(vocab, noise.integers(0, 12), replace=False)
                sets.append(np.union1d(others, [token]).astype(np.int32))
            sizes = np.array([len(each) for each in sets], np.int64)
            if place == 1:
                sizes[0], sets[0] = 0, sets[0][:0]
            piece = replace(piece, kept_sets=KeptSets(sizes, np.concatenate(sets)))
        pieces.append(piece)
    return replace(item, trajectory=replace(item.trajectory, pieces=tuple(pieces)))


def nudge(policy: Policy, *, seed: int, size: float = 0.02) -> None:
    """Add random noise of standard deviation `size` to all weights, as a substitute for an
    optimizer step.
    """
    noise = torch.Generator().manual_seed(seed)
    moved = {
        name: tensor + size * torch.randn(tensor.shape, generator=noise).to(tensor)
        for name, tensor in policy.whole_weights()
    }
    policy.load_weights(policy.parts_of(moved))


def checkpoint_round_trip(state: Any) -> Any:
    """Write the state of a component to a checkpoint, and return the state that is read back.

    Raises TypeError for a state that a checkpoint cannot store.
    """
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(
            Path(folder), {"part": cast(Any, SimpleNamespace(state=lambda: state))}
        )
        return checkpoints.load(checkpoints.save(Progress(), tiny_policy())).states["part"]
