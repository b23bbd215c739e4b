"""vLLM's server as a process of ours, on a socket in a folder that only this user can open."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from unstale.engines.embedded.leftovers import hold, sweep

EXTENSION = "unstale.engines.vllm_worker.Extension"
_PREFIX = "unstale-vllm-"
_LAST_WORDS = 4000
_GOODBYE_S = 10.0


class Server:
    """All its processes are one group, which ends with `close` or with this process.

    It begins with random weights, so that a probe sees whatever the first load does not reach.
    """

    def __init__(self, model_folder: Path, *, dtype: str, threads: int, extension: str) -> None:
        self._folder = Path(tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(6)}")
        self._held = contextlib.ExitStack()
        self.url = f"unix:{self._folder}/http"
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._condemned = False
        self._arguments = [
            f"--model={model_folder.resolve()}", f"--dtype={dtype}", f"--worker-extension-cls={extension}",
            f"--uds={self._folder}/http", "--load-format=dummy", "--skip-tokenizer-init", "--generation-config=vllm",
            "--logprobs-mode=processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details",
            "--uvicorn-log-level=warning",
        ]  # fmt: skip
        if not torch.cuda.is_available():
            self._arguments.append("--enforce-eager")

    def limit(self, *, running: int, context: int) -> None:
        self._arguments += [f"--max-num-seqs={running}", f"--max-model-len={context}"]

    @property
    def lives(self) -> bool:
        return self._process is not None and not self._condemned and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the engine has not been started: await start() first")
        return self._process.pid

    def begin(self) -> None:
        """In place of one that has ended. It is long until it answers."""
        self._end()
        self._condemned = False
        self._held.close()
        sweep(self._folder.parent, _PREFIX)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._held.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._held.enter_context(hold(self._folder))
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "unstale.engines.vllm_worker",
                    *self._arguments,
                ],
                stdin=subprocess.PIPE,  # its end is how the server learns of ours
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment(),
            )

    def last_words(self) -> str:
        """How it ended."""
        code = self._process.poll() if self._process is not None else None
        log = self._folder / "log"
        words = (
            log.read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip() if log.exists() else ""
        )
        return f"the server ended with exit code {code}" + (f":\n{words}" if words else "")

    def condemn(self) -> None:
        """Whatever is wrong with it, it is to end."""
        self._condemned = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and wait until it is gone. It is asked first, for what it has in shared memory outlives a kill."""
        if self._process is not None and self.lives:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GOODBYE_S)
        self._end()
        self._held.close()

    def _end(self) -> None:
        self.condemn()
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _environment(self) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        own = {
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": str(self._threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_RPC_BASE_PATH": str(self._folder),
        }
        usual = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        return usual | dict(os.environ) | own
