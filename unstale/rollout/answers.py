"""Read the answers of finished episodes, for votes among attempts at a task."""

from unstale.envs import Message, Taskset, task_answer
from unstale.envs.chat import Chat
from unstale.records import Trajectory, replies


def last_reply(episode: Trajectory, chat: Chat) -> Message:
    """Return the last reply of an episode as a message. It is empty if there is none."""
    said = replies(episode.pieces)  # a fork within a reply shares the beginning of it
    return chat.parse(said[-1][1] if said else ())


class AnswerReader:
    """Returns the answer of an episode, which is empty if the task set reads none."""

    def __init__(self, taskset: Taskset, chat: Chat) -> None:
        self._taskset = taskset
        self._chat = chat

    def __call__(self, episode: Trajectory) -> str:
        reply = last_reply(episode, self._chat)
        return task_answer(self._taskset, episode.task, reply.content)
