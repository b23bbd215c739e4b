"""The program of a reward model's process, which `unstale.rewards.reward_model` starts.

    python -m unstale.rewards.reward_model_worker FOLDER

It prints a line of JSON when the model is loaded. Then each line of its input is a list of
conversations. It prints a list with a score or an error text for each of them.
"""

import json
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from unstale.config import ConfigError
from unstale.config.hub import reading

Messages = Sequence[dict[str, str]]


class Scorer:
    """A sequence-classification model that returns one number, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Load the model from a folder. Raises ValueError if it does not return a single number."""
        # No code of the folder is run: no other model class, and no pickle.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        if model.config.num_labels != 1:
            raise ValueError(
                f"it has {model.config.num_labels} labels, and a reward model has one (num_labels)"
            )
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        text = model.config.get_text_config()
        self._longest = getattr(text, "max_position_embeddings", None) or sys.maxsize
        pad = self._tokenizer.pad_token_id
        self._pad = pad if pad == text.pad_token_id else None

    def scores(self, conversations: Sequence[Messages]) -> list[float | str]:
        """Return the score, or an error text, of each conversation.

        If model and tokenizer do not have the same padding token, conversations are scored one at a
        time.
        """
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
        if len(tokens) > self._longest:
            return f"the conversation has {len(tokens)} tokens, and the model takes {self._longest}"
        return list(tokens)

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


def version_of(folder: Path) -> str:
    """Return the checksum of the configuration and weights in a model folder, in hexadecimal."""
    found = 0
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json"):
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    found = zlib.crc32(block, found)
    return f"{found:08x}"


def main(folder: Path) -> None:
    """Answer each line of standard input until it ends. `folder` is that of the model."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print
    try:
        with reading(folder, "reward model"):
            scorer = Scorer(folder)
    except ConfigError as error:
        text = str(error).removeprefix("policy: ")
        print(json.dumps({"error": text}), file=answers, flush=True)
        return
    print(json.dumps({"version": version_of(folder)}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(scorer.scores(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
