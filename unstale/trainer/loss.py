"""The loss of some sequences: the only forward passes with a gradient.

    loss = sum over tokens of   factor * norm * surrogate(S, advantage)
                              + distil.coef * norm * divergence from the teacher
                              + kl_coef * norm * (pi / mu) * KL(pi || reference)
                              - entropy_coef * norm * entropy
         + the loss of the critic, if there is one (`unstale.trainer.critic`)

`factor` is the weight from the correction of D = pi_old / mu, `norm` one over the divisor of the
loss. S is pi / pi_old. The surrogate of one token is the function of
`unstale.algorithms.objectives` with the name of `objective.loss_type`, called by
`ObjectiveConfig.surrogate`. `unstale.trainer.rules` computes D, S and the limit on pi / mu
(`objective.ratio_cap`); `unstale.trainer.scoring` prepares `old_logp` and `factor`.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from unstale.algorithms import objectives
from unstale.algorithms.corrections import bounded_exp
from unstale.config import RunConfig
from unstale.model.policy import Policy
from unstale.records import Batch
from unstale.trainer.critic import Critic
from unstale.trainer.metrics import StepMetrics
from unstale.trainer.records import Minibatch
from unstale.trainer.rules import LossSpec
from unstale.trainer.scoring import Scoring, require_finite, select


class Loss:
    """The loss of some sequences as a function of the current policy."""

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        rules: LossSpec,
        scoring: Scoring,
        critic: Critic | None,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._temperature = config.engine.temperature
        self._is_bitwise = config.engine.bitwise
        self._is_inline = scoring.is_inline
        self._rules = rules
        self._scoring = scoring

    def of(
        self, minibatch: Minibatch, microbatch: Batch, index: Tensor, passes: StepMetrics
    ) -> Tensor:
        """Return the loss of the sequences of a microbatch, a scalar with a gradient.

        `index` has the position in the minibatch of each token of the microbatch. Metrics are added
        to `passes`. Raises NonFinite if a log-probability is NaN or infinite.
        """
        objective = self._rules.objective
        norm = minibatch.norm[index]
        reach = microbatch.shared.reach if microbatch.shared else 1
        lag = minibatch.lag[index]
        reading: AbstractContextManager[list[Tensor]] = nullcontext([])
        if self._critic and minibatch.forecasts:
            reading = self._critic.reading()
        with reading as states:
            logp, entropy, divergence = self._forward_pass(microbatch, passes)
        current_logp = logp.detach()
        require_finite(microbatch, logp=current_logp)
        if self._is_bitwise and self._policy.weights_match_version:
            is_own = microbatch.sampled & (microbatch.version == self._policy.version)
            self._scoring.require_equal(microbatch, "logp", current_logp, is_own)
        if self._is_inline:
            old = self._scoring.correct(microbatch, current_logp, lag, passes)
            old_logp = old.old_logp
            factor = (
                old.correction.factor * minibatch.factor[index]
            )  # 0 where a shaper drops tokens
        else:
            old_logp, factor = minibatch.old_logp[index], minibatch.factor[index]
        if distiller := self._rules.techniques.distiller:
            teacher_logp = select(minibatch.teacher_logp, index)
            microbatch = distiller.rewarded(microbatch, teacher_logp, current_logp)
            if len(teacher_logp):
                divergence = current_logp - teacher_logp
            passes.add_divergence(divergence.detach()[microbatch.fresh])
            passes.tokens.add_shaped(microbatch, dropped=torch.zeros_like(microbatch.sampled))
        surrogate = self._rules.surrogate(logp, old_logp, microbatch)
        capped = self._rules.cap(factor, current_logp, microbatch)
        is_capped, factor = capped < factor, capped
        loss = (factor * norm * surrogate.loss).sum()
        if divergence.requires_grad and distiller:
            loss = loss + distiller.options.coef * (norm * divergence).sum()
        if objective.kl_coef:
            reference_logp = minibatch.reference_logp[index]
            passes.add_reference((reference_logp - current_logp)[microbatch.fresh])
            # The engine's policy drew the tokens, but the KL is that of the current policy. So each
            # token is weighted by the ratio of the two, also one that the correction dropped. Only
            # with the loss aggregation `kept` dropped tokens have the norm 0.
            ratio = bounded_exp(current_logp - microbatch.behavior_logp)
            ratio = self._rules.cap(ratio, current_logp, microbatch)
            divergence = objectives.reference_kl(logp, reference_logp, sampled=microbatch.sampled)
            loss = loss + objective.kl_coef * (reach * norm * ratio * divergence).sum()
        if objective.entropy_coef:
            loss = loss - objective.entropy_coef * (reach * norm * entropy).sum()
        passes.add_forward(microbatch, current_logp, old_logp, lag=lag, surrogate=surrogate)
        passes.tokens.add_forward(
            microbatch, current_logp, old_logp, surrogate=surrogate, capped=is_capped
        )
        if self._rules.techniques.controllers:
            passes.add_log_weights(self._rules.whole(microbatch), current_logp)
        passes.losses.append(loss.item())
        if self._critic and minibatch.forecasts:
            loss = loss + self._critic.loss(microbatch, states, minibatch.forecasts, index)
        return loss

    def _forward_pass(self, batch: Batch, passes: StepMetrics) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's log-probability, entropy and teacher divergence, on the CPU.

        The divergence is 0 unless the loss needs the teacher's distribution. With an entropy bonus,
        the entropy is computed for all sampled tokens and has a gradient. Otherwise it is computed
        for some tokens, only for the metric.
        """
        needed = self._rules.scored(batch)
        run = self._policy.prefix_tree(batch, needed)
        passes.forward_tokens += run.num_tokens
        measured, every = batch.sampled, 1
        if not self._rules.objective.entropy_coef:
            every = passes.entropy_every
            measured = passes.entropy_sample(batch.sampled)
        teachers = self._scoring.teachers
        logp, entropy, divergence = self._policy.compared(
            run,
            teachers.comparison(batch) if teachers else None,
            temperature=self._temperature,
            where=needed,
            entropy_sample=None if self._rules.objective.entropy_coef else measured,
        )
        entropy = entropy.cpu().where(batch.sampled, 0.0)  # not of placed or shared text
        passes.add_entropy(entropy.detach()[measured & batch.fresh], every=every)
        passes.tokens.add_entropy(batch, entropy.detach(), where=measured)
        return logp.cpu(), entropy, divergence.cpu()
