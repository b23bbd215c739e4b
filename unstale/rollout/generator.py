"""Sampling of one reply. The engine's tokens are added to the episode's transcript."""

from dataclasses import dataclass

from unstale.config import EngineConfig
from unstale.engines import DEFAULT_OPTIONS, Engine, GenerationOptions, SamplingParams
from unstale.envs.chat import Chat
from unstale.kept_sets import Truncation
from unstale.rollout.segments import BudgetUse
from unstale.rollout.timeouts import in_turn
from unstale.rollout.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Generator:
    """An engine, its sampling options, and the chat format that turns messages into tokens."""

    engine: Engine
    chat: Chat
    config: EngineConfig
    temperature: float | None = None
    """Sampling temperature. None uses `config.temperature`, the value that the trainer uses."""
    truncation: Truncation | None = None
    """Limits of sampling. None uses those of `config`, the ones that the trainer uses."""
    return_sets: bool = True
    """True if replies must have the kept set of each token, if the truncation cuts off tokens."""
    pins: bool = False
    """True if one weight version must sample a whole episode: the version of its first token."""
    signals: bool = False
    """True if replies must have signals: numbers about each token's distribution, such as its
    entropy.
    """
    precise: bool = False
    """True if replies must come from an engine that does not round weights to a format such as FP8,
    in a run in which some engines do.
    """

    @property
    def sampling_temperature(self) -> float:
        return self.config.temperature if self.temperature is None else self.temperature

    @property
    def sampling_truncation(self) -> Truncation:
        """The limits of sampling, from which the engine derives the kept set of each token."""
        if self.truncation is not None:
            return self.truncation
        return Truncation(self.config.top_p, self.config.top_k, self.config.min_p)

    def reply_budget(self, num_tokens: int) -> int:
        """Return the largest number of tokens of a reply after `num_tokens` tokens. Below 1 if no
        reply fits.
        """
        return min(self.config.max_completion_tokens, self.config.max_context - num_tokens)

    async def generate(
        self,
        transcript: Transcript,
        options: GenerationOptions = DEFAULT_OPTIONS,
        *,
        since: int | None = None,
        budget_use: BudgetUse | None = None,
    ) -> tuple[list[int], bool]:
        """Sample one reply and add it to `transcript`, the record of the episode.

        Return the reply's tokens, and True if the last one is a stop token. If a weight update
        interrupts the engine, the reply continues after its last token under the new version. With
        `pins` it continues under the old version.

        `since` is the index in `transcript.pieces` of the reply's first piece, if an earlier call
        has sampled a part of the reply. `budget_use` counts tokens per segment of the episode. At
        the end of a segment, sampling pauses until the episode may continue.

        Raises `NotReplayed` if a resumed episode differs from its record. Raises `Pruned` if a
        strategy ends the episode.
        """
        before = transcript.pieces[since:] if since is not None else ()
        budget_use = budget_use or BudgetUse()
        tokens = [token for piece in before for token in piece.tokens]
        num_context = len(transcript.tokens) - len(tokens)
        budget = min(
            self.reply_budget(num_context), budget_use.reply_limit(num_context), options.max_tokens
        )
        for piece in transcript.replay_reply():
            tokens += piece.tokens
            budget_use.count(len(piece.tokens))
        stop_tokens = self.chat.stop_tokens
        while True:
            stopped = bool(tokens) and tokens[-1] in stop_tokens
            is_over = tokens and (stopped or len(tokens) >= budget or options.is_over(tokens))
            if is_over:
                return tokens, stopped
            await transcript.look(going=True)
            transcript.require_replayed()
            remaining = budget - len(tokens)
            params = SamplingParams(
                max_tokens=min(
                    remaining,
                    options.chunk,
                    transcript.until_look(len(tokens)),
                    await budget_use.tokens_left(),
                ),
                stop_tokens=stop_tokens,
                temperature=self.sampling_temperature,
                seed=transcript.seed,
                **self.sampling_truncation._asdict(),
                return_sets=self.return_sets,
                known_experts=transcript.known_experts(),
                sampled=len(tokens),
                version=transcript.first_version if self.pins else -1,
                remaining=remaining,
                signals=self.signals,
                precise=self.precise or bool(transcript.fork and transcript.fork.repeats),
                scenario=transcript.task_set,
            )
            reply = await self.engine.sample(transcript.tokens, params)
            if reply.piece.tokens:
                piece = options.cut(tokens, reply.piece)
                tokens += piece.tokens
                budget_use.count(len(piece.tokens))
                transcript.append(piece)
            await in_turn()  # later than the record, which `interrupt` promises
            if reply.stop == "length" and len(reply.piece.tokens) < params.max_tokens:
                return tokens, False
