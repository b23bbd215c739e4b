"""The teachers of a run with distillation.

A teacher gives log-probabilities or whole distributions. A sequence may have a lesson, which names
its teacher and has a text that only the teacher reads. Policy and teacher then predict the same
sampled tokens after different prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unstale.config import ConfigError, RunConfig
from unstale.config.checks import is_served
from unstale.model.divergence import Comparison, TeacherRows
from unstale.model.forward import ForwardOptions
from unstale.model.head import wide
from unstale.model.loading import load_tokenizer
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.records import Batch
from unstale.techniques.distil import SELF, START
from unstale.techniques.hooks import Distiller
from unstale.trainer.passes import pass_tokens
from unstale.trainer.served_teacher import ServedTeacher


class Teacher(Protocol):
    """A model that gives log-probabilities of tokens to the distillation loss."""

    def score(self, packed: Batch | Packed, where: Tensor) -> Tensor:
        """Return the teacher's log-probabilities `[T]`.

        Only those in the mask `where` are needed.
        """
        ...


class LocalTeacher:
    """A teacher whose model runs in the trainer's process."""

    def __init__(self, policy: Policy, *, temperature: float, max_tokens: int) -> None:
        self.policy = policy
        self._temperature = temperature
        self._max_tokens = max_tokens

    def score(self, packed: Batch | Packed, where: Tensor) -> Tensor:
        return self.policy.score(
            packed,
            where,
            temperature=self._temperature,
            max_tokens_per_microbatch=self._max_tokens,
        ).logp


class Teachers:
    """The teachers of a run, in the order of `distil.teacher`."""

    def __init__(self, policy: Policy, config: RunConfig, distiller: Distiller) -> None:
        """Load the teachers that `distil.teacher` names.

        Raises `ConfigError` for a teacher that cannot be loaded, or whose tokenizer differs from
        the policy's.
        """
        self._policy = policy
        self._config = config
        self._distiller = distiller
        self._options = distiller.options
        self._max_tokens = pass_tokens(policy, config, trains=False)
        self._teachers = [self._make(each) for each in self._options.sources]

    def _make(self, source: str) -> Teacher:
        if is_served(source):
            return ServedTeacher(source, self._policy.tokenizer, self._policy.peers)
        policy = self._policy
        if source == START:
            policy = policy.twin()
        elif source != SELF:
            policy = self._load(source)
        temperature = self._config.engine.temperature
        return LocalTeacher(policy, temperature=temperature, max_tokens=self._max_tokens)

    def _load(self, name: str) -> Policy:
        """Load a teacher from a folder or the Hugging Face hub, in the precision of the policy."""
        own = self._policy
        folder = self._config.with_policy(name).pretrained_folder
        require_same_tokens(own.tokenizer, load_tokenizer(folder), name)
        teacher = Policy.load(
            folder,
            dtype=str(own.dtype).removeprefix("torch."),
            device=None if own.peers.count > 1 else str(own.device),
            peers=own.peers,
            independent_rows=own.independent_rows,
            trained=False,
        )
        options = self._config.trainer
        teacher.set_forward_options(ForwardOptions(share_prompts=options.share_prompts))
        teacher.check_length(self._config.engine.max_context)
        return teacher

    def logps(self, batch: Batch) -> Tensor:
        """Return the log-probability of each sampled token under its sequence's teacher, `[T]`.

        Empty if the loss needs whole distributions instead.
        """
        if self._options.is_full or not batch.num_sequences:
            return torch.empty(0)
        values = torch.zeros(len(batch.tokens), dtype=wide(self._policy.dtype))
        for teacher, part, index in self._parts(batch):
            packed, where = as_taught(part)
            scored = teacher.score(packed, where)[where]
            values[index[part.sampled]] = scored.to(values.dtype)
        return values

    def comparison(self, batch: Batch) -> Comparison | None:
        """Return a function that computes the divergence from teachers in a pass on `batch`.

        None if the loss needs only the teachers' log-probabilities of sampled tokens.
        """
        if not self._options.is_full:
            return None
        place = torch.full_like(batch.tokens, -1)
        targets = _predicted(batch.sampled, batch.offsets)
        place[targets] = torch.arange(int(targets.sum()))
        found = []
        for teacher, part, index in self._parts(batch):
            assert isinstance(teacher, LocalTeacher)
            packed, where = as_taught(part)
            rows, head = teacher.policy.teacher_rows(packed, where)
            of_part = place[index[part.sampled]]
            found.append(TeacherRows(of_part[of_part >= 0], rows, head))
        return Comparison(found, self._distiller.divergence)

    def _parts(self, batch: Batch) -> list[tuple[Teacher, Batch, Tensor]]:
        """Return for each teacher its sequences, and the positions of their tokens."""
        numbers = [each.teacher for each in batch.lessons] or [0] * batch.num_sequences
        found = []
        for number, teacher in enumerate(self._teachers):
            members = [i for i, each in enumerate(numbers) if each == number]
            if members:
                found.append((teacher, *batch.select(members)))
        return found

    def after_step(self, steps: int) -> None:
        """Copy the policy's weights to the teacher if `steps` is a multiple of `distil.refresh`.

        `steps` is the number of optimizer steps that were taken. With `distil.refresh` 0, do
        nothing.
        """
        refresh = self._options.refresh
        if refresh and steps % refresh == 0:
            self._refreshed.load_weights(self._policy.weights())

    @property
    def _refreshed(self) -> Policy:
        (teacher,) = self._teachers
        assert isinstance(teacher, LocalTeacher)
        return teacher.policy

    def state(self) -> Mapping[str, Any]:
        """Return the teacher's weights for a checkpoint.

        Empty if they do not change during the run.
        """
        if not self._options.refresh:
            return {}
        return {name: each.clone() for name, each in self._refreshed.weights().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._options.refresh:
            self._refreshed.load_weights(state)


def as_taught(batch: Batch) -> tuple[Batch | Packed, Tensor]:
    """Return the sequences that teachers read, and a mask of the sampled tokens in them.

    Sampled tokens keep their order. If no lesson has a text for teachers, the batch itself is
    returned.
    """
    if not any(each.tokens for each in batch.lessons):
        return batch, batch.sampled
    tokens, where, offsets = [], [], [0]
    for (start, end), lesson in zip(batch.spans(), batch.lessons, strict=True):
        at = start + lesson.start
        added = torch.tensor(lesson.tokens, dtype=batch.tokens.dtype)
        tokens += [batch.tokens[start:at], added, batch.tokens[at:end]]
        nowhere = torch.zeros(len(added), dtype=torch.bool)
        where += [batch.sampled[start:at], nowhere, batch.sampled[at:end]]
        offsets.append(offsets[-1] + end - start + len(added))
    return Packed(torch.cat(tokens), tuple(offsets)), torch.cat(where)


def _predicted(where: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return the mask `where` without the first token of each sequence."""
    predicted = where.clone()
    predicted[list(offsets[:-1])] = False
    return predicted


def require_same_tokens(own: Any, other: Any, teacher: str) -> None:
    """Raise `ConfigError` if the teacher's tokenizer has other tokens or ids than the policy's."""
    ours, theirs = own.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    differs = [token for token in ours if theirs.get(token) != ours[token]]
    example = repr(min(differs, key=ours.__getitem__)) if differs else "tokens only it has"
    raise ConfigError(
        f"distil.teacher {teacher} has another tokenizer than the policy ({len(theirs)} and "
        f"{len(ours)} tokens, which differ in {example}): an exact comparison is impossible, "
        "because the tokens are others, and one by spans of text is not built. Use a teacher of "
        "the same model family"
    )
