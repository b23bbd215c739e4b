"""Write the results of a study as Markdown tables and as JSON.

A study compares the same arms (configurations) in several settings.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unstale.analysis.report.compare_tables import (
    UNITS,
    Table,
    points,
    points_with_interval,
    provenance,
    spread,
    write_comparison,
)
from unstale.analysis.report.markup import render
from unstale.analysis.report.study import (
    ALPHA,
    MEASURES,
    SOUGHT,
    Difference,
    Measure,
    StudyResults,
    is_study_folder,
    read_results,
)
from unstale.durability.run_folder import dumps, plain, write_whole
from unstale.observe.words import NONE

TABLES, RESULTS = "study.md", "study.json"
HEADINGS: Mapping[Measure, str] = {
    "steps": "At equal steps",
    "tokens": UNITS["tokens"][0],
    "minutes": UNITS["minutes"][0],
}


def write_tables(folder: Path) -> Path:
    """Write the tables of a comparison, or of a study and each of its settings.

    Return the path of the Markdown page, `compare.md` or `study.md`.
    """
    if not is_study_folder(folder):
        return write_comparison(folder)
    for setting in read_results(folder).settings:
        write_comparison(folder / setting.name)
    return write_results(folder)


def write_results(folder: Path) -> Path:
    """Write `study.md` and `study.json` to the folder of a study. Return the path of the first."""
    study = read_results(folder)
    for name, text in (
        (RESULTS, dumps(_json(study), indent=2)),
        (TABLES, render("study.md", **_values(study))),
    ):
        write_whole(folder / name, text)
    return folder / TABLES


def _values(study: StudyResults) -> dict[str, Any]:
    """Return the values with which the template `study.md` is filled."""
    return {
        "study": study,
        "findings": findings(study),
        "how": _how(study),
        "measures": [(each, HEADINGS[each], _missing(study, each)) for each in MEASURES],
        "differences": partial(differences, study),
        "pooled": partial(pooled, study),
        "remarks": _remarks(study),
        "provenance": _provenance(study),
    }


def _how(study: StudyResults) -> list[str]:
    """Return sentences that explain how the tables of a study are computed."""
    return [
        "Means over seeds with 95% intervals by Student's t. Differences are between runs with the "
        "same seed. A single value has no interval, and neither have values that are all equal.",
        f"Planned differences: {study.num_planned}. Their p-values are adjusted for this number by "
        "Holm's method. It is valid although the arms of a setting share a reference, and it finds "
        "at least what Bonferroni's correction finds. The intervals of planned differences hold "
        "with 95% for all of them together (Bonferroni), because Holm's method has none.",
        "Other differences are exploratory. Their p-values, marked alone, and their 95% intervals "
        "are not adjusted.",
        "If an interval contains 0, the column power has the true difference, in points, that this "
        "number of pairs finds with a probability of 80%, and in parentheses the number of pairs "
        f"that finds {100 * SOUGHT:g} points. Both use the measured spread and the level of the "
        "interval.",
        "Over all settings: the mean over all pairs of an arm, each taken as independent. Settings "
        "with more pairs count more. It is not adjusted for the number of differences.",
    ]


def findings(study: StudyResults) -> list[str]:
    """Return sentences on the planned differences: the significant ones, and the power of the
    others.
    """
    planned = [each for each in study.differences if each.planned and each.paired]
    found = [each for each in planned if each.significant]
    sentences = [
        f"{len(found)} of {study.num_planned} planned differences are significant after Holm's "
        f"correction; {len(planned)} have at least two pairs of runs."
    ]
    for each in found:
        sentences.append(
            f"{each.setting}, {HEADINGS[each.measure].lower()}: {each.arm} less {study.reference}: "
            f"{_difference(each)} points, {_p_equation(each)}."
        )
    unclear = [each for each in planned if not each.significant]
    limits = sorted(each.detectable for each in unclear if each.detectable is not None)
    if limits:
        sentences.append(
            f"{len(limits)} of the planned differences may be 0. Tests find true differences of "
            f"{_size(limits[0])} to {_size(limits[-1])} points with a probability of 80%."
        )
    return sentences


def differences(study: StudyResults, measure: Measure) -> Table:
    """Return a table with a row for each setting and arm: its success and difference from the
    reference.

    An arm is a configuration. Arms are compared after equal amounts of `measure`, such as tokens.
    """
    head = ["setting", "arm", "runs", "held-out success", f"less {study.reference}, points"]
    head += ["p", "power"]
    rows = []
    for each in study.at(measure):
        if each.success is None:
            continue
        rows.append(
            (
                each.setting,
                each.arm,
                _runs(each.success.n, len(each.pairs)),
                spread(each.success),
                _difference(each),
                _p(each),
                _power(each),
            )
        )
    return Table(tuple(head), tuple(rows))


def pooled(study: StudyResults, measure: Measure) -> Table:
    """Return a table of each configuration's mean difference from the reference over several
    settings.
    """
    head = ("arm", "settings", "pairs", f"less {study.reference}, points", "p", "power")
    rows = []
    for each in study.pooled(measure):
        paired, (low, high) = each.paired, each.paired.interval(ALPHA)
        finds = f"{_size(paired.detectable(ALPHA))}" if low <= 0 <= high else NONE
        mean = points_with_interval(paired, ALPHA)
        p = f"{_p_value(paired.p)} alone"
        rows.append((each.arm, f"{len(each.settings)}", f"{paired.n}", mean, p, finds))
    return Table(head, tuple(rows))


def _runs(number: int, pairs: int) -> str:
    """Return the number of runs as text, with the number of pairs if some runs are not paired."""
    return f"{number}" if pairs in (0, number) else f"{number} ({pairs} paired)"


def _difference(each: Difference) -> str:
    """Return a difference in percentage points with its interval, as text."""
    if each.paired is None:
        return points(each.pairs[0]) if each.pairs else NONE
    return points_with_interval(each.paired, each.alpha)


def _power(each: Difference) -> str:
    """Return as text the difference that can be detected, and the number of pairs to detect
    `SOUGHT`.
    """
    if each.detectable is None:
        return NONE
    return f"{_size(each.detectable)} ({each.seeds_needed:,} pairs)"


def _size(share: float) -> str:
    return f"{100 * share:.1f}" if share <= 1 else "over 100"


def _p(each: Difference) -> str:
    if each.p is None:
        return NONE
    p = _p_value(each.p)
    return p if each.planned else f"{p} alone"


def _p_equation(each: Difference) -> str:
    p = _p(each)
    return f"p {p}" if p.startswith("<") else f"p = {p}"


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _missing(study: StudyResults, measure: Measure) -> str:
    """Return a sentence on why no arms are compared by `measure`. Empty if some are."""
    if any(each.success for each in study.at(measure)):
        return ""
    if measure == "steps":
        return "No run has a held-out result."
    return study.settings[0].comparison.not_comparable(measure)


def _remarks(study: StudyResults) -> list[str]:
    """Return reasons to read the results with caution: settings without runs, and unfinished
    runs.
    """
    trials = [trial for each in study.settings for trial in each.comparison.trials]
    num_finished = sum(trial.finished for trial in trials)
    notes = []
    if num_finished < len(trials):
        notes.append(f"{num_finished} of {len(trials)} planned runs finished.")
    if missing := study.num_settings - len(study.settings):
        notes.append(f"{missing} of the study's {study.num_settings} settings have no runs yet.")
    return notes


def _provenance(study: StudyResults) -> list[tuple[str, str]]:
    """Return (name, values) pairs on how results were measured: recipe, tasks, commit, machine,
    versions.
    """
    found: dict[str, dict[str, None]] = {}
    for each in study.settings:
        if not each.comparison.finished:
            continue
        for name, value in provenance(each.comparison):
            found.setdefault(name, {})[value] = None
    return [(name, "; ".join(values)) for name, values in found.items()]


def _json(study: StudyResults) -> Mapping[str, Any]:
    """Return the content of `study.json`: all differences, with their tests and power."""
    fields = ("setting", "arm", "measure", "planned", "success", "pairs", "alpha", "p", "interval")
    more = ("significant", "detectable", "seeds_needed")
    return {
        "name": study.name,
        "reference": study.reference,
        "planned": study.num_planned,
        "commands": study.commands,
        "made": dict(_provenance(study)),
        "settings": {each.name: each.positions for each in study.settings},
        "differences": plain(
            [
                {
                    **{name: getattr(each, name) for name in (*fields, *more)},
                    "difference": each.paired and each.paired.mean,
                    "sd": each.paired and each.paired.sd,
                }
                for each in study.differences
            ]
        ),
        "pooled": {
            measure: {
                each.arm: {
                    "settings": each.settings,
                    "pairs": each.paired.n,
                    "difference": each.paired.mean,
                    "interval": each.paired.interval(ALPHA),
                    "p": each.paired.p,
                }
                for each in study.pooled(measure)
            }
            for measure in MEASURES
        },
    }
