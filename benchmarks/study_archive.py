"""Keep the finished runs of a study in one small file, and restore them to continue the study.

    python -m benchmarks.study_archive pack runs/levels benchmarks/results/levels.tar.xz
    python -m benchmarks.study_archive unpack benchmarks/results/levels.tar.xz runs/levels

The archive has what the pages of a study read: plans, configurations, and those columns and events
from which success is computed. `unstale compare` takes such runs for finished and starts the rest,
so machines can take turns. Weights and journals are not kept: these runs can be compared, but not
looked at. An archive is only replaced by one that has its runs, too.
"""

import argparse
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import CONSOLE
from unstale.analysis.report.compare import LAUNCHES, PLAN, SERIES, TOKENS, ended
from unstale.config import ConfigError
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS, dumps, read_jsonl

COLUMNS = ("step", "time_s", "eval/success_rate", TOKENS, "trainer/action_tokens", *SERIES)
KINDS = ("stopped", "eval", "ewma_reset")


def pack(study: Path, archive: Path) -> int:
    """Write the finished runs of a study's folder into an archive. Return their number.

    Equal folders give equal archives. Raises ConfigError if the folder has no finished run, or
    lacks one that the archive has.
    """
    runs = [run.parent for run in sorted(study.glob(f"*/*/{CONFIG}"))]
    finished = [run for run in runs if ended(run)[0] == "finished"]
    if not finished:
        raise ConfigError(f"{study} has no finished runs")
    names = {run.relative_to(study) for run in finished}
    if archive.exists():
        with tarfile.open(archive) as file:
            lost = sorted(each for each in _runs_in(file) if each not in names)
        if lost:
            raise ConfigError(
                f"{study} lacks {len(lost)} runs of {archive}, such as {lost[0]}: unpack it first"
            )
    new = archive.with_name(f".{archive.name}.new")
    with tarfile.open(new, "w:xz", preset=9) as file:
        for path in [study / PLAN, *sorted(study.glob(f"*/{PLAN}"))]:
            _add(file, path.relative_to(study), path.read_text("utf-8"))
        for path in sorted(study.glob(f"*/{LAUNCHES}")):
            setting = path.parent.relative_to(study)
            rows = [row for row in read_jsonl(path) if setting / str(row["run"]) in names]
            _add(file, path.relative_to(study), _lines(rows))
        for run in finished:
            folder = run.relative_to(study)
            _add(file, folder / CONFIG, (run / CONFIG).read_text("utf-8"))
            _add(file, folder / METRICS, _lines(_columns(run)))
            _add(file, folder / EVENTS, _lines(_events(run)))
    new.replace(archive)
    return len(finished)


def unpack(archive: Path, study: Path) -> int:
    """Restore the runs of an archive in a study's folder. Return their number.

    Raises ConfigError if the folder already has runs: they could be newer.
    """
    if any(study.glob(f"*/*/{CONFIG}")):
        raise ConfigError(f"{study} already has runs; move it away, or go on in it")
    with tarfile.open(archive) as file:
        file.extractall(study, filter="data")
        return len(_runs_in(file))


def _runs_in(file: tarfile.TarFile) -> list[Path]:
    """Return the folders of the runs in an archive."""
    return [Path(name).parent for name in file.getnames() if Path(name).name == CONFIG]


def _columns(run: Path) -> Iterator[dict[str, Any]]:
    for row in read_jsonl(run / METRICS):
        yield {name: row[name] for name in COLUMNS if name in row}


def _events(run: Path) -> Iterator[dict[str, Any]]:
    waited = False
    for event in read_jsonl(run / EVENTS):
        lane = event.get("lane") if event.get("kind") == "span" else None
        if event.get("kind") in KINDS or lane == "eval" or (lane == "wait" and not waited):
            waited |= lane == "wait"
            yield dict(event)


def _lines(rows: Sequence[Any] | Iterator[Any]) -> str:
    return "".join(dumps(row) + "\n" for row in rows)


def _add(file: tarfile.TarFile, path: Path, text: str) -> None:
    """Add a file without owner and time."""
    data = text.encode()
    about = tarfile.TarInfo(path.as_posix())
    about.size, about.mode = len(data), 0o644
    file.addfile(about, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    for verb, names in ((pack, ("study", "archive")), (unpack, ("archive", "study"))):
        each = verbs.add_parser(verb.__name__)
        each.set_defaults(verb=verb)
        for name in names:
            each.add_argument(name, type=Path)
    chosen = vars(parser.parse_args())
    verb = chosen.pop("verb")
    CONSOLE.print(f"{verb(**chosen)} finished runs")


if __name__ == "__main__":
    main()
