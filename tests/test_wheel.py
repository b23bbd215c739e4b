"""Build sdist and wheel, install the wheel into a fresh environment and run the demo from it.

The environment finds the dependencies through a .pth file, so nothing is downloaded. `make wheel`
builds the same files.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHORT = shlex.split(
    "--max_steps=1 --minutes=0 --eval.tasks=2 --schedule.groups_per_step=2 --schedule.group_size=2 "
    "--task.latency_s=0 --rollout.max_turns=2 --engine.max_completion_tokens=16 --audit.share=0"
)


def run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def build(kind: str, source: Path, out: Path) -> Path:
    """Build with setuptools of this environment. Return the file."""
    code = f"from setuptools.build_meta import build_{kind} as build; build({str(out)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment with the wheel, built from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    names = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.splitlines()
    for name in names:
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    with tarfile.open(build("sdist", checkout, folder)) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    wheel = build("wheel", source, folder)
    venv.create(folder / "fresh", with_pip=False)
    programs = folder / "fresh" / "bin"
    purelib = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    packages = Path(run(programs / "python", "-c", purelib, cwd=folder).stdout.strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python")
    options = ("install", "--quiet", "--no-index", "--no-deps", "--force-reinstall")
    run(*pip, programs / "python", *options, wheel, cwd=folder)
    return programs


@pytest.mark.costly
def test_the_demo_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    where = "import unstale; print(unstale.__file__)"
    home = run(installed / "python", "-c", where, cwd=tmp_path).stdout
    assert home.startswith(str(installed.parent))
    run(installed / "unstale", "train", "retail", "--name=demo", *SHORT, cwd=tmp_path)
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert (tmp_path / "runs" / "demo" / "policy" / "model.safetensors").is_file()


def test_the_wheel_has_the_pages_and_the_licence_of_their_library(installed: Path) -> None:
    """Every file of the pages is served from an installed wheel, with uPlot's licence beside it."""
    code = (
        "from unstale.analysis.dashboard.server import _read_pages as read\n"
        "print(*sorted(name for name in read() if name))"
    )
    served = run(installed / "python", "-c", code, cwd=installed).stdout.split()
    folder = ROOT / "unstale/analysis/dashboard/static"
    here = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert set(map(str, here)) == set(served)
    assert any(name.startswith("vendor/") and "LICENSE" in name.upper() for name in served)


@pytest.mark.costly
def test_hints_name_packages_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    hide = "import sys; sys.modules['tensorboard'] = None\n"
    code = f"{hide}from unstale.cli.main import main; main()"
    words = ("train", "retail", "--trackers=tensorboard", *SHORT)
    done = run(installed / "python", "-c", code, *words, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(f"{installed / 'python'} -m pip install tensorboard")
