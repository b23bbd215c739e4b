"""The trainer of all tenants: one model, whose adapters are exchanged for each request.

All adapters have `max_rank` rows. Those of a smaller rank are padded with rows of zeros, which get
no gradient and stay zero. So adapters of all ranks fit one model and one engine.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unstale.config import ConfigError
from unstale.model.head import LogpQuery, query_head
from unstale.model.loading import vocab_size
from unstale.model.lora import adapters as adapters_of
from unstale.model.packing import cut
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.research.tinker.losses import LOSSES
from unstale.research.tinker.wire import Datum, Training
from unstale.rollout.endpoint.schemas import Refused

MAX_TOKENS_PER_PASS = 4096
Adapters = Mapping[str, Tensor]
"""LoRA adapters by name, float32. The tensors of a saved version never change."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The rank and the layers of the adapters that a tenant asked for."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True

    def trains(self, name: str) -> bool:
        """Return True if a run of this shape trains the adapter `name`."""
        return self.train_mlp if ".mlp." in name else self.train_attn


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a training run: adapters, AdamW's moments, and the number of optimizer steps."""

    adapters: Adapters
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int = 0


class TrainingRun:
    """A tenant's training run: adapters, their gradients and AdamW's state."""

    def __init__(self, shape: Shape, adapters: Adapters, device: torch.device) -> None:
        self.shape = shape
        self.parameters = {
            name: torch.nn.Parameter(tensor.to(device, torch.float32, copy=True))
            for name, tensor in adapters.items()
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values())
        self.steps = 0

    def require_shape(self, saved: Shape, path: str) -> None:
        """Raise `Refused` unless the adapters saved at `path` have this run's rank and layers."""
        for name in ("rank", "train_mlp", "train_attn"):
            if getattr(saved, name) != getattr(self.shape, name):
                raise Refused(
                    f"{path} has {name} {getattr(saved, name)}, and the model "
                    f"{getattr(self.shape, name)}: load it into a new model"
                )

    def adapters(self) -> dict[str, Tensor]:
        """Return a copy of the adapters on the CPU. Later optimizer steps do not change it."""
        return {name: each.detach().to("cpu", copy=True) for name, each in self.parameters.items()}

    def save(self) -> Saved:
        """Return a copy of the whole state on the CPU."""
        moments = {
            f"{kind}/{name}": state[kind].to("cpu", copy=True)
            for name, each in self.parameters.items()
            if (state := self.optimizer.state.get(each))
            for kind in ("exp_avg", "exp_avg_sq")
        }
        adapters = self.adapters()
        if not all(bool(each.isfinite().all()) for each in adapters.values()):
            raise Refused("the weights are not finite: load an earlier state")
        return Saved(adapters, moments, self.steps)

    @torch.no_grad()
    def load(self, saved: Saved, *, with_optimizer: bool) -> None:
        """Replace the adapters and drop gradients. Restore AdamW's state, or reset it.

        Raises `Refused` if the saved adapters do not fit.
        """
        if {name: each.shape for name, each in saved.adapters.items()} != {
            name: each.shape for name, each in self.parameters.items()
        }:
            raise Refused("the saved adapters do not fit this model")
        for name, each in self.parameters.items():
            each.copy_(saved.adapters[name])
            each.grad = None
        self.optimizer.state.clear()
        self.steps = saved.steps if with_optimizer else 0
        if not (with_optimizer and saved.moments):
            return
        for name, each in self.parameters.items():
            self.optimizer.state[each] = {
                "step": torch.tensor(float(saved.steps)),
                **{
                    kind: saved.moments[f"{kind}/{name}"].to(each.device, copy=True)
                    for kind in ("exp_avg", "exp_avg_sq")
                },
            }

    def step(self, options: Mapping[str, float]) -> dict[str, float]:
        """Take a step of AdamW with the sum of all gradients since the last step.

        Return a metric, the norm of that sum. Raises `Refused` if there is no gradient. If the norm
        is not finite, the gradients are dropped and `Refused` is raised, too.
        """
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        if not gradients:
            raise Refused("there is no gradient: call forward_backward before optim_step")
        limit = options["grad_clip_norm"] or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise Refused("the gradient is not finite: it was dropped, and no step taken")
        group: dict[str, Any] = self.optimizer.param_groups[0]
        group["lr"], group["eps"] = options["learning_rate"], options["eps"]
        group["betas"] = (options["beta1"], options["beta2"])
        group["weight_decay"] = options["weight_decay"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return {"grad_norm": norm}


class Trainer:
    """One model that serves the passes of all tenants. Only one thread may call it."""

    def __init__(self, policy: Policy, *, max_context: int) -> None:
        if not policy.has_plain_head:
            raise ConfigError(
                f"the output head of {type(policy.model).__name__} is more than one linear map: "
                "choose another model"
            )
        if policy.lora is None:
            raise ValueError("the policy must have adapters")
        policy.check_length(max_context)
        self._policy = policy
        self._max_context = max_context
        self.max_rank = policy.lora.rank
        self.vocab_size = vocab_size(policy.model.get_output_embeddings())
        self.base = {
            name: torch.zeros_like(each, dtype=torch.float32, device="cpu")
            for name, each in policy.weights().items()
        }
        """Adapters of zeros, which leave the base model unchanged."""

    def create(self, shape: Shape) -> TrainingRun:
        """Return a new run. The LoRA matrices A are random, as in `unstale.model.lora`, and B are
        0.
        """
        noise = torch.Generator().manual_seed(shape.seed)
        adapters = {name: each.clone() for name, each in self.base.items()}
        for name, each in adapters.items():
            if name.endswith("lora_A.weight") and shape.trains(name):
                rows = torch.rand((shape.rank, each.shape[1]), generator=noise) * 2 - 1
                each[: shape.rank] = rows / math.sqrt(each.shape[1])
        return TrainingRun(shape, adapters, self._policy.device)

    def forward_backward(
        self, run: TrainingRun, request: Training
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Return the log-probabilities of the targets, `[N]` per sequence, and the loss's metrics.

        Unless the request is `forward_only`, the loss's gradient is added to the run's gradients.
        If a pass fails, the run does not change. Raises `Refused` for tokens outside the
        vocabulary.
        """
        for index, datum in enumerate(request.data):
            self.require_tokens((*datum.tokens, *datum.targets.tolist()), f"data[{index}]")
            self.require_length(len(datum.tokens), f"data[{index}]")
        self._policy.load_weights(run.parameters)
        trained = adapters_of(self._policy.model)
        logps = [torch.empty(0)] * len(request.data)
        total = 0.0
        try:
            with torch.set_grad_enabled(not request.forward_only):
                for members, logp in self._passes(request.data):
                    terms = LOSSES[request.loss].terms(logp, _inputs(request, members, logp))
                    total += float(terms.detach().double().sum())
                    if not request.forward_only:
                        terms.sum().backward()
                    lengths = [len(request.data[index].tokens) for index in members]
                    parts = logp.detach().float().cpu().split(lengths)
                    for index, part in zip(members, parts, strict=True):
                        logps[index] = part
            if not request.forward_only:
                for name, each in run.parameters.items():
                    _add_gradient(each, trained[name].grad)
        finally:
            for each in trained.values():
                each.grad = None
        return logps, {"loss:sum": total}

    def prompt_logps(self, adapters: Adapters, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a prompt under the given adapters.

        That of the first token is NaN.
        """
        self._policy.load_weights(adapters)
        packed = Packed(torch.tensor(tokens), (0, len(tokens)))
        with torch.no_grad():
            logp = self._policy.logps(packed, temperature=1.0)
        return [math.nan, *logp[1:].tolist()]

    def require_tokens(self, tokens: Sequence[int], where: str) -> None:
        """Raise `Refused` if there is no token, or if one is outside the vocabulary."""
        if not tokens:
            raise Refused(f"{where} has no tokens")
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise Refused(f"{where} has the token {wrong}, not one of 0 to {self.vocab_size - 1}")

    def require_length(self, length: int, where: str) -> None:
        """Raise `Refused` if `length` exceeds the model's largest context."""
        if length > self._max_context:
            raise Refused(f"{where} has {length} tokens, more than {self._max_context}")

    def _passes(self, data: Sequence[Datum]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Run the forward passes of sequences.

        Yield for each pass the indices of its sequences, and the log-probabilities of all their
        targets, concatenated. A target may differ from the next input token.
        """
        rows = [torch.tensor([*datum.tokens, 0]) for datum in data]  # the last has no successor
        offsets = [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
        packed = Packed(torch.cat(rows), tuple(offsets))
        where = torch.ones(len(packed.tokens), dtype=torch.bool)
        where[list(offsets[:-1])] = False
        policy, spans = self._policy, packed.spans()
        for members in policy.pack(packed, spans, MAX_TOKENS_PER_PASS, where=where):
            part, index = cut(packed, [spans[each] for each in members])
            states = policy.states_before(policy.prefix_tree(part), where[index])
            targets = torch.cat([data[each].targets for each in members]).to(states.device)
            head = policy.model.get_output_embeddings()
            yield members, query_head(head, states, LogpQuery(targets, 1.0))[0]


def _inputs(request: Training, members: Sequence[int], logp: Tensor) -> dict[str, Tensor]:
    """Return the inputs of the loss for the tokens of one pass, `[R]` each, by name."""
    loss = LOSSES[request.loss]
    data = [request.data[index] for index in members]
    found = {
        name: torch.cat([datum.inputs[name] for datum in data]).to(logp) for name in loss.needs
    }
    for name, default in loss.options.items():
        value = request.options.get(name, default)
        parts = [datum.inputs.get(name, torch.full((len(datum.tokens),), value)) for datum in data]
        found[name] = torch.cat(parts).to(logp)
    return found


def _add_gradient(parameter: torch.nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad += gradient
