"""Test the vLLM engine on vLLM's CPU build with the demo's model (`make test-engines`).

The engine contract; log-probabilities against the trainer's, with and without adapters;
asynchronous runs with every exact route, versions checked against the server's stamps; faults that
the probe detects; killed servers and trainers.
"""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console

from tests.engines.test_server_process import group_lives, group_members
from tests.support.fake_vllm import rounded_as_vllm
from unstale import recipes
from unstale.analysis.audit import audit
from unstale.cli import session
from unstale.config import (
    SHIPPED_POLICY,
    AuditConfig,
    EngineConfig,
    EvalConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
    make_task,
)
from unstale.durability.journal import Journal
from unstale.durability.run_folder import EVENTS, RunFolder
from unstale.engines import EngineDied, SamplingParams, remote
from unstale.engines.embedded.runner import Chunk, Runner, Step
from unstale.engines.embedded.worker import build_runner
from unstale.engines.registry import EngineOptions
from unstale.engines.remote import ProbeFailed, ServerReply
from unstale.engines.servers import vllm
from unstale.engines.servers.vllm import AdapterVllmEngine, VllmEngine
from unstale.engines.vllm_server import EXTENSION, VllmServer
from unstale.model.lora import Base, Merging, base_checksum
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.old_logps import has_clean_behavior
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Sampled
from unstale.testing import check_engine, nudge, plain_logps
from unstale.trainer.auditor import score_truth
from unstale.weights.recording import RECORDED, Recorded
from unstale.weights.store import VersionStore

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-engines"
    ),
]
ROOT = Path(__file__).parents[2]
Dtype = Literal["bfloat16", "float32"]
EXACT: tuple[str, ...] = ("snapshot_old", "old_logit_model", "interrupt_sync", "eager")


def _engine(dtype: Dtype = "float32", *, url: str = "", extension: str = EXTENSION) -> VllmEngine:
    options = EngineOptions(SHIPPED_POLICY, dtype=dtype, max_running=32, url=url)
    return VllmEngine(options, extension=extension)


def _run(engine: VllmEngine, story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await engine.start()
            await story()
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start a float32 server to attach to, once for all tests, because a start takes a minute.

    It has so few slots that replies always wait.
    """
    engine = VllmEngine(EngineOptions(SHIPPED_POLICY, dtype="float32", max_running=4))
    asyncio.run(engine.start())
    yield engine.url
    asyncio.run(engine.close())


def test_vllm_keeps_the_contract(url: str) -> None:
    policy = Policy.load(SHIPPED_POLICY)
    check_engine(lambda: _engine(url=url), update=policy.model.state_dict())


@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_log_d_is_float_noise(
    dtype: Dtype, mean: float, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds after updates, at another temperature, and with a cached prefix."""
    policy = Policy.load(SHIPPED_POLICY, dtype=dtype)
    engine = _engine(url=url) if dtype == "float32" else _engine(dtype)
    found: list[torch.Tensor] = []

    async def story() -> None:
        for version in range(3):
            if version:
                nudge(policy, seed=version, size=0.01)
            await engine.interrupt()
            await engine.load(policy.weights(), version)
            await engine.resume()
            for temperature in (1.0, 0.7):
                found.append(await _log_d(engine, policy, temperature))

    _run(engine, story)
    log_d = torch.cat(found)
    with capsys.disabled():
        print(  # noqa: T201 - what is measured is to be seen
            f"\n{dtype}: |log D| of {len(log_d)} tokens: mean {log_d.mean():.2g}, 99% "
            f"{log_d.quantile(0.99):.2g}, most {log_d.max():.2g}"
        )
    assert len(log_d) > 3000 and log_d.mean() < mean


def test_the_server_samples_from_its_own_copy_while_a_delta_changes_the_file(url: str) -> None:
    policy = Policy.load(SHIPPED_POLICY)
    options = EngineOptions(SHIPPED_POLICY, dtype="float32", url=url, deltas=True)
    engine, store = VllmEngine(options), VersionStore(policy.twin().weights())
    versions = []
    for version in range(2):
        nudge(policy, seed=version, size=0.01)
        store.put(version, policy.weights())
        versions.append(policy.twin())
    found: list[torch.Tensor] = []

    async def story() -> None:
        await engine.load(versions[0].weights(), 0)
        await engine.resume()
        await engine.stage(store.delta(1), 1)
        found.append(await _log_d(engine, versions[0], 1.0))
        await engine.interrupt()
        await engine.load(store.delta(1), 1)
        await engine.resume()
        found.append(await _log_d(engine, versions[1], 1.0))
        found.append(await _log_d(engine, versions[0], 1.0))

    _run(engine, story)
    assert max(found[0].mean(), found[1].mean()) < 1e-4 < 1e-2 < found[2].mean()


def test_an_fp8_server_quantises_the_weights_at_each_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is without FP8 products, which need a GPU or a CPU with AMX."""
    monkeypatch.setattr(vllm, "can_quantise", lambda: True)
    options = EngineOptions(SHIPPED_POLICY, max_running=32, quantise="fp8")
    engine = VllmEngine(options, extension="tests.servers.emulated_fp8.Emulated")
    plain = Policy.load(SHIPPED_POLICY)
    rounded = plain.twin()
    found: list[tuple[float, float]] = []

    async def story() -> None:
        for version in range(2):
            nudge(plain, seed=version, size=0.01)
            rounded.load_weights(rounded_as_vllm(plain.weights()))
            await engine.interrupt()
            await engine.load(plain.weights(), version)
            await engine.resume()
            alone, both = [await _log_d(engine, policy, 1.0) for policy in (plain, rounded)]
            found.append((float(alone.mean()), float(both.mean())))

    _run(engine, story)
    with capsys.disabled():
        print(f"\nmean |log D| against plain and rounded weights: {found}")  # noqa: T201
    assert all(both < 0.015 < 0.6 * alone for alone, both in found)


def made_adapters(policy: Policy, *, seed: int) -> dict[str, torch.Tensor]:
    """Return random adapters of rank 8. They are made by hand: sampling does not need PEFT."""
    noise = torch.Generator().manual_seed(seed)
    adapters = {}
    for name, weight in policy.weights().items():
        if not name.endswith("_proj.weight"):
            continue
        layer = name.removesuffix("weight")
        adapters[f"{layer}lora_A.weight"] = 0.05 * torch.randn(8, weight.shape[1], generator=noise)
        adapters[f"{layer}lora_B.weight"] = 0.05 * torch.randn(weight.shape[0], 8, generator=noise)
    return adapters


def test_adapters_are_merged_for_the_server(url: str) -> None:
    policy, merging = (
        Policy.load(SHIPPED_POLICY),
        Merging(base_checksum(SHIPPED_POLICY), "float32", 4.0, 8),
    )
    engine = VllmEngine(
        EngineOptions(SHIPPED_POLICY, dtype="float32", max_running=32, url=url, merging=merging)
    )
    adapters = made_adapters(policy, seed=0)
    before = policy.twin()
    policy.load_weights(Base(SHIPPED_POLICY, merging).merged(adapters))
    found: list[torch.Tensor] = []

    async def story() -> None:
        await engine.load(adapters, 0)
        await engine.resume()
        found.append(await _log_d(engine, policy, 1.0))
        found.append(await _log_d(engine, before, 1.0))

    _run(engine, story)
    assert found[0].mean() < 1e-4 < 1e-2 < found[1].mean()


def test_several_versions_of_adapters_are_sampled_at_once() -> None:
    """This includes one that was dropped and added again."""
    merging = Merging(base_checksum(SHIPPED_POLICY), "float32", 4.0, 8)
    policies = [Policy.load(SHIPPED_POLICY) for _ in range(3)]
    adapters = [made_adapters(policy, seed=seed) for seed, policy in enumerate(policies)]
    for policy, each in zip(policies, adapters, strict=True):
        policy.load_weights(Base(SHIPPED_POLICY, merging).merged(each))
    options = EngineOptions(
        SHIPPED_POLICY,
        dtype="float32",
        max_running=8,
        merging=merging,
        adapters="unmerged",
        max_versions=4,
    )
    engine = AdapterVllmEngine(options)
    prompt = [*range(3, 60)]

    async def sample(version: int) -> None:
        params = SamplingParams(24, (), version=version, seed=version)
        piece = (await engine.sample(prompt, params)).piece
        errors = []
        for policy in (policies[version], policies[version - 1]):
            expected = plain_logps(policy, [*prompt, *piece.tokens])[len(prompt) :]
            errors.append((expected - torch.tensor(piece.behavior_logp).double()).abs().mean())
        assert piece.version == version and errors[0] < 1e-4 < 1e-2 < errors[1]

    async def story() -> None:
        for version, each in enumerate(adapters):
            await engine.interrupt()
            await engine.load(each, version)
            await engine.resume()
        await asyncio.gather(*map(sample, range(3)))
        await engine.keep_versions([1])
        await engine.add_version(adapters[0], 0)
        await asyncio.gather(*map(sample, range(3)))

    _run(engine, story)


async def _log_d(engine: VllmEngine, policy: Policy, temperature: float) -> torch.Tensor:
    """Return `[T]` absolute values of log D over two turns of sixteen episodes."""
    noise = torch.Generator().manual_seed(0)
    contexts = [
        torch.randint(3, 1000, (20 + number,), generator=noise).tolist() for number in range(16)
    ]
    found = []
    for turn in range(2):
        asking = [
            engine.sample(
                context, SamplingParams(40, (), temperature=temperature, seed=16 * turn + number)
            )
            for number, context in enumerate(contexts)
        ]
        for context, reply in zip(contexts, await asyncio.gather(*asking), strict=True):
            start = len(context)
            context.extend(reply.piece.tokens)
            tokens = torch.tensor(context)
            where = torch.arange(len(context)) >= start
            scored = policy.score(
                Packed(tokens, (0, len(context))),
                where,
                temperature=temperature,
                max_tokens_per_microbatch=4096,
            )
            found.append((scored.logp[where] - torch.tensor(reply.piece.behavior_logp)).abs())
            context.extend([7] * 9)
    return torch.cat(found)


@pytest.mark.parametrize(("fault", "version"), [("Unmended", 0), ("Corrupting", 1)])
def test_the_probe_catches_it_within_one_update(fault: str, version: int) -> None:
    policy, engine = Policy.load(SHIPPED_POLICY), _engine(extension=f"tests.servers.faults.{fault}")

    async def story() -> None:
        for number in range(version):
            await engine.load(policy.weights(), number)
        await engine.load(policy.weights(), version)
        await engine.resume()
        with pytest.raises(ProbeFailed, match=f"after loading version {version}"):
            await engine.sample([1, 2], SamplingParams(2, ()))
        with pytest.raises(EngineDied, match=f"after loading version {version}"):
            await engine.sample([1, 2], SamplingParams(2, ()))

    _run(engine, story)


def _config(
    folder: Path, route: str = "snapshot_old", *, urls: str = "", **changes: Any
) -> RunConfig:
    config = replace(
        recipes.retail(),
        runs=folder,
        name="run",
        max_steps=20,
        engine=EngineConfig(
            backend="vllm", urls=urls, dtype="float32", max_running=24, max_context=768
        ),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=8),
        task=make_task("retail"),
        trainer=TrainerConfig(lr=1e-4),
        old_logps=OldLogpsConfig(route=route),
        audit=AuditConfig(share=1.0, record=True),
        eval=EvalConfig(tasks=0),
    )
    return replace(config, **changes)


def _quiet() -> Console:
    return Console(file=StringIO())


@pytest.mark.parametrize(
    ("route", "steps"),
    [("snapshot_old", 20), ("old_logit_model", 6), ("interrupt_sync", 6), ("eager", 6)],
)
def test_an_asynchronous_run(
    route: str, steps: int, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped: Counter[tuple[str, tuple[int, ...]]] = Counter()
    generate = VllmEngine.generate

    async def noted(
        self: VllmEngine, name: str, tokens: Sequence[int], params: SamplingParams
    ) -> ServerReply:
        answer = await generate(self, name, tokens, params)
        for version, end in answer.versions:
            stamped[version, (*tokens, *answer.tokens[:end])] += 1
        return answer

    monkeypatch.setattr(VllmEngine, "generate", noted)
    rows = session.train(
        _config(tmp_path, route, urls=url, max_steps=steps), console=_quiet()
    ).metrics
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    assert all(
        row["engine/probe_logp_error"] < 1e-3 and row["correction/log_d_abs_mean"] < 1e-4
        for row in rows
    )
    assert all(
        row["old_logps/exact_share"] == 1 and row["audit/logp_error_abs_mean"] < 1e-5
        for row in rows
    )
    _hold_against_the_embedded_engine(tmp_path / "run")
    held: Counter[tuple[str, tuple[int, ...]]] = Counter()
    versions, interrupted = set(), 0
    with Journal.read(tmp_path / "run") as journal:
        for step in range(1, steps + 1):
            for trajectory in (t for group in journal.consumed(step) for t in group.trajectories):
                before: tuple[int, ...] = ()
                for piece, after in zip(
                    trajectory.pieces, (*trajectory.pieces[1:], None), strict=True
                ):
                    before += piece.tokens
                    if isinstance(piece, Sampled):
                        held[str(piece.version), before] += 1
                        versions.add(piece.version)
                        interrupted += isinstance(after, Sampled)
    assert held <= stamped, "a token is of another version than the server stamped it with"
    # On a busy machine the server may sample nothing between two steps: versions can be unused.
    assert len(versions) > steps / 2, f"of {steps} versions only {sorted(versions)} sampled"
    assert interrupted or steps < 20, "no reply went on under another version"


def _hold_against_the_embedded_engine(run: Path) -> None:
    """Compare each exact route on the sampled tokens with the embedded engine's
    log-probabilities."""
    rows = audit(run, routes=EXACT, console=_quiet())["routes"]
    assert sorted(row["route"] for row in rows) == sorted(EXACT)
    # the largest of thousands of tokens, in float32 and in passes of other sizes
    assert all(row["exact_fraction"] == 1 and row["claimed_error_max"] < 3e-5 for row in rows)
    recorded, policy = Recorded(run / RECORDED), Policy.load(SHIPPED_POLICY)
    runner = build_runner(SHIPPED_POLICY, dtype="float32", max_slots=1, max_context=768)
    apart = []
    for step in recorded.steps[:: max(1, len(recorded.steps) // 4)]:
        batch = recorded.batch(step).batch
        scorer = LocalScorer(policy, 1.0, 4096)
        with scorer.reading(recorded.weights):
            old_logp = score_truth(scorer, batch).logp
        start, end = batch.spans()[0]
        where = has_clean_behavior(batch)[start:end]
        for version in batch.version[start:end][where].unique().tolist():
            runner.load(recorded.weights(version))
            own = where & (batch.version[start:end] == version)
            logp = _embedded_logps(runner, batch.tokens[start:end])
            apart.append((logp - old_logp[start:end])[own].abs())
    found = torch.cat(apart)  # float32 noise: an improbable token's logits are far from the largest
    assert len(found) > 50 and found.mean() < 1e-5 and found.max() < 1e-4


def _embedded_logps(runner: Runner, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[T]` log-probabilities, computed token by token as in sampling. The first is 0."""
    logps, none = [torch.zeros(())], torch.empty(0, dtype=torch.long)
    with torch.inference_mode():
        for at, after in enumerate(tokens.tolist()[1:]):
            chunk = (Chunk(0, at, at + 1),)
            logits = runner.forward(Step(none, chunk, tokens[at : at + 1], torch.tensor([at])))
            logps.append(logits[0].log_softmax(-1)[after])
    return torch.stack(logps)


def test_two_servers_and_one_dies_in_mid_run(url: str, tmp_path: Path) -> None:
    """Attached servers are not restarted. Episodes move to the other server with their prefixes."""
    other = VllmEngine(EngineOptions(SHIPPED_POLICY, dtype="float32", max_running=4))
    asyncio.run(other.start())

    def kill() -> None:
        while (
            not (tmp_path / "run" / "metrics.jsonl").exists()
            or len(RunFolder(tmp_path / "run").metrics()) < 3
        ):
            time.sleep(0.05)
        assert other.server is not None
        os.killpg(other.server.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    rows = session.train(
        _config(tmp_path, urls=f"{url} {other.url}", max_steps=8), console=_quiet()
    ).metrics
    killer.join()
    asyncio.run(other.close())
    assert len(rows) == 8 and [row["engine/crashes"] for row in rows if row["engine/crashes"]] == [
        1
    ]
    assert all(
        row["old_logps/exact_share"] == 1 and row["audit/logp_error_abs_mean"] < 1e-5
        for row in rows
    )


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda sent: sent.name)
def test_a_server_dies_or_hangs_in_mid_run(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HANG_S", 20.0)
    pids: list[int] = []
    start = VllmServer.start

    def noted(self: VllmServer, is_wanted: Callable[[], bool]) -> None:
        start(self, is_wanted)
        pids.append(self.pid)

    monkeypatch.setattr(VllmServer, "start", noted)

    def kill() -> None:
        while (
            not (tmp_path / "run" / "metrics.jsonl").exists()
            or len(RunFolder(tmp_path / "run").metrics()) < 3
        ):
            time.sleep(0.05)
        os.killpg(pids[0], sent)

    killer = threading.Thread(target=kill)
    killer.start()
    rows = session.train(_config(tmp_path, max_steps=8), console=_quiet()).metrics
    killer.join()
    assert len(rows) == 8 and sum(row["engine/restarts"] for row in rows) == 1 and len(pids) == 2
    events = RunFolder(tmp_path / "run").rows(EVENTS)
    (restarted,) = [event for event in events if event["kind"] == "engine_restarted"]
    assert ("within 20 s" in restarted["cause"] or "for 20 s" in restarted["cause"]) == (
        sent == signal.SIGSTOP
    )
    assert all(
        row["old_logps/exact_share"] == 1 and row["audit/logp_error_abs_mean"] < 1e-5
        for row in rows
    )


_PROGRAM = """
import asyncio
from pathlib import Path
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.vllm import VllmEngine
async def main():
    engine = VllmEngine(EngineOptions(Path("unstale/recipes/base_policy"), dtype="float32"))
    await engine.start()
    print(engine.server.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_a_server_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        group = int(trainer.stdout.readline())
        shared = _shared_memory(group)
        assert shared
        trainer.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and group_lives(group):
        time.sleep(0.1)
    assert not group_lives(group) and not [path for path in shared if path.exists()]


def _shared_memory(group: int) -> set[Path]:
    """Return the shared memory files that the run's processes have mapped."""
    maps = [(process / "maps").read_text() for process in group_members(group)]
    return {
        Path(line.split()[-1])
        for text in maps
        for line in text.splitlines()
        if "/dev/shm/psm_" in line
    }
