"""The policy: model, tokenizer and version. Tokens go in, log-probabilities come out.

Sequences are packed end to end without padding, and run by `packing`.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.config import ConfigError
from unstale.model import linear
from unstale.model import lora as adapters
from unstale.model.attention import ATTENTION
from unstale.model.forward import ForwardOptions, Scored, checkpoint_layers, run_model
from unstale.model.head import token_logps, wide
from unstale.model.loading import DTYPES, load_model, load_tokenizer, no_progress_bars, vocab_size
from unstale.model.lora import Lora, Merging
from unstale.model.packing import cut, pack, pack_shared, wanted_spans
from unstale.model.packing_check import check_packing
from unstale.model.prefix_tree import Packed, PrefixTree, build_prefix_tree
from unstale.model.versions import VersionGaps, lag_of, num_batches
from unstale.records import Batch


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
        self._plain_head = check_packing(model)
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
        model = load_model(folder, DTYPES[dtype])
        held = vocab_size(model.get_input_embeddings())
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
            checkpoint_layers(self.model)
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
        place = int(num_batches(torch.tensor(self._version), self.version_gaps))
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

    def travel_dtype(self, engine: torch.dtype) -> torch.dtype:
        """Return the precision of published weights: the engine's, or the adapters' own."""
        return self.dtype if self.lora else engine

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
        """Return log-probabilities `[T]` of all tokens, each given its own sequence before it.

        They are on the model's device, float32 (float64 for a float64 model), with a gradient if
        gradients are enabled. The value is 0 at each sequence's first token and off `where` (`[T]` bool).
        """
        run = self.prefix_tree(batch)
        return self._forward(run, where, temperature, with_entropy=False)[0]

    def logps_and_entropy(
        self,
        batch: Batch | Packed | PrefixTree,
        *,
        temperature: float,
        where: Tensor | None = None,
        entropy_sample: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `logps` and the entropy `[T]`, in nats, of the distribution that each token is drawn from.

        With `entropy_sample` (`[T]` bool, within `where`) the entropy is of these tokens only and has no
        gradient, which costs little: it is for a metric.
        """
        run = self.prefix_tree(batch)
        sample = entropy_sample
        return self._forward(run, where, temperature, with_entropy=sample is None, sample=sample)

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
        self,
        run: PrefixTree,
        where: Tensor | None,
        temperature: float,
        *,
        with_entropy: bool,
        sample: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[T]`; see `logps_and_entropy`."""
        wanted = run.follows if where is None else run.follows & where.cpu()
        index = wanted.nonzero().squeeze(1)
        logp = torch.zeros(len(run.place), dtype=wide(self.dtype), device=self.device)
        entropy = torch.zeros_like(logp)
        if not len(index):
            return logp, entropy
        hidden = run_model(self._body, run, run.place[index - 1].to(self.device), self._plain_head)
        targets = run.tokens[run.place[index]].to(self.device)
        positions = index.to(self.device)
        values, entropies = self._head(hidden, targets, temperature, with_entropy=with_entropy)
        logp = logp.index_put((positions,), values)
        if with_entropy:
            entropy = entropy.index_put((positions,), entropies)
        elif sample is not None and sample.any():
            chosen = sample[index].to(self.device)
            with torch.no_grad():
                _, entropies = self._head(
                    hidden.detach()[chosen], targets[chosen], temperature, with_entropy=True
                )
            entropy = entropy.index_put((positions[chosen],), entropies)
        return logp, entropy

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings() if self._plain_head else nn.Identity()
        return token_logps(
            head, hidden, targets, temperature=temperature, with_entropy=with_entropy
        )
