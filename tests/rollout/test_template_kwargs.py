"""Test variables of the chat template, such as `enable_thinking`.

They come from the run's configuration, which records and fixes them, or from a request to the
endpoint. Calls with other variables are another branch.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.templates import tokenizer_of
from unstale.builders import build_generator
from unstale.cli.resume import config_changes
from unstale.config import ConfigError, RunConfig
from unstale.config.options import read_file, stored_config
from unstale.durability.run_folder import plain
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.chat import Chat
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.conversation import Conversation
from unstale.rollout.endpoint.schemas import Refused
from unstale.testing import tiny_policy

OFF = '{"enable_thinking": false}'


def test_the_configuration_sets_and_records_them(tmp_path: Path) -> None:
    config = RunConfig(recipe="x", chat_template_kwargs=OFF)
    assert stored_config(json.loads(json.dumps(plain(config)))) == config
    file = tmp_path / "run.toml"
    file.write_text("[chat_template_kwargs]\nenable_thinking = false\n")
    assert read_file(file) == {"chat_template_kwargs": OFF}
    with pytest.raises(ConfigError, match=r"cannot change .* begun with them"):
        config_changes(config, RunConfig(recipe="x"))
    for wrong in ("enable_thinking", "[1]", "{"):
        with pytest.raises(ConfigError, match="chat_template_kwargs must be a JSON object"):
            RunConfig(recipe="x", chat_template_kwargs=wrong)


def test_the_generator_renders_with_them() -> None:
    policy, taskset = tiny_policy(), CalculatorTasks()
    policy.tokenizer = tokenizer_of("glm")
    config = RunConfig(recipe="x", chat_template_kwargs=OFF)
    engine = ScriptedEngine(lambda tokens, params: [])
    chat = build_generator(config, policy, taskset, engine).chat
    assert chat.render([Message("user", "?")]).endswith("<|assistant|>\n<think></think>")
    unread = replace(config, chat_template_kwargs='{"reasoning": "low"}')
    with pytest.raises(ConfigError, match="the chat template does not read 'reasoning'"):
        build_generator(unread, policy, taskset, engine)


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}], **fields}


def test_a_request_sets_them_for_its_branch() -> None:
    tokenizer = tokenizer_of("glm")
    chat = Chat(tokenizer, ())
    conversation = Conversation(chat)
    request = body(chat_template_kwargs={"enable_thinking": False})
    silent = conversation.ask(wire.read_chat(request, temperature=1.0).call)
    usual = conversation.ask(wire.read_chat(body(), temperature=1.0).call)
    texts = [chat.text(place.context[0].tokens, whole=True) for place in (silent, usual)]
    assert texts[0] == f"{texts[1]}\n<think></think>"
    assert usual.fork is not None and usual.fork.difference == "other tools or template variables"
    with pytest.raises(Refused, match="chat_template_kwargs must be an object"):
        wire.read_chat(body(chat_template_kwargs="no"), temperature=1.0)
