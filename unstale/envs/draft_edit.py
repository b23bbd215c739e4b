"""An environment that asks for each answer twice: for a draft, and for an edited version of it.

Only the edited version goes to the inner environment and is rewarded. Draft and edit are turns of
one episode, so both are trained with the same reward: a draft is good if its edit succeeds. The
second reply is the whole edited version, or only its changes, which are made in the draft in place.
The method is from ReflectDrive-2 (arXiv 2605.04647), which does so for plans.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from unstale.config import ConfigError, TaskConfig
from unstale.envs import Env, Message, Turn
from unstale.envs.guard import call
from unstale.records import total_reward

ARROW = "=>"
HOW_TO_CHANGE = (
    f"Write each change on a line of its own, as `old text {ARROW} new text`. The old text must be "
    "in your reply exactly once. All other text stays as it is."
)
"""The end of the request if changes are made in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEditConfig(TaskConfig):
    """Options of task sets that can ask for an edited version of each answer."""

    edit_request: str = ""
    """A user message after the first reply without a tool call, which asks for an edited version.
    Only the edited version is rewarded, and both replies are trained. Empty asks for none.
    """
    edits: Literal["again", "in_place"] = "again"
    """The second reply with `edit_request`: the whole answer `again`, or only changes, which are
    made in the draft `in_place`. The request then also says how a change is written.
    """
    score_drafts: bool = False
    """Also compute the reward of drafts, and report it as `draft_reward`. It changes no other
    reward.
    """

    def check_combination(self) -> None:
        super(DraftEditConfig, self).check_combination()
        needing = {"task.score_drafts": self.score_drafts, "task.edits": self.edits != "again"}
        for option, is_set in needing.items():
            if is_set and not self.edit_request:
                raise ConfigError(
                    f"{option} needs task.edit_request, such as 'Check your answer, and reply "
                    "again.'"
                )

    def with_edit(self, make: Callable[[], Env]) -> Env:
        """Return the environment that `make` returns, inside of a `DraftEdit` if `edit_request` is
        set.
        """
        if not self.edit_request:
            return make()
        request, in_place = self.edit_request, self.edits == "in_place"
        return DraftEdit(make, request, score_draft=self.score_drafts, in_place=in_place)


def request_changes(request: str) -> str:
    """Return a request for changes in place: the user's, and how a change is written."""
    return f"{request}\n{HOW_TO_CHANGE}"


def change(draft: str, reply: str) -> tuple[str, int, int]:
    """Make the changes of a reply in a draft, one after another.

    A change is a line `old => new`. All other lines are ignored. Return the edited text, the number
    of changes made, and the number of those whose old text was not there exactly once.

    >>> change("one two two", "I check.\\none => 1\\ntwo => 2")
    ('1 two two', 1, 1)
    """
    made = missed = 0
    for line in reply.splitlines():
        old, arrow, new = (each.strip() for each in line.partition(ARROW))
        if not arrow:
            continue
        if old and draft.count(old) == 1:
            draft = draft.replace(old, new)
            made += 1
        else:
            missed += 1
    return draft, made, missed


def with_mistakes(text: str, random: Random, count: int) -> tuple[str, list[str]]:
    """Return a text with at most `count` mistakes, and the changes that undo them, the last first.

    A mistake is a number that is up to 10 larger or smaller, or a word in place of another. No word
    is changed twice, since the first change to undo would be to a wrong word.
    """
    edits: list[str] = []
    right = list(range(len(text.split())))
    for _ in range(count):
        words = [each.span() for each in re.finditer(r"\S+", text)]
        for place in random.sample(right, len(right)):
            start, end = words[place]
            word, other = text[start:end], random.choice(text.split())
            if number := re.search(r"\d{1,9}", word):
                value = abs(int(number[0]) + random.choice([-1, 1]) * random.randint(1, 10))
                other = word[: number.start()] + str(value) + word[number.end() :]
            wrong = text[:start] + other + text[end:]
            if wrong != text and (edit := _undoing(text, wrong, start, end)):
                text, edits = wrong, [edit, *edits]
                right.remove(place)
                break
    return text, edits


def _undoing(right: str, wrong: str, start: int, end: int) -> str:
    """Return the change from `wrong` to `right`, which differ at `start` to `end` of `right`.

    Words before the mistake are added until its text is there only once. Return "" if that fails.
    """
    stop = end + len(wrong) - len(right)
    begins = [each.start() for each in re.finditer(r"\S+", right[:start])]
    for begin in (start, *reversed(begins[-20:])):
        edit = f"{wrong[begin:stop]} {ARROW} {right[begin:end]}"
        if change(wrong, edit) == (right, 1, 0):
            return edit
    return ""


def mistaken(
    messages: Sequence[Message], *, request: str, most: int, random: Random
) -> list[tuple[list[Message], set[int]]]:
    """Return conversations whose last reply has 0 to `most` mistakes, and then is edited.

    The reply with mistakes is at the places in the second result. It is not to be learned. Raises
    ValueError if the last message is not a reply, or if it calls tools.
    """
    if messages[-1].role != "assistant" or messages[-1].tool_calls:
        raise ValueError("messages must end with a reply of the assistant that calls no tool")
    found = []
    for count in range(most + 1):
        draft, edits = with_mistakes(messages[-1].content, random, count)
        if len(edits) == count:
            asked = Message("user", request_changes(request))
            edit = Message("assistant", "\n".join(edits) or "No change.")
            talk = [*messages[:-1], replace(messages[-1], content=draft), asked, edit]
            found.append((talk, {len(messages) - 1}))
    return found


class DraftEdit:
    """An environment around another one. The first reply without a tool call is taken as a draft.

    `make` returns the inner environment, which must hold nothing that has to be closed. After the
    draft, `request` is sent as user's message, and the next reply goes to the inner environment.
    With `score_draft`, the draft also goes to another environment of the task, unless a tool was
    called before. The number `draft_reward` is its reward there, and `edit_gain` what the edit adds
    to it. Both are among the facts of the last turn.

    With `in_place`, the next reply has changes only (`change`). The inner environment gets the
    edited draft. The numbers `edits` and `edits_missed` are among the facts of the last turn.
    """

    def __init__(
        self,
        make: Callable[[], Env],
        request: str,
        *,
        score_draft: bool,
        in_place: bool = False,
    ) -> None:
        self._make = make
        self._env = make()
        self._request = request_changes(request) if in_place else request
        self._score_draft = score_draft
        self._in_place = in_place
        self._draft: str | None = None
        self._facts: dict[str, float] = {}
        self._draft_reward: float | None = None
        self.code_name: str = getattr(self._env, "code_name", type(self._env).__name__)
        """Name of the inner environment in errors of the user's code."""

    async def begin(self) -> Turn:
        return await call(self._env.begin)

    async def step(self, reply: Message) -> Turn:
        if reply.tool_calls or self._draft is not None:
            self._score_draft = self._score_draft and not reply.tool_calls
            turn = await call(self._env.step, self._edited(reply))
            return self._with_facts(turn)
        self._draft = reply.content
        if self._score_draft:
            self._draft_reward = await self._reward_of(reply)
        return Turn((Message("user", self._request),))

    def _edited(self, reply: Message) -> Message:
        """Return the reply that the inner environment gets."""
        if self._draft is None or not self._in_place or reply.tool_calls:
            return reply
        self._draft, made, missed = change(self._draft, reply.content)
        self._facts = {"edits": float(made), "edits_missed": float(missed)}
        return replace(reply, content=self._draft)

    async def _reward_of(self, draft: Message) -> float | None:
        """Return the reward of a draft that is the episode's only reply. None if the episode would
        continue.
        """
        env = self._make()
        await call(env.begin)
        turn = await call(env.step, draft)
        return total_reward(turn.rewards) if turn.done else None

    def _with_facts(self, turn: Turn) -> Turn:
        if not turn.done:
            return turn
        facts = dict(self._facts)
        if self._draft_reward is not None:
            gain = total_reward(turn.rewards) - self._draft_reward
            facts |= {"draft_reward": self._draft_reward, "edit_gain": gain}
        return replace(turn, facts={**turn.facts, **facts})
