"""The policy: model, tokenizer and version. Tokens go in, log-probabilities come out.

Sequences are packed end to end without padding: the attention function registered here runs every sequence by itself.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from afterimage import adapters
from afterimage.adapters import Lora, Merging
from afterimage.config import ConfigError
from afterimage.trajectory import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Precisions of a forward pass; float64 is for tests."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""One of these must be there: without any, transformers makes an empty tokenizer and says nothing."""

MAX_LOGITS = 2**24
"""Float32 logits that exist at once (64 MiB). Above it the gradient recomputes them chunk by chunk."""

ATTENTION = "afterimage_packed"
_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("packed sequence lengths", default=None)

Jumps = tuple[tuple[int, int], ...]
"""Where the numbers of versions jumped: the first number after it, and all that were skipped up to there."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences end to end: sequence `i` is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: Tensor
    offsets: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))


@dataclass(frozen=True, slots=True)
class Scored:
    """`logp` is `[T]` on the CPU, 0 where nobody asked; `forward_tokens` were computed for it."""

    logp: Tensor
    forward_tokens: int


class Policy:
    """A causal language model, its tokenizer, and the version that counts its published weights.

    `version` counts published weights. `at_version` holds from the publication of `version` to the first optimizer step
    after it: only then is this model's own forward pass a log-probability of `version`.
    Always in eval mode: a log-probability is a function of weights and tokens alone.
    With `lora` its weights are the adapters alone, over a base that is frozen. `base` is the checksum of that.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, lora: Lora | None = None, base: int = 0
    ) -> None:
        if lora:
            adapters.inject(model, lora)
        model.set_attn_implementation(ATTENTION)
        self.lora, self.base = lora, base
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._version = 0
        self.at_version = True
        self.jumps: Jumps = ()
        self._plain_head = _check_packing(model)

    @classmethod
    def load(
        cls, folder: Path | str, *, dtype: str = "float32", device: str | None = None, lora: Lora | None = None
    ) -> Self:
        """Any Hugging Face causal-LM folder, from disk only. `device` None takes a GPU if there is one."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"policy: no model folder at {folder}")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"policy: {folder} is not a Hugging Face model folder: it has no config.json")
        tokenizer = load_tokenizer(folder)
        model = _load_model(folder, DTYPES[dtype])
        held = _rows(model.get_input_embeddings())
        if len(tokenizer) > held:
            raise ConfigError(
                f"policy: the tokenizer in {folder} has {len(tokenizer)} tokens, "
                f"but the model's embedding has {held} rows"
            )
        nn.Module.to(model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return cls(model, tokenizer, lora=lora, base=adapters.base_checksum(folder) if lora else 0)

    @property
    def merging(self) -> Merging | None:
        """How an engine makes whole weights of adapters; None if they are whole."""
        if self.lora is None:
            return None
        return Merging(self.base, str(self.dtype).removeprefix("torch."), self.lora.alpha / self.lora.rank)

    def require_base(self, base: int) -> None:
        """ConfigError unless this is the checksum of the weights under the adapters."""
        if base != self.base:
            raise ConfigError(
                f"policy: the adapters were trained on other weights than those in {self.model.name_or_path}: their "
                f"checksum was {base:08x}, and it is {self.base:08x}"
            )

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Publication: the weights of this moment are `version`."""
        self._version, self.at_version = version, True

    def renumber(self, version: int) -> None:
        """The same weights under a higher number: those between belong to versions whose training was lost."""
        highest = max([self._version, *(first for first, _ in self.jumps)])
        if version <= highest:
            raise ValueError(f"version {version} is not higher than {highest}: numbers never repeat")
        place = int(_places(torch.tensor(self._version), self.jumps))
        self.jumps = (*self.jumps, (version, version - place))
        self._version = version

    def lag(self, version: Tensor | int) -> Tensor:
        """Batches between the versions that sampled tokens and the policy's: `lag_of` at its version."""
        return lag_of(torch.as_tensor(version), at=self._version, jumps=self.jumps)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end what it says, as its generation config has them."""
        named = getattr(self.model.generation_config, "eos_token_id", None)
        return tuple(named) if isinstance(named, list) else () if named is None else (int(named),)

    def twin(self) -> "Policy":
        """A frozen copy with weights of its own, to be moved to other versions with `load_weights`."""
        twin, copied = copy.copy(self), adapters.twin if self.lora else copy.deepcopy
        twin.model = cast(PreTrainedModel, copied(self.model).requires_grad_(False))
        return twin

    def weights(self) -> dict[str, Tensor]:
        """The forward weights by name, tied ones once. They are the live tensors: clone what must not change."""
        if self.lora:
            return {name: weight.detach() for name, weight in adapters.adapters(self.model).items()}
        held = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        saved = self.model.state_dict()
        return held | {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these values, all of them and no others. From then on `at_version` is False."""
        own = self.weights()
        if own.keys() != weights.keys():
            raise ValueError(
                f"weights do not match the model: {sorted(own.keys() ^ weights.keys())[:4]} on one side only"
            )
        wrong = [f"{name} {tuple(weights[name].shape)}" for name in own if own[name].shape != weights[name].shape]
        if wrong:
            raise ValueError(f"weights do not fit the model: {wrong[:4]}")
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        self.at_version = False

    def save(self, folder: Path | str, *, base: bool = False) -> None:
        """An ordinary Hugging Face model folder, tokenizer and chat template included.

        Adapters are merged into it, and lie beside in `adapter` as PEFT has them; the `base` is without them.
        """
        whole = self.model
        if self.merging:
            whole = adapters.plain(self.model, scale=0.0 if base else self.merging.scale)
            if not base:
                adapters.save_adapter(self.model, Path(folder) / "adapter")
        with no_progress_bars():
            whole.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def logps(self, batch: Batch | Packed, *, temperature: float, where: Tensor | None = None) -> Tensor:
        """Log-probability `[T]` of every token given what precedes it in its own sequence, on the model's device.

        0 at each sequence's first token, and off `where` (`[T]` bool), whose logits are never computed. Float32, or
        float64 for a float64 model. Carries a gradient when gradients are enabled.
        """
        return self._forward(batch, where, temperature, with_entropy=False)[0]

    def logps_and_entropy(
        self, batch: Batch | Packed, *, temperature: float, where: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`logps`, and the entropy `[T]` of the distribution that each token was drawn from."""
        return self._forward(batch, where, temperature, with_entropy=True)

    @torch.no_grad()
    def score(self, batch: Batch | Packed, where: Tensor, *, temperature: float, micro_tokens: int) -> Scored:
        """`logps` on `where` without gradient, in passes of at most `micro_tokens` (one sequence may be longer).

        Runs only the sequences that hold a wanted token, each cut after its last wanted one.
        """
        logp = torch.zeros(len(batch.tokens), dtype=_wide(self.dtype))
        spans = []
        for start, end in batch.spans():
            wanted = where[start:end].nonzero()
            if len(wanted):
                spans.append((start, start + int(wanted[-1]) + 1))
        for members in pack([end - start for start, end in spans], micro_tokens):
            index = torch.cat([torch.arange(*spans[i]) for i in members])
            offsets = [0]
            for i in members:
                offsets.append(offsets[-1] + spans[i][1] - spans[i][0])
            packed = Packed(batch.tokens[index], tuple(offsets))
            logp[index] = self.logps(packed, temperature=temperature, where=where[index]).cpu()
        return Scored(logp, sum(end - start for start, end in spans))

    def _forward(
        self, batch: Batch | Packed, where: Tensor | None, temperature: float, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        packed = Packed(batch.tokens, batch.offsets)
        starts = {start for start, end in zip(packed.offsets[:-1], packed.offsets[1:], strict=True) if end > start}
        asked = torch.ones(len(packed.tokens), dtype=torch.bool) if where is None else where.cpu().clone()
        asked[sorted(starts)] = False
        index = asked.nonzero().squeeze(1)
        tokens = packed.tokens.to(self.device)
        wide = _wide(self.dtype)
        logp = torch.zeros(len(tokens), dtype=wide, device=self.device)
        entropy = torch.zeros_like(logp)
        if not len(index):
            return logp, entropy
        index = index.to(self.device)
        rows = _run(self.model, packed, index - 1, self._plain_head)
        head = self.model.get_output_embeddings() if self._plain_head else nn.Identity()
        size = max(1, MAX_LOGITS // _rows(self.model.get_output_embeddings()))
        values = []
        for some, targets in zip(rows.split(size), tokens[index].split(size), strict=True):
            if len(rows) > size and torch.is_grad_enabled():
                given = (head, some, targets, temperature, with_entropy)
                values.append(checkpoint(_token_logps, *given, use_reentrant=False, preserve_rng_state=False))
            else:
                values.append(_token_logps(head, some, targets, temperature, with_entropy))
        logp = logp.index_put((index,), torch.cat([value[0] for value in values]))
        if with_entropy:
            entropy = entropy.index_put((index,), torch.cat([value[1] for value in values]))
        return logp, entropy


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions grouped so that each group's lengths sum to at most `budget`: first fit, longest first.

    A single item longer than the budget gets a group of its own.

    >>> pack([3, 8, 5, 2], budget=8)
    [[1], [2, 0], [3]]
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for g, free in enumerate(room):
            if lengths[i] <= free:
                groups[g].append(i)
                room[g] -= lengths[i]
                break
        else:
            groups.append([i])
            room.append(budget - lengths[i])
    return groups


def lag_of(version: Tensor, *, at: int, jumps: Jumps) -> Tensor:
    """How stale, counted in batches, what `version` sampled is for the policy `at` a version. Below 0 if newer.

    Every batch leads to one version, so without jumps it is `at - version`. After a resume the weights of version 4 may
    be called 7, because 5 and 6 were published before their training was lost: 7 then has the place of 4 in the
    schedule. A lost version keeps its own place, and is of lag 0 until the policy gets there; what its tokens were
    sampled from, the exact routes know all the same.

    >>> lag_of(torch.tensor([3, 4, 5, 6, 7, 8]), at=9, jumps=((7, 3),)).tolist()
    [3, 2, 1, 0, 2, 1]
    >>> lag_of(torch.tensor([4, 6, 8, 11, 12]), at=12, jumps=((7, 3), (11, 5))).tolist()
    [3, 1, 2, 1, 0]
    """
    behind = _places(torch.tensor(at), jumps) - _places(version, jumps)
    return torch.where(version <= at, behind.clamp(min=0), behind)


def _places(version: Tensor, jumps: Jumps) -> Tensor:
    """Batches that led to each version: its number, less all that was skipped before it."""
    firsts = torch.tensor([first for first, _ in jumps], dtype=torch.long)
    skipped = torch.tensor([0, *(skipped for _, skipped in jumps)])
    return version - skipped[torch.bucketize(version, firsts, right=True)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that log-probabilities are formed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _run(model: PreTrainedModel, packed: Packed, rows: Tensor, plain_head: bool) -> Tensor:
    """Final hidden states `[rows, H]`, or logits `[rows, V]` of a model whose head is more than one linear map."""
    lengths = tuple(length for length in packed.lengths if length)
    positions = torch.cat([torch.arange(length) for length in lengths])
    token = _lengths.set(lengths)
    try:
        given = {"input_ids": packed.tokens[None].to(rows.device), "position_ids": positions[None].to(rows.device)}
        if plain_head:
            return model.base_model(**given, use_cache=False).last_hidden_state[0, rows]
        return model(**given, use_cache=False).logits[0, rows]
    finally:
        _lengths.reset(token)


def _token_logps(
    head: nn.Module, rows: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = head(rows)
    logits = logits.to(_wide(logits.dtype))
    if temperature != 1.0:
        logits = logits / temperature
    everything = F.log_softmax(logits, dim=-1)
    logp = everything.gather(1, targets[:, None]).squeeze(1)
    entropy = -(everything.exp() * everything).sum(-1) if with_entropy else torch.zeros_like(logp)
    return logp, entropy


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of every packed sequence by itself; outside a packed pass, transformers' own SDPA."""
    lengths = _lengths.get()
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown:
        raise NotImplementedError(
            f"packed attention has no {', '.join(unknown)}, which {type(module).__name__} asks for"
        )
    window = options.get("sliding_window")
    outputs = []
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    for length, (q, k, v) in zip(lengths, parts, strict=True):
        band = None
        if window is not None and length > window:
            band = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=band, is_causal=band is None, scale=options.get("scaling"),
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )  # fmt: skip
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _packed_mask(**options: Any) -> Tensor | None:
    return sdpa_mask(**options) if _lengths.get() is None else None


AttentionInterface.register(ATTENTION, _packed_attention)
AttentionMaskInterface.register(ATTENTION, _packed_mask)


@torch.no_grad()
def _check_packing(model: PreTrainedModel) -> bool:
    """Whether logits are the head applied to the last hidden state. Refuses a model that mixes packed sequences.

    Not every architecture asks the attention function that it was given, or reads `position_ids`; a model that does
    not would see its neighbours, so this is measured, on two short sequences, and never assumed.
    """
    device, size = next(model.parameters()).device, _rows(model.get_input_embeddings())
    one, two = torch.arange(3) % size, torch.arange(5, 0, -1) % size
    rows = torch.arange(8, device=device)
    try:
        first, second = _run(model, Packed(torch.cat([one, two]), (0, 3, 8)), rows, False).split((3, 5))
        other = _run(model, Packed(torch.cat([one * 0 + 7 % size, two]), (0, 3, 8)), rows, False)[3:]
    except NotImplementedError as error:
        raise ConfigError(f"policy: {type(model).__name__} cannot be packed: {error}") from error
    alone = [model(input_ids=sequence[None].to(device), use_cache=False).logits[0] for sequence in (one, two)]
    tolerance = (0.03 if model.dtype == torch.bfloat16 else 1e-4) * float(alone[1].abs().max())
    near = all(
        float((packed - plain).abs().max()) <= tolerance for packed, plain in zip((first, second), alone, strict=True)
    )
    if not near or not torch.equal(second, other):
        raise ConfigError(
            f"policy: {type(model).__name__} does not keep packed sequences apart: it does not use transformers' "
            "attention interface, or ignores position_ids"
        )
    hidden = _run(model, Packed(torch.cat([one, two]), (0, 3, 8)), rows, True)
    head = model.get_output_embeddings()
    return hidden.shape[-1] == head.weight.shape[1] and torch.equal(head(hidden), torch.cat([first, second]))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """From disk only. Raises `ConfigError` for none, and for one without a chat template."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"policy: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"policy: the tokenizer in {folder} cannot be read: {_one_line(error)}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"policy: the tokenizer in {folder} has no chat template (chat_template.jinja)")
    return tokenizer


def _load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with no_progress_bars():
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"policy: the model in {folder} cannot be read: {_one_line(error)}") from error
    model, info = read
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(f"policy: {folder} lacks {len(missing)} weights of its architecture, {missing[0]} among them")
    return cast(PreTrainedModel, model)


def _rows(embedding: nn.Module) -> int:
    """Size of the vocabulary that a table or a head holds."""
    return int(cast(Tensor, embedding.weight).shape[0])


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
