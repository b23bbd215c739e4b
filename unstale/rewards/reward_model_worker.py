"""The program of a reward model's process, which `unstale.rewards.reward_model` starts.

    python -m unstale.rewards.reward_model_worker FOLDER DEVICE

It prints a line of JSON when the model is loaded. Then each line of its input is a list of
conversations, and of solutions divided into steps. It prints a list with a score, or the scores of
the steps, or an error text for each of them.
"""

import json
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.config.hub import reading

Messages = Sequence[dict[str, str]]


STEP_END = "\n"
"""The text after each step of a solution, as in TRL's training of process reward models."""


class Scorer:
    """A model that scores conversations, or the steps of solutions, and its tokenizer.

    It classifies sequences and returns one number, or classifies tokens by two labels.
    """

    def __init__(self, folder: Path, device: str = "any") -> None:
        """Load the model from a folder. `device` is `cuda`, `cpu` or `any`.

        Raises ValueError if the model returns other numbers, or if there is no such device.
        """
        if device == "cuda" and not torch.cuda.is_available():
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            raise ValueError(f"there is no GPU {gpus}: name other `devices`")
        # No code of the folder is run: no other model class, and no pickle.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        named = read_mapping(folder / "config.json").get("architectures") or [""]
        self._of_tokens = "ForTokenClassification" in str(named[0])
        kind: Any = AutoModelForSequenceClassification
        if self._of_tokens:
            kind = AutoModelForTokenClassification
        model: Any = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        wanted = 2 if self._of_tokens else 1
        if model.config.num_labels != wanted:
            kind_name = "process reward model" if self._of_tokens else "reward model"
            number = "two" if self._of_tokens else "one"
            raise ValueError(
                f"it has {model.config.num_labels} labels, and a {kind_name} has {number} "
                "(num_labels)"
            )
        if device == "any":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(device).eval()
        text = model.config.get_text_config()
        self._longest = getattr(text, "max_position_embeddings", None) or sys.maxsize
        pad = self._tokenizer.pad_token_id
        self._pad = pad if pad == text.pad_token_id else None

    def answers(self, items: Sequence[Any]) -> list[float | list[float] | str]:
        """Return the score of each conversation, and the scores of each solution's steps, or an
        error text.

        A solution is an object with the texts `task` and `steps`.
        """
        conversations = [each for each in items if isinstance(each, list)]
        scores = iter(self.scores(conversations))
        return [
            next(scores) if isinstance(each, list) else self.of_steps(each["task"], each["steps"])
            for each in items
        ]

    def of_steps(self, task: str, steps: Sequence[str]) -> list[float] | str:
        """Return the probability that each step is right, or an error text.

        Nothing else is in the forward passes, so the result does not depend on other requests.
        """
        if not self._of_tokens:
            found = self.scores(
                [_solution(task, "".join(steps[:end])) for end in range(1, len(steps) + 1)]
            )
            errors = [each for each in found if isinstance(each, str)]
            return errors[0] if errors else torch.sigmoid(torch.tensor(found)).tolist()
        tokens: list[int] = list(self._tokenizer(task)["input_ids"])
        ends: list[int] = []
        for step in steps:
            for text in (step.strip(), STEP_END):
                tokens += self._tokenizer(text, add_special_tokens=False)["input_ids"]
            ends.append(len(tokens) - 1)
        if len(tokens) > self._longest:
            return self._too_long(len(tokens))
        return self._of_ends(tokens, ends)

    @torch.inference_mode()
    def _of_ends(self, tokens: list[int], ends: list[int]) -> list[float]:
        logits = self._model(input_ids=torch.tensor([tokens], device=self._model.device)).logits
        return logits[0, ends].float().softmax(-1)[:, 1].tolist()

    def scores(self, conversations: Sequence[Messages]) -> list[float | str]:
        """Return the score, or an error text, of each conversation.

        If model and tokenizer do not have the same padding token, conversations are scored one at a
        time.
        """
        if self._of_tokens:
            return ["it classifies tokens, so it scores steps only"] * len(conversations)
        encoded = [self._encode(each) for each in conversations]
        found: list[float | str] = ["" if isinstance(each, list) else each for each in encoded]
        rows = [(i, each) for i, each in enumerate(encoded) if isinstance(each, list)]
        passes = [rows] if self._pad is not None else [[row] for row in rows]
        for members in passes:
            for (i, _), score in zip(members, self._run([row for _, row in members]), strict=True):
                found[i] = score
        return found

    def _encode(self, messages: Messages) -> list[int] | str:
        """Return the tokens of a conversation, or an error text if the model cannot take so
        many.
        """
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            before = "\n".join(each["content"] for each in messages[:-1])
            tokens = self._tokenizer(before, messages[-1]["content"])["input_ids"]
        return self._too_long(len(tokens)) if len(tokens) > self._longest else list(tokens)

    def _too_long(self, count: int) -> str:
        return f"the conversation has {count} tokens, and the model takes {self._longest}"

    @torch.inference_mode()
    def _run(self, rows: Sequence[list[int]]) -> list[float]:
        if not rows:
            return []
        width = max(map(len, rows))
        padding = [[self._pad or 0] * (width - len(row)) for row in rows]
        tokens = [[*row, *pad] for row, pad in zip(rows, padding, strict=True)]
        mask = [[1] * len(row) + [0] * len(pad) for row, pad in zip(rows, padding, strict=True)]
        device = self._model.device
        out = self._model(
            input_ids=torch.tensor(tokens, device=device),
            attention_mask=torch.tensor(mask, device=device),
        )
        return [float(each) for each in out.logits[:, 0].float().cpu()]


def _solution(task: str, text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": task}, {"role": "assistant", "content": text}]


def version_of(folder: Path) -> str:
    """Return the checksum of the configuration and weights in a model folder, in hexadecimal."""
    found = 0
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json"):
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    found = zlib.crc32(block, found)
    return f"{found:08x}"


def main(folder: Path, device: str) -> None:
    """Answer each line of standard input until it ends. `folder` is that of the model."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print
    try:
        with reading(folder, "reward model"):
            scorer = Scorer(folder, device)
    except ConfigError as error:
        text = str(error).removeprefix("policy: ")
        print(json.dumps({"error": text}), file=answers, flush=True)
        return
    print(json.dumps({"version": version_of(folder)}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(scorer.answers(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
