"""Run TRL's `GRPOTrainer` for `benchmarks/train.py`, in an environment without this package.

TRL's own `train()` runs. Where it would generate, it either does so or receives the batch, padded
as TRL pads its own. It takes a step for each line on standard input, and writes the seconds of the
step as a line on standard output.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # noqa: TID253
from trl.trainer.utils import pad  # noqa: TID253


class Handed(GRPOTrainer):
    """A trainer that receives sequences instead of generating them."""

    rows: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        def padded(column: str, value: int, side: str) -> torch.Tensor:
            tensors = [torch.tensor(row[column]) for row in self.rows]
            return pad(
                tensors,
                padding_value=value,
                padding_side=side,
                pad_to_multiple_of=self.pad_to_multiple_of,
            )

        for row in self.rows:
            row |= {
                f"{part}_mask": [1] * len(row[f"{part}_ids"]) for part in ("prompt", "completion")
            }
        filler = self.processing_class.pad_token_id
        handed = {
            "prompt_ids": padded("prompt_ids", filler, "left"),
            "prompt_mask": padded("prompt_mask", 0, "left"),
            "completion_ids": padded("completion_ids", filler, "right"),
            "completion_mask": padded("completion_mask", 0, "right"),
            "tool_mask": padded("tool_mask", 1, "right"),
            "advantages": torch.tensor([row["advantage"] for row in self.rows]),
        }
        return handed | {
            "num_items_in_batch": (handed["completion_mask"] * handed["tool_mask"]).sum()
        }


class Turns(TrainerCallback):
    """A callback that waits for a line before each step, and prints the step's seconds."""

    def __init__(self, gradient: Path | None) -> None:
        self.began, self.gradient = 0.0, gradient

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        self.began = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.gradient and state.global_step == 0:
            named = rest["model"].named_parameters()
            torch.save(
                {name: weight.grad.clone() for name, weight in named if weight.grad is not None},
                self.gradient,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        sys.stderr.flush()
        print(f"took {time.perf_counter() - self.began}", flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--batch", type=Path, help="JSON file of the sequences; without it, TRL generates"
    )
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--gradient",
        type=Path,
        help="file for the gradient of the first step, before it is clipped",
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument(
        "--tokens", type=int, default=32, help="new tokens of each of 8 completions to a prompt"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = json.loads(chosen.batch.read_text()) if chosen.batch else []
    completions = len(rows) or 8 * chosen.prompts
    micro = chosen.micro
    config = GRPOConfig(
        output_dir=str(chosen.model / "trl"),
        use_cpu=True,
        bf16=chosen.bf16,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        num_generations=8,
        max_completion_length=4096 if rows else chosen.tokens,
        max_steps=100_000,
        logging_steps=100_000,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        epsilon_high=0.28,
        gradient_checkpointing=False,
        disable_tqdm=True,
        generation_kwargs=None if rows else {"min_new_tokens": chosen.tokens},
    )

    def worth(completions: list[str], completion_ids: list[list[int]], **rest: Any) -> list[float]:
        if said := [len(ids) for ids in completion_ids if len(ids) != chosen.tokens]:
            raise RuntimeError(f"a completion has {said[0]} tokens, of {chosen.tokens}")
        words = [text.split() for text in completions]
        return [sum(word[-1] in "13579" for word in each) / max(1, len(each)) for each in words]

    words = [
        f"w{3 + i} w{4 + i} w{5 + i} w{6 + i} w{7 + i} w{8 + i} w{9 + i} w{10 + i}"
        for i in range(64)
    ]
    trainer = (Handed if rows else GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(chosen.model),
        reward_funcs=worth,
        train_dataset=Dataset.from_dict({"prompt": words * 4}),
        callbacks=[Turns(chosen.gradient)],
        args=config,
    )
    trainer.rows = rows
    trainer.train()


if __name__ == "__main__":
    main()
