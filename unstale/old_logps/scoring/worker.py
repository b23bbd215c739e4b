"""The child process of the route `old_logit_model`, which computes old log-probabilities.

The process computes the values of all tokens of a version before it loads the next version. It
keeps its replies in memory until the trainer reads them, so the process never waits for the socket.
It ends when the trainer closes the connection.
"""

import json
import math
import os
import select
import socket
from collections.abc import Iterator

import numpy as np
import torch

from unstale.kept_sets import KeptSets
from unstale.old_logps.scoring.cache import answer
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.scoring.queue import PieceKey, Pieces, PieceText, ScoringOrder
from unstale.routed_experts import RoutedExperts
from unstale.weights.child_process import Frames, Header, frame
from unstale.weights.codec import tensors_of

_READ_BYTES = 1 << 20


def main(descriptor: int, options: str) -> None:
    """Compute log-probabilities for a trainer: read requests from a socket, and reply.

    `descriptor` is the file descriptor of the socket. `options` is the result of `Scorer.export`,
    as JSON.
    """
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    # Not closed here. It closes with the process, when the exit code is available to the other end.
    os.dup(descriptor)
    with socket.socket(fileno=descriptor) as connection:
        _ScoringWorker(connection, LocalScorer.load(json.loads(options))).serve()


class _ScoringWorker:
    def __init__(self, connection: socket.socket, scorer: LocalScorer) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._scorer = scorer
        self._frames = Frames()
        self._order = ScoringOrder(scorer.max_tokens)
        self._replies = bytearray()

    def serve(self) -> None:
        """Repeat: read messages, then run one forward pass or load one version.

        Return when the trainer closes the connection.
        """
        poll = select.poll()
        while True:
            writing = select.POLLOUT if self._replies else 0
            poll.register(self._connection, select.POLLIN | writing)
            ready = dict(poll.poll(0 if self._order else None)).get(self._connection.fileno(), 0)
            if ready & ~select.POLLOUT and not self._receive():
                return
            if ready & select.POLLOUT:
                del self._replies[: self._connection.send(self._replies)]
            if pieces := self._order.take_pieces():
                self._score(pieces)
            elif self._order:
                self._load(*self._order.take_version())

    def _receive(self) -> bool:
        """Read all messages that have arrived. Return False if the connection is closed."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except ConnectionResetError:
            return False
        for header, body in self._frames.feed(data):
            if header["op"] == "load":
                self._order.add_version(header["version"], body)
            else:
                self._order.add_pieces(dict(_read_pieces(header, body)))
        return bool(data)

    def _score(self, pieces: Pieces) -> None:
        self._reply(answer(self._scorer, pieces))

    def _load(self, version: int, body: bytearray) -> None:
        self._scorer.policy.load_weights(tensors_of(body))
        self._reply({"op": "loaded", "version": version})

    def _reply(self, header: Header) -> None:
        self._replies += b"".join(frame(header))


def _read_pieces(header: Header, body: bytearray) -> Iterator[tuple[PieceKey, PieceText]]:
    """Yield the runs of sampled tokens in a message, each with the text that the model reads.

    The body of the message has their routed experts and kept sets, concatenated.
    """
    start = 0
    for fields, tokens, about, size in header["pieces"]:
        key = PieceKey(*fields)
        routed_experts = None
        kept_sets = None
        if about is not None:
            dtype, *shape = about
            experts = np.frombuffer(body, dtype, math.prod(shape), start).reshape(shape)
            start += experts.nbytes
            routed_experts = RoutedExperts(0, experts.copy())
        if size is not None:
            count = len(tokens) - key.start
            kept_sets = KeptSets.frombuffer(body[start : start + size], count)
            start += size
        yield key, PieceText(tokens, routed_experts, kept_sets)
