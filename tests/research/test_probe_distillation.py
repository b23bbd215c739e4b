"""Test `unstale probe-distillation`: prefixes of episodes, candidates, figures, and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.support.tiny_runs import EvenEnv, EvenTasks, save_tiny, tiny_run
from unstale.cli import session
from unstale.cli.main import main, parse
from unstale.config import ConfigError, RunConfig, TaskConfig
from unstale.config.options import override
from unstale.durability.journal import Journal
from unstale.envs import Message, Turn
from unstale.model.policy import Policy
from unstale.records import Failure, Sampled, Task, Trajectory
from unstale.research.alignment import (
    cosine,
    forward_kl_direction,
    reverse_kl_direction,
    success_direction,
    teacher_advantage,
)
from unstale.research.probe_distillation import (
    Mean,
    ProbeOptions,
    choose_candidates,
    choose_prefixes,
    probe_distillation,
)
from unstale.rollout.episode import Rollout
from unstale.testing import tiny_policy

ENV = f"{__name__}:OneWordTasks"


class OneWordEnv(EvenEnv):
    """An environment that ends after a reply, and answers by the name that the task set has."""

    async def begin(self) -> Turn:
        return Turn((Message("user", type(self.tasks).greeting),))


class OneWordTasks(EvenTasks):
    """Tasks in which an even word is a success."""

    turns = 1
    greeting = "w4"

    def env(self, task: Task, seed: int) -> OneWordEnv:
        return OneWordEnv(task, self)


def quiet() -> Console:
    return Console(file=StringIO())


def trained(folder: Path, env: str, **options: object) -> RunConfig:
    """Train the tiny policy for two steps, and save a teacher. Return the configuration."""
    save_tiny(folder / "policy")
    teacher = tiny_policy(seed=11)
    teacher.tokenizer.chat_template = Policy.load(folder / "policy").tokenizer.chat_template
    teacher.save(folder / "teacher")
    config = tiny_run(folder / "policy", folder, max_steps=2, task=TaskConfig(env=env))
    config = override(config, {"schedule.group_size": 6, **options})
    session.train(config, console=quiet())
    return config


@pytest.fixture(scope="module")
def one_word(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return a run whose episodes have one sampled token each."""
    folder = tmp_path_factory.mktemp("one_word")
    return trained(folder, ENV, **{"engine.max_completion_tokens": 1})


@pytest.mark.costly
def test_the_figures_of_one_word_are_those_by_enumeration(one_word: RunConfig) -> None:
    """The prompt is the only prefix. A candidate's success rate is 1 if it is an even word."""
    run, teacher = one_word.runs / "run", one_word.runs / "teacher"
    options = ProbeOptions(prefixes=6, rollouts=2, top=3)
    (found,) = probe_distillation(run, str(teacher), one_word, options, console=quiet())
    assert {name: len(each) for name, each in found.figures.items()} == {
        "correct": 6,
        "incorrect": 6,
    }
    with Journal.read(run) as journal:
        (prompt,) = {each.tokens for each in choose_prefixes(journal, 6, Random(0))}
    student, teaching = Policy.load(run / "policy"), Policy.load(teacher)
    both = [
        each.logps_after(prompt, [len(prompt)], temperature=1.0)[0] for each in (student, teaching)
    ]
    (tried,) = choose_candidates(both[0], both[1:], 3)
    words = [student.tokenizer.decode([token]) for token in tried.tokens]
    value = torch.tensor([float(w[1:].isdigit() and int(w[1:]) % 2 == 0) for w in words]).double()
    assert 0 < value.sum() < len(words)
    success = success_direction(tried.student_logp, value)
    for name, direct in (("forward", forward_kl_direction), ("reverse", reverse_kl_direction)):
        expected = float(cosine(success, direct(tried.student_logp, tried.teacher_logp)))
        means = [found.figures[kind][name] for kind in ("correct", "incorrect")]
        assert [each.value for each in means] == pytest.approx([expected] * 2, abs=1e-4)
        assert sum(each.number for each in means) == 6
    gain = float(teacher_advantage(tried.student_logp, tried.teacher_logp, value))
    assert found.figures["correct"]["advantage"].value == pytest.approx(gain, abs=1e-4)
    assert found.figures["correct"]["agreement"].value == pytest.approx(1)
    assert (found.episodes, found.failed) == (6 * 2 * len(words), 0)
    assert found.sampled_tokens == 0  # the candidate is the only token of a reply
    assert found.indifferent == {"correct": 0, "incorrect": 0}
    with Journal.read(run) as journal:
        chosen = choose_prefixes(journal, 6, Random(f"align/{one_word.seed}"))
    rows = found.as_json()["rows"]
    assert [(row["task"], row["episode"], row["position"], row["kind"]) for row in rows] == [
        (each.task.key, each.episode, len(prompt), "correct" if each.success else "incorrect")
        for each in chosen
    ]
    for row in rows:
        rates = {each["token"]: each["success_rate"] for each in row["candidates"]}
        assert rates == dict(zip(tried.tokens, value.tolist(), strict=True))
        logps = [each["teacher_logp"] for each in row["candidates"]]
        assert logps == pytest.approx(tried.teacher_logp.tolist(), abs=1e-4)
        for name in ("forward", "reverse"):
            assert row[name] == pytest.approx(found.figures[row["kind"]][name].value, abs=1e-4)


@pytest.mark.costly
def test_every_token_of_an_episode_is_measured(tmp_path: Path) -> None:
    """Replies have 3 words. After the last one, success is known: all words are even."""
    config = trained(tmp_path, ENV, **{"engine.max_completion_tokens": 3})
    run, teacher = config.runs / "run", str(config.runs / "teacher")
    options = ProbeOptions(prefixes=4, rollouts=2, top=2, positions=1)
    (found,) = probe_distillation(run, teacher, config, options, console=quiet())
    with Journal.read(run) as journal:
        episodes = {each.trajectory.episode: each.trajectory for each in journal.trajectories()}
        thirds = choose_prefixes(journal, 4, Random(2), 3)
        windows = choose_prefixes(journal, 4, Random(2), "windows")
    places: dict[int, list[int]] = {}
    for row in found.rows:
        places.setdefault(row["episode"], []).append(row["position"])
    assert len(places) == 4
    for episode, positions in places.items():
        whole = episodes[episode]
        assert positions == list(range(len(whole) - whole.num_sampled, len(whole)))
    assert {(each.episode, len(each.tokens)) for each in thirds} <= {
        (episode, len(each) - i) for episode, each in episodes.items() for i in (1, 2, 3)
    }
    assert len(thirds) == len({each.episode for each in thirds}) == 4, "every third of 3 is one"
    chosen = {each.episode for each in windows}
    assert len(windows) == sum(1 if episodes[each].num_sampled == 1 else 2 for each in chosen)
    policy = Policy.load(run / "policy")
    last = [row for row in found.rows if row["position"] == len(episodes[row["episode"]]) - 1]
    known = 0
    for row in last:
        whole = episodes[row["episode"]]
        if whole.num_sampled < 3:
            continue
        said = whole.tokens[len(whole) - 3 : -1]
        for each in row["candidates"]:
            words = policy.tokenizer.decode([*said, each["token"]]).split()
            is_even = [int(word[1:]) % 2 == 0 for word in words if word[1:].isdigit()]
            assert each["success_rate"] == float(bool(is_even) and all(is_even))
            known += 1
    assert known > 3
    for kind in ("correct", "incorrect"):
        mine = {row["episode"]: [] for row in found.rows if row["kind"] == kind}
        for row in found.rows:
            if row["kind"] == kind:
                mine[row["episode"]].append(row["advantage"])
        figure = found.figures[kind]["advantage"]
        assert figure.number == len(mine), "an episode counts once"
        assert figure.value == pytest.approx(
            sum(sum(v) / len(v) for v in mine.values()) / len(mine)
        )
    assert sum(row["positions"] for row in found.questions) == len(found.rows)
    assert found.question_table().row_count == len({row["task"] for row in found.rows})


@pytest.mark.costly
def test_contexts_of_one_policy_are_compared_with_the_same_episodes(one_word: RunConfig) -> None:
    """The policy is its own teacher. A text in its prompt makes it another one."""
    run, own = one_word.runs / "run", one_word.runs / "run" / "policy"
    texts = ("", "w2 w4 w6", "w1 w3 w5")
    options = ProbeOptions(prefixes=4, rollouts=2, top=3, contexts=texts)
    found = probe_distillation(run, str(own), one_word, options, console=quiet())
    assert tuple(each.context for each in found) == texts
    assert len({each.episodes for each in found}) == 1, "the episodes are played once"
    plain, even, odd = found
    for each in found:
        kind = each.figures["correct"]
        assert kind["agreement"].value == pytest.approx(1)
        assert kind["student_share"] == plain.figures["correct"]["student_share"]
    assert plain.figures["correct"]["forward"].number == 0, "it is its own teacher: no direction"
    values = [each.figures["correct"]["forward"].value for each in (even, odd)]
    assert all(-1 <= each <= 1 for each in values) and values[0] != values[1]
    with pytest.raises(ConfigError, match="no field 'solution'"):
        wrong = replace(options, contexts=("Solution: {solution}",))
        probe_distillation(run, str(own), one_word, wrong, console=quiet())


@pytest.mark.costly
def test_open_episodes_are_bounded_and_failed_ones_are_a_warning(
    one_word: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group of two episodes at once. Every third rollout fails."""
    num_open, most, started = 0, 0, 0
    play = Rollout.episode

    async def counted(self: Rollout, task: Task, **options: Any) -> Trajectory | Failure:
        nonlocal num_open, most, started
        number, started = started, started + 1
        num_open += 1
        most = max(most, num_open)
        outcome = await play(self, task, **options)
        num_open -= 1
        return Failure(task, "step", "lost") if number % 3 == 0 else outcome

    monkeypatch.setattr(Rollout, "episode", counted)
    changes = {"max_staleness": 0, "groups_per_step": 1, "group_size": 2}
    config = override(one_word, {f"schedule.{name}": value for name, value in changes.items()})
    out = Console(file=StringIO(), width=500)
    options = ProbeOptions(prefixes=2, rollouts=4, top=2)
    (found,) = probe_distillation(
        one_word.runs / "run", str(one_word.runs / "teacher"), config, options, console=out
    )
    assert most == 2 and found.failed == -(-found.episodes // 3)
    assert isinstance(out.file, StringIO) and "of the rollouts failed" in out.file.getvalue()


@pytest.mark.costly
def test_an_environment_that_answers_differently_is_refused(
    one_word: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneWordTasks, "greeting", "w5")
    options = ProbeOptions(prefixes=2, rollouts=2, top=1)
    with pytest.raises(ConfigError, match=r"toy/train/\d+ cannot be played again .*must answer"):
        probe_distillation(
            one_word.runs / "run",
            str(one_word.runs / "teacher"),
            one_word,
            options,
            console=quiet(),
        )


def test_another_tokenizer_a_missing_teacher_and_a_bias_are_refused(
    one_word: RunConfig, tmp_path: Path
) -> None:
    run, options = one_word.runs / "run", ProbeOptions(prefixes=2)
    with pytest.raises(ConfigError, match=r"the tokenizers of base and .* differ"):
        probe_distillation(run, "base", one_word, options, console=quiet())
    with pytest.raises(ConfigError, match="nowhere"):
        probe_distillation(run, str(tmp_path / "nowhere"), one_word, options, console=quiet())
    biased = override(one_word, {"engine.logit_bias": "5=1"})
    with pytest.raises(ConfigError, match=r"not built with engine\.logit_bias"):
        probe_distillation(run, "base", biased, options, console=quiet())


@pytest.mark.parametrize("options", [{"prefixes": 1}, {"rollouts": 3}, {"rollouts": 0}, {"top": 0}])
def test_wrong_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--prefixes must be >= 2, --rollouts even and >= 2"):
        ProbeOptions(**options)
    with pytest.raises(ConfigError, match="--positions must be one, all, windows"):
        ProbeOptions(positions=0)


@pytest.mark.costly
def test_the_command_plays_on_inside_replies_of_several_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained(tmp_path, tiny_run(tmp_path, tmp_path).task.env)
    run = config.runs / "run"
    with Journal.read(run) as journal:
        episodes = {each.trajectory.episode: each.trajectory for each in journal.trajectories()}
        prefixes = choose_prefixes(journal, 12, Random(1))
    assert len({each.episode for each in prefixes}) == 12
    assert any(isinstance(each.pieces[-1], Sampled) for each in prefixes)
    for each in prefixes:
        whole = episodes[each.episode]
        assert whole.tokens[: len(each.tokens)] == each.tokens and len(each.tokens) < len(whole)
        assert each.success == whole.success
    words = ["probe-distillation", str(run), str(tmp_path / "teacher")]
    words += [
        "--task.env",
        config.task.env,
        "--prefixes",
        "4",
        "--rollouts",
        "2",
        "--top",
        "2",
        "--json",
    ]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(words)
    row = json.loads(capsys.readouterr().out)
    assert row["failed"] == 0
    assert 4 * 2 * 2 <= row["episodes"] <= 4 * 2 * 4
    assert row["sampled_tokens"] > 0
    shares = [row["figures"][kind]["student_share"] for kind in ("correct", "incorrect")]
    assert sum(each["number"] for each in shares) == 4
    assert {row["position"] for row in row["rows"]} <= {
        place for whole in episodes.values() for place in range(len(whole))
    }
    for kind in ("correct", "incorrect"):
        of_kind = [each["student_share"] for each in row["rows"] if each["kind"] == kind]
        assert sum(of_kind) / len(of_kind) == pytest.approx(
            row["figures"][kind]["student_share"]["value"]
        )
    (again,) = probe_distillation(
        run,
        str(tmp_path / "teacher"),
        replace(config, name="run"),
        ProbeOptions(prefixes=4, rollouts=2, top=2),
        console=quiet(),
    )
    assert again.sampled_tokens == row["sampled_tokens"]  # the same seeds


@pytest.mark.parametrize(
    ("words", "positions"),
    [
        ((), "one"),
        (("--positions", "one"), "one"),
        (("--positions", "all"), 1),
        (("--positions", "windows"), "windows"),
        (("--positions", "8"), 8),
    ],
)
def test_positions_are_named(words: tuple[str, ...], positions: int | str) -> None:
    chosen = parse(["probe-distillation", "runs/first", "models/teacher", *words])
    assert chosen.positions == positions
    for wrong in ("0", "some", "-1", "1.5"):
        with pytest.raises(ConfigError, match="must be one, all, windows or >= 1"):
            parse(["probe-distillation", "runs/first", "teacher", f"--positions={wrong}"])


def test_candidates_are_possible_for_both_policies() -> None:
    student = torch.tensor([0.1, 0.5, 0.2, 0.2]).log()
    teacher = torch.tensor([0.6, 0.0, 0.1, 0.3]).log()
    (tried,) = choose_candidates(student, [teacher], 2)
    assert sorted(tried.tokens) == [0, 2, 3]  # 1 is impossible for the teacher
    (every,) = choose_candidates(student, [teacher], 9)
    assert sorted(every.tokens) == [0, 2, 3]
    other = torch.tensor([0.1, 0.2, 0.0, 0.7]).log()
    one, two = choose_candidates(student, [teacher, other], 1)
    assert sorted(one.tokens) == sorted(two.tokens) == [0, 3], "all views try the same tokens"


def test_means_have_standard_errors() -> None:
    mean = Mean.of([1.0, float("nan"), 3.0])
    assert (mean.value, mean.error, mean.number) == (2.0, 1.0, 2)
    assert str(Mean.of([])) == "nan ± nan (0)"


def test_the_next_log_probabilities_are_those_of_scored_tokens(
    make: Callable[..., Policy] = tiny_policy,
) -> None:
    from unstale.model.prefix_tree import Packed

    policy, tokens = make(seed=3), (5, 9, 4)
    (rows,) = policy.logps_after(tokens, [3], temperature=0.7)
    assert float(rows.exp().sum()) == pytest.approx(1)
    for token in (1, 8):
        packed = Packed(torch.tensor([*tokens, token]), (0, 4))
        scored = policy.logps(packed, temperature=0.7).detach()[-1]
        assert float(rows[token]) == pytest.approx(float(scored), abs=1e-5)
    with pytest.raises(ValueError, match="at least one token"):
        policy.logps_after((), [0], temperature=1.0)
    at_once = policy.logps_after((*tokens, 8), (3, 4), temperature=0.7)
    assert torch.allclose(at_once[0], rows, atol=1e-5)
    (alone,) = policy.logps_after((*tokens, 8), [4], temperature=0.7)
    assert torch.allclose(at_once[1], alone, atol=1e-5)


def test_the_advantage_of_a_teacher_is_the_gain_of_its_next_token() -> None:
    student, teacher = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    value = torch.tensor([1.0, 0.25])
    assert float(teacher_advantage(student, teacher, value)) == pytest.approx(0.925 - 0.625)
