"""Write tests/data/peers.json: what other trainers compute from one small batch.

    python -m tools.peer_vectors FOLDER

FOLDER has a git clone of each repository in `PEERS`, under the repository's name. The functions are
read from these clones at the commits in `PEERS`, and run without their decorators. Names that they
take from elsewhere are stand-ins, which `Clones.take` is given; what they log goes nowhere. Nothing
of a peer is installed. The tests in tests/algorithms/test_peers_*.py compare this library with the
numbers.
"""

import __future__

import ast
import json
import math
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

FILE = Path(__file__).parents[1] / "tests" / "data" / "peers.json"
PEERS = {
    "trl": "huggingface/trl@f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "verl": "verl-project/verl@1dda039b9c6311889a9c9a26040677e1254814f9",
    "prime-rl": "PrimeIntellect-ai/prime-rl@559b44772e471d1538537b8805cc77f3824a5e64",
    "AReaL": "areal-project/AReaL@cbff54d645d2cd8ee1f1c358a82f3f473588433d",
    "slime": "THUDM/slime@624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "SkyRL": "NovaSky-AI/SkyRL@a9564572eb8e91076be43c1bd5e4615e3de17265",
    "open-instruct": "allenai/open-instruct@e6c3044aa6201c8bfa4573c1b03142af599e730d",
    "UniRL": "Tencent-Hunyuan/UniRL@1a7b501e8fe8517b432a130220d2ff462f9b5afa",
}
"""Repository and commit of each peer, by the name of its clone."""

CORE = "verl/trainer/ppo/core_algos.py"
HELPER = "verl/trainer/ppo/rollout_corr_helper.py"
Result = dict[str, Tensor]


class Settings(SimpleNamespace):
    """A peer's configuration object."""

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


class Clones:
    """The peers' clones, from which functions are read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, peer: str, path: str, names: str, **known: object) -> SimpleNamespace:
        """Return the functions, classes and constants `names` of a peer's file.

        `names` are separated by spaces. `known` are the other names that they use. Raises
        LookupError if the file has no such name.
        """
        commit = PEERS[peer].partition("@")[2]
        shown = ["git", "-C", str(self._folder / peer), "show", f"{commit}:{path}"]
        text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
        wanted = names.split()
        body: list[ast.stmt] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted:
                node.decorator_list = []
                body.append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and target.id in wanted:
                    body.append(node)
        space: dict[str, Any] = {"torch": torch, "F": F, "math": math, **known}
        flags = __future__.annotations.compiler_flag
        exec(compile(ast.Module(body, []), f"{peer}/{path}", "exec", flags=flags), space)
        if missing := [name for name in wanted if name not in space]:
            raise LookupError(f"{PEERS[peer]} has no {missing} in {path}")
        return SimpleNamespace(**{name: space[name] for name in wanted})


def noise(seed: int, *shape: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=made, dtype=torch.float64) * 1e4).round() / 1e4


ROWS, LENGTH, VOCABULARY = 5, 9, 5
FEW = 2
"""Sequences of the cases that need whole distributions."""
TURN = torch.tensor(
    [
        [0, 0, 0, -1, 1, 1, -1, 2, 2],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, -1, -1, 1, 1, 1, 1, -1, -1],
        [0, 0, 0, 0, 0, 0, -1, 1, 1],
        [0, 0, 0, 0, 0, -1, -1, -1, -1],
    ]
)
"""The turn of each token, -1 for text between turns and for padding."""
SAMPLED = TURN >= 0
TOKENS = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
LOGITS = noise(2, ROWS, LENGTH, VOCABULARY)
TEACHER = noise(12, ROWS, LENGTH, VOCABULARY)
OLD_LOGITS = LOGITS + 0.6 * noise(4, ROWS, LENGTH, VOCABULARY)
ENGINE_LOGITS = OLD_LOGITS + 0.2 * noise(5, ROWS, LENGTH, VOCABULARY)
ADVANTAGE = torch.tensor([1.5, -1.0, -0.75, 0.5, -2.0], dtype=torch.float64)
VALUES, BEFORE = noise(6, 2, ROWS, LENGTH)
REWARDS = noise(7, ROWS, LENGTH) * SAMPLED


def of_tokens(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, TOKENS[..., None]).squeeze(-1)


NOW, OLD, MU, TAUGHT = map(of_tokens, (LOGITS, OLD_LOGITS, ENGINE_LOGITS, TEACHER))
SPREAD = ADVANTAGE[:, None].expand_as(NOW)
INPUTS = {
    "turn": TURN,
    "logits": LOGITS[:FEW],
    "teacher_logits": TEACHER[:FEW],
    "behavior_logp": MU,
    "old_logp": OLD,
    "logp": NOW,
    "teacher_logp": TAUGHT,
    "advantage": ADVANTAGE,
    "value": VALUES,
    "value_before": BEFORE,
    "reward": REWARDS,
}


def graded(of: Callable[[Tensor], Tensor], start: Tensor) -> Result:
    """Return the loss `of(x)` and its gradient with respect to x, at x = `start`."""
    leaf = start.clone().requires_grad_()
    loss = of(leaf)
    (slope,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss.detach(), "gradient": slope}


def mean(values: Tensor) -> Tensor:
    return (values * SAMPLED).sum() / SAMPLED.sum()


OPSM = {"of one sign": (-ADVANTAGE.abs(), 0.2), "of both signs": (ADVANTAGE, 0.1)}
"""Advantages and threshold of off-policy sequence masking, by the signs of the advantages of the
two sequences from which the policy moves away.
"""


def trl(clones: Clones) -> Iterator[tuple[str, Result]]:
    gkd = clones.take("trl", "trl/experimental/gkd/gkd_trainer.py", "generalized_jsd_loss")
    labels = torch.where(SAMPLED, TOKENS, -100)[:FEW]
    for beta, temperature in ((0.0, 1.0), (0.1, 1.0), (0.5, 1.0), (1.0, 1.0), (0.5, 0.7)):

        def distilled(logits: Tensor, beta: float = beta, at: float = temperature) -> Tensor:
            return gkd.generalized_jsd_loss(
                logits, TEACHER[:FEW], labels, beta=beta, temperature=at
            )

        yield f"jsd {beta} at {temperature}", graded(distilled, LOGITS[:FEW])
    names = "get_gamma_weights get_off_policy_mask"
    grpo = clones.take("trl", "trl/trainer/grpo_trainer.py", names)
    column, mask = ADVANTAGE[:, None], SAMPLED.double()

    def gamma(logp: Tensor, ratio: Tensor | None, old: Tensor) -> Tensor:
        weight = grpo.get_gamma_weights(column, logp.detach() - old, mask, ratio)
        return mean(-weight * column * logp)

    discrepancy = torch.where(SAMPLED, (OLD - MU).exp(), 1.0)
    yield "vespo", graded(lambda logp: gamma(logp, None, OLD), NOW)
    yield "vespo with D", graded(lambda logp: gamma(logp, discrepancy, OLD), NOW)
    for name, (advantage, limit) in OPSM.items():
        kept = grpo.get_off_policy_mask(advantage[:, None], NOW, MU, mask, limit)
        yield f"opsm {name}", {"keep": kept.expand_as(NOW)}


LIMITS = {"tv": (0.1, 0.08), "kl": (0.026, 0.016)}
"""The limits of DPPO's two divergences, for A < 0 and for A > 0."""


def verl_functions(clones: Clones) -> SimpleNamespace:
    names = "masked_sum masked_mean masked_var masked_whiten clip_by_value"
    tools = clones.take("verl", "verl/utils/torch_functional.py", names)
    agg = clones.take("verl", CORE, "agg_loss", verl_F=tools).agg_loss
    names = (
        "compute_gae_advantage_return compute_value_loss kl_penalty kl_penalty_forward "
        "compute_policy_loss_vanilla compute_policy_loss_dppo_tv compute_policy_loss_dppo_kl "
        "compute_policy_loss_dro"
    )
    return clones.take("verl", CORE, names, verl_F=tools, agg_loss=agg, AlgoConfig=MagicMock)


def verl(clones: Clones) -> Iterator[tuple[str, Result]]:
    core = verl_functions(clones)
    mask = SAMPLED.double()
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8)):
        found = core.compute_gae_advantage_return(REWARDS, VALUES, mask, gamma, lam)
        yield f"gae {gamma} {lam}", dict(zip(("whitened", "returns"), found, strict=True))
    target = BEFORE + REWARDS
    for clip in (0.2, 0.4):

        def critic(value: Tensor, clip: float = clip) -> Tensor:
            return core.compute_value_loss(value, target, BEFORE, mask, clip)[0]

        yield f"value loss {clip}", graded(critic, VALUES)

    limits = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    config = Settings(global_batch_info={}, clip_ratio_c=3.0, **limits)
    for kind in ("k1", "k3"):

        def taught(logp: Tensor, kind: str = kind) -> Tensor:
            gap = core.kl_penalty(logp, TAUGHT, kind).clamp(-10, 10)
            return core.compute_policy_loss_vanilla(OLD, logp, -gap.detach(), mask, config=config)[
                0
            ]

        yield f"distillation by policy gradient, {kind}", graded(taught, NOW)
    yield (
        "distillation by backpropagation, k3",
        graded(lambda logp: mean(core.kl_penalty(logp, TAUGHT, "k3")), NOW),
    )
    for k in (VOCABULARY, 2):
        yield f"forward_kl_topk {k}", verl_topk(clones, k)

    for kind, (low, high) in LIMITS.items():
        given = {"clip_ratio": 0.2, "clip_ratio_low": low, "clip_ratio_high": high}
        config = Settings(global_batch_info={}, clip_ratio_c=1.5, **given)

        def dppo(logp: Tensor, kind: str = kind, config: Settings = config) -> Tensor:
            loss = getattr(core, f"compute_policy_loss_dppo_{kind}")
            return loss(MU, logp, SPREAD, mask, config=config)[0]

        yield f"dppo {kind}", graded(dppo, NOW)
    config = Settings(global_batch_info={}, policy_loss=Settings(dro_beta=0.3))
    yield (
        "dro",
        graded(
            lambda logp: core.compute_policy_loss_dro(MU, logp, SPREAD, mask, config=config)[0], NOW
        ),
    )
    yield from verl_masks(clones, mask)


def verl_topk(clones: Clones, k: int) -> Result:
    names = "compute_forward_kl_topk kl_divergence"
    fsdp = clones.take(
        "verl",
        "verl/trainer/distillation/fsdp/losses.py",
        names,
        get_ulysses_sequence_parallel_world_size=lambda: 1,
    )
    where = SAMPLED[:FEW]
    values, ids = TEACHER[:FEW][where].log_softmax(-1).topk(k)
    packed = [torch.nested.nested_tensor([each], layout=torch.jagged) for each in (values, ids)]
    config = Settings(distillation_loss=Settings(log_prob_min_clamp=None))

    def loss(logits: Tensor) -> Tensor:
        found = fsdp.compute_forward_kl_topk(logits[where][None], *packed, config, "thd")
        return found["distillation_losses"].mean()

    return graded(loss, LOGITS[:FEW])


REJECTIONS = {
    "token_k1": "0.85_1.1",
    "token_k2": "0.01",
    "token_k3": "0.01",
    "seq_mean_k1": "0.95_1.03",
    "seq_mean_k3": "0.014",
    "seq_sum_k1": "0.8_1.1",
    "seq_sum_k3": "0.08",
    "seq_max_k2": "0.06",
    "seq_max_k3": "0.06",
}


def verl_masks(clones: Clones, mask: Tensor) -> Iterator[tuple[str, Result]]:
    names = "masked_sum masked_mean"
    tools = clones.take("verl", "verl/utils/torch_functional.py", names)
    names = (
        "compute_rollout_rejection_mask compute_rollout_correction_weights SAFETY_BOUND "
        "SUPPORTED_ROLLOUT_RS_OPTIONS TOKEN_LEVEL_ROLLOUT_RS_OPTIONS "
        "_parse_rollout_rs_thresholds _parse_rollout_is_threshold"
    )
    silent: dict[str, Any] = {
        "compute_rs_metrics": lambda **_: {},
        "compute_is_metrics": lambda **_: {},
    }
    helper = clones.take("verl", HELPER, names, verl_F=tools, **silent)
    for option, threshold in REJECTIONS.items():
        kept, _ = helper.compute_rollout_rejection_mask(OLD - MU, mask, option, threshold)
        yield f"{option} {threshold}", {"keep": kept}
    for level in ("token", "sequence"):
        weights, _ = helper.compute_rollout_correction_weights(OLD - MU, mask, level, 1.05, True)
        yield f"normalized {level} weights", {"weight": weights}


def prime_rl(clones: Clones) -> Iterator[tuple[str, Result]]:
    names = "default_loss_fn ref_kl_loss_fn compute_importance_ratio_and_mismatch_kl _safe_mean"
    made = {"LossOutputs": Settings}
    loss = clones.take("prime-rl", "src/prime_rl/trainer/rl/loss.py", names, **made)
    config = Settings(dppo_mask_low=0.1, dppo_mask_high=0.08, adv_tau=1.0, kl_tau=1e-3)

    def inputs(logp: Tensor) -> Settings:
        given = {"ref_logprobs": TAUGHT, "advantages": SPREAD, "loss_mask": SAMPLED}
        return Settings(trainer_logprobs=logp, inference_logprobs=MU, loss_weights=None, **given)

    yield "default loss", graded(lambda logp: loss.default_loss_fn(inputs(logp), config).loss, NOW)
    yield "ref_kl loss", graded(lambda logp: loss.ref_kl_loss_fn(inputs(logp)).loss, NOW)


def areal(clones: Clones) -> Iterator[tuple[str, Result]]:
    path = "areal/utils/functional/functional.py"
    critic = clones.take("AReaL", path, "ppo_critic_loss_fn _mse_loss")
    before, target = BEFORE.float(), (BEFORE + REWARDS).float()

    def value_loss(value: Tensor) -> Tensor:
        return critic.ppo_critic_loss_fn(value, before, target, 0.2, SAMPLED)[0]

    yield "value loss 0.2", graded(value_loss, VALUES.float())
    names = "_compute_token_level_gae _compute_turn_level_gae _validate_turn_ids"
    gae = clones.take("AReaL", "areal/trainer/ppo/gae.py", names)
    # The last column belongs to no token: its value follows the last token of a cut sequence.
    pad = torch.zeros(ROWS, 1, dtype=torch.float64)
    columns = (REWARDS, VALUES, SAMPLED.double())
    rewards, values, mask = (torch.cat([each, pad], 1) for each in columns)
    values[:, -1] = 5.0
    turn = torch.cat([TURN, pad.long() - 1], 1)
    for ended in (True, False):
        cut = torch.full((ROWS,), float(not ended), dtype=torch.float64)
        where = "" if ended else " of cut sequences"
        tokens = gae._compute_token_level_gae(rewards, values, mask, cut, 0.9, 0.8)
        turns = gae._compute_turn_level_gae(rewards, values, mask, turn, cut, 0.9, 0.8)
        for unit, found in (("tokens", tokens), ("turns", turns)):
            advantage, returns = (each[:, :-1] for each in found)
            yield f"gae over {unit}{where}", {"advantage": advantage, "returns": returns}
    yield from areal_losses(clones, path)


def areal_losses(clones: Clones, path: str) -> Iterator[tuple[str, Result]]:
    kl = clones.take("AReaL", "areal/utils/data.py", "KLEstimator _compute_approx_kl")
    kl.KLEstimator._compute_approx_kl = staticmethod(kl._compute_approx_kl)
    names = (
        "apply_rejection_sampling _check_bounds compute_binary_kl_divergence ppo_actor_loss_fn "
        "_compute_sequence_level_ratio_and_advantages"
    )
    made = {"RejectionSamplingResult": Settings, "KLEstimator": kl.KLEstimator}
    rules = clones.take("AReaL", path, names, **made)
    for name, level, agg, metric, lower, upper in (
        ("kpop", "token", "mean", "binary_kl", None, 0.006),
        ("geometric mean", "sequence", "mean", "ratio", 0.97, 1.06),
        ("kl_k3", "sequence", "mean", "kl_k3", None, 0.009),
    ):
        config = Settings(
            level=level, agg=agg, metric=metric, action="mask", lower=lower, upper=upper
        )
        found = rules.apply_rejection_sampling(OLD, MU, SAMPLED, None, config)
        yield name, {"keep": found.loss_mask.double(), "weight": found.behave_imp_weight}
    actor = clones.take(
        "AReaL",
        "areal/trainer/ppo/actor.py",
        "grpo_loss_fn",
        PROX_LOGP_METHOD_RECOMPUTE="recompute",
        ProxLogpMethod=MagicMock(),
        _resolve_proximal_logp=lambda *, prox_logp_gt, **_: prox_logp_gt,
        ppo_actor_loss_fn=rules.ppo_actor_loss_fn,
        stats_tracker=MagicMock(),
        infer_token_denominator=MagicMock(),
        _log_proximal_approximation_stats=MagicMock(),
    )
    for name, rl_weight in (("without rewards", 0.0), ("with rewards", 1.0)):
        data: dict[str, Any] = {
            "logprobs": MU,
            "prox_logp": OLD,
            "advantages": SPREAD,
            "loss_mask": SAMPLED,
        }
        data |= {"teacher_logp": TAUGHT, "rl_loss_weight": rl_weight, "distill_loss_weight": 0.3}

        def loss(logp: Tensor, data: dict[str, Any] = data) -> Tensor:
            return actor.grpo_loss_fn(logp, torch.zeros(1), data, 0.2, 0.28, 3.0)

        yield f"distillation {name}", graded(loss, NOW)


def slime(clones: Clones) -> Iterator[tuple[str, Result]]:
    maths = clones.take("slime", "slime/utils/ppo_utils.py", "compute_opsm_mask vanilla_gae")
    settings = Settings(value_clip=0.2, opd_kl_coef=0.7)
    for name, (advantage, limit) in OPSM.items():
        rows = [NOW, OLD, advantage[:, None].expand_as(NOW), SAMPLED.double()]
        settings.opsm_delta = limit / 2
        keep, _ = maths.compute_opsm_mask(settings, *[list(each) for each in rows])
        yield f"opsm {name}", {"keep": keep.reshape(ROWS, LENGTH)}
    found = maths.vanilla_gae(REWARDS, VALUES, 0.9, 0.8)
    yield "gae", dict(zip(("advantage", "returns"), found, strict=True))

    def value_loss(value: Tensor) -> Tensor:
        critic = clones.take(
            "slime",
            "slime/backends/megatron_utils/loss.py",
            "value_loss_function",
            get_values=lambda *_, **__: (None, {"values": [value]}),
        )
        target = (BEFORE + REWARDS).flatten()
        batch: dict[str, Any] = {"values": [BEFORE.flatten()], "returns": [target]}
        batch |= dict.fromkeys(("unconcat_tokens", "total_lengths", "response_lengths"))
        of_rows = critic.value_loss_function(
            settings, batch, None, lambda each: mean(each.reshape(ROWS, LENGTH))
        )
        return of_rows[0]

    yield "value loss 0.2", graded(value_loss, VALUES)
    path, name = "slime/backends/megatron_utils/loss.py", "apply_opd_kl_to_advantages"
    advantages = list(SPREAD)
    clones.take("slime", path, name).apply_opd_kl_to_advantages(
        settings, {"teacher_log_probs": list(TAUGHT)}, advantages, list(OLD)
    )
    yield "distillation", {"advantage": torch.stack(advantages)}


def skyrl(clones: Clones) -> Iterator[tuple[str, Result]]:
    folder = "skyrl/backends/skyrl_train/utils/"
    tools = clones.take("SkyRL", folder + "torch_utils.py", "safe_exp_delta masked_mean")
    loss = clones.take(
        "SkyRL",
        folder + "ppo_utils.py",
        "dppo_policy_loss reduce_loss",
        apply_off_policy_correction=lambda loss, old, mu, mask, config: (loss, mask, {}),
        **vars(tools),
    )
    for kind, (low, high) in LIMITS.items():
        options = Settings(dppo_type=f"binary_{kind}", delta_low=low, delta_high=high)
        config = Settings(dppo=options, off_policy_correction=None)

        def dppo(logp: Tensor, config: Settings = config) -> Tensor:
            given = {"loss_mask": SAMPLED.double(), "rollout_logprobs": MU}
            return loss.dppo_policy_loss(logp, OLD, SPREAD, config, **given)[0]

        yield f"dppo {kind}", graded(dppo, NOW)


def open_instruct(clones: Clones) -> Iterator[tuple[str, Result]]:
    names = "compute_rho_correction _rho_drop_masks _sequence_level_mean"
    made = {"RhoCorrection": Settings}
    rho = clones.take("open-instruct", "open_instruct/grpo_utils.py", names, **made)
    config = Settings(use_rho_correction=True, rho_mask_sequence_level=False)
    config.rho_mask_tv_divergence = True
    config.rho_mask_lower_bound = config.rho_clamp_lower_bound = 0.0
    config.rho_mask_upper_bound, config.rho_clamp_upper_bound = 0.12, 1e9
    found = rho.compute_rho_correction(OLD, MU, SAMPLED, SPREAD, config)
    yield "vaco", {"weight": found.weights}


def unirl(clones: Clones) -> Iterator[tuple[str, Result]]:
    drpo = clones.take("UniRL", "unirl/algorithms/drpo.py", "_drpo_loss")

    def loss(logp: Tensor) -> Tensor:
        given = {"old_logp": MU, "advantages": SPREAD, "epsilon": 0.3}
        return mean(drpo._drpo_loss(new_logp=logp, **given)[0])

    yield "drpo", graded(loss, NOW)


MAKERS = {
    "trl": trl,
    "verl": verl,
    "prime-rl": prime_rl,
    "AReaL": areal,
    "slime": slime,
    "SkyRL": skyrl,
    "open-instruct": open_instruct,
    "UniRL": unirl,
}


def plain(values: Tensor) -> Any:
    """Return a tensor as nested lists, with 14 significant digits."""
    if values.dim():
        return [plain(each) for each in values]
    return float(f"{values.item():.14g}") if values.is_floating_point() else values.item()


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder with the peers' git clones")
    clones = Clones(parser.parse_args(arguments).folder)
    sections: dict[str, dict[str, Any]] = {
        "peers": dict(PEERS),
        "inputs": {name: plain(values) for name, values in INPUTS.items()},
    }
    for peer, make in MAKERS.items():
        cases = {
            name: {key: plain(values) for key, values in found.items()}
            for name, found in make(clones)
        }
        sections[peer] = cases
    lines = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(
            f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
            for key, value in section.items()
        )
        + "\n}"
        for name, section in sections.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
