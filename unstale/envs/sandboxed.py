"""The inside of the sandbox: read the job, drop privileges, and execute the program.

`sandbox.py` runs this source in a bare interpreter. The job's file is emptied before the program is
executed, and gets the error if that fails.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER_PID_NET_IPC = 0x78000000
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38


def main(descriptor: int) -> None:
    """Execute the job in the file of this descriptor. Never returns."""
    with open(descriptor, "rb", closefd=False) as file:
        note = json.load(file)
    os.set_inheritable(descriptor, False)
    if (user := note["user"]) is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for name, text in note["files"].items():
        with open(name, "w", encoding="utf-8", errors="replace") as written:
            written.write(text)
    _call("prctl", _PDEATHSIG, signal.SIGKILL)
    if not note["inside"] and os.getppid() != note["parent"]:
        os._exit(1)  # the parent died before this process could be tied to it
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    if note["isolated"]:
        _call("unshare", _NEW_USER_PID_NET_IPC)
        _fork()  # the first process of the new namespace: when it ends, all others are killed
        _fork()
        os.setsid()
    most = {"AS": note["memory_mb"] << 20, "FSIZE": note["file_mb"] << 20, "CPU": note["seconds"]}
    most |= {"CORE": 0, "NOFILE": 256} | ({"NPROC": note["processes"]} if note["processes"] else {})
    for name, value in most.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.ftruncate(descriptor, 0)
    try:
        os.execvp(note["argv"][0], note["argv"])
    except OSError as error:
        os.pwrite(descriptor, str(error).encode(), 0)
        os._exit(127)


def _fork() -> None:
    """Continue as the child. The parent waits, and exits with the child's code."""
    if child := os.fork():
        while (ended := os.wait())[0] != child:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        os._exit(code if code >= 0 else 128 - code)
    _call("prctl", _PDEATHSIG, signal.SIGKILL)


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
