"""List the models that the gauntlet refused at an earlier commit, and what became of them.

    python -m benchmarks.refusals        # seconds: it reads tables, and runs no model

The tables are those of docs/models.md at the earlier commit, by git, and of
benchmarks/results/gauntlet.md in the checkout. Writes a dated table under benchmarks/results/.
"""

import argparse
import subprocess
from collections.abc import Iterator

from benchmarks import tables

EARLIER = "82de0e01"
"""The last commit at which models that cannot be packed were refused."""
EARLIER_PAGE = "docs/models.md"
PAGE = "benchmarks/results/gauntlet.md"
ABSENT = "not in the table"
LIMITS = (
    ("Llama 4 beyond a chunk", "refused", "apart", "test_length_check.py"),
    ("Phi-3 with longrope beyond its context", "refused", "refused", "test_length_check.py"),
    ("a model that looks ahead", "refused", "refused", "test_apart.py"),
)
"""What no row of the gauntlet has, before and after, and the test in tests/model that shows it."""


def verdicts(page: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each model of the gauntlet's table in a page, with "packed", "apart" or "refused" and
    the reason of a refusal.
    """
    lines = page.partition("<!-- the gauntlet's table")[2].partition("<!-- end of the table")[0]
    head, _, *rows = (line.strip("| ").split(" | ") for line in lines.splitlines() if "|" in line)
    for cells in rows:
        row = dict(zip(head, cells, strict=True))
        _, refused, reason = row["trains"].partition("no: ")
        yield row["model"], ("refused" if refused else row.get("trainer", "packed"), reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--earlier", default=EARLIER, metavar="COMMIT")
    chosen = parser.parse_args()
    command = ["git", "-C", str(tables.ROOT), "show", f"{chosen.earlier}:{EARLIER_PAGE}"]
    shown = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
    before, after = dict(verdicts(shown)), dict(verdicts((tables.ROOT / PAGE).read_text("utf-8")))
    lines = [
        f"From the gauntlet's tables in {PAGE}, at the earlier commit in {EARLIER_PAGE}. "
        "Packed: sequences share a forward pass. Apart: "
        "each has its own. The last rows are limits that no row of the gauntlet has: the page at "
        "the earlier commit names them, and a test in tests/model shows them in the checkout.",
        "",
        *tables.columns("model", f"at {chosen.earlier}", "in this checkout", "reason, or the test"),
    ]
    for name, (now, reason) in after.items():
        earlier, why = before.get(name, (ABSENT, ""))
        lines.append(tables.row(name, earlier, now, reason or why))
    lines += [tables.row(*limit) for limit in LIMITS]
    counts = [sum(each == "refused" for each, _ in found.values()) for found in (before, after)]
    remaining = [name for name, _, now, _ in LIMITS if now == "refused"]
    lines += [
        "",
        f"Of the gauntlet's models, {counts[0]} of {len(before)} were refused at {chosen.earlier}, "
        f"and {counts[1]} of {len(after)} are in this checkout. Limits that remain: "
        f"{', '.join(remaining)}.",
    ]
    tables.write("models", "Models that are refused", lines)


if __name__ == "__main__":
    main()
