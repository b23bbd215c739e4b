"""Test the numbers of command lines.

Every number of every command has limits: one that is not allowed is refused in one line that names
the option, the value and what is allowed.
"""

import numpy as np
import pytest

from unstale.analysis.commands.plan import workload_of
from unstale.analysis.planner.workload import LogNormal, Workload
from unstale.cli.main import make_parser, parse
from unstale.cli.recipe_options import configure
from unstale.config import ConfigError
from unstale.config.options import options
from unstale.config.techniques import techniques
from unstale.lint import check

BAD = ("-1", "nan", "inf", "1e300", "9" * 20, "9" * 400)
ZERO_IS_VALID = {
    *("--port", "--seed", "--lag", "--alpha", "--beta", "--samples", "--step", "--mistakes"),
    *("--votes", "--distil", "--rounds", "--search", "--price", "--agree", "--attempts"),
    *("--controls", "--lowest-rate", "--highest-rate", "--max-staleness", "--noisy"),
    "--best-weight",
}
NEGATIVE_IS_VALID = {"--beta"}
PLAN = ("plan", "--model", "4B", "--gpus", "8")


def numbers() -> list[tuple[str, str]]:
    """Return the command and name of every argument that is a number."""
    _, verbs = make_parser()
    return [
        (verb, action.option_strings[0])
        for verb, parser in verbs.items()
        for action in parser._actions
        if getattr(action.type, "__name__", "") in ("int", "float")
    ]


@pytest.mark.parametrize(("verb", "option"), numbers())
def test_a_number_of_a_command_has_limits(verb: str, option: str) -> None:
    bad = BAD[1:] if option in NEGATIVE_IS_VALID else BAD
    for text in (*bad, *(() if option in ZERO_IS_VALID else ("0",))):
        with pytest.raises(ConfigError) as caught:
            parse([verb, f"{option}={text}"])
        message = str(caught.value)
        assert message.startswith(f"{option}: must be ") and ", got " in message
        assert len(message) < 150


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--reply 0", "the mean of --reply must be between 1 and 1000000000, got 0"),
        ("--reply 0~0.8", "the mean of --reply must be between 1 and"),
        ("--prompt 0", "the mean of --prompt must be between 1 and"),
        ("--turns 0.5", "the mean of --turns must be between 1 and 10000, got 0.5"),
        ("--answer -1", "--answer must be N, MEAN~SIGMA or"),
        ("--tool-s nan", "--tool-s must be N, MEAN~SIGMA or"),
        ("--tool-s 1e300~1e300<1e301", "with SIGMA at most 10, got '1e300~1e300<1e301'"),
        ("--reply 100~50<1000", "with SIGMA at most 10"),
        ("--prompt 20000", "the prompt must be shorter than the longest episode (16384 tokens)"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(words: str, message: str) -> None:
    chosen = parse([*PLAN, *words.split()])
    with pytest.raises(ConfigError) as caught:
        workload_of(chosen)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_simulation_needs_tokens_to_sample() -> None:
    words = ["workload.reply_tokens=0", "costs.decode=1", "costs.train=1"]
    chosen = parse(["simulate", "--set", *words])
    with pytest.raises(ConfigError, match=r"the mean of workload.reply_tokens must be between 1"):
        chosen.act(chosen)


def test_an_answer_and_a_tool_may_take_nothing() -> None:
    work = workload_of(parse([*PLAN, "--answer", "0", "--tool-s", "0"]))
    assert work.tool_s.draw(np.random.default_rng(0), 2).tolist() == [0.0, 0.0]


def test_a_prompt_that_is_drawn_leaves_room_for_a_reply() -> None:
    work = Workload(prompt_tokens=LogNormal(500, 2.0), max_tokens=600)
    draw = np.random.default_rng(0)
    replies = [turn.reply for _ in range(200) for turn in work.group(draw, 1)[0].turns]
    assert min(replies) == 1


def test_no_number_of_the_configuration_is_too_large_to_be_checked() -> None:
    """Infinity may be allowed. The linter then checks the configuration without an error."""
    refused = set()
    for option in options().values():
        if option.choices or not {int, float} & {*option.kinds}:
            continue
        name = f"--{option.name}"
        chosen = ["--techniques", option.section] if option.section in techniques() else []
        if chosen:
            chosen += ["--selection.pool", "64"]  # some techniques need one
        if option.section == "distil":
            chosen += ["--distil.teacher", "start"]
        if option.section == "bus":
            chosen += ["--bus.load", "runs/earlier", "--objective.placed", "anchor"]
        if option.section.startswith("tree"):
            chosen[1] = "tree tree_advantage"
        if option.section == "opmd":
            chosen += ["--objective.loss_type", "none"]
        for text in ("nan", "1e300", "9" * 400):
            is_infinite = float in option.kinds and text == "9" * 400
            try:
                config = configure(parse(["lint", "llm", *chosen, name, text]))
            except ConfigError as error:
                assert option.name in str(error) and len(str(error)) < 450
            else:
                assert is_infinite
                if check(config).refusals:
                    refused.add(option.name)
    assert "trainer.lr" in refused
