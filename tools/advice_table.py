"""Write the table of comparisons behind `unstale advise`, from the folders of comparisons.

python -m tools.advice_table FOLDER...    # comparisons, or studies with one folder per setting
"""

import argparse
import sys
from pathlib import Path

from unstale.config import ConfigError
from unstale.durability.run_folder import dumps, write_whole
from unstale.observe.advice.calibration import TABLE, Calibration, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, help="comparisons or studies")
    parser.add_argument("--out", type=Path, default=TABLE, help=f"default: {TABLE.name}")
    chosen = parser.parse_args()
    try:
        settings = measure(chosen.folders)
    except ConfigError as error:
        sys.exit(f"advice_table: {error}")
    write_whole(chosen.out, dumps({"settings": settings}, indent=1) + "\n")
    calibration = Calibration(settings)
    print(f"settings in {chosen.out}: {len(settings)}")
    print("\n".join(calibration.sentences({})))


if __name__ == "__main__":
    main()
