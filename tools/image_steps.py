"""Run the steps of one stage of the Dockerfile without a container runtime.

    python -m tools.image_steps cpu FOLDER

FOLDER gets the files that the stage copies, and an environment in place of the image's Python. The
`pip` steps run there. Steps that need a container, such as `apt-get`, are printed and left out. At
the end the entry point is called with `--version`. The exit code is that of the step that fails.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stage(name: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage and of those that it is built on, in order."""
    source = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in source.splitlines() if line and not line.startswith("#")]
    stages: dict[str, list[tuple[str, str]]] = {}
    current = ""
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, current = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            stages[current] = list(stages.get(base, []))
        else:
            stages[current].append((word, rest))
    return stages[name]


def copies(instruction: str) -> list[tuple[Path, str]]:
    """Return the files or folders of this checkout that a COPY takes, and their names there."""
    *sources, target = instruction.split()
    is_folder = target.endswith("/")
    return [(ROOT / name, f"{target}{name}" if is_folder else target) for name in sources]


def run(name: str, folder: Path) -> int:
    """Run the steps of a stage in a new folder. Return the exit code of the first that fails."""
    home = folder / "image"
    home.mkdir(parents=True)
    venv.create(folder / "python", with_pip=True)
    programs = folder / "python" / "bin"
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    for word, rest in stage(name):
        if word == "COPY":
            for source, target in copies(rest):
                copy = shutil.copytree if source.is_dir() else shutil.copyfile
                copy(source, home / target)
        elif word == "ARG":
            key, _, default = rest.partition("=")
            environment.setdefault(key, default.strip('"'))
        elif word == "RUN" and rest.startswith("pip "):
            print(f"RUN {rest}", flush=True)
            code = subprocess.run(rest, shell=True, cwd=home, env=environment).returncode
            if code:
                return code
        elif word == "ENTRYPOINT":
            command = [*json.loads(rest), "--version"]
            return subprocess.run(command, cwd=folder, env=environment).returncode
        else:
            print(f"left out: {word} {rest}", flush=True)
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tools.image_steps STAGE FOLDER")
    sys.exit(run(sys.argv[1], Path(sys.argv[2])))
