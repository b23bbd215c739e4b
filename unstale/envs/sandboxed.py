"""The code that starts a program inside of the sandbox: drop privileges, then execute it.

`sandbox.py` runs this source in a Python interpreter without other modules. The code reads what to
do from a file, and then empties it. If the program cannot be executed, it writes the error into the
file.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER_PID_NET_IPC = 0x78000000
_PDEATHSIG, _SECCOMP, _NO_NEW_PRIVS = 1, 22, 38
_FILTER_MODE = 2

# System calls to refuse: namespaces, mounts, parts of the kernel with many faults, and memory that
# is not mapped, which the limit of the address space does not count. By machine: the audit number,
# the number of clone, and the calls whose numbers differ between machines.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        56,
        "unshare 272, setns 308, mount 165, umount2 166, pivot_root 155, chroot 161, bpf 321, "
        "add_key 248, request_key 249, keyctl 250, userfaultfd 323, perf_event_open 298, "
        "memfd_create 319, shmget 29, msgget 68",
    ),
    "aarch64": (
        0xC00000B7,
        220,
        "unshare 97, setns 268, mount 40, umount2 39, pivot_root 41, chroot 51, bpf 280, "
        "add_key 217, request_key 218, keyctl 219, userfaultfd 282, perf_event_open 241, "
        "memfd_create 279, shmget 194, msgget 186",
    ),
}
_ON_ALL = (
    "io_uring_setup 425, open_tree 428, move_mount 429, fsopen 430, fsconfig 431, fsmount 432, "
    "fspick 433, mount_setattr 442, memfd_secret 447"
)
# Calls that leave the process group, which is killed at the end of a program without namespaces.
_LEAVE_GROUP = {"x86_64": (109, 112), "aarch64": (154, 157)}
_CLONE3 = 435
_NEW_NAMESPACE = 0x7E020000
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000

# Landlock: its system calls, and the rights to change files by the version that added them.
_CREATE_RULES, _ADD_RULE, _RESTRICT = 444, 445, 446
_GET_VERSION, _BENEATH = 1, 1
_CHANGE = {1: 0x1FF2, 2: 1 << 13, 3: 1 << 14}
_CHANGE_FILE = 1 << 1 | 1 << 14
_ALL_TCP, _SIGNALS_AND_ABSTRACT_SOCKETS = 3, 3


def main(descriptor: int) -> None:
    """Execute the program that the file with this descriptor describes. Never returns."""
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
        os._exit(1)  # the parent ended before this process could be bound to it
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    if note["isolated"]:
        _call("unshare", _NEW_USER_PID_NET_IPC)
        # this is the first process of the new namespace, so all others are killed when it ends
        _fork()
        _fork()
        os.setsid()
    most = {"AS": note["memory_mb"] << 20, "FSIZE": note["file_mb"] << 20, "CPU": note["seconds"]}
    most |= {"CORE": 0, "NOFILE": 256} | ({"NPROC": note["processes"]} if note["processes"] else {})
    for name, value in most.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    _lock_files()
    _filter_system_calls(os.uname().machine, keep_group=not (note["inside"] or note["isolated"]))
    os.ftruncate(descriptor, 0)
    try:
        os.execvp(note["argv"][0], note["argv"])
    except OSError as error:
        os.pwrite(descriptor, str(error).encode(), 0)
        os._exit(127)


def landlock_version() -> int:
    """Return the version of Landlock in the kernel. 0 without it."""
    return max(0, _LIBC.syscall(_CREATE_RULES, None, 0, _GET_VERSION))


def _lock_files() -> None:
    """By the kernel's Landlock, forbid to write, create or remove files outside of this folder.

    Writing to the output and to /dev/null stays allowed. Without Landlock, nothing is forbidden.
    Version 4 also forbids TCP, and version 6 signals to processes outside of the sandbox.
    """
    version = landlock_version()
    if not version:
        return  # `weaknesses` says so
    rights = sum(right for added, right in _CHANGE.items() if added <= version)
    handled = struct.pack("QQQ", rights, _ALL_TCP, _SIGNALS_AND_ABSTRACT_SOCKETS)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _descriptor(_LIBC.syscall(_CREATE_RULES, ctypes.create_string_buffer(handled), size, 0))
    folder, null = os.open(".", os.O_PATH), os.open(os.devnull, os.O_PATH)
    for opened in (folder, null, sys.stdout.fileno(), sys.stderr.fileno()):
        allowed = rights if opened == folder else rights & _CHANGE_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, opened))
        _call("syscall", _ADD_RULE, rules, _BENEATH, rule, 0)
    os.close(folder)
    os.close(null)
    _call("syscall", _RESTRICT, rules, 0)
    os.close(rules)


def _descriptor(number: int) -> int:
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return number


def _filter_system_calls(machine: str, *, keep_group: bool) -> None:
    """Forbid namespaces, mounts and some other system calls, if the kernel can filter calls.

    With `keep_group`, the program cannot leave its process group either. clone3 is reported as
    unknown, since its flags cannot be checked. The C library then uses clone.
    """
    if machine not in _MACHINES:
        return
    audit_number, clone, calls = _MACHINES[machine]
    numbers = [int(call.split()[1]) for call in f"{calls}, {_ON_ALL}".split(", ")]
    numbers += _LEAVE_GROUP[machine] if keep_group else ()
    refused = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    unknown = (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    allowed = (_RETURN, 0, 0, _ALLOW)
    steps = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, audit_number), refused]
    steps += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), refused]
    for number in numbers:
        steps += [(_EQUAL, 0, 1, number), refused]
    steps += [(_EQUAL, 0, 1, _CLONE3), unknown, (_EQUAL, 1, 0, clone), allowed]
    steps += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NEW_NAMESPACE), refused, allowed]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    try:
        _call("prctl", _SECCOMP, _FILTER_MODE, program)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise  # otherwise the kernel has no filters, and `weaknesses` says so


def _fork() -> None:
    """Fork and return in the child. The parent waits, and exits with the child's exit code."""
    if child := os.fork():
        while (ended := os.wait())[0] != child:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        os._exit(code if code >= 0 else 128 - code)
    _call("prctl", _PDEATHSIG, signal.SIGKILL)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
