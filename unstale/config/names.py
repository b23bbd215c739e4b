"""Former option names, option names of other trainers, and suggestions for unknown names.

The command line, TOML files and Python use the same tables.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

RENAMED_TECHNIQUES = {
    "ace": "confident_error_penalty",
    "aepo": "token_entropy_advantage",
    "bins": "difficulty_bin_weights",
    "channels": "reward_channels",
    "ear": "entropy_advantage_reweighting",
    "echo": "confidence_clip",
    "flaw": "flawed_success_penalty",
    "gfcr": "rollout_figures",
    "mssr": "unlikely_token_bonus",
    "opob": "least_variance_baseline",
    "pick": "episode_filter",
    "stages": "hard_task_stages",
}
"""The present name of each renamed technique, by its former name. It is also the name of its
section.
"""
RENAMED = {
    **RENAMED_TECHNIQUES,
    "checkpoint.every": "checkpoint.interval",
    "correction.control": "correction.mode",
    "credit": "advantage",
    "credit.estimator": "advantage.estimator",
    "correction.veto_below": "correction.token_veto_threshold",
    "engine.kind": "engine.backend",
    "engine.max_reply_tokens": "engine.max_completion_tokens",
    "eval.every": "eval.interval",
    "objective.entropy": "objective.entropy_coef",
    "objective.kind": "objective.loss_type",
    "objective.normalise": "objective.loss_aggregation",
    "objective.reference_kl": "objective.kl_coef",
    "policy": "model",
    "policy_download": "model_download",
    "policy_gguf": "model_gguf",
    "schedule.window": "schedule.lookahead_window",
    "steps": "max_steps",
    "tensorboard": "trackers",
    "trainer.micro_tokens": "trainer.max_tokens_per_microbatch",
    "trainer.recompute": "trainer.gradient_checkpointing",
    "trainer.steps_per_batch": "trainer.minibatches_per_batch",
}
"""The present name of each renamed option or section, by its former name."""
REMOVED = (
    "old_logps.storage",
    "old_logps.memory_gb",
    "old_logps.spill",
    "trainer.gradient_checkpointing_interval",
)
"""Former options that did not affect the results of a run."""


def present_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an earlier run's `config.json` by their present names, without removed
    ones.

    `row` and the result have one table per section.

    >>> present_names({"policy": "base", "eval": {"every": 5, "tasks": 8}})
    {'model': 'base', 'eval': {'interval': 5, 'tasks': 8}}
    >>> present_names({"techniques": "replay pick", "technique_options": {"pick": {"n": 4}}})
    {'techniques': 'replay episode_filter', 'technique_options': {'episode_filter': {'n': 4}}}
    >>> present_names({"old_logps": {"route": "snapshot_old", "spill": False}})
    {'old_logps': {'route': 'snapshot_old'}}
    """
    renamed = {}
    for name, value in row.items():
        if name == "techniques" and isinstance(value, str):
            value = " ".join(RENAMED_TECHNIQUES.get(word, word) for word in value.split())
        elif name == "technique_options" and isinstance(value, dict):
            value = present_names(value)
        elif isinstance(value, dict):
            fields: dict[str, str] = {
                field: RENAMED.get(f"{name}.{field}", str(field))
                for field in value
                if f"{name}.{field}" not in REMOVED
            }
            value = {now.rpartition(".")[2]: value[field] for field, now in fields.items()}
        renamed[RENAMED.get(name, name)] = value
    return renamed


SYNONYMS = {
    # the model and the data
    "actor_rollout_ref.model.path": "model",
    "model.name": "model",
    "model.path": "model",
    "model_name_or_path": "model",
    "model_path": "model",
    "data.train_files": "task.env",
    "data.val_files": "task.held_out_file",
    "dataset": "task.env",
    "dataset_name": "task.env",
    "eval_dataset": "task.held_out_file",
    "train_dataset": "task.env",
    "custom_reward_function": "task.reward",
    "reward_func": "task.reward",
    "reward_funcs": "task.reward",
    "reward_function": "task.reward",
    "max_prompt_length": "engine.max_context; it counts prompts and replies of an episode",
    # the length of a run and of its parts
    "total_training_steps": "max_steps",
    "num_train_epochs": "max_steps; a step takes schedule.groups_per_step rows",
    "total_epochs": "max_steps; a step takes schedule.groups_per_step rows",
    "num_iterations": "trainer.epochs_per_batch",
    "ppo_epochs": "trainer.epochs_per_batch",
    "eval_steps": "eval.interval",
    "test_freq": "eval.interval",
    "load_best_model_at_end": "eval.keep_best; the best policy is in the folder best of the run",
    "metric_for_best_model": "eval.keep_best",
    "early_stopping_patience": "eval.patience",
    "val_kwargs.temperature": "eval.temperature",
    "val_kwargs.top_p": "eval.top_p",
    "val_kwargs.top_k": "eval.top_k; 0 sets no limit, -1 is engine.top_k",
    "val_kwargs.n": "eval.samples",
    "save_steps": "checkpoint.interval",
    "save_freq": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "ckpt.interval": "checkpoint.interval",
    "output_dir": "runs, name; the run folder is runs/name",
    "run_name": "name",
    "experiment_name": "name",
    "report_to": "trackers",
    "trainer.logger": "trackers",
    "logging_steps": "; every step is logged",
    # batches
    "num_generations": "schedule.group_size",
    "rollout.n": "schedule.group_size",
    "rollouts_per_example": "schedule.group_size",
    "filter_groups.enable": "schedule.resampled_groups",
    "dynamic_sampling": "schedule.resampled_groups",
    "max_num_gen_batches": "schedule.resampled_groups; it counts groups of a step",
    "overlong_buffer": "techniques; long_reply_penalty is the soft penalty of DAPO",
    "generation_batch_size": "schedule.groups_per_step; it counts prompts: episodes / group_size",
    "data.train_batch_size": "schedule.groups_per_step; both count prompts",
    "train_batch_size": "schedule.groups_per_step; it counts prompts",
    "batch_size": "schedule.groups_per_step; it counts prompts: episodes / group_size",
    "gradient_accumulation_steps": "trainer.minibatches_per_batch; the number of optimizer steps",
    "steps_per_generation": "trainer.minibatches_per_batch; the number of optimizer steps",
    "ppo_mini_batch_size": "trainer.minibatches_per_batch; it counts minibatches, not sequences",
    "per_device_train_batch_size": "schedule.groups_per_step, trainer.max_tokens_per_microbatch; "
    "the first counts prompts of a step, the second tokens in memory at once",
    "ppo_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch; it counts tokens",
    "max_async_level": "schedule.max_staleness",
    "max_off_policy_steps": "schedule.max_staleness",
    # sampling
    "max_completion_length": "engine.max_completion_tokens",
    "max_new_tokens": "engine.max_completion_tokens",
    "max_response_length": "engine.max_completion_tokens",
    "max_tokens": "engine.max_completion_tokens",
    "max_model_len": "engine.max_context",
    "max_model_length": "engine.max_context",
    "max_seq_length": "engine.max_context",
    "max_tool_calling_iterations": "rollout.max_turns",
    "max_assistant_turns": "rollout.max_turns",
    "use_vllm": "engine.backend",
    "vllm_mode": "engine.backend",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    # the loss
    "adv_estimator": "advantage.estimator",
    "algorithm.gamma": "advantage.discount",
    "gamma": "advantage.discount",
    "algorithm.lam": "advantage.lam",
    "cliprange_value": "critic.clip",
    "critic.optim.lr": "critic.own_lr; for layers of its own only, the head has no learning rate",
    "critic_warmup": "critic.warmup_steps",
    "value_lr": "critic.own_lr",
    "vf_coef": "critic.coef",
    "scale_rewards": "advantage.estimator; grpo divides by the deviation, grpo_no_std does not",
    "norm_adv_by_std_in_grpo": "advantage.estimator; grpo_no_std does not divide",
    "beta": "objective.kl_coef, old_logps.beta; the second is of a moving average",
    "kl_loss_coef": "objective.kl_coef",
    "use_kl_loss": "objective.kl_coef",
    "entropy_coeff": "objective.entropy_coef",
    "epsilon": "objective.clip_low",
    "epsilon_low": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "clip_ratio": "objective.clip_low, objective.clip_high",
    "clip_ratio_low": "objective.clip_low",
    "clip_ratio_high": "objective.clip_high",
    "clip_ratio_c": "objective.dual_clip",
    "delta": "objective.dual_clip",
    "importance_sampling_level": "objective.loss_type; gspo is the one of sequences",
    "loss_type": "objective.loss_aggregation, objective.loss_type; dr_grpo is "
    "objective.loss_aggregation constant, objective.constant N and advantage.estimator dr_grpo",
    "loss_agg_mode": "objective.loss_aggregation",
    "loss_mode": "objective.loss_type",
    "dppo_mask_low": "objective.divergence_low",
    "dppo_mask_high": "objective.divergence_high",
    "dppo_type": "objective.divergence",
    "delta_low": "objective.divergence_low",
    "delta_high": "objective.divergence_high",
    "mask_truncated_completions": "techniques; its value `truncated` does this",
    "vllm_importance_sampling_cap": "correction.high",
    "vllm_importance_sampling_clip_max": "correction.high",
    "vllm_importance_sampling_mode": "correction.mode",
    "rollout_rs": "correction.mode",
    "rollout_rs_threshold": "correction.low, correction.high, correction.kl_limit; a k1 limit is "
    "one of mu / pi_old, so ours are 1 / it",
    **dict.fromkeys(
        ("off_policy_mask_threshold", "opsm_delta", "use_opsm"), "objective.opsm_threshold"
    ),
    "drpo_epsilon": "objective.drpo_delta",
    # the optimizer and the model in memory
    "learning_rate": "trainer.lr",
    "lr": "trainer.lr, sft.lr; the second is of a supervised start",
    "optim": "trainer.optimizer",
    "optim.lr": "trainer.lr",
    "lr_scheduler_type": "trainer.lr_schedule",
    "warmup_ratio": "trainer.warmup_steps; it counts optimizer steps",
    "lr_warmup_steps": "trainer.warmup_steps",
    "max_grad_norm": "trainer.grad_clip",
    "bf16": "trainer.dtype",
    "fp16": "trainer.dtype",
    "torch_dtype": "trainer.dtype",
    "optim_cpu_offload": "trainer.offload_optimizer",
    "optimizer_offload": "trainer.offload_optimizer",
    "fsdp_cpu_offload": "trainer.offload_optimizer; parameters stay on the GPU",
    "param_offload": "; parameters stay on the GPU, trainer.offload_optimizer moves the rest",
    "ac.freq": "trainer.gradient_checkpointing; it is for all layers",
    "selective_ac_option": "trainer.gradient_checkpointing; it is for all layers",
    "peft_config": "trainer.lora_rank, trainer.lora_alpha",
    "lora_r": "trainer.lora_rank",
    "use_peft": "trainer.lora_rank",
    "resume_from_checkpoint": "; resume with unstale train --resume RUN",
    "target_modules": "trainer.lora_targets",
    "torch_compile": "trainer.compile",
    "n_gpus_per_node": "cluster.trainers",
}
"""Options of this package by what TRL, verl and prime-rl call them.

After a semicolon follows how the two differ. A name is found with any prefix, such as
`actor_rollout_ref.actor.`. docs/other-trainers.md has more about most of these names.
"""


VALUES = {
    "objective.loss_type": {
        **dict.fromkeys(("ppo", "vanilla"), "ppo_clip"),
        "default": "dppo; with objective.kl_tau = 1e-3",
        "dppo_tv": "dppo",
        "dppo_kl": "dppo; with objective.divergence = kl",
        **dict.fromkeys(("dapo", "bnpo"), "ppo_clip; with the default loss_aggregation"),
        "grpo": "ppo_clip; with objective.loss_aggregation = sequence_mean",
        "dr_grpo": "ppo_clip; with advantage.estimator = dr_grpo, objective.loss_aggregation = "
        "constant and objective.constant = the largest length of a reply",
        "sequence": "gspo",
        "reinforce": "none",
    },
    "objective.loss_aggregation": {
        **dict.fromkeys(("token-mean", "dapo", "bnpo"), "action_tokens"),
        **dict.fromkeys(("seq-mean-token-mean", "grpo"), "sequence_mean"),
        **dict.fromkeys(
            ("seq-mean-token-sum-norm", "dr_grpo"), "constant; with objective.constant = its length"
        ),
    },
    "advantage.estimator": {"dapo": "grpo", "none": "grpo_no_std"},
    "trainer.optimizer": {
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "AdamW8bit"),
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "AdamW"),
    },
    "objective.divergence": {"binary_tv": "tv", "binary_kl": "kl"},
    "correction.mode": {
        "token_truncate": "truncate",
        "token_mask": "mask",
        "icepop": "mask_weight",
        "binary_kl": "kpop",
        "token_k3": "k3_mask",
        "seq_mean_k3": "k3_mask; with correction.unit = sequence",
        "seq_mean_k1": "mask; with correction.unit = sequence",
    },
}
"""For some options of this package, its values by what TRL, verl and prime-rl call them.

After a semicolon follows how the two differ.
"""


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (name, value) pairs of a JSON object as a dict, for `json.loads`.

    Raises `ValueError` if a name occurs twice.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {repeated[:40]!r} is given twice in one object")
    return fields


def value_hint(option: str, value: str, known: Sequence[str]) -> str:
    """Return the end of an error message about an unknown value of an option.

    If another trainer has this value, the text names the value here that does the same. Otherwise
    it names the values in `known` that are similar, or all of them.

    >>> value_hint("--objective.loss_aggregation", "token-mean", ["action_tokens"])
    '; it is action_tokens here'
    """
    given = VALUES.get(option.removeprefix("--"), {}).get(value.lower())
    if given is None:
        return nearest(value, known)
    target, _, note = given.partition("; ")
    if not target:
        return f"; {note}"
    return f"; it is {target} here" + f", {note}" * bool(note)


def synonyms(name: str, known: Sequence[str]) -> str:
    """Return the end of an error message about an unknown option: what another trainer's option is
    here.

    Empty if no other trainer has an option `name`, or `known` lacks the one here. The names in
    `known` may begin with `--`.

    >>> synonyms("actor_rollout_ref.rollout.n", ["schedule.group_size"])
    '; did you mean schedule.group_size?'
    >>> synonyms("--train-batch-size", ["--schedule.groups_per_step"])
    '; did you mean --schedule.groups_per_step (it counts prompts)?'
    """
    dashes = "--" if name.startswith("--") else ""
    rest = name.removeprefix("--").replace("-", "_").lower()
    while rest and rest not in SYNONYMS:
        rest = rest.partition(".")[2]
    if not rest:
        return ""
    targets, _, note = SYNONYMS[rest].partition("; ")
    if not targets:
        return f"; there is no such option: {note}"
    here = [word for option in targets.split(", ") if (word := dashes + option) in known]
    about = f" ({note})" if note else ""
    return f"; did you mean {' or '.join(here)}{about}?" if here else ""


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the end of an error message: the words in `known` that are most similar to `word`.

    If none is similar, all of them are listed. Options whose name without the section is `word`
    come first, then words that begin with `word`, then words of similar spelling.

    >>> nearest("snapsht_old", ["rollout", "snapshot_old"])
    '; did you mean snapshot_old?'
    >>> nearest("--lr", ["--trainer.lr", "--runs"])
    '; did you mean --trainer.lr?'
    """
    close = _named_in_part(word, known) or _spelled_alike(word, known)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are: {', '.join(known)}"


def nearest_option(name: str, known: Sequence[str]) -> str:
    """Return the end of an error message: the options most similar to `name`.

    Empty if no option is similar. An option is compared with and without its section.

    >>> nearest_option("--max_completion_toks", ["--engine.max_completion_tokens", "--seed"])
    '; did you mean --engine.max_completion_tokens?'
    >>> nearest_option("--num_generations", ["--segments.tokens", "--seed"])
    ''
    """
    word = name.removeprefix("--")

    def likeness(option: str) -> float:
        whole = option.removeprefix("--")
        forms = (whole, whole.rpartition(".")[2])
        return max(SequenceMatcher(None, form, word).ratio() for form in forms)

    likely = sorted(((likeness(each), each) for each in known), key=lambda pair: -pair[0])[:2]
    near = [each for ratio, each in likely if ratio > max(0.7, 0.95 * likely[0][0])]
    last = [each for each in known if "." in word and each.endswith("." + word.rpartition(".")[2])]
    near = _named_in_part(name, known) or last[:2] or near
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _named_in_part(word: str, known: Sequence[str]) -> list[str]:
    """Return at most two options whose name without the section is `word`, or else begins
    with it.
    """
    name = word.removeprefix("--")
    close = [each for each in known if each.endswith(f".{name}")]
    if not close and len(name) > 3:
        close = [each for each in known if each.startswith(word)]
    return close[:2]


def _spelled_alike(word: str, known: Sequence[str]) -> list[str]:
    """Return the words in `known` that are spelled most like `word`: at most two.

    Empty if none is.
    """
    # One wrong letter of a short word is half of it.
    close = get_close_matches(word, known, n=2, cutoff=0.5 if len(word) < 4 else 0.6)
    near = [SequenceMatcher(None, each, word).ratio() for each in close]
    return [each for each, ratio in zip(close, near, strict=True) if ratio > 0.8 * near[0]]
