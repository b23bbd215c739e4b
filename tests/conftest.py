"""Settings of all tests: one torch thread, and shape checks in `unstale.algorithms`."""

import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

os.environ.setdefault("UNSTALE_ALLOW_WEAK_SANDBOX", "1")  # machines of tests may be root's
os.environ.update(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS="1")  # before torch loads

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

from unstale import stop_signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

install_import_hook(
    [
        "unstale.algorithms.audit",
        "unstale.algorithms.corrections",
        "unstale.algorithms.advantages",
        "unstale.algorithms.objectives",
        "unstale.algorithms.proximal",
    ],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

stop_signals.HANG_S = 0.0  # Python's only timer of this kind is pytest's `faulthandler_timeout`

# Background jobs of a shell ignore SIGINT, and so would the processes that tests start and
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("unstale", deadline=None)  # tests do not measure time
settings.load_profile("unstale")

collect_ignore = ["foreign_package"]  # an import would register what it adds

ROOT = Path(__file__).parents[1]
LONG_FILES = [
    ROOT / "tests" / name
    for name in (
        "trainer/test_ranks.py",
        "durability/test_chaos.py",
        "test_examples.py",
        "isolation/test_isolation.py",
        "test_moe.py",
        "durability/test_faults.py",
        "benchmarks/test_speed.py",
        "benchmarks/test_scale.py",
        "test_docs.py",
        "engines/test_pool.py",
        "old_logps/test_exact_routes.py",
        "durability/test_recover.py",
        "durability/test_resume.py",
    )
]
"""The files that take longest. They begin first: otherwise one worker would run the last of them
while the other has nothing left to do.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out costly tests, or run only their first cases",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported. Later collections pass over what was imported.

    Otherwise a full collection takes 1.6 s, because torch, transformers and all tests are loaded.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {path: number for number, path in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    if config.option.quick:
        left_out = set(_costly_cases(items))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _costly_cases(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what `--quick` leaves out.

    Of a test marked `costly(cases=N)` the first N cases run. Without N, one runs if the test has
    parameters, and none otherwise. Raises UsageError for other arguments of the mark.
    """
    run: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("costly"):
            if mark.args or mark.kwargs.keys() - {"cases"}:
                raise pytest.UsageError(f"{item.nodeid}: the mark is costly or costly(cases=N)")
            test, bracket, _ = item.nodeid.partition("[")
            if run[test] >= mark.kwargs.get("cases", len(bracket)):
                yield item
            run[test] += 1


@pytest.fixture(scope="session", autouse=True)
def frozen_s() -> float:
    """Return the package's `FROZEN_S`. Tests have a longer one, because machines may be busy."""
    from tests.support.waits import wait_long_for_processes
    from unstale.weights import child_process

    limit = child_process.FROZEN_S
    wait_long_for_processes()
    return limit


@pytest.fixture(scope="session")
def pretrained() -> Path:
    """Return the folder of a pretrained chat model: 135M float32 weights, converted once.

    Tests that use it are skipped if its package is not installed.
    """
    from unstale.config import ConfigError
    from unstale.config.gguf import PACKAGED_POLICY, gguf_file
    from unstale.config.hub import model_folder

    try:
        gguf_file(PACKAGED_POLICY)
    except ConfigError as error:
        pytest.skip(str(error))
    return model_folder(PACKAGED_POLICY)


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """Fork the engines and scorers of these tests, which saves their imports.

    Other tests start them as the package does.
    """
    from tests.support.forked import ForkedChild
    from unstale.weights import child_process

    with pytest.MonkeyPatch.context() as patch:
        popen = SimpleNamespace(Popen=ForkedChild, DEVNULL=subprocess.DEVNULL)
        patch.setattr(child_process, "subprocess", popen)
        yield


@pytest.fixture(scope="session", autouse=True)
def packing_of_equal_models_is_checked_once() -> Iterator[None]:
    """Reuse the result of `check_packing` for models of the same class, options and weights.

    Most tests make the same small model, and the check takes seven forward passes.
    """
    from unstale.model import policy
    from unstale.model.packing_check import Packability, check_packing
    from unstale.weights.bits import checksum

    known: dict[tuple[object, ...], Packability] = {}

    def check(
        model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> Packability:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in state.values()):
            return check_packing(model, tokenizer)
        implementation = getattr(model.config, "_experts_implementation", None)
        options = model.config.to_json_string(use_diff=False), implementation, model.training
        with torch.no_grad():
            key = (
                type(model),
                type(tokenizer),
                *options,
                next(model.parameters()).dtype,
                checksum(state),
            )
        if key not in known:
            known[key] = check_packing(model, tokenizer)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "check_packing", check)
        yield
