"""Run engine and trainer in one process: sample replies, score given replies, round parts.

The engine is the `Batcher` and the runner of the embedded engine's process, without the process.
Replies are sampled as in a run. They can also be computed again, token by token and in the same
batches, by an engine with other arithmetic. So the difference of two programs is known on the same
tokens. It needs no GPU.

`rounded` makes a float32 model of the Llama architecture round to bfloat16 at chosen places. With
all places it rounds where a bfloat16 model does, except within attention. So each place's share in
the error can be measured.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.runner import Step
from unstale.engines.embedded.sampling import Drawn
from unstale.engines.embedded.worker import build_runner
from unstale.kept_sets import Truncation
from unstale.model import head
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed

PUZZLES = ("basic_arithmetic", "chain_sum", "word_sorting", "simple_equations", "letter_counting")
"""Generators of reasoning-gym, one question after another."""
TOPICS = ("the sea", "a lost key", "old bridges", "honey bees", "a night train", "chess", "bread")
QUESTIONS = (
    "Write a short story about {}.",
    "Explain {} to a child of eight.",
    "What are three surprising facts about {}?",
    "Write a friendly e-mail in which somebody asks a colleague about {}.",
    "Give me a list of five questions for an interview about {}.",
)
PLACES = ("stream", "norms", "attention", "mlp", "head")
"""The places at which a bfloat16 model rounds: the sum of all layers and what is added to it, the
outputs of norms, everything from query, key and value to the result of attention, everything
between the three matrices of the MLP, and the logits."""


@dataclass(frozen=True, slots=True)
class Replies:
    """Prompts with a reply each, and the engine's log-probabilities of the replies."""

    prompts: Sequence[Sequence[int]]
    replies: Sequence[Sequence[int]]
    behavior_logp: Tensor
    """`[N]` for the N tokens of all replies, one reply after another, in nats."""

    def first(self, count: int) -> "Replies":
        """Return the first `count` prompts with their replies."""
        tokens = sum(map(len, self.replies[:count]))
        return Replies(self.prompts[:count], self.replies[:count], self.behavior_logp[:tokens])

    @property
    def sequences(self) -> list[list[int]]:
        return [[*p, *r] for p, r in zip(self.prompts, self.replies, strict=True)]

    def packed(self) -> tuple[Packed, Tensor]:
        """Return prompts and replies packed, and the tokens of replies as `[T]` bool."""
        sequences = self.sequences
        ends = np.cumsum([0, *map(len, sequences)]).tolist()
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        sampled = [
            at >= len(prompt)
            for prompt, sequence in zip(self.prompts, sequences, strict=True)
            for at in range(len(sequence))
        ]
        return Packed(tokens, tuple(ends)), torch.tensor(sampled)

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each token its reply, its position there, and the length of its context."""
        reply = torch.tensor([i for i, r in enumerate(self.replies) for _ in r])
        position = torch.tensor([j for r in self.replies for j in range(len(r))])
        before = torch.tensor([len(prompt) for prompt in self.prompts])
        return reply, position, before[reply] + position


def chat_prompts(policy: Policy, count: int) -> list[list[int]]:
    """Return the tokens of chat prompts: puzzles and free text in turn, each different."""
    import reasoning_gym

    noise = random.Random(0)
    free = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    noise.shuffle(free)
    sets = [reasoning_gym.create_dataset(name, seed=1, size=count) for name in PUZZLES]
    puzzles = [sets[i % len(sets)][i]["question"] for i in range(count)]
    texts = [puzzles[i] if i % 2 else free[i // 2 % len(free)] for i in range(count)]
    rendered: list[Any] = [
        policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in texts
    ]
    return [policy.tokenizer.encode(text, add_special_tokens=False) for text in rendered]


class LocalEngine:
    """The program of the embedded engine in this process."""

    def __init__(
        self, folder: Path, *, dtype: str, quantise: str = "none", max_running: int = 64
    ) -> None:
        self._limits: dict[str, Any] = {"max_slots": max_running, "max_context": 640}
        self.runner = build_runner(
            folder, dtype=dtype, quantise=quantise, device="cpu", **self._limits
        )
        self._weights: Mapping[str, Tensor] = {}

    @property
    def model(self) -> Any:
        """The transformers model that a packed runner computes with."""
        return self.runner._model  # type: ignore[attr-defined]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def sample(self, prompts: Sequence[Sequence[int]], ends: Sequence[int], most: int) -> Replies:
        """Sample a reply of at most `most` tokens for each prompt, at temperature 1."""
        replies, logps = self._run(self._batcher(), prompts, ends, [most] * len(prompts))
        return Replies(prompts, replies, logps)

    def replay(
        self, replies: Replies, seen: Callable[[Step, NDArray[np.int64]], None] | None = None
    ) -> Tensor:
        """Return the log-probabilities `[N]` that this engine gives to the tokens of replies.

        `seen` is called before each forward pass with the step, and the reply of each slot.
        """
        batcher = self._batcher()
        batcher._sampler = _Given(replies.sequences)  # type: ignore[assignment]
        if seen:
            forward = batcher.runner.forward

            def watched(step: Step) -> Tensor:
                seen(step, batcher._seed.astype(np.int64))
                return forward(step)

            with mock.patch.object(batcher.runner, "forward", watched):
                return self._run(batcher, replies.prompts, (), list(map(len, replies.replies)))[1]
        return self._run(batcher, replies.prompts, (), list(map(len, replies.replies)))[1]

    def _batcher(self) -> Batcher:
        """Return a batcher with an empty cache."""
        batcher = Batcher(self.runner, **self._limits)
        batcher.load(self._weights)
        return batcher

    def _run(
        self,
        batcher: Batcher,
        prompts: Sequence[Sequence[int]],
        ends: Sequence[int],
        most: Sequence[int],
    ) -> tuple[list[list[int]], Tensor]:
        for number, (prompt, limit) in enumerate(zip(prompts, most, strict=True)):
            batcher.submit(SampleRequest(number, prompt, limit, ends, 1.0, number))
        finished: dict[int, FinishedReply] = {}
        with torch.no_grad():
            while batcher.has_work:
                finished |= {reply.id: reply for reply in batcher.step()}
        ordered = [finished[number] for number in range(len(prompts))]
        logps = [value for reply in ordered for value in reply.behavior_logp]
        return [reply.tokens for reply in ordered], torch.tensor(logps, dtype=torch.float64)


class _Given:
    """A sampler that returns given tokens. The seed of a request is the number of its sequence."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = sequences

    def __call__(
        self,
        logits: Tensor,
        temperature: NDArray[np.float32],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int64],
        truncations: Sequence[Truncation] = (),
    ) -> Drawn:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        tokens = np.array([self._sequences[seed][at] for seed, at in pairs])
        logp = logits.log_softmax(-1).gather(1, torch.from_numpy(tokens)[:, None])
        return Drawn(tokens, logp[:, 0].numpy())


def trainer_logps(policy: Policy, replies: Replies) -> tuple[Tensor, Tensor]:
    """Return the trainer's log-probabilities and entropies `[N]` of the tokens of replies."""
    packed, sampled = replies.packed()
    scored = policy.score(
        packed, sampled, temperature=1.0, max_tokens_per_microbatch=8192, with_entropy=True
    )
    return scored.logp[sampled].double(), scored.entropy[sampled].double()


def plain_logps(model: Any, replies: Replies, *, chunk: int = 0) -> Tensor:
    """Return log-probabilities `[N]` by transformers alone, one sequence after another.

    With `chunk`, a sequence is computed in parts of so many tokens, with a KV cache.
    """
    found = []
    for prompt, sequence in zip(replies.prompts, replies.sequences, strict=True):
        row = torch.tensor([sequence])
        parts, cache = [], None
        with torch.no_grad():
            for piece in row.split(chunk or len(sequence), 1):
                out = model(piece, past_key_values=cache, use_cache=bool(chunk))
                cache = out.past_key_values
                parts.append(out.logits[0].double())
        logp = torch.cat(parts)[len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logp.gather(1, row[0, len(prompt) :, None])[:, 0])
    return torch.cat(found)


def _round(values: Tensor) -> Tensor:
    return values.bfloat16().to(values.dtype)


_places: ContextVar[frozenset[str]] = ContextVar("places that are rounded", default=frozenset())


@contextmanager
def rounded(model: Any, places: Sequence[str]) -> Iterator[None]:
    """Round to bfloat16 at these places of a float32 Llama model, while the context lasts."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in _hooks(name.rpartition(".")[2], module, frozenset(places)):
                stack.callback(handle.remove)
        token = _places.set(frozenset(places))
        stack.callback(_places.reset, token)
        stack.enter_context(_rounding_functions())
        yield


def _hooks(name: str, module: nn.Module, places: frozenset[str]) -> Iterator[Any]:
    """Add the hooks of a module, and yield their handles."""

    def output() -> Any:
        return module.register_forward_hook(lambda _, __, out: _round(out))

    def input() -> Any:
        return module.register_forward_pre_hook(lambda _, given: (_round(given[0]), *given[1:]))

    if "norm" in name:
        if "stream" in places:  # in place, because the layer adds to the same tensor afterwards
            yield module.register_forward_pre_hook(lambda _, given: _round_in_place(given[0]))
        if "norms" in places:
            yield module.register_forward_hook(_rounded_norm)
    elif name in ("o_proj", "down_proj"):
        if ("attention" if name == "o_proj" else "mlp") in places:
            yield input()
        if "stream" in places:
            yield output()
    elif _PLACE_OF_OUTPUT.get(name) in places:
        yield output()


_PLACE_OF_OUTPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention"),
    **dict.fromkeys(("gate_proj", "up_proj", "act_fn"), "mlp"),
    "lm_head": "head",
}
"""The place at which the output of a module is rounded, by the end of its name."""


def _round_in_place(values: Tensor) -> None:
    values.copy_(_round(values))


def _rounded_norm(module: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Return the output of a norm as transformers rounds it, twice."""
    x = given[0]
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return _round(module.weight * _round(normed))


@contextmanager
def _rounding_functions() -> Iterator[None]:
    """Round the rotated queries and keys, and the trainer's logits, where a place asks for it."""
    from transformers.models.llama import modeling_llama

    turn, logits = modeling_llama.apply_rotary_pos_emb, head._logits

    def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
        if "attention" not in _places.get():
            return turn(query, key, cos, sin, **options)
        query, key = turn(query, key, _round(cos), _round(sin), **options)
        return _round(query), _round(key)

    def trainer_logits(*given: Any) -> Tensor:
        found = logits(*given)
        return _round(found) if "head" in _places.get() else found

    with (
        mock.patch.object(modeling_llama, "apply_rotary_pos_emb", turned),
        mock.patch.object(head, "_logits", trainer_logits),
    ):
        yield
