"""Faster attention, MLP and norm modules for models of transformers, one autograd operation each.

They are used in packed passes, in float32 on CPUs and in any usual dtype on GPUs. Between the
matrix products they run compiled kernels. All other passes run the code of transformers.
`packing_check` compares both results when a model is loaded.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unstale.model.attention import running, sees_all
from unstale.model.context import check_heads
from unstale.model.kernels import fits, kernels_for
from unstale.model.linear import FAST, Linear, Products
from unstale.model.tree_attention import DividedLayout, Layout, can_attend, layout_of

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe")
"""Architectures of transformers for which this module has fused attention, MLP and norms."""


def use(model: nn.Module) -> None:
    """Make the attention, MLP and norm modules of a model run fused operations, in place.

    Modules of other architectures than `ARCHITECTURES` are not changed.
    """
    for module in model.modules():
        for suffix, forward in _FORWARDS.items():
            if is_known(type(module), suffix):
                module.__class__ = _fused_class(type(module), forward)  # type: ignore[arg-type]


def undo(model: nn.Module) -> None:
    """Make the modules that `use` changed run the code of transformers again, in place."""
    for module in model.modules():
        if getattr(type(module), "is_fused", False):
            module.__class__ = type(module).__mro__[1]


def is_known(kind: type[nn.Module], suffix: str) -> bool:
    """Return True for a module class of `ARCHITECTURES` whose name ends with `suffix`.

    FSDP2 replaces a module's class by a subclass, which is recognised, too.
    """
    names = {f"{name}{suffix}" for name in ARCHITECTURES}
    if issubclass(kind, FSDPModule):
        kind = kind.__mro__[2]
    return kind.__module__.startswith("transformers.models.") and kind.__name__ in names


@cache
def _fused_class(base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass of the module class `base` that runs `forward` in a packed pass.

    `forward` receives `base.forward` as an argument.
    """

    def run(self: Any, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or running.get() is None:
            return base.forward(self, *args, **options)
        return forward(self, base.forward, *args, **options)

    return type(base.__name__, (base,), {"forward": run, "is_fused": True})


def _norm(self: Any, plain: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    if not fits(hidden, self.weight):
        return plain(self, hidden)
    return normed(self, hidden)


def normed(module: Any, hidden: Tensor) -> Tensor:
    """Return the output of an RMS norm module, which belongs to a model of `ARCHITECTURES`."""
    weight = module.weight.to(hidden.dtype)
    out: Tensor = _Norm.apply(hidden, weight, module.variance_epsilon)
    return out


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of contiguous rows `[..., width]`, and the rows' inverse RMS `[rows]`."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    roots = x.new_empty(rows, dtype=torch.float32)
    kernels_for(x).norm(x, weight, eps, out, roots, rows, width)
    return out, roots


def turn_heads(
    part: Tensor, norm: Tensor | None, angles: tuple[Tensor, Tensor], width: int, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Apply norm and rotary embedding to attention heads. Return `[rows, heads, width]`.

    `part` `[rows, heads * width]` is the result of a projection. `angles` are the cosines and sines
    `[rows, width]` of the rotary embedding. The second result is the inverse RMS of each head,
    `[rows, heads]`. If `norm` is None, heads are not normalised and the second result is None.
    """
    rows, num = len(part), part.shape[1] // width
    out = part.new_empty(rows, num, width)
    roots = None if norm is None else part.new_empty(rows, num, dtype=torch.float32)
    kernels_for(part).heads(part, part.stride(0), norm, eps, *angles, out, roots, rows, num, width)
    return out, roots


def swiglu(both: Tensor) -> Tensor:
    """Return `silu(gate) * up` `[R, width]`.

    Each row of `both` `[R, 2 * width]` is gate, then up.
    """
    width = both.shape[1] // 2
    inner = both.new_empty(len(both), width)
    kernels_for(both).swiglu(both, inner, len(both), width)
    return inner


class _Norm(torch.autograd.Function):
    """Root-mean-square normalization (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, roots = norm_rows(x, weight, eps)
        ctx.save_for_backward(x, weight, roots)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, roots = ctx.saved_tensors
        found = kernels_for(x)
        out = torch.empty_like(x)
        rows, width = len(roots), x.shape[-1]
        sums = x.new_empty(found.pieces(rows), width, dtype=torch.float32)
        found.norm_backward(x, weight, roots, grad.contiguous(), out, sums, rows, width)
        return out, sums.sum(0).to(weight.dtype), None


def _attention(  # noqa: PLR0913 - the arguments of transformers
    self: Any,
    plain: Callable[..., tuple[Tensor, Tensor | None]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    run = running.get()
    assert run
    cosine, _ = position_embeddings
    projections = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
    norms = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
    window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
    if not (
        fits(hidden_states, cosine)
        and can_attend(run, hidden_states, self.head_dim)
        and cosine.shape[-1] == self.head_dim
        and past_key_values is None
        and sees_all(run, window)
        and all(map(is_plain, projections))
        and len({each.bias is None for each in projections[:3]}) == 1
        and all(each is None or is_unchanged(each) for each in norms)
    ):
        return plain(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **options
        )
    return attend(self, hidden_states, position_embeddings, FAST), None


def attend(
    module: Any,
    hidden: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    products: Products,
) -> Tensor:
    """Return the output of an attention module of `ARCHITECTURES`, in a packed pass.

    `products` computes the module's matrix products.
    """
    run = running.get()
    assert run
    width = module.head_dim
    cosine, sine = (each.reshape(-1, width).contiguous() for each in position_embeddings)
    projections = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    heads, key_heads = (each.out_features // width for each in projections[:2])
    whole = layout_of(run, hidden.device)
    layout: Layout = whole
    if run.context:
        check_heads(heads, key_heads, run.context.size)
        layout = DividedLayout(whole, run.context)
    shape = _Heads(
        layout,
        heads,
        key_heads,
        width,
        module.scaling,
        norms[0].variance_epsilon if norms[0] is not None else 0.0,
        products,
    )
    # The kernels for CPUs need vectors in float32. Only a bitwise pass has others there.
    vectors = [
        *(each.bias for each in projections),
        *(None if each is None else each.weight for each in norms),
    ]
    out: Tensor = _Attention.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        (cosine, sine, shape),
        *(each.weight for each in projections),
        *(None if each is None else each.to(hidden.dtype) for each in vectors),
    )
    return out.view(hidden.shape)


class _Heads(NamedTuple):
    """The constants of one attention layer in a pass."""

    layout: Layout
    heads: int
    key_heads: int
    width: int
    scale: float
    eps: float
    products: Products

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of columns of query, key and value in the product with the joined weights."""
        return self.heads * self.width, self.key_heads * self.width, self.key_heads * self.width


class _Attention(torch.autograd.Function):
    """A whole attention layer: projections, norms of heads, rotary embedding, attention, output."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, given: tuple[Tensor, Tensor, _Heads], *weights: Any
    ) -> Tensor:
        cosine, sine, shape = given
        to_query, to_key, to_value, to_out, *biases, query_norm, key_norm = weights
        joined = torch.cat([to_query, to_key, to_value])
        bias = None if biases[0] is None else torch.cat(biases[:3])
        projected = shape.products.forward(rows, joined, bias)
        query, key, value = projected.split(shape.sizes, 1)
        turned = []
        roots = []
        for part, norm in ((query, query_norm), (key, key_norm)):
            out, inverse = turn_heads(part, norm, (cosine, sine), shape.width, shape.eps)
            turned.append(out)
            roots.append(inverse)
        values = value.unflatten(1, (-1, shape.width))
        out, lse = shape.layout.attend(turned[0], turned[1], values, shape.scale)
        ctx.save_for_backward(rows, projected, *turned, *roots, out, lse, *weights)
        ctx.given = given
        return shape.products.forward(out.flatten(1), to_out, biases[3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # only once: with checkpoints, each access computes them again
        rows, projected, query, key, *roots, out, lse = saved[:8]
        weights = saved[8:]
        to_query, to_key, to_value, to_out, *biases, query_norm, key_norm = weights
        cosine, sine, shape = ctx.given
        needs = ctx.needs_input_grad[2:]
        found = kernels_for(rows)
        grad = grad.contiguous()
        results: list[Any] = [None] * len(weights)
        if needs[3]:
            results[3] = shape.products.for_weight(grad, out.flatten(1), to_out.dtype)
        if needs[7]:
            results[7] = grad.sum(0)
        slopes = torch.empty_like(projected)
        parts = projected.split(shape.sizes, 1)
        targets = slopes.split(shape.sizes, 1)
        value, to_values = (each[2].unflatten(1, (-1, shape.width)) for each in (parts, targets))
        back = shape.products.for_rows(grad, to_out).view_as(out)
        turned = shape.layout.attend_backward(
            query, key, value, (out, lse, back), shape.scale, to_values
        )
        for i, norm in enumerate((query_norm, key_norm)):
            num = turned[i].shape[1]
            sums = rows.new_empty(found.pieces(len(rows)), shape.width, dtype=torch.float32)
            found.heads_backward(
                parts[i],
                parts[i].stride(0),
                norm,
                cosine,
                sine,
                roots[i],
                turned[i],
                targets[i],
                sums,
                len(rows),
                num,
                shape.width,
            )
            if needs[8 + i]:
                results[8 + i] = sums.sum(0).to(norm.dtype)
        if any(needs[:3]):
            joined = shape.products.for_weight(slopes, rows, to_query.dtype)
            _split_gradients(joined, shape.sizes, needs[:3], results)
        for i, bias in enumerate(biases[:3]):
            if bias is not None and needs[4 + i]:
                results[4 + i] = targets[i].sum(0)
        for_rows = None
        if ctx.needs_input_grad[0]:
            joined = torch.cat([to_query, to_key, to_value])
            for_rows = shape.products.for_rows(slopes, joined)
        return for_rows, None, *results


def _mlp(self: Any, plain: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    layers = (self.gate_proj, self.up_proj, self.down_proj)
    if not (
        fits(hidden, self.down_proj.weight)
        and type(self.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and all(is_plain(each) and each.bias is None for each in layers)
    ):
        return plain(self, hidden)
    return gated_mlp(self, hidden, FAST)


def gated_mlp(module: Any, hidden: Tensor, products: Products) -> Tensor:
    """Return the output of an MLP module, whose model is in `ARCHITECTURES`.

    `products` computes the module's matrix products.
    """
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    out: Tensor = _GatedMLP.apply(
        hidden.reshape(-1, hidden.shape[-1]), *(each.weight for each in layers), products
    )
    return out.view(hidden.shape)


class _GatedMLP(torch.autograd.Function):
    """`down(silu(gate(x)) * up(x))` (arXiv 2002.05202)."""

    @staticmethod
    def forward(  # noqa: PLR0913 - the rows and three weights
        ctx: Any,
        rows: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        products: Products = FAST,
    ) -> Tensor:
        both = products.forward(rows, torch.cat([gate, up]))
        ctx.save_for_backward(rows, both, gate, up, down)
        ctx.products = products
        return products.forward(swiglu(both), down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, both, gate, up, down = ctx.saved_tensors
        for_rows, *needs = ctx.needs_input_grad[:4]
        products: Products = ctx.products
        found = kernels_for(rows)
        grad = grad.contiguous()
        back = products.for_rows(grad, down)
        inner = torch.empty_like(back)
        slopes = torch.empty_like(both)
        found.swiglu_backward(both, back, inner, slopes, len(rows), len(up))
        results: list[Any] = [None, None, None]
        if needs[2]:
            results[2] = products.for_weight(grad, inner, down.dtype)
        if any(needs[:2]):
            joined = products.for_weight(slopes, rows, gate.dtype)
            _split_gradients(joined, (len(gate), len(up)), needs[:2], results)
        to_rows = products.for_rows(slopes, torch.cat([gate, up])) if for_rows else None
        return to_rows, *results, None


def _split_gradients(
    joined: Tensor, sizes: Sequence[int], needs: Sequence[bool], results: list[Any]
) -> None:
    """Split the gradient of joined weights, and set the first elements of `results` to the parts.

    Each weight has one part. It is None where `needs` is False.
    """
    results[: len(sizes)] = [
        each if needed else None
        for each, needed in zip(joined.split(list(sizes)), needs, strict=True)
    ]


def is_plain(layer: nn.Module) -> bool:
    """Return True if a linear layer is a `linear.Linear` without hooks or adapters."""
    return type(layer) is Linear and is_unchanged(layer)


def is_unchanged(layer: nn.Module) -> bool:
    """Return True if a module has no hooks and its forward function was not replaced."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    return not hooks and "forward" not in vars(layer)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "RMSNorm": _norm,
    "Attention": _attention,
    "MLP": _mlp,
}
"""The forward functions for packed passes, by the end of the name of the module's class."""
