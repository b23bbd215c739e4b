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
    chat, context = generator.chat.with_tools(()), generator.config.max_context
    most = max(context // 2, context - generator.config.max_completion_tokens)
    limit = MAX_CHARACTERS
    while True:
        cut = {name: text[-limit:] if limit else "" for name, text in texts.items()}
        prompt = f"{instructions}\n\n{json.dumps(cut, ensure_ascii=False)}"
        num_tokens = len(chat.encode_prompt((Message("user", prompt),)))
        if num_tokens <= most:
            return prompt
        if not limit:
            raise ConfigError(
                f"a question without its texts has {num_tokens} tokens, and engine.max_context"
                f" = {context} leaves {most}: raise engine.max_context"
            )
        limit //= 2
