"""Write the table of comparisons behind `unstale advise`, from the folders of comparisons.

python -m tools.advice_table FOLDER...    # comparisons, or studies with one folder per setting

With `--keep` the settings of the present table stay. With `--recount RUN...` the decisions of arms
are counted on the tokens of these runs, for settings with the same options whose runs are gone;
`--of STUDY...` limits this to the settings of some studies, whose runs had the same policy.
With `--test` the table stays as it is, and its prediction is tested on the folders.
"""

import argparse
import sys
from pathlib import Path

from unstale.config import ConfigError
from unstale.durability.run_folder import dumps, write_whole
from unstale.observe.advice.calibration import TABLE, Calibration, measure, recount


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, help="comparisons or studies")
    parser.add_argument("--test", action="store_true", help="test the table on the folders")
    parser.add_argument("--keep", action="store_true", help="keep the settings of the table")
    parser.add_argument(
        "--recount", nargs="*", type=Path, default=[], metavar="RUN", help="run folders"
    )
    parser.add_argument("--of", nargs="*", default=[], metavar="STUDY", help="studies to recount")
    parser.add_argument("--out", type=Path, default=TABLE, help=f"default: {TABLE.name}")
    chosen = parser.parse_args()
    try:
        settings = measure(chosen.folders)
        if chosen.test:
            accuracy = Calibration.load(chosen.out).tested(Calibration(settings))
            print(f"right for arms of these settings: {accuracy or 'the table has no limit'}")
            return
        if chosen.keep:
            new = {(setting["study"], setting["name"]) for setting in settings}
            kept = Calibration.load(chosen.out).settings
            settings = [row for row in kept if (row["study"], row["name"]) not in new] + settings
        settings = recount(settings, chosen.recount, of=chosen.of)
    except ConfigError as error:
        sys.exit(f"advice_table: {error}")
    write_whole(chosen.out, dumps({"settings": settings}, indent=1) + "\n")
    calibration = Calibration(settings)
    print(f"settings in {chosen.out}: {len(settings)}")
    print("\n".join(calibration.sentences({})))


if __name__ == "__main__":
    main()
