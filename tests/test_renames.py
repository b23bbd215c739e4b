"""The renames in `tools/renames.json` agree with the options that the package refuses."""

import json
from pathlib import Path

from unstale.config.names import RENAMED
from unstale.config.options import options

RENAMES = Path(__file__).parents[1] / "tools" / "renames.json"


def test_every_renamed_option_is_refused_by_its_old_name() -> None:
    listed = json.loads(RENAMES.read_text())["options"]
    assert listed == {old: new for old, new in RENAMED.items() if "." in old}
    assert set(listed.values()) <= options().keys()
    assert not listed.keys() & options().keys()
