"""Limits on time and memory for a model's chat template, which is a program from an untrusted
source.
"""

import os
import resource
import signal
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.config import ConfigError

MEMORY_MB = 1024
"""MiB of memory that a process may take in addition for rendering short conversations. Ordinary
templates take less than 1.
"""
CPU_S = 10
"""CPU seconds that rendering short conversations may take. Ordinary templates take 0.01."""
_WALL_S = 3.0 * CPU_S
_TOOL: dict[Any, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
_USER, _REPLY = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
_NO_MEMORY, _NO_DEPTH = 3, 4
"""Exit codes of the child process for a template that needs too much memory, and for one that
recurses endlessly.
"""


def require_small_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ConfigError if the chat template needs too much memory or time, or crashes.

    Short conversations are rendered in a child process with limits. Jinja limits neither memory nor
    time, and nothing can interrupt the allocation by `'%9999999999d' % 1`. Other errors of the
    template are ignored here.
    """
    with warnings.catch_warnings():  # of threads, none of which the child needs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            _render(tokenizer)
        finally:
            os._exit(0)
    ends = time.monotonic() + _WALL_S
    pid = 0
    while not pid and time.monotonic() < ends:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        time.sleep(0 if pid else 0.001)
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        if usage.ru_utime < 1:
            return  # a lock that another thread held at the fork, and no fault of the template
    codes = {
        _NO_MEMORY: f"needs more than {MEMORY_MB:,} MiB of memory",
        _NO_DEPTH: "has a macro that calls itself without an end",
    }
    problem = codes.get(os.waitstatus_to_exitcode(status), "")
    if os.WIFSIGNALED(status):
        is_late = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        problem = f"does not end within {CPU_S} s" if is_late else "crashes the process"
    if problem:
        raise ConfigError(
            f"policy: the chat template in {folder} {problem}, even for three short messages: "
            "choose another one with --chat-template"
        )


def _render(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set limits for this child process and render short conversations in it.

    The process ends with an exit code if the template needs too much memory or recurses endlessly.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    limits = {"AS": size + (MEMORY_MB << 20), "CPU": CPU_S, "CORE": 0}
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for tools, messages, is_prompt in product(
        (None, [_TOOL]), ([_USER], [_USER, _REPLY, _USER]), (False, True)
    ):
        try:
            tokenizer.apply_chat_template(
                messages, tools, tokenize=False, add_generation_prompt=is_prompt
            )
        except MemoryError:
            os._exit(_NO_MEMORY)
        except RecursionError:
            os._exit(_NO_DEPTH)
        except Exception:  # noqa: BLE001 - a template may refuse tools, for example
            continue
