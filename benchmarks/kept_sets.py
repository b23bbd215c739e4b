"""Measure what recorded kept sets cost: bytes of a token in the journal, and the sampling rate.

    python -m benchmarks.kept_sets         # SmolLM2 in bfloat16, three minutes of a core
    python -m benchmarks.kept_sets --model base --rows 16 --tokens 8 --repeats 1

Replies to chat prompts of three kinds are sampled at temperature 1. Plain sampling and top-p
alternate. Rates are tokens per second of the engine's processor time, so that other work on the
machine does not count. Every reply is packed as the journal packs it.

The column "modelled" says what a slower code could save: the length with an arithmetic coder, whose
logistic model of an id reads the size of the set, the sets of the reply so far, with three speeds
of forgetting, and the id's place in the vocabulary. Eight replies fit the model, the next eight are
measured, over what they take packed.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import alternate, columns, ratios, row, spread, verdict, write
from unstale.config import SHIPPED_POLICIES
from unstale.config.hub import model_folder
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.worker import build_runner
from unstale.kept_sets import WHOLE, KeptSets, Truncation, join
from unstale.model.policy import Policy

GOAL_BYTES, GOAL_RATE = 40, 0.9
NAMES = ("a baker", "two sisters", "an old sailor", "a lost dog", "the last tree", "a young king")
THINGS = ("bread", "a rainbow", "glass", "the moon", "a bicycle", "honey", "a battery", "salt")
KINDS = {
    "explained sums": [
        f"What is {17 * i % 60} + {23 * i % 60}? Explain each step." for i in range(1, 49)
    ],
    "questions": [
        form.format(thing)
        for form in ("How is {} made?", "Why do people like {}?", "Describe {} to a child.")
        for thing in THINGS
    ],
    "stories": [
        f"Write a story about {name} who finds {thing}." for name in NAMES for thing in THINGS
    ],
}
LIMITS = {
    "plain": WHOLE,
    "top-p 0.95": Truncation(top_p=0.95),
    "top-p 0.95, top-k 128": Truncation(top_p=0.95, top_k=128),
}


@dataclass
class Sampling:
    """An engine with one truncation, and the replies of all its rounds, by kind of prompt."""

    engine: Batcher
    prompts: dict[str, list[list[int]]]
    truncation: Truncation
    replies: dict[str, list[FinishedReply]] = field(default_factory=dict)
    rounds: int = 0

    def rate(self, rows: int, tokens: int, stop: Sequence[int]) -> float:
        """Sample `rows` replies of each kind. Return sampled tokens per processor second.

        The prompts and seeds are those of the other contestants in the same round.
        """
        first = self.rounds * rows
        self.rounds += 1
        count, seconds = 0, 0.0
        for kind, prompts in self.prompts.items():
            for number in range(rows):
                prompt = prompts[(first + number) % len(prompts)]
                request: dict[str, Any] = {"truncation": self.truncation, "seed": first + number}
                self.engine.submit(SampleRequest(number, prompt, tokens, stop, 1.0, **request))
            found = []
            began = time.process_time()
            with torch.inference_mode():
                while self.engine.has_work:
                    found += self.engine.step()
            seconds += time.process_time() - began
            count += sum(len(reply.tokens) for reply in found)
            self.replies.setdefault(kind, []).extend(found)
        return count / seconds


class Memory:
    """The sets of a reply so far, as features `[V, 7]` of the ids of the vocabulary."""

    FORGET = torch.tensor([[0.7, 0.95, 1.0]])

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.reset()

    def reset(self) -> None:
        self._seen = torch.zeros(self._vocab, 3)
        self._last = torch.zeros(self._vocab, 1)

    def features(self) -> Tensor:
        place = torch.arange(self._vocab).add(2).log2()[:, None]
        parts = [torch.ones_like(place), place, self._last]
        return torch.cat([*parts, self._seen.log1p(), (self._seen[:, 2:] > 0).float()], 1)

    def add(self, ids: Tensor) -> None:
        self._last = torch.zeros(self._vocab, 1).index_fill_(0, ids, 1.0)
        self._seen = self._seen * self.FORGET + self._last


def modelled_bytes(replies: Sequence[FinishedReply], vocab: int) -> float:
    """Return the bytes of the second half of `replies`, with a model that the first half fits."""
    weights = torch.zeros(7, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    memory, bits = Memory(vocab), 0.0
    for number, reply in enumerate(replies):
        assert reply.kept_sets is not None
        fits = number < len(replies) // 2
        memory.reset()
        for i in range(len(reply.tokens)):
            ids = torch.from_numpy(reply.kept_sets.at([i]).ids).long()
            if len(ids) > 1:
                inside = torch.zeros(vocab).index_fill_(0, ids, 1.0)
                raw = memory.features() @ weights
                # The size is known: a shift makes the probabilities sum to it.
                shift = raw.detach().double().logsumexp(0).neg() + np.log(len(ids))
                for _ in range(8):
                    likely = (raw.detach() + shift).sigmoid()
                    step = (likely.sum() - len(ids)) / (likely * (1 - likely)).sum()
                    shift = shift - step.clamp(-2, 2)
                loss = F.binary_cross_entropy_with_logits(
                    (raw + shift).float(), inside, reduction="sum"
                )
                if fits:
                    optimizer.zero_grad()
                    (loss / len(ids)).backward()
                    optimizer.step()
                else:
                    bits += loss.item() / np.log(2) + np.log2(vocab) / 2
            memory.add(ids)
    return bits / 8


def packed_row(
    name: str, limits: str, replies: Sequence[FinishedReply], vocab: int
) -> tuple[str, float]:
    """Return a row of the table of sets, and the bytes a token."""
    kept = join([(len(each.tokens), each.kept_sets) for each in replies])
    assert kept is not None
    began = time.process_time()
    packed = [each.kept_sets.pack(each.tokens) for each in replies if each.kept_sets]
    seconds = time.process_time() - began
    for each, data in zip(replies, packed, strict=True):
        again = KeptSets.unpack(data, each.tokens)
        assert each.kept_sets and again.tobytes() == each.kept_sets.tobytes()
    size = sum(map(len, packed)) / len(kept)
    cells = [
        f"{kept.sizes.mean():.0f} (median {median(kept.sizes):.0f})",
        f"{np.mean(kept.sizes == 1):.0%}",
        f"{size:.0f}",
        f"{modelled_bytes(replies[:16], vocab) / sum(map(len, packed[8:16])):.2f}",
        f"{1000 * seconds / len(kept):.2f}",
    ]
    return row(name, limits, f"{len(kept):,}", *cells), size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=16, help="replies at once")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a reply")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = SHIPPED_POLICIES.get(options.model) or model_folder(options.model, convert=True)
    policy = Policy.load(folder, dtype="bfloat16")
    prompts: dict[str, Any] = {
        kind: [
            policy.tokenizer.apply_chat_template(
                [{"role": "user", "content": each}], add_generation_prompt=True, return_dict=False
            )
            for each in texts
        ]
        for kind, texts in KINDS.items()
    }
    limits: dict[str, Any] = {"max_slots": options.rows, "max_context": 512}
    engine = Batcher(build_runner(folder, dtype="bfloat16", **limits), **limits)
    engine.load(policy.weights())
    made = {name: Sampling(engine, prompts, each) for name, each in LIMITS.items()}
    stop = (policy.tokenizer.eos_token_id,)
    made["plain"].rate(options.rows, 4, stop)  # oneDNN compiles its code
    made["plain"].rounds = 0
    compared = {name: made[name] for name in ("plain", "top-p 0.95")}
    rates = alternate(
        {
            name: partial(each.rate, options.rows, options.tokens, stop)
            for name, each in compared.items()
        },
        options.repeats,
    )
    made["top-p 0.95, top-k 128"].rate(options.rows, options.tokens, stop)
    lines = [*columns("limits", "tokens per processor second", "times plain")]
    for name, values in rates.items():
        lines.append(row(name, spread(values, "{:.0f}"), spread(ratios(rates, name, over="plain"))))
    lines += [
        "",
        *columns(
            "prompts",
            "limits",
            "tokens",
            "mean set",
            "one token",
            "bytes a token",
            "modelled",
            "ms to pack a token",
        ),
    ]
    met = []
    for name, each in made.items():
        for kind, replies in each.replies.items() if each.truncation else ():
            text, size = packed_row(kind, name, replies, len(policy.tokenizer))
            lines.append(text)
            if name == "top-p 0.95":
                met += [kind] * (size <= GOAL_BYTES)
    rate = verdict(ratios(rates, "top-p 0.95", over="plain"), GOAL_RATE)
    lines += [
        "",
        f"Rate at top-p 0.95: {rate}. At most {GOAL_BYTES} bytes a token at top-p 0.95: "
        f"{', '.join(met) or 'none'}.",
    ]
    write("kept-sets", "What recorded kept sets cost", lines)


if __name__ == "__main__":
    main()
