"""Test pictures in sequences of tokens: their keys, their store, and the models that read them.

Two sequences with equal text and different pictures never share a token, in any prefix tree or
cache. A planted store that gives both pictures one number shows that these tests would notice.
"""

import base64
import tracemalloc
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from unstale import pictures
from unstale.builders import load_policy
from unstale.config import ConfigError, EngineConfig, RunConfig
from unstale.engines import SamplingParams, check_request
from unstale.engines.embedded.batcher import Batcher, SampleRequest
from unstale.engines.embedded.worker import build_runner
from unstale.engines.prefixes import hash_blocks
from unstale.envs import EnvError, Image, Message, Turn, tool_schema
from unstale.envs.chat import Chat
from unstale.isolation.wire import read_turn, turn_row
from unstale.model.lora import Lora
from unstale.model.pictures import MAX_BYTES, PictureReader
from unstale.model.policy import Policy
from unstale.model.prefix_tree import MIN_SHARED, Packed, build_prefix_tree
from unstale.pictures import FIRST, PictureError, PictureStore
from unstale.rollout.endpoint.conversation import Call, Conversation, HistoryMessage
from unstale.rollout.endpoint.messages import read_messages
from unstale.rollout.endpoint.responses import read_response
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.endpoint.wire import read_chat
from unstale.testing.pictures import (
    TOWERS,
    draw_digit,
    plain_inputs,
    save_vision_model,
)

ONE, OTHER = (draw_digit(digit, Random(digit)) for digit in (1, 7))
TEXT = "Which digit Which digit Which digit Which digit Which digit Which digit Which digit"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in TOWERS:
        found[kind] = tmp_path_factory.mktemp(kind)
        save_vision_model(kind, found[kind], num_hidden_layers=2)
    return found


@pytest.fixture(scope="module")
def policy(folders: dict[str, Path]) -> Policy:
    return Policy.load(folders["qwen3_vl"], device="cpu")


def reader_of(policy: Policy) -> PictureReader:
    assert policy.pictures
    return policy.pictures.reader


def chat_of(policy: Policy) -> Chat:
    return Chat(policy.tokenizer, (), pictures=reader_of(policy))


def shown(data: bytes, text: str = TEXT) -> tuple[Message, ...]:
    return (Message("user", text, images=(Image(data),)),)


def packed(sequences: list[tuple[int, ...]]) -> Packed:
    tokens = torch.tensor([token for each in sequences for token in each])
    return Packed(tokens, tuple(accumulate(map(len, sequences), initial=0)))


@torch.no_grad()
def plain_logps(policy: Policy, tokens: tuple[int, ...]) -> torch.Tensor:
    assert policy.pictures
    inputs = plain_inputs(policy.model, policy.pictures.store, tokens)
    logits = policy.model(**inputs, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1)


@pytest.mark.costly(cases=4)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", TOWERS)
def test_a_model_with_pictures_has_the_logits_of_transformers(
    kind: str, apart: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if apart:
        monkeypatch.setattr("unstale.model.policy.check_packing", refuse)
        with pytest.warns(RuntimeWarning, match="forward pass of its own"):
            policy = Policy.load(folders[kind], device="cpu")
    else:
        policy = Policy.load(folders[kind], device="cpu")
    assert policy.computes_apart == apart
    first, second = (reader_of(policy).tokens(each) for each in (ONE, OTHER))
    prompt = (3, 4, *first, 5, 6, *second, *(5, 6) * MIN_SHARED)
    sequences = [(*prompt, 7, 8, 9), (*prompt, 9, 8), (3, 4, *second, 5), (3, 4, 5)]
    tree = policy.prefix_tree(packed(sequences))
    assert (tree.num_tokens < len(tree.place)) != apart, "siblings share the prompt"
    with torch.no_grad():
        found = policy.logps(tree, temperature=1.0).split([*map(len, sequences)])
    for tokens, logps in zip(sequences, found, strict=True):
        assert (logps[1:] - plain_logps(policy, tokens)).abs().max() < 1e-5
    assert not any("visual" in name or "vision" in name for name in policy.weights())


def refuse(*_: object) -> None:
    raise ConfigError("it is to be computed apart")


def sampled_errors(policy: Policy, folder: Path, prompts: list[tuple[int, ...]]) -> list[float]:
    """Return the error of `behavior_logp` of replies that one engine samples in turn.

    The first context is the first prompt. Each further one is a prompt with the text that followed
    the prompt before, so that only the prompts differ.
    """
    assert policy.pictures
    runner = build_runner(
        folder,
        dtype="float32",
        max_slots=2,
        max_context=256,
        device="cpu",
        pictures=policy.pictures.store,
    )
    batcher, errors = Batcher(runner, max_slots=2, max_context=256), []
    with torch.inference_mode():
        batcher.load({name: each.clone() for name, each in policy.weights().items()})
    text: tuple[int, ...] = ()
    for number, begin in enumerate(prompts):
        prompt = (*begin, *text)
        batcher.submit(SampleRequest(number, prompt, 6, (), 1.0, seed=number))
        with torch.inference_mode():
            while batcher.has_work:
                replies = batcher.step()
        (reply,) = replies
        text = (*text, *reply.tokens, 4)
        with torch.no_grad():
            whole = policy.logps(packed([(*prompt, *reply.tokens)]), temperature=1.0)
        own = whole[len(prompt) :]
        errors.append(float((own - torch.tensor(reply.behavior_logp)).abs().max()))
    return errors


def test_equal_text_with_other_pictures_never_shares_a_cache(
    policy: Policy, folders: dict[str, Path]
) -> None:
    chat = chat_of(policy)
    one, other, again = (chat.encode_prompt(shown(data)) for data in (ONE, OTHER, ONE))
    assert one == again and len(one) == len(other)
    differ = [index for index, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1]
    pictured = [index for index, token in enumerate(one) if token >= FIRST]
    assert differ == pictured and len(pictured) > 0
    for shared, pair in ((True, [one, again]), (False, [one, other])):
        place = build_prefix_tree(packed(pair), share=True).place.view(2, -1)
        assert bool((place[0, pictured[0] :] == place[1, pictured[0] :]).all()) == shared
    assert len(one) > MIN_SHARED
    assert hash_blocks(one)[-1] != hash_blocks(other)[-1]
    assert max(sampled_errors(policy, folders["qwen3_vl"], [one, other, one, one])) < 1e-5


def test_a_key_without_the_hash_would_be_noticed(
    policy: Policy, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(policy)
    one, other = (chat.encode_prompt(shown(data)) for data in (ONE, OTHER))
    common = Batcher._assign_slot

    def without_hash(self: Batcher, request: SampleRequest, idle: Any) -> Any:
        """Compare contexts as if all pictures had one number."""
        kept, keyed = self._tokens.copy(), [min(token, FIRST) for token in request.tokens]
        np.minimum(self._tokens, FIRST, out=self._tokens)
        slot = common(self, replace(request, tokens=keyed), idle)
        kept[slot] = self._tokens[slot]
        kept[slot, : len(request.tokens)] = request.tokens
        self._tokens[:] = kept
        return slot

    monkeypatch.setattr(Batcher, "_assign_slot", without_hash)
    folder = folders["qwen3_vl"]
    assert max(sampled_errors(policy, folder, [one, one])) < 1e-5, "an equal picture is shared"
    assert max(sampled_errors(policy, folder, [one, other])) > 1e-2


def test_another_picture_begins_another_conversation(policy: Policy) -> None:
    conversation = Conversation(chat_of(policy))
    first = conversation.ask(Call(tuple(map(HistoryMessage, shown(ONE)))))
    answer = HistoryMessage(Message("assistant", "1"))
    first.branch.pieces = [*first.context]
    conversation.add_answer(first.branch, (answer,), ended=True)
    for data, same in ((ONE, True), (OTHER, False)):
        history = (*map(HistoryMessage, shown(data)), answer, HistoryMessage(Message("user", "?")))
        asked = conversation.ask(Call(history))
        assert (asked.branch is first.branch) == same
        (picture,) = {each for piece in asked.context for each in piece.pictures} or {None}
        assert (picture is None) == same
        conversation.retract(asked)


def test_pictures_stand_where_a_message_has_them(policy: Policy) -> None:
    chat = chat_of(policy)
    message = Message("user", "Which digit", images=(Image(ONE, 6), Image(OTHER, 11)))
    assert [*message.parts] == ["Which ", message.images[0], "digit", message.images[1]]
    tokens = chat.encode_prompt([message])
    one, other = (chat.encode_prompt(shown(data)) for data in (ONE, OTHER))
    numbers = [*pictures.numbers_in(tokens)]
    assert numbers == [*pictures.numbers_in(one), *pictures.numbers_in(other)]
    word = policy.tokenizer.convert_tokens_to_ids("digit")
    assert tokens.index(numbers[0]) < tokens.index(word) < tokens.index(numbers[1])
    later = chat.encode_continuation(shown(OTHER), ended=True)
    assert [*pictures.numbers_in(later)] == numbers[1:]
    assert f"<picture {numbers[0]:08x}>" in chat.text(tokens)


def test_a_store_keeps_a_picture_once_and_through_a_crash(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    arrays = {"tokens": np.array([-1, 5]), "pixel_values": np.ones((2, 3), np.float32)}
    digest = "ab" * 32
    number = store.add(digest, arrays)
    assert number >= FIRST and store.add(digest, arrays) == number
    clash = digest[:8] + "cd" * 28  # the number from its hash is taken
    assert store.add(clash, {"tokens": np.array([7])}) == number + 1
    (tmp_path / ".123.safetensors").write_bytes(b"half")
    again = PictureStore()
    again.add("ef" * 32, {"tokens": np.array([9])})
    again.open(tmp_path)
    assert sorted(path.name[0] != "." for path in tmp_path.iterdir()) == [True] * 3
    assert again.find(digest) == number and again.find(clash) == number + 1
    assert again.find("12" * 32) is None and again.find("ef" * 32) is not None
    assert again.read(number)["pixel_values"].tolist() == arrays["pixel_values"].tolist()
    again.require(store.pictures([5, number, number]))
    path = tmp_path / f"{number:08x}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(PictureError, match="is damaged"):
        again.require(store.pictures([number]))
    path.unlink()
    with pytest.raises(PictureError, match="cannot be read"):
        again.read(number)


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "0 bytes are no picture that Pillow reads"),
        (b"GIF89a, or not", "14 bytes are no picture"),
        (ONE[:60], "60 bytes are no picture"),
        (bytes(MAX_BYTES + 1), r"a picture has 20,971,521 bytes, at most 20,971,520"),
    ],
)
def test_a_bad_picture_is_refused_in_one_line(policy: Policy, data: bytes, says: str) -> None:
    with pytest.raises(PictureError, match=says) as error:
        chat_of(policy).encode_prompt(shown(data))
    assert "\n" not in str(error.value)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_read(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unstale.model.pictures.MAX_PIXELS", 255)
    with pytest.raises(PictureError, match="16 x 16 pixels, at most 255"):
        chat_of(policy).encode_prompt(shown(draw_digit(2, Random(99))))


def test_a_grey_picture_that_a_model_would_leave_out_is_refused(folders: dict[str, Path]) -> None:
    policy, data = Policy.load(folders["smolvlm"], device="cpu"), BytesIO()
    reader = reader_of(policy)
    reader._processor.image_processor.image_mean = [128 / 255] * 3
    PIL.Image.new("RGB", (16, 16), (128,) * 3).save(data, "PNG")
    with pytest.raises(PictureError, match="one even grey"):
        reader.tokens(data.getvalue())


def test_a_policy_that_reads_only_text_refuses_a_picture(policy: Policy) -> None:
    chat = Chat(policy.tokenizer, ())
    with pytest.raises(PictureError, match="the policy reads only text: choose a vision-language"):
        chat.encode_prompt(shown(ONE))
    params = SamplingParams(max_tokens=1, stop_tokens=())
    with pytest.raises(ValueError, match="but the model has 0 to 19"):
        check_request([3, FIRST], params, vocab_size=20)
    check_request([3, FIRST], params, vocab_size=20, pictures=True)


@pytest.mark.parametrize(
    "message",
    [
        Message("system", "", images=(Image(ONE),)),
        Message("user", "ab", images=(Image(ONE, 3),)),
        Message("user", "ab", images=(Image(ONE, 2), Image(ONE, 1))),
        Message("user", "ab", images=(ONE,)),  # type: ignore[arg-type]
    ],
)
def test_a_turn_refuses_pictures_that_are_nowhere(message: Message) -> None:
    with pytest.raises(EnvError, match=r"Message\.images must be"):
        Turn((message,))


def test_a_worker_process_sends_pictures() -> None:
    turn = Turn((Message("user", "ab", images=(Image(ONE, 1), Image(OTHER, 2))),))
    assert read_turn(turn_row(turn)) == turn


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


def url(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data}}


def test_content_parts_of_the_endpoint_have_pictures() -> None:
    data = f"data:image/png;base64,{base64.b64encode(ONE).decode()}"
    body = asked({"type": "text", "text": "Which "}, url(data), {"type": "text", "text": "digit"})
    (message,) = read_chat(body, temperature=1.0).call.history
    assert isinstance(message, HistoryMessage)
    assert message.message == Message("user", "Which digit", images=(Image(ONE, 6),))


@pytest.mark.parametrize(
    "part, says",
    [
        (url("https://example.org/cat.png"), "must be a data URL .* the endpoint fetches no pict"),
        (url("data:image/png;base64,%%"), "must be a data URL"),
        ({"type": "image_url"}, r"messages\[0\].content\[0\].image_url is missing"),
        ({"type": "text"}, r"messages\[0\].content\[0\].text is missing"),
        ({"type": "input_audio"}, "only text and image_url are supported"),
    ],
)
def test_other_parts_are_refused(part: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        read_chat(asked(part), temperature=1.0)


DATA = base64.b64encode(ONE).decode()
PARTS: dict[str, Any] = {
    "chat": url(f"data:image/png;base64,{DATA}"),
    "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": DATA},
        "cache_control": {"type": "ephemeral"},
    },
}


def pictured(api: str) -> Call:
    """Return a conversation with a picture in a question, a result of a tool and another one."""
    words = [{"type": "text", "text": each} for each in ("Which ", "digit")]
    picture = PARTS[api]
    question = {"role": "user", "content": [words[0], picture, words[1], picture]}
    if api == "chat":
        function = {"name": "look", "arguments": "{}"}
        called = {"tool_calls": [{"id": "a", "type": "function", "function": function}]}
        rest: list[Any] = [
            {"role": "assistant", **called},
            {"role": "tool", "tool_call_id": "a", "content": [*words, picture]},
            {"role": "user", "content": [picture, words[1]]},
        ]
        return read_chat({"messages": [question, *rest]}, temperature=1.0).call
    if api == "responses":
        words = [{**each, "type": "input_text"} for each in words]
        call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "a"}
        output = {"type": "function_call_output", "call_id": "a", "output": [*words, picture]}
        items = [
            {"role": "user", "content": [words[0], picture, words[1], picture]},
            *(call, output),
            {"role": "user", "content": [picture, words[1]]},
        ]
        return read_response({"input": items}, temperature=1.0).call
    found = {"type": "tool_result", "tool_use_id": "a", "content": [*words, picture]}
    used = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    rest = [
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [found, picture, words[1]]},
    ]
    return read_messages({"messages": [question, *rest]}, temperature=1.0).call


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_pictures_by_another_api_have_the_tokens_of_chat(api: str, policy: Policy) -> None:
    chat, ours, other = chat_of(policy), pictured(api), pictured("chat")
    contexts = [Conversation(chat).ask(call).context for call in (ours, other)]
    assert ours == other and contexts[0] == contexts[1]
    (number,) = pictures.numbers_in(contexts[0][0].tokens)
    size = len(reader_of(policy).tokens(ONE))
    assert contexts[0][0].tokens.count(number) == 4 * size


def test_open_conversations_share_a_picture_and_hold_no_file(policy: Policy) -> None:
    data = BytesIO()
    PIL.Image.frombytes("RGB", (256, 256), Random(0).randbytes(3 << 16)).save(data, "PNG")
    body = asked(url(f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"))
    chat, siblings, answer = chat_of(policy), [], HistoryMessage(Message("assistant", "1"))
    Conversation(chat).ask(read_chat(body, temperature=1.0).call)  # imports and caches
    tracemalloc.start()
    for _ in range(8):
        siblings.append(Conversation(chat))
        place = siblings[-1].ask(read_chat(body, temperature=1.0).call)
        place.branch.pieces.extend(place.context)
        siblings[-1].add_answer(place.branch, (answer,), ended=True)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < len(data.getvalue()), "8 conversations hold less than one file"
    digest = sha256(data.getvalue()).hexdigest()
    found = [each.branches[0].pieces[0] for each in siblings]
    assert all([one.digest for one in piece.pictures] == [digest] for piece in found)  # type: ignore[union-attr]
    more = [*body["messages"], {"role": "assistant", "content": "1"}, *asked()["messages"]]
    place = siblings[0].ask(read_chat({"messages": more}, temperature=1.0).call)
    assert place.branch is siblings[0].branches[0] and not place.fork


def with_template(policy: Policy, old: str, new: str) -> Chat:
    tokenizer = deepcopy(policy.tokenizer)
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    tools = [tool_schema("look", "Look.", {})]
    return Chat(tokenizer, tools, tools_in_prompt=True, pictures=reader_of(policy))


def test_results_with_pictures_that_a_user_has_to_send_keep_their_places(policy: Policy) -> None:
    begin = "{%- for message in messages %}"
    no_tools = "{%- if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}"
    chat = with_template(policy, begin, begin + no_tools)
    asked = (Message("user", "?"), Message("assistant", "!"))
    results = (
        Message("tool", "one", images=(Image(ONE, 3),)),
        Message("tool", "other", images=(Image(OTHER, 0), Image(ONE, 2))),
    )
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert (
        f"user\n<tool_response>\none{mark}\n</tool_response>\n<tool_response>\n{mark}ot{mark}her"
        in chat.render([*asked, *results])
    )


def test_a_template_that_leaves_out_the_picture_of_a_tool_is_refused(policy: Policy) -> None:
    image = "part['type'] == 'image'"
    chat = with_template(policy, image, f"{image} and message['role'] == 'user'")
    Turn((result := Message("tool", "", images=(Image(ONE),)),))
    with pytest.raises(PictureError, match="the chat template writes 0 pictures for the 1 of"):
        chat.encode_continuation([result], ended=True)


def test_adapters_are_of_the_language_model_only(folders: dict[str, Path]) -> None:
    policy = Policy.load(folders["qwen3_vl"], device="cpu", lora=Lora(2))
    assert policy.weights() and all("language_model" in name for name in policy.weights())
    assert {name for name, each in policy.model.named_parameters() if each.requires_grad} == {
        name for name, _ in policy.model.named_parameters() if ".lora_" in name
    }


def test_what_pictures_do_not_support_is_refused_at_the_start(folders: dict[str, Path]) -> None:
    config = RunConfig(
        recipe="x",
        model=str(folders["qwen3_vl"]),
        engine=EngineConfig(backend="vllm", urls="http://localhost:1"),
    )
    with pytest.raises(
        ConfigError, match=r"reads pictures, which needs engine\.backend = embedded"
    ):
        load_policy(config)


def test_pictures_of_a_replayed_text_are_in_the_record(policy: Policy) -> None:
    chat = chat_of(policy)
    tokens = chat.encode_prompt(shown(ONE))
    (picture,) = chat.pictures(tokens)
    assert picture.digest == Image(ONE).digest and picture.number in tokens
