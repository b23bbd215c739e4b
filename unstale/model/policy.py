"""The policy: a language model with its tokenizer, which computes log-probabilities of tokens.

Sequences are packed end to end without padding. A prefix that several sequences have in common is
computed once (`prefix_tree`). If a model's sequences cannot be packed, each one has a forward pass
of its own (`apart`).
"""

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.config.hub import count_weights, reading, require_model
from unstale.model import apart, bitwise, expert_products, fused, linear, sharding
from unstale.model import lora as adapters
from unstale.model.attention import ATTENTION
from unstale.model.context import check_heads
from unstale.model.divergence import Comparison
from unstale.model.experts import ExpertLayers, replay_experts
from unstale.model.forward import (
    ForwardOptions,
    Scored,
    announce_layers,
    checkpoint_layers,
    last_states,
    run_model,
)
from unstale.model.head import LogpQuery, query_head, wide
from unstale.model.hidden import HiddenMeans, find_layer, outputs_of
from unstale.model.loading import (
    DTYPES,
    load_model,
    load_tokenizer,
    no_progress_bars,
    vocab_size,
)
from unstale.model.lora import Lora, Merging
from unstale.model.packing import cut, pack, pack_shared, wanted_spans
from unstale.model.packing_check import (
    Packability,
    check_bitwise,
    check_length,
    check_packing,
)
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.pictures import (
    PROCESSOR_FILES,
    PictureInputs,
    freeze_tower,
    load_pictures,
)
from unstale.model.prefix_tree import ROUND, Packed, PrefixTree, build_prefix_tree
from unstale.model.quantisation import quantise_passes
from unstale.model.versions import VersionGaps, lag_of, num_batches
from unstale.model.whole_weights import WholeWeights
from unstale.pictures import FIRST, PICTURES, PictureStore
from unstale.records import Batch, count_tokens
from unstale.routed_experts import num_experts

Placement = Literal["twin", "own"]
"""The model that computes log-probabilities under past versions of the weights: a second model
(`twin`), or the trained model, into which past weights are copied (`own`).
"""


class Policy:
    """A causal language model with its tokenizer and the version number of its weights.

    `version` counts published weights. `weights_match_version` is True while the weights are still
    those of `version`, and becomes False with the next optimizer step. The model is in eval mode,
    so a log-probability depends only on weights and tokens. With LoRA, the policy's weights are
    only the adapters, and `base` is the checksum of the frozen model.

    If the model is divided among several ranks (`peers`), all ranks must call the same methods in
    the same order. Each rank holds its part of the weights. The forward passes of `score` are
    distributed over the ranks.
    """

    def __init__(  # noqa: PLR0913 - the parts of a policy
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lora: Lora | None = None,
        base: int = 0,
        peers: RankGroup = SINGLE_PROCESS,
        pictures: PictureInputs | None = None,
    ) -> None:
        self.pictures = pictures
        """The `PictureInputs` of a vision-language model. None if the model reads only text."""
        self._frozen = freeze_tower(model) if pictures else frozenset[str]()
        """Names of parameters that training never changes. They do not count as weights of the
        policy.
        """
        if lora:
            adapters.inject(model, lora, without=self._frozen)
        self.lora = lora
        self.base = base
        self.peers = peers
        self.model = _use_packing(model)
        self.tokenizer = tokenizer
        self._dtype: torch.dtype | None = None
        """The precision of forward passes. None means the precision of the parameters."""
        self._held: dict[str, Tensor] | None = None
        """This policy's weights in main memory, if the model has other weights. They replace the
        model's weights during `score`. None if the model has this policy's weights.
        """
        self._readers: list[Callable[[], None]] = []
        """Functions that wait until another thread has stopped reading the weights
        (`lend_weights`).
        """
        self._version = 0
        self.weights_match_version = True
        self.version_gaps: VersionGaps = ()
        self.checked_length = 0
        """The largest number of tokens for which `check_length` has checked the model."""
        self._short_copy: PreTrainedModel | None = None
        """A whole model with few layers, on which a sharded model is checked. None after
        `check_length`, and if the model is not sharded.
        """
        self.computes_apart = False
        """True if each sequence has a forward pass of its own, because sequences cannot be
        packed.
        """
        if self._is_sharded:
            self._short_copy = _use_packing(sharding.shorter_copy(model))
        self._run_model: Callable[..., Tensor] = partial(run_model, pictures=pictures)
        try:
            packability = check_packing(self._short_copy or model, tokenizer)
            if pictures:
                apart.check_pictures(model, pictures, packability, packed=True)
        except ConfigError as refusal:
            packability = self._compute_apart(refusal)
        self._plain_head = packability.plain_head
        self.packing_noise = packability.noise
        """Largest change of a log-probability, in nats, that other sequences in the same pass
        cause. It was measured when the model was loaded. 0 in a dense model.
        """
        if self._is_sharded:
            sharding.prepare_passes(model, plain_head=self._plain_head)
        if not self._plain_head:
            warnings.warn(
                "a pass holds all logits [tokens, vocabulary] in memory: "
                f"the head of {type(model).__name__} is more than one linear map",
                RuntimeWarning,
                stacklevel=2,
            )
        self._folder: Path | None = None
        """The folder from which the weights were loaded. None once they have changed."""
        self.passes = ForwardOptions()
        self.independent_rows = False
        """True if the model was loaded with `independent_rows` (see `load`)."""
        self._logit_bias: Tensor | None = None
        self._expert_layers: ExpertLayers | None = None
        self._body: Callable[..., Any] = self._whole

    @classmethod
    def load(  # noqa: PLR0913 - the options of a policy
        cls,
        folder: Path | str,
        *,
        dtype: str = "float32",
        device: str | None = None,
        lora: Lora | None = None,
        peers: RankGroup = SINGLE_PROCESS,
        independent_rows: bool = False,
        trained: bool = True,
        chat_template: str = "",
        pictures: PictureStore | None = None,
    ) -> Self:
        """Load a Hugging Face causal-LM folder from the local disk.

        If `device` is None, the model is loaded to the GPU, or to the CPU if there is none. `lora`
        adds adapters. With several `peers`, each rank loads its part to its own device. With
        `independent_rows`, a log-probability of an MoE model does not depend on the other sequences
        of the pass. On a GPU this takes more memory and time, because each token's experts are
        computed separately. A policy with `trained` False only scores, and has no float32 weights
        for an optimizer. `chat_template` is that of `load_tokenizer`. `pictures` stores the pixels
        of a vision-language model's pictures. If it is None, a new store is created.
        """
        folder = Path(folder)
        require_model(folder)
        with reading(folder, "model") if peers.count == 1 else nullcontext():
            tokenizer = load_tokenizer(folder, chat_template)
            inputs = load_pictures(folder, tokenizer, pictures)
            if inputs and peers.count > 1:
                raise ConfigError(
                    "policy: a model that reads pictures cannot be divided among trainer ranks"
                )
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            options = _expert_options(folder, device, independent_rows=independent_rows)
            if peers.count > 1:
                is_wide = trained and lora is None
                model = sharding.load_shard(
                    folder, peers, passes=DTYPES[dtype], wide=is_wide, **options
                )
            else:
                model = load_model(folder, DTYPES[dtype], **options)
            rows = vocab_size(model.get_input_embeddings())
            if len(tokenizer) > rows:
                raise ConfigError(
                    f"policy: the tokenizer in {folder} has {len(tokenizer)} tokens, "
                    f"but the model's embedding has {rows} rows"
                )
            if peers.count == 1:
                nn.Module.to(model, device)
            if not trained:
                model.requires_grad_(False)
            base = adapters.base_checksum(folder) if lora else 0
            policy = cls(model, tokenizer, lora=lora, base=base, peers=peers, pictures=inputs)
            policy._dtype = DTYPES[dtype]
            policy._folder = folder
            policy.independent_rows = independent_rows
            return policy

    def open_pictures(self, run: Path) -> None:
        """Store the pixels of pictures in the folder `run`.

        Do nothing if the model reads only text.
        """
        if self.pictures:
            self.pictures.store.open(run / PICTURES)

    def _compute_apart(self, refusal: ConfigError) -> Packability:
        """Make all later passes compute each sequence in a forward pass of its own.

        `refusal` says why sequences cannot be packed. Raises ConfigError if the model's
        log-probabilities are wrong in this way, too, or if ranks divide the tokens of a pass.
        """
        name = type(self.model).__name__
        if self.peers.context:
            raise ConfigError(
                f"{refusal}. The tokens of a sequence of such a model cannot be divided: "
                f"cluster.context must be 1, got {self.peers.context.size}"
            ) from refusal
        checked = self._short_copy or self.model
        try:
            attention = apart.use(checked, self.tokenizer)
            found = apart.check_apart(checked, self.tokenizer)
            if self.pictures:
                apart.check_pictures(checked, self.pictures, found)
        except ConfigError as error:
            raise ConfigError(f"{error}. It cannot be packed either: {refusal}") from error
        warnings.warn(
            f"the trainer computes each sequence of {name} in a forward pass of its own, and "
            f"prompts once for each sibling: {refusal}",
            RuntimeWarning,
            stacklevel=2,
        )
        self._run_model = partial(apart.run_apart, pictures=self.pictures)
        self.computes_apart = True
        apart.set_attention(self.model, attention)
        return found

    def _prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        """Prepare another model of this architecture for the same kind of forward passes."""
        _use_packing(model)
        if self.computes_apart:
            apart.set_attention(model, self.model.config._attn_implementation)
        return model

    @property
    def _is_sharded(self) -> bool:
        return self.peers.count > 1

    @property
    def _whole(self) -> Any:
        """The model without its output head. The whole model if the head is not a single linear
        map.
        """
        return self.model.base_model if self._plain_head else self.model

    def set_forward_options(self, passes: ForwardOptions) -> None:
        """Set the options of forward passes, also for copies that `twin` makes later.

        Raises ConfigError if the model does not support an option. Raises ValueError if a number
        format was set before and would change.
        """
        if passes == self.passes:
            return
        if passes.compile and self._is_sharded:
            raise ConfigError(
                f"trainer.compile must be false with several trainer ranks, got {self.peers.count}"
            )
        if passes.compile and self.pictures:
            raise ConfigError("trainer.compile must be false with a policy that reads pictures")
        if passes.gradient_checkpointing and not self.passes.gradient_checkpointing:
            checkpoint_layers(self.model)
        before = (self.passes.quantise, self.passes.published_dtype)
        if self.passes.quantise == "none":
            quantise_passes(self.model, passes.quantise, DTYPES[passes.published_dtype])
        elif before != (passes.quantise, passes.published_dtype):
            raise ValueError("the number format of passes cannot be changed once it is set")
        if passes.bitwise and not self.passes.bitwise:
            bitwise.use(self.model)
            check_bitwise(self.model, self.tokenizer)
        self.passes = passes
        self._compile()

    @property
    def num_experts(self) -> int:
        """The number of experts in a layer. 0 for a dense model."""
        return num_experts(self.model.config.to_dict())

    @property
    def has_experts(self) -> bool:
        """True for an MoE model.

        Such a model may round differently if its sequences are packed, even on a CPU.
        """
        return self.num_experts > 0

    @property
    def replays_experts(self) -> bool:
        """True if forward passes use the experts recorded in a batch."""
        return self._expert_layers is not None

    def replay_experts(self) -> None:
        """Use recorded experts in forward passes, also in copies that `twin` makes later.

        All ranks must call this. Raises ConfigError if the model does not support it.
        """
        if self._expert_layers is None:
            self._expert_layers = replay_experts(self.model)

    def check_length(self, max_context: int) -> None:
        """Check that sequences of up to `max_context` tokens can be packed.

        If not, each sequence gets a forward pass of its own from then on. Beyond some length,
        packing may be wrong for models with unusual attention masks or position embeddings. Raises
        ConfigError if log-probabilities would be wrong in passes of one sequence, too.
        """
        if max_context <= self.checked_length:
            return
        if self._is_sharded and self._short_copy is None:
            self._short_copy = self._prepared(sharding.shorter_copy(self.model))
        checked = self._short_copy or self.model
        try:
            if not self.computes_apart:
                check_length(checked, max_context, self.tokenizer)
        except ConfigError as refusal:
            self._plain_head = self._compute_apart(refusal).plain_head
            self._compile()
        if self.computes_apart:
            apart.check_length_apart(checked, max_context, self.tokenizer)
        self.checked_length, self._short_copy = max_context, None

    def check_context(self, ranks: int) -> None:
        """Raise ConfigError if `ranks` ranks cannot divide the tokens of a forward pass."""
        if ranks == 1:
            return
        if ROUND % ranks:
            raise ConfigError(
                f"cluster.context must divide {ROUND}, because a pass is padded to a multiple of "
                f"{ROUND} tokens; got {ranks}"
            )
        config: Any = self.model.config.get_text_config()
        heads = config.num_attention_heads
        check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, ranks)

    def _compile(self) -> None:
        compiled = self.passes.compile
        self._body = torch.compile(self._whole, dynamic=True) if compiled else self._whole

    @property
    def merging(self) -> Merging | None:
        """The data with which an engine adds the LoRA adapters to its base weights.

        None without adapters.
        """
        if self.lora is None:
            return None
        return Merging(
            self.base,
            str(self.dtype).removeprefix("torch."),
            self.lora.alpha / self.lora.rank,
            self.lora.rank,
        )

    def require_base(self, base: int) -> None:
        """Raise ConfigError if the checksum `base` is not that of this policy's base weights.

        It belongs to LoRA adapters, which fit only the base weights on which they were trained.
        """
        if base != self.base:
            raise ConfigError(
                f"policy: the adapters were trained on other weights than those in "
                f"{self.model.name_or_path}: checksum {base:08x}, not {self.base:08x}"
            )

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Set the version number of the current weights. `weights_match_version` becomes True."""
        self._version = version
        self.weights_match_version = True

    def assign_new_version(self, version: int) -> None:
        """Give the current weights a new, higher version number, after a resume.

        The numbers between the old and the new one were published before a crash and must not be
        used again. Raises ValueError if `version` is not higher than all earlier numbers.
        """
        highest = max([self._version, *(first for first, _ in self.version_gaps)])
        if version <= highest:
            raise ValueError(
                f"version {version} is not higher than {highest}: numbers never repeat"
            )
        batches = int(num_batches(torch.tensor(self._version), self.version_gaps))
        self.version_gaps = (*self.version_gaps, (version, version - batches))
        self._version = version

    def follow_version(self, version: int, version_gaps: VersionGaps) -> None:
        """Set the version number and `version_gaps` (skipped version numbers) to those of the
        policy in the run's main process.

        Trainer ranks call this, because only the main process counts versions.
        """
        if version_gaps != self.version_gaps:  # a resume gave the same weights a new number
            self.version_gaps = version_gaps
            self._version = version
        elif version != self._version:
            self.version = version

    def lag(self, version: Tensor | int) -> Tensor:
        """Return the number of batches that the policy was trained on since each `version`."""
        return lag_of(torch.as_tensor(version), at=self._version, version_gaps=self.version_gaps)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of forward passes and of published weights."""
        return self._dtype or next(self.model.parameters()).dtype

    def travel_dtype(self, engine: torch.dtype) -> torch.dtype:
        """Return the dtype in which weights are sent to an engine with the dtype `engine`.

        This is `engine`. LoRA adapters are sent in the precision of forward passes instead.
        """
        return self.dtype if self.lora else engine

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids of the tokens that end a reply, from the model's generation config.

        May be empty.
        """
        named = getattr(self.model.generation_config, "eos_token_id", None)
        return tuple(named) if isinstance(named, list) else () if named is None else (int(named),)

    def twin(self, placement: Placement = "twin") -> "Policy":
        """Return a frozen copy with its own weights, into which other versions can be loaded.

        With `placement` "own", the copy shares this policy's model and takes no memory on the
        device. Its weights are in main memory. During `score` they temporarily replace the model's
        weights.
        """
        twin = copy.copy(self)
        twin._readers = []
        if self._held is not None or placement == "own" or (self.lora and self._is_sharded):
            return self.with_weights(
                {
                    name: sharding.host_copy(tensor, pinned=True)
                    for name, tensor in self.weights().items()
                }
            )
        if self._is_sharded:
            folder = Path(str(self.model.name_or_path))
            options = _expert_options(
                folder, self.device.type, independent_rows=self.independent_rows
            )
            model = sharding.load_shard(
                folder, self.peers, passes=self.dtype, wide=False, **options
            )
            twin.model = self._prepared(model).requires_grad_(False)
            sharding.prepare_passes(twin.model, plain_head=self._plain_head)
            if self._expert_layers:
                replay_experts(twin.model)
            quantise_passes(twin.model, self.passes.quantise, DTYPES[self.passes.published_dtype])
            twin._write(self.weights())
            return twin
        copied = adapters.twin(self.model) if self.lora else copy.deepcopy(self.model)
        twin.model = cast(PreTrainedModel, copied.requires_grad_(False))
        twin._compile()
        return twin

    def with_weights(self, weights: dict[str, Tensor]) -> "Policy":
        """Return a policy with this policy's model but its own `weights`, in main memory.

        During `score` these weights temporarily replace the model's.
        """
        other = copy.copy(self)
        other._held = weights
        other._readers = []
        return other

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that forward passes use, by name, without a copy.

        Tied weights appear once. For a sharded model, return this rank's parts. These are copies if
        the optimizer's weights have another precision than forward passes.
        """
        if self._held is not None:
            return self._held
        if not self._is_sharded:
            return self._live()
        return {name: tensor.to(self.dtype) for name, tensor in self._live().items()}

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Return the weights of the model's folder as float32, by name, on the CPU.

        An optimizer with float32 weights starts from them, because a model in bfloat16 or float16
        has lost digits. Return {} if the model has lost none, or if its weights have changed since
        loading. Also return {} for LoRA adapters, and for a sharded model, whose parts are float32
        already.
        """
        if self._folder is None or self._is_sharded or self.lora:
            return {}
        narrow = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(self.dtype)
        wider = {"F64", "F32", "F16", "BF16"} - {narrow}
        if narrow is None or not wider & {*count_weights(self._folder)}:
            return {}
        options = _expert_options(
            self._folder, self.device.type, independent_rows=self.independent_rows
        )
        wide = load_model(self._folder, torch.float32, **options)
        return {name: parameter.detach() for name, parameter in wide.named_parameters()}

    def part_starts(self) -> dict[str, int] | None:
        """Return where this rank's part of each weight starts, as an index in the flattened weight.

        Return None if this process has whole weights. LoRA adapters are always whole.
        """
        tensors = self._tensors()
        if not any(map(sharding.is_sharded, tensors.values())):
            return None
        return {name: sharding.first_number(tensor) for name, tensor in tensors.items()}

    def whole_weights(self) -> WholeWeights:
        """Return the whole weights of forward passes, gathered from all ranks one at a time."""
        tensors = self._tensors()
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if self._is_sharded:  # the optimizer's weights may be wider
            dtypes = dict.fromkeys(tensors, self.dtype)

        def read(name: str) -> Tensor:
            return sharding.gather_whole(tensors[name].to(dtypes[name])).cpu()

        layout = {
            name: torch.empty(tensor.shape, dtype=dtypes[name], device="meta")
            for name, tensor in tensors.items()
        }
        return WholeWeights(layout, read)

    @property
    def num_bytes(self) -> int:
        """The size in bytes of this process's part of the model, in the dtype of passes."""
        parts = [sharding.local(parameter.detach()) for parameter in self.model.parameters()]
        if self._is_sharded:  # the optimizer's weights may be wider
            return sum(part.numel() for part in parts) * self.dtype.itemsize
        return sum(part.nbytes for part in parts)

    def parts_of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of whole `weights`, by name."""
        return sharding.parts_of(weights, self._tensors()) if self._is_sharded else dict(weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the model, and set `weights_match_version` to False.

        For a sharded model, `weights` are this rank's parts. Raises ValueError if names or shapes
        do not match.
        """
        current = self.weights()
        if current.keys() != weights.keys():
            unmatched = sorted(current.keys() ^ weights.keys())
            raise ValueError(f"weights do not match the model: {unmatched[:4]} on one side only")
        wrong = [
            f"{name} {tuple(weights[name].shape)}"
            for name in current
            if current[name].shape != weights[name].shape
        ]
        if wrong:
            raise ValueError(f"weights do not fit the model: {wrong[:4]}")
        self._write(weights)
        self.weights_match_version = False

    def lend_weights(self, wait: Callable[[], None]) -> None:
        """Let another thread read the weights until they change.

        `wait` is called before the next change. It must return when the thread has stopped reading.
        """
        if wait not in self._readers:
            self._readers.append(wait)

    def reclaim_weights(self) -> None:
        """Wait until no other thread reads the weights (`lend_weights`).

        Call this before changing them. Raises the error of a thread that failed while reading.
        """
        while self._readers:
            self._readers.pop()()

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        self.reclaim_weights()
        self._folder = None
        live = self._live() if self._held is None else self._held
        for name, tensor in live.items():
            tensor.copy_(weights[name])

    def _tensors(self) -> dict[str, Tensor]:
        """Return the model's weights by name. Tied weights appear once.

        The tensors of a sharded model are DTensors.
        """
        if self._is_sharded:
            sharding.release(self.model)
        if self.lora:
            return {name: weight.detach() for name, weight in adapters.adapters(self.model).items()}
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        if self._is_sharded:
            return weights
        weights = {name: each for name, each in weights.items() if name not in self._frozen}
        saved = self.model.state_dict()
        buffers = {name: value for name, value in self.model.named_buffers() if name in saved}
        return weights | buffers

    def _live(self) -> dict[str, Tensor]:
        """Return by name the tensors of this process with which the model computes."""
        return {name: sharding.local(tensor) for name, tensor in self._tensors().items()}

    @contextmanager
    def _weights_in_model(self) -> Iterator[None]:
        """Return a context in which the model has the weights of this policy.

        Weights in main memory are copied into the model, and the model's own are restored at the
        end.
        """
        if self._held is None:
            yield
            return
        live = self._live()
        aside = {name: sharding.host_copy(tensor, pinned=True) for name, tensor in live.items()}
        try:
            for name, tensor in live.items():
                tensor.copy_(self._held[name])
            yield
        finally:
            for name, tensor in live.items():
                tensor.copy_(aside[name])

    def save(self, folder: Path | str, *, base: bool = False) -> None:
        """Save a Hugging Face model folder with tokenizer and chat template.

        With LoRA, the adapters are added to the saved weights, and also saved in PEFT's format in
        the subfolder `adapter`. With `base`, the base weights are saved instead, without adapters.
        Raises OSError if a file cannot be written.
        """
        whole = self.model
        if self.merging:
            whole = adapters.plain(self.model, scale=0.0 if base else self.merging.scale)
        try:
            if self.merging and not base:
                adapters.save_adapter(self.model, Path(folder) / "adapter")
            with no_progress_bars():
                whole.save_pretrained(folder)
                self.tokenizer.save_pretrained(folder)
            for name in PROCESSOR_FILES if self.pictures else ():
                if (source := Path(str(self.model.name_or_path)) / name).is_file():
                    shutil.copyfile(source, Path(folder) / name)
        except SafetensorError as error:
            raise OSError(f"the model cannot be written to {folder}: {error}") from error

    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        """The biases of `bias_logits`, as pairs (token, number that is added to its logit)."""
        if self._logit_bias is None:
            return ()
        ids = self._logit_bias.nonzero().squeeze(1)
        pairs = zip(ids.tolist(), self._logit_bias[ids].tolist(), strict=True)
        return tuple(pairs)

    def bias_logits(self, bias: Sequence[tuple[int, float]]) -> None:
        """Add a constant to the logits of some tokens in all later log-probabilities.

        `bias` has pairs (token, constant) and replaces any earlier bias. It is not saved with the
        model. Raises ValueError for a token that is not in the vocabulary.
        """
        head = self.model.config.get_text_config().vocab_size
        if wrong := [token for token, _ in bias if token >= head]:
            raise ValueError(f"token {wrong[0]} is not one of the model's 0 to {head - 1}")
        self._logit_bias = None
        if bias:
            added = torch.zeros(head, dtype=wide(self.dtype), device=self.device)
            for token, value in bias:
                added[token] = value
            self._logit_bias = added

    def logps(
        self, batch: Batch | Packed | PrefixTree, *, temperature: float, where: Tensor | None = None
    ) -> Tensor:
        """Return the log-probability `[T]` of each token, given the tokens before it.

        The result is on the model's device, in float32 (float64 for a float64 model), with a
        gradient if gradients are enabled. It is 0 for the first token of each sequence, and for
        tokens outside the mask `where` (`[T]` bool). None means all tokens.
        """
        logp, _ = self.logps_and_entropy(
            batch, temperature=temperature, where=where, with_entropy=False
        )
        return logp

    def logps_and_entropy(
        self,
        batch: Batch | Packed | PrefixTree,
        *,
        temperature: float,
        where: Tensor | None = None,
        with_entropy: bool = True,
        entropy_sample: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return each token's log-probability, and the entropy of its distribution, both `[T]`.

        The log-probability is that of `logps`. The entropy is in nats, and 0 where it is not
        computed. With `entropy_sample` (`[T]` bool, within `where`), it is computed only for these
        tokens and without a gradient. This costs little and is enough for a metric.
        """
        logp, entropy, _ = self.compared(
            batch,
            None,
            temperature=temperature,
            where=where,
            with_entropy=with_entropy,
            entropy_sample=entropy_sample,
        )
        return logp, entropy

    def compared(  # noqa: PLR0913 - the options of a query
        self,
        batch: Batch | Packed | PrefixTree,
        compare: Comparison | None,
        *,
        temperature: float,
        where: Tensor | None = None,
        with_entropy: bool = True,
        entropy_sample: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probability, entropy and divergence from a teacher of each token, `[T]` each.

        The first two are those of `logps_and_entropy`. The divergence is 0 if `compare` is None.
        The target tokens of `compare` are those in `where` that are not the first of a sequence.
        """
        run = self.prefix_tree(batch, where)
        wanted = run.follows if where is None else run.follows & where.cpu()
        index = wanted.nonzero().squeeze(1)
        logp = torch.zeros(len(run.place), dtype=wide(self.dtype), device=self.device)
        entropy, divergence = torch.zeros_like(logp), torch.zeros_like(logp)
        if not len(index):
            if self._is_sharded:  # other ranks wait for this rank's pass, forward and backward
                query = LogpQuery(run.tokens[:1].to(self.device), temperature)
                logp = logp + 0 * self._query(run, run.place[:1], query)[0].sum()
            return logp, entropy, divergence
        targets = self._targets(run, index)
        positions = index.to(self.device)
        sample = None if entropy_sample is None else entropy_sample[index].to(self.device)
        kept_sets = run.kept_sets.at(index) if run.kept_sets else None
        query = LogpQuery(
            targets, temperature, with_entropy and sample is None, sample, kept_sets, compare
        )
        values, entropies, *divergences = self._query(run, run.place[index - 1], query)
        logp = logp.index_put((positions,), values)
        if with_entropy:
            entropy = entropy.index_put((positions,), entropies)
        if divergences:
            divergence = divergence.index_put((positions,), divergences[0])
        return logp, entropy, divergence

    @torch.no_grad()
    def teacher_rows(self, batch: Batch | Packed, where: Tensor) -> tuple[Tensor, nn.Module]:
        """Return the hidden states `[R, H]` that predict some tokens, and the output head.

        The tokens are those in the mask `where` (`[T]` bool) that do not begin a sequence. If the
        output head is not a single linear map, return logits and the identity instead. Raises
        ValueError for a sharded model.
        """
        if self._is_sharded:
            raise ValueError("teacher_rows needs a whole model")
        run = self.prefix_tree(batch, where)
        index = (run.follows & where.cpu()).nonzero().squeeze(1)
        rows = run.place[index - 1].to(self.device)
        head = self.model.get_output_embeddings() if self._plain_head else nn.Identity()
        return self._run_model(self._body, run, rows, self._plain_head), head

    @torch.no_grad()
    def logps_after(
        self, tokens: Sequence[int], lengths: Sequence[int], *, temperature: float
    ) -> Tensor:
        """Return the log-probability `[N, V]` of every token of the vocabulary after each of N
        beginnings of `tokens`, which have these lengths. They are computed in one forward pass.

        Raises ValueError for a sharded model, and for lengths below 1 or above that of `tokens`.
        """
        if self._is_sharded or not all(0 < each <= len(tokens) for each in lengths):
            raise ValueError("logps_after needs a whole model and at least one token")
        run = self.prefix_tree(Packed(torch.tensor(tokens), (0, len(tokens))))
        last = run.place[torch.tensor(lengths) - 1].to(self.device)
        with self._weights_in_model():
            rows = self._run_model(self._body, run, last, self._plain_head)
            logits = self.model.get_output_embeddings()(rows) if self._plain_head else rows
        whole = logits.to(wide(self.dtype))
        scaled = (whole if self._logit_bias is None else whole + self._logit_bias) / temperature
        return scaled.log_softmax(-1).cpu()

    def _targets(self, run: PrefixTree, index: Tensor) -> Tensor:
        """Return the tokens at `index` `[R]`, whose log-probabilities are computed.

        For a token of a picture, return the token that the chat template writes for a picture.
        """
        targets = run.tokens[run.place[index]]
        if self.pictures:
            targets = targets.masked_fill(targets >= FIRST, self.pictures.reader.token)
        return targets.to(self.device)

    def _query(self, run: PrefixTree, rows: Tensor, query: LogpQuery) -> tuple[Tensor, ...]:
        """Run a forward pass and answer `query`.

        Return its log-probabilities and entropies, `[R]` each. `rows` `[R]` are the indices in the
        prefix tree of the tokens before the query's targets.
        """
        rows = rows.to(self.device)
        query = replace(query, logit_bias=self._logit_bias)
        if self._is_sharded:
            run = replace(run, context=self.peers.context)
            answer = sharding.run_pass(self.model, run, rows, query, self._run_model)
            if not torch.is_grad_enabled():
                sharding.release(self.model)
            return answer
        hidden = self._run_model(self._body, run, rows, self._plain_head)
        head = self.model.get_output_embeddings() if self._plain_head else nn.Identity()
        return query_head(head, hidden, query)

    def gradient_norm(
        self, batch: Batch | Packed, where: Tensor, *, temperature: float, head_only: bool
    ) -> float:
        """Return the norm of the gradient of the summed log-probability of the tokens in `where`.

        `where` is a `[T]` bool mask. The gradient is with respect to all trained parameters, or
        with `head_only` to the output head's. The parameters' `grad` does not change. Raises
        ValueError for a sharded model, and with `head_only` for a head that is not one trained
        linear map.
        """
        if self._is_sharded:
            raise ValueError("a sharded model has no gradient of one sequence")
        run = self.prefix_tree(batch, where)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        if not head_only:
            total = self.logps(run, temperature=temperature, where=where).sum()
        else:
            head = self.model.get_output_embeddings()
            trained = [each for each in head.parameters() if each.requires_grad]
            if not self._plain_head or not trained:
                raise ValueError(
                    f"the output head of {type(self.model).__name__} is not one trained linear "
                    "map, so it has no gradient of its own"
                )
            index = (run.follows & where.cpu()).nonzero().squeeze(1)
            with torch.no_grad():
                rows = run.place[index - 1].to(self.device)
                hidden = self._run_model(self._body, run, rows, self._plain_head)
            kept_sets = run.kept_sets.at(index) if run.kept_sets else None
            targets = self._targets(run, index)
            bias = self._logit_bias
            query = LogpQuery(targets, temperature, kept_sets=kept_sets, logit_bias=bias)
            total = query_head(head, hidden, query)[0].sum()
        found = torch.autograd.grad(total, trained, allow_unused=True)
        norms = [each.norm(dtype=wide(each.dtype)) for each in found if each is not None]
        return float(torch.stack(norms).norm())

    @torch.no_grad()
    def score(
        self,
        batch: Batch | Packed,
        where: Tensor,
        *,
        temperature: float,
        max_tokens_per_microbatch: int,
        with_entropy: bool = False,
    ) -> Scored:
        """Return log-probabilities of the tokens in the mask `where` (`[T]` bool).

        They have no gradient. A forward pass has at most `max_tokens_per_microbatch` tokens, unless
        one sequence is longer. Each sequence is run only up to its last token in `where`. With
        `with_entropy`, the result also has the entropies of the distributions from which these
        tokens were drawn, in nats.
        """
        logp = torch.zeros(len(batch.tokens), dtype=wide(self.dtype))
        entropy = torch.zeros_like(logp) if with_entropy else logp.new_empty(0)
        packed = self._packed(batch, where)
        spans = wanted_spans(packed.spans(), where)
        forwarded = 0
        passes = self.pack(packed, spans, max_tokens_per_microbatch, where=where)
        costs = [sum(spans[i][1] - spans[i][0] for i in members) for members in passes]
        with self._weights_in_model():
            for number, counts in self.peers.deal(costs):
                part, index = cut(packed, [spans[i] for i in passes[number]])
                run = self.prefix_tree(part)
                values, entropies = self.logps_and_entropy(
                    run, temperature=temperature, where=where[index], with_entropy=with_entropy
                )
                if counts and self.peers.reports:
                    logp[index] = values.cpu()
                    forwarded += run.num_tokens
                    if with_entropy:
                        entropy[index] = entropies.cpu()
        total = int(self.peers.sum(torch.tensor(forwarded)))
        if with_entropy:
            self.peers.sum(entropy)
        return Scored(self.peers.sum(logp), total, entropy)

    @property
    def has_plain_head(self) -> bool:
        """True if the output head is one linear map of the last hidden states."""
        return self._plain_head

    def states_before(self, run: PrefixTree, where: Tensor) -> Tensor:
        """Return the last hidden state `[R, H]` before each token in `where` (`[T]` bool).

        Tokens that begin a sequence are left out. The output head must be one linear map
        (`has_plain_head`). The states have a gradient if gradients are enabled.
        """
        index = (run.follows & where).nonzero().squeeze(1)
        if self._is_sharded:  # only a pass of the whole model gathers its parameters
            with last_states() as found:
                self.logps(run, temperature=1.0, where=where)
            return found[0][: len(index)]
        rows = run.place[index - 1].to(self.device)
        return self._run_model(self._body, run, rows, self._plain_head)

    @torch.no_grad()
    def read_states(
        self,
        batch: Batch,
        where: Tensor,
        read: Callable[[Tensor], Tensor],
        *,
        max_tokens_per_microbatch: int,
    ) -> Scored:
        """Return one number for each token in the mask `where` (`[T]` bool), computed by `read`.

        `read` maps the hidden states before these tokens (`states_before`), `[R, H]`, to numbers
        `[R]`. The result is a `Scored` whose `logp` has these numbers. Forward passes have at most
        `max_tokens_per_microbatch` tokens, as in `score`.
        """
        values = torch.zeros(len(batch.tokens), dtype=wide(self.dtype))
        packed = self._packed(batch, where)
        spans = wanted_spans(packed.spans(), where)
        forwarded = 0
        passes = self.pack(packed, spans, max_tokens_per_microbatch, where=where)
        costs = [sum(spans[i][1] - spans[i][0] for i in members) for members in passes]
        for number, counts in self.peers.deal(costs):
            part, index = cut(packed, [spans[i] for i in passes[number]])
            run = self.prefix_tree(part)
            found = read(self.states_before(run, where[index])).cpu()
            if counts and self.peers.reports:
                values[index[run.follows & where[index]]] = found.to(values.dtype)
                forwarded += run.num_tokens
        if self._is_sharded:
            sharding.release(self.model)
        total = int(self.peers.sum(torch.tensor(forwarded)))
        return Scored(self.peers.sum(values), total)

    def require_layer(self, depth: float) -> None:
        """Raise ConfigError if `hidden_means` does not support this model.

        `depth` chooses the layer, as a share of the number of layers.
        """
        find_layer(self.model, depth)

    @torch.no_grad()
    def hidden_means(
        self,
        batch: Batch,
        marks: Tensor,
        *,
        depth: float,
        temperature: float,
        max_tokens_per_microbatch: int,
    ) -> HiddenMeans:
        """Return means of the hidden states of one layer, and the entropies of sampled tokens.

        `depth` chooses the layer, as a share of the number of layers: 0.5 is the middle layer, and
        1 the last one. `marks` `[T, m]` bool has m sets of tokens. Each mean is over the tokens of
        one set in one sequence. Passes have at most `max_tokens_per_microbatch` tokens, as in
        `score`. Raises ValueError for a sharded model.
        """
        if self._is_sharded:
            raise ValueError("the hidden states of a sharded model cannot be read")
        layer = find_layer(self.model, depth)
        where = batch.sampled
        packed = self._packed(batch, where)
        width = self.model.config.get_text_config().hidden_size
        sums = torch.zeros(batch.num_sequences, marks.shape[1], width, dtype=wide(self.dtype))
        entropy = torch.zeros(len(batch.tokens), dtype=wide(self.dtype))
        sequence = batch.sequence
        forwarded = 0
        spans = wanted_spans(packed.spans(), where | marks.any(1))
        for members in self.pack(packed, spans, max_tokens_per_microbatch, where=where):
            part, index = cut(packed, [spans[i] for i in members])
            run = self.prefix_tree(part)
            forwarded += run.num_tokens
            chosen = (run.follows & where[index]).nonzero().squeeze(1)
            rows = run.place[chosen - 1].to(self.device)
            with outputs_of(layer) as states:  # a compiled model would not call the hook
                final = self._run_model(self._whole, run, rows, self._plain_head)
            for mark, marked in enumerate(marks[index].T):
                tokens = marked.nonzero().squeeze(1)
                values = torch.cat(states)[run.place[tokens].to(self.device)].to(sums)
                sums[:, mark].index_add_(0, sequence[index[tokens]], values)
            if len(chosen):
                head = self.model.get_output_embeddings() if self._plain_head else nn.Identity()
                targets = self._targets(run, chosen)
                kept_sets = run.kept_sets.at(chosen) if run.kept_sets else None
                query = LogpQuery(
                    targets,
                    temperature,
                    with_entropy=True,
                    kept_sets=kept_sets,
                    logit_bias=self._logit_bias,
                )
                entropy[index[chosen]] = query_head(head, final, query)[1].cpu()
        counts = torch.zeros(sums.shape[:2], dtype=sums.dtype)
        counts.index_add_(0, sequence, marks.to(sums.dtype))
        return HiddenMeans(sums / counts[..., None], entropy, forwarded)

    def pack(
        self,
        batch: Batch | Packed,
        spans: Sequence[tuple[int, int]],
        max_tokens_per_microbatch: int,
        *,
        where: Tensor,
    ) -> list[list[int]]:
        """Distribute spans `(start, end)` of a batch's tokens over forward passes.

        Return the indices of the spans in each pass. A pass has at most `max_tokens_per_microbatch`
        tokens, unless one span is longer. The mask `where` (`[T]` bool) has the tokens whose
        log-probabilities are needed.
        """
        if self.computes_apart and self._is_sharded:
            # Ranks gather weights together, so all run the model equally often in a pass: once.
            return [[i] for i in range(len(spans))]
        if self._shares_prefixes:
            packed, index = cut(self._packed(batch, where), spans)
            wanted = count_tokens(packed.offsets, where[index])
            return pack_shared(packed, max_tokens_per_microbatch, wanted)
        return pack([end - start for start, end in spans], max_tokens_per_microbatch)

    @property
    def _shares_prefixes(self) -> bool:
        return self.passes.share_prompts and not self.computes_apart

    def prefix_tree(
        self, batch: Batch | Packed | PrefixTree, where: Tensor | None = None
    ) -> PrefixTree:
        """Return packed sequences as a prefix tree, in which shared prefixes appear once.

        A prefix tree is returned unchanged. The mask `where` (`[T]` bool) has the tokens whose
        log-probabilities are needed, by default the sampled tokens. Which recorded experts the pass
        uses depends on it (`ExpertTable.rows`).
        """
        if isinstance(batch, PrefixTree):
            return batch
        return build_prefix_tree(self._packed(batch, where), share=self._shares_prefixes)

    def _packed(self, batch: Batch | Packed, where: Tensor | None) -> Packed:
        """Return the sequences of a batch, with recorded experts and sampling sets of their
        tokens.
        """
        if isinstance(batch, Packed):
            return batch
        routed_experts = None
        if self._expert_layers and batch.routed_experts:
            rows = batch.routed_experts.rows(batch, batch.sampled if where is None else where)
            routed_experts = self._expert_layers.select(rows)
        return Packed(batch.tokens, batch.offsets, routed_experts, batch.kept_sets)


def _expert_options(folder: Path, device: str, *, independent_rows: bool) -> dict[str, str]:
    """Return the options of `load_model` for an MoE model, or {} for other models."""
    if not num_experts(read_mapping(folder / "config.json")):
        return {}
    if device == "cpu":
        return {"experts_implementation": expert_products.EXPERTS}
    return {"experts_implementation": expert_products.ON_GPU} if independent_rows else {}


def _use_packing(model: PreTrainedModel) -> PreTrainedModel:
    """Prepare a model for packed forward passes, in place, and return it in eval mode."""
    linear.use(model)
    expert_products.use(model)
    fused.use(model)
    announce_layers(model)
    model.set_attn_implementation(ATTENTION)
    return model.eval()
