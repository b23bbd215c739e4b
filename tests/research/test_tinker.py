"""Test the service for Tinker's client by raw HTTP: versions, losses, tenants and refusals."""

import asyncio
import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tiny_runs import save_tiny
from unstale.cli import main
from unstale.model.lora import Lora
from unstale.model.lora import adapters as adapters_of
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.research.tinker import jobs
from unstale.research.tinker.checkpoints import KEPT_UNNAMED, Checkpoints
from unstale.research.tinker.protobuf import Fields, Value, decode, double, encode, integers
from unstale.research.tinker.server import TinkerServer
from unstale.research.tinker.trainer import Saved, Shape
from unstale.rollout.endpoint.schemas import Refused

RANK = 4
TOKENS = ("tml-aaaaaaaaaaaaaaaaaaaaaa", "tml-bbbbbbbbbbbbbbbbbbbbbb")
TEXT = [5, 9, 2, 33, 60, 7, 7, 21, 40, 3, 18, 11]
ADAM = {"learning_rate": 1e-2, "eps": 1e-3}


class Replies(NamedTuple):
    tokens: list[list[int]]
    behavior_logp: list[list[float]]
    stops: list[int]
    prompt: list[float]


def data_of(fields: Fields, number: int) -> bytes:
    (value,) = fields[number]
    assert isinstance(value, bytes)
    return value


class Client:
    """A tenant with a session, which speaks the format of Tinker's client."""

    def __init__(self, url: str, token: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": token}, timeout=60)
        self.session = self.ask("create_session", tags=[])["session_id"]
        self._numbers = iter(range(1, 1 << 30))

    def ask(self, request: str, /, **body: Any) -> dict[str, Any]:
        answer = self.http.post(request, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait(self, request_id: str) -> Any:
        """Return the result of a request: an object, or the fields of a message."""
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                break
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return decode(answer.content)
        return answer.json()

    def do(self, request: str, /, **body: Any) -> Any:
        return self.wait(self.ask(request, **body)["request_id"])

    def create(self, seed: int = 0, rank: int = RANK, **shape: bool) -> str:
        lora = {"rank": rank, "seed": seed, **shape}
        made = self.do(
            "create_model",
            session_id=self.session,
            model_seq_id=next(self._numbers),
            base_model="tiny",
            lora_config=lora,
        )
        return str(made["model_id"])

    def train(self, model: str, data: Sequence[bytes], loss: str, **options: Any) -> Any:
        body = training(model, next(self._numbers), data, loss, **options)
        answer = self.http.post("forward_backward", content=body)
        assert answer.status_code == 200, answer.text
        return self.wait(answer.json()["request_id"])

    def step(self, model: str, **options: float) -> Any:
        number = next(self._numbers)
        return self.do("optim_step", model_id=model, seq_id=number, adam_params=ADAM | options)

    def save(self, path: str, model: str, name: str) -> str:
        number = next(self._numbers)
        return str(self.do(path, model_id=model, seq_id=number, path=name)["path"])

    def sampler(self, path: str | None) -> str:
        body = {"model_path": path} if path else {"base_model": "tiny"}
        number = next(self._numbers)
        return str(
            self.ask(
                "create_sampling_session",
                session_id=self.session,
                sampling_session_seq_id=number,
                **body,
            )["sampling_session_id"]
        )

    def sample(
        self, sampler: str, prompt: Sequence[int], count: int = 1, **options: Any
    ) -> Replies:
        scores = options.pop("scores", False)
        found = self.do(
            "asample",
            sampling_session_id=sampler,
            seq_id=next(self._numbers),
            num_samples=count,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params=options,
            prompt_logprobs=scores,
        )
        assert set(found) <= {1, 2}, found
        parts = [decode(each) for each in found[1]]
        return Replies(
            [np.frombuffer(data_of(each, 2), "<i4").tolist() for each in parts],
            [np.frombuffer(data_of(each, 3), "<f4").tolist() for each in parts],
            [integers(each[1])[0] for each in parts],
            np.frombuffer(found[2][0], "<f4").tolist() if scores else [],
        )

    def score(self, sampler: str, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(self.sample(sampler, tokens, max_tokens=1, scores=True).prompt)


def tensor(values: Sequence[float], *, integer: bool = False) -> bytes:
    data = np.array(values, "<i8" if integer else "<f4").tobytes()
    return encode((1, data), (3, 2 if integer else 1), (4, encode((0, len(values)))[1:]))


def datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]) -> bytes:
    text = encode((1, encode((1, np.array(tokens, "<i4").tobytes()))))
    given = {"target_tokens": tensor(targets, integer=True)}
    given |= {name: tensor(values) for name, values in inputs.items()}
    return encode((1, text), *((2, encode((1, name), (2, each))) for name, each in given.items()))


def training(  # noqa: PLR0913 - the fields of a request
    model: str,
    number: int,
    data: Sequence[bytes],
    loss: str,
    config: Mapping[str, float] = {},
    forward_only: bool = False,
) -> bytes:
    options: list[tuple[int, Value]] = [
        (5, encode((1, name), (2, value))) for name, value in config.items()
    ]
    return encode(
        (1, model),
        (2, number),
        *((3, each) for each in data),
        (4, loss),
        *options,
        (6, int(forward_only)),
    )


def supervised(tokens: Sequence[int] = TEXT) -> bytes:
    return datum(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1))


def logps_of(output: Any) -> Tensor:
    """Return the log-probabilities of a ForwardBackwardOutput, of all sequences end to end."""
    field = decode(decode(output[2][0])[2][0])
    return torch.from_numpy(np.frombuffer(data_of(decode(field[2][0]), 1), "<f4").copy())


def loss_of(output: Any) -> float:
    return double(decode(output[3][0])[2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    folder = tmp_path_factory.mktemp("saved")
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    served = TinkerServer(
        model, folder, TOKENS, name="tiny", max_rank=RANK, max_context=128, threads=1
    )
    asyncio.run_coroutine_threadsafe(served.__aenter__(), loop).result(120)
    try:
        yield served
    finally:
        asyncio.run_coroutine_threadsafe(served.__aexit__(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def client(server: TinkerServer) -> Iterator[Client]:
    tenant = Client(server.url, TOKENS[0])
    yield tenant
    tenant.ask(f"sessions/{tenant.session}/finish")
    tenant.http.close()


def reference(model: Path, seed: int) -> Policy:
    return Policy.load(model, lora=Lora(RANK, alpha=32.0, seed=seed), device="cpu")


def logps(policy: Policy, tokens: Sequence[int] = TEXT) -> Tensor:
    return policy.logps(Packed(torch.tensor(tokens), (0, len(tokens))), temperature=1.0)


SAMPLED = {
    "logprobs": [-3.0, -4.5, -2.0, -4.0, -3.5, -5.0, -4.0, -4.2, -3.9, -4.1, -4.4],
    "advantages": [1.0, -2.0, 0.5, 0.0, 1.5, -1.0, 2.0, -0.5, 1.0, 1.0, -1.0],
}


def expected_loss(kind: str, logp: Tensor) -> Tensor:
    """Return a loss by its definition, from logp `[N]`."""
    ratio = (logp - torch.tensor(SAMPLED["logprobs"])).exp()
    advantages = torch.tensor(SAMPLED["advantages"])
    clipped = ratio.clamp(0.8, 1.2)
    return {
        "cross_entropy": -logp.sum(),
        "importance_sampling": -(ratio * advantages).sum(),
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages).sum(),
        "cispo": -(clipped.detach() * logp * advantages).sum(),
        "dro": -(logp * advantages - 0.025 * ratio.log() ** 2).sum(),
    }[kind]


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_steps_are_those_of_adamw_on_the_loss_by_definition(
    loss: str, client: Client, model: Path
) -> None:
    """Weights after two steps give the same log-probabilities as a policy trained here."""
    run = client.create(seed=3)
    policy = reference(model, 3)
    trained = [*adapters_of(policy.model).values()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    inputs = SAMPLED if loss != "cross_entropy" else {"weights": [1.0] * 11}
    data = datum(TEXT[:-1], TEXT[1:], **inputs)
    for _ in range(2):
        expected = expected_loss(loss, logps(policy)[1:])
        optimizer.zero_grad()
        expected.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        assert loss_of(client.train(run, [data], loss)) == pytest.approx(
            float(expected.detach()), rel=1e-5
        )
        stepped = client.step(run, weight_decay=0.1, grad_clip_norm=1.0)
        assert stepped["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    sampler = client.sampler(client.save("save_weights_for_sampler", run, "two"))
    found = client.score(sampler, TEXT)
    assert math.isnan(found[0])
    assert float((found[1:] - logps(policy)[1:].detach()).abs().max()) < 1e-4


def test_a_path_names_one_version_for_good(client: Client, server: TinkerServer) -> None:
    run = client.create()
    for _ in range(2):
        client.train(run, [supervised()], "cross_entropy")
        client.step(run)
    path = client.save("save_weights_for_sampler", run, "first")
    sampler = client.sampler(path)
    before = client.score(sampler, TEXT)
    reply = client.sample(sampler, TEXT[:4], max_tokens=20, seed=5, stop=[])
    trained = logps_of(client.train(run, [supervised()], "cross_entropy"))
    assert float((trained - before[1:]).abs().max()) < 1e-5, "the version is what was trained"
    client.step(run)
    after = logps_of(client.train(run, [supervised()], "cross_entropy", forward_only=True))
    assert float((after - before[1:]).abs().max()) > 1e-2
    assert client.score(client.sampler(path), TEXT)[1:].equal(before[1:])
    again = client.sample(client.sampler(path), TEXT[:4], max_tokens=20, seed=5, stop=[])
    assert again == reply and len(reply.tokens[0]) == 20
    scored = client.score(sampler, [*TEXT[:4], *reply.tokens[0]])[4:]
    assert float((scored - torch.tensor(reply.behavior_logp[0])).abs().max()) < 1e-5
    taken = client.do("save_weights_for_sampler", model_id=run, seq_id=10**6, path="first")
    assert "one version for good" in taken["error"] and taken["category"] == "user"


def test_the_base_is_the_model_without_adapters(client: Client, model: Path) -> None:
    sampler = client.sampler(None)
    plain = logps(Policy.load(model, device="cpu"))[1:].detach()
    assert float((client.score(sampler, TEXT)[1:] - plain).abs().max()) < 1e-5
    fresh = client.create(seed=8)
    unchanged = logps_of(client.train(fresh, [supervised()], "cross_entropy", forward_only=True))
    assert float((unchanged - plain).abs().max()) < 1e-5


def test_a_target_may_differ_from_the_next_input(client: Client, model: Path) -> None:
    run = client.create()
    targets = [0, 0, 50, *TEXT[4:], 19]
    data = datum(TEXT, targets, weights=[1.0] * len(TEXT))
    found = logps_of(client.train(run, [data, supervised()], "cross_entropy", forward_only=True))
    policy = Policy.load(model, device="cpu")
    expected = [logps(policy, [*TEXT[: i + 1], target])[-1] for i, target in enumerate(targets)]
    expected += logps(policy)[1:]
    assert float((found - torch.stack(expected).detach()).abs().max()) < 1e-5


def test_two_tenants_at_once_do_not_see_each_other(server: TinkerServer) -> None:
    texts = [TEXT, [*reversed(TEXT)]]

    def play(tenant: int) -> tuple[Client, str, str, Tensor, Replies]:
        client = Client(server.url, TOKENS[tenant])
        run = client.create(seed=tenant)
        for _ in range(6):
            client.train(run, [supervised(texts[tenant])], "cross_entropy")
            client.step(run)
        path = client.save("save_weights_for_sampler", run, "same-name")
        sampler = client.sampler(path)
        reply = client.sample(sampler, TEXT[:4], count=4, max_tokens=30, seed=1, stop=[])
        return client, path, run, client.score(sampler, TEXT), reply

    alone = [play(0), play(1)]
    with ThreadPoolExecutor(2) as threads:
        together = [*threads.map(play, [0, 1])]
    for one, other in zip(alone, together, strict=True):
        assert one[3][1:].equal(other[3][1:]) and one[4].tokens == other[4].tokens
    assert not together[0][3][1:].equal(together[1][3][1:])
    (mine, _, _, _, _), (_, path, run, _, _) = together
    for request, body in (
        ("get_info", {"model_id": run}),
        ("weights_info", {"tinker_path": path}),
        ("optim_step", {"model_id": run, "adam_params": {}}),
        ("save_weights", {"model_id": run}),
        (
            "create_sampling_session",
            {"session_id": mine.session, "sampling_session_seq_id": 99, "model_path": path},
        ),
        ("retrieve_future", {"request_id": f"{run}:create"}),
        ("session_heartbeat", {"session_id": run.partition(":")[0]}),
    ):
        assert mine.http.post(request, json=body).status_code == 404, request
    stolen = mine.http.post("forward_backward", content=training(run, 9, [supervised()], "ppo"))
    assert stolen.status_code == 400, "ppo needs more"
    stolen = mine.http.post(
        "forward_backward", content=training(run, 9, [supervised()], "cross_entropy")
    )
    assert stolen.status_code == 404
    for each, *_ in (*alone, *together):
        each.ask(f"sessions/{each.session}/finish")
        each.http.close()


def test_a_saved_state_continues_as_if_nothing_had_been(client: Client) -> None:
    run = client.create()
    for _ in range(3):
        client.train(run, [supervised()], "cross_entropy")
        client.step(run)
    path = client.save("save_weights", run, "third")
    losses = {}
    for optimizer in (True, False):
        number = 700 + optimizer
        loaded = client.do(
            "load_weights",
            session_id=client.session,
            model_seq_id=number,
            path=path,
            optimizer=optimizer,
        )
        assert loaded["path"] == path
        losses[optimizer] = steps_of(client, f"{client.session}:train:{number}")
    assert losses[True] == steps_of(client, run) != losses[False]
    sampling = client.save("save_weights_for_sampler", run, "s")
    answer = client.http.post(
        "load_weights", json={"model_id": run, "path": sampling, "optimizer": True}
    )
    assert answer.status_code == 400 and "no optimizer state" in answer.text


def steps_of(client: Client, run: str) -> list[float]:
    losses = []
    for _ in range(3):
        losses.append(loss_of(client.train(run, [supervised()], "cross_entropy")))
        client.step(run)
    return losses


def test_saved_versions_outlive_the_service(tmp_path: Path) -> None:
    saved = Saved({"a": torch.randn(3, 2)}, {"exp_avg/a": torch.randn(3, 2)}, steps=7)
    shape = Shape(2, 1, train_mlp=False)
    path = Checkpoints(tmp_path, base=5).write("me", "s:train:0", "weights", "end", saved, shape)
    found, of_shape = Checkpoints(tmp_path, base=5).read("me", path)
    assert of_shape == shape and found.steps == 7
    assert found.adapters["a"].equal(saved.adapters["a"])
    assert found.moments["exp_avg/a"].equal(saved.moments["exp_avg/a"])
    for tenant, base, words in (("other", 5, "there are no weights"), ("me", 6, "another base")):
        with pytest.raises(Refused, match=words):
            Checkpoints(tmp_path, base=base).read(tenant, path)


def test_only_the_last_unnamed_versions_are_kept(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, base=5)
    saved, shape = Saved({"a": torch.ones(1)}), Shape(1, 1)
    paths = [
        kept.write_unnamed("me", "s:train:0", number, saved, shape)
        for number in range(KEPT_UNNAMED + 2)
    ]
    for gone in paths[:2]:
        with pytest.raises(Refused, match=f"the last {KEPT_UNNAMED} are kept"):
            kept.facts("me", gone)
    assert all(kept.facts("me", each).shape == shape for each in paths[2:])
    named = kept.write("me", "s:train:0", "sampler_weights", "mine", saved, shape)
    with pytest.raises(Refused, match="must not begin with 'unnamed-'"):
        kept.write("me", "s:train:0", "sampler_weights", "unnamed-x", saved, shape)
    after_restart = Checkpoints(tmp_path, base=5)
    assert after_restart.facts("me", named).shape == shape
    assert [each.stem for each in tmp_path.rglob("*.safetensors")] == ["mine"]


def test_smaller_ranks_and_chosen_layers_stay_small(client: Client, model: Path) -> None:
    """A run of rank 1 without MLP layers changes the model, but nothing beyond its shape."""
    run = client.create(rank=1, train_mlp=False)
    for _ in range(3):
        client.train(run, [supervised()], "cross_entropy")
        client.step(run)
    info = client.ask("get_info", model_id=run)
    assert info["lora_rank"] == 1 and info["model_name"] == "tiny"
    whole = client.create()
    for _ in range(3):
        client.train(whole, [supervised()], "cross_entropy")
        client.step(whole)
    small, large = (
        loss_of(client.train(each, [supervised()], "cross_entropy", forward_only=True))
        for each in (run, whole)
    )
    start = float(-logps(Policy.load(model, device="cpu"))[1:].detach().sum())
    assert large < small < start


def test_versions_of_other_layers_are_refused(client: Client) -> None:
    """Loaded into a run of all layers, those of the others would be 0 and stay so."""
    path = client.save("save_weights", client.create(train_mlp=False), "attention")
    run = client.create()
    refused = client.do("load_weights", model_id=run, seq_id=1, path=path, optimizer=False)
    assert f"{path} has train_mlp False, and the model True" in refused["error"]


def test_the_ends_of_replies(client: Client, model: Path) -> None:
    sampler = client.sampler(None)
    tokenizer = Policy.load(model, device="cpu").tokenizer
    free = client.sample(sampler, TEXT, count=3, max_tokens=40, seed=2, stop=[])
    assert free.stops == [1, 1, 1] and {len(each) for each in free.tokens} == {40}
    assert len({*map(tuple, free.tokens)}) == 3
    tokens = free.tokens[0]
    word = next(each for each in tokens[20:] if each not in tokens[:20])
    length = tokens.index(word) + 1
    for stop in ([word], [tokenizer.decode([word])]):
        cut = client.sample(sampler, TEXT, max_tokens=40, seed=2, stop=stop)
        assert cut.stops == [0] and cut.tokens[0] == tokens[: len(cut.tokens[0])]
        assert len(cut.tokens[0]) <= length and stop[0] in (
            cut.tokens[0][-1],
            str(tokenizer.decode(cut.tokens[0])).split()[-1],
        )
    greedy = client.sample(sampler, TEXT, max_tokens=3, temperature=0, stop=[])
    assert greedy.behavior_logp == [[0.0, 0.0, 0.0]]


def test_a_request_that_is_sent_twice_is_done_once(client: Client) -> None:
    run = client.create()
    body = training(run, 5, [supervised()], "cross_entropy")
    ids = {client.http.post("forward_backward", content=body).json()["request_id"] for _ in "ab"}
    assert len(ids) == 1
    client.wait(*ids)
    once = client.step(run)["metrics"]["grad_norm"]
    other = client.create()
    client.train(other, [supervised()], "cross_entropy")
    assert client.step(other)["metrics"]["grad_norm"] > 0 and once > 0
    empty = client.do("optim_step", model_id=run, seq_id=77, adam_params={})
    assert "no gradient" in empty["error"] and empty["category"] == "user"


def test_a_killed_engine_is_started_again(client: Client, server: TinkerServer) -> None:
    run = client.create()
    client.train(run, [supervised()], "cross_entropy")
    client.step(run)
    sampler = client.sampler(client.save("save_weights_for_sampler", run, "k"))
    before = client.sample(sampler, TEXT, max_tokens=12, seed=4, stop=[])
    os.kill(server.engine.pid, signal.SIGKILL)
    assert client.sample(sampler, TEXT, max_tokens=12, seed=4, stop=[]) == before


def test_many_versions_share_the_engine(client: Client) -> None:
    """More versions than the engine holds: each reply is that of its own version."""
    run = client.create()
    samplers = []
    for number in range(11):
        client.train(run, [supervised()], "cross_entropy")
        client.step(run)
        samplers.append(client.sampler(client.save("save_weights_for_sampler", run, f"n{number}")))
    with ThreadPoolExecutor(8) as threads:
        replies = [
            *threads.map(
                lambda each: client.sample(each, TEXT, max_tokens=12, seed=4, stop=[]),
                samplers * 2,
            )
        ]
    for sampler, reply in zip(samplers * 2, replies, strict=True):
        scored = client.score(sampler, [*TEXT, *reply.tokens[0]])[len(TEXT) :]
        assert float((scored - torch.tensor(reply.behavior_logp[0])).abs().max()) < 5e-5


def weighted(targets: Sequence[int], weights: Sequence[float]) -> bytes:
    return training("m", 1, [datum([1], targets, weights=weights)], "cross_entropy")


GOOD: dict[str, Any] = {"sampling_params": {}, "seq_id": 0}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("create_model", b"{", "not JSON"),
        ("create_model", {}, "base_model is missing"),
        ("create_model", {"base_model": "other"}, "base_model must be 'tiny', got 'other'"),
        ("create_model", {"base_model": "tiny"}, "lora_config is missing"),
        (
            "create_model",
            {"base_model": "tiny", "lora_config": {"rank": 5}},
            "must be 1 to 4, got 5",
        ),
        ("optim_step", {"model_id": 7}, "model_id must be of type str"),
        ("load_weights", {"path": "tinker://a/weights/b"}, "optimizer is missing"),
        ("weights_info", {"tinker_path": "tinker://a/weights/../../x"}, "a path is tinker://"),
        ("weights_info", {"tinker_path": "tinker://a/weights/.."}, "path must be up to 128"),
        ("forward_backward", b"\xff\xff", "the body is no ForwardBackwardRequest"),
        ("forward_backward", training("m", 1, [], "ppo"), "data is empty"),
        ("forward_backward", training("m", 1, [supervised()], "dpo"), "loss_fn must be one of"),
        ("forward_backward", training("m", 1, [supervised()], "ppo"), "lacks logprobs"),
        ("forward_backward", weighted([1], [math.inf]), "not finite"),
        ("forward_backward", weighted([1, 2], [1.0]), "shape [2]"),
        ("forward_backward", training("m", 1, [supervised()], "ppo", {"x": 1.0}), "no option 'x'"),
        ("nothing", {}, "is not supported"),
    ],
)
def test_a_bad_request_is_one_clear_message(
    path: str, body: Any, words: str, client: Client
) -> None:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client.http.post(path, **content)
    assert 400 <= answer.status_code < 500 and words in answer.json()["error"]["message"]
    assert client.http.get("healthz").json() == {"status": "ok"}


def test_requests_that_cannot_be_sampled_or_trained(client: Client) -> None:
    sampler, run = client.sampler(None), client.create()
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    for change, words in (
        ({"sampling_params": {"top_p": 0.9}}, "top_k and top_p must stay"),
        ({"topk_prompt_logprobs": 3}, "topk_prompt_logprobs is not supported"),
        ({"num_samples": 0}, "num_samples must be between 1 and 1024, got 0"),
        ({"sampling_params": {"temperature": 1e-40}}, "must be 0 or at least 0.001"),
        ({"sampling_params": {"temperature": 10**400}}, "temperature is too large"),
        ({"sampling_params": {"stop": ["x"] * 17}}, "stop must be up to 16 texts"),
        ({"prompt": {"chunks": []}}, "prompt has no tokens"),
        ({"prompt": {"chunks": [{"tokens": [64]}]}}, "the token 64, not one of 0 to 63"),
        ({"prompt": {"chunks": [{"tokens": [1] * 128}]}}, "has 129 tokens, more than 128"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "chunks of type encoded_text"),
    ):
        body = {"sampling_session_id": sampler, "prompt": prompt, **GOOD, **change}
        answer = client.http.post("asample", json=body)
        assert answer.status_code == 400 and words in answer.text, answer.text
    for option in ({"eps": 0.0}, {"learning_rate": 1e300}, {"beta2": 1.0}):
        body = {"model_id": run, "seq_id": 500, "adam_params": ADAM | option}
        answer = client.http.post("optim_step", json=body)
        assert answer.status_code == 400 and "is out of range" in answer.text
    wrong = client.train(run, [datum([64], [1], weights=[1.0])], "cross_entropy")
    assert "data[0] has the token 64" in wrong["error"] and wrong["category"] == "user"
    huge = client.train(run, [datum([5], [1], weights=[3e38])] * 2, "cross_entropy")
    assert 3 in huge, "the loss is computed"
    assert "not finite" in client.step(run)["error"]
    client.train(run, [supervised()], "cross_entropy")
    assert client.step(run)["metrics"]["grad_norm"] > 0, "the run goes on"


def test_a_wrong_token_gets_nothing(client: Client) -> None:
    for headers in ({}, {"x-api-key": "tml-wrong"}, {"authorization": f"Basic {TOKENS[0]}"}):
        for path in ("create_session", "retrieve_future", "nothing"):
            answer = httpx.post(f"{client.http.base_url}{path}", json={}, headers=headers)
            assert answer.status_code == 401 and "token" in answer.text
    assert client.http.get("healthz").status_code == 200


def test_a_flood_waits_or_is_refused_and_ends_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_PENDING", 5)
    sampler = client.sampler(None)
    prompt = {"chunks": [{"tokens": TEXT, "type": "encoded_text"}]}

    def ask(number: int) -> httpx.Response:
        body = {
            "sampling_session_id": sampler,
            "seq_id": 1000 + number,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 100, "stop": []},
            "num_samples": 8,
        }
        return client.http.post("asample", json=body)

    with ThreadPoolExecutor(32) as threads:
        answers = [*threads.map(ask, range(64))]
    statuses = {each.status_code for each in answers}
    assert statuses == {200, 429}
    accepted = [each.json()["request_id"] for each in answers if each.status_code == 200]
    for each in accepted:
        assert len(client.wait(each)[1]) == 8
    assert len(client.sample(sampler, TEXT, max_tokens=3, stop=[]).tokens[0]) == 3


def test_old_results_are_dropped_by_their_size(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "KEPT_BYTES", 1000)
    run = client.create()
    for number in range(10, 14):  # each result has about 400 bytes
        body = training(run, number, [supervised(TEXT * 8)], "cross_entropy")
        client.wait(client.http.post("forward_backward", content=body).json()["request_id"])
    found = [
        client.http.post("retrieve_future", json={"request_id": f"{run}:{number}"}).status_code
        for number in range(10, 14)
    ]
    assert found == [404, 404, 200, 200]


def test_an_error_of_the_service_shows_none_of_its_paths(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/home/operator/saved")

    run = client.create()
    monkeypatch.setattr("unstale.research.tinker.checkpoints.save_file", full)
    answer = client.do("save_weights", model_id=run, seq_id=1, path="end")
    assert answer["category"] == "server" and "OSError" in answer["error"]
    assert "operator" not in answer["error"] and "/home/operator/saved" in caplog.text


def test_a_version_that_the_engine_holds_is_not_read_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = client.sampler(client.save("save_weights_for_sampler", client.create(), "held"))
    first = client.sample(sampler, TEXT, max_tokens=3, seed=1, stop=[])
    monkeypatch.setattr(Checkpoints, "read", None)
    assert client.sample(sampler, TEXT, max_tokens=3, seed=1, stop=[]) == first


def test_damaged_messages_are_refused_and_never_crash(client: Client) -> None:
    draw = Random(7)
    whole = training("m", 1, [supervised()] * 2, "cross_entropy")
    for _ in range(150):
        body = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        cut = bytes(body[: draw.choice([len(body), draw.randrange(len(body))])])
        assert 400 <= client.http.post("forward_backward", content=cut).status_code < 500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0", "--public-host", "10.0.0.1"], "set endpoint.certificate for TLS"),
        (["--host", "nowhere"], "endpoint.host must be an IP address"),
    ],
)
def test_a_wrong_option_is_one_message(
    options: list[str], words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["tinker", str(model), *options])
    said = capsys.readouterr().err
    assert end.value.code and words in said and "Traceback" not in said
