"""The policy: model, tokenizer and version. Tokens go in, log-probabilities come out.

Sequences are packed end to end without padding, and run by `packing`.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from unstale.config import ConfigError, TrainerConfig
from unstale.model import linear
from unstale.model import lora as adapters
from unstale.model.head import token_logps, wide
from unstale.model.lora import Lora, Merging
from unstale.model.packing import (
    ATTENTION,
    MIN_SHARED,
    Packed,
    PrefixTree,
    build_prefix_tree,
    cut,
    pack,
    pack_shared,
    recompute_layers,
    running,
    wanted_spans,
)
from unstale.records import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Precisions of a forward pass; float64 is for tests."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""One of these must be there: without any, transformers makes an empty tokenizer and says nothing."""

VersionGaps = tuple[tuple[int, int], ...]
"""Where the numbers of versions jumped: the first number after it, and all that were skipped up to there."""


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """How a pass is run. None of it changes what is computed, beyond the rounding of sums."""

    share_prompts: bool = True
    """What sequences of a pass have in common at their beginning is run once."""
    gradient_checkpointing: bool = False
    """The layers keep their inputs alone for the gradient, and run again for it."""
    compile: bool = False
    """By torch.compile."""

    @classmethod
    def of(cls, config: TrainerConfig) -> "ForwardOptions":
        return cls(config.share_prompts, config.gradient_checkpointing, config.compile)


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
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lora: Lora | None = None,
        base: int = 0,
    ) -> None:
        if lora:
            adapters.inject(model, lora)
        linear.use(model)
        model.set_attn_implementation(ATTENTION)
        self.lora, self.base = lora, base
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._version = 0
        self.at_version = True
        self.version_gaps: VersionGaps = ()
        self._plain_head = _check_packing(model)
        if not self._plain_head:
            kind = "a pass holds all logits [tokens, vocabulary]: more than a linear map makes those of"
            warnings.warn(f"{kind} {type(model).__name__}", RuntimeWarning, stacklevel=2)
        self.passes = ForwardOptions()
        self._body: Callable[..., Any] = self._whole

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        dtype: str = "float32",
        device: str | None = None,
        lora: Lora | None = None,
    ) -> Self:
        """Any Hugging Face causal-LM folder, from disk only. `device` None takes a GPU if there is one."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"policy: no model folder at {folder}")
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"policy: {folder} is not a Hugging Face model folder: it has no config.json"
            )
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
    def _whole(self) -> Any:
        """What ends in hidden states, or in the logits of a model whose head is more than one linear map."""
        return self.model.base_model if self._plain_head else self.model

    def set_forward_options(self, passes: ForwardOptions) -> None:
        """From here on; twins made later too. ConfigError for what the model cannot do."""
        if passes == self.passes:
            return
        if passes.gradient_checkpointing and not self.passes.gradient_checkpointing:
            recompute_layers(self.model)
        self._take(passes)

    def _take(self, passes: ForwardOptions) -> None:
        self.passes = passes
        self._body = torch.compile(self._whole, dynamic=True) if passes.compile else self._whole

    @property
    def merging(self) -> Merging | None:
        """How an engine makes whole weights of adapters; None if they are whole."""
        if self.lora is None:
            return None
        return Merging(
            self.base, str(self.dtype).removeprefix("torch."), self.lora.alpha / self.lora.rank
        )

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

    def assign_new_version(self, version: int) -> None:
        """The same weights under a higher number: those between belong to versions whose training was lost."""
        highest = max([self._version, *(first for first, _ in self.version_gaps)])
        if version <= highest:
            raise ValueError(
                f"version {version} is not higher than {highest}: numbers never repeat"
            )
        place = int(_places(torch.tensor(self._version), self.version_gaps))
        self.version_gaps = (*self.version_gaps, (version, version - place))
        self._version = version

    def lag(self, version: Tensor | int) -> Tensor:
        """Batches between the versions that sampled tokens and the policy's: `lag_of` at its version."""
        return lag_of(torch.as_tensor(version), at=self._version, version_gaps=self.version_gaps)

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
        twin._take(self.passes)
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
        wrong = [
            f"{name} {tuple(weights[name].shape)}"
            for name in own
            if own[name].shape != weights[name].shape
        ]
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

    def logps(
        self, batch: Batch | Packed | PrefixTree, *, temperature: float, where: Tensor | None = None
    ) -> Tensor:
        """Log-probability `[T]` of every token given what precedes it in its own sequence, on the model's device.

        0 at each sequence's first token, and off `where` (`[T]` bool), whose logits are never computed. Float32, or
        float64 for a float64 model. Carries a gradient when gradients are enabled.
        """
        return self._forward(self.prefix_tree(batch), where, temperature, with_entropy=False)[0]

    def logps_and_entropy(
        self, batch: Batch | Packed | PrefixTree, *, temperature: float, where: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`logps`, and the entropy `[T]` of the distribution that each token was drawn from."""
        return self._forward(self.prefix_tree(batch), where, temperature, with_entropy=True)

    @torch.no_grad()
    def score(
        self,
        batch: Batch | Packed,
        where: Tensor,
        *,
        temperature: float,
        max_tokens_per_microbatch: int,
    ) -> Scored:
        """`logps` on `where` without gradient, in passes of at most `max_tokens_per_microbatch` (one sequence may be longer).

        Runs only the sequences that hold a wanted token, each cut after its last wanted one.
        """
        logp = torch.zeros(len(batch.tokens), dtype=wide(self.dtype))
        spans, forwarded = wanted_spans(batch.spans(), where), 0
        for members in self.pack(batch, spans, max_tokens_per_microbatch, where=where):
            packed, index = cut(batch.tokens, [spans[i] for i in members])
            run = self.prefix_tree(packed)
            logp[index] = self._forward(run, where[index], temperature, with_entropy=False)[0].cpu()
            forwarded += run.num_tokens
        return Scored(logp, forwarded)

    def pack(
        self,
        batch: Batch | Packed,
        spans: Sequence[tuple[int, int]],
        max_tokens_per_microbatch: int,
        *,
        where: Tensor,
    ) -> list[list[int]]:
        """Which of these spans each pass runs: at most `max_tokens_per_microbatch`, unless one span alone is longer.

        `where` (`[T]` bool) are the tokens that are asked about.
        """
        if self.passes.share_prompts:
            wanted = [int(where[start:end].sum()) for start, end in spans]
            return pack_shared(cut(batch.tokens, spans)[0], max_tokens_per_microbatch, wanted)
        return pack([end - start for start, end in spans], max_tokens_per_microbatch)

    def prefix_tree(self, batch: Batch | Packed | PrefixTree) -> PrefixTree:
        """What one pass over these sequences runs."""
        if isinstance(batch, PrefixTree):
            return batch
        return build_prefix_tree(
            Packed(batch.tokens, batch.offsets), share=self.passes.share_prompts
        )

    def _forward(
        self, run: PrefixTree, where: Tensor | None, temperature: float, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        asked = run.follows if where is None else run.follows & where.cpu()
        index = asked.nonzero().squeeze(1)
        logp = torch.zeros(len(run.place), dtype=wide(self.dtype), device=self.device)
        entropy = torch.zeros_like(logp)
        if not len(index):
            return logp, entropy
        rows = _run(self._body, run, run.place[index - 1].to(self.device), self._plain_head)
        head = self.model.get_output_embeddings() if self._plain_head else nn.Identity()
        targets, index = run.tokens[run.place[index]].to(self.device), index.to(self.device)
        found, spread = token_logps(
            head, rows, targets, temperature=temperature, with_entropy=with_entropy
        )
        return logp.index_put((index,), found), entropy.index_put(
            (index,), spread
        ) if with_entropy else entropy


def lag_of(version: Tensor, *, at: int, version_gaps: VersionGaps) -> Tensor:
    """How stale, counted in batches, what `version` sampled is for the policy `at` a version. Below 0 if newer.

    Every batch leads to one version, so without jumps it is `at - version`. After a resume the weights of version 4 may
    be called 7, because 5 and 6 were published before their training was lost: 7 then has the place of 4 in the
    schedule. A lost version keeps its own place, and is of lag 0 until the policy gets there; what its tokens were
    sampled from, the exact routes know all the same.

    >>> lag_of(torch.tensor([3, 4, 5, 6, 7, 8]), at=9, version_gaps=((7, 3),)).tolist()
    [3, 2, 1, 0, 2, 1]
    >>> lag_of(torch.tensor([4, 6, 8, 11, 12]), at=12, version_gaps=((7, 3), (11, 5))).tolist()
    [3, 1, 2, 1, 0]
    """
    behind = _places(torch.tensor(at), version_gaps) - _places(version, version_gaps)
    return torch.where(version <= at, behind.clamp(min=0), behind)


def _places(version: Tensor, version_gaps: VersionGaps) -> Tensor:
    """Batches that led to each version: its number, less all that was skipped before it."""
    firsts = torch.tensor([first for first, _ in version_gaps], dtype=torch.long)
    skipped = torch.tensor([0, *(skipped for _, skipped in version_gaps)])
    return version - skipped[torch.bucketize(version, firsts, right=True)]


def _run(body: Callable[..., Any], run: PrefixTree, rows: Tensor, plain_head: bool) -> Tensor:
    """Final hidden states `[rows, H]`, or logits `[rows, V]` of a model whose head is more than one linear map."""
    token = running.set(run)
    try:
        given = {
            "input_ids": run.tokens[None].to(rows.device),
            "position_ids": run.positions[None].to(rows.device),
        }
        out = body(**given, use_cache=False)
        return (out.last_hidden_state if plain_head else out.logits)[0, rows]
    finally:
        running.reset(token)


@torch.no_grad()
def _check_packing(model: PreTrainedModel) -> bool:
    """Whether logits are the head applied to the last hidden state. Refuses a model that mixes packed sequences.

    Not every architecture asks the attention function that it was given, or reads `position_ids`; a model that does
    not would see its neighbours, so this is measured, on short sequences and on siblings, and never assumed.
    """
    device, size = next(model.parameters()).device, _rows(model.get_input_embeddings())
    trunk = torch.arange(MIN_SHARED) % size
    one, two, left, right = (
        trunk[:3],
        (5 - trunk[:5]) % size,
        *(torch.cat([trunk, trunk[:n] * 0 + n]) for n in (2, 3)),
    )
    other, elsewhere = one * 0 + 7 % size, torch.cat([trunk, right[MIN_SHARED:] * 0 + 1])

    def run(*sequences: Tensor, hidden: bool = False) -> tuple[Tensor, list[Tensor]]:
        """All that the pass made, and what each sequence gets of it."""
        lengths = [len(sequence) for sequence in sequences]
        grown = build_prefix_tree(
            Packed(torch.cat(sequences), tuple(accumulate(lengths, initial=0))), share=True
        )
        every = torch.arange(len(grown.tokens), device=device)
        made = _run(model.base_model if hidden else model, grown, every, hidden)
        return made, list(made[grown.place.to(device)].split(lengths))

    try:
        logits, together = run(one, two, left, right)
        _, beside = run(other, two, left, elsewhere)
    except NotImplementedError as error:
        raise ConfigError(f"policy: {type(model).__name__} cannot be packed: {error}") from error
    near = True
    for found, sequence in zip(together, (one, two, left, right), strict=True):
        alone = model(input_ids=sequence[None].to(device), use_cache=False).logits[0]
        tolerance = (0.03 if model.dtype == torch.bfloat16 else 1e-4) * float(alone.abs().max())
        near = near and float((found - alone).abs().max()) <= tolerance
    if not near or not all(torch.equal(together[i], beside[i]) for i in (1, 2)):
        raise ConfigError(
            f"policy: {type(model).__name__} does not keep packed sequences apart: it does not use transformers' "
            "attention interface, or ignores position_ids"
        )
    hidden, _ = run(one, two, left, right, hidden=True)
    head = (
        model.get_output_embeddings()
    )  # on as many rows as in the model: other shapes round otherwise
    return hidden.shape[-1] == head.weight.shape[1] and torch.equal(head(hidden[None])[0], logits)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """From disk only. Raises `ConfigError` for none, and for one without a chat template."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"policy: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"policy: the tokenizer in {folder} cannot be read: {_one_line(error)}"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"policy: the tokenizer in {folder} has no chat template (chat_template.jinja)"
        )
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
        raise ConfigError(
            f"policy: the model in {folder} cannot be read: {_one_line(error)}"
        ) from error
    model, info = read
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"policy: {folder} lacks {len(missing)} weights of its architecture, {missing[0]} among them"
        )
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
