"""Test chat templates that a run chooses instead of the policy's own."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from unstale.cli.main import parse
from unstale.cli.recipe_options import configure
from unstale.cli.resume import config_changes
from unstale.cli.template_checks import run_checks
from unstale.config import SHIPPED_POLICY, ConfigError
from unstale.config.chat_templates import NAMED
from unstale.config.options import stored_config
from unstale.durability.run_folder import plain
from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.model.loading import load_tokenizer
from unstale.model.policy import Policy
from unstale.testing import tiny_policy

BRACKETS = "{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer that has no chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_named_templates_are_continued_exactly(base: Path, name: str) -> None:
    tokenizer = load_tokenizer(base, name)
    tools = ({"type": "function", "function": {"name": "look_up", "parameters": {}}},)
    results = run_checks(Chat(tokenizer, tools), 60)
    assert [result.num_passed for result in results] == [60] * len(results)
    assert not any(result.problems for result in results)


def test_a_tool_needs_neither_parameters_nor_description(base: Path) -> None:
    tools = ({"type": "function", "function": {"name": "look_up"}},)
    text = Chat(load_tokenizer(base, "python_calls"), tools).render([Message("user", "1 + 1?")])
    assert "\nlook_up(): <|im_end|>" in text


def test_the_plain_template_is_paragraphs(base: Path) -> None:
    tokenizer = load_tokenizer(base, "plain")
    messages = [
        Message("system", "Be brief."),
        Message("user", "1 + 1?"),
        Message("assistant", "2"),
        Message("user", "And 2 + 2?"),
    ]
    assert Chat(tokenizer, ()).render(messages) == (
        "Be brief.\n\nUser: 1 + 1?\n\nAssistant:\n2" + tokenizer.eos_token + "\n\n"
        "User: And 2 + 2?\n\nAssistant:\n"
    )


def test_a_policy_without_a_template_is_refused_with_the_option_and_saved_with_the_chosen_one(
    tmp_path: Path,
) -> None:
    tiny_policy().save(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no chat template.*--chat-template plain, chatml"):
        Policy.load(tmp_path / "model", device="cpu")
    with pytest.raises(ConfigError, match=r"chatml needs the tokens <\|im_start\|>.*use plain"):
        Policy.load(tmp_path / "model", device="cpu", chat_template="chatml")
    for wrong, problem in (("{% if %}", "cannot be rendered"), ("{{ 1 }}", "leaves out the text")):
        with pytest.raises(ConfigError, match=problem):
            Policy.load(tmp_path / "model", device="cpu", chat_template=wrong)
    policy = Policy.load(tmp_path / "model", device="cpu", chat_template="plain")
    policy.save(tmp_path / "trained")
    assert (tmp_path / "trained" / "chat_template.jinja").read_text() == NAMED["plain"]
    Policy.load(tmp_path / "trained", device="cpu")


def test_a_file_is_recorded_by_its_text_and_stays_the_same_when_a_run_resumes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(BRACKETS)
    words = ["train", "llm", "--model", "models/mine", "--chat_template"]
    config = configure(parse([*words, str(file)]))
    assert config.chat_template == BRACKETS
    assert stored_config(plain(config)) == config
    with pytest.raises(ConfigError, match="chat_template cannot change from"):
        config_changes(config, configure(parse([*words, "plain"])))
    with pytest.raises(ConfigError, match=r"must be plain, chatml.* got nofile: No such file"):
        configure(parse([*words, "nofile"]))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="no Jinja template"):
        configure(parse([*words, str(tmp_path / "text")]))
