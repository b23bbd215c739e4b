"""The number of turns that an episode may have: at most `rollout.max_turns`.

A technique may set a lower limit, remind the policy of the remaining turns, and extend the limit.
The limit depends only on the episode's tokens and rewards so far, so a resumed episode gets the
same one.
"""

from collections.abc import Sequence
from dataclasses import replace

from unstale.envs import Message, Turn
from unstale.envs.chat import Chat
from unstale.records import Sampled, TurnLimit, walk
from unstale.rollout.transcript import Transcript


class AllowedTurns:
    """The number of turns that one attempt at an episode may have."""

    __slots__ = ("_chat", "_limit", "_most", "_transcript")

    def __init__(
        self, limit: TurnLimit | None, *, most: int, transcript: Transcript, chat: Chat
    ) -> None:
        """Set the limits of turns.

        `limit` is set by a technique, None if no technique sets one. `most` is `rollout.max_turns`.
        """
        self._limit = limit
        self._most = most
        self._transcript = transcript
        self._chat = chat

    def number(self, turn_rewards: Sequence[float]) -> int:
        """Return the number of turns that the episode may have, including all extensions so far.

        `turn_rewards` has the reward of each turn so far.
        """
        if self._limit is None:
            return self._most
        turns = self._limit.turns + self._limit.extend * self._extensions(turn_rewards)
        return min(turns, self._most)

    def remind(self, turn: Turn, turn_rewards: Sequence[float]) -> Turn:
        """Return the environment's answer `turn`, with a reminder of the remaining turns if one is
        due.

        The reminder is appended to the last message, because some chat templates refuse one message
        more.
        """
        limit = self._limit
        left = self.number(turn_rewards) - len(turn_rewards)
        if limit is None or turn.done or not 0 < left <= limit.remind:
            return turn
        text = f"You have {left} {'reply' if left == 1 else 'replies'} left."
        more = min(limit.extend, self._most - len(turn_rewards) - left)
        if limit.request and more > 0 and self._extensions(turn_rewards) < limit.extensions:
            text += f" To get {more} more, write {limit.request} in your last reply."
        if not turn.messages:
            return replace(turn, messages=(Message("user", text),))
        last = turn.messages[-1]
        changed = replace(last, content=f"{last.content}\n\n{text}".lstrip())
        return replace(turn, messages=(*turn.messages[:-1], changed))

    def _extensions(self, turn_rewards: Sequence[float]) -> int:
        limit = self._limit
        assert limit is not None
        begin, end = 0, limit.turns
        for number in range(limit.extensions):
            if len(turn_rewards) < end:
                return number
            if limit.request:
                granted = limit.request in self._reply(end - 1)
            else:
                granted = max(turn_rewards[begin:end]) > 0
            if not granted:
                return number
            begin, end = end, end + limit.extend
        return limit.extensions

    def _reply(self, turn: int) -> str:
        """Return the text of the policy's reply in this turn, numbered from 0."""
        tokens: list[int] = []
        for _, piece, number in walk(self._transcript.pieces):
            if number == turn and isinstance(piece, Sampled):
                tokens += piece.tokens
        return self._chat.parse(tokens).content
