"""Test the routed experts that engines record: embedded, vLLM and SGLang (fakes of their servers).

In float32 they are the experts that the trainer chooses under the same weights. A request may leave
out rows that its caller has. An interrupt waits for rows that are still decoded. The messages of
the embedded engine contain none: they are in files, which are removed when they are read. A server
that records none, or sends nonsense, is refused.
"""

import asyncio
import base64
import copy
import io
import json
import string
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fake_server import FakeServer
from tests.support.fake_sglang import FakeSglang
from tests.support.fake_vllm import FakeVllm
from tests.support.host_engines import LongEngine
from tests.support.waits import LIMIT_S
from unstale.cluster.engine_host import EngineHost, HostOptions, HostReply
from unstale.cluster.weight_objects import arrays
from unstale.engines import (
    Engine,
    EngineDied,
    Reply,
    SamplingParams,
    encoded_experts,
    http,
    remote,
)
from unstale.engines.embedded import engine as embedded
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.embedded.posted_experts import PostedExperts
from unstale.engines.encoded_experts import cut_experts, decode_base64
from unstale.engines.http import Body
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.sglang import SglangEngine
from unstale.engines.servers.vllm import VllmEngine, read_array
from unstale.model.experts import ExpertRecorder
from unstale.model.policy import Policy
from unstale.testing import tiny_policy
from unstale.weights.child_process import Frames, Header
from unstale.weights.codec import file_of

pytestmark = pytest.mark.usefixtures("forked_children")

EXPERTS = 8
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(6, ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    tiny_policy(seed=5, experts=EXPERTS).save(folder)
    return folder


@pytest.fixture(params=["vllm", "sglang"])
def engine(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = EngineOptions(model, dtype="float32", max_context=256, record_experts=True)
    with serve(request.param, tmp_path) as server:
        server.record_experts()
        yield attach(server, options)


def serve(kind: str, folder: Path) -> FakeServer:
    policy = tiny_policy(seed=99, experts=EXPERTS)
    return FakeVllm(folder, policy) if kind == "vllm" else FakeSglang(policy)


def attach(server: FakeServer, options: EngineOptions) -> Engine:
    made = VllmEngine if isinstance(server, FakeVllm) else SglangEngine
    return made(replace(options, url=server.url))


def replies(
    engine: Engine, story: Callable[[], Awaitable[list[Reply]]], policy: Policy | None = None
) -> list[Reply]:
    policy = policy or tiny_policy(seed=5, experts=EXPERTS)

    async def running() -> list[Reply]:
        try:
            async with asyncio.timeout(LIMIT_S):
                await engine.start()
                await engine.load(policy.weights(), 0)
                await engine.resume()
                return await story()
        finally:
            await engine.close()

    return asyncio.run(running())


@torch.no_grad()
def chosen(tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return the experts of the trainer's model."""
    policy = tiny_policy(seed=5, experts=EXPERTS)
    recorder = ExpertRecorder(policy.model)
    policy.model(input_ids=torch.tensor([tokens]), use_cache=False)
    return recorder.take().numpy()


async def ask_thrice(engine: Engine) -> list[Reply]:
    first = await engine.sample(PROMPT, PARAMS)
    text = [*PROMPT, *first.piece.tokens, 7]
    known = replace(PARAMS, known_experts=(0, len(text) - 2))
    other = replace(PARAMS, known_experts=(1, len(text) - 2))  # of another version
    return [first, *[await engine.sample(text, each) for each in (known, other)]]


@pytest.mark.costly
def test_servers_return_the_experts_of_every_token_but_the_last(engine: Engine) -> None:
    check_thrice(replies(engine, partial(ask_thrice, engine)))


def test_routes_are_cut_out_of_long_replies(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def spied(body: Body) -> tuple[Body, memoryview | None]:
        rest, routed = cut_experts(body)
        assert routed is not None
        lengths.append(len(routed))
        return rest, routed

    monkeypatch.setattr(http, "LARGE_BODY_BYTES", 100)
    monkeypatch.setattr(remote, "LARGE_BODY_BYTES", 100)
    monkeypatch.setattr(remote, "cut_experts", spied)
    check_thrice(replies(engine, partial(ask_thrice, engine)))
    assert len(lengths) == 4 and min(lengths) > 2


class AllLayers(ExpertRecorder):
    """A recorder that returns rows of a first layer without a router, too."""

    def take(self) -> torch.Tensor:
        rows = super().take()
        return torch.cat([torch.full_like(rows[:, :1], -1), rows], 1)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_layer_without_a_router_makes_no_row_missing(kind: str, tmp_path: Path) -> None:
    routed = tiny_policy(seed=5, experts=EXPERTS)
    config = copy.deepcopy(routed.model.config)
    config.mlp_only_layers = [0]
    policy, served = (
        Policy(type(routed.model)(config), routed.tokenizer) for _ in ("trained", "served")
    )
    policy.save(tmp_path / "model")
    options = EngineOptions(tmp_path / "model", dtype="float32", record_experts=True)
    with FakeVllm(tmp_path, served) if kind == "vllm" else FakeSglang(served) as server:
        server.recorder = AllLayers(served.model)
        engine = attach(server, options)

        async def story() -> list[Reply]:
            return [await engine.sample(PROMPT, PARAMS)]

        (reply,) = replies(engine, story, policy)
    routed = reply.piece.routed_experts
    assert routed and routed.covered == routed.stop == len(PROMPT) + 5


def check_thrice(given: Sequence[Reply]) -> None:
    first, known, other = given
    text = [*PROMPT, *first.piece.tokens, 7]
    assert first.piece.routed_experts and known.piece.routed_experts and other.piece.routed_experts
    assert first.piece.routed_experts.start == other.piece.routed_experts.start == 0
    assert known.piece.routed_experts.start == len(text) - 2
    for reply, context in ((first, PROMPT), (known, text), (other, text)):
        routed = reply.piece.routed_experts
        assert routed is not None
        expected = chosen([*context, *reply.piece.tokens])[routed.start : -1]
        assert (np.sort(routed.experts) == np.sort(expected)).all()


def test_the_embedded_engine_sends_routes_in_files(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt waits until they are read. A file that nobody reads is removed."""
    engine = EmbeddedEngine(
        EngineOptions(model, dtype="float32", max_context=256, record_experts=True)
    )
    bodies: list[int] = []
    folders: set[Path] = set()
    reading, allowed = threading.Event(), threading.Event()
    take = PostedExperts.take

    class Spied(Frames):
        def feed(self, data: bytes) -> Iterator[tuple[Header, bytearray]]:
            for header, body in super().feed(data):
                if header["op"] == "reply":
                    bodies.append(len(body))
                yield header, body

    def slow_take(posted: PostedExperts, *arguments: Any) -> Any:
        folders.add(posted.folder)
        reading.set()
        assert allowed.wait(60)
        return take(posted, *arguments)

    monkeypatch.setattr(embedded, "Frames", Spied)

    async def story() -> list[Reply]:
        thrice = await ask_thrice(engine)
        monkeypatch.setattr(PostedExperts, "take", slow_take)
        last, cancelled = (
            asyncio.ensure_future(engine.sample(PROMPT, replace(PARAMS, seed=seed)))
            for seed in (1, 2)
        )
        await asyncio.to_thread(reading.wait, LIMIT_S)
        interrupting = asyncio.ensure_future(engine.interrupt())
        await asyncio.wait((interrupting,), timeout=0.3)
        assert not interrupting.done() and not last.done()
        cancelled.cancel()
        allowed.set()
        await interrupting
        assert last.done()
        (folder,) = folders
        assert {path.name for path in folder.iterdir()} == {"lock"}
        return [*thrice, last.result()]

    given = replies(engine, story)
    check_thrice(given[:3])
    assert bodies[:3] == [8 * PARAMS.max_tokens] * 3
    assert not any(folder.exists() for folder in folders)


def test_an_engine_host_sends_few_routes_with_their_reply(model: Path) -> None:
    """More of them are put into Ray's object store (tests/cluster)."""
    options = EngineOptions(model, max_context=256, record_experts=True)
    host = EngineHost(HostOptions(LongEngine, (options,)))

    async def story() -> HostReply:
        await host.start(0)
        await host.stage(0, -1, arrays(file_of({"weight": torch.zeros(2)})))
        await host.load(0)
        await host.resume()
        answer = await host.sample(0, PROMPT, PARAMS)
        await host.close()
        return answer

    answer = asyncio.run(story())
    routed = answer.reply.piece.routed_experts
    assert answer.routed_experts is None and routed is not None
    assert len(routed.experts) == len(PROMPT) + PARAMS.max_tokens - 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_records_nothing_is_refused(model: Path, tmp_path: Path, kind: str) -> None:
    options = EngineOptions(model, dtype="float32", max_context=256, record_experts=True)
    with serve(kind, tmp_path) as server:
        engine = attach(server, options)

        async def story() -> list[Reply]:
            return [await engine.sample(PROMPT, PARAMS)]

        with pytest.raises((EngineDied, ValueError), match="--enable-return-routed-experts"):
            replies(engine, story)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_routes_that_cannot_be_read_end_the_engine(
    model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(model, dtype="float32", max_context=256, record_experts=True)
    with serve(kind, tmp_path) as server:
        server.record_experts()
        engine = attach(server, options)

        async def story() -> list[Reply]:
            rows = torch.zeros(40, 1, 2, dtype=torch.long)
            monkeypatch.setattr(server.recorder, "take", lambda: rows)
            return [await engine.sample(PROMPT, PARAMS)]

        with pytest.raises(EngineDied, match="malformed routed experts"):
            replies(engine, story)


class SlowDecoding(SglangEngine):
    """An engine that decodes experts only when it is allowed to."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.decoding = threading.Event()
        self.allowed = threading.Event()

    def _decode_experts(self, routed: str) -> Any:
        self.decoding.set()
        assert self.allowed.wait(60)
        return super()._decode_experts(routed)


def test_an_interrupt_waits_for_replies_whose_routes_are_decoded(
    model: Path, tmp_path: Path
) -> None:
    """Otherwise a route that scores all pieces of a version would miss one."""
    options = EngineOptions(model, dtype="float32", max_context=256, record_experts=True)
    order: list[str] = []
    with serve("sglang", tmp_path) as server:
        server.record_experts()
        engine = SlowDecoding(replace(options, url=server.url))

        async def story() -> list[Reply]:
            sampling = asyncio.ensure_future(engine.sample(PROMPT, PARAMS))
            sampling.add_done_callback(lambda _: order.append("reply"))
            await asyncio.to_thread(engine.decoding.wait, LIMIT_S)
            interrupting = asyncio.ensure_future(engine.interrupt())
            interrupting.add_done_callback(lambda _: order.append("interrupt"))
            await asyncio.wait((interrupting,), timeout=0.3)
            engine.allowed.set()
            await interrupting
            return [await sampling]

        (reply,) = replies(engine, story)
    assert order == ["reply", "interrupt"] and reply.piece.routed_experts


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    options = EngineOptions(tmp_path, dtype="float32", max_context=256, record_experts=True)

    async def story() -> list[Reply]:
        raise AssertionError("the engine started")

    with pytest.raises(ValueError, match="the policy has no experts"):
        replies(EmbeddedEngine(options), story)


@pytest.fixture(params=["compiled", "without a compiler"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read the experts of replies by compiled code, and without it."""
    if request.param != "compiled":
        monkeypatch.setattr(encoded_experts, "_library", lambda: None)
    return str(request.param)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 3071, 3072, 3073, 3074, 300_000])
def test_base64_of_json_is_decoded(count: int) -> None:
    data = np.random.default_rng(count).integers(0, 256, count, np.uint8).tobytes()
    text = json.dumps(base64.b64encode(data).decode()).encode()
    for written in (text, text.replace(b"/", b"\\/")):
        assert decode_base64(memoryview(written)).tobytes() == data


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    "text",
    [b"null", b"[1]", b'"AB"', b'"AB=C"', b'"A B="', b'"A"', b'"===="', b'"A==="', b'"AB\xc3\xa4"'],
)
def test_what_is_not_base64_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"base64|padding|data|character"):
        decode_base64(memoryview(text))


def test_every_wrong_character_of_base64_is_refused() -> None:
    letters = string.ascii_letters + string.digits + "+/"
    for number in range(256):
        text = b'"AAA' + bytes([number]) + b'AAAA"'
        if chr(number) in letters:
            assert decode_base64(memoryview(text))[2] == letters_value(number)
        else:
            with pytest.raises(ValueError, match=r"base64|padding|data|character|JSON|byte|string"):
                decode_base64(memoryview(text))


def letters_value(character: int) -> int:
    """Return the last byte of `AAA` and this character, decoded."""
    return base64.b64decode(b"AAA" + bytes([character]))[2]


@pytest.mark.parametrize(
    ("before", "routed", "after"),
    [
        (b'{"a": 1, "routed_experts": ', b'"QUJD"', b', "b": [2]}'),
        (b'{"routed_experts" \n:\t', b'""', b" }"),
        (b'["routed_experts", {"routed_experts":', b'"QUJD"', b"}]"),
        (b'{"a": "\\"routed_experts\\": \\"AA\\"", "routed_experts":', b'"QUJD"', b"}"),
    ],
)
def test_routes_are_cut_out_of_a_reply(before: bytes, routed: bytes, after: bytes) -> None:
    rest, found = cut_experts(before + routed + after)
    assert rest == before + b'""' + after
    assert found == routed
    json.loads(bytes(rest))


@pytest.mark.parametrize(
    "body",
    [
        b'{"routed_experts": null}',
        b'{"routed_experts": [1, "QUJD"]}',
        b'{"routed_experts": "QU\\/D"}',
        b'[{"routed_experts": "QUJD"}, {"routed_experts": "QUJD"}]',
        b'[{"routed_experts": "QUJD"}, {"routed_experts": null}]',
        b'{"prompt_routed_experts": "QUJD"}',
        b'"routed_experts"',
        b'"routed_experts":',
        b'"routed_experts": "QUJD',
        b"",
    ],
)
def test_routes_that_cannot_be_cut_out_stay_in_the_reply(body: bytes) -> None:
    assert cut_experts(body) == (body, None)


def test_without_a_compiler_routes_stay_in_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_experts, "_library", lambda: None)
    body = b'{"routed_experts": "QUJD"}'
    assert cut_experts(body) == (body, None)


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> np.ndarray:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return np.frombuffer(file.getvalue(), np.uint8)


def altered(old: bytes, new: bytes) -> np.ndarray:
    """Return a NumPy file whose header is changed."""
    file = npy(np.zeros((2, 3, 4), np.int16)).tobytes().replace(old, new, 1)
    return np.frombuffer(file, np.uint8)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_numpy_file_is_read(version: tuple[int, int], order: Any) -> None:
    array = np.asarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4), order=order)
    found = read_array(npy(array, version))
    assert found.dtype == array.dtype and (found == array).all()


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (npy(np.zeros((2, 3, 4), np.int16))[:-1], "buffer is smaller"),
        (altered(b"(2, 3, 4)", b"(9**99, )"), "malformed node"),
        (altered(b"(2, 3, 4)", b"(2, 3,-4)"), r"shape \(2, 3, -4\)"),
        (altered(b"(2, 3, 4)", b"(9999999)"), "header|shape"),
        (altered(b"(2, 3, 4)", b"(9, 9, 9)"), r"shape \(9, 9, 9\)"),
        (altered(b"}", b"{"), "header"),
        (npy(np.zeros(3)), "of float64, not of integers"),
        (npy(np.zeros(3, "U2")), "not of integers"),
        (npy(np.zeros(3), (3, 0)), r"a NumPy file of version \(3, 0\)"),
        (npy(np.array([None])), "of object, not of integers"),
        (np.zeros(100, np.uint8), "magic"),
    ],
)
def test_other_bytes_than_a_numpy_file_are_refused(file: np.ndarray, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_array(file)
