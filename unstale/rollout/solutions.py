"""Solutions of tasks as replies of the policy, for techniques that give hints."""

from collections.abc import Collection, Sequence

from unstale.config import ConfigError, RunConfig
from unstale.config.sampling import BANNED
from unstale.envs import HasDemonstrations, Message, Taskset, implements
from unstale.envs.chat import Chat
from unstale.records import Task
from unstale.rollout.lessons import data_of
from unstale.techniques.hooks import SolutionReader, Techniques


class Solutions:
    """Returns the tokens of a reply that solves a task, without its end token."""

    def __init__(self, taskset: Taskset, chat: Chat, field: str, banned: Collection[int]) -> None:
        """Create the function. `field` is empty or that of a task's data with its solution.

        `banned` are the tokens that the policy cannot sample.
        """
        self._taskset = taskset
        self._chat = chat
        self._field = field
        self._banned = banned

    def __call__(self, task: Task) -> Sequence[int]:
        """Return the solution of a task.

        Raises `ConfigError` if it has none, or one that the policy cannot sample.
        """
        try:
            tokens = self._chat.encode_reply(self._reply(task))
        except ValueError as error:
            raise ConfigError(f"the solution of task {task.key} is no reply: {error}") from error
        tokens = tokens[:-1] if tokens[-1] in self._chat.stop_tokens else tokens
        for token in tokens:
            if token in self._banned:
                raise ConfigError(
                    f"the solution of task {task.key} has token {token}, which engine.logit_bias "
                    f"bans: remove {token}=-inf from engine.logit_bias, or give solutions without "
                    "this token"
                )
        return tokens

    def _reply(self, task: Task) -> Message:
        data = data_of(self._taskset, task)
        if self._field in data:
            return Message("assistant", str(data[self._field]).strip())
        if self._field or not implements(self._taskset, HasDemonstrations):
            wanted = f"no field {self._field!r}" if self._field else "no demonstration"
            raise ConfigError(
                f"hints need solutions, and task {task.key} has {wanted}: set hints.solution to "
                f"the field of its data with the solution. It has {', '.join(data)}"
            )
        messages = self._taskset.demonstration(task)
        return next(message for message in messages if message.role == "assistant")


def give_solutions(techniques: Techniques, config: RunConfig, taskset: Taskset, chat: Chat) -> None:
    """Give a run's strategy a function that returns solutions of tasks, if the strategy uses them.

    A strategy is a technique that chooses the tokens with which episodes of a group begin. Raises
    `ConfigError` if the strategy uses solutions and the first training task has none, or one with a
    banned token.
    """
    strategy = techniques.strategy
    if isinstance(strategy, SolutionReader):
        banned = frozenset(token for token, bias in config.engine.biases if bias == BANNED)
        solutions = Solutions(taskset, chat, strategy.solution_field, banned)
        solutions(next(iter(taskset.train(config.seed))))
        strategy.read_solutions(solutions)
