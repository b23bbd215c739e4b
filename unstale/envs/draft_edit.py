"""An environment that asks for each answer twice: for a draft, and for an edited version of it.

Only the edited version goes to the inner environment and is rewarded. Draft and edit are turns of
one episode, so both are trained with the same reward: a draft is good if its edit succeeds. The
method is from ReflectDrive-2, which does so for plans.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from unstale.config import ConfigError, TaskConfig
from unstale.envs import Env, Message, Turn
from unstale.envs.guard import call
from unstale.records import total_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEditConfig(TaskConfig):
    """Options of task sets that can ask for an edited version of each answer."""

    edit_request: str = ""
    """A user message after the first reply without a tool call, which asks for an edited version.
    Only the edited version is rewarded, and both replies are trained. Empty asks for none.
    """
    score_drafts: bool = False
    """Also compute the reward of drafts, and report it as `draft_reward`. It changes no other
    reward.
    """

    def check_combination(self) -> None:
        super(DraftEditConfig, self).check_combination()
        if self.score_drafts and not self.edit_request:
            raise ConfigError(
                "task.score_drafts needs task.edit_request, such as 'Check your answer, and reply "
                "again.'"
            )

    def with_edit(self, make: Callable[[], Env]) -> Env:
        """Return the environment that `make` returns, inside of a `DraftEdit` if `edit_request` is
        set.
        """
        if not self.edit_request:
            return make()
        return DraftEdit(make, self.edit_request, score_draft=self.score_drafts)


class DraftEdit:
    """An environment around another one. The first reply without a tool call is taken as a draft.

    `make` returns the inner environment, which must hold nothing that has to be closed. After the
    draft, `request` is sent as user's message, and the next reply goes to the inner environment.
    With `score_draft`, the draft also goes to another environment of the task, unless a tool was
    called before. The number `draft_reward` is its reward there, and `edit_gain` what the edit adds
    to it. Both are among the facts of the last turn.
    """

    def __init__(self, make: Callable[[], Env], request: str, *, score_draft: bool) -> None:
        self._make = make
        self._env = make()
        self._request = request
        self._score_draft = score_draft
        self._drafted = False
        self._draft_reward: float | None = None
        self.code_name: str = getattr(self._env, "code_name", type(self._env).__name__)
        """Name of the inner environment in errors of the user's code."""

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
        """Return the reward of a draft that is the episode's only reply. None if the episode would
        continue.
        """
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
