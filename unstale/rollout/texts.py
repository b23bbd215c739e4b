"""Texts that techniques need to add episodes to a group, such as prompts and solutions."""

from collections.abc import Sequence
from inspect import isawaitable
from typing import Any

from unstale.config import ConfigError
from unstale.config.sampling import BANNED
from unstale.envs import HasCorrections, HasDemonstrations, Message, Taskset, implements, task_text
from unstale.envs.hooks import call_hook, is_own
from unstale.records import Task, Trajectory, replies
from unstale.rollout.generator import Generator
from unstale.rollout.lessons import data_of
from unstale.rollout.writer import question
from unstale.techniques.hooks import AsksOthers, SolutionReader, Techniques


class PolicyTexts:
    """Conversion between texts and the policy's tokens, in the policy's chat format."""

    def __init__(self, taskset: Taskset, generator: Generator) -> None:
        self._taskset = taskset
        self._generator = generator
        self._chat = generator.chat
        biases = generator.config.biases
        self._banned = frozenset(token for token, bias in biases if bias == BANNED)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens, without end tokens."""
        return self._chat.text(tokens)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens that a text has inside a reply."""
        return self._chat.encode_content(_encodable(text))

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens, with end tokens."""
        return self._chat.text(tokens, whole=True)

    def encode_whole(self, text: str, after: str) -> tuple[int, ...]:
        """Return the tokens of a text that may contain control tokens, after the text `after`."""
        return self._chat.encode(_encodable(text), after=_encodable(after))

    def parse(self, tokens: Sequence[int]) -> Message:
        """Return a reply's tokens as a message."""
        return self._chat.parse(tokens)

    def written(self, text: Trajectory) -> str:
        """Return the last reply of an episode whose task was to write a text, without its
        reasoning.

        Empty if the policy wrote none.
        """
        said = replies(text.pieces)
        return self._chat.with_tools(()).parse(said[-1][1]).content if said else ""

    def prompt(self, instructions: str, **texts: str) -> str:
        """Return a prompt with instructions and named `texts`, cut so that a reply fits behind
        it.
        """
        return _encodable(question(self._generator, instructions, texts))

    def words(self, episode: Trajectory) -> str:
        """Return the text of an episode's task. Without one, return the text of the episode's
        prompt.
        """
        opening = episode.pieces[0].tokens if episode.pieces else ()
        return _encodable(task_text(self._taskset, episode.task) or self.text(opening))

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a reply."""
        return frozenset(self._chat.stop_tokens)

    def end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return these tokens of a reply with an end token, unless they have one."""
        return (*tokens, *(() if self.ends.intersection(tokens) else self._chat.stop_tokens[:1]))

    def room(self, episode: Trajectory, at: int) -> int:
        """Return how many tokens can follow in a reply from token `at` of an episode on.

        One token of the reply's limit is kept free, for the policy to sample.
        """
        starts = [start for start, _ in replies(episode.pieces) if start <= at]
        start = starts[-1]
        return self._generator.reply_budget(start) - (at - start) - 1

    def solution(self, task: Task, field: str) -> tuple[int, ...]:
        """Return the tokens of a reply that solves a task, without its end token.

        The reply is the text in the task's data `field`, or the first reply of a demonstration.
        Raises `ConfigError` if the task has neither, or if the policy cannot sample this reply.
        """
        try:
            tokens = self._chat.encode_reply(self._solution(task, field))
        except ValueError as error:
            raise ConfigError(f"the solution of task {task.key} is not a reply: {error}") from error
        tokens = tokens[:-1] if tokens[-1] in self._chat.stop_tokens else tokens
        for token in tokens:
            if token in self._banned:
                raise ConfigError(
                    f"the solution of task {task.key} has token {token}, which engine.logit_bias "
                    f"bans: remove {token}=-inf from engine.logit_bias, or give solutions without "
                    "this token"
                )
        return tokens

    def _solution(self, task: Task, field: str) -> Message:
        data = data_of(self._taskset, task)
        if field in data:
            return Message("assistant", str(data[field]).strip())
        if field or not implements(self._taskset, HasDemonstrations):
            wanted = f"no field {field!r}" if field else "no demonstration"
            raise ConfigError(
                f"hints need solutions, and task {task.key} has {wanted}: set hints.solution to "
                f"the field of its data with the solution. It has {', '.join(data)}"
            )
        messages = self._taskset.demonstration(task)
        return next(message for message in messages if message.role == "assistant")

    async def correction(self, episode: Trajectory) -> tuple[int, tuple[int, ...]] | None:
        """Return where an episode goes wrong, and the tokens that would be right there.

        The place is the number of tokens before the first wrong reply or step. Return None if
        nothing is to be corrected, or if the policy cannot sample the right tokens.
        """
        given = replies(episode.pieces)
        said = [self.parse(tokens) for _, tokens in given]
        name = f"correction() of {self._taskset.name}"
        on_loop = is_own(self._taskset)
        found: Any = await call_hook(name, self._correct, episode.task, said, on_loop=on_loop)
        if isawaitable(found):
            found = await found
        if found is None:
            return None
        number, right = found
        at, wrong = given[number]
        if isinstance(right, str):
            starts = [self.text(wrong[:count]) for count in range(len(wrong) + 1)]
            known = max(count for count, text in enumerate(starts) if right.startswith(text))
            tokens = self.encode(right[len(starts[known]) :])
            at += known
        else:
            tokens = self._chat.encode_reply(right)
        return (at, tokens) if tokens and not self._banned.intersection(tokens) else None

    def _correct(self, task: Task, said: Sequence[Message]) -> Any:
        if implements(self._taskset, HasCorrections):
            return self._taskset.correction(task, said)
        assert implements(self._taskset, HasDemonstrations), "require_methods"
        messages = self._taskset.demonstration(task)
        right = [each for each in messages if each.role == "assistant"]
        for number, (reply, wanted) in enumerate(zip(said, right, strict=False)):
            given = (reply.content.strip(), reply.tool_calls)
            if given != (wanted.content.strip(), wanted.tool_calls):
                return number, wanted
        return None


def _encodable(text: str) -> str:
    """Return a text in which halves of surrogate pairs, which cannot be encoded, are replaced."""
    return text.encode(errors="replace").decode()


def prepare_strategy(techniques: Techniques, texts: PolicyTexts) -> None:
    """Load the models that the strategy asks. Raises `ConfigError` for one that is unusable."""
    if isinstance(strategy := techniques.strategy, AsksOthers) and strategy.asks_others:
        strategy.prepare(texts)


def require_solutions(
    techniques: Techniques, texts: PolicyTexts, taskset: Taskset, seed: int
) -> None:
    """Raise `ConfigError` if the strategy needs solutions but the first training task has none."""
    if isinstance(strategy := techniques.strategy, SolutionReader):
        texts.solution(next(iter(taskset.train(seed))), strategy.solution_field)
