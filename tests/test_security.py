"""Test the statements of docs/security.md.

The package can neither unpickle nor listen. It imports code only where the user names it. An
untrusted run or model folder runs no code, writes nowhere else and exposes no other file.
"""

import ast
import json
import os
import pickle
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.cli.test_replay import HUGE, a_batch, goes_wrong
from tests.cli.test_run import small
from tests.support.distributions import add_distribution
from unstale.builders import build_components
from unstale.cli import session
from unstale.config import SHIPPED_POLICY, AuditConfig, ConfigError, EndpointConfig, EvalConfig
from unstale.durability.journal import JOURNAL, Journal, JournalError, check
from unstale.engines.embedded.fallback import TransformersRunner
from unstale.engines.embedded.packed import PackedRunner
from unstale.engines.registry import EngineOptions
from unstale.model.loading import load_tokenizer
from unstale.model.policy import Policy
from unstale.trainer.failed_batch import save_failed_batch
from unstale.weights.recording import WENT_WRONG, FailedStep

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "unstale").rglob("*.py"))


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return every node of the package's syntax trees, each with the name of its file."""
    found = []
    for path in SOURCES:
        name = str(path.relative_to(ROOT / "unstale"))
        found += [(name, node) for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    return found


RUNS_WHAT_IT_READS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "code",
    "codeop",
    "runpy",
}
LISTENS = {
    "http.server",
    "socketserver",
    "xmlrpc.server",
    "wsgiref.simple_server",
    "multiprocessing.managers",
    "multiprocessing.connection",
    "torch.distributed.rpc",
}


def imported() -> Iterator[tuple[str, str]]:
    """Return every module that a file imports, with its parent packages."""
    for path, node in nodes():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            yield path, name


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Return every call by its dotted name."""
    for path, node in nodes():
        if isinstance(node, ast.Call):
            yield path, ast.unparse(node.func), node


def test_nothing_is_imported_that_runs_what_it_reads() -> None:
    """Of YAML only the safe reader is called, which makes plain data.

    The handle of an engine host goes as Ray pickles it from a run to its rollout processes.
    """
    found = {(path, name) for path, name in imported() if name.split(".")[0] in RUNS_WHAT_IT_READS}
    assert found == {
        ("cluster/hosted_engine.py", "pickle"),
        ("envs/sandboxes/folders.py", "yaml"),
    }
    of_yaml = {name for _, name, _ in calls() if name.startswith("yaml.")}
    assert of_yaml == {"yaml.safe_load"}


def test_nothing_is_called_that_runs_what_it_reads() -> None:
    direct = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "breakpoint",
        "builtins.eval",
        "builtins.exec",
        "os.system",
        "os.popen",
    }
    unpickling = {
        "torch.load",
        "torch.save",
        "torch.jit.load",
        "torch.hub.load",
        "np.load",
        "numpy.load",
        "dcp.FileSystemReader",
        "FileSystemReader",
        "FileSystemWriter",
        "getattr_static",
    }
    programs = {"rewards/unit_test_worker.py"}  # which runs in the sandbox only
    found = {
        (path, name)
        for path, name, call in calls()
        if name in direct | unpickling
        and path not in programs
        and not (name == "np.load" and "allow_pickle=False" in ast.unparse(call))
    }
    assert found == set()
    keywords = {
        (path, word.arg, ast.unparse(word.value))
        for path, _, call in calls()
        for word in call.keywords
    }
    assert not {
        (path, name, value)
        for path, name, value in keywords
        if (name, value)
        in {
            ("shell", "True"),
            ("allow_pickle", "True"),
            ("trust_remote_code", "True"),
            ("weights_only", "False"),
            ("use_safetensors", "False"),
        }
    }


def test_torchs_checkpoints_are_read_and_written_in_safetensors() -> None:
    """torch's default reader unpickles metadata."""
    storage = {"load_sharded": "storage_reader", "save_sharded": "storage_writer"}
    found = [(path, name, call) for path, name, call in calls() if name in storage]
    files = ("durability/checkpoint_files.py", "durability/checkpoint_shards.py")
    assert sorted((path, name) for path, name, _ in found) == [
        (path, name) for path in files for name in storage
    ]
    modules = {f"torch.distributed.checkpoint.state_dict_{verb}" for verb in ("loader", "saver")}
    using = {path for path, name in imported() if name in modules}
    assert using == set(files), "no other file reads or writes torch's checkpoints"
    for path, name, call in found:
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        given = words[storage[name]]
        assigned = {
            ast.unparse(node.value.func)
            for where, node in nodes()
            if where == path and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            if ast.unparse(node.targets[0]) == given
        }
        kind = storage[name].removeprefix("storage_").capitalize()
        assert assigned == {f"HuggingFaceStorage{kind}"}, (path, name, given)


def test_code_is_imported_by_name_in_few_places() -> None:
    """The package's own names, and `task.env`, `task.reward`, `trackers` and a recipe.

    VitaBench's adapter loads the package's judge and HTTP client, which are in other layers.
    """
    places = {path for path, name, _ in calls() if name.endswith("import_module")}
    assert places == {
        "__init__.py",
        "cli/verbs.py",
        "config/checks.py",
        "config/objectives.py",
        "config/plugins.py",
        "config/techniques.py",
        "config/variants.py",
        "engines/registry.py",
        "research/adapters/bfcl.py",
        "research/adapters/vita.py",
        "envs/registry.py",
        "observe/trackers/__init__.py",
    }
    assert {path for path, name, _ in calls() if name == "build_taskset"} <= {
        "cli/rollout_process.py",
        "builders/sampling.py",
        "cli/supervised_start.py",
        "cli/session.py",
        "cli/sft.py",
        "isolation/worker.py",
        "lint/techniques.py",
        "research/commands/route.py",
        "research/envs/chain.py",
        "research/probe_distillation.py",
        "research/synthesize.py",
    }


def test_no_library_is_imported_from_the_current_folder(tmp_path: Path, canary: Path) -> None:
    """The command is a script of another folder, as that of an installed package."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "command.py"
    script.write_text("from unstale.cli.main import main\nmain()\n")
    here = tmp_path / "from_somebody_else"
    here.mkdir()
    for name in ("rich", "shtab", "torch", "msgspec", "json", "huggingface_hub"):
        (here / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    points = {"unstale.recipes": {"theirs": "json:loads"}, "unstale.techniques": {"a": "json:b"}}
    add_distribution(here, "theirs", points)
    for words in (["recipes"], ["lint", "llm"]):  # the linter looks for the model in a cache
        subprocess.run([sys.executable, script, *words], cwd=here, check=True, capture_output=True)
    assert not canary.exists()


def test_nothing_listens_and_the_only_sockets_are_pairs() -> None:
    assert {path for path, name in imported() if name in LISTENS} == {
        "observe/trackers/prometheus.py"  # whose test fetches from loopback alone
    }
    verbs = {
        "bind",
        "listen",
        "accept",
        "create_server",
        "start_server",
        "start_unix_server",
        "create_unix_server",
    }
    heard = {(path, name) for path, name, _ in calls() if name.split(".")[-1] in verbs}
    servers = (
        "rollout/endpoint/server.py",
        "analysis/dashboard/server.py",
        "engines/embedded/cache_transfer.py",  # tests/engines/test_sent_caches.py: needs the key
    )
    assert {name for path, name in heard if path not in servers} <= {
        "child.listen",
        "each.listen",  # the sockets that the two servers made
        "claim.bind",  # the sandbox reserves a user id by a name in the kernel
        "inspect.signature(reward).bind",
        "super().create_server",  # of the virtual clock, whose clients are connected in memory
        "signature.bind",  # of a reward
        "self._child.listen",
    }
    served = [(name, call) for path, name, call in calls() if path in servers]
    listening = [ast.unparse(call) for name, call in served if name == "socket.create_server"]
    assert {text.split(", ")[0] for text in listening} == {
        "socket.create_server((HOST",  # which is loopback
        "socket.create_server((self.config.host",  # by default loopback
        "socket.create_server((host",  # of caches: loopback but on engine hosts
    }
    assert EndpointConfig().is_local
    assert EngineOptions(Path()).cache_host == "127.0.0.1"
    made = {
        (path, ast.unparse(call))
        for path, name, call in calls()
        if name in ("socket.socket", "socket.socketpair")
    }
    assert made and all(
        text
        in (
            "socket.socketpair()",
            "socket.socket(fileno=descriptor)",
            "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",  # the sandbox's, never read
        )
        for _, text in made
    )
    reached = [
        ast.unparse(call)
        for path, name, call in calls()
        if name.endswith("_connection")
        and "open" not in name
        and path != "cluster/session.py"  # it connects to the cluster that the user names
        and path != "engines/embedded/cache_transfer.py"  # it connects to an engine of the run
    ]
    assert all("sock=" in text for text in reached)


def test_transformers_is_never_allowed_code_from_a_folder_nor_a_pickle() -> None:
    found = [
        (path, name, {word.arg: ast.unparse(word.value) for word in call.keywords})
        for path, name, call in calls()
        if name.split(".")[-1] == "from_pretrained"
        and not path.startswith("recipes/base_policy/")  # reads its own
    ]
    assert sorted((path, name) for path, name, _ in found) == [
        ("model/dequantise.py", "AutoModelForCausalLM.from_pretrained"),
        ("model/dequantise.py", "AutoTokenizer.from_pretrained"),
        ("model/loading.py", "AutoTokenizer.from_pretrained"),
        ("model/loading.py", "kind.from_pretrained"),
        ("model/pictures.py", "AutoImageProcessor.from_pretrained"),
        ("research/corrector_worker.py", "AutoModelForCausalLM.from_pretrained"),
        ("research/corrector_worker.py", "AutoTokenizer.from_pretrained"),
        ("rewards/reward_model_worker.py", "AutoTokenizer.from_pretrained"),
        ("rewards/reward_model_worker.py", "kind.from_pretrained"),
    ]
    for path, name, words in found:
        assert words["trust_remote_code"] == "False" and words["local_files_only"] == "True", path
        is_data = "Tokenizer" in name or "Processor" in name
        assert is_data or words["use_safetensors"] == "True", path


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Return the file that the hostile code would write into the working folder."""
    return tmp_path / "was-here"


class Bomb:
    """An object that writes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.canary), "w")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED_POLICY, tmp_path / "model"))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ '%1000000000000d' % 1 }}", "needs more than 1,024 MiB"),
        ("{{ 'x' * 9000000000 }}", "needs more"),
        ("{{ 'x' | center(9000000000) }}", "needs more"),
        ("{{ '{:9000000000}'.format(1) }}", "needs more"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without an end"),
    ],
)
def test_a_template_that_takes_all_memory_is_refused(
    model_folder: Path, template: str, problem: str
) -> None:
    path = model_folder / "chat_template.jinja"
    own = path.read_text()
    path.write_text(own + template)
    with pytest.raises(ConfigError, match=f"the chat template in .* {problem}"):
        load_tokenizer(model_folder)
    with pytest.raises(ConfigError, match=f"the chat template in .* {problem}"):
        load_tokenizer(SHIPPED_POLICY, own + template)
    path.write_text(own)
    assert load_tokenizer(model_folder).chat_template == own


def test_weights_in_a_pickle_are_refused(model_folder: Path, canary: Path) -> None:
    pickled = model_folder / "pytorch_model.bin"
    pickled.write_bytes(pickle.dumps(Bomb(canary)))
    Policy.load(model_folder)  # nobody looks at it
    weights = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    for harmless in (False, True):
        if harmless:
            torch.save(weights, pickled)
        with pytest.raises(ConfigError, match=r"the model in .* cannot be read"):
            Policy.load(model_folder)
        for runner in (PackedRunner, partial(TransformersRunner, why_slow="")):
            with pytest.raises(ConfigError, match="safetensors"):
                runner(model_folder, dtype=torch.float32, max_slots=2, max_context=32)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_a_model_folder_brings_along_is_not_run(
    model_folder: Path, canary: Path, file: str
) -> None:
    (model_folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    told = json.loads((model_folder / file).read_text())
    kinds = {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", None],
    }
    for model_type in (told.get("model_type"), "not-known"):
        (model_folder / file).write_text(
            json.dumps(
                told | {"auto_map": kinds, "model_type": model_type, "tokenizer_class": "Evil"}
            )
        )
        try:
            Policy.load(model_folder)
        except ConfigError as error:
            assert "cannot be read" in str(error)
    assert not canary.exists()


WATCH = """
import json, os, sys, tempfile

tempfile.gettempdir()  # finds the folder by writing a file into it
sys.path.insert(0, "")  # as `python -m` has it
from unstale.cli import main

if sys.argv[1] in ("audit", "replay"):
    import unstale.cli.replay  # what torch does while it loads is its own affair
    from unstale.model.kernels import kernels

    kernels()  # compiles code of this package, which no run folder can change

FORBIDDEN = {
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen",
    "pickle.find_class", "socket.connect", "socket.bind", "sqlite3.load_extension",
}
if sys.argv[1] in ("audit", "replay"):
    FORBIDDEN.remove("os.fork")  # a child process with limits renders the policy's chat template
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
seen, own = [], os.path.realpath("runs")

def watch(event, arguments):
    evil = event == "import" and "evil" in arguments[0]
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        named = isinstance(arguments[0], (str, bytes, os.PathLike))
        path = os.path.realpath(arguments[0]) if named else own
        evil = not os.fsdecode(path).startswith((own, "/dev/"))
    if evil or event in FORBIDDEN:
        seen.append([event, repr(arguments)[:300]])

sys.addaudithook(watch)
try:
    main.main(sys.argv[1:])
finally:
    sys.stderr.write(f"SEEN {json.dumps(seen)}\\n")
"""

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run with a batch that failed on a non-finite number."""
    config = small(
        tmp_path_factory.mktemp("runs"),
        max_steps=1,
        audit=AuditConfig(record=True),
        eval=EvalConfig(tasks=0),
    )
    run = session.train(config, console=Console(file=StringIO())).folder
    machine = build_components(config)
    goes_wrong(machine, a_batch(advantage=HUGE))
    assert "unstale replay" in save_failed_batch(machine.trainer, run)
    return run


@pytest.fixture
def hostile(recorded: Path, tmp_path: Path) -> Path:
    """Return a modified run: its config names code inside it, its text is HTML, its database has a
    view that would load a library, and its files are links to files of the reader."""
    runs = tmp_path / "runs"
    run = Path(shutil.copytree(recorded, runs / "evil"))
    (run / "payload.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\ndef make(): ...\n")
    config = json.loads((run / "config.json").read_text())
    config["task"]["env"], config["name"] = "runs.evil.payload:make", EVIL
    (run / "config.json").write_text(json.dumps(config))
    for name in ("events.jsonl",):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        texts = [
            {
                key: EVIL if isinstance(value, str) and key != "kind" else value
                for key, value in row.items()
            }
            for row in rows
        ]
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in texts))
    with sqlite3.connect(run / JOURNAL) as journal:
        journal.executescript(
            "ALTER TABLE failures RENAME TO honest;"
            "CREATE VIEW failures AS SELECT load_extension('runs/evil/payload') AS episode, * FROM "
            "honest;CREATE TRIGGER sprung AFTER INSERT ON groups BEGIN DELETE FROM pieces; END;"
        )
    journal.close()
    (tmp_path / "yours").write_text("a secret of yours")
    for name in (
        "report.html",
        "audit.json",
        "audit.md",
        "error.txt",
        "tokenizer.json",
    ):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "yours")
    return run


VERBS = {
    "report runs/evil": 0,
    "journal runs/evil": 1,
    "export-trajectories runs/evil --format jsonl": 1,
    "export-trajectories runs/evil --format parquet --out runs/out.parquet": 1,
    "replay runs/evil": 0,
    "audit runs/evil --routes rollout snapshot_old": 0,
    "compare --report runs": 0,
}
"""What looks at a run folder, and how it ends: a journal that has a view is refused, the others
need none."""


@pytest.mark.costly
@pytest.mark.parametrize("verb", VERBS)
def test_looking_at_a_hostile_run_folder_runs_nothing_and_writes_nowhere_else(
    hostile: Path, tmp_path: Path, verb: str
) -> None:
    plan = {
        "commands": [EVIL],
        "warnings": {EVIL: [EVIL]},
        "runs": [{"arm": EVIL, "seed": 0, "folder": "evil"}],
    }
    (hostile.parent / "plan.json").write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *verb.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    seen = json.loads(done.stderr.partition("SEEN ")[2].splitlines()[0])
    assert (seen, done.returncode, "Traceback" in done.stderr) == ([], VERBS[verb], False), (
        done.stderr
    )
    assert not (tmp_path / "was-here").exists()
    assert (tmp_path / "yours").read_text() == "a secret of yours"
    written = [
        path.read_text("utf-8") for path in hostile.parent.rglob("*.html") if not path.is_symlink()
    ]
    assert bool(written) == (verb.split()[0] in ("report", "audit"))
    assert not [
        bad for text in written for bad in ("<script>alert", "<img", "a secret") if bad in text
    ]


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (1 << 62, "{}"),
        (None, '{"a":' * 5000),
        (
            None,
            '{"batch/tokens": {"dtype": "I64", "shape": [4], "data_offsets": [0, 1099511627776]}}',
        ),
        (
            None,
            '{"batch/tokens": {"dtype": "I64", "shape": [1099511627776, 1099511627776], '
            '"data_offsets": [0, 8]}}',
        ),
    ],
)
def test_a_tensor_file_that_lies_about_itself_is_refused(
    tmp_path: Path, size: int | None, header: str
) -> None:
    path = tmp_path / WENT_WRONG
    path.write_bytes(struct.pack("<Q", size or len(header)) + header.encode() + bytes(8))
    with pytest.raises(ConfigError, match="is not a saved batch of a failed step"):
        FailedStep.load(path)


def test_nothing_is_written_through_the_links_beside_a_database(
    recorded: Path, tmp_path: Path
) -> None:
    """SQLite creates two more files beside a database if they are missing."""
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    (tmp_path / "yours").write_bytes(b"a secret of yours" * 4096)
    for name in (f"{JOURNAL}-shm", f"{JOURNAL}-wal", f"{JOURNAL}-journal"):
        (run / name).symlink_to(tmp_path / "yours")
    with suppress(JournalError), Journal.read(run) as journal:
        assert check(journal) == []
    assert (tmp_path / "yours").read_bytes() == b"a secret of yours" * 4096
