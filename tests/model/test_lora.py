"""Test training with LoRA adapters.

A policy's weights are its adapters; the base is shared and never changes. Exact routes stay exact,
and the audit confirms it. Merged weights equal PEFT's, and PEFT loads saved adapters. Engines merge
published adapters and refuse another base. A killed run continues bit for bit.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests import test_loop
from tests.durability.test_resume import Toy, config, played, require_sound
from tests.old_logps.test_exact_routes import BATCH, play, truth
from tests.support.fake_sglang import FakeSglang
from tests.support.fake_vllm import FakeVllm
from tests.trainer.test_trainer import WIDE, a_batch, learn, make
from unstale.analysis import audit
from unstale.builders import (
    build_old_logps,
    load_policy,
    shares_deltas,
)
from unstale.cli import session
from unstale.cli.resume import config_changes
from unstale.config import (
    SHIPPED_POLICY,
    AuditConfig,
    ConfigError,
    EngineConfig,
    EvalConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.durability.checkpoint_files import read_policy
from unstale.engines import Engine, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.embedded.runner import Chunk, Step
from unstale.engines.embedded.worker import build_runner
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.sglang import SglangEngine
from unstale.engines.servers.vllm import VllmEngine
from unstale.model.lora import Base, Lora
from unstale.model.policy import Policy
from unstale.old_logps.rollout import RolloutRoute
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.testing import check_old_logps, checkpoint_round_trip, nudge, plain_logps, tiny_policy
from unstale.trainer.local import LocalTrainer
from unstale.weights.publish import DirectPublisher
from unstale.weights.store import VersionStore

pytestmark = pytest.mark.usefixtures("forked_children")

LORA = Lora(rank=4, seed=5)
WITH_KL = RunConfig(recipe="", max_steps=2, correction=WIDE, objective=ObjectiveConfig(kl_coef=0.1))
TOKENS = list(range(2, 40))


def moved(**options: Any) -> Policy:
    """Return a policy with trained adapters."""
    policy = tiny_policy(lora=LORA, **options)
    nudge(policy, seed=1)
    return policy


def size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the base as a model folder."""
    made = tmp_path_factory.mktemp("models") / "base"
    tiny_policy().save(made)
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another base of the same shape."""
    made = tmp_path_factory.mktemp("models") / "other"
    tiny_policy(seed=1).save(made)
    return made


def test_at_first_nothing_is_changed_and_only_adapters_are_weights() -> None:
    plain, state = tiny_policy(), torch.get_rng_state()
    policy, again, another = (
        tiny_policy(lora=lora) for lora in (LORA, LORA, replace(LORA, seed=6))
    )
    assert torch.equal(torch.get_rng_state(), state), "no run's noise depends on it"
    assert torch.equal(plain_logps(policy, TOKENS), plain_logps(plain, TOKENS))
    assert {name.split(".")[-2] for name in policy.weights()} == {"lora_A", "lora_B"}
    assert not any("embed" in name or "lm_head" in name for name in policy.weights())
    a = [name for name in policy.weights() if name.endswith("lora_A.weight")]
    assert all(torch.equal(policy.weights()[name], again.weights()[name]) for name in a)
    assert not any(torch.equal(policy.weights()[name], another.weights()[name]) for name in a)
    with pytest.raises(ValueError, match="on one side only"):
        policy.load_weights(plain.weights())


def test_a_twin_has_adapters_of_its_own_over_the_same_base() -> None:
    policy = moved()
    twin = policy.twin()
    before = plain_logps(twin, TOKENS)
    nudge(policy, seed=2)
    assert torch.equal(plain_logps(twin, TOKENS), before) and not torch.equal(
        plain_logps(policy, TOKENS), before
    )
    one, two = (
        {weight.data_ptr() for weight in each.model.parameters()} for each in (policy, twin)
    )
    assert len(one & two) == len(list(tiny_policy().model.parameters())) and len(one - two) == len(
        policy.weights()
    )


@pytest.mark.costly
@pytest.mark.parametrize("route", ["snapshot_old", "interrupt_sync", "eager"])
def test_an_exact_route_keeps_its_contract_on_adapters(route: str) -> None:
    options = OldLogpsConfig(route=route)
    check_old_logps(lambda scorer: build_old_logps(options, scorer), lora=LORA)


def test_the_old_logit_process_has_the_base_and_follows_the_adapters() -> None:
    policy = tiny_policy(lora=LORA)
    with closing(
        build_old_logps(OldLogpsConfig(route="old_logit_model"), LocalScorer(policy, 1.0, 48))
    ) as route:
        copies = play(route, policy)
        values, exact = route.logps(BATCH, torch.empty(0))
        held = route.costs()["model_bytes"]
    assert torch.equal(exact, BATCH.sampled) and torch.allclose(
        values.double(), truth(BATCH, copies), atol=1e-5
    )
    assert held > size(tiny_policy().weights()), "its model is a whole one"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_moves_the_adapters_and_nothing_else(dtype: str) -> None:
    policy = tiny_policy(dtype=dtype, lora=LORA)
    base = {name: p.clone() for name, p in policy.model.named_parameters() if "lora_" not in name}
    trainer = make(policy, objective=ObjectiveConfig(kl_coef=0.1), lr=1e-2, optimizer="AdamW")
    assert trainer.scoring.reference_policy is not None
    untrained = plain_logps(trainer.scoring.reference_policy, TOKENS)
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    learn(trainer, a_batch())
    assert all(not torch.equal(before[name], tensor) for name, tensor in policy.weights().items())
    assert all(
        torch.equal(base[name], p) for name, p in policy.model.named_parameters() if name in base
    )
    assert torch.equal(plain_logps(trainer.scoring.reference_policy, TOKENS), untrained)
    state = trainer.state()
    assert len(state["weights"]) == len(policy.weights()) == len(state["optimizer"]["state"])
    assert {tensor.dtype for tensor in state["weights"].values()} == {torch.float32}
    assert {tensor.dtype for tensor in policy.weights().values()} == {policy.dtype}


def test_the_reference_is_the_base_also_when_a_run_goes_on() -> None:
    policy, again = tiny_policy(lora=LORA), tiny_policy(lora=LORA)
    trainer, after = (LocalTrainer(each, WITH_KL, RolloutRoute()) for each in (policy, again))
    nudge(policy, seed=1)
    after.restore(trainer.state())
    assert after.scoring.reference_policy is not None and torch.equal(
        plain_logps(again, TOKENS), plain_logps(policy, TOKENS)
    )
    assert torch.equal(
        plain_logps(after.scoring.reference_policy, TOKENS), plain_logps(tiny_policy(), TOKENS)
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_what_is_saved_is_a_model_folder_and_an_adapter_that_peft_loads(
    folder: Path, tmp_path: Path
) -> None:
    policy = moved()
    policy.save(tmp_path / "merged")
    policy.save(tmp_path / "base", base=True)
    assert (
        load_file(tmp_path / "base" / "model.safetensors").keys()
        == load_file(folder / "model.safetensors").keys()
    )
    merged, base = Policy.load(tmp_path / "merged"), Policy.load(tmp_path / "base")
    assert torch.equal(plain_logps(base, TOKENS), plain_logps(tiny_policy(), TOKENS))
    assert torch.allclose(plain_logps(merged, TOKENS), plain_logps(policy, TOKENS), atol=1e-4)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    theirs = PeftModel.from_pretrained(model, str(tmp_path / "merged" / "adapter"))
    with torch.no_grad():
        logits = [each(input_ids=torch.tensor([TOKENS])).logits for each in (theirs, policy.model)]
    assert torch.equal(*logits)
    assert (
        json.loads((tmp_path / "merged" / "adapter" / "adapter_config.json").read_text())["r"] == 4
    )
    whole = dict(theirs.merge_and_unload().named_parameters())
    assert all(torch.equal(whole[name], weight) for name, weight in merged.weights().items())


def test_merging_is_what_the_trainer_saves_and_refuses_another_base(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    policy = Policy.load(folder, lora=LORA)
    policy.load_weights(moved().weights())
    assert policy.merging is not None and policy.merging.scale == 8
    policy.save(tmp_path)
    whole, base = load_file(tmp_path / "model.safetensors"), Base(folder, policy.merging)
    merged = base.merged(policy.weights())
    assert merged.keys() == whole.keys() and all(
        torch.equal(merged[name], whole[name]) for name in whole
    )
    with pytest.raises(ValueError, match="adapters are trained on weights with checksum"):
        Base(other, policy.merging)
    name = next(iter(policy.weights()))
    with pytest.raises(ValueError, match="need a lora_A"):
        base.merged({name: policy.weights()[name]})
    with pytest.raises(ValueError, match="does not fit the base"):
        base.merged(
            {name.replace("q_proj", "z_proj"): tensor for name, tensor in policy.weights().items()}
        )


def test_a_base_in_shards_has_the_same_checksum(folder: Path, tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.model.save_pretrained(tmp_path, max_shard_size="20KB")
    policy.tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert Policy.load(tmp_path, lora=LORA).base == Policy.load(folder, lora=LORA).base != 0


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
@pytest.mark.parametrize(
    "targets, words",
    [
        ("q_prod", "no layer has the name q_prod; did you mean q_proj"),
        ("q_proj v_prj", "no layer has the name v_prj; did you mean v_proj"),
        ("q_proj norm", "norm"),
        ("lm_head", "lm_head is not a linear layer"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused(targets: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_policy(lora=Lora(4, targets=targets))
    assert len(tiny_policy(lora=Lora(4, targets="q_proj v_proj")).weights()) == 2 * 2 * 2


def test_without_peft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install .* -e .\.\[lora\]"):
        tiny_policy(lora=LORA)


def test_the_embedded_engine_samples_from_the_merged_weights(folder: Path) -> None:
    """This includes deltas. Adapters keep the trainer's precision, whatever the engine's is."""
    policy = Policy.load(folder, lora=LORA)
    engine = EmbeddedEngine(
        EngineOptions(
            folder,
            dtype="float32",
            max_context=128,
            max_running=4,
            deltas=True,
            merging=policy.merging,
        )
    )
    publisher = DirectPublisher(
        engine, dtype=policy.dtype, store=VersionStore(policy.twin().weights())
    )

    async def story() -> None:
        await engine.start()
        for version in range(3):
            policy.version = version
            publisher.prepare(policy, live={version - 1})
            assert 0 < publisher.bytes <= size(policy.weights())
            await publisher.publish()
            piece = (await engine.sample(TOKENS, SamplingParams(40, ()))).piece
            expected = plain_logps(policy, [*TOKENS, *piece.tokens])[len(TOKENS) :]
            assert piece.version == version
            assert torch.allclose(torch.tensor(piece.behavior_logp).double(), expected, atol=1e-4)
            nudge(policy, seed=version)

    told(engine, story)


def test_any_architecture_can_be_merged_into(tmp_path: Path) -> None:
    """The fallback decoder uses transformers' forward pass. In bfloat16 the base is the trainer's,
    rounded."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)  # of 600 seeds, three round by more than a bfloat16 policy may when packed
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.3, **sizes))
    Policy(model, tiny_policy().tokenizer).save(tmp_path)
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.1)):
        policy = Policy.load(tmp_path, dtype=dtype, lora=LORA)
        nudge(policy, seed=1, size=0.1)
        assert policy.merging is not None
        merged = Base(tmp_path, policy.merging).merged(policy.weights())
        runner = build_runner(tmp_path, dtype="float32", max_slots=2, max_context=64)
        assert runner.name == "transformers LlamaForCausalLM, packed"
        runner.load(merged)
        tokens, none = torch.tensor(TOKENS), torch.empty(0, dtype=torch.long)
        with torch.no_grad():
            step = Step(none, (Chunk(0, 0, len(TOKENS)),), tokens, torch.arange(len(TOKENS)))
            logits = policy.model(input_ids=tokens[None], use_cache=False).logits[0, -1].float()
            assert (
                runner.forward(step)[0].softmax(-1) - logits.softmax(-1)
            ).abs().max() < tolerance
        embedding = model.model.embed_tokens.weight.to(policy.dtype)
        assert torch.equal(merged["model.embed_tokens.weight"], embedding)


def told(engine: Engine, story: Callable[[], Any]) -> None:
    async def run() -> None:
        try:
            await story()
        finally:
            await engine.close()

    asyncio.run(run())


def test_an_embedded_engine_refuses_another_base(folder: Path, other: Path) -> None:
    merging = Policy.load(folder, lora=LORA).merging
    engine = EmbeddedEngine(EngineOptions(other, max_context=128, max_running=4, merging=merging))

    async def story() -> None:
        with pytest.raises(ValueError, match="adapters are trained on weights with checksum"):
            await engine.start()

    told(engine, story)


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
def test_servers_sample_from_the_merged_weights(
    folder: Path, other: Path, tmp_path: Path, kind: type[FakeVllm] | type[FakeSglang]
) -> None:
    """Servers receive merged weights only."""
    policy = Policy.load(folder, lora=LORA)
    policy.load_weights(moved().weights())
    made = VllmEngine if kind is FakeVllm else SglangEngine
    with FakeVllm(tmp_path) if kind is FakeVllm else FakeSglang() as server:
        engine = made(
            EngineOptions(folder, dtype="float32", url=server.url, merging=policy.merging)
        )

        async def story() -> None:
            await engine.start()
            await engine.load(policy.weights(), 3)
            await engine.resume()
            piece = (await engine.sample(TOKENS, SamplingParams(20, ()))).piece
            expected = plain_logps(policy, [*TOKENS, *piece.tokens])[len(TOKENS) :]
            assert torch.allclose(torch.tensor(piece.behavior_logp).double(), expected, atol=1e-4)

        told(engine, story)
        with pytest.raises(ValueError, match="adapters are trained on weights with checksum"):
            made(EngineOptions(other, dtype="float32", url=server.url, merging=policy.merging))


def configured(base: Path | None = None, **changes: Any) -> RunConfig:
    """Return the config of a short retail run."""
    config = RunConfig(
        recipe="toy",
        name="run",
        model=str(base or "base"),
        max_steps=3,
        deterministic=True,
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=4),
        engine=EngineConfig(max_context=512, max_running=24),
        trainer=TrainerConfig(lora_rank=2, lr=1e-2),
        eval=EvalConfig(tasks=0),
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> session.Run:
    """With full copies beside, by which it is measured how wrong the route is."""
    made = configured(
        runs=tmp_path_factory.mktemp("runs"), audit=AuditConfig(share=1.0, record=True)
    )
    return session.train(made, console=quiet())


def quiet() -> Console:
    return Console(file=StringIO(), width=300)


@pytest.mark.costly
def test_a_run_publishes_keeps_and_records_adapters_and_its_audit_finds_no_error(
    run: session.Run,
) -> None:
    policy = load_policy(configured())
    whole = size(Policy.load(configured().policy_folder).weights())
    rows = run.metrics
    assert 40 * size(policy.weights()) < whole
    for row in rows[1:]:
        assert row["old_logps/exact_share"] == 1 and row["audit/logp_error_abs_mean"] < 1e-5
        assert (
            row["old_logps/model_bytes"] == size(policy.weights())
            and row["publish/bytes"] < whole / 40
        )
    assert (
        max(row["schedule/staleness_max"] for row in rows[1:]) == 1
        and rows[-1]["objective/log_s_abs_mean"] > 0
    )
    for path in run.folder.glob("recorded/versions/*"):
        assert load_file(path).keys() == policy.weights().keys()
    trained = read_policy(max(run.folder.glob("checkpoints/*")))
    assert trained.keys() == policy.weights().keys()
    assert not any(tensor.equal(policy.weights()[name]) for name, tensor in trained.items()), (
        "it has learnt"
    )


@pytest.mark.costly
def test_a_recorded_run_is_audited_on_its_own_base_alone(
    run: session.Run, folder: Path, tmp_path: Path
) -> None:
    found = audit.audit(run.folder, routes=["interrupt_sync", "ewma_prox"], console=quiet())
    exact, average = (row["logp_error_abs_mean"] for row in found["routes"])
    assert exact < 1e-5 < average
    stored = json.loads((run.folder / "config.json").read_text())
    (run.folder / "config.json").write_text(json.dumps(stored | {"model": str(folder)}))
    try:
        with pytest.raises(ConfigError, match="adapters were trained on other weights"):
            audit.audit(run.folder, routes=["snapshot_old"], console=quiet())
    finally:
        (run.folder / "config.json").write_text(json.dumps(stored))


@pytest.mark.costly
def test_a_run_does_not_go_on_over_another_base(run: session.Run, tmp_path: Path) -> None:
    changed, folder = Policy.load(SHIPPED_POLICY), tmp_path / "changed"
    nudge(changed, seed=0)
    changed.save(folder)
    left = Path(shutil.copytree(run.folder, tmp_path / "run"))
    stored = json.loads((left / "config.json").read_text())
    (left / "config.json").write_text(json.dumps(stored | {"model": str(folder)}))
    made = configured(folder, runs=tmp_path, max_steps=4, audit=AuditConfig(share=1.0, record=True))
    with pytest.raises(ConfigError, match="adapters were trained on other weights"):
        session.resume(left, made, console=quiet())
    assert not (left / "error.txt").exists()


def test_the_trained_policy_is_an_ordinary_folder(run: session.Run) -> None:
    assert (
        run.policy.lora is None
        and (run.folder / "policy" / "adapter" / "adapter_model.safetensors").is_file()
    )


def test_adapters_share_deltas_with_the_engine_whatever_its_precision() -> None:
    mixed = configured(engine=EngineConfig(dtype="bfloat16"))
    assert shares_deltas(mixed) and not shares_deltas(replace(mixed, trainer=TrainerConfig()))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(test_loop, "tiny_policy", partial(tiny_policy, lora=LORA))
    with played(Toy()) as toy:
        yield toy


@pytest.mark.costly
def test_killed_it_goes_on_bit_for_bit(toy: Toy, tmp_path: Path) -> None:
    made = config(deterministic=True)
    toy.require_equal_resume(tmp_path, made, "step", 3)
    require_sound(tmp_path / "run")
    (held, *_) = (tmp_path / "run").glob("checkpoints/*")
    assert read_policy(held).keys() == tiny_policy(lora=LORA).weights().keys()


def test_what_a_run_with_adapters_has_to_keep() -> None:
    before = configured()
    for change in ({"lora_rank": 4}, {"lora_alpha": 16.0}, {"lora_targets": "q_proj"}):
        with pytest.raises(ConfigError, match=f"trainer.{next(iter(change))} cannot change"):
            config_changes(before, replace(before, trainer=replace(before.trainer, **change)))  # type: ignore[arg-type]


def test_a_checkpoint_goes_on_over_its_own_base_alone(folder: Path, other: Path) -> None:
    one, same_base, another = (make(Policy.load(at, lora=LORA)) for at in (folder, folder, other))
    same_base.restore(checkpoint_round_trip(one.state()))
    with pytest.raises(ConfigError, match="adapters were trained on other weights than those in"):
        another.restore(one.state())


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rank": -1},
        {"lora_rank": 2, "lora_alpha": 0.0},
        {"lora_rank": 2, "lora_targets": " "},
        {"lora_alpha": 8.0},
        {"lora_targets": "q_proj"},
    ],
)
def test_knobs_that_cannot_mean_anything_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lora_"):
        TrainerConfig(**options)
