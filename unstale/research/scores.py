"""Judges that score an attempt, at its end or at the end of one of its stages."""

import os
from typing import Protocol, runtime_checkable

from unstale.envs import EnvError
from unstale.envs.guard import call
from unstale.research.served_writer import KEY
from unstale.research.steps import loaded
from unstale.rewards.judge import JudgeBudget, JudgeEndpoint, JudgeError, LLMJudge
from unstale.rewards.reward_model import ModelEnded

RUBRIC = """How likely is it that this attempt at the task is right, or will be right if it goes \
on? If a stage is named, the attempt has just ended this stage: grade its decisions so far. 0: \
certainly wrong, 10: certainly right."""
BUDGET = JudgeBudget(calls=10**7, tokens=10**11)
"""A budget that is never spent: the number of attempts limits the calls."""


@runtime_checkable
class Scorer(Protocol):
    """An interface of a judge that scores attempts."""

    async def score(self, task: str, replies: list[str], stage: str) -> float | None:
        """Return the score of an attempt, given the texts of its replies with what the environment
        answered to them. A higher score is better. None means that the attempt has no score.

        `stage` is the name of the stage that has ended. Empty at the end of the attempt.
        """
        ...


class FolderScorer:
    """A reward model in a folder, or a process reward model, of which the last step counts.

    None is the score of an attempt that is longer than the model's context.
    """

    def __init__(self, folder: str) -> None:
        """Load the model. Raises `ConfigError` if this fails."""
        self._model = loaded(folder)

    async def score(self, task: str, replies: list[str], stage: str) -> float | None:
        try:
            if self._model.of_steps:
                return (await call(self._model.step_scores, task, replies))[-1]
            asked = {"role": "user", "content": task}
            return await self._model.score(
                [asked, {"role": "assistant", "content": "".join(replies)}]
            )
        except ModelEnded:
            raise
        except EnvError:
            return None


class ServedScorer:
    """A served chat model that grades attempts from 0 to 10. None is an answer without a grade."""

    def __init__(self, url: str, model: str) -> None:
        endpoint = JudgeEndpoint(url=url, model=model, key=os.environ.get(KEY, ""))
        self._judge = LLMJudge(endpoint, RUBRIC, budget=BUDGET)

    async def score(self, task: str, replies: list[str], stage: str) -> float | None:
        named = {"stage": stage} if stage else {}
        try:
            return await self._judge.score(task=task, attempt="".join(replies), **named)
        except JudgeError:
            return None
