"""The model, the run and the plan whose steps `benchmarks.gpu_check` measures."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.gpu import Chip
from benchmarks.gpu_steps import Budget, read
from unstale.analysis.planner.analytic import AnalyticCosts, Placement, TrainingSetup
from unstale.analysis.planner.candidates import Candidate, PlanRequest
from unstale.analysis.planner.hardware import DEVICES, Device, Shares
from unstale.analysis.planner.models import PRESETS, Model
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.workload import Constant, EpisodeStats, Workload
from unstale.config import ScheduleConfig
from unstale.durability.run_folder import RunFolder
from unstale.model.policy import Policy

TINY = Model(2, 64, 128, 4, 2, name="tiny", head_dim=16, vocab=256, tied=True)
SIZES = ("4B", "1.7B", "0.6B")
"""Presets to try, largest first. Prime-RL has a baseline of the first and the last."""
WARM = 3
"""Steps that are not measured: they fill the queue and make the optimizer's state."""
ENGINE_SHARE = 0.35
"""Share of a GPU's memory for a server that has the trainer on its GPU."""
ROUTE = "snapshot_old"
RUN_S = 2400.0
"""Longest time of the run in seconds."""
_TEMPLATE = (
    "{% for message in messages %}w2 {{ message['content'] }}w1 {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)


@dataclass(frozen=True)
class Case:
    """A model on some GPUs, and the sizes of its steps."""

    model: Model
    gpus: int
    folder: Path
    """Folder for the model and the run."""
    device: Device
    trainers: int = 0
    """Number of trainer ranks. 0 trains in the process of the run."""
    groups: int = 16
    group_size: int = 8
    prompt: int = 128
    reply: int = 2048
    steps: int = 5
    lora_rank: int = 0
    more: tuple[str, ...] = ()
    """More words of `unstale train`."""

    @property
    def tokens(self) -> int:
        """Tokens of an episode at most."""
        return self.prompt + self.reply + 16

    @cached_property
    def setup(self) -> TrainingSetup:
        """The setup of `unstale plan` for this case, with the measured speed of the device."""
        tokens = float(self.prompt + self.reply)
        known = self.device.name in DEVICES
        return TrainingSetup(
            model=self.model,
            device=self.device,
            shares=Shares() if known else Shares(matmul=0.4, bandwidth=0.7, link=1),
            lr=1e-6,
            episodes=EpisodeStats(tokens, tokens / 2, self.tokens, self.prompt, self.reply),
            gradient_checkpointing=True,
            lora_rank=self.lora_rank,
        )

    @property
    def fits(self) -> bool:
        """Return True if trainer and engine fit into the memory."""
        setup = self.setup
        needed = setup.trainer_bytes(max(1, self.trainers), route_cost(ROUTE))
        if self.gpus < 2:
            needed += ENGINE_SHARE * setup.device.memory
        return needed <= setup.memory

    @cached_property
    def passes(self) -> TrainingSetup:
        """The setup with the microbatches of the run. An engine on the same GPU needs the rest."""
        if self.gpus < 2:
            return self.setup
        return self.setup.with_largest_passes(max(1, self.trainers), route_cost(ROUTE))

    @property
    def tp(self) -> int:
        """Number of GPUs of an engine: all that sample for one vLLM server, which takes deltas."""
        return max(1, self.gpus - self.trainers) if find_spec("vllm") and self.trainers else 1

    @property
    def engines(self) -> int:
        return max(1, (self.gpus - self.trainers) // self.tp)

    @cached_property
    def candidate(self) -> Candidate:
        """The candidate of `unstale plan` for the run."""
        schedule = ScheduleConfig(groups_per_step=self.groups, group_size=self.group_size)
        workload = Workload(prompt_tokens=Constant(self.prompt), reply_tokens=Constant(self.reply))
        setup = self.passes
        shared = self.gpus < 2
        costs = AnalyticCosts(
            setup=setup,
            placement=Placement(max(1, self.trainers), self.engines, self.tp, colocated=shared),
            route=route_cost(ROUTE),
            batch=self.groups * self.group_size * setup.episodes.tokens,
            live=schedule.staleness_bound + 1,
        )
        request = PlanRequest(
            setup=setup, workload=workload, devices=max(1, self.gpus), group_size=self.group_size
        )
        return Candidate(request, costs, ROUTE, schedule)

    def words(self) -> list[str]:
        """Return the words of `unstale train` for the run."""
        options: dict[str, Any] = {
            "model": self.folder / "model",
            "task.env": f"dataset:{self.folder / 'rows.jsonl'}",
            "reward": "benchmarks.gpu_steps:parity",
            "runs": self.folder,
            "name": "run",
            "max_steps": WARM + self.steps,
            "minutes": 0,
            "old_logps.route": ROUTE,
            "schedule.groups_per_step": self.groups,
            "schedule.group_size": self.group_size,
            "engine.max_completion_tokens": self.reply,
            "engine.max_context": self.tokens,
            "engine.max_running": self.engines * self.candidate.max_running,
            "rollout.max_turns": 1,
            "eval.tasks": 0,
            "checkpoint.interval": 10**6,
            "trainer.dtype": "bfloat16",
            "trainer.warmup_steps": 0,
            "trainer.max_tokens_per_microbatch": self.passes.microbatch,
            "trainer.max_tokens_per_scoring_pass": self.passes.scoring_pass,
            "correction.mode": "none",
            "correction.token_veto_threshold": 0,
        }
        if self.trainers:
            options["cluster.trainers"] = self.trainers
        if self.lora_rank:
            options["trainer.lora_rank"] = self.lora_rank
        if self.gpus and find_spec("vllm"):
            options["engine.backend"] = "vllm"
            options["engine.args"] = f"--tensor-parallel-size {self.tp}"
            if self.gpus < 2:
                options["engine.gpu_memory_utilization"] = ENGINE_SHARE
        elif self.gpus:
            options["engine.processes"] = self.engines
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return ["train", "llm", *words, *self.more]

    def run(self) -> tuple[Budget, Sequence[Mapping[str, Any]]]:
        """Train the run in a process of its own. Return its parts, and its measured rows.

        Raises RuntimeError with the end of its output if it fails.
        """
        save_model(self.model, self.folder / "model", "cuda" if self.gpus else "cpu")
        write_rows(self.folder / "rows.jsonl", self.prompt)
        parts = self.folder / "parts"
        parts.mkdir()
        command = [sys.executable, "-m", "benchmarks.gpu_steps", str(parts), *self.words()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
        if done.returncode:
            raise RuntimeError(f"the run failed: {(done.stderr or done.stdout).strip()[-1500:]}")
        rows = [row for row in RunFolder(self.folder / "run").metrics() if row["step"] > WARM]
        shutil.rmtree(self.folder / "run")
        return read(parts, WARM), rows


def choose(gpus: int, folder: Path, device: Device, *, lora_rank: int = 0) -> Case:
    """Return the case of the largest preset that fits.

    Of several GPUs a power of two samples, at most half, and the others train.

    Raises RuntimeError if none fits.
    """
    sampling = 1 << ((gpus // 2).bit_length() - 1) if gpus > 1 else 1
    for name in SIZES:
        case = Case(PRESETS[name], gpus, folder, device, gpus - sampling, lora_rank=lora_rank)
        if case.fits:
            return case
    raise RuntimeError(f"no preset fits, of {', '.join(SIZES)}")


def tiny(folder: Path, device: Device, *, trainers: int = 0) -> Case:
    """Return a case that takes seconds on a CPU."""
    return Case(
        TINY, 0, folder, device, trainers, groups=2, group_size=4, prompt=16, reply=24, steps=2
    )


def device_here(chip: Chip) -> Device:
    """Return the data sheet of this GPU. Others, and a CPU, are described by what was measured."""
    name, memory = "core of this machine", 8e9
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        for known, device in DEVICES.items():
            if known in name.replace("-", " ").split():
                return device
        memory = float(torch.cuda.get_device_properties(0).total_memory)
    link = chip.bandwidth / 4
    return Device(name, chip.flops, chip.bandwidth, memory, link, link, link)


def save_model(model: Model, folder: Path, device: str) -> None:
    """Save a model of this shape with random weights, and a tokenizer whose words are `w0`, ..."""
    config = Qwen3Config(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        tie_word_embeddings=model.tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    Policy(made, tokenizer_of(model.vocab)).save(folder)
    del made
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tokenizer_of(vocab: int) -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def write_rows(path: Path, length: int) -> None:
    """Write the tasks of the run: prompts of random words."""
    noise = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for _ in range(256):
            words = torch.randint(3, 200, (length,), generator=noise).tolist()
            file.write(json.dumps({"prompt": " ".join(f"w{each}" for each in words)}) + "\n")


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the rows that have it. None if no row does."""
    found = [row[name] for row in rows if row.get(name) is not None]
    return fmean(found) if found else None


def planned(case: Case, versions: float) -> dict[str, float]:
    """Return the seconds that `unstale plan` predicts for the parts of a step."""
    candidate = case.candidate
    costs = candidate.costs
    tokens = round(costs.batch)
    compute_s, transfer_s = costs.train_compute_s(tokens), costs.train_transfer_s(tokens)
    forward_s = costs.forward_s(tokens)
    old_s = costs.old_logps_s(tokens, versions)
    scored_s = old_s - min(costs.live - 1, versions) * costs.apply_s
    found = {
        "score": scored_s,
        "move": old_s - scored_s,
        "forward": forward_s,
        "backward": compute_s - forward_s,
        "communication": max(0.0, transfer_s - compute_s),
        "optimizer": costs.optimizer_s,
        "put": costs.encode_s,
        "encode": costs.publish_s() - costs.encode_s - costs.driver_s,
        "apply": costs.driver_s,
        "stage": costs.stage_s(),
        "load": costs.load_s(),
        "probe": costs.probe_s(),
        "step": candidate.estimate.step_s,
    }
    beside = ("stage", "load", "probe", "step")
    found["wait"] = max(0.0, found["step"] - sum(found[name] for name in found.keys() - beside))
    return found
