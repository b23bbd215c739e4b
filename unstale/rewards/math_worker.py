"""The program of a worker process that compares mathematical answers with math-verify.

`unstale.rewards.mathematics` starts it. Each line of its input is a JSON list: expected answer,
reply. For each, it prints `read` once it has read the expected answer, and then 1 or 0. If it
cannot read the expected answer, it prints `unreadable`. Some expressions take hours (9^9^9^9), and
Python cannot interrupt arithmetic of large numbers. So the kernel ends the process if one line
takes too much CPU time, and refuses memory above the limit.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

_DELIMITERS = ("$", r"\boxed", r"\(", r"\[")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
"""Pattern of a word in a text, which a LaTeX command does not match."""


def read_expected(verify: Any, text: str) -> list[Any]:
    """Return the expressions in an expected answer. It is LaTeX, with or without delimiters.

    `verify` is the module math_verify. Only the text after the last `####` counts, as in GSM8K.
    Empty if no expression is found.
    """
    text = last_box(text.rpartition("####")[2].replace(r"\$", "").strip())
    return _formula(verify, text) or list(verify.parse(text, parsing_timeout=None))


def read_reply(verify: Any, text: str) -> list[Any]:
    """Return the expressions in a reply that may be its answer.

    `verify` is the module math_verify.
    """
    text = last_box(text.replace(r"\$", ""))
    is_formula = ("\\" in text or "^" in text) and not _WORD.search(text)
    found = _formula(verify, text) if is_formula else []
    return found or list(verify.parse(text, parsing_timeout=None))


def last_box(text: str) -> str:
    r"""Return the last `\boxed{}` of a text, between `$`. Return the text itself if it has none.

    >>> last_box(r"not \boxed{1}, but \boxed{\frac{1}{2}}, as {x} shows")
    '$\\boxed{\\frac{1}{2}}$'
    """
    start = text.rfind(r"\boxed{")
    depth = 0
    for place in range(start, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and not depth:
            return f"${text[start : place + 1]}$"
    return text


def _formula(verify: Any, text: str) -> list[Any]:
    """Return the expressions in LaTeX without delimiters. Empty if the text has delimiters."""
    if any(mark in text for mark in _DELIMITERS):
        return []
    latex = [verify.LatexExtractionConfig()]
    return list(verify.parse(f"${text}$", latex, fallback_mode="no_fallback", parsing_timeout=None))


def main(cpu_s: float, memory_mb: int) -> None:
    """Answer each line of standard input until it ends.

    `cpu_s` limits the CPU seconds for a line, and `memory_mb` the memory of this process in MB.
    """
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints
    import math_verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        expected, reply = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        golds = read_expected(math_verify, expected)
        print("read" if golds else "unreadable", file=results, flush=True)
        if golds:
            found = read_reply(math_verify, reply)
            is_right = math_verify.verify(golds, found, timeout_seconds=None)
            print(int(is_right), file=results, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
