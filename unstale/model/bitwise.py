"""Models whose log-probabilities have the same bits in the engine and in the trainer, on CPUs.

In a packed pass (several sequences in one forward pass), the kernels compute each token only from
its own sequence, with sums in a fixed order. This module does the same for matrix products, rotary
angles and the output head. The embedded engine (`engines/embedded/bitwise.py`) calls the same
functions. So a log-probability depends only on the weights, its token and the tokens before it.

All states between layers are float32. If the weights are bfloat16, the inputs of matrix products
are rounded to bfloat16. The gradient is the ordinary one.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unstale.config import ConfigError
from unstale.model import fused, rowwise
from unstale.model.attention import running, sees_all
from unstale.model.head import RowwiseLinear
from unstale.model.kernels import WIDTH, kernels
from unstale.model.linear import Linear

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Supported architectures, by the first part of their class names in transformers."""

ROPES = ("default", "linear", "llama3", "yarn")
"""Supported kinds of rotary embeddings: those whose angles depend only on the position."""

ANGLE_ROWS = 256
"""Number of positions whose rotary angles are computed at once. It is constant, because torch may
round the cosine of a number differently in a tensor of another size.
"""


def use(model: PreTrainedModel, *, max_context: int | None = None) -> None:
    """Make the log-probabilities of a model's packed passes equal the engine's bit for bit.

    The model is changed in place. Raises ConfigError in the cases of `require_supported`.
    """
    require_supported(model, max_context)
    head: Any = model.get_output_embeddings()
    head.__class__ = RowwiseLinear
    embedding = model.get_input_embeddings()
    embedding.__class__ = _wide_class(type(embedding))  # type: ignore[arg-type]
    rotary: Any = model.base_model.rotary_emb
    rotary.__class__ = _rotary_class(type(rotary))  # type: ignore[arg-type]
    for module in model.modules():
        for suffix, forward in _FORWARDS.items():
            if fused.is_known(_plain_class(module), suffix):
                module.__class__ = _bitwise_class(type(module), forward)  # type: ignore[arg-type]


def require_supported(model: PreTrainedModel, max_context: int | None = None) -> None:
    """Raise ConfigError if this module does not support the model, or its kernels do not compile.

    With `max_context`, a sliding window shorter than this number of tokens is not supported.
    """
    if problem := _problem(model, max_context):
        raise ConfigError(
            f"engine.bitwise must be false with {type(model).__name__}: {problem}. It computes "
            f"dense models of the architectures {', '.join(ARCHITECTURES)} on CPUs"
        )
    rowwise.require_kernels()
    if kernels() is None:
        raise ConfigError("engine.bitwise must be false, because kernels.c does not compile")


def _problem(model: PreTrainedModel, max_context: int | None) -> str:
    """Return the reason why this module does not support a model. "" means that it does."""
    config: Any = model.config
    weight = next(model.parameters())
    if not any(type(model).__name__ == f"{name}ForCausalLM" for name in ARCHITECTURES):
        return "its architecture is not supported"
    if weight.device.type != "cpu":
        return f"it is on the device {weight.device}, where this was not measured"
    if weight.dtype not in rowwise.DTYPES:
        return f"its weights are {str(weight.dtype).removeprefix('torch.')}"
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in ROPES:
        return f"the angles of its rotary embedding ({rope}) depend on other tokens"
    layers: Any = model.base_model.layers
    for layer in layers:
        if problem := _problem_of_layer(layer, max_context):
            return problem
    head: Any = model.get_output_embeddings()
    return "" if head.bias is None else "its output head has a bias"


def _problem_of_layer(layer: Any, max_context: int | None) -> str:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    matrices = [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not all(map(_is_linear, matrices)):
        return "its linear layers were replaced, as by adapters or rounding"
    if len({each.bias is None for each in projections[:3]}) > 1 or any(
        each.bias is not None for each in matrices[4:]
    ):
        return "some of its linear layers have a bias"
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {type(mlp.act_fn).__name__}, not SiLU"
    if any(size % WIDTH for each in matrices for size in each.weight.shape):
        return f"the sizes of its layers are not multiples of {WIDTH}"
    if attention.head_dim % WIDTH:
        return f"its head size is {attention.head_dim}, not a multiple of {WIDTH}"
    window = _window(attention)
    if window is not None and max_context is not None and window < max_context:
        return (
            f"its attention has a sliding window of {window} tokens, fewer than the "
            f"{max_context} of engine.max_context"
        )
    return ""


def _window(attention: Any) -> int | None:
    """Return the size in tokens of an attention layer's sliding window, or None if it has none."""
    window: int | None = getattr(
        attention, "sliding_window", getattr(attention.config, "sliding_window", None)
    )
    return window


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Linear) and fused.is_unchanged(module)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the original transformers class of a module, even if `fused.use` has replaced it."""
    kinds = [each for each in type(module).__mro__ if each.__module__.startswith("transformers.")]
    return kinds[0] if kinds else type(module)


@cache
def _bitwise_class(base: type[nn.Module], forward: Any) -> type[nn.Module]:
    def run(self: Any, *args: Any, **options: Any) -> Any:
        if running.get() is None:
            return base.forward(self, *args, **options)
        return forward(self, *args, **options)

    return type(base.__name__, (base,), {"forward": run})


@cache
def _wide_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of an embedding whose output is float32 in a packed pass."""

    def forward(self: Any, input: Tensor) -> Tensor:
        found: Tensor = base.forward(self, input)
        return found if running.get() is None else found.float()

    return type(base.__name__, (base,), {"forward": forward})


@cache
def _rotary_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a rotary embedding that has a table of angles in packed passes."""

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if running.get() is None:
            found: tuple[Tensor, Tensor] = base.forward(self, x, position_ids)
            return found
        cosine, sine = _angles(self, base, int(position_ids.max()) + 1)
        return cosine[position_ids], sine[position_ids]

    return type(base.__name__, (base,), {"forward": forward})


def angles(rotary: nn.Module, count: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and the sines of a rotary embedding, `[positions, width]` each.

    Row `i` belongs to position `i`. There are at least `count` rows.
    """
    return _angles(rotary, type(rotary), count)


def _angles(rotary: Any, kind: Any, count: int) -> tuple[Tensor, Tensor]:
    known: tuple[Tensor, Tensor] | None = vars(rotary).get("_angles")
    have = 0 if known is None else len(known[0])
    if known is None or have < count:
        parts = [] if known is None else [known]
        for first in range(have, count, ANGLE_ROWS):
            positions = torch.arange(first, first + ANGLE_ROWS)[None]
            cosine, sine = kind.forward(rotary, torch.empty(0), positions)
            parts.append((cosine[0], sine[0]))
        known = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        object.__setattr__(rotary, "_angles", known)
    return known


def _attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any
) -> tuple[Tensor, None]:
    run = running.get()
    assert run
    if not sees_all(run, _window(self)):
        raise ValueError(f"a sequence is longer than the sliding window of {_window(self)} tokens")
    return fused.attend(self, hidden_states, position_embeddings, rowwise.ROWWISE), None


def _mlp(self: Any, hidden: Tensor) -> Tensor:
    return fused.gated_mlp(self, hidden, rowwise.ROWWISE)


_FORWARDS: dict[str, Any] = {"RMSNorm": fused.normed, "Attention": _attention, "MLP": _mlp}
"""The forward functions for packed passes, by the end of the name of the module's class."""
