"""Test that a stranger's model folder is refused in one line, whatever is wrong with it.

No pickle is opened and no file outside the folder is read, whatever an index names. Templates and
configurations of wrong forms end in `ConfigError`, and a template that never ends is interrupted.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from unstale.builders import build_chat, sampling
from unstale.config import SHIPPED_POLICY, ConfigError
from unstale.config.hub import require_model
from unstale.envs import guard
from unstale.envs.registry import build_taskset
from unstale.lint import policy_files
from unstale.model.loading import load_model
from unstale.model.policy import Policy
from unstale.recipes import make_recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(SHIPPED_POLICY, tmp_path / "model"))
    copy.chmod(0o755)
    return copy


class Runs:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def shard(folder: Path, name: str) -> None:
    """Put the weights into a file of this name, which an index names."""
    weights = folder / "model.safetensors"
    names = [*load_file(weights)]
    weights.rename(folder / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["evil.bin", "../outside.safetensors", "x.SAFETENSORS", "a/../b"])
def test_only_the_folders_own_safetensors_are_loaded(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    shard(folder, "model-1.safetensors")
    assert "model.norm.weight" in load_model(folder, torch.float32).state_dict()
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-1.safetensors", name))
    save_file(weights, folder.parent / "outside.safetensors", metadata={"format": "pt"})
    (folder / "evil.bin").write_bytes(pickle.dumps(Runs(folder.parent / "ran")))
    for load in (Policy.load, lambda path: load_model(path, torch.float32)):
        with pytest.raises(ConfigError, match="Only safetensors files in the same folder"):
            load(folder)
    assert not (folder.parent / "ran").exists()


def test_a_configuration_cannot_name_other_weights(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "transformers_weights": "adapter_model.bin"}))
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Runs(folder.parent / "ran")))
    with pytest.raises(ConfigError, match=r"names the weights 'adapter_model.bin'"):
        Policy.load(folder)
    path.write_text(json.dumps(config))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="merge the adapter"):
        Policy.load(folder)
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": "full_attention"},
        {"layer_types": ["nothing"]},
        {"hidden_size": "large"},
        {"num_attention_heads": 0},
        {"vocab_size": [1]},
        {"model_type": ["x"]},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"quantization_config": 3},
        {"rope_parameters": {"rope_type": "\x1b[2J"}},
        {"num_hidden_layers": -1},
        {"architectures": 5},
        {"num_experts": "x"},
        {"text_config": [1]},
    ],
)
def test_an_error_of_a_wrong_configuration_is_one_line(
    folder: Path, change: dict[str, Any]
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    try:
        Policy.load(folder)
    except ConfigError as error:
        assert str(error).startswith("policy: ") and str(error).isprintable()


@pytest.mark.parametrize("text", ["[" * 5000, '{"a":' * 5000, "[]", "null", "{", "\udcff"])
def test_an_error_of_a_file_without_configuration_is_one_line(folder: Path, text: str) -> None:
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        path = folder / name
        kept = path.read_bytes() if path.exists() else None
        path.write_bytes(text.encode(errors="surrogateescape"))
        try:
            Policy.load(folder)
        except ConfigError as error:
            assert str(error).isprintable()
        if kept is not None:
            path.write_bytes(kept)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}{{ ''.format.__globals__ }}", "cannot be read"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot be read"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.5 s"),
    ],
)
def test_templates_that_fail_or_never_end_are_refused(
    template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "TEMPLATE_S", 0.5)
    monkeypatch.setattr(guard, "_TICK_S", 0.1)
    config = replace(make_recipe("calculator"), model="base")
    policy = Policy.load(SHIPPED_POLICY, chat_template="")
    taskset = build_taskset(config.task)
    assert build_chat(config, policy.tokenizer, policy.ends, taskset).stop_tokens, (
        "the folder's own template is used"
    )
    policy.tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=words):
        build_chat(config, policy.tokenizer, policy.ends, taskset)


def test_a_pipe_for_a_configuration_is_not_opened(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert policy_files.positions(folder) is None
    with pytest.raises(ConfigError, match="it has no config"):
        require_model(folder)
