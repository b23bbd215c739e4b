"""A distillation teacher on a server, asked through vLLM's completions API with `prompt_logprobs`.

One request has the tokens of one sequence. The server returns the log-probability of each of them
at temperature 1. Before the first request, the server's tokenizer is compared with the policy's.
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
"""Largest number of requests that are in flight at the same time."""
ATTEMPTS = 5
"""Number of attempts at a request. Only requests without an answer are repeated."""
FIRST_WAIT_S = 1.0
"""Seconds between the first and the second attempt. They double with each further attempt."""
PROBE = (
    "".join(map(chr, range(32, 127)))
    + " Zürich, 東京, Київ: 3.14159e-10 != 2,718 \n\t def f(x): 🙂"
)
"""A text that is encoded with the tokenizers of server and policy for comparison: letters of
several scripts, digits, code and a symbol.
"""


class ServedTeacher:
    """A teacher whose model runs on a server. Only the first trainer rank sends requests."""

    def __init__(self, url: str, tokenizer: Any, peers: RankGroup) -> None:
        """Ask the server for its model, and compare the model's tokenizer with `tokenizer`.

        Raises `ConfigError` if the server does not answer, or tokenizes differently.
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
        """Read the name of the server's model. Return a problem with its tokenizer, or ""."""
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
        """Return the teacher's log-probabilities `[T]` of all tokens of packed sequences.

        The first token of a sequence has 0. `where` is not used. Raises OSError if the server
        fails.
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
        """Send the request for one sequence, repeatedly if no answer comes.

        Return the answer's JSON.
        """
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
    """Return the log-probabilities of a sequence's tokens from an answer of the server.

    The first token has 0. Raises ConnectionError if the answer lacks a token.
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
    """Run a coroutine in an event loop of its own and return its result.

    The caller's thread may already run an event loop.
    """

    async def run() -> Any:
        return await call

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(run())).result()
