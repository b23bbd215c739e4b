"""Write docs/techniques.md: every technique with its formula, options and measured effect.

python -m tools.techniques_page
"""

from collections.abc import Iterator
from pathlib import Path

from tools.options_page import rows_of
from unstale.config.techniques import Entry, Slot, techniques
from unstale.research.recipes import systems
from unstale.research.recipes import techniques as combined
from unstale.research.techniques.catalogue import ROWS

PAGE = Path(__file__).parent.parent / "docs" / "techniques.md"
HEAD = """# Techniques

Change one part of training by a published technique, chosen by name:

```sh
unstale techniques                                        # a list by what you want to change
unstale techniques --all                                  # all papers: state, what is missing
unstale techniques ess_lr                                 # the formula, options and effect of one
unstale train retail --techniques ess_lr                  # one or more, separated by spaces
unstale train retail --techniques ess_lr --ess_lr.base 0.8 # its options are a section of its name
unstale lint retail --techniques ess_lr                   # what it changes in your configuration
```

`--help` and `config.json` have the options of the chosen techniques only. In a file, they are a
table:

```toml
techniques = "ess_lr"

[ess_lr]
base = 0.8
```

Techniques that learn about single tasks need tasks that come again: `--selection.pool 1000` takes
the first 1000 training tasks again and again, each time with other random numbers. Without such a
technique, the tasks of the pool come in turn.

A resumed run keeps its techniques. Their options may change, unless they are named as fixed below.

Each row of `--all` is a paper. It *works* if options turn on what its abstract describes. It works
*partly* if a named part is left out. A *diagnostic* measures what the paper measures. Of an *idea
only*, nothing can be turned on as the paper has it. The command `unstale denoise` has papers about
policies that draw in steps ([denoise.md](denoise.md)).

This page is written by `python -m tools.techniques_page` from the techniques' own declarations.

## At the retail desk

Eight techniques were compared with the plain recipe `retail` at equally many sampled tokens, each
with 5 seeds, 40 steps, and tokens up to 2 and up to 6 versions old
([study](../benchmarks/results/techniques.md), 120 runs, written before they ran). **None
is told apart from the plain recipe**: the tests find differences of 27 points and more. Success of
the plain recipe was 67% and 59%. Mean differences, in points:

| technique | up to 2 versions | up to 6 versions |
|---|---|---|
| `step_groups` | +11 | +13 |
| `ess_lr` (half of the rate alone: +6, +7) | +11 | +2 |
| `replay` | +7 | +3 |
| `allocate` | -1 | +2 |
| `episode_filter` (`clean_success`) | +2 | 0 |
| `beta_sampler` (its pool alone: -2, -5) | -2 | -5 |
| `minpro` (its objective `cispo` alone: -21, -35) | -7 | -8 |
| `baseline` (`shrink`, the same pool) | -13 | -5 |

The effects below are on small examples, where more seeds were affordable.
"""
RECIPES_HEAD = """
## Recipes

These recipes combine techniques, or have the losses of one paper. `unstale lint RECIPE` shows what
each changes.

| recipe | what it does |
|---|---|"""
RECIPES_MEASURED = """
Three were compared with the plain recipe on SmolLM2 at equally many sampled tokens, with three
seeds each ([study](../benchmarks/results/recipes-study.md), written before it ran). **None is told
apart from it**, and `test_time` loses in every seed. Success on running totals and sums, in points:

| recipe | less the plain recipe | 95% interval |
|---|---|---|
| `hard_tasks` | +7 | -49 to +63 |
| `long_horizon` | +2 | -57 to +60 |
| `test_time` | -23 | -87 to +42 |

![Held-out success over tokens: hard_tasks and long_horizon cross the plain recipe, and test_time \
is below it](../benchmarks/results/recipes-study.png)
"""
TITLES: dict[Slot, str] = {
    "sampler": "Which task comes next",
    "allocator": "How many episodes a task gets",
    "strategy": "Where episodes are forked",
    "source": "Groups beside the fresh ones",
    "limiter": "How long an episode may be",
    "reward": "The reward of an episode",
    "filter": "Which episodes are trained on",
    "estimator": "The advantage of an episode",
    "recredit": "The advantage of each turn",
    "shaper": "The advantage of each token",
    "ratio": "The importance ratio",
    "objective": "The loss of each token",
    "distiller": "A teacher",
    "controller": "The size of an optimizer step",
    "diagnostic": "Figures only",
}


def page() -> str:
    """Return the page as Markdown."""
    return HEAD + _recipes() + "".join(_slot(slot, title) for slot, title in TITLES.items())


def _recipes() -> str:
    rows = [
        f"| `{recipe.__name__}` | {str(recipe.__doc__).partition(chr(10))[0]} |"
        for recipe in (*combined.RECIPES, *systems.RECIPES)
    ]
    return "\n".join([RECIPES_HEAD, *rows, RECIPES_MEASURED])


def _slot(slot: Slot, title: str) -> str:
    entries = [entry for entry in techniques().values() if entry.slot == slot]
    if not entries:
        return ""
    return f"\n## {title}\n" + "".join("\n" + "\n".join(_entry(entry)) for entry in entries)


def _entry(entry: Entry) -> Iterator[str]:
    papers = "; ".join(
        f"{row.paper} (row {row.number})" for row in ROWS if row.number in entry.rows
    )
    yield f"### `{entry.name}`\n"
    yield f"{entry.formula}\n"
    yield f"* **From**: {papers or 'no paper'}. The source of the formula: {entry.evidence}."
    yield f"* **Changes**: {', '.join(sorted(entry.changes)) or 'nothing'}."
    yield f"* **Use it if**: {entry.use}"
    yield f"* **Exactness**: {entry.exactness}"
    if entry.needs:
        yield f"* **Needs**: {', '.join(entry.needs)}."
    if entry.fixed:
        names = ", ".join(f"`{option}`" for option in entry.fixed)
        yield f"* **Fixed in a resumed run**: {names}."
    if rows := rows_of(entry.name):
        yield "\n| option | values | default | meaning |\n|---|---|---|---|"
        yield from rows
    yield f"\nMeasured: {entry.measured.strip()}\n"


if __name__ == "__main__":
    text = page()
    if not PAGE.is_file() or PAGE.read_text("utf-8") != text:  # a test may read it meanwhile
        PAGE.write_text(text, encoding="utf-8")
