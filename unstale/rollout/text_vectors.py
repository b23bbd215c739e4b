"""Vectors that represent texts: hidden states of the policy that reads them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.records import Batch, ContextPiece, ScoredTrajectory, Task, Trajectory, collate
from unstale.techniques.hooks import HiddenStates, StatesQuery

TEXTS_AT_ONCE = 32
"""Number of texts in one forward pass."""


def text_vectors(
    texts: Sequence[str],
    query: StatesQuery,
    *,
    states: Callable[[Batch, StatesQuery], HiddenStates],
    chat: Chat,
    max_context: int,
) -> Tensor:
    """Return one vector per text, `[n, H]` float32: the mean hidden state at the end of its prompt.

    `query` selects the hidden states, and `states` computes them under the current policy. Only the
    last `max_context` tokens of a longer prompt are read.
    """
    rows = []
    for at in range(0, len(texts), TEXTS_AT_ONCE):
        read: list[ScoredTrajectory] = []
        for text in texts[at : at + TEXTS_AT_ONCE]:
            prompt = chat.encode_prompt((Message("user", text),))[-max_context:]
            pieces = (ContextPiece(tuple(prompt)),)
            task = Task("text", "train", at + len(read))
            episode = Trajectory(pieces, {}, "done", task, seed=0, episode=task.index)
            read.append(ScoredTrajectory(episode, (0.0,)))
        rows.append(states(collate(read), query).prompt)
    return torch.cat(rows)
