"""Text that the policy writes outside of episodes, such as votes and summaries."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cached_property

from unstale.config import ConfigError
from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.records import ContextPiece
from unstale.rollout.evaluation import MAX_CONCURRENT
from unstale.rollout.generator import Generator
from unstale.rollout.transcript import Transcript

MAX_CHARACTERS = 8000
"""Largest number of characters of each text in a prompt. Only the end of a longer text is used."""
LEAST_CHARACTERS = 64
"""Smallest number of characters of a part of a text that is worth a prompt of its own."""


class PolicyWriter:
    """The policy as a writer of texts outside of episodes, such as votes and summaries."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._places = asyncio.Semaphore(MAX_CONCURRENT)
        self.tokens = 0
        """Number of tokens sampled so far, over all texts."""

    @cached_property
    def _chat(self) -> Chat:
        return self._generator.chat.with_tools(())

    async def write(self, instructions: str, seed: int, **texts: str) -> str:
        """Return the policy's reply to instructions and named `texts`, without its reasoning.

        Only the end of a long text is included. Raises `ConfigError` if the instructions do not
        fit.
        """
        prompt = Message("user", question(self._generator, instructions, texts))
        return await self.reply((prompt,), seed)

    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        """Return the policy's reply to these messages, without its reasoning."""
        transcript = Transcript(0, seed)
        transcript.add_context(ContextPiece(self._chat.encode_prompt(tuple(messages))))
        async with self._places:
            tokens, _ = await self._generator.generate(transcript)
        self.tokens += len(tokens)
        return self._chat.parse(tokens).content


def question(generator: Generator, instructions: str, texts: Mapping[str, str]) -> str:
    """Return a prompt that asks the policy to write a text: the instructions and the named `texts`.

    Texts are cut at the start until the prompt leaves room for the reply: `max_completion_tokens`,
    or half of the context if that is less. Raises `ConfigError` if the instructions do not fit.
    """
    most = _most_tokens(generator)
    limit = MAX_CHARACTERS
    while True:
        cut = {name: text[-limit:] if limit else "" for name, text in texts.items()}
        prompt, num_tokens = _prompt(generator, instructions, cut)
        if num_tokens <= most:
            return prompt
        if not limit:
            raise ConfigError(
                f"a question without its texts has {num_tokens} tokens, and engine.max_context"
                f" = {generator.config.max_context} leaves {most}: raise engine.max_context"
            )
        limit //= 2


def room(generator: Generator, instructions: str, texts: Mapping[str, str], attempt: str) -> int:
    """Return how many characters of `attempt`, from its start, fit into a `question` beside the
    whole other `texts`.

    At most `MAX_CHARACTERS`. 0 if fewer than `LEAST_CHARACTERS` fit, or if another text would be
    cut.
    """
    limit = MAX_CHARACTERS
    if any(len(text) > limit for text in texts.values()):
        return 0
    while limit >= LEAST_CHARACTERS:
        shown = {**texts, "attempt": attempt[:limit]}
        if _prompt(generator, instructions, shown)[1] <= _most_tokens(generator):
            return limit
        limit //= 2
    return 0


def _most_tokens(generator: Generator) -> int:
    """Return the largest number of tokens of a prompt that leaves room for the reply."""
    context = generator.config.max_context
    return max(context // 2, context - generator.config.max_completion_tokens)


def _prompt(generator: Generator, instructions: str, texts: Mapping[str, str]) -> tuple[str, int]:
    """Return a prompt with these instructions and texts, and its number of tokens."""
    prompt = f"{instructions}\n\n{json.dumps(texts, ensure_ascii=False)}"
    chat = generator.chat.with_tools(())
    return prompt, len(chat.encode_prompt((Message("user", prompt),)))
