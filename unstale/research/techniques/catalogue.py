"""The table of published techniques, and which of them this package has. It imports no torch.

`unstale techniques` prints it. A row is a paper. Its state is `works` (an option turns it on),
`transfer` (a part applies to agents that use tools, and that part works), or `not yet`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unstale.config.techniques import techniques

State = Literal["works", "transfer", "not yet"]


@dataclass(frozen=True, slots=True)
class Row:
    """A published technique: a row of the table that `unstale techniques` prints."""

    number: int
    paper: str
    about: str
    state: State
    reason: str
    """The options that turn the technique on, or what this package lacks for it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The techniques of this package that implement this row, by name."""
        return tuple(name for name, each in techniques().items() if self.number in each.rows)


_TREE = "forks chosen while an episode runs are missing"
_EDIT = "training on edited replies is missing"
_SHARE = "training on texts of other policies or attempts is missing"
_JUDGE = "a procedure around several attempts is missing"


def _row(number: int, paper: str, about: str, reason: str, state: State = "not yet") -> Row:
    return Row(number, paper, about, state, reason)


ROWS: Sequence[Row] = (
    _row(
        1,
        "Unmasking OPD",
        "where distillation follows success",
        "unstale probe-distillation RUN TEACHER, for prefixes of saved episodes (docs/commands.md)",
        "works",
    ),
    _row(
        2,
        "DOTS + replay",
        "prompts of predicted middle difficulty, and replay",
        "--techniques 'predicted_sampler replay' --selection.pool N; words take the place of the "
        "trained encoder",
        "works",
    ),
    _row(
        3,
        "GFCR",
        "a survey: generate, filter, control, replay",
        "its axes are the slots of docs/techniques.md, its criteria --techniques rollout_figures",
        "transfer",
    ),
    _row(
        4,
        "Sol-RL",
        "a cheap explorer and a precise trainer",
        "--engine.quantise fp8 with --techniques episode_filter --episode_filter.rule contrast; "
        "its sampler of images is not for language models",
        "transfer",
    ),
    _row(
        5,
        "ECHO, arXiv 2602.02150",
        "branches, clip and advantage by confidence",
        f"--techniques confidence_clip is the clip and the advantage; {_TREE}",
    ),
    _row(
        6,
        "APRIL",
        "more requests than needed; the rest continues later",
        "--schedule.max_staleness 1 --schedule.lookahead_window 16",
        "works",
    ),
    _row(
        7,
        "XRPO",
        "episodes where the mean is uncertain, a bonus for unlikely correct replies",
        "--techniques allocate with gain interval is the number of episodes, novelty the bonus; "
        "exemplars for tasks that always fail are missing",
    ),
    _row(
        8,
        "VADE",
        "tasks drawn from a Beta posterior",
        "--techniques beta_sampler --selection.pool N",
        "works",
    ),
    _row(9, "SCOPE", "a corrector continues from the first wrong step", _EDIT),
    _row(
        10,
        "MC-GRPO",
        "the median as the baseline",
        "--techniques baseline --baseline.centre median --baseline.scale mad",
        "works",
    ),
    _row(
        11,
        "DART",
        "decoupled modules, varying counts, entropy steps",
        "--techniques replay --replay.rule failed has stored successes, top_turns the steps of "
        "high entropy, allocate varying counts, limits --limits.scope task the lengths, "
        "--correction.mode truncate the ratio",
        "works",
    ),
    _row(12, "LATR", "branches at uncertain tokens, looked ahead", _TREE),
    _row(
        13,
        "BroRL, arXiv 2510.01180",
        "very large groups",
        "--schedule.group_size 256, and --techniques balance measures what a group leaves out",
        "works",
    ),
    _row(
        14,
        "BranchGRPO",
        "advantages by depth of a tree",
        "--techniques 'tree tree_advantage' --tree_advantage.rule depth is the advantage; pruned "
        "gradients are missing",
    ),
    _row(15, "Swarm sampling", "nodes share episodes", _SHARE),
    _row(
        16,
        "VCPO, arXiv 2602.17616",
        "step size by effective sample size; an off-policy baseline",
        "--techniques ess_lr is the step size, least_variance_baseline the baseline",
        "works",
    ),
    _row(
        17,
        "RAVL",
        "no value from an artificial end",
        "--techniques truncated: an episode that a limit cut off is no failure; its model of the "
        "environment and its ensemble of values are not for language models",
        "transfer",
    ),
    _row(
        18,
        "POISE",
        "a probe of hidden states as the baseline",
        "--techniques baseline --baseline.centre probe",
        "works",
    ),
    _row(19, "RTV + PDR", "votes over summaries of attempts", _JUDGE),
    _row(
        20,
        "ACE, arXiv 2602.21420",
        "more weight on errors of growing confidence",
        "--techniques confident_error_penalty",
        "works",
    ),
    _row(
        21,
        "D3S",
        "episodes with the largest variance of advantages, and their tokens",
        "--techniques 'episode_filter top_tokens' with larger groups, such as "
        "--schedule.group_size 16",
        "works",
    ),
    _row(
        22,
        "RollArt",
        "phases on the hardware that fits them",
        "--engine.prefill_engines sends requests to groups of engines by phase, and with "
        "--cluster.engine_hosts to groups of machines; judges are called off the event loop, at "
        "most JudgeEndpoint.at_once at a time, but this number does not follow the load",
        "transfer",
    ),
    _row(
        23,
        "Turn control",
        "a limit of turns at a quantile",
        "--techniques limits, with --limits.extend for extensions",
        "works",
    ),
    _row(
        24,
        "rStar2 GRPO-RoC, arXiv 2508.20722",
        "the cleanest successes of a larger group",
        "--techniques episode_filter --episode_filter.rule clean_success, with "
        "--schedule.group_size above --episode_filter.n",
        "works",
    ),
    _row(
        25,
        "Group-DRO",
        "difficulty bins with weights, and a number of episodes for each",
        '--techniques "difficulty_bin_weights bin_sizes" --selection.pool N; allocate with gain '
        "sqrt_law has no bins",
        "works",
    ),
    _row(26, "GDPO", "each reward normalised on its own", "--techniques reward_channels", "works"),
    _row(27, "DARS", "more episodes on hard tasks", "--techniques allocate", "works"),
    _row(
        28,
        "DRIVE",
        "two stages of tasks and counts",
        "--techniques hard_task_stages --selection.pool N, with --hard_task_stages.first_reply "
        "for the shorter replies of the first stage",
        "works",
    ),
    _row(
        29,
        "V0",
        "a value from the history of outcomes",
        "--techniques 'predicted_sampler allocate' --predicted_sampler.forecast model "
        "--allocate.gain v0 --selection.pool N; the model is small and trained in the run, and "
        "allocate forecasts by the success of the same task",
        "works",
    ),
    _row(
        30,
        "ARRoL",
        "unpromising replies end early",
        "--techniques episode_filter --episode_filter.rule balanced balances finished episodes; "
        f"{_TREE}",
    ),
    _row(31, "SWE-Reasoner", "search with a reward model", _JUDGE),
    _row(
        32,
        "FAPO, arXiv 2510.22543",
        "a lower reward for flawed successes",
        "--techniques flawed_success_penalty with a judge (docs/rewards.md); --task.reward "
        "unstale.rewards:first_error trains a judge of steps",
        "works",
    ),
    _row(
        33,
        "HGPO",
        "step groups that share the last states",
        "--techniques step_groups --step_groups.rule hgpo (or gigpo)",
        "works",
    ),
    _row(
        34,
        "R3L",
        "reflect, restart, train the suffix",
        "--techniques opmd is the loss; reflection, restarts and training on edited replies are "
        "missing",
    ),
    _row(
        35,
        "V0.5",
        "a group mean shrunk towards a prior",
        "--techniques 'allocate baseline' --allocate.gain v05_risk; the prior is a Beta "
        "distribution, not the prediction of a model; its baseline contains the own reward",
        "works",
    ),
    _row(36, "SAGE (skills)", "skills of one task help the next", _SHARE),
    _row(37, "ADHint", "hints by difficulty", _EDIT),
    _row(
        38,
        "MinPRO, arXiv 2601.22718",
        "the smallest ratio of the prefix",
        "--techniques minpro",
        "works",
    ),
    _row(
        39,
        "AReaL",
        "asynchronous training with bounded staleness, decoupled loss",
        "recipes areal_naive, areal_decoupled, areal_loglinear and areal_m2po; "
        "--schedule.max_staleness; --techniques m2po",
        "works",
    ),
    _row(40, "CLEANER", "failed calls replaced by later successes", _EDIT),
    _row(
        41,
        "Jet-RL, arXiv 2601.14243",
        "one low precision in engine and trainer",
        "--engine.quantise fp8 --trainer.quantise fp8",
        "works",
    ),
    _row(
        42,
        "OTR",
        "supervised training with sampled alternatives",
        "unstale sft --loss otr (docs/your-own-data.md)",
        "works",
    ),
    _row(
        43,
        "ETTRL, arXiv 2508.11356",
        "advantages by relative entropy; trees",
        "--techniques 'tree tree_advantage entropy_advantage_reweighting' --tree.branch unlikely "
        "are the trees and the advantage; labels by majority vote are missing",
    ),
    _row(44, "SAGE (plans)", "a plan from the first attempt", _JUDGE),
    _row(
        45,
        "SQIRL",
        "the effective horizon as difficulty",
        "unstale.algorithms.effective_horizon, for small environments that "
        "unstale.testing.tabulate lists (docs/your-own-task.md); its deep Q-learning is not for "
        "language models",
        "transfer",
    ),
    _row(
        46,
        "UI-S1",
        "expert traces with patched steps; step and episode advantages",
        "--techniques step_groups --step_groups.rule two_level are the advantages; patched steps, "
        "at which returns are cut, are missing",
    ),
    _row(
        47,
        "AgentMath",
        "segments of episodes, routing by prefix and load",
        "--techniques segments has the segments and the limits that grow, tool_bonus the bonus; "
        "--engine.load_tokens is the routing. segments and tool_bonus can be combined",
        "works",
    ),
    _row(
        48,
        "ReflectDrive-2",
        "one reward for draft and edit",
        "--task.edit_request of dataset and synthesis: the edit is rewarded, both are trained",
        "transfer",
    ),
    _row(
        49,
        "P/D-Serve",
        "separate engines for prompts and replies",
        "--engine.prefill_engines are groups, and a full engine's requests go to the next one; a "
        "reply stays where its prompt was computed, because an engine cannot send its cache to "
        "another one; unstale simulate --set fleet.kv_transfer=true simulates that",
        "transfer",
    ),
    _row(
        50,
        "PPO at 1M envs",
        "a diagnosis of too large steps",
        "--techniques outer_step: the noise of two halves of a step's groups, its KL, a lower "
        "learning rate",
        "works",
    ),
    _row(
        51,
        "SALT",
        "shared steps get a shared advantage",
        "--techniques step_groups --step_groups.rule salt",
        "works",
    ),
    _row(
        52,
        "GDRO (diffusion)",
        "proxy reward against corrected score",
        "--techniques proxy; held out: eval/reward_mean beside eval/success_rate, and unstale eval",
        "transfer",
    ),
    _row(
        53,
        "MSSR",
        "one episode per task with a Beta baseline",
        "--techniques 'beta_sampler baseline unlikely_token_bonus' --baseline.centre prior "
        "--baseline.scale batch --schedule.group_size 1; the discount does not depend on the "
        "measured KL",
        "works",
    ),
    _row(
        54,
        "Periodic Asynchrony",
        "gradients while the batch is still generated",
        "--trainer.stream true, with --schedule.max_staleness 0 as in the paper or with more; what "
        "needs the whole batch before its gradient is refused; shared prompts are computed once",
        "works",
    ),
    _row(
        55,
        "AEPO, arXiv 2510.14545",
        "branches, advantage and clip by entropy",
        f"--techniques 'token_entropy_advantage preserve_clip' is advantage and clip; {_TREE}",
    ),
    _row(56, "MARS^2", "several agents in one search tree", _TREE),
    _row(
        57,
        "CJ-GRPO, EOSER, ASS",
        "train exactly the decoded states",
        "tokens are never encoded again; the rest is of diffusion decoders",
        "transfer",
    ),
    _row(
        58,
        "SHARP",
        "verified synthetic tasks",
        "--task.env synthesis makes, checks and measures puzzles by programs; drafts by a language "
        "model are missing",
        "transfer",
    ),
    _row(
        59,
        "DAPO, arXiv 2503.14476",
        "other groups in the place of uniform ones, and a penalty for long replies",
        "--schedule.resampled_groups N, and --techniques long_reply_penalty; its clip and its loss "
        "over tokens are the defaults, --techniques truncated masks cut replies",
        "works",
    ),
    _row(
        60,
        "GKD, arXiv 2306.13649",
        "a teacher's judgement of each token that the policy sampled",
        "--techniques distil --distil.teacher FOLDER (docs/distillation.md)",
        "works",
    ),
)
"""All rows of the table, in the order of their numbers."""
