"""Sandboxes in containers: their command lines with a stand-in, and attacks with a real podman."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

import pytest

from tests.envs.test_terminal import (
    ASK_SERVER,
    ATTACKS,
    BAD_REWARDS,
    SECRET,
    SERVER,
    await_processes,
    harbor,
    play,
    script,
    task,
)
from tests.support.shell_image import write_root
from tests.support.waits import wait_until
from unstale.config import ConfigError, make_task
from unstale.envs import EnvError
from unstale.envs.registry import build_taskset
from unstale.envs.sandboxes.containers import MAX_STARTS, ContainerRuntime
from unstale.envs.sandboxes.namespaces import NamespaceRuntime
from unstale.envs.sandboxes.runtime import File, Sandbox, TerminalTask
from unstale.envs.terminal import AutoRuntime, TerminalTasks
from unstale.testing import check_env

FAKE = """#!{python} -IS
import io, json, os, sys, tarfile, time
from pathlib import Path
folder, words = Path(__file__).parent, sys.argv[1:]
sent = sys.stdin.buffer.read() if words[:2] == ["cp", "-"] else b""
names = tarfile.open(fileobj=io.BytesIO(sent)).getnames() if sent else []
with open(folder / "calls", "a") as file:
    file.write(json.dumps([words, names]) + "\\n")
if words[0] in (folder / "fails").read_text().split():
    sys.exit("it fails")
match words:
    case ["info", *_]:
        print((folder / "limits").read_text())
    case ["ps", *_]:
        print((folder / "left").read_text())
    case ["image", *_]:
        if not (folder / "built").exists():
            sys.exit("no such image")
        env = ["PATH=/app/bin:/opt/tools:/usr/bin", "PYTHONPATH=/app"]
        config = json.loads((folder / "config").read_text())
        print(json.dumps([{{"Config": {{"WorkingDir": "/app", "Env": env}} | config}}]))
    case ["build", *_]:
        (folder / "built").touch()
    case ["run", "--rm", *_]:
        print(*("/app", "/etc", "/opt", "/root", "/tmp", "/usr", "/var/tmp"), sep="\\n")
    case ["run", "-d", *_]:
        with open(folder / "starts", "a") as file:
            print("begins", file=file, flush=True)
            time.sleep(float((folder / "start_s").read_text()))
            print("ended", file=file)
    case ["exec", _, *command]:
        print("WARN[0000] it is said with each call", file=sys.stderr)
        if command[0] == "/bin/sh" and "--user=0" not in words:
            os.setsid()
            os.execv(command[0], command)
    case ["inspect", *_]:
        print("true")
    case ["cp", _, "-"]:
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
            for name, size in ("a.log", 70 << 20), ("reward.txt", 1), ("z.log", 1 << 40):
                row = tarfile.TarInfo(f"./{{name}}")
                row.size = size
                tar.addfile(row, open("/dev/zero", "rb") if size > 1 else io.BytesIO(b"1"))
"""


class Fake:
    """A stand-in for podman that writes down its calls, and runs commands in no container."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "podman"
        path.write_text(FAKE.format(python=sys.executable))
        path.chmod(0o755)
        self.set(limits="[cpuset cpu memory pids]", left="", fails="", config="{}", start_s="0")

    def set(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.folder / name).write_text(text)

    def calls(self, verb: str) -> list[list[str]]:
        """Return the arguments of all calls of one kind."""
        return [words[1:] for words, _ in self.all_calls() if words[0] == verb]

    def all_calls(self) -> list[tuple[list[str], list[str]]]:
        """Return all calls: arguments, and names in the archive that was sent."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def starts(self) -> list[str]:
        """Return when containers began to start, and when they had started, in this order."""
        return (self.folder / "starts").read_text().splitlines()

    def index(self, *start: str) -> int:
        """Return the place of the last call that starts with these words."""
        places = [
            at for at, (words, _) in enumerate(self.all_calls()) if [*start] == words[: len(start)]
        ]
        return places[-1]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Fake(tmp_path / "bin")


def start(each: TerminalTask, *commands: str, program: str = "podman") -> Sandbox:
    """Start a sandbox and run commands in it. It is not closed."""

    async def begin() -> Sandbox:
        sandbox = await ContainerRuntime(program).start(each)
        for command in commands:
            await sandbox.run(command, seconds=30, output_kb=1)
        return sandbox

    return asyncio.run(begin())


def test_command_lines_keep_the_promises(fake: Fake) -> None:
    each = task(env={"WHO": "me"}, memory_mb=99, cpus=0.5, storage_mb=3)
    read, last = play(each, "echo it", runtime=ContainerRuntime("podman"))
    assert read == ["it"] and dict(last.rewards) == {"reward": 1.0}
    agent, tests = fake.calls("run")[-1], fake.calls("create")[-1]
    for words in (agent, tests):
        assert {"--network=none", "--memory=99m", "--memory-swap=99m", "--cpus=0.5"} <= {*words}
        assert {"--pids-limit=128", "--ulimit=fsize=3145728", "--cap-drop=all"} <= {*words}
        assert "--security-opt=no-new-privileges" in words and "--env=WHO=me" in words
        assert not [word for word in words if word.startswith(("--volume=", "-v")) and ":" in word]
        assert not {"--privileged", "--mount", "--cap-add=sys_admin"} & {*words}
    assert "--read-only" in agent
    folders = {word for word in agent if word.startswith("--volume")}
    assert folders == {f"--volume={path}" for path in ("/root", "/tmp", "/var/tmp", "/app")}
    assert {"--user=0", "--entrypoint=/tests/test.sh", "--env=PATH=/opt/tools:/usr/bin"} <= {*tests}
    assert {"--env=PYTHONPATH=/tests", "--env=LD_PRELOAD=", "--env=HOME=/tests"} <= {*tests}


def test_tests_appear_after_the_agents_container_is_removed(fake: Fake) -> None:
    play(task(), "echo it", runtime=ContainerRuntime("podman"))
    name = next(word for word in fake.calls("run")[-1] if word.startswith("--name="))[7:]
    sent = [at for at, (_, names) in enumerate(fake.all_calls()) if names]
    assert [fake.all_calls()[at] for at in sent] == [
        [["cp", "-", f"{name}-tests:/tests"], ["test.sh"]]
    ]
    (removed,) = [
        at for at, (words, _) in enumerate(fake.all_calls()) if words == ["rm", "-f", name]
    ]
    assert fake.index("exec", name) < removed < sent[0] < fake.index("start")
    assert f"--volumes-from={name}" in fake.calls("create")[0]
    assert {name, f"{name}-tests"} <= {words[-1] for words in fake.calls("rm") if "-v" in words}
    assert SECRET not in json.dumps(fake.all_calls())


def test_tests_in_the_agents_container(fake: Fake) -> None:
    """They are copied into it after the last command, and it is stopped before the reward is
    read.
    """
    runtime = ContainerRuntime("podman", tests_in="agent")
    each = task(test_network=True, test_env={"KEY": "7"})
    read, last = play(each, "echo it", runtime=runtime)
    assert read == ["it"] and dict(last.rewards) == {"reward": 1.0}
    (made,) = (words for words in fake.calls("run") if "-d" in words)
    name = next(word for word in made if word.startswith("--name="))[7:]
    assert "--network=podman" in made and "--cap-add=net_bind_service" in made
    assert not {"--read-only", "--network=none"} & {*made} and not fake.calls("create")
    assert not [word for word in made if word.startswith("--volume")]
    assert fake.all_calls()[fake.index("cp", "-")] == [["cp", "-", f"{name}:/tests"], ["test.sh"]]
    places = [
        fake.index("network", "disconnect", "podman", name),
        fake.index("exec", name),
        fake.index("network", "connect", "podman", name),
        fake.index("exec", "--user=0", name, "/bin/sh", "-c"),
        fake.index("cp", "-"),
        fake.index("exec", "--user=0", "--env=TEST_DIR=/tests", "--env=KEY=7", name),
        fake.index("stop", "-t", "0", name),
        fake.index("cp", f"{name}:/logs/verifier/."),
    ]
    assert places == sorted(places)
    play(task(), runtime=runtime)
    assert "--network=none" in fake.calls("run")[-1] and len(fake.calls("network")) == 2


def test_agent_that_breaks_its_container_does_not_avoid_the_result(fake: Fake) -> None:
    fake.set(fails="cp")
    _, last = play(task(), runtime=ContainerRuntime("podman", tests_in="agent"))
    assert dict(last.rewards) == {"reward": 0.0} and last.facts["no_reward"] == 1.0


def test_failed_build_is_not_tried_again(fake: Fake) -> None:
    fake.set(fails="build")
    for says in ("build ended with 1: it fails", "of guess could not be built; its first error"):
        with pytest.raises(EnvError, match=says):
            play(task(), runtime=ContainerRuntime("podman"))
    assert len(fake.calls("build")) == 1 and "--label=unstale" in fake.calls("build")[0]


def test_many_containers_do_not_start_at_once(fake: Fake) -> None:
    async def begin() -> None:
        runtime = ContainerRuntime("podman")
        begun = (runtime.start(task()) for _ in range(2 * MAX_STARTS))
        await asyncio.gather(*(sandbox.close() for sandbox in await asyncio.gather(*begun)))

    fake.set(start_s="1")
    asyncio.run(begin())
    steps = [1 if line == "begins" else -1 for line in fake.starts()]
    assert len(steps) == 4 * MAX_STARTS
    assert max(accumulate(steps)) <= MAX_STARTS


def test_tests_load_libraries_from_folders_of_the_image_only(fake: Fake) -> None:
    env = ["PATH=/usr/bin", "LD_LIBRARY_PATH=/opt/lib:/app/lib::lib:/usr/lib/own"]
    fake.set(config=json.dumps({"Env": env}))
    play(task(), runtime=ContainerRuntime("podman"))
    assert "--env=LD_LIBRARY_PATH=/opt/lib:/usr/lib/own" in fake.calls("create")[0]
    assert "--volume=/opt" not in fake.calls("run")[-1]


def test_tests_are_not_run_if_the_agents_container_stays(fake: Fake) -> None:
    async def episode() -> None:
        sandbox = await ContainerRuntime("podman").start(task())
        fake.set(fails="rm")
        await sandbox.verify()

    with pytest.raises(EnvError, match="rm ended with 1: it fails"):
        asyncio.run(episode())
    assert not fake.calls("start") and not [names for _, names in fake.all_calls() if names]


def test_image_is_built_once_for_the_same_content(fake: Fake) -> None:
    runtime = ContainerRuntime("podman")
    for each in (task(), replace(task(), name="other"), task()):
        play(each, runtime=runtime)
    assert len(fake.calls("build")) == 1 and len(fake.calls("create")) == 3
    (fake.folder / "built").unlink()
    play(task(environment={"notes.txt": File(b"changed")}), runtime=runtime)
    assert len({words[0] for words in fake.calls("build")}) == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"Volumes": {"/data": {}, "/bin/": {}}}, r"VOLUME /bin/ .* \(/bin\)"),
        ({"Volumes": {"/usr/bin/x": {}}}, r"VOLUME /usr/bin/x .* \(/usr/bin\)"),
        ({"WorkingDir": "/usr/local"}, r"WORKDIR /usr/local .* \(/usr/local/lib\)"),
        ({"WorkingDir": "/logs"}, r"WORKDIR /logs .* \(/logs\)"),
        ({"WorkingDir": "/usr/src/app", "Volumes": {"/var/lib/data": {}, "/tmp/x": {}}}, ""),
    ],
)
def test_image_that_would_open_folders_of_the_tests_is_refused(
    fake: Fake, config: dict[str, object], says: str
) -> None:
    fake.set(config=json.dumps(config))
    if says:
        with pytest.raises(EnvError, match=says):
            play(task(), runtime=ContainerRuntime("podman"))
        assert not fake.calls("create")
    else:
        play(task(), runtime=ContainerRuntime("podman"))
        assert fake.calls("create")


@pytest.mark.parametrize(("agent", "tests"), [(True, False), (False, True)])
def test_network_is_there_only_where_the_task_allows_it(
    fake: Fake, agent: bool, tests: bool
) -> None:
    play(task(agent_network=agent, test_network=tests), runtime=ContainerRuntime("podman"))
    assert ("--network=none" in fake.calls("run")[-1]) != agent
    assert ("--network=none" in fake.calls("create")[-1]) != tests


def test_command_is_killed_with_its_group_at_a_limit(fake: Fake) -> None:
    runtime = ContainerRuntime("podman")
    commands = ("echo begun; sleep 4343 | cat", "yes", "(exit 3)", "x" * 200_000)
    read, _ = play(task(), *commands, seconds=2.0, runtime=runtime)
    assert read[0] == "begun\n[killed at the time limit]"
    assert read[1].endswith("y\n[more output was cut off]\n[exit code 137]") and len(read[1]) < 5000
    assert read[2] == "[exit code 3]" and "Argument list too long" in read[3]
    await_processes(some=False, seconds=4343)


def test_containers_of_ended_processes_are_removed_at_the_start(fake: Fake) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    begun = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    living = f"unstale-{os.getpid()}-{begun}-a"
    fake.set(left=f"unstale-{ended.pid}-1-b-tests\n{living}\nunstale-{os.getpid()}-1-c")
    ContainerRuntime("podman").check(task())
    removed = [words[-1] for words in fake.calls("rm")]
    assert removed == [f"unstale-{ended.pid}-1-b-tests", f"unstale-{os.getpid()}-1-c"]
    play(task(), runtime=ContainerRuntime("podman"))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mine = f"label=unstale.machine={boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    assert f"--filter={mine}" in fake.calls("ps")[0] and f"--{mine}" in fake.calls("run")[-1]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"limits": "[cpuset pids]"}, "podman cannot limit cpu, memory here"),
        ({"fails": "info"}, "podman does not work: .* it fails"),
    ],
)
def test_podman_that_cannot_limit_is_refused(fake: Fake, texts: dict[str, str], says: str) -> None:
    fake.set(**texts)
    with pytest.raises(ConfigError, match=says):
        ContainerRuntime("podman").check(task())


def test_task_that_needs_an_image_says_which_programs_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harbor(tmp_path / "train/one", **{"environment/Dockerfile": "FROM ubuntu:24.04\n"})
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = "podman is not installed; docker is not installed"
    with pytest.raises(ConfigError, match=f"needs the image ubuntu:24.04.*{missing}"):
        build_taskset(make_task(f"terminal:{tmp_path}/train"))


def test_dockerfile_is_read_once_to_choose_the_sandbox(fake: Fake) -> None:
    seen = []

    class Counting(NamespaceRuntime):
        def check(self, task: TerminalTask) -> None:
            seen.append(task.name)
            super().check(task)

    runtime = AutoRuntime(Counting(), ContainerRuntime("podman"))
    plain, image = task(), task(name="image", dockerfile="FROM ubuntu:24.04\n")
    TerminalTasks("both", [plain, image], runtime=runtime)
    for each in (plain, image, plain, image):
        play(each, runtime=runtime)
    assert seen == ["guess", "image"] and len(fake.calls("create")) == 2


def test_containers_are_for_tasks_that_need_an_image(fake: Fake, tmp_path: Path) -> None:
    harbor(tmp_path / "train/one")
    harbor(tmp_path / "train/two", **{"environment/Dockerfile": "FROM a AS b\nFROM b\n"})
    tasks = build_taskset(make_task(f"terminal:{tmp_path}/train"))
    assert len({tasks.data_of(each)["name"] for each in islice(tasks.train(0), 2)}) == 2
    check_env(tasks, episodes=2, max_turns=1)
    assert len(fake.calls("build")) == 1


BASE = "localhost/unstale-test-base"
DOCKERFILE = f"FROM {BASE}\nENV PATH=/app:/bin BASH_ENV=/app/b\nWORKDIR /app\nCOPY notes.txt .\n"
DOCKERFILE += "RUN echo $((6 * 7)) > made && chmod 700 made\n"


@pytest.fixture(scope="module", params=["podman", "docker"])
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContainerRuntime]:
    """A real podman or docker that has an image with a shell. Skips if it can build or run none
    here.
    """
    program = request.param
    folder = tmp_path_factory.mktemp("base")
    write_root(folder)
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY . /\nRUN ["/bin/bash", "-c", "true"]\n')
    try:
        subprocess.run(
            [program, "build", f"--tag={BASE}", str(folder)], check=True, capture_output=True
        )
        runtime = ContainerRuntime(program, storage_mb=8)
        runtime.check(task())
    except (OSError, ConfigError) as error:
        pytest.skip(f"no {program}: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{program} cannot build here: {error.stderr.decode()[-300:]}")
    yield runtime


@pytest.mark.costly
def test_image_of_the_dockerfile_is_the_agents_root(real: ContainerRuntime) -> None:
    each = task(dockerfile=DOCKERFILE, cpus=1, memory_mb=64)
    read, last = play(
        each,
        "cat notes.txt made; pwd; echo 3 > n; false",
        "cat n; (sleep 4343 &); ls /tests /logs",
        f"printf {SECRET} > answer.txt",
        "echo begun; sleep 4343",
        seconds=30.0,
        runtime=real,
    )
    assert read[0] == "nothing\n42\n/app\n[exit code 1]"
    assert read[1].startswith("3\n") and read[1].count("No such file") == 2
    assert read[2:] == ["(no output)", "begun\n[killed at the time limit]"]
    assert dict(last.rewards) == {"reward": 1.0}
    await_processes(some=False, seconds=4343)


@pytest.mark.costly
def test_attacks_in_a_container_fail(real: ContainerRuntime) -> None:
    """One agent tries all, and plants programs and start files where the tests could find them."""
    attacks = [text for name, text in ATTACKS.items() if name != "fork bomb"]
    plant = "for n in bash cat mkdir sh; do cp /app/bash /root/$n; done; cp bash b; cat /app/*"
    commands = (*attacks, f"{plant}; echo alive", ATTACKS["fork bomb"])
    read, last = play(task(dockerfile=DOCKERFILE), *commands, seconds=60.0, runtime=real)
    assert SECRET not in "".join(read) and read[-2].endswith("alive")
    assert dict(last.rewards) == {"reward": 0.0}
    assert last.facts["no_reward"] == 0.0, "the tests ran and wrote their reward"


INSTALL = "printf '#!/bin/bash\necho 7' > /bin/greet; chmod +x /bin/greet"
USES = (
    f"[ $(greet) = 7 ] && {ASK_SERVER} && . /tests/lib/check.sh && "
    'echo "{\\"works\\": 1}" > /logs/verifier/reward.json'
)


@pytest.mark.costly
def test_installed_program_and_running_server_are_there_for_tests_in_the_agents_container(
    real: ContainerRuntime,
) -> None:
    """An old reward, and links in the places of the tests, do not stay."""
    library = File(b"[ -z $PATH ] || [ $TEST_DIR = /tests ]\n")
    hidden = {"test.sh": script(f"#!/bin/bash\n{USES}\n"), "lib/check.sh": library}
    plant = "mkdir own /logs; ln -s /app/own /tests; ln -s /app/own /logs/verifier; echo 1 > own/"
    commands = (INSTALL, SERVER, f"{plant}reward.txt")
    _, last = play(
        task(dockerfile=DOCKERFILE, tests=hidden),
        *commands,
        seconds=60.0,
        runtime=replace(real, tests_in="agent"),
    )
    assert dict(last.rewards) == {"works": 1.0}


@pytest.mark.costly
def test_agent_never_sees_the_tests_that_run_in_its_container(real: ContainerRuntime) -> None:
    """It can still decide the result: by a watching process, or by a changed program of the
    tests.
    """
    forge = "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /new; chmod +x /new"
    read, last = play(
        task(dockerfile=DOCKERFILE),
        ATTACKS["a watching process"].replace("echo 1 > /logs/verifier/reward.txt; ", ""),
        "ls -A /tests /logs; cat /tests/* /logs/verifier/*",
        "cat /app/*; ls /tests /logs",
        f"{forge}; mv /new /bin/bash",
        seconds=60.0,
        runtime=replace(real, tests_in="agent"),
    )
    assert SECRET not in "".join(read) and read[2].count("No such file") == 2
    assert dict(last.rewards) == {"reward": 1.0}


@pytest.mark.costly
@pytest.mark.parametrize("name", ["FIFO", "link", "large"])
def test_reward_in_a_container_is_read_from_a_plain_file(name: str, real: ContainerRuntime) -> None:
    hidden = {"test.sh": script(f"#!/bin/bash\n{BAD_REWARDS[name]}\n")}
    _, last = play(task(dockerfile=DOCKERFILE, tests=hidden), runtime=real)
    assert dict(last.rewards) == {"reward": 0.0} and last.facts["no_reward"] == 1.0


@pytest.mark.costly
def test_killed_run_leaves_no_container(real: ContainerRuntime) -> None:
    code = (
        "from tests.envs.test_containers import *\n"
        f"PROGRAM = {real.program!r}\n"
        "start(task(dockerfile=DOCKERFILE), 'sleep 4343 & sleep 4343 &', program=PROGRAM)\n"
        "print('.', flush=True)\nimport time\ntime.sleep(999)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout and run.stdout.read(1) == b"."
    name = f"--filter=name=unstale-{run.pid}-"

    def left() -> bytes:
        return subprocess.check_output([real.program, "ps", "-aq", name])

    assert left()
    run.kill()
    run.wait()
    run.stdout.close()
    wait_until(lambda: not left(), "the removal of the containers")
    await_processes(some=False, seconds=4343)
