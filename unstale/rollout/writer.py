"""The policy as a writer of texts outside of episodes, such as votes, summaries and reflections."""

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
"""Largest number of characters of an attempt in a prompt. Of a longer one, the end is taken."""


class PolicyWriter:
    """The policy as a writer of texts outside of episodes, such as votes and summaries."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._places = asyncio.Semaphore(MAX_CONCURRENT)
        self.tokens = 0
        """Number of tokens sampled so far."""

    @cached_property
    def _chat(self) -> Chat:
        return self._generator.chat.with_tools(())

    async def write(self, instructions: str, seed: int, **texts: str) -> str:
        """Return the policy's reply to instructions and named texts, without its thoughts.

        Each text is cut to its last characters so that the prompt leaves half of the context to
        the reply. Raises `ConfigError` if this is not possible.
        """
        return await self._sample(self._prompt(instructions, texts), seed)

    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        """Return the policy's reply to messages, without its thoughts."""
        return await self._sample(self._chat.encode_prompt(tuple(messages)), seed)

    async def _sample(self, prompt: tuple[int, ...], seed: int) -> str:
        transcript = Transcript(0, seed)
        transcript.add_context(ContextPiece(prompt))
        async with self._places:
            tokens, _ = await self._generator.generate(transcript)
        self.tokens += len(tokens)
        return self._chat.parse(tokens).content

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens of an episode, without end tokens."""
        return self._generator.chat.text(tokens)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text in a reply."""
        return self._chat.encode_content(text)

    def _prompt(self, instructions: str, texts: Mapping[str, str]) -> tuple[int, ...]:
        context = self._generator.config.max_context
        most = max(context // 2, context - self._generator.config.max_completion_tokens)
        limit = MAX_CHARACTERS
        while True:
            cut = {name: text[-limit:] if limit else "" for name, text in texts.items()}
            content = json.dumps(cut, ensure_ascii=False)
            system, user = Message("system", instructions), Message("user", content)
            tokens = self._chat.encode_prompt((system, user))
            if len(tokens) <= most:
                return tokens
            if not limit:
                raise ConfigError(
                    f"a question without its texts has {len(tokens)} tokens, and engine.max_context"
                    f" = {context} leaves {most}: raise engine.max_context"
                )
            limit //= 2
