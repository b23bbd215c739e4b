"""The process of `old_logit_model`: one loop that reads messages, scores what its version sampled, and moves on.

A version is loaded only once all pieces of the one before are scored: they come before it on the wire. Pieces of later
versions wait. What is said waits here until it is read, so the loop never blocks on it. The process ends by itself
when the other side is gone.
"""

import json
import os
import select
import socket
from collections import deque

import torch
from safetensors.torch import load as unpack_tensors

from unstale.old_logps.scoring.cache import PieceKey, ScoreQueue, score_pieces
from unstale.old_logps.scoring.scorer import LocalScorer
from unstale.weights.child_process import Frames, Header, pack

_READ_BYTES = 1 << 20


def main(descriptor: int, options: str) -> None:
    """Serve the route at the other end of the socket until it hangs up. `options` is JSON."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    os.dup(descriptor)  # never closed: the other side sees the end only when there is an exit code
    with socket.socket(fileno=descriptor) as connection:
        _Worker(connection, LocalScorer.load(json.loads(options))).serve()


class _Worker:
    def __init__(self, connection: socket.socket, scorer: LocalScorer) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._scorer = scorer
        self._frames = Frames()
        self._loaded = -1
        self._pieces: dict[int, ScoreQueue] = {}
        """By version."""
        self._next: deque[tuple[int, bytes]] = deque()
        """Versions to load, in order, with their weights."""
        self._unsaid = bytearray()

    def serve(self) -> None:
        """Messages first, then one pass or one load, until the connection ends."""
        while True:
            busy = bool(self._pieces.get(self._loaded)) or bool(self._next)
            asking = [self._connection] if self._unsaid else []
            readable, writable, _ = select.select(
                [self._connection], asking, [], 0 if busy else None
            )
            if readable and not self._receive():
                return
            late = min(self._pieces, default=self._loaded)
            if late < self._loaded:
                raise RuntimeError(
                    f"a piece of version {late} came when version {self._loaded} was loaded"
                )
            if writable:
                del self._unsaid[: self._connection.send(self._unsaid)]
            if self._pieces.get(self._loaded):
                self._score(self._pieces[self._loaded])
            elif self._next:
                self._load(*self._next.popleft())

    def _receive(self) -> bool:
        """Take what has arrived. False at the end of the connection."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except ConnectionResetError:
            return False
        for header, body in self._frames.feed(data):
            if header["op"] == "load":
                self._next.append((header["version"], body))
                continue
            for held, tokens in header["pieces"]:
                place = PieceKey(*held)
                self._pieces.setdefault(place.version, ScoreQueue()).put(place, tokens)
        return bool(data)

    def _score(self, backlog: ScoreQueue) -> None:
        """About one pass over pieces of the loaded version."""
        pieces = backlog.take(self._scorer.max_tokens)
        answers, forward_tokens = score_pieces(self._scorer, pieces)
        said = [[place, values.tolist()] for place, values in answers.items()]
        self._say({"op": "answers", "answers": said, "forward_tokens": forward_tokens})

    def _load(self, version: int, body: bytes) -> None:
        self._pieces.pop(self._loaded, None)
        self._scorer.policy.load_weights(unpack_tensors(body))
        self._loaded = version
        self._say({"op": "loaded", "version": version})

    def _say(self, header: Header) -> None:
        self._unsaid += pack(header)
