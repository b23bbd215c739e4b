"""Test `retry` with a judge, which finds the first wrong step, and a corrector of this step.

Both are named by an option: a model in a folder, a server, or a function. The lock is that of
`test_retry.py`: a corrector that goes on to the end opens it, and one right step does not.
"""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForTokenClassification

from tests.cli.test_run import quiet
from tests.rewards.test_reward_model import save as save_reward_model
from tests.support.groups import TASK
from tests.support.tiny_runs import judge_config, save_tiny, tiny_run
from tests.techniques.test_retry import SEEDS, Scripted
from tests.techniques.test_retry_rules import made, open_lock
from unstale.cli import session
from unstale.cli.resume import load_config, resume_command
from unstale.config import ConfigError
from unstale.config.options import override
from unstale.durability.journal import Journal, check
from unstale.durability.run_folder import RunLog
from unstale.envs import Message, ToolCall
from unstale.model.policy import Policy
from unstale.recipes import RECIPES
from unstale.records import ContextPiece, Fork, Placed, Provenance, Sampled, Trajectory
from unstale.research.corrector_worker import Continuation
from unstale.research.steps import (
    CORRECT_REST,
    FIND,
    FolderCorrector,
    FolderJudge,
    Step,
    make_corrector,
    make_judge,
    place_of,
    split,
)
from unstale.rewards.reward_model import ModelEnded, RewardModel
from unstale.rewards.reward_model_worker import Scorer
from unstale.testing import plain_logps, tiny_policy

HERE = __name__
TEXT = "Add them.\n\nThat is 5.\n\nSo 6."


class Letters:
    """Texts whose tokens are characters. "!" ends a reply."""

    ends = frozenset({ord("!")})

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens)).replace("!", "")

    def whole(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_whole(self, text: str, after: str) -> tuple[int, ...]:
        return self.encode(text)

    def end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return (*tokens, ord("!"))

    def parse(self, tokens: Sequence[int]) -> Message:
        text = self.text(tokens)
        calls = (ToolCall("do", {}),) if text.startswith("CALL") else ()
        return Message("assistant", text, calls)

    def words(self, episode: Trajectory) -> str:
        return "2 + 3"

    def room(self, episode: Trajectory, at: int) -> int:
        return 40

    async def correction(self, episode: Trajectory) -> tuple[int, tuple[int, ...]] | None:
        return 3 + TEXT.index("So"), self.encode("So 5.")


def attempt(*replies: str, fork: Fork | None = None) -> Trajectory:
    """Return an attempt with these replies, between which the environment says `ok`."""
    pieces: list[Any] = []
    for number, reply in enumerate(replies):
        pieces.append(ContextPiece(tuple(map(ord, "ok " if number else "go "))))
        tokens = tuple(map(ord, f"{reply}!"))
        pieces.append(Sampled(tokens, (-1.0,) * len(tokens), version=3))
    return Trajectory(tuple(pieces), {"reward": 0.0}, "done", TASK, 0, 9, fork=fork)


def test_replies_are_divided_into_steps_but_not_those_with_calls() -> None:
    said = attempt(TEXT, "CALL a\n\nb", "Done.\n\n")
    texts: Any = Letters()
    steps = split(said, texts, "paragraph")
    assert [step.text for step in steps] == [
        *("Add them.\n\n", "That is 5.\n\n", "So 6."),
        *("CALL a\n\nb", "Done.\n\n"),
    ]
    assert [step.before for step in steps] == ["", "", "", "ok ", "ok "]
    assert [step.reply for step in steps] == [0, 0, 0, 1, 2]
    assert len(split(said, texts, "line")) == 5 and len(split(said, texts, "reply")) == 3
    assert place_of(said, 0, steps[1].start, texts) == (3 + len("Add them.\n\n"), "")


class Pairs(Letters):
    """Texts whose tokens are pairs of characters."""

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token // 1000) + chr(token % 1000) for token in tokens)


def test_text_of_a_token_that_contains_the_place_is_written_again() -> None:
    letters = "Add\n\nSo 6."
    tokens = tuple(ord(a) * 1000 + ord(b) for a, b in zip(letters[::2], letters[1::2], strict=True))
    said = Trajectory(
        (ContextPiece((1,)), Sampled(tokens, (-1.0,) * len(tokens), version=0)),
        {"reward": 0.0},
        "done",
        TASK,
        0,
        9,
    )
    texts: Any = Pairs()
    assert place_of(said, 0, 5, texts) == (1 + 2, "\n"), "a token has the line end and the S"


def judge_sum(task: str, steps: list[str]) -> int | None:
    assert task == "2 + 3"
    return next((i for i, step in enumerate(steps) if "6" in step), None)


async def correct_sum(task: str, right: list[str], wrong: str) -> str:
    assert right == ["Add them.\n\n", "That is 5.\n\n"] and wrong == "So 6."
    return " So 5. "


def forked(*attempts: Trajectory, earlier: int = 0, **options: Any) -> Sequence[Fork | None]:
    given = {"judge": f"{HERE}:judge_sum", "corrector": f"{HERE}:correct_sum", **options}
    retry = made("correct", **given)
    texts: Any = Letters()
    retry.prepare(texts)
    rounds = [[]] * earlier + [attempts]
    return asyncio.run(retry.forks(rounds, texts))


def test_functions_find_and_correct_the_first_wrong_step() -> None:
    at = 3 + TEXT.index("So")
    (fork,) = forked(attempt(TEXT))
    assert fork == Fork(9, at, (Placed(tuple(map(ord, "So 5.\n\n")), Provenance.FOREIGN),))
    (fork,) = forked(attempt(TEXT), until="end")
    assert fork == Fork(9, at, (Placed(tuple(map(ord, "So 5.!")), Provenance.FOREIGN),))
    assert forked(attempt(TEXT), judge="") == forked(attempt(TEXT)), "the task set finds the place"
    assert (
        forked(attempt("All is 5.")) == []
        and forked(replace(attempt(TEXT), rewards={"r": 1.0})) == []
    )


def test_what_the_corrector_wrote_is_not_corrected_again() -> None:
    at, text = 3 + TEXT.index("So"), (Placed(tuple(map(ord, "So 6.")), Provenance.FOREIGN),)
    assert forked(attempt(TEXT, fork=Fork(8, at, text)), earlier=1) == []
    before = Fork(8, 3, (Placed(tuple(map(ord, "Add them.\n\n")), Provenance.FOREIGN),))
    assert len(forked(attempt(TEXT, fork=before), earlier=1)) == 1


class LockTexts(Scripted):
    """Texts of the lock, whose replies are one word each."""

    ends = frozenset({99})

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", self.text(tokens))

    def whole(self, tokens: Sequence[int]) -> str:
        return self.text(tokens)

    def encode_whole(self, text: str, after: str) -> tuple[int, ...]:
        return tuple(map(int, text.split()))

    def end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens)

    def room(self, episode: Trajectory, at: int) -> int:
        return 8


def first_not_0(task: str, steps: list[str]) -> int | None:
    return next((i for i, step in enumerate(steps) if step != "0"), None)


def say_0(task: str, right: list[str], wrong: str) -> str:
    return "0"


@pytest.mark.costly
@pytest.mark.parametrize(("steps", "expected"), [(0, 0.965), (1, 0.0)])
def test_a_judge_and_a_corrector_open_the_lock_if_they_go_on_to_the_end(
    steps: int, expected: float
) -> None:
    named = {"judge": f"{HERE}:first_not_0", "corrector": f"{HERE}:say_0", "step": "reply"}
    retry = made("correct", steps=steps, **named)
    texts: Any = LockTexts()
    retry.prepare(texts)
    opened = [open_lock(seed, retry, texts) for seed in range(SEEDS // 6)]
    assert np.mean(opened) == pytest.approx(expected, abs=0.02)


def save_step_model(folder: Path, labels: int = 2) -> Qwen3ForTokenClassification:
    """Save a tiny process reward model. Return it."""
    torch.manual_seed(3)
    config = judge_config(labels=labels, length=64)
    model = Qwen3ForTokenClassification(config).eval()
    model.save_pretrained(folder)
    tiny_policy().tokenizer.save_pretrained(folder)
    return model


SOLUTION = ["w5 w6 ", "w7", " w8 w9"]


def test_a_process_reward_model_scores_every_step(tmp_path: Path) -> None:
    model = save_step_model(tmp_path)
    scorer = Scorer(tmp_path)
    with torch.inference_mode():
        logits = model(torch.tensor([[30, 31, 5, 6, 7, 8, 9]])).logits[0, [3, 4, 6]]
    found, long, talk = scorer.answers(
        [
            {"task": "w30 w31", "steps": SOLUTION},
            {"task": "w30", "steps": ["w5 " * 70]},
            [{"role": "user", "content": "w5"}],
        ]
    )
    assert found == pytest.approx(logits.softmax(-1)[:, 1].tolist(), abs=1e-5)
    assert long == "the conversation has 71 tokens, and the model takes 64"
    assert talk == "it classifies tokens, so it scores steps only"


def test_a_reward_model_scores_a_solution_up_to_each_step(tmp_path: Path) -> None:
    scorer = Scorer(save_reward_model(tmp_path / "liking"))
    ask = {"role": "user", "content": "w30"}
    found, whole = scorer.answers(
        [
            {"task": "w30", "steps": ["w5 ", "w7"]},
            [ask, {"role": "assistant", "content": "w5 w7"}],
        ]
    )
    assert isinstance(found, list) and len(found) == 2 and isinstance(whole, float)
    assert found[1] == pytest.approx(1 / (1 + np.exp(-whole)), abs=1e-5)


def test_a_corrector_samples_its_step_and_knows_the_log_probabilities(tmp_path: Path) -> None:
    writer = tiny_policy(seed=4)
    writer.save(tmp_path)
    model = Continuation(tmp_path)
    tokens, logps = model.sample([2, 30, 31, 2], "", 200, {1}, seed=2)
    assert tokens[-1] == 1 and 1 not in tokens[:-1]
    again = model.sample([2, 30, 31, 2], "", 200, {1}, seed=2)
    assert (tokens, logps) == again
    expected = plain_logps(writer, (2, 30, 31, 2, *tokens))[4:].tolist()
    assert logps == pytest.approx(expected, abs=1e-4)
    assert model.sample([2, 30, 31, 2], "", len(tokens) - 1, {1}, seed=2) == ([], []), "no room"
    word = f"w{tokens[1]}"
    assert model.sample([2, 30, 31, 2], rf"{word}\b", 200, {1}, seed=2)[0] == tokens[:2]


def test_unusable_models_are_told_at_the_start(tmp_path: Path) -> None:
    save_step_model(tmp_path, labels=3)
    with pytest.raises(ValueError, match=r"it has 3 labels, and a process reward model has two"):
        Scorer(tmp_path)
    with pytest.raises(ConfigError, match=r"reward model: .* has a Qwen3ForTokenClassification"):
        RewardModel(tmp_path)
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9 names no model at .*/v1/models"):
        make_judge("http://127.0.0.1:9", 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"retry.judge": "a:b"}, "retry.judge needs retry.corrector"),
        ({"retry.corrector": "nowhere"}, "'nowhere' is not a folder with a language model"),
        (
            {"retry.corrector": "a:b", "retry.judge": "nowhere"},
            "reward model: no folder at nowhere",
        ),
        ({"retry.until": "end"}, "are used only with retry.corrector"),
        (
            {"retry.corrector": "a:b", "objective.placed": "guided"},
            "needs objective.placed = anchor, got guided",
        ),
        ({"retry.rule": "plan", "retry.corrector": "a:b"}, "retry.corrector"),
    ],
)
def test_options_that_do_not_fit_are_refused(values: dict, message: str) -> None:
    plain = {"techniques": "retry", "objective.placed": "anchor", "schedule.group_size": 8}
    with pytest.raises(ConfigError, match=message):
        override(RECIPES["retail"](), {**plain, "retry.rule": "correct", **values})


@contextmanager
def server(*answers: str | tuple[int, str]) -> Iterator[tuple[str, list[Any]]]:
    """Serve a chat model that gives these answers, or a status and a message that refuses. The
    value is its address and the requests.
    """
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "prm"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            answer = answers[len(asked) - 1]
            if isinstance(answer, str):
                self._send({"choices": [{"message": {"content": answer}}]})
            else:
                self._send({"error": {"message": answer[1]}}, answer[0])

        def _send(self, value: Any, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}", asked
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


def test_served_models_find_and_correct_the_first_wrong_step() -> None:
    with server("Step 2 is right. 3", "So 5.", "all are right: 0", "I cannot say") as (url, asked):
        options = {"judge": url, "corrector": f"{url}/v1", "until": "end"}
        (fork,) = forked(attempt(TEXT), **options)
        assert fork and fork.text[0].tokens == tuple(map(ord, "So 5.!"))
        assert forked(attempt(TEXT), **options) == forked(attempt(TEXT), **options) == []
    first, second = (each["messages"][0]["content"] for each in asked[:2])
    assert first.startswith(FIND) and "[step 3] So 6." in json.loads(first[len(FIND) :])["attempt"]
    shown = json.loads(second.removeprefix(CORRECT_REST))
    assert shown == {"task": "2 + 3", "right": TEXT[: TEXT.index("So")], "wrong": "So 6."}
    assert {each["model"] for each in asked} == {"prm"}


@pytest.mark.parametrize(
    ("status", "message", "is_too_long"),
    [
        (400, "This model's maximum context length is 4096 tokens. You requested 5000", True),
        (400, "The input token count (1200000) exceeds the maximum number of tokens", True),
        (400, "This model's maximum prompt length is 131072, the request has 537812", True),
        (400, "Please reduce the length of the messages or completion.", True),
        (400, "max_tokens is required: it must be at least 1", False),
        (422, "Field required: context", False),
        (422, "`inputs` tokens + `max_new_tokens` must be <= 4096", True),
        (413, "", True),
        (400, "'seed' is not supported", False),
        (422, "messages.0.content: invalid", False),
        (404, "no model of this context", False),
    ],
)
def test_only_a_question_that_is_too_long_has_no_reply(
    status: int, message: str, is_too_long: bool
) -> None:
    with server(*[(status, message)] * 3) as (url, asked):
        judge = make_judge(url, 0.5)
        if is_too_long:
            assert judge.first_wrong("2 + 3", [Step("So 6.", "", 0, 0)], 1) is None
        else:
            with pytest.raises(OSError, match=message):
                judge.first_wrong("2 + 3", [Step("So 6.", "", 0, 0)], 1)
    assert len(asked) == 1


@pytest.mark.costly
def test_the_end_of_a_correctors_process_has_a_cause(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    corrector = FolderCorrector(str(tmp_path))
    with pytest.raises(ModelEnded, match="its process has ended: IndexError: index out of range"):
        corrector.tokens([10**6], "reply", 5, frozenset({1}), seed=0)
    corrector.close()


@pytest.mark.costly
@pytest.mark.usefixtures("forked_children")
def test_a_run_trains_on_steps_of_a_model_whose_log_probabilities_are_known(tmp_path: Path) -> None:
    """A process reward model judges, and another policy corrects: `guided` weighs what it wrote."""
    save_tiny(tmp_path / "model")
    save_step_model(tmp_path / "prm")
    writer = tiny_policy(seed=4)
    writer.save(tmp_path / "writer")
    tiny_policy(num_words=32).save(tmp_path / "other")
    config = tiny_run(tmp_path / "model", tmp_path, max_steps=3)
    engine = replace(config.engine, max_completion_tokens=96, logit_bias="1=2")
    schedule = replace(config.schedule, group_size=4)
    values = {
        "techniques": "retry",
        "objective.placed": "guided",
        "retry.rule": "correct",
        "retry.judge": str(tmp_path / "prm"),
        "retry.corrector": str(tmp_path / "writer"),
        "retry.step": "reply",
        "retry.threshold": 0.6,
    }
    run = session.train(
        override(replace(config, schedule=schedule, engine=engine), values), console=quiet()
    )
    assert max(row["retry/episode_share"] for row in run.metrics) > 0
    assert 0 < min(row["retry/untried_share"] for row in run.metrics) < 1
    assert 1.0 in [row["placed/trained_share"] for row in run.metrics], "all of it has a loss"
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        forks = [each.trajectory for each in reader.trajectories() if each.trajectory.fork]
    judge = FolderJudge(str(tmp_path / "prm"), 0.0)
    assert judge.first_wrong("w30", [Step("w5 ", "", 0, 0)], 0) is None, "no score is below 0"
    with pytest.raises(ConfigError, match=r"other has another tokenizer than the policy"):
        make_corrector(str(tmp_path / "other"), Letters(), to_end=False)  # type: ignore[arg-type]
    writer = Policy.load(tmp_path / "writer", dtype="float32")
    for each in forks:
        assert each.fork
        (text,) = each.fork.text
        assert isinstance(text, Placed) and text.provenance == Provenance.FOREIGN
        assert text.source_logp and text.tokens[-1] == 1
        end = each.fork.at + len(text.tokens)
        expected = plain_logps(writer, each.tokens[:end])[each.fork.at :].tolist()
        assert text.source_logp == pytest.approx(expected, abs=1e-4)


def test_the_command_that_resumes_a_run_names_its_judge_and_corrector(tmp_path: Path) -> None:
    """Otherwise a run folder from elsewhere could choose the code, or who gets the key."""
    schedule = {"schedule.group_size": 4, "objective.placed": "anchor", "techniques": "retry"}
    outside = {"retry.judge": f"{HERE}:judge_sum", "retry.corrector": "http://127.0.0.1:9"}
    config = tiny_run(tmp_path, tmp_path)
    config = override(config, {**schedule, "retry.rule": "correct", **outside})
    RunLog.create(tmp_path / "run", config).close()
    named: dict[str, Any] = {"task.env": config.task.env}
    with pytest.raises(ConfigError, match=r"add --retry.judge .*:judge_sum --retry.corrector http"):
        load_config(tmp_path / "run", named=named)
    assert load_config(tmp_path / "run", named={**named, **outside}).techniques == "retry"
    words = resume_command(tmp_path / "run")
    assert f"--retry.judge {HERE}:judge_sum --retry.corrector http://127.0.0.1:9" in words
