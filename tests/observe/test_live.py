"""Test the live display.

- Without a terminal: one plain line per step and phase, without escape sequences or markup, at
  least every `quiet_s` seconds.
- Control characters in a text are shown and never sent.
- Held-out success is green only once it is above its first value.
- On a terminal: a panel that fits 80 columns and 24 lines and shows what waits for what.
- Ctrl-Z shows the cursor.
- The ratios of an approximate route are always marked as approximate.
"""

import io
import os
import pty
import random
import select
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from tests.support.fake_run import FakeClock, fake_config, fake_metrics
from tests.support.waits import LIMIT_S, wait_until
from unstale.observe.live import LiveDisplay, sparkline
from unstale.stop_signals import HIDE_CURSOR, SHOW_CURSOR


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=60, force_terminal=False), out


def shown(display: LiveDisplay, width: int, height: int = 50) -> str:
    console = Console(
        file=io.StringIO(), record=True, width=width, height=height, force_terminal=True
    )
    display.console = console
    console.print(display.panel())
    return console.export_text()


def after_steps(steps: int, route: str = "snapshot_old") -> LiveDisplay:
    clock, rng = FakeClock(), random.Random(0)
    display = LiveDisplay(fake_config(route), console=plain_console()[0], clock=clock)
    display.update({"step": 0, "time_s": 0.0, "eval/success_rate": 0.434})
    for step in range(1, steps + 1):
        clock.now = 6.0 * step
        display.update({"step": step, "time_s": clock.now, **fake_metrics(step, 80, rng)})
    return display


def test_a_step_without_an_advantage_has_no_speed_of_the_trainer() -> None:
    console, out = plain_console()
    with LiveDisplay(fake_config(), console=console, quiet_s=1e6) as display:
        display.update({"step": 1, "trainer/tokens_per_s": 0.0, "reward/mean": -1e-9})
    assert "no advantage, nothing trained" in out.getvalue() and "tok/s" not in out.getvalue()
    assert "reward 0.00" in out.getvalue()
    assert "no advantage" in shown(display, 80) and "-0.00" not in shown(display, 80)


def test_one_plain_line_per_step() -> None:
    console, out = plain_console()
    clock = FakeClock()
    with LiveDisplay(fake_config(), console=console, clock=clock, quiet_s=1e6) as display:
        clock.now = 6.2
        display.update(
            {
                "step": 1,
                "rollout/success_rate": 0.5,
                "reward/mean": 0.51,
                "correction/kept_share": 0.999,
                "schedule/staleness_max": 2,
                "schedule/staleness_bound": 2,
                "engine/sampled_tokens_per_s": 1950.4,
                "trainer/grad_norm": None,
            },
        )
    (line,) = out.getvalue().splitlines()
    assert line == (
        "[  6.2 s] step 1/80 · success 50.0% · reward 0.51 · staleness 2/2 · kept 99.9% · engine "
        "1,950 tok/s · 6.2 s"
    )


def test_nothing_is_read_as_markup() -> None:
    console, out = plain_console()
    with LiveDisplay(fake_config(), console=console, quiet_s=1e6) as display:
        display.note("episode 3 failed: [bold]red[/] :smile: \x1b[2J\nsecond line")
    assert out.getvalue().endswith("episode 3 failed: [bold]red[/] :smile: \\x1b[2J second line\n")


def test_a_phase_is_said_when_it_begins_when_it_ends_and_now_and_then() -> None:
    console, out = plain_console()
    clock = FakeClock()
    display = LiveDisplay(fake_config(), console=console, clock=clock, quiet_s=5.0)
    for done in range(0, 257, 32):
        display.phase("evaluating", done, 256)
        clock.now += 1.0
    said = [line.split("] ")[1] for line in out.getvalue().splitlines()]
    assert said == ["evaluating 0/256", "evaluating 160/256", "evaluating 256/256"]


def test_the_display_says_what_is_waited_for() -> None:
    console, out = plain_console()
    with LiveDisplay(fake_config(), console=console, quiet_s=0.05) as display:
        display.phase("starting the engine")
        display.phase("", detail=lambda: "12 in tools or rewards")
        wait_until(lambda: "..." in out.getvalue(), "a line of the display")
        assert "episodes: 12 in tools or rewards" in shown(display, 80, 24)
        display.phase("held-out tasks", 1, 4, lambda: "3 in tools or rewards")
        assert "held-out tasks 1/4: 3 in tools or rewards" in shown(display, 80, 24)
    assert "... step 1/80 running, episodes: 12 in tools or rewards" in out.getvalue()


def test_a_silence_is_broken_though_nobody_calls() -> None:
    console, out = plain_console()
    with LiveDisplay(fake_config(), console=console, quiet_s=0.05) as display:
        display.update({"step": 3})
        wait_until(lambda: "..." in out.getvalue(), "a line of the display")
    assert "... step 4/80 running" in out.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "unstale-display"]


def test_the_display_ends_with_the_error_of_its_block() -> None:
    console, _ = plain_console()
    with pytest.raises(RuntimeError, match="mine"), LiveDisplay(fake_config(), console=console):
        raise RuntimeError("mine")
    assert not [thread for thread in threading.enumerate() if thread.name == "unstale-display"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40), (160, 50)])
@pytest.mark.parametrize("route", ["snapshot_old", "ewma_prox"])
def test_the_panel_fits_and_nothing_is_cut_off(width: int, height: int, route: str) -> None:
    display = after_steps(40, route)
    display.phase("evaluating 256 held-out tasks", 64, 256)
    text = shown(display, width, height)
    lines = text.rstrip("\n").splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "…" not in text


def test_the_panel_says_what_matters() -> None:
    text = shown(after_steps(40), 100)
    for words in (
        "step 40/80",
        "held-out",
        "43.4%",
        "max 2 of 2",
        "|log D|",
        "|log S|",
        "kept",
        "clipped",
        "tok/s",
        "waits for episodes",
        "is the bottleneck",
        "left",
        "2 episodes failed",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    "color, shares", [(True, (0.4, 0.5)), (False, (0.0, 0.0)), (False, (0.4,))]
)
def test_held_out_is_green_only_if_it_rose(color: bool, shares: tuple[float, ...]) -> None:
    display = LiveDisplay(fake_config(), console=plain_console()[0])
    for step, share in enumerate(shares):
        display.update({"step": step, "eval/success_rate": share})
    out = io.StringIO()
    Console(file=out, width=100, height=50, force_terminal=True).print(display.panel())
    (line,) = [line for line in out.getvalue().splitlines() if "held-out" in line]
    assert ("\x1b[1;32m" in line) is color


@pytest.mark.parametrize(("step", "words"), [(0, "before training"), (50, "step 50")])
def test_a_first_held_out_share_has_its_step(step: int, words: str) -> None:
    """A resumed run may evaluate the step from which it continues."""
    display = LiveDisplay(fake_config(), console=plain_console()[0])
    display.update({"step": step, "eval/success_rate": 0.5})
    (line,) = [line for line in shown(display, 100).splitlines() if "held-out" in line]
    assert words in line


def test_control_characters_are_shown_on_a_terminal_too() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    with LiveDisplay(fake_config(), console=console) as display:
        display.note("failed: \x1b]0;title\x07 \x9b2J")
        display.phase("working on \x1b]0;title\x07")
        display.console.print(display.panel())
    assert "\x1b]" not in out.getvalue() and "\x9b" not in out.getvalue()
    assert "failed: \\x1b]0;title\\x07 \\x9b2J" in out.getvalue()


def test_an_approximate_route_is_marked() -> None:
    assert "* ewma_prox mixes the two" in shown(after_steps(3, "ewma_prox"), 100)
    assert "*" not in shown(after_steps(3), 100)


def test_a_panel_before_anything_happened() -> None:
    display = LiveDisplay(fake_config(), console=plain_console()[0])
    display.phase("starting the engine")
    text = shown(display, 80)
    assert "starting the engine" in text
    assert "step 0/80" in text


def test_numbers_that_are_missing_are_no_numbers() -> None:
    display = LiveDisplay(fake_config(), console=plain_console()[0])
    display.update(
        {
            "step": 1,
            "rollout/success_rate": None,
            "engine/sampled_tokens_per_s": float("nan"),
            "schedule/x": {},
        }
    )
    assert "—" in shown(display, 80)


def test_a_terminal_gets_a_panel_that_stays() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    with LiveDisplay(fake_config(), console=console) as display:
        display.update({"step": 1, "rollout/success_rate": 0.25})
        display.note("a line above")
    assert "25.0%" in out.getvalue()
    assert "a line above" in out.getvalue()


def test_sparkline_averages_down_and_keeps_to_its_range() -> None:
    assert sparkline([0.0, 1.0, 1.0, 1.0], 2, low=0.0, high=1.0) == "▅█"
    assert sparkline([-5.0, 9.0], 2, low=0.0, high=1.0) == "▁█"
    assert sparkline([2.0, 2.0], 2) == "▁▁"


DISPLAY = """
import select
from rich.console import Console
from tests.support.fake_run import fake_config
from unstale.observe.live import LiveDisplay
with LiveDisplay(fake_config("rollout"), console=Console(force_terminal=True)):
    print("shown", flush=True)
    while not select.select([0], [], [], 0.05)[0]:  # Python's handlers run between two calls
        pass
"""


def test_ctrl_z_shows_the_cursor_until_the_run_goes_on() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-c", DISPLAY],
        stdin=theirs,
        stdout=theirs,
        env=environment,
        process_group=0,
    )

    os.close(theirs)

    def read_until(mark: bytes) -> bytes:
        found = b""
        while mark not in found:
            assert select.select([ours], [], [], LIMIT_S)[0], f"no {mark!r} after {found!r}"
            found += os.read(ours, 4096)
        return found

    read_until(b"shown")
    child.send_signal(signal.SIGTSTP)
    read_until(SHOW_CURSOR.encode())
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
    child.send_signal(signal.SIGCONT)
    read_until(HIDE_CURSOR.encode())
    os.write(ours, b"\n")
    read_until(SHOW_CURSOR.encode())
    assert child.wait() == 0
    os.close(ours)
