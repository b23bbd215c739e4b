"""Functions for a sharded model: one that is divided among processes (ranks) by FSDP2.

This is the only file that uses `transformers.distributed`. Parameters are divided along their first
dimension, and each rank has a part of every parameter. The parameters of a layer are gathered when
the layer runs. Gradients are summed over the ranks in float32.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist
from transformers.distributed.configuration_utils import DistributedConfig

from unstale.config import ConfigError
from unstale.model.forward import run_model
from unstale.model.head import LogpQuery, query_head
from unstale.model.loading import load_model
from unstale.model.peers import RankGroup
from unstale.model.prefix_tree import PrefixTree

MAX_CHECKED_LAYERS = 2
Forward = Callable[[Callable[..., Any], PrefixTree, Tensor, bool], Tensor]
"""A function such as `forward.run_model`, which runs the body of a model on a prefix tree."""


def load_shard(
    folder: Path, peers: RankGroup, *, passes: torch.dtype, wide: bool, **options: Any
) -> PreTrainedModel:
    """Load this rank's part of a model. Its forward passes compute in the dtype `passes`.

    With `wide`, the parameters of a model with bfloat16 passes are float32, as an optimizer needs.
    They have the exact values of the model folder, and each pass rounds them to nearest. All ranks
    must call this. `options` are those of `load_model`. Raises ConfigError as `load_model` does,
    and if several copies of the model (`peers.replicas`) need a later version of transformers.
    """
    mixed = wide and passes == torch.bfloat16
    config = _distributed_config(peers, mixed=mixed)
    with _ranks_without_experts():
        model = load_model(
            folder, torch.float32 if mixed else passes, distributed_config=config, **options
        )
    _require_divisible(model)
    for module in _units(model):
        # Sums, not means: the loss has the denominators of the whole batch.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def _require_divisible(model: PreTrainedModel) -> None:
    """Raise ConfigError if transformers divides one of the model's weights wrongly.

    It divides the tensors of the folder before it joins several of them into one weight. If it
    joins them along the divided dimension, the rows of the weight are in a wrong order.
    """
    for each in get_model_conversion_mapping(model):
        operations = getattr(each, "operations", ())
        if not any(isinstance(step, Concatenate) and step.dim == 0 for step in operations):
            continue
        for name, _ in model.named_parameters():
            if any(re.search(target, name) for target in each.target_patterns):
                raise ConfigError(
                    f"policy: transformers {transformers.__version__} divides {name} of "
                    f"{type(model).__name__} wrongly among trainer ranks. cluster.trainers must be "
                    "0 or 1 with this policy"
                )


def _distributed_config(peers: RankGroup, *, mixed: bool) -> DistributedConfig:
    size = peers.count // peers.replicas
    options: dict[str, dict[str, Any]] = {}
    if peers.replicas > 1:
        options[f"cluster.replicas = {peers.replicas}"] = {"dp_replicate_size": peers.replicas}
    if peers.divides_experts:
        # transformers 5.19 has `ep_size`, but refuses it beside `fsdp_size`. `auto` is the default.
        options["cluster.expert_parallel"] = {"ep_size": size, "ep_implementation": "auto"}
    sizes: dict[str, Any] = {name: size for each in options.values() for name, size in each.items()}
    for option, each in options.items():
        if lacking := each.keys() - DistributedConfig.__dataclass_fields__.keys():
            raise ConfigError(
                f"{option} needs a later transformers than {transformers.__version__}, whose "
                f"DistributedConfig lacks {', '.join(lacking)}: install 5.23, or leave it out"
            )
    return DistributedConfig(fsdp_size=size, fsdp_mixed_precision=mixed, **sizes)


@contextmanager
def _ranks_without_experts() -> Iterator[None]:
    """Return a context in which a rank can load a model even if it gets no expert of a layer.

    Of 24 ranks that divide 128 experts, 21 get 6 experts, one gets 2, and two get none.
    transformers stacks a rank's experts, which fails if there are none.
    """
    merge: Any = MergeModulelist
    stack = merge.convert

    def stack_any(self: Any, tensors: dict[str, Any], *args: Any, **options: Any) -> Any:
        if not any(len(each) for each in tensors.values()):
            whole = options["model"].get_parameter(options["full_layer_name"])
            _, width, *rest = local(whole).shape
            none = torch.empty(0, width // len(tensors), *rest, dtype=whole.dtype)
            tensors = dict.fromkeys(tensors, none)
        return stack(self, tensors, *args, **options)

    merge.convert = stack_any
    try:
        yield
    finally:
        merge.convert = stack


def prepare_passes(model: PreTrainedModel, *, plain_head: bool) -> None:
    """Prepare a sharded model for `run_pass`.

    Call this after `requires_grad` of its parameters is set. FSDP2 gathers parameters only in a
    forward call of the whole model. This registers `run_pass` as such a call. A layer that is
    called directly would compute with this rank's part only.
    """
    head: Any = model.get_output_embeddings()
    if plain_head:
        head.forward = MethodType(_query_or_logits, head)
    whole: Any = model
    whole.packed_pass = MethodType(_packed_pass if plain_head else _packed_logits, model)
    register_fsdp_forward_method(model, "packed_pass")
    # Parts get their final memory here, so that `local` returns views that stay valid.
    for module in _units(model):
        module.unshard()
        module.reshard()
    _join_tied(model)


def run_pass(
    model: PreTrainedModel,
    run: PrefixTree,
    rows: Tensor,
    query: LogpQuery,
    forward: Forward = run_model,
) -> tuple[Tensor, Tensor]:
    """Run a forward pass on a prefix tree. Return log-probabilities and entropies, `[R]` each.

    `query` has the R target tokens. `rows` `[R]` are the indices in the tree of the tokens before
    them. `forward` is `forward.run_model`, or `apart.run_apart`, which gives each sequence a pass
    of its own. All ranks must call this.
    """
    passes: Any = model
    logp, entropy = passes.packed_pass(run, rows, query, forward)
    return logp, entropy


def release(model: nn.Module) -> None:
    """Free gathered parameters, so that the next pass gathers them from all ranks again.

    A pass without gradient keeps some gathered parameters. They are outdated as soon as a rank's
    part changes.
    """
    for module in _units(model):
        module.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a divided tensor, as a view.

    Other tensors are returned unchanged.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def host_copy(tensor: Tensor, *, pinned: bool = False) -> Tensor:
    """Return a copy of a tensor in main memory, divided among the ranks as the tensor is.

    If it is `pinned`, a GPU can copy from it directly.
    """
    copied = local(tensor).detach().to("cpu", copy=True)
    if pinned and tensor.is_cuda:
        copied = copied.pin_memory()
    if not isinstance(tensor, DTensor):
        return copied
    return DTensor(copied, tensor._spec, requires_grad=False)


def first_number(tensor: Tensor) -> int:
    """Return where this rank's part of a tensor begins, as an index in the flattened whole tensor.

    The result is 0 for a tensor that is not divided.
    """
    if not isinstance(tensor, DTensor):
        return 0
    _, (row, *_) = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(row) * math.prod(tensor.shape[1:])


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def by_mesh(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Group tensors by the ranks that divide them. Return a list of tensor names for each group.

    One operation of torch can then process all tensors of a group together.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(name)
    return list(groups.values())


def one_number(*, like: Tensor) -> Tensor:
    """Return a zero tensor `[1]` with the dtype and device of `like`.

    If `like` is a `DTensor`, so is the result, with the same device mesh and placements.
    """
    zero = torch.zeros(1, dtype=like.dtype, device=like.device)
    if not isinstance(like, DTensor):
        return zero
    return distribute_tensor(zero, like.device_mesh, like.placements, src_data_rank=None)


def zero_rows(like: Tensor, *width: int) -> Tensor:
    """Return float32 zeros `[rows of like, *width]`, divided among ranks by rows as `like` is."""
    zeros = torch.zeros(len(local(like.detach())), *width, device=like.device)
    if not isinstance(like, DTensor):
        return zeros
    shape = torch.Size([like.shape[0], *width])
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = _division(like)
    return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=shape, stride=stride)


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is divided among ranks. All ranks must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = _division(tensor)
    parts = DTensor.from_local(
        local(tensor), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return parts.full_tensor()


def _division(tensor: DTensor) -> tuple[DeviceMesh, Sequence[Placement]]:
    """Return the mesh and the placements of a tensor, without mesh dimensions of size 1.

    Experts have such a dimension, for which torch would communicate a second time.
    """
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names
    kept = [i for i in range(mesh.ndim) if mesh.size(i) > 1]
    if len(kept) == mesh.ndim or not kept or names is None:
        return mesh, tensor.placements
    return mesh[tuple(names[i] for i in kept)], [tensor.placements[i] for i in kept]


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of the tensor `whole`, without communication.

    `whole` is divided as `like` is. If `like` is not divided, return `whole`.
    """
    if not isinstance(like, DTensor):
        return whole
    mesh, placements = _division(like)
    placed = distribute_tensor(
        whole.to(like.to_local().device), mesh, placements, src_data_rank=None
    )
    return placed.to_local()


def parts_of(wholes: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each tensor in `wholes`, by name, divided as in `like`."""
    return {name: part_of(whole, like[name]) for name, whole in wholes.items()}


def shorter_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a small copy for checks: same architecture and width, few layers and random weights.

    It is on the CPU and not divided.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = min(MAX_CHECKED_LAYERS, config.num_hidden_layers)
    if vars(config).get("layer_types"):  # of some architectures it follows from the number
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    if hasattr(config, "distributed_config"):
        del config.distributed_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _join_tied(model: nn.Module) -> None:
    """Make the two parameters of a tied weight use the same memory.

    FSDP2 has the two in different parameter groups. If the rows of a weight cannot be divided
    evenly, it pads a rank's part separately for each group. Without this function, an optimizer
    step would then change only one of the two.
    """
    parts: dict[int, Any] = {}
    for module in _units(model):
        state: Any = module._get_fsdp_state()
        group = state._fsdp_param_group
        for part in group.fsdp_params if group else ():
            first = parts.setdefault(id(part.sharded_param), part)
            if first is part:
                continue
            memory = first._sharded_param_data
            part._sharded_param_data = memory
            rows = len(local(part.sharded_param))
            padded = memory.view(part.padded_sharded_param_size)
            part.sharded_param._local_tensor = padded.narrow(0, 0, rows)


def _units(model: nn.Module) -> Sequence[FSDPModule]:
    """Return FSDP2's units: the modules whose parameters are gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _packed_pass(
    model: Any, run: PrefixTree, rows: Tensor, query: LogpQuery, forward: Forward
) -> tuple[Tensor, Tensor]:
    def answer(rows: Tensor, query: LogpQuery) -> tuple[Tensor, Tensor]:
        hidden = forward(model.base_model, run, rows, True)
        # Called as a module: that is when its parameters are gathered.
        logp, entropy = model.get_output_embeddings()(hidden, query)
        return logp, entropy

    return _ask_ranks(run, rows, query, answer)


def _packed_logits(
    model: Any, run: PrefixTree, rows: Tensor, query: LogpQuery, forward: Forward
) -> tuple[Tensor, Tensor]:
    body: Callable[..., Any] = type(model).forward.__get__(model)

    def answer(rows: Tensor, query: LogpQuery) -> tuple[Tensor, Tensor]:
        logp, entropy = query_head(nn.Identity(), forward(body, run, rows, False), query)
        return logp.clone(), entropy.clone()

    return _ask_ranks(run, rows, query, answer)


def _ask_ranks(
    run: PrefixTree, rows: Tensor, query: LogpQuery, answer: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies `[R]` of a query, computed by `answer`.

    In a context group, each rank computes those of its tokens, and the results are joined.
    """
    context = run.context
    if context is None:
        return answer(rows, query)
    here, places = context.mine(rows, len(run.tokens))
    logp, entropy = answer(places, query.at(here))
    return context.assemble(logp, here, len(rows)), context.assemble(entropy, here, len(rows))


def _query_or_logits(head: Any, rows: Tensor, query: LogpQuery | None = None) -> Any:
    """Return logits, or the log-probabilities and entropies of `query` if it is given."""
    if query is None:
        return type(head).forward(head, rows)
    logp, entropy = query_head(head, rows, query)
    return logp.clone(), entropy.clone()  # FSDP2 refuses views
