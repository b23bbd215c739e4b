"""Read the code and run the commands of docs/libraries.md."""

import re
import shlex
from pathlib import Path

import pytest

from unstale.cli import main
from unstale.records import Failure, Task, Trajectory
from unstale.rollout.episode import Rollout

DOCS = (Path(__file__).parents[2] / "docs" / "libraries.md").read_text()


def block(name: str) -> str:
    """Return the code that the page introduces as this file."""
    found = re.search(rf"`{re.escape(name)}`[^`]*:\n\n```python\n(.*?)```", DOCS, re.DOTALL)
    assert found, f"docs/libraries.md has no {name}"
    return found.group(1)


def run_command(names: str, capsys: pytest.CaptureFixture[str], **replaced: str) -> str:
    """Run the page's command for this task set and return its output. All episodes must end."""
    (command,) = [
        line for line in DOCS.splitlines() if line.startswith("unstale eval") and names in line
    ]
    for old, new in replaced.items():
        command = command.replace(old, new)
    failures: list[Failure] = []
    episode = Rollout.episode

    async def watched(self: Rollout, task: Task, **options: object) -> Trajectory | Failure:
        outcome = await episode(self, task, **options)  # type: ignore[arg-type]
        failures.extend([outcome] if isinstance(outcome, Failure) else [])
        return outcome

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(Rollout, "episode", watched)
        main.main(shlex.split(command, comments=True)[1:])
    assert end.value.code == 0 and not failures
    return capsys.readouterr().out
