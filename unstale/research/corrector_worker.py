"""The program of a corrector's process, which `unstale.research.steps` starts.

    python -m unstale.research.corrector_worker FOLDER

Each line of its input is a request in JSON, and each line of its output the answer: the tokens of a
text, or tokens that continue others, with their log-probabilities.
"""

import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from unstale.config import ConfigError
from unstale.config.hub import reading


class Continuation:
    """A language model that continues tokens at temperature 1, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        # No code of the folder is run: no other model class, and no pickle.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto" if device == "cuda" else torch.float32,
        )
        self._model = model.to(device).eval()
        text = model.config.get_text_config()
        self._longest = getattr(text, "max_position_embeddings", None) or sys.maxsize

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def sample(
        self, before: Sequence[int], stop: str, most: int, ends: Collection[int], seed: int
    ) -> tuple[list[int], list[float]]:
        """Return the tokens of the next step after `before`, and the log-probability of each.

        The step ends with text that the regular expression `stop` matches, after other text, or
        with a token of `ends`. With an empty `stop`, only these end it. Without an end within
        `most` tokens, both lists are empty.
        """
        random = torch.Generator().manual_seed(seed)
        step = re.compile(rf"\S.*?{stop}", re.DOTALL) if stop else None
        given = torch.tensor([[*before]], device=self._model.device)
        cache: Any = None
        tokens: list[int] = []
        logps: list[float] = []
        for _ in range(min(most, self._longest - len(before))):
            out = self._model(input_ids=given, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logp = out.logits[0, -1].float().log_softmax(-1).cpu()
            token = int(torch.multinomial(logp.exp(), 1, generator=random))
            tokens.append(token)
            logps.append(float(logp[token]))
            if token in ends or (step and step.match(self._text(tokens))):
                return tokens, logps
            given = torch.tensor([[token]], device=self._model.device)
        return [], []

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return str(text).lstrip()


def main(folder: Path) -> None:
    """Answer each line of standard input until it ends. `folder` is that of the model."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print
    model, error = None, ""
    try:
        with reading(folder, "corrector"):
            model = Continuation(folder)
    except ConfigError as problem:
        error = str(problem).removeprefix("policy: ")
    for line in sys.stdin:
        request = json.loads(line)
        if model is None:
            answer: dict[str, Any] = {"error": error}
        elif "encode" in request:
            answer = {"tokens": model.encode(request["encode"])}
        else:
            tokens, logps = model.sample(**request)
            answer = {"tokens": tokens, "logps": logps}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
