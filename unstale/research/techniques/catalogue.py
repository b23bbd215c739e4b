"""The table of published techniques, and how much of each the package has. It imports no torch.

`unstale techniques` prints it. A row is a paper, and its state is one of four:

works: options turn on what the paper's abstract describes, for policies that write tokens. Where a
    paper is about images of diffusion models, `how` says what takes their place.
partly: options turn on a part of it, and `missing` says in a sentence what is left out.
diagnostic: the paper measures or compares, and the package measures the same.
idea only: nothing of it can be turned on as the paper has it. An option may share its idea.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unstale.config.techniques import techniques

State = Literal["works", "partly", "diagnostic", "idea only"]


@dataclass(frozen=True, slots=True)
class Row:
    """A published technique, which is a row of the table that `unstale techniques --all` prints."""

    number: int
    paper: str
    about: str
    state: State
    how: str
    """The options or commands that turn on the parts of the technique that the package has. Empty
    if it has none.
    """
    missing: str
    """A sentence about the parts of the paper that the package leaves out. Empty if the state is
    works.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The techniques of this package that implement this row, by name."""
        return tuple(name for name, each in techniques().items() if self.number in each.rows)


def _works(number: int, paper: str, about: str, how: str) -> Row:
    return Row(number, paper, about, "works", how, "")


def _partly(number: int, paper: str, about: str, how: str, missing: str) -> Row:
    return Row(number, paper, about, "partly", how, missing)


def _diagnostic(number: int, paper: str, about: str, how: str, missing: str = "") -> Row:
    return Row(number, paper, about, "diagnostic", how, missing)


def _idea(number: int, paper: str, about: str, missing: str, how: str = "") -> Row:
    return Row(number, paper, about, "idea only", how, missing)


ROWS: Sequence[Row] = (
    _works(
        1,
        "Unmasking OPD",
        "where distillation follows success",
        "unstale probe-distillation RUN TEACHER, for prefixes of saved episodes; --context "
        "compares contexts of one policy in self-distillation (docs/commands.md)",
    ),
    _works(
        2,
        "DOTS + replay",
        "prompts of predicted middle difficulty, and replay",
        "--techniques 'predicted_sampler replay' --predicted_sampler.encoder policy "
        "--predicted_sampler.forecast model --predicted_sampler.reference 256 --selection.pool N",
    ),
    _works(
        3,
        "GFCR",
        "a survey: generate, filter, control, replay",
        "--techniques rollout_figures measures its criteria, and unstale advise RUN has an index "
        "from symptoms to remedies (docs/advise.md)",
    ),
    _works(
        4,
        "Sol-RL",
        "a cheap explorer and a precise trainer",
        "--techniques regenerate --engine.quantise nvfp4 --engine.processes 2 "
        "--engine.precise_engines 1 --schedule.group_size 16, for replies in the place of images; "
        "episode_filter with the rule contrast trains on explored episodes themselves",
    ),
    _works(
        5,
        "ECHO, arXiv 2602.02150",
        "branches, clip and advantage by confidence",
        "--techniques 'tree tree_advantage confidence_clip majority' --tree.branch confidence "
        "--tree.prune confidence",
    ),
    _works(
        6,
        "APRIL",
        "more requests than needed; the rest continues later",
        "--schedule.max_staleness 1 --schedule.lookahead_window 16",
    ),
    _works(
        7,
        "XRPO",
        "episodes where the mean is uncertain, examples, a bonus for unlikely correct replies",
        "--techniques 'allocate exemplars novelty' --allocate.gain interval --objective.placed "
        "guided --selection.pool N --schedule.group_size 4",
    ),
    _works(
        8,
        "VADE",
        "tasks drawn from a Beta posterior",
        "--techniques beta_sampler --selection.pool N --beta_sampler.keep 0.9, which forgets a "
        "task's results at its visits, and --beta_sampler.decay those of all tasks",
    ),
    _works(
        9,
        "SCOPE",
        "a corrector continues from the first wrong step",
        "--techniques retry --retry.rule correct --objective.placed anchor, with a method "
        "correction of the task set, which may ask a judge and a teacher, or its demonstrations",
    ),
    _works(
        10,
        "MC-GRPO",
        "the median as the baseline",
        "--techniques baseline --baseline.centre median --baseline.scale mad "
        "--schedule.group_size 9",
    ),
    _works(
        11,
        "DART",
        "decoupled modules, varying counts, entropy steps, also for agents that see screenshots",
        "the recipe dart: allocate has varying counts, limits the lengths, replay stored "
        "successes, top_turns the steps of high entropy, and the ratio is truncated; --techniques "
        "'allocate limits bus replay top_turns' --bus.load RUN --bus.when failed "
        "--objective.placed anchor adds successes collected before the run; a policy that reads "
        "pictures sees screenshots",
    ),
    _works(
        12,
        "LATR",
        "branches at uncertain tokens, looked ahead",
        "--techniques 'tree tree_advantage' --tree.branch second --tree.prune similar, and "
        "--tree.spare 0 to prune all that are similar",
    ),
    _works(
        13,
        "BroRL, arXiv 2510.01180",
        "very large groups",
        "--schedule.group_size 256 --techniques balance, which measures what a group leaves out",
    ),
    _works(
        14,
        "BranchGRPO",
        "advantages by depth of a tree",
        "--techniques 'tree tree_advantage' --tree_advantage.rule depth --tree_advantage.fusion "
        "path --tree_advantage.kept_depths 0.5 --tree_advantage.kept_leaves extremes, for trees of "
        "tokens in the place of denoising steps",
    ),
    _works(
        15,
        "Swarm sampling",
        "nodes share episodes",
        "--techniques bus --bus.folder DIR --bus.node NAME --objective.placed anchor, in each run",
    ),
    _works(
        16,
        "VCPO, arXiv 2602.17616",
        "step size by effective sample size; an off-policy baseline",
        "--techniques 'ess_lr least_variance_baseline'",
    ),
    _idea(
        17,
        "RAVL",
        "no value from an artificial end",
        "Its model of the environment and its ensemble of values are of robotics.",
        "--techniques truncated shares its idea: an episode that a limit cut off is no failure",
    ),
    _works(
        18,
        "POISE",
        "a probe of hidden states as the baseline",
        "--techniques baseline --baseline.centre probe",
    ),
    _works(
        19,
        "RTV + PDR",
        "votes over summaries of attempts, and an answer from the best",
        "unstale attempt --attempts 8 --votes 8 --summaries --distil 4 (docs/commands.md)",
    ),
    _works(
        20,
        "ACE, arXiv 2602.21420",
        "more weight on errors of growing confidence",
        "--techniques confident_error_penalty",
    ),
    _works(
        21,
        "D3S",
        "episodes with the largest variance of advantages, and their tokens",
        "--techniques 'episode_filter top_tokens' --episode_filter.n 4 --episode_filter.last 12 "
        "--schedule.group_size 16, fewer at first and more at the end",
    ),
    _works(
        22,
        "RollArt",
        "phases on the hardware that fits them",
        "--engine.processes 4 --engine.prefill_engines 2 sends requests to groups of engines by "
        "phase, and with --cluster.engine_hosts to groups of machines; judges are called off the "
        "event loop, as many at once as their endpoint bears (docs/rewards.md)",
    ),
    _works(
        23,
        "Turn control",
        "a limit of turns at a quantile, and extensions on demand",
        "--techniques limits --limits.extend 4, for a fixed limit without extend; unstale eval and "
        "unstale serve with --limit-turns",
    ),
    _works(
        24,
        "rStar2 GRPO-RoC, arXiv 2508.20722",
        "the cleanest successes of a larger group",
        "--techniques episode_filter --episode_filter.rule clean_success --episode_filter.n 8 "
        "--schedule.group_size 16",
    ),
    _works(
        25,
        "Group-DRO",
        "difficulty bins with weights, and a number of episodes for each",
        "--techniques 'difficulty_bin_weights bin_sizes' --bin_sizes.rule weights --selection.pool "
        "N, or bin_sizes.rule sqrt; allocate with gain sqrt_law has no bins",
    ),
    _works(
        26,
        "GDPO",
        "each reward normalised on its own",
        "--techniques 'tool_bonus reward_channels', or only reward_channels where the environment "
        "has several rewards",
    ),
    _works(
        27,
        "DARS",
        "more episodes on hard tasks",
        "--techniques allocate --advantage.estimator rloo_first --schedule.groups_per_step 32 "
        "--trainer.epochs_per_batch 2, of which the last two are its breadth",
    ),
    _works(
        28,
        "DRIVE",
        "two stages of tasks and counts",
        "--techniques hard_task_stages --selection.pool N --hard_task_stages.first_reply 32, the "
        "shorter replies of the first stage; for large pools also --selection.candidates N",
    ),
    _works(
        29,
        "V0",
        "a value from the history of outcomes: budgets before the rollout, and a router",
        "--techniques 'predicted_sampler allocate' --predicted_sampler.forecast model "
        "--allocate.gain v0 --allocate.forecast sampler --selection.pool N, with a small model "
        "that is trained in the run, or with --predicted_sampler.load RUN "
        "--predicted_sampler.passes 0 in an earlier one and not updated; unstale route --out FILE "
        "sends tasks to one of several policies by a model of all of them",
    ),
    _works(
        30,
        "ARRoL",
        "unpromising replies end early",
        "--techniques 'tree tree_advantage' --tree.branch none --tree.prune mixed; unstale attempt "
        "RUN --weigh weighs answers by the same forecast",
    ),
    _works(
        31,
        "SWE-Reasoner",
        "search with a reward model, and training episodes by rejection sampling",
        "unstale attempt --search 3 --votes 4 --judge URL --judge-model NAME, also with --task.env "
        "terminal:FOLDER; --collect FILE writes successes at training tasks for unstale sft "
        "(docs/commands.md)",
    ),
    _works(
        32,
        "FAPO, arXiv 2510.22543",
        "a lower reward for flawed successes",
        "--techniques flawed_success_penalty with a judge (docs/rewards.md); --task.reward "
        "unstale.rewards:first_error trains a judge of steps",
    ),
    _works(
        33,
        "HGPO",
        "step groups that share the last states",
        "--techniques step_groups --step_groups.rule hgpo (or gigpo)",
    ),
    _works(
        34,
        "R3L",
        "reflect, restart, train the suffix",
        "--techniques 'retry opmd' --objective.placed anchor --objective.loss_type none "
        "--retry.attempts all --retry.train_texts true",
    ),
    _works(
        35,
        "V0.5",
        "a group mean shrunk towards the forecast of a value model",
        "--techniques 'predicted_sampler allocate baseline' --predicted_sampler.forecast model "
        "--allocate.gain v05_risk --allocate.forecast sampler --baseline.centre shrink "
        "--baseline.forecast sampler --selection.pool N",
    ),
    _works(
        36,
        "SAGE (skills)",
        "skills of one task help the next",
        "--task.env chain:ENV, with --task.length and --task.bonus (docs/your-own-task.md)",
    ),
    _works(
        37,
        "ADHint",
        "hints by difficulty",
        "--techniques 'hints hint_entropy_weights' --objective.placed anchor "
        "--hints.baseline apart --hints.gap true",
    ),
    _works(
        38,
        "MinPRO, arXiv 2601.22718",
        "the smallest ratio of the prefix",
        "--techniques minpro",
    ),
    _works(
        39,
        "AReaL",
        "asynchronous training with bounded staleness, decoupled loss",
        "recipes areal_naive, areal_decoupled, areal_loglinear and areal_m2po; "
        "--schedule.max_staleness; --techniques m2po",
    ),
    _works(
        40,
        "CLEANER",
        "failed calls replaced by later successes",
        "--techniques retry --retry.rule clean --objective.placed guided",
    ),
    _partly(
        41,
        "Jet-RL, arXiv 2601.14243",
        "one low precision in engine and trainer",
        "--engine.quantise fp8 --trainer.quantise fp8: both round alike, and with "
        "--engine.backend vllm the engine computes in FP8",
        "The trainer and the embedded engine round to FP8 and compute in the run's own precision, "
        "so they are no faster.",
    ),
    _works(
        42,
        "OTR",
        "supervised training with sampled alternatives",
        "unstale sft --loss otr (docs/your-own-data.md)",
    ),
    _works(
        43,
        "ETTRL, arXiv 2508.11356",
        "labels by majority, advantages by relative entropy; trees",
        "--techniques 'majority tree tree_advantage entropy_advantage_reweighting' "
        "--tree.branch peaks --majority.least 0 --selection.pool N --selection.test_time true",
    ),
    _works(
        44,
        "SAGE (plans)",
        "a plan from the first attempt",
        "--techniques retry --retry.rule plan --retry.train_texts true; unstale attempt --plan "
        "attempts tasks so (docs/commands.md)",
    ),
    _diagnostic(
        45,
        "SQIRL",
        "the effective horizon as difficulty",
        "unstale.algorithms.effective_horizon, for small environments that "
        "unstale.testing.tabulate lists (docs/your-own-task.md)",
        "Its deep Q-learning is not for language models.",
    ),
    _works(
        46,
        "UI-S1",
        "expert traces with patched steps, also of screens; step and episode advantages",
        "--task.env traces:FILE --techniques step_groups --step_groups.rule two_level "
        "--step_groups.cut_below 1, with --task.tolerance for places on screens "
        "(docs/your-own-task.md)",
    ),
    _works(
        47,
        "AgentMath",
        "tool traces from plain reasoning; segments, routing by prefix and load",
        "unstale tool-traces makes the traces, with --tool python --url URL --url-model NAME by a "
        "model; --techniques 'segments tool_bonus' has the segments, the limits that grow and the "
        "bonus; --engine.load_tokens is the routing",
    ),
    _works(
        48,
        "ReflectDrive-2, arXiv 2605.04647",
        "changes in a draft, learned from mistakes; then one reward for draft and edit",
        "--task.edit_request TEXT --task.edits in_place of dataset and synthesis: with unstale sft "
        "--mistakes 2 right replies with mistakes are edited, and then only the edited draft is "
        "rewarded, and both replies are trained. Replies replace the decoding by masked diffusion",
    ),
    _partly(
        49,
        "P/D-Serve",
        "separate engines for prompts and replies",
        "--engine.prefill_engines are groups, and a full engine's requests go to the next one",
        "An engine cannot send its cache to another one, and the shares of both kinds are fixed.",
    ),
    _works(
        50,
        "PPO at 1M envs",
        "a diagnosis of too large steps",
        "--techniques outer_step: the noise of two halves of a step's groups, its KL, a lower "
        "learning rate; unstale advise RUN says how minibatches grow with environments",
    ),
    _works(
        51,
        "SALT",
        "shared steps get a shared advantage",
        "--techniques step_groups --step_groups.rule salt",
    ),
    _idea(
        52,
        "GDRO (diffusion)",
        "a group objective on recorded images, without their sampler",
        "Its offline objective for image models is missing.",
        "--techniques proxy reports proxy reward and corrected score together, as it does",
    ),
    _works(
        53,
        "MSSR",
        "one episode per task with a Beta baseline",
        "--techniques 'beta_sampler baseline unlikely_token_bonus' --baseline.centre prior "
        "--baseline.scale batch --baseline.discount_prior true --baseline.prior 4 --baseline.keep "
        "0.96 --baseline.kl_target 0.06 --schedule.group_size 1 --selection.pool N",
    ),
    _works(
        54,
        "Periodic Asynchrony",
        "gradients while the batch is still generated",
        "--trainer.stream true, with --schedule.max_staleness 0 as in the paper or with more; what "
        "needs the whole batch before its gradient is refused; shared prompts are computed once",
    ),
    _works(
        55,
        "AEPO, arXiv 2510.14545",
        "branches, advantage and clip by entropy",
        "--techniques 'tree tree_advantage token_entropy_advantage preserve_clip' "
        "--tree.branch tool --tree.roots 1",
    ),
    _works(
        56,
        "MARS^2",
        "several policies and roles in one search tree over answers",
        "--techniques search has roles of one policy; with --search.folder DIR --search.node NAME "
        "several policies share a tree, each trained by a run of its own",
    ),
    _idea(
        57,
        "CJ-GRPO, EOSER, ASS",
        "train exactly the decoded states",
        "It is a method for decoders by diffusion.",
        "tokens are never encoded again, so every trained state was sampled",
    ),
    _works(
        58,
        "SHARP",
        "verified synthetic tasks",
        "unstale synthesize MODEL --url URL --url-model NAME: drafts by a plan, kept if solutions "
        "agree and the pass rate is in a band, and --rates RUN feeds rates back "
        "(docs/your-own-data.md); --task.env synthesis makes puzzles by programs",
    ),
    _works(
        59,
        "DAPO, arXiv 2503.14476",
        "other groups in the place of uniform ones, and a penalty for long replies",
        "--schedule.resampled_groups N, and --techniques long_reply_penalty; its clip and its loss "
        "over tokens are the defaults, --techniques truncated masks cut replies",
    ),
    _works(
        60,
        "GKD, arXiv 2306.13649",
        "a teacher's judgement of each token that the policy sampled",
        "--techniques distil --distil.teacher FOLDER (docs/distillation.md)",
    ),
    _partly(
        61,
        "ESTR, arXiv 2607.22186",
        "a trust region whose width grows with a token's entropy",
        "--techniques estr --estr.tau TAU",
        "The mask is made once per batch, and tau has no default: the paper's value is not known.",
    ),
)
"""All rows of the table, in the order of their numbers."""

WISHES: Mapping[str, Sequence[str]] = {
    "more signal per token": (
        "baseline",
        "bus",
        "confident_error_penalty",
        "distil",
        "entropy_advantage_reweighting",
        "episode_filter",
        "exemplars",
        "hint_entropy_weights",
        "hints",
        "least_variance_baseline",
        "novelty",
        "reward_channels",
        "retry",
        "search",
        "step_groups",
        "token_entropy_advantage",
        "top_tokens",
        "unlikely_token_bonus",
    ),
    "longer episodes": ("limits", "segments", "top_turns", "tree", "tree_advantage", "truncated"),
    "stability with old tokens": (
        "confidence_clip",
        "ess_lr",
        "estr",
        "m2po",
        "minpro",
        "opmd",
        "outer_step",
        "preserve_clip",
    ),
    "budget: which tasks, how many episodes": (
        "allocate",
        "beta_sampler",
        "bin_sizes",
        "difficulty_bin_weights",
        "hard_task_stages",
        "predicted_sampler",
        "regenerate",
        "replay",
    ),
    "test time: a better answer from several attempts": ("unstale attempt",),
    "test time: which of several policies": ("unstale route",),
    "more tasks and traces": ("unstale synthesize", "unstale tool-traces"),
    "no labels": ("majority",),
    "another reward": ("flawed_success_penalty", "long_reply_penalty", "tool_bonus"),
    "figures only": ("balance", "proxy", "rollout_figures"),
}
"""For each thing that a user may want: the techniques and commands for it. Each is listed once."""
COMMANDS: Mapping[str, str] = {
    "unstale attempt": "Attempt each task several times, and choose by votes or by comparisons",
    "unstale route": "Send each task to the policy that probably solves it at the least cost",
    "unstale synthesize": "Let a model write tasks, and keep those whose answers are verified",
    "unstale tool-traces": "Turn plain reasoning into conversations with tool calls",
}
"""A description of each command in `WISHES`, by the command's name."""
