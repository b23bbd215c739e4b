"""An environment whose agent answers twice: a draft, and an edited version of the draft.

Only the edited version is passed to the environment and rewarded. Draft and edit are turns of one
episode, so both are trained with its advantage: a draft is good if its edit succeeds. From
ReflectDrive-2, which gives the reward of an edited plan to its draft and its edit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from unstale.config import ConfigError, TaskConfig
from unstale.envs import Env, Message, Turn
from unstale.envs.guard import call
from unstale.records import total_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEditConfig(TaskConfig):
    """The options of task sets whose agents may be asked for an edited version."""

    edit_request: str = ""
    """A user message after the first reply without a tool call, which asks for an edited version.
    Only the edited version is rewarded, and both replies are trained. Empty asks for none.
    """
    score_drafts: bool = False
    """Also compute the reward of drafts, as the fact `draft_reward`. It changes no other reward."""

    def check_combination(self) -> None:
        super(DraftEditConfig, self).check_combination()
        if self.score_drafts and not self.edit_request:
            raise ConfigError(
                "task.score_drafts needs task.edit_request, such as 'Check your answer, and reply "
                "again.'"
            )

    def with_edit(self, make: Callable[[], Env]) -> Env:
        """Return the environment that `make` returns.

        If `edit_request` is set, it is wrapped in a `DraftEdit`.
        """
        if not self.edit_request:
            return make()
        return DraftEdit(make, self.edit_request, score_draft=self.score_drafts)


class DraftEdit:
    """An episode of another environment, whose first reply without a tool call is a draft.

    `make` returns a new environment of the task, `request` is the user's message after the draft.
    With `score_draft`, the draft is also given to an environment of its own, if no tool was called
    before it. The sum of its rewards is the fact `draft_reward`, and what the edit adds to it is
    `edit_gain`. The environment must not hold anything that has to be closed.
    """

    def __init__(self, make: Callable[[], Env], request: str, *, score_draft: bool) -> None:
        self._make = make
        self._env = make()
        self._request = request
        self._score_draft = score_draft
        self._drafted = False
        self._draft_reward: float | None = None
        self.code_name: str = getattr(self._env, "code_name", type(self._env).__name__)
        """Name of the environment in messages about user code."""

    async def begin(self) -> Turn:
        return await call(self._env.begin)

    async def step(self, reply: Message) -> Turn:
        if reply.tool_calls or self._drafted:
            self._score_draft = self._score_draft and not reply.tool_calls
            turn = await call(self._env.step, reply)
            return self._with_facts(turn)
        self._drafted = True
        if self._score_draft:
            self._draft_reward = await self._reward_of(reply)
        return Turn((Message("user", self._request),))

    async def _reward_of(self, draft: Message) -> float | None:
        """Return the reward of a draft as the only reply. None if the episode would continue."""
        env = self._make()
        await call(env.begin)
        turn = await call(env.step, draft)
        return total_reward(turn.rewards) if turn.done else None

    def _with_facts(self, turn: Turn) -> Turn:
        if not turn.done or self._draft_reward is None:
            return turn
        gain = total_reward(turn.rewards) - self._draft_reward
        facts = {"draft_reward": self._draft_reward, "edit_gain": gain}
        return replace(turn, facts={**turn.facts, **facts})
