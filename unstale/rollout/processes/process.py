"""One rollout process, seen from the main process: start it, exchange messages, notice its end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from unstale.frames import last_words, outcome
from unstale.rollout.processes.wire import DECODE_EVENTS, Command, Event, Setup, encode, read_frame

SILENT_S = 60.0
"""Seconds without a message after which a rollout process is killed. A live one sends a message
every `TICK_S` seconds.
"""
START_S = 300.0
"""Seconds that a new rollout process has to become ready. It imports torch and opens the task
set.
"""
_KILL_S = 2.0
_POLL_S = 0.01


class RolloutProcess:
    """A child process that runs episodes. `run` handles its events until it ends."""

    def __init__(self, program: Sequence[str], setup: Setup) -> None:
        """Start the process with the command line `program`, followed by the number of a socket.

        `setup` is the first message that it gets.
        """
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._socket, inner = socket.socketpair()
        with inner:
            self._process = subprocess.Popen(
                [*program, str(inner.fileno()), str(os.getpid())],
                pass_fds=[inner.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # the programs that it starts end with it
                env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ},
            )
        self._setup = setup
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[Command] = []
        self._ended_because = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send a command. All commands of one iteration of the event loop go into one frame."""
        if not self._unsent and self._writer is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(command)

    def _flush(self) -> None:
        if self._writer is not None and self._unsent:
            commands, self._unsent = self._unsent, []
            self._writer.write(encode(commands))

    def end(self, reason: str) -> None:
        """Kill the process. `run` then returns `reason`."""
        self._ended_because = self._ended_because or reason
        self._kill()

    async def run(self, handle: Callable[[Event], None]) -> str:
        """Call `handle` with each event from the process. Return why the process ended, once it
        has.
        """
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._unsent.insert(0, self._setup)
            self._flush()
            limit_s = START_S
            while True:
                async with asyncio.timeout(limit_s):
                    frame = await read_frame(reader)
                for event in DECODE_EVENTS(frame):
                    handle(event)
                limit_s = SILENT_S
        except (asyncio.IncompleteReadError, ConnectionError):
            return self._ended_because or await self._why_it_ended()
        except TimeoutError:
            return f"it sent nothing for {limit_s:g} s"
        except msgspec.MsgspecError as error:
            return f"it sent a wrong message: {error}"
        finally:
            self._close()

    async def _why_it_ended(self) -> str:
        """Return a text that says how the process ended, with the last line of its output."""
        for _ in range(round(_KILL_S / _POLL_S)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(_POLL_S)
        code = self._process.poll()
        if code is None:
            return "it closed its connection"
        return f"it ended with {outcome(code)}{last_words(self._output)}"

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> None:
        self._kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._socket.close()
        self._output.close()


def program(module: str) -> list[str]:
    """Return the command line of a process that calls `main(socket, parent)` of this module.

    The process has the same module search path as this one.
    """
    path = [each or os.getcwd() for each in sys.path]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main(*sys.argv[1:])"
    return [sys.executable, "-X", "faulthandler", "-c", code]
