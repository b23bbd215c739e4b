"""Test Claude Code, unmodified, as an agent (`make test-clients`).

It is installed by `npm install -g @anthropic-ai/claude-code`.

It runs headless, with its own tools, in a folder of the test. All that it sends is read, and all
calls of an episode are one conversation with the tokens that were sampled.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.rollout.test_bound_address import Strangers, bound_endpoint
from tests.rollout.test_endpoint import THINKING, chat_of, rest_of
from tests.rollout.test_external import World, own_logp, whole
from tests.rollout.test_messages import LENIENT
from tests.support.certificates import make_certificate
from tests.support.networks import another_network
from unstale.config.run import SHIPPED_POLICY
from unstale.engines import SamplingParams
from unstale.envs.chat import Chat
from unstale.model.loading import load_tokenizer
from unstale.model.pictures import PictureReader
from unstale.pictures import PictureStore, numbers_in
from unstale.records import ContextPiece, Trajectory
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.testing.pictures import draw_digit, save_vision_model

PROGRAM = shutil.which("claude")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="Claude Code is not installed"),
    pytest.mark.usefixtures("forked_children"),
]
BEGIN = "<|im_start|>assistant\n"
SHELL = ["--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", "Use the tool."]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def speak(
    chat: Chat, replies: Sequence[str], tokens: Sequence[int], params: SamplingParams
) -> list[int]:
    """Return the rest of a scripted reply. The conversation so far tells which one."""
    number = chat.text(tokens, whole=True).count(BEGIN) - 1
    return rest_of(replies[number], tokens)


def work(  # noqa: PLR0913 - an agent, its folder and its options
    folder: Path,
    base_url: str,
    task: str,
    seed: int,
    api_key: str,
    *,
    options: Sequence[str] = (),
    enter: Sequence[str] = (),
    certificate: str = "",
) -> float:
    """Let Claude Code do a task in `folder`, with a home of its own. The reward is 1 if it ends.

    `enter` are words before the command. The program trusts the file `certificate`.
    """
    assert PROGRAM
    done = subprocess.run(
        [*enter, PROGRAM, "-p", task, "--permission-mode", "dontAsk", *options],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_AUTH_TOKEN": api_key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "NODE_EXTRA_CA_CERTS": certificate,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.strip() == "It is done.")


def world_of(chat: Chat, replies: Sequence[str], delay: Any = None) -> World:
    room = {"max_turns": 9, "max_context": 1 << 17, "max_completion_tokens": 256}
    world = World(partial(speak, chat, replies), delay, chat=chat, logp=own_logp, **room)
    world.endpoint = RecordingEndpoint(LENIENT)
    return world


def play(
    folder: Path, world: World, agent: Callable[..., Any], replies: Sequence[str]
) -> Trajectory:
    (folder / "home").mkdir()
    trajectory = whole(world.play(agent, ["Make a file."]))
    assert (trajectory.reward, trajectory.num_turns) == (1, len(replies))
    world.check_exact(trajectory)
    return trajectory


def play_here(folder: Path, chat: Chat, replies: Sequence[str], *options: str) -> Trajectory:
    return play(folder, world_of(chat, replies), partial(work, folder, options=options), replies)


def contexts(trajectory: Trajectory, chat: Chat) -> list[str]:
    """Return the texts that the policy read: the prompt, and what followed each reply."""
    read = (piece for piece in trajectory.pieces if isinstance(piece, ContextPiece))
    return [chat.text(piece.tokens) for piece in read]


@pytest.mark.parametrize("thoughts", ["", "Hm.\n</think>\n\n"])
def test_its_shell_runs_the_policys_commands(thoughts: str, tmp_path: Path) -> None:
    chat = chat_of(THINKING if thoughts else "")
    replies = [
        f"{thoughts}I make it. {call('Bash', command='echo 1 | tee made.txt')}",
        f"{thoughts}{call('Bash', command='exit 3')}{call('Bash', command='echo two')}",
        f"{thoughts}It is done.",
    ]
    trajectory = play_here(tmp_path, chat, replies, *SHELL)
    assert (tmp_path / "made.txt").read_text() == "1\n"
    asked, *results = contexts(trajectory, chat)
    assert "\n1\n" in results[0] and "Exit code 3" in results[1] and "two" in results[1]
    assert "Use the tool." in asked and "billing-header" not in asked
    if not thoughts:  # the shipped model's own chat template
        assert 800 < len(trajectory.pieces[0].tokens) < 1000, "docs/your-own-agent.md says 900"


def test_it_is_recorded_exactly_in_another_network_namespace_during_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [
        f"I make it. {call('Bash', command='echo 1 | tee made.txt')}",
        call("Bash", command="cat made.txt"),
        "It is done.",
    ]
    strangers = Strangers(monkeypatch)
    with another_network() as network:
        files = make_certificate(tmp_path, network.address)
        world = world_of(chat_of(), replies, strangers.before_reply)
        world.endpoint = bound_endpoint(files, host=network.address, public_host="", lenient=True)
        agent = partial(work, tmp_path, options=SHELL, enter=network.enter, certificate=files[0])
        trajectory = play(tmp_path, world, strangers.beside(network, agent), replies)
    assert "\n1\n" in contexts(trajectory, world.chat)[2]


def test_a_tool_that_it_searches_is_described_in_the_same_conversation(tmp_path: Path) -> None:
    chat = chat_of()
    search = call("ToolSearch", query="select:WebFetch")
    trajectory = play_here(tmp_path, chat, [search, "It is done."])
    asked, found = contexts(trajectory, chat)
    assert '"name": "WebFetch"' in found and '"name": "WebFetch"' not in asked
    assert 9_000 < len(trajectory.pieces[0].tokens) < 11_000, "docs/your-own-agent.md says 10,000"


def test_a_picture_that_it_reads_is_in_the_record(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    tokenizer = load_tokenizer(SHIPPED_POLICY)
    save_vision_model("qwen3_vl", tmp_path / "model", tokenizer)
    reader = PictureReader(tmp_path / "model", tokenizer, PictureStore())
    path = tmp_path / "digit.png"
    path.write_bytes(draw_digit(7, Random(0)))
    options = ["--tools", "Read", "--allowedTools", "Read", "--system-prompt", "Read it."]
    replies = [call("Read", file_path=str(path)), "It is done."]
    trajectory = play_here(tmp_path, Chat(tokenizer, (), pictures=reader), replies, *options)
    (number,) = numbers_in(trajectory.tokens)
    _, result = (piece for piece in trajectory.pieces if isinstance(piece, ContextPiece))
    assert [picture.number for picture in result.pictures] == [number]
