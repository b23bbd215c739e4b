"""Read the final answers of episodes, for techniques that vote among several attempts at a task."""

from unstale.envs import Message, Taskset, task_answer
from unstale.envs.chat import Chat
from unstale.records import Trajectory, replies


def last_reply(episode: Trajectory, chat: Chat) -> Message:
    """Return the policy's last reply in an episode. The message is empty if there was no reply."""
    said = replies(episode.pieces)  # a fork within a reply shares the beginning of it
    return chat.parse(said[-1][1] if said else ())


class AnswerReader:
    """A function that returns the answer in an episode's last reply.

    The answer is empty if the task set does not define how to read one.
    """

    def __init__(self, taskset: Taskset, chat: Chat) -> None:
        self._taskset = taskset
        self._chat = chat

    def __call__(self, episode: Trajectory) -> str:
        reply = last_reply(episode, self._chat)
        return task_answer(self._taskset, episode.task, reply.content)
