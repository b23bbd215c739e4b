"""A teacher on a server: vLLM's completions with `prompt_logprobs`.

One request has the tokens of one sequence. The server returns the log-probability of each of them
at temperature 1. Its tokenizer is compared with the policy's before the first request.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from unstale.config import ConfigError
from unstale.engines.http import Http, HttpError
from unstale.model.peers import RankGroup
from unstale.model.prefix_tree import Packed
from unstale.records import Batch

REQUESTS = 64
"""Largest number of requests at the same time."""
ATTEMPTS = 5
"""Number of attempts at a request that fails without an answer."""
FIRST_WAIT_S = 1.0
"""Time before the second attempt. It doubles with each further one."""
PROBE = (
    "".join(map(chr, range(32, 127)))
    + " Zürich, 東京, Київ: 3.14159e-10 != 2,718 \n\t def f(x): 🙂"
)
"""A text whose tokens are compared: letters of several scripts, digits, code and a symbol."""


class ServedTeacher:
    """A teacher behind the address of a server. Only the first rank calls it."""

    def __init__(self, url: str, tokenizer: Any, peers: RankGroup) -> None:
        """Ask the server for its model and compare the tokenizers.

        Raises `ConfigError` if the server does not answer, or has other tokens.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        self._peers = peers
        self._http = Http(self._url)
        self._model = ""
        try:
            problem = _complete(self._meet(tokenizer)) if peers.rank == 0 else ""
        except (OSError, KeyError, IndexError, TypeError) as error:
            problem = f"cannot be used: {error!r}. It needs /v1/models and /tokenize, as vLLM has"
        if problem := peers.from_first(problem):
            raise ConfigError(f"distil.teacher {url} {problem}")

    async def _meet(self, tokenizer: Any) -> str:
        """Read the name of the model. Return a problem with its tokenizer, or an empty text."""
        models = await self._http.call("GET", "/v1/models")
        self._model = models["data"][0]["id"]
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        theirs = (await self._http.call("POST", "/tokenize", body))["tokens"]
        ours = tokenizer.encode(PROBE, add_special_tokens=False)
        if theirs == ours:
            return ""
        return (
            "has another tokenizer than the policy: it divides a text into other tokens. Use a "
            "teacher of the same model family"
        )

    def score(self, packed: Batch | Packed, where: Tensor) -> Tensor:
        """Return the log-probability `[T]` of the tokens of sequences. `where` is not read.

        The first token of a sequence has 0. Raises OSError if the server fails.
        """
        tokens = packed.tokens.tolist()
        spans = zip(packed.offsets[:-1], packed.offsets[1:], strict=True)
        sequences = [tokens[start:end] for start, end in spans]
        values: list[float] = []
        with self._peers.fail_together((OSError,)):
            if self._peers.rank == 0:
                values = [value for row in _complete(self._rows(sequences)) for value in row]
        return torch.tensor(self._peers.from_first(values), dtype=torch.float32)

    async def _rows(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        free = asyncio.Semaphore(REQUESTS)

        async def row(tokens: Sequence[int]) -> list[float]:
            async with free:
                return _values(tokens, await self._ask(tokens), self._url)

        return await asyncio.gather(*map(row, sequences))

    async def _ask(self, tokens: Sequence[int]) -> Any:
        """Send a request, again if there is no answer."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        for attempt in range(ATTEMPTS):
            try:
                return await self._http.call("POST", "/v1/completions", body)
            except OSError as error:
                is_refusal = isinstance(error, HttpError) and error.status < 500
                if is_refusal or attempt + 1 == ATTEMPTS:
                    raise
                await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def _values(tokens: Sequence[int], answer: Any, url: str) -> list[float]:
    """Return the log-probability of each token of a sequence, 0 for the first.

    Raises ConnectionError if the server did not return one.
    """
    try:
        rows: Sequence[Mapping[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
        found = [
            float(row[str(token)]["logprob"])
            for token, row in zip(tokens[1:], rows[1:], strict=True)
            if row
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        found, reason = [], repr(error)
    else:
        reason = f"{len(found)} of {len(tokens) - 1} values"
    if len(found) != len(tokens) - 1:
        raise ConnectionError(
            f"distil.teacher {url} returned no prompt_logprobs for each token ({reason}). vLLM "
            "returns them"
        )
    return [0.0, *found]


def _complete(call: Awaitable[Any]) -> Any:
    """Run a coroutine in an event loop of its own: the caller's thread may have one already."""

    async def run() -> Any:
        return await call

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(run())).result()
