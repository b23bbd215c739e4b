"""Measure adapters that are not merged: their discrepancy, and the rate with four versions at once.

    python -m benchmarks.lora_versions                     # SmolLM2 in bfloat16, about ten minutes
    python -m benchmarks.lora_versions --model base --rows 16 --replies 8

The engine's log-probabilities are compared with a plain forward pass of PEFT in the trainer. Rates
are tokens per second of the engine's processor time, so that other work on the machine does not
count. The contestants alternate.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import alternate, columns, ratios, row, spread, verdict, write
from unstale.config import SHIPPED_POLICIES
from unstale.config.hub import model_folder
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.worker import build_runner
from unstale.model.lora import Base, Lora
from unstale.model.policy import Policy
from unstale.testing import plain_logps
from unstale.weights.publish import num_bytes
from unstale.weights.store import VersionStore

VERSIONS = 4
PROMPT = 24
CONTEXT = 256
STEP = 1e-3
"""Standard deviation of the random step between two versions of the adapters."""
GOAL = 0.8
"""Least ratio of the rate with four versions to that with one."""


@dataclass
class Contestant:
    """An engine, the versions of its requests in turn, and what its last replies were."""

    engine: Batcher
    versions: Sequence[int]
    rounds: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    replies: dict[int, FinishedReply] = field(default_factory=dict)

    def rate(self, rows: int, replies: int) -> float:
        """Sample replies to new random prompts. Return tokens per processor second.

        The prompts are those of the other contestants in the same round.
        """
        noise = torch.Generator().manual_seed(self.rounds)
        self.rounds += 1
        words = self.engine.runner.vocab_size
        prompts = torch.randint(10, words, (rows, PROMPT), generator=noise).tolist()
        self.prompts = prompts
        for number, prompt in enumerate(prompts):
            version = self.versions[number % len(self.versions)]
            request = SampleRequest(number, prompt, replies, (), 1.0, seed=number, version=version)
            self.engine.submit(request)
        self.replies = {}
        began = time.process_time()
        with torch.inference_mode():
            while self.engine.has_work:
                self.replies |= {reply.id: reply for reply in self.engine.step()}
        return rows * replies / (time.process_time() - began)


def adapters_of(policy: Policy) -> list[dict[str, Tensor]]:
    """Return the adapters of all versions, each a random step away from the one before."""
    noise = torch.Generator().manual_seed(0)
    found = []
    weights: Mapping[str, Tensor] = policy.weights()
    for _ in range(VERSIONS):
        weights = {
            name: each + STEP * torch.randn(each.shape, generator=noise).to(each)
            for name, each in weights.items()
        }
        found.append(dict(weights))
    return found


def errors(policy: Policy, made: Contestant) -> Tensor:
    """Return |log D| in nats of the tokens of the last replies. They are of the last version."""
    found = []
    for number, reply in made.replies.items():
        prompt = made.prompts[number]
        expected = plain_logps(policy, [*prompt, *reply.tokens])[len(prompt) :]
        found.append((expected - torch.tensor(reply.behavior_logp).double()).abs())
    return torch.cat(found)


def contestants(
    policy: Policy, adapters: Sequence[Mapping[str, Tensor]], folder: Any, slots: int
) -> dict[str, Contestant]:
    limits: dict[str, Any] = {"max_slots": slots, "max_context": CONTEXT}
    assert policy.merging is not None
    base = Base(folder, policy.merging)
    merged = Batcher(build_runner(folder, dtype="bfloat16", **limits), **limits)
    merged.load(base.merged(adapters[-1]))
    unmerged = Batcher(build_runner(folder, dtype="bfloat16", base=base, **limits), **limits)
    for version, each in enumerate(adapters):
        unmerged.load(each, version)
    return {
        "merged": Contestant(merged, (-1,)),
        "unmerged, one version": Contestant(unmerged, (VERSIONS - 1,)),
        "unmerged, four versions": Contestant(unmerged, range(VERSIONS)),
    }


def stored(adapters: Sequence[Mapping[str, Tensor]]) -> tuple[int, float]:
    """Return the bytes that the version store keeps per version, and the seconds to change one."""
    store = VersionStore()
    for version, each in enumerate(adapters):
        store.put(version, each)
    began = time.process_time()
    for version in (0, len(adapters) - 1):
        store.move_to(version)
    moves = 2 * (len(adapters) - 1)
    return store.bytes // (len(adapters) - 1), (time.process_time() - began) / moves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="replies at once")
    parser.add_argument("--replies", type=int, default=24, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = SHIPPED_POLICIES.get(options.model) or model_folder(options.model, convert=True)
    policy = Policy.load(folder, dtype="bfloat16", lora=Lora(options.rank))
    adapters = adapters_of(policy)
    made = contestants(policy, adapters, folder, options.rows)
    for each in made.values():
        each.rate(options.rows, 4)  # oneDNN compiles its code
    rates = alternate(
        {name: partial(each.rate, options.rows, options.replies) for name, each in made.items()},
        options.repeats,
    )
    policy.load_weights(adapters[-1])
    lines = [*columns("engine", "tokens per processor second", "mean \\|log D\\|", "p99")]
    for name, each in made.items():
        if len(each.versions) == 1:
            found = errors(policy, each)
            figures = [f"{found.mean():.2g}", f"{found.quantile(0.99):.2g}"]
        else:
            figures = ["", ""]
        lines.append(row(name, spread(rates[name], "{:.0f}"), *figures))
    of_four = ratios(rates, "unmerged, four versions", over="unmerged, one version")
    of_one = ratios(rates, "unmerged, one version", over="merged")
    each_bytes, move_s = stored(adapters)
    base_bytes = sum(p.nbytes for n, p in policy.model.named_parameters() if "lora_" not in n)
    lines += [
        "",
        f"Four versions over one: {verdict(of_four, GOAL)}. One version over merged weights: "
        f"{median(of_one):.2f}. {options.rows} replies of {options.replies} tokens at once, rank "
        f"{options.rank}, bfloat16 on both sides, one thread.",
        "",
        f"The adapters of a version take {num_bytes(adapters[0]):,} bytes, and the base "
        f"{base_bytes:,}. The version store keeps {each_bytes:,} bytes per version, and changes "
        f"its copy to the next version in {1000 * move_s:.0f} ms of processor time.",
    ]
    write("lora-versions", "Adapters that are not merged", lines)


if __name__ == "__main__":
    main()
