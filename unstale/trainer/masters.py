"""The float32 weights that the optimizer changes, and their rounded copies for forward passes."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from unstale.config import RunConfig
from unstale.model.policy import Policy
from unstale.model.rounding import NARROW, Draw, round_stochastically
from unstale.model.sharding import first_number, is_sharded, local

SAMPLE = 1 << 16
"""Number of weights that are compared before and after an optimizer step, to measure how many
changed. The sample has at least one number of every tensor.
"""

MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
"""Number of bits of the fraction that a floating-point number stores, by dtype."""
LEAST_EXPONENT = {torch.bfloat16: -133, torch.float16: -24}
"""The exponent, to the base 2, of the smallest positive number of a dtype."""


class Masters:
    """The weights that an optimizer changes, and their rounding for forward passes.

    A float32 parameter is optimized directly. A parameter of a narrower dtype has a separate
    float32 weight, which is rounded into the parameter after every step. If the model's folder has
    more precision than the parameter, the float32 weights start with the folder's values.
    """

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self._rounding = config.trainer.rounding
        self._seed = config.seed
        self._dtype = policy.dtype
        self._forward = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        own = policy.checkpoint_weights() if self.is_narrow else {}
        self.tensors = {
            name: self._master(parameter, own.pop(name, None))
            for name, parameter in self._forward.items()
        }
        """The weights that the optimizer changes, by name."""
        self.separate = [
            name for name, each in self._forward.items() if each is not self.tensors[name]
        ]
        """The names of the weights that are separate from the parameters of forward passes."""
        total = sum(local(each.detach()).numel() for each in self.tensors.values())
        self._stride = max(1, total // SAMPLE)
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self.rounded_at = 0
        """The number of the optimizer step after which weights were last rounded into
        parameters.
        """
        self.round(0, self.tensors)

    @property
    def is_narrow(self) -> bool:
        """True if forward passes use weights rounded to a narrower dtype than float32."""
        return self._dtype in NARROW

    def _master(self, parameter: nn.Parameter, own: Tensor | None) -> Tensor:
        """Return the tensor to optimize: the parameter itself, or a separate float32 weight.

        `own` is the weight's value in the model's folder, if that is more precise.
        """
        if parameter.dtype not in (torch.float32, torch.float64):
            return nn.Parameter(_precise(parameter.detach(), own))
        # A part of a divided model is float32, and FSDP rounds it to nearest for a pass.
        rounds_itself = not is_sharded(parameter) or self._rounding == "nearest"
        # Gradients of float16 passes are scaled, also those of parameters that stay float32.
        if self._dtype == torch.float16 or (self.is_narrow and not rounds_itself):
            return nn.Parameter(parameter.detach().clone())
        return parameter

    def collect_gradients(self, scale: float = 1.0) -> None:
        """Add the gradients of parameters, divided by `scale`, to those of the separate weights."""
        for name in self.separate:
            master, parameter = self.tensors[name], self._forward[name]
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
                if scale != 1.0:
                    master.grad.mul_(1 / scale)
            else:  # adds in float32, without a copy of the gradient
                master.grad.add_(parameter.grad, alpha=1 / scale)
            parameter.grad = None

    @torch.no_grad()
    def round(self, step: int, names: Collection[str]) -> None:
        """Round the separate weights among `names` into the parameters, after step `step`.

        If `step` is 0, they are rounded to nearest, as an engine rounds the weights of the model's
        folder.
        """
        self.rounded_at = step
        separate = [name for name in self.separate if name in names]
        if step and self._rounding != "nearest":
            draw = Draw(self._seed, step if self._rounding == "stochastic" else 0)
            for name in separate:
                self._round_one(name, draw)
            return
        whole = [name for name in separate if not is_sharded(self._forward[name])]
        if whole:
            targets: list[Tensor] = [self._forward[name] for name in whole]
            torch._foreach_copy_(targets, [self.tensors[name] for name in whole])
        for name in separate:
            if is_sharded(self._forward[name]):
                part = local(self.tensors[name].detach())
                local(self._forward[name].detach()).copy_(part.to(self._dtype))

    def _round_one(self, name: str, draw: Draw) -> None:
        """Round this process's part of a weight into its parameter."""
        weight = local(self.tensors[name].detach())
        target = local(self._forward[name].detach())
        dtype = target.dtype
        if dtype not in NARROW:
            if not is_sharded(self._forward[name]):  # a parameter that transformers keeps float32
                target.copy_(weight)
                return
            dtype = self._dtype
        is_direct = target.dtype == dtype and target.is_contiguous()
        rounded = (
            target
            if is_direct
            else torch.empty_like(target, dtype=dtype, memory_format=torch.contiguous_format)
        )
        first = first_number(self.tensors[name])
        round_stochastically(weight.contiguous(), rounded, draw, name=name, first=first)
        if not is_direct:
            target.copy_(rounded)

    @torch.no_grad()
    def watch(self, names: Collection[str]) -> None:
        """Copy a sample of the weights `names`, for `moved` after an optimizer step."""
        if self.is_narrow:
            self._before = {
                name: (self._sample(self.tensors[name]), self._rounded_sample(name))
                for name in names
            }

    @torch.no_grad()
    def moved(self) -> Tensor:
        """Return three sums over the sample of `watch`, as a float64 tensor `[3]` on the CPU.

        They are the number of rounded weights that changed, the number that is expected to change,
        and the size of the sample. The first two count only small updates, which rounding to
        nearest would lose: those of less than half the distance between two representable numbers.
        An update of a share x of this distance changes the rounded weight with probability x. All
        sums are 0 if no weights are rounded.
        """
        found = [torch.zeros(3, dtype=torch.float64)]
        for name, (weight, rounded) in self._before.items():
            after = self._sample(self.tensors[name])
            size = torch.maximum(after.abs(), weight.abs())
            share = (after - weight).abs() / _spacing(size, self._dtype)
            is_small = share < 0.5
            changed = ((self._rounded_sample(name) != rounded) & is_small).sum()
            due = (share * is_small).sum()
            sums = torch.stack([changed.double(), due.double()]).cpu()
            found.append(torch.cat([sums, torch.tensor([len(weight)], dtype=torch.float64)]))
        self._before = {}
        return torch.stack(found).sum(0)

    def _sample(self, tensor: Tensor) -> Tensor:
        return local(tensor.detach()).reshape(-1)[:: self._stride].clone()

    def _rounded_sample(self, name: str) -> Tensor:
        return self._sample(self._forward[name]).to(self._dtype)

    @torch.no_grad()
    def restore(
        self, weights: Mapping[str, Tensor], rounded_at: int, names: Collection[str]
    ) -> None:
        """Load the weights `names`, and round them as after the optimizer step `rounded_at`.

        No other thread may read the weights of the policy meanwhile.
        """
        for name in names:
            local(self.tensors[name].detach()).copy_(local(weights[name]))
        self.round(rounded_at, names)


def _precise(parameter: Tensor, own: Tensor | None) -> Tensor:
    """Return the float32 weight of a parameter: the more precise value `own`, or the parameter's.

    `own` is used only if it rounds to the parameter.
    """
    if own is not None and own.shape == parameter.shape:
        # a copy, because the memory of a file cannot be freed for `trainer.offload_optimizer`
        precise = own.to(device=parameter.device, dtype=torch.float32, copy=True)
        if torch.equal(precise.to(parameter.dtype), parameter):
            return precise
    return parameter.float()


def _spacing(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between the two numbers of `dtype` around each number in `sizes`."""
    exponent = torch.frexp(sizes).exponent - 1 - MANTISSA[dtype]
    return torch.ldexp(torch.ones_like(sizes), exponent.clamp(min=max(LEAST_EXPONENT[dtype], -126)))
