"""Read task folders of Harbor and Terminal-Bench into `TerminalTask`.

Harbor: `instruction.md`, `task.toml`, `environment/`, `tests/test.sh`, which writes a reward file
(https://harborframework.com/docs/tasks). Terminal-Bench: `task.yaml`, a Dockerfile beside it,
`run-tests.sh` and `tests/` (https://harborframework.com/docs/task-difference).
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unstale.config import ConfigError
from unstale.envs.sandboxes.runtime import File, Files, TerminalTask

_NO_PART = {
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck"),
    "verifier": ("environment", "collect"),
    "": ("steps",),
}
"""Section of task.toml -> keys that no sandbox here supports."""
_NOT_CONTEXT = ("tests", "run-tests.sh", "solution", "solution.sh", "solution.yaml", "task.yaml")
"""Files and folders of a Terminal-Bench task that its Dockerfile must not copy."""
_MANY_PARTS = ("docker-compose.yaml", ".dockerignore")
_MAX_SHOWN = 20
"""Largest number of folders that one error names."""
_UNITS = {"M": 1, "G": 1024}


def read_folder(
    folder: Path, check: Callable[[TerminalTask], None] = lambda task: None
) -> list[TerminalTask]:
    """Return the tasks in a folder's subfolders, sorted by name.

    Raises `ConfigError` if there are no subfolders. If some cannot be read as a task, or `check`
    raises `ConfigError` for their tasks, the error names them all.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} with tasks")
    tasks, problems = [], []
    for each in sorted(filter(Path.is_dir, folder.iterdir())):
        try:
            tasks.append(read_task(each))
            check(tasks[-1])
        except ConfigError as error:
            problems.append(f"{each.name}: {error}")
    if problems:
        more = len(problems) - _MAX_SHOWN
        lines = [*problems[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        raise ConfigError(
            f"{len(problems)} folders in {folder} cannot be used as tasks. Mend them, or move them "
            "to another folder:\n  " + "\n  ".join(lines)
        )
    if not tasks:
        raise ConfigError(f"{folder} has no folders with tasks")
    return tasks


def read_task(folder: Path) -> TerminalTask:
    """Return the task in this folder. Raises `ConfigError` if it has no task, or an unsupported
    one.
    """
    try:
        if (folder / "task.toml").is_file():
            return _read_harbor(folder)
        if (folder / "task.yaml").is_file():
            return _read_terminal_bench(folder)
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the task {folder} cannot be read: {error!r}") from error
    raise ConfigError(f"{folder} is not a task: it has neither task.toml nor task.yaml")


def _read_harbor(folder: Path) -> TerminalTask:
    config = tomllib.loads((folder / "task.toml").read_text("utf-8"))
    environment: Mapping[str, Any] = config.get("environment", {})
    for section, keys in _NO_PART.items():
        given = config.get(section, {}) if section else config
        for key in keys:
            if given.get(key):
                raise ConfigError(f"{folder}/task.toml: {key} is not supported")
    for part in ("agent", "verifier"):
        if config.get(part, {}).get("user", "root") not in ("root", 0, "0"):
            raise ConfigError(f"{folder}/task.toml: {part}.user must be root")
    if config.get("verifier", {}).get("environment_mode", "shared") != "shared":
        raise ConfigError(f"{folder}/task.toml: verifier.environment_mode must be shared")
    context = _files(folder / "environment")
    tests = _files(folder / "tests")
    if "test.sh" not in tests:
        raise ConfigError(f"{folder} has no tests/test.sh")
    tests = {**tests, "test.sh": File(tests["test.sh"].content, executable=True)}
    instruction = (folder / "instruction.md").read_text("utf-8").splitlines()
    agent_network, test_network = (_network(folder, config, each) for each in ("agent", "verifier"))
    return TerminalTask(
        name=folder.name,
        instruction="\n".join(line for line in instruction if "harbor-canary" not in line).strip(),
        environment=_context(folder, context),
        dockerfile=_dockerfile(folder, context, environment.get("docker_image", "")),
        tests=tests,
        env=_variables(folder, environment.get("env", {})),
        test_env=_variables(folder, config.get("verifier", {}).get("env", {})),
        agent_timeout_s=float(config.get("agent", {}).get("timeout_sec", 600.0)),
        test_timeout_s=float(config.get("verifier", {}).get("timeout_sec", 600.0)),
        build_timeout_s=float(environment.get("build_timeout_sec", 600.0)),
        storage_mb=_megabytes(environment.get("storage_mb", environment.get("storage", 10_240))),
        memory_mb=_megabytes(environment.get("memory_mb", environment.get("memory", 2048))),
        cpus=float(environment.get("cpus", 1)),
        agent_network=bool(agent_network),
        test_network=test_network is not False,
        states_network=None not in (agent_network, test_network),
        workdir=environment.get("workdir", ""),
        image=environment.get("docker_image", ""),
    )


def _read_terminal_bench(folder: Path) -> TerminalTask:
    import yaml

    config = yaml.safe_load((folder / "task.yaml").read_text("utf-8"))
    if config.get("parser_name", "pytest") != "pytest":
        raise ConfigError(
            f"{folder}/task.yaml: parser_name must be pytest, got {config['parser_name']!r}: the "
            "exit code of run-tests.sh decides"
        )
    compose = folder / "docker-compose.yaml"
    services = yaml.safe_load(compose.read_text("utf-8"))["services"] if compose.is_file() else {}
    if set(services) - {"client"}:
        raise ConfigError(f"{compose}: only the service client is supported")
    files = _files(folder)
    context = {
        path: file
        for path, file in files.items()
        if path.split("/")[0] not in _NOT_CONTEXT and path != compose.name
    }
    tests = {path.removeprefix("tests/"): files[path] for path in files if path[:6] == "tests/"}
    return TerminalTask(
        name=folder.name,
        instruction=config["instruction"].strip(),
        environment=_context(folder, context),
        dockerfile=_dockerfile(folder, context, ""),
        tests={**tests, "run-tests.sh": files["run-tests.sh"]},
        test_command=("/bin/bash", "/tests/run-tests.sh"),
        exit_code_decides=True,
        agent_timeout_s=float(config.get("max_agent_timeout_sec", 360.0)),
        test_timeout_s=float(config.get("max_test_timeout_sec", 60.0)),
        test_network=True,  # most of these tests install pytest first
        states_network=False,
    )


def _context(folder: Path, context: Files) -> Files:
    for name in _MANY_PARTS:
        if name in context:
            raise ConfigError(f"{folder}: {name} is not supported; a task has one Dockerfile")
    return context


def _dockerfile(folder: Path, context: Files, image: str) -> str:
    if "Dockerfile" in context:
        return context["Dockerfile"].content.decode()
    if not image:
        raise ConfigError(f"{folder} has neither a Dockerfile nor a docker_image")
    return f"FROM {image}\n"


def _files(folder: Path) -> dict[str, File]:
    """Return path -> file, for all files below a folder. Raises `ConfigError` for a symbolic
    link.
    """
    return {str(path.relative_to(folder)): _file(path) for path in _walk(folder)}


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link, which a task cannot have")
        if path.is_file():
            yield path


def _file(path: Path) -> File:
    return File(path.read_bytes(), executable=bool(path.stat().st_mode & 0o100))


def _network(folder: Path, config: Mapping[str, Any], phase: str) -> bool | None:
    """Return True if the task allows the network in a phase, `agent` or `verifier`.

    None if the task does not say. Harbor then allows it in both. Here only the tests get it, since
    an agent in training is not trusted.
    """
    environment = config.get("environment", {})
    allowed = environment.get("allow_internet")
    given = None if allowed is None else "public" if allowed else "no-network"
    mode = environment.get("network_mode", given)
    mode = config.get(phase, {}).get("network_mode", mode)
    if mode not in ("public", "no-network", None):
        raise ConfigError(f"{folder}/task.toml: network_mode must be public or no-network: {mode}")
    return None if mode is None else bool(mode == "public")


def _variables(folder: Path, given: Mapping[str, Any]) -> dict[str, str]:
    for name, value in given.items():
        if "${" in str(value):
            raise ConfigError(f"{folder}/task.toml: {name} is a variable of the host: {value}")
    return {name: str(value) for name, value in given.items()}


def _megabytes(size: Any) -> int:
    """Return a size in MB, given in MB or as a text such as `10G`."""
    text = str(size).upper().removesuffix("B")
    return int(float(text[:-1]) * _UNITS[text[-1]]) if text[-1:] in _UNITS else int(text)
