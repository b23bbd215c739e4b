"""Test the options of `distil`, what is refused, and a teacher on a server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from unstale.config import (
    ConfigError,
    RunConfig,
)
from unstale.config.options import override
from unstale.config.routes import routes
from unstale.lint import check
from unstale.model.peers import SINGLE_PROCESS
from unstale.model.prefix_tree import Packed
from unstale.techniques.distil import DistilConfig
from unstale.testing import tiny_policy
from unstale.trainer import served_teacher
from unstale.trainer.served_teacher import ServedTeacher

URL = "http://127.0.0.1:9"


def run(**options: Any) -> RunConfig:
    return RunConfig(
        recipe="", techniques="distil", technique_options={"distil": DistilConfig(**options)}
    )


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        ({}, {}, "needs distil.teacher: a model folder"),
        ({"teacher": URL, "divergence": "forward"}, {}, "not built with a served teacher"),
        ({"teacher": URL}, {"engine.temperature": 0.7}, "= 1, got 0.7: another is impossible"),
        ({"teacher": "start"}, {"engine.top_p": 0.9}, "not built with engine.top_p = 0.9"),
        ({"teacher": "start"}, {"advantage.estimator": "gae"}, "not built with advantage.est"),
        ({"teacher": "start"}, {"schedule.resampled_groups": 2}, "needs schedule.resampled_groups"),
        ({"teacher": "start"}, {"techniques": "distil truncated"}, "truncated, which is not built"),
        ({"teacher": "start"}, {"techniques": "distil replay"}, "distil and replay"),
        ({"teacher": URL}, {"deterministic": True}, "= false: equal runs are impossible"),
        (
            {"teacher": "self", "context": "x"},
            {"trainer.minibatches_per_batch": 2},
            "needs trainer.minibatches_per_batch = 1, got 2: .* is not built",
        ),
        (
            {"teacher": "self", "context": "x"},
            {"trainer.epochs_per_batch": 2},
            "needs trainer.epochs_per_batch = 1, got 2: .* is not built",
        ),
        (
            {"teacher": "models/a", "divergence": "reverse"},
            {"cluster.trainers": 2},
            "needs cluster.trainers = 0, got 2: not built",
        ),
        (
            {"teacher": "models/a", "context": "x", "advantage_coef": 1.0},
            {"techniques": "distil replay", "replay.max_age": 9},
            "distil with distil.context, and replay, which is not built",
        ),
    ],
)
def test_combinations_that_cannot_be_true_are_refused(
    options: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        override(run(**options), changes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"teacher": "self"}, "needs distil.context"),
        ({"teacher": "a=x a=y"}, "names a twice"),
        ({"teacher": "a=x y"}, "needs a name, as in name=models/a, got 'y'"),
        ({"teacher": "models/a", "refresh": 3}, "needs distil.teacher = start"),
        ({"teacher": "models/a", "beta": 0.2}, "used only with distil.divergence = mixed"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DistilConfig(**options)


@pytest.mark.parametrize("divergence", ["sampled", "reverse"])
@pytest.mark.parametrize("route", sorted(routes()))
def test_every_route_lora_and_minibatches_pass(route: str, divergence: str) -> None:
    config = override(
        run(teacher="models/a", divergence=divergence),
        {
            "old_logps.route": route,
            "trainer.lora_rank": 4,
            **({} if route == "eager" else {"trainer.minibatches_per_batch": 2}),
        },
    )
    assert "teacher models/a" in str(check(config))


class Server(BaseHTTPRequestHandler):
    """A server with vLLM's answers: the log-probability of a token is minus its number / 10."""

    tokenizer: Any
    failures = 0

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._answer({"tokens": self.tokenizer.encode(body["prompt"])})
            return
        if Server.failures:
            Server.failures -= 1
            self.send_error(503)
            return
        tokens = body["prompt"]
        rows = [None, *({str(token): {"logprob": -token / 10}} for token in tokens[1:])]
        self._answer({"choices": [{"prompt_logprobs": rows[: len(rows) - (tokens[-1] == 9)]}]})

    def _answer(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Server.tokenizer = tiny_policy().tokenizer
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_served_teacher_scores_sequences_and_is_asked_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_teacher, "FIRST_WAIT_S", 0.0)
    teacher = ServedTeacher(url, tiny_policy().tokenizer, SINGLE_PROCESS)
    Server.failures = 2
    tokens = torch.tensor([4, 5, 6, 7, 8])
    found = teacher.score(Packed(tokens, (0, 3, 5)), tokens > 0)
    assert found.tolist() == pytest.approx([0, -0.5, -0.6, 0, -0.8])
    with pytest.raises(ConnectionError, match="no prompt_logprobs for each token"):
        teacher.score(Packed(torch.tensor([4, 9]), (0, 2)), tokens[:2] > 0)


def test_a_served_teacher_with_other_tokens_is_refused(url: str) -> None:
    other = tiny_policy().tokenizer
    other.add_tokens(["3.14159"])
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        ServedTeacher(url, other, SINGLE_PROCESS)
    with pytest.raises(ConfigError, match=f"{URL} cannot be used"):
        ServedTeacher(URL, other, SINGLE_PROCESS)
