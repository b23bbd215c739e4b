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
        "where distillation follows success, by token and by question",
        "unstale probe-distillation RUN TEACHER --positions all --json measures each sampled token "
        "of saved episodes, or with windows a number that grows with the logarithm of their "
        "length, and has means by question and by outcome; --context compares contexts of one "
        "policy in self-distillation (docs/commands.md); --techniques distil trains "
        "(docs/distillation.md)",
    ),
    _works(
        2,
        "DOTS + replay",
        "prompts of predicted middle difficulty, and replay",
        "--techniques 'predicted_sampler replay' --predicted_sampler.encoder policy "
        "--predicted_sampler.forecast model --predicted_sampler.reference 256 --selection.pool N",
    ),
    _diagnostic(
        3,
        "GFCR",
        "a survey: generate, filter, control, replay",
        "--techniques rollout_figures measures its criteria, and unstale advise RUN has an index "
        "from symptoms to remedies (docs/advise.md)",
        "The remedies are techniques of other rows, and none is chosen by itself.",
    ),
    _partly(
        4,
        "Sol-RL",
        "explore with rounding, train without",
        "unstale denoise images --explore 96 --group-size 24, for images (docs/denoise.md), and "
        "--techniques regenerate --engine.quantise nvfp4 --engine.processes 2 "
        "--engine.precise_engines 1 --schedule.group_size 16 for episodes; episode_filter with "
        "the rule contrast trains on explored episodes themselves",
        "Products of NVFP4 are simulated, so exploring is no cheaper.",
    ),
    _works(
        5,
        "ECHO, arXiv 2602.02150",
        "branches, clip and advantage by confidence",
        "--techniques 'tree tree_advantage confidence_clip majority' --tree.branch confidence "
        "--tree.prune confidence --tree.continuations 3 --majority.least 0 --selection.pool N "
        "--selection.test_time true --task.env calculator, for tasks with answers, as those "
        "of calculator and dataset; such trees need the embedded engine",
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
        "a process reward model finds the first wrong step, and a corrector continues from there",
        "--techniques retry --retry.rule correct --objective.placed anchor, with --retry.judge PRM "
        "--retry.corrector MODEL: addresses of servers, a folder of a process reward model, and "
        "one of a model that has the policy's tokenizer (whose text guided can weigh), "
        "or functions. Without them the task set's method correction or its demonstrations "
        "are used, which all desks have",
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
        "successes, top_turns the steps of high entropy, and the ratio is truncated; "
        "--techniques 'allocate limits bus replay top_turns' --bus.load RUN --bus.when failed "
        "--objective.placed anchor adds successes collected before the run; a policy that "
        "reads pictures sees screenshots, which needs the embedded engine on one machine, one "
        "trainer rank and an environment of yours (docs/vision.md)",
    ),
    _works(
        12,
        "LATR",
        "branches at uncertain tokens, looked ahead",
        "--techniques 'tree tree_advantage' --tree.branch second --tree.prune similar, and "
        "--tree.spare 0 to prune all that are similar; such trees need the embedded engine",
    ),
    _works(
        13,
        "BroRL, arXiv 2510.01180",
        "very large groups",
        "--schedule.group_size 256 --techniques balance, which measures what a group leaves out",
    ),
    _works(
        14,
        "BranchGRPO, arXiv 2509.06040",
        "trees of denoising steps, advantages by depth, gradients of few of them",
        "unstale denoise images --group-size 4 --fork-at 2 5 --fusion path_mean --kept-leaves "
        "extremes --kept-depths 0.5, with --noisy 0 1 2 5 for its hybrid of steps with and "
        "without noise, and module:Class in place of images for a denoiser of yours "
        "(docs/denoise.md), which may be as large as the paper's if one device holds it: with "
        "frozen weights, LoRA and --microbatch, not run on a GPU. images draws digits of 7 x 5 "
        "pixels, and a fixed classifier gives the reward. A fork has two branches, and a task at "
        "least two beginnings. For trees of tokens: --techniques 'tree tree_advantage' "
        "--tree.branch entropy --tree_advantage.rule depth --tree_advantage.fusion path "
        "--tree_advantage.kept_depths 0.5 --tree_advantage.kept_leaves extremes, with the "
        "embedded engine",
    ),
    _works(
        15,
        "Swarm sampling",
        "nodes share episodes",
        "--techniques bus --bus.folder DIR --bus.node NAME --objective.placed anchor, in each run: "
        "successes, of tasks that the runs share, through a common folder",
    ),
    _works(
        16,
        "VCPO, arXiv 2602.17616",
        "step size by effective sample size; an off-policy baseline",
        "--techniques 'ess_lr least_variance_baseline' --correction.unit sequence "
        "--correction.aggregate sum; the baseline takes a backward pass for each sequence, so "
        "a step takes about twice as long",
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
        "--techniques baseline --baseline.centre probe, which costs a forward pass",
    ),
    _works(
        19,
        "RTV + PDR",
        "votes over summaries of attempts, and new populations that read the best",
        "unstale attempt RUN --attempts 8 --votes 8 --summaries --distil 4 --rounds 1 "
        "(docs/commands.md); without --rounds, one further attempt reads the best",
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
    _partly(
        22,
        "RollArt",
        "phases on the hardware that fits them, and elastic rewards",
        "--engine.prefill_engines 1 --engine.urls 'URL URL' sends prefills to the first server "
        "and decodes to the second, each on the hardware where you started it; with "
        "--task.reward_processes 4, or RewardModel(processes=4, min_processes=0, devices=('2', "
        "'3')), the number of reward processes follows what waits (docs/rewards.md); 8 to 64 "
        "calls of a judge run at once; every episode continues over weight updates",
        "A pool that grows and shrinks is on the machine of the run. On other machines "
        "(--task.isolate ray), the number of reward workers is fixed. With "
        "--cluster.engine_hosts, Ray chooses which machines prefill and which decode. Shorter "
        "waits by phase are shown in simulation only.",
    ),
    _works(
        23,
        "Turn control",
        "a limit of turns at a quantile, and extensions on demand",
        "--techniques limits --limits.extend 4, for a fixed limit without extend; for trained "
        "policies unstale eval RUN and unstale serve RUN with --limit-turns, where the successes "
        "in RUN set the limit; serve sends no reminders",
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
        "--techniques 'difficulty_bin_weights bin_sizes' --difficulty_bin_weights.by_share true "
        "--difficulty_bin_weights.eta 2 --difficulty_bin_weights.limit 5 "
        "--difficulty_bin_weights.max_weight 20 --bin_sizes.rule weights --selection.pool N, or "
        "bin_sizes.rule sqrt; allocate with gain sqrt_law has no bins",
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
        "--allocate.gain v0 --allocate.forecast sampler --selection.pool N, with a small "
        "model of words that is trained in the run, or with --predicted_sampler.load RUN "
        "--predicted_sampler.passes 0 in an earlier one and not updated; unstale route --out "
        "FILE writes which policy each task should get, by a model of all policies. In the "
        "table of allocate, 0.56 of the groups have equal rewards with gain v0, and 0.30 "
        "without it",
    ),
    _works(
        30,
        "ARRoL",
        "unpromising replies end early",
        "--techniques 'tree tree_advantage' --tree.branch none --tree.prune mixed; unstale attempt "
        "RUN --weigh weighs answers by the same forecast; with the embedded engine",
    ),
    _works(
        31,
        "SWE-Reasoner",
        "search by development stages with reward models and execution, and training episodes by "
        "rejection sampling",
        "unstale attempt RUN --task.env terminal:FOLDER --stages FILE --judge REWARD_MODEL: a "
        "stage has a request to the policy, a reward model and a command in the sandbox, such as "
        "the repository's tests; --collect FILE writes successes at training tasks, with their "
        "stages and thoughts, for unstale sft (docs/commands.md). The folders of repositories are "
        "the user's",
    ),
    _works(
        32,
        "FAPO, arXiv 2510.22543",
        "a lower reward for flawed successes",
        "--techniques flawed_success_penalty with an environment of yours that asks a judge "
        "and reports the fact flaw (docs/rewards.md); --task.reward "
        "unstale.rewards:first_error trains a judge of steps, whose answers StepJudge reads",
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
        "--techniques 'predicted_sampler allocate baseline' --predicted_sampler.forecast "
        "model --allocate.gain v05_risk --allocate.forecast sampler --baseline.centre shrink "
        "--baseline.forecast sampler --selection.pool N; the value model is a small model of "
        "words, trained in the run, and the sampler also chooses the tasks",
    ),
    _works(
        36,
        "SAGE (skills), arXiv 2512.17102",
        "skills of one task help the next",
        "--task.env chain:ENV, with --task.length and --task.bonus: each task begins with a fresh "
        "conversation, and a skill is a note or a procedure that is called as a tool; unstale "
        "skills RUN FILE writes those that solved tasks used, and --task.skills reads them in "
        "training and eval (docs/your-own-task.md)",
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
        "--techniques minpro --objective.loss_type cispo --objective.clip_low 1",
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
        "--engine.quantise fp8 --trainer.quantise fp8: both round alike; with "
        "--engine.backend vllm, vLLM is started with its option for FP8, which was not run on "
        "a GPU",
        "The trainer and the embedded engine round to FP8 and compute in the run's own "
        "precision, because torch's FP8 products on a CPU are those of float32 and slower, so "
        "neither is faster, and the trainer has no FP8 products on a GPU. With a bfloat16 "
        "engine, rounding on both sides lowers the mean |log D| only from 0.0031 to 0.0028.",
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
        "--tree.branch peaks --majority.least 0 --selection.pool N --selection.test_time true "
        "--schedule.group_size 8 --task.env calculator, or other tasks with answers; with the "
        "embedded engine",
    ),
    _works(
        44,
        "SAGE (plans)",
        "a plan from the first attempt",
        "--techniques retry --retry.rule plan --retry.train_texts true; unstale attempt --plan "
        "attempts tasks so (docs/commands.md)",
    ),
    _works(
        45,
        "SQIRL",
        "the effective horizon as difficulty; fitted Q-iteration after random episodes",
        "unstale.algorithms.sqirl has stochastic_horizon and sqirl, with any regression and "
        "simulator, and for environments with given replies that unstale.testing.tabulate lists, "
        "also with several seeds (docs/your-own-task.md)",
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
        "unstale tool-traces makes the traces, with --tool python --url URL --url-model NAME "
        "by a model; --techniques 'segments tool_bonus' has the segments, the limits that "
        "grow and the bonus; --engine.load_tokens is the routing. tool_bonus needs an "
        "environment that reports tool_calls, as calculator, python, terminal and the desks "
        "do",
    ),
    _partly(
        48,
        "ReflectDrive-2, arXiv 2605.04647",
        "plans by masked diffusion, edited in place, with one reward for draft and edit",
        "unstale denoise plans: it decides, drafts and edits, after a start on plans disturbed "
        "along and across the road (docs/denoise.md). For text: --task.edit_request TEXT "
        "--task.edits in_place of dataset and synthesis, after unstale sft --mistakes 2",
        "Roads of 8 columns take the place of driving, unless the planner is a module:Class of "
        "yours. After training by the reward of the edited plan, edits gain more than after "
        "training by that of the draft (--draft-only), but less than before, where the paper's "
        "gain grew. Its stack for fast decoding is missing.",
    ),
    _partly(
        49,
        "P/D-Serve, arXiv 2408.08147",
        "groups of prefill and decode engines by scenario, whose ratio follows measured times",
        "--engine.processes 4 --engine.prefill_engines 2 --engine.prefill_ratio 1 "
        "--engine.send_cache true --engine.move_engines true: each task set of a mixed one, or "
        "with --engine.scenarios prefix each family of prompts, has a group; engines reject what "
        "they cannot begin, and the next one gets it; caches of embedded engines go without blocks "
        "over TCP, also between --cluster.engine_hosts; the ratio also changes while a version is "
        "served, as by unstale serve, whose /metrics has each group's time to the first token",
        "Caches go over TCP and through main memory, not from device to device by RDMA, and only "
        "those of the embedded engine: vLLM and SGLang servers send none. Time to the first token "
        "is measured with the embedded engine only.",
    ),
    _works(
        50,
        "PPO at 1M envs",
        "a diagnosis of too large steps",
        "--techniques outer_step, in which the groups of a step take the place of "
        "environments: the noise of two halves of a step's groups, its KL, a lower learning "
        "rate; unstale advise RUN says how minibatches grow with environments",
    ),
    _works(
        51,
        "SALT",
        "shared steps get a shared advantage",
        "--techniques step_groups --step_groups.rule salt",
    ),
    _works(
        52,
        "GDRO, arXiv 2601.02036",
        "a group objective on recorded images, without their sampler",
        "unstale denoise images --record FILE --without-noise, and then --recorded FILE "
        "--group-size 6, with the corrected score at each evaluation; FILE may be another "
        "sampler's, and module:Class in place of images is a flow model of yours, on its device "
        "and with --microbatch if it is large, not run on a GPU (docs/denoise-recorded.md). "
        "images are digits of 7 x 5 pixels, and likeness to them corrects the score in place of "
        "a judge; "
        "unstale.research.denoise.recorded.group_loss is the loss for a loop of yours. "
        "--techniques proxy reports reward and corrected score of episodes",
    ),
    _works(
        53,
        "MSSR",
        "one episode per task with a Beta baseline",
        "--techniques 'beta_sampler baseline unlikely_token_bonus' --baseline.centre prior "
        "--baseline.scale batch --baseline.discount_prior true --baseline.prior 4 "
        "--baseline.keep 0.96 --baseline.kl_target 0.06 --beta_sampler.read mean "
        "--beta_sampler.pick proportional --beta_sampler.solved 0.5 --beta_sampler.failed 0.5 "
        "--schedule.group_size 1 --selection.pool N",
    ),
    _works(
        54,
        "Periodic Asynchrony",
        "gradients while the batch is still generated",
        "--trainer.stream true, with --schedule.max_staleness 0 as in the paper or with more; "
        "what needs the whole batch before its gradient is refused; shared prompts are "
        "computed once. The gain is shown in simulation only",
    ),
    _works(
        55,
        "AEPO, arXiv 2510.14545",
        "branches, advantage and clip by entropy",
        "--techniques 'tree tree_advantage token_entropy_advantage preserve_clip' "
        "--tree.branch tool --tree.roots 1, with the embedded engine",
    ),
    _works(
        56,
        "MARS^2",
        "several policies and roles in one search tree over answers",
        "--techniques search has roles of one policy; with --search.folder DIR --search.node NAME "
        "several policies, each trained by a run of its own, share one tree per task: a draw among "
        "them says which one makes the next answer, and rewards count parents and siblings by the "
        "others, as their runs wrote them",
    ),
    _partly(
        57,
        "CJ-GRPO, EOSER, ASS",
        "train exactly the decoded states of masked diffusion, in few and growing steps",
        "unstale denoise text --schedule ascending --eoser 0.01 --likelihood trajectory: a small "
        "bidirectional transformer decodes whole texts of 8 tokens; --schedule one or equal, "
        "--eoser 1 and --likelihood one-step are the paper's comparisons (docs/denoise-text.md)",
        "Steps, late end and likelihoods are those of the built-in texts: for a masked language "
        "model of yours, a Denoiser must have them, in Python. Decoding in blocks is missing.",
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
        "--techniques distil --distil.teacher FOLDER (docs/distillation.md); "
        "--distil.divergence mixed is the divergence of the paper, --distil.advantage_coef "
        "adds rewards; a fixed data set is not mixed in",
    ),
    _partly(
        61,
        "ESTR, arXiv 2607.22186",
        "a trust region whose width grows with a token's entropy",
        "--techniques estr --estr.tau TAU",
        "The mask is made once per batch, tau has no default because the paper's value is not "
        "known, and servers are refused.",
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
    "other policies than language models": ("unstale denoise",),
    "figures only": ("balance", "proxy", "rollout_figures"),
}
"""For each thing that a user may want: the techniques and commands for it. Each is listed once."""
COMMANDS: Mapping[str, str] = {
    "unstale attempt": "Attempt each task several times, and choose by votes or by comparisons",
    "unstale denoise": "Train a small policy that draws images, plans or texts in steps",
    "unstale route": "Send each task to the policy that probably solves it at the least cost",
    "unstale synthesize": "Let a model write tasks, and keep those whose answers are verified",
    "unstale tool-traces": "Turn plain reasoning into conversations with tool calls",
}
"""A description of each command in `WISHES`, by the command's name."""
