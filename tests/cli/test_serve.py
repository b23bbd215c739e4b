"""`unstale eval` and `unstale serve` need no trainer, report one error and restart engines."""

import gc
import socket
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from unstale.cli import main
from unstale.cli.evaluate import evaluate
from unstale.cli.failures import RunFailed
from unstale.cli.process import YOUNG_OBJECTS
from unstale.cli.serve import serve
from unstale.config import (
    SHIPPED_POLICY,
    ConfigError,
    EngineConfig,
    EvalConfig,
    RunConfig,
    TaskConfig,
)
from unstale.engines import EngineDied
from unstale.engines.scripted import ScriptedEngine

CONFIG = RunConfig(
    recipe="toy",
    task=TaskConfig(env="calculator"),
    engine=EngineConfig(max_completion_tokens=4),
    eval=EvalConfig(tasks=2),
)


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("verb", ["eval", "serve"])
def test_a_server_that_is_not_there_is_one_message_and_exit_code_1(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(
            [
                verb,
                str(SHIPPED_POLICY),
                "calculator",
                "--engine.backend=vllm",
                "--engine.urls=http://127.0.0.1:1",
            ]
        )
    said = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in said
    assert said.splitlines()[-1].startswith(
        "the run failed: EngineDied: vLLM at http://127.0.0.1:1: "
    )


class Scripted(ScriptedEngine):
    """An engine whose first starts fail with `errors`."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(lambda tokens, params: [5] * params.max_tokens)
        self._errors = list(errors)
        self.loaded: list[int] = []

    async def start(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        await super().start()

    async def load(self, update: Any, version: int) -> None:
        await super().load(update, version)
        self.loaded.append(version)


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    """Use this engine instead of a real one, without training."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("it is not needed")

    def with_engine(*errors: Exception) -> Scripted:
        engine = Scripted(*errors)
        monkeypatch.setattr("unstale.builders.sampling.build_engine", lambda *_: engine)
        for unneeded in ("LocalTrainer", "Auditor"):
            monkeypatch.setattr(f"unstale.builders.local.{unneeded}", refused)
        return engine

    return with_engine


def test_eval_goes_without_a_trainer_and_survives_its_engine(
    speaking: Callable[..., Scripted],
) -> None:
    engine = speaking(EngineDied("gone"))
    assert evaluate(SHIPPED_POLICY, CONFIG, console=Console(file=StringIO())).tasks == 2
    assert engine.loaded == [0]


def served(port: int) -> str:
    out = StringIO()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
        serve(SHIPPED_POLICY, CONFIG, port=port, console=Console(file=out, width=300))
    return out.getvalue()


def test_serve_goes_without_a_trainer_and_survives_its_engine(
    speaking: Callable[..., Scripted],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = speaking(EngineDied("gone"))
        assert served(taken.getsockname()[1]) == "restarting the engine: gone\n"
    assert engine.loaded == [0]


def test_no_collection_of_all_objects_holds_the_event_loop_of_serve(
    speaking: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a collection takes 0.25 s, and a request of 2 MB causes one."""
    young: list[int] = []

    def run(work: Any) -> None:
        young.append(gc.get_threshold()[0])
        work.close()

    monkeypatch.setattr("unstale.cli.serve.run_until_complete", run)
    speaking()
    before = gc.get_threshold()
    serve(SHIPPED_POLICY, CONFIG, console=Console(file=StringIO()))
    assert young == [YOUNG_OBJECTS] and gc.get_threshold() == before


@pytest.mark.parametrize("act", [evaluate, serve])
def test_an_error_of_the_engine_is_its_own(
    act: Callable[..., Any], speaking: Callable[..., Scripted]
) -> None:
    speaking(OSError("no space left"))
    with pytest.raises(RunFailed, match="OSError: no space left"):
        act(SHIPPED_POLICY, CONFIG, console=Console(file=StringIO()))
