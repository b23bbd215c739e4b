"""Programs that try to leave the sandbox, and a script that runs them for an ordinary user.

`python -m tests.support.sandbox_attacks FOLDER KIND ISOLATED` prints their results as JSON. It
needs no other package, so that a user can run it with the system's Python.
"""

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path

from unstale.envs import sandbox
from unstale.envs.sandboxed import landlock_version

OUTSIDE = """
import os, sys
from pathlib import Path
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_WRONLY))
        print("opened", path)
    except OSError:
        pass
    for change in (lambda: Path(path).unlink(), lambda: Path(path, "new").touch()):
        try:
            change()
            print("changed", path)
        except OSError:
            pass
open("own", "w").write("x")
os.mkdir("folder")
os.rename("own", "folder/own")
os.truncate("folder/own", 0)
open(os.devnull, "w").write("x")
print("done")
"""
"""Tries to write to each of its arguments, then in its folder."""

NAMESPACES = """
import ctypes, platform, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    print(libc.unshare(flag), ctypes.get_errno(), libc.syscall(clone, flag | 17, 0, 0, 0, 0))
print(libc.syscall(435, 0, 0), ctypes.get_errno())
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.syscall(428, -100, b"/", 1))
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout, end="")
"""
"""Tries to make every kind of namespace and a mount, then a thread and a process."""
NO_NAMESPACES = [*["-1 1 -1"] * 7, "-1 38", "-1 -1", "thread", "child"]

STAYS = """
import os, subprocess, sys
forever = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(forever)
for leave in (os.setsid, lambda: os.setpgid(0, 0)):
    if not os.fork():
        try:
            leave()
        except OSError:
            pass
        os.execv(forever[0], forever)
"""
"""Starts processes that sleep, some of which leave their group."""

SIGNALS = """
import os, sys
for pid in sys.argv[1:]:
    try:
        os.kill(int(pid), 0)
        print("reached", pid)
    except OSError:
        pass
"""


def protected_paths(folder: Path) -> list[str]:
    """Return paths outside of the sandbox that its user may write to, and some of the system."""
    inside = folder / "folder"
    inside.mkdir()
    inside.chmod(0o777)
    file = folder / "file"
    file.touch()
    file.chmod(0o666)
    processes = [f"/proc/{pid}/oom_score_adj" for pid in ("self", os.getpid())]
    system = ["/proc/sys/kernel/core_pattern", "/tmp", "/var/tmp", "/dev/shm"]
    return [str(inside), str(file), *processes, *system]


def alive(marker: str) -> list[int]:
    """Return the ids of processes whose command contains `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if marker.encode() in command and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


async def attack(folder: Path, way: sandbox._Way) -> dict[str, object]:
    """Return the results of the programs in one kind of sandbox, by name."""
    sandbox._way = lambda: way  # type: ignore[assignment]
    limits = sandbox.Limits(seconds=30)
    if way.kind == "bubblewrap" and not shutil.which("bwrap"):
        return {"unavailable": "bwrap is not installed"}
    try:
        await sandbox.run("", limits=limits)
    except sandbox.SandboxError as error:
        return {"unavailable": str(error)}

    async def execute(program: str, *arguments: object) -> str:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        done = await sandbox.run(command, limits=limits)
        return done.stdout + done.stderr

    marker = f"marker-{os.getpid()}-{way.kind}-{way.isolated}"
    return {
        "marker": marker,
        "user": os.getuid(),
        "landlock": landlock_version(),
        "weaknesses": sandbox.weaknesses(),
        "outside": await execute(OUTSIDE, *protected_paths(folder)),
        "namespaces": await execute(NAMESPACES),
        "stays": await execute(STAYS, marker),
        "signals": await execute(SIGNALS, os.getpid(), os.getppid()),
    }


def main(folder: str, kind: str, isolated: str) -> None:
    way = sandbox._Way(kind, isolated == "True")  # type: ignore[arg-type]
    result = asyncio.run(attack(Path(folder), way))
    marker = str(result.get("marker"))
    deadline = time.monotonic() + 60
    while alive(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.stdout.write(json.dumps({**result, "left": alive(marker)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
