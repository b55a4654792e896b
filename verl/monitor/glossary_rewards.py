"""Glossary entries of what PPO is paid with: scores, rewards, KL, returns, responses, rollout."""

from __future__ import annotations

from verl.monitor.metric import Metric

SCORE = (
    Metric(
        "score/mean",
        "score",
        "Raw reward-model score of the sampled responses.",
        "mean of score over the samples of the step",
        "rises gently, then levels off; noisy from step to step",
        "Flat: raise train.ppo.actor_lr or lower kl_coef. Falling or oscillating: lower actor_lr, "
        "raise batch_size. Rising while answers read worse: reward hacking, raise kl_coef.",
    ),
    Metric(
        "score/std",
        "score",
        "Spread of the raw scores within the step.",
        "standard deviation (n - 1) of score over the samples",
        "near the start policy's spread, slowly shrinking",
        "Near 0: all answers look alike to the reward model, there is nothing left to learn from; "
        "look at samples and entropy.",
    ),
    Metric(
        "score/min",
        "score",
        "Lowest raw score of the step.",
        "min of score",
        "above the worst score of the start policy",
        "Far outliers: read those samples; train.ppo.reward_clip bounds their weight.",
    ),
    Metric(
        "score/max",
        "score",
        "Highest raw score of the step.",
        "max of score",
        "within the range the reward model gave on its held-out set",
        "Far above that range: the policy found an input the reward model misjudges. Read it.",
    ),
    Metric(
        "reward/mean",
        "reward",
        "What PPO is paid per response, before the KL penalty.",
        "mean over samples of: normalised score, clipped, minus the missing-EOS and overlong "
        "penalties",
        "follows score/mean; around 0 when normalize_reward is on",
        "Differs from the score's trend: penalties or clipping dominate; compare with "
        "response/finished_fraction and response/length_mean.",
    ),
    Metric(
        "reward/std",
        "reward",
        "Spread of that payment within the step.",
        "standard deviation (n - 1) over the samples",
        "0.3 to 3; about 1 when normalize_reward is on",
        "Much larger: use normalize_reward or reward_clip. Near 0: nothing to learn from.",
    ),
    Metric(
        "reward/shaped_return_mean",
        "reward",
        "What a response earns in all, the KL penalty included. Not the raw score.",
        "mean over samples of the sum over tokens of (reward on the last token - kl/coef * KL)",
        "rises; stays below reward/mean by kl/coef * kl/sequence_mean",
        "Falls while reward/mean rises: the KL penalty outweighs the gain; that is its job, or "
        "kl_coef is too high.",
    ),
)

KL = (
    Metric(
        "kl/token_mean",
        "nats",
        "KL of the policy from the reference, per response token.",
        "mean over valid tokens of log pi(a) - log pi_ref(a) (k1)",
        "0 at step 1, then 0.002 to 0.2 depending on the length of the answers",
        "See kl/sequence_mean, which does not depend on how tokens are averaged.",
    ),
    Metric(
        "kl/token_k3_mean",
        "nats",
        "The same KL by an estimator that is never negative.",
        "mean over valid tokens of exp(-d) - 1 + d, d = log pi(a) - log pi_ref(a) "
        "(k3, Schulman 2020)",
        "close to kl/token_mean, less noisy",
        "Far above kl/token_mean: a few tokens have drifted very far; look at the samples.",
    ),
    Metric(
        "kl/sequence_mean",
        "nats",
        "KL of the policy from the reference, per whole response.",
        "mean over samples of the sum over valid tokens of log pi(a) - log pi_ref(a)",
        "0 at step 1, grows, then levels off below monitor.alerts.sequence_kl.limit; "
        "1 to 15 is usual",
        "Keeps growing: raise kl_coef or use kl_controller=adaptive. Clearly negative: the "
        "reference is not the start policy, or log-probs are inconsistent. Stays at 0: the "
        "learning rate is too low.",
    ),
    Metric(
        "kl/coef",
        "",
        "Weight of the KL penalty in the reward.",
        "train.ppo.kl_coef, or the adaptive controller's value (Ziegler et al. 2019)",
        "constant, or settles after some steps",
        "At a tiny or huge value with kl_controller=adaptive: kl_target does not suit the length "
        "of the responses.",
    ),
)

RETURNS = (
    Metric(
        "returns/mean",
        "reward",
        "What the critic learns to predict.",
        "mean over valid tokens of advantage (before whitening) + value",
        "follows reward/shaped_return_mean",
        "See value/explained_variance.",
    ),
    Metric(
        "returns/std",
        "reward",
        "Spread of the critic's targets.",
        "standard deviation over valid tokens",
        "stable, of the order of reward/std",
        "Grows without bound: normalise or clip the reward.",
    ),
    Metric(
        "advantages/mean",
        "reward",
        "Mean advantage before whitening.",
        "mean over valid tokens of the GAE advantage (Schulman et al. 2016)",
        "near 0 once the critic has learned",
        "Large for many steps: the critic lags; critic_warmup_steps, or a higher critic_lr.",
    ),
    Metric(
        "advantages/std",
        "reward",
        "Spread of the advantages before whitening.",
        "standard deviation over valid tokens",
        "shrinks as the critic learns",
        "Near 0: no signal; whitening then only amplifies noise.",
    ),
)

RESPONSE = (
    Metric(
        "response/length_mean",
        "tokens",
        "Length of the sampled responses, the EOS included.",
        "mean over samples of the number of valid response tokens",
        "changes slowly; within about half to double of the start policy's",
        "Runs up: the reward model likes length (see eval/length_bias); overlong_penalty. "
        "Collapses: read the samples, raise kl_coef.",
    ),
    Metric(
        "response/length_max",
        "tokens",
        "Longest response of the step.",
        "max over samples",
        "at or below data.response_length",
        "Always at the limit: some responses never end, see response/finished_fraction.",
    ),
    Metric(
        "response/finished_fraction",
        "fraction",
        "Responses that ended by themselves rather than at the length limit.",
        "samples with finish_reason = stop / samples",
        "above 0.9, not falling",
        "Low from the start: raise data.response_length, check the chat template's end token. "
        "Falling: missing_eos_penalty or overlong_penalty.",
    ),
    Metric(
        "response/empty_count",
        "samples",
        "Responses that contain no text, only an end token.",
        "number of samples",
        "0 or nearly",
        "Grows: the reward model prefers silence; set rollout.min_tokens and check its data.",
    ),
)

ROLLOUT = (
    Metric(
        "rollout/logprob_gap_mean",
        "nats",
        "Disagreement of sampler and trainer about the sampled tokens' log-probs.",
        "mean over valid tokens of |log pi_sampler(a) - log pi_trainer(a)|",
        "below 1e-5 in float32, below 0.02 in bfloat16",
        "Larger: the sampler has old weights, another temperature, or too little precision.",
    ),
    Metric(
        "rollout/logprob_gap_max",
        "nats",
        "The largest such disagreement.",
        "max over valid tokens",
        "below 1e-3 in float32, below 0.5 in bfloat16",
        "Single large gaps: precision. Large from step 1 on: a real inconsistency.",
    ),
)

ENTRIES = SCORE + KL + RETURNS + RESPONSE + ROLLOUT
