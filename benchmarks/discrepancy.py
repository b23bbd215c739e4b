"""Measure the discrepancy between engine and trainer of a pretrained model, and where it arises.

    python -m benchmarks.discrepancy smollm2 pairs layers parts plain   # half an hour of two cores
    python -m benchmarks.discrepancy smollm2                            # tables and pictures only

log D = old_logp - behavior_logp of each token, in nats, at the same weights. Engine and trainer are
those of a run, in one process (`both_sides`). The replies are sampled at temperature 1, half of
them to puzzles of reasoning-gym, half to requests for free text. Each part of the measurement keeps
its numbers in `--cache`, from which the tables are written.
"""

import unstale  # noqa: F401 - sets OpenMP's environment before torch loads

# isort: split
import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.both_sides import (
    PLACES,
    LocalEngine,
    Replies,
    chat_prompts,
    plain_logps,
    rounded,
    trainer_logps,
)
from benchmarks.tables import CONSOLE
from unstale.config.hub import model_folder
from unstale.engines.embedded.runner import DTYPES as ENGINE_DTYPES
from unstale.model.forward import ForwardOptions
from unstale.model.lora import Base, Lora
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed

LORA = Lora(rank=16)
LORA_STD = 0.004
"""Standard deviation of the entries of B, which a run would have trained. The adapters then change
the log-probability of a token by 0.1 nats on average."""
FEW = 20
"""Number of replies that are computed again, to find where the error arises."""


@dataclass(frozen=True, slots=True)
class Side:
    """The settings of an engine or a trainer: its dtype, and the format of its weights."""

    dtype: str
    quantise: str = "none"
    lora: bool = False
    weights: str = ""
    """The dtype to which the weights are rounded first. Empty if they are not."""

    def __str__(self) -> str:
        parts = [self.dtype, self.quantise.replace("none", ""), "adapters" * self.lora]
        parts.append(f"{self.weights} weights" if self.weights else "")
        return ", ".join(filter(None, parts))


PAIRS: Mapping[Side, Sequence[Side]] = {
    Side("float32"): (Side("float32"), Side("bfloat16")),
    Side("float16"): (Side("float16"), Side("float32")),
    Side("bfloat16"): (
        Side("bfloat16"),
        Side("float32"),
        Side("float32", weights="bfloat16"),
    ),
    Side("bfloat16", "int8"): (Side("bfloat16"), Side("bfloat16", "int8")),
    Side("bfloat16", "fp8"): (Side("bfloat16"), Side("bfloat16", "fp8")),
    Side("bfloat16", "int4"): (Side("bfloat16"), Side("bfloat16", "int4")),
    Side("float32", lora=True): (Side("float32", lora=True),),
    Side("bfloat16", lora=True): (Side("bfloat16", lora=True),),
}
"""The trainers for each engine."""


class Bench:
    """The model, the prompts, and the numbers that were measured before."""

    def __init__(self, folder: Path, cache: Path, num_prompts: int, most: int) -> None:
        self.folder, self.cache, self._num_prompts, self._most = folder, cache, num_prompts, most
        cache.mkdir(parents=True, exist_ok=True)

    def keep(self, name: str, numbers: Any) -> None:
        torch.save(numbers, self.cache / f"{name}.pt")

    def kept(self, name: str) -> Any:
        """Return numbers of an earlier measurement, or None."""
        path = self.cache / f"{name}.pt"
        return torch.load(path, weights_only=False) if path.exists() else None

    def policy(self, side: Side) -> Policy:
        lora = LORA if side.lora else None
        policy = Policy.load(self.folder, dtype=side.dtype, device="cpu", lora=lora, trained=False)
        if side.lora:
            noise = torch.Generator().manual_seed(0)
            adapters = {
                name: torch.randn(tensor.shape, generator=noise) * LORA_STD
                if ".lora_B" in name
                else tensor
                for name, tensor in policy.weights().items()
            }
            policy.load_weights(adapters)
        if side.weights:
            narrow = ENGINE_DTYPES[side.weights]
            policy.load_weights({n: t.to(narrow).to(t) for n, t in policy.weights().items()})
        if side.quantise != "none":
            options = ForwardOptions(quantise=side.quantise, published_dtype=side.dtype)
            policy.set_forward_options(options)
        return policy

    def engine(self, side: Side, policy: Policy) -> LocalEngine:
        """Return an engine with the weights that a run with this policy would publish."""
        engine = LocalEngine(self.folder, dtype=side.dtype, quantise=side.quantise)
        weights = policy.weights()
        if policy.merging:
            weights = Base(self.folder, policy.merging).merged(weights)
        engine.load(weights)
        return engine

    def replies(self, side: Side, policy: Policy) -> Replies:
        """Return the replies that an engine samples."""
        if (found := self.kept(f"replies {side}")) is None:
            prompts = chat_prompts(policy, self._num_prompts)
            found = self.engine(side, policy).sample(prompts, policy.ends, self._most)
            self.keep(f"replies {side}", found)
        return found


def measure_pairs(bench: Bench) -> None:
    """Keep log D and the entropy of all tokens, for each engine and each of its trainers."""
    for engine, trainers in PAIRS.items():
        if engine.dtype not in ENGINE_DTYPES:
            continue
        wide = bench.policy(Side("float32", lora=engine.lora))
        for trainer in trainers:
            if bench.kept(f"pair {engine} - {trainer}") is not None:
                continue
            policy = wide if trainer == Side("float32") else bench.policy(trainer)
            # An engine in float32 must get the weights that the trainer computes with.
            source = policy if trainer.dtype != "float32" and engine.dtype == "float32" else wide
            replies = bench.replies(engine, source)
            logps, entropy = trainer_logps(policy, replies)
            numbers = dict(zip(("reply", "position", "context"), replies.numbers(), strict=True))
            numbers |= {"log_d": logps - replies.behavior_logp, "entropy": entropy, "logp": logps}
            bench.keep(f"pair {engine} - {trainer}", numbers)
            size = float(numbers["log_d"].abs().mean())
            CONSOLE.print(f"{engine} - {trainer}: {size:.2g}, {len(logps)} tokens")


class _Hidden:
    """The outputs of some modules for the tokens of replies."""

    def __init__(self, model: Any) -> None:
        self._states: dict[str, list[Tensor]] = {}
        self.at: list[Tensor] = []
        """The index of each computed token among those of all sequences."""
        self._handles = [
            module.register_forward_hook(self._hook(name)) for name, module in _parts(model)
        ]

    def _hook(self, name: str) -> Any:
        def keep(_: Any, __: Any, out: Any) -> None:
            states = out[0] if isinstance(out, tuple) else out
            self._states.setdefault(name, []).append(states[0].detach().float())

        return keep

    def close(self, total: int) -> dict[str, Tensor]:
        """Return `[total, width]` states of each module. Tokens that were not computed are NaN."""
        for handle in self._handles:
            handle.remove()
        found = {}
        for name, passes in self._states.items():
            whole = torch.full((total, passes[0].shape[-1]), math.nan)
            for at, states in zip(self.at, passes, strict=True):
                whole[at] = states[: len(at)]
            found[name] = whole
        return found


FIRST_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn",
    "post_attention_layernorm",
    "mlp.up_proj",
    "mlp",
)
"""Modules of the first layer in the order in which they are computed."""


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules whose outputs are compared, with their names."""
    layers = model.model.layers
    for name in FIRST_LAYER:
        yield f"first layer, {name}", layers[0].get_submodule(name)
    for number, layer in enumerate(layers):
        yield f"layer {number + 1}", layer
    yield "norm", model.model.norm


def measure_layers(bench: Bench) -> None:
    """Keep how far the hidden states of engine and trainer differ after each layer, by dtype."""
    wide = bench.policy(Side("float32"))
    for dtype in ("bfloat16", "float32"):
        side = Side(dtype)
        policy = bench.policy(side)
        replies = bench.replies(side, wide).first(FEW)
        packed, sampled = replies.packed()
        engine = bench.engine(side, policy)
        inside = _Hidden(engine.model)
        starts = np.array(packed.offsets)

        def seen(step: Any, reply: Any, inside: Any = inside, starts: Any = starts) -> None:
            chunks = [np.full(c.end - c.start, c.slot) for c in step.chunks]
            slots = np.concatenate([step.rows.numpy(), *chunks]).astype(np.int64)
            inside.at.append(torch.from_numpy(starts[reply[slots]] + step.positions.numpy()))

        logps = engine.replay(replies, seen)
        theirs = inside.close(len(packed.tokens))
        ours = _trainer_states(policy, packed)
        rows = (sampled.nonzero().squeeze(1) - 1)[1:]  # each state predicts the next token
        exact = _trainer_states(bench.policy(Side("float32", weights=dtype)), packed)
        found = {}
        for name, mine in ours.items():
            other, truth = theirs[name][rows], exact[name][rows]
            ok = other.isfinite().all(1)
            difference = (mine[rows] - other)[ok]
            norm = truth[ok].norm(dim=1)
            found[name] = {
                "difference": float((difference.norm(dim=1) / norm).median()),
                "unequal": float((difference != 0).double().mean()),
                "tokens": float((difference != 0).any(1).double().mean()),
                "error": float(((mine[rows] - truth)[ok].norm(dim=1) / norm).median()),
            }
        bench.keep(f"layers {dtype}", {"modules": found, "tokens": len(logps)})


def _trainer_states(policy: Policy, packed: Packed) -> dict[str, Tensor]:
    run = policy.prefix_tree(packed)
    inside = _Hidden(policy.model)
    inside.at.append(torch.arange(len(run.tokens)))
    with torch.no_grad():
        policy.logps(run, temperature=1.0)
    return {name: states[run.place] for name, states in inside.close(len(run.tokens)).items()}


CHOICES: Mapping[str, Sequence[str]] = {
    "all": PLACES,
    "none": (),
    **{f"all but {one}": [each for each in PLACES if each != one] for one in PLACES},
    **{f"only {one}": [one] for one in PLACES},
    "all but head and stream": ["norms", "attention", "mlp"],
}
"""Places that are rounded to bfloat16, by a name."""


def measure_parts(bench: Bench) -> None:
    """Keep the log-probabilities of both sides, if they round at some places only."""
    policy = bench.policy(Side("float32", weights="bfloat16"))
    replies = bench.replies(Side("bfloat16"), bench.policy(Side("float32"))).first(FEW)
    engine = bench.engine(Side("float32"), policy)
    for name, places in CHOICES.items():
        if bench.kept(f"parts {name}") is not None:
            continue
        with rounded(engine.model, places):
            theirs = engine.replay(replies)
        with rounded(policy.model, places):
            ours, _ = trainer_logps(policy, replies)
        CONSOLE.print(f"{name}: {float((ours - theirs).abs().mean()):.2g}")
        bench.keep(f"parts {name}", {"engine": theirs, "trainer": ours})


def measure_plain(bench: Bench) -> None:
    """Keep the log-probabilities by transformers alone, in several precisions and orders."""
    replies = bench.replies(Side("bfloat16"), bench.policy(Side("float32"))).first(FEW)
    found = {}
    for dtype in ("bfloat16", "float32", "float64", "float16"):
        model = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.bfloat16).eval()
        model = model.to(getattr(torch, dtype))
        found[dtype] = plain_logps(model, replies)
        if dtype in ("bfloat16", "float32"):
            found[f"{dtype}, in parts"] = plain_logps(model, replies, chunk=16)
    for side in (Side("bfloat16"), Side("float32", weights="bfloat16")):
        found[f"trainer {side.dtype}"] = trainer_logps(bench.policy(side), replies)[0]
    found["engine bfloat16"] = replies.behavior_logp
    bench.keep("plain", found)


MEASUREMENTS = {
    "pairs": measure_pairs,
    "layers": measure_layers,
    "parts": measure_parts,
    "plain": measure_plain,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", help="a Llama model with a chat template, as for --model")
    parser.add_argument("measure", nargs="*", choices=[*MEASUREMENTS, []], help="what to measure")
    parser.add_argument("--cache", type=Path, default=Path("runs/discrepancy"), help="of numbers")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a reply")
    chosen = parser.parse_args()
    bench = Bench(model_folder(chosen.policy), chosen.cache, chosen.prompts, chosen.tokens)
    for name in chosen.measure:
        MEASUREMENTS[name](bench)
    from benchmarks.discrepancy_tables import write_results

    write_results(bench.kept)


if __name__ == "__main__":
    main()
