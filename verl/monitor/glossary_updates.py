"""Glossary entries of the optimiser: policy and value updates of PPO, SFT, reward model."""

from __future__ import annotations

from verl.monitor.metric import Metric

_GRAD_FORMULA = "global 2-norm of all gradients before clipping, mean over the steps taken"
_GRAD_ADVICE = (
    "Above max_grad_norm nearly always: lower the learning rate. Single spikes are clipped and "
    "harmless. 0: nothing is trained, check train_layers."
)
_LR_FORMULA = "the schedule's value at the last optimiser step"
_SKIP_FORMULA = "optimiser steps whose gradient was not finite; such a step is not taken"
_SKIP_ADVICE = (
    "Any: lower the learning rate or use dtype=float32. After max_bad_steps in a row the run "
    "stops by itself."
)

POLICY = (
    Metric(
        "policy/loss",
        "",
        "Clipped surrogate loss, with entropy and KL terms if they are on.",
        "-min(r A, clip(r, 1 - e, 1 + e) A) aggregated (Schulman et al. 2017, eq. 7) "
        "- entropy_coef * entropy + kl_loss_coef * KL",
        "small and of either sign; it does not have to fall",
        "Its size says little about success: watch the score and the KL instead.",
    ),
    Metric(
        "policy/entropy",
        "nats",
        "Uncertainty of the policy about the next token.",
        "mean over valid tokens of -sum over the vocabulary of p log p, at rollout.temperature",
        "falls slowly; not below a third of the start value",
        "Collapses: the answers become one answer; raise kl_coef or entropy_coef, lower actor_lr. "
        "Explodes: lower actor_lr.",
    ),
    Metric(
        "policy/clip_fraction",
        "fraction",
        "Tokens whose update was stopped by clipping.",
        "tokens where the clipped term is the smaller one / valid tokens, all updates of the step",
        "0.01 to 0.2",
        "Above 0.3: lower actor_lr or epochs. Always 0: the steps are tiny, actor_lr can rise.",
    ),
    Metric(
        "policy/dual_clip_fraction",
        "fraction",
        "Tokens whose loss was bounded by the dual clip.",
        "tokens with A < 0 and ratio > dual_clip / valid tokens (Ye et al. 2020)",
        "0, or below 0.001",
        "More: the policy moves too far in one step; lower actor_lr or epochs.",
    ),
    Metric(
        "policy/ratio_mean",
        "",
        "Probability of the sampled tokens, new over old policy.",
        "mean over valid tokens and updates of exp(log pi - log pi_old)",
        "0.98 to 1.02",
        "Away from 1: too large steps, or inconsistent log-probs: policy/first_ratio_deviation.",
    ),
    Metric(
        "policy/ratio_max",
        "",
        "Largest ratio of the step.",
        "max over valid tokens and updates",
        "below 3",
        "Larger: rare tokens became likely in one step; lower actor_lr or epochs.",
    ),
    Metric(
        "policy/first_ratio_deviation",
        "",
        "How far the ratio is from 1 before anything was updated. A self-test of the set-up.",
        "max over valid tokens of |ratio - 1| in the step's first forward pass",
        "below 1e-5 in float32, below 1e-2 in bfloat16",
        "Larger: dropout, temperature, positions or weights differ between the two passes. The "
        "updates cannot be trusted.",
    ),
    Metric(
        "policy/approx_kl",
        "nats",
        "KL between the policy before and after this step's updates.",
        "mean over valid tokens and updates of log pi_old(a) - log pi(a)",
        "below 0.02",
        "Larger: lower actor_lr or epochs. This is not the KL from the reference (kl/*).",
    ),
    Metric(
        "policy/kl_loss",
        "nats",
        "KL from the reference as a term of the loss.",
        "kl_loss_estimator averaged over valid tokens; only when kl_loss_coef > 0",
        "like kl/token_k3_mean",
        "Grows: raise kl_loss_coef.",
    ),
    Metric(
        "policy/grad_norm",
        "",
        "Size of the actor's gradient.",
        _GRAD_FORMULA,
        "steady, of the order of max_grad_norm or below",
        _GRAD_ADVICE,
    ),
    Metric(
        "policy/lr",
        "",
        "Learning rate of the actor.",
        _LR_FORMULA,
        "follows train.ppo.lr_schedule",
        "0 before the end: total steps were miscounted.",
    ),
    Metric(
        "policy/skipped_steps",
        "steps",
        "Actor updates that were not taken.",
        _SKIP_FORMULA,
        "0",
        _SKIP_ADVICE,
    ),
)

VALUE = (
    Metric(
        "value/loss",
        "reward^2",
        "Squared error of the critic, with value clipping.",
        "0.5 * max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) aggregated",
        "falls, then levels off",
        "Grows: lower critic_lr, normalise the reward.",
    ),
    Metric(
        "value/clip_fraction",
        "fraction",
        "Tokens where value clipping decided the loss.",
        "tokens where the clipped error is the larger one / valid tokens",
        "below 0.3",
        "High for long: value_clip is small against the rewards' size; raise it or set null.",
    ),
    Metric(
        "value/explained_variance",
        "",
        "How much of the returns the critic predicts.",
        "1 - Var(returns - values) / Var(returns) over valid tokens, values from before the update",
        "rises from around 0 towards 0.3 to 0.9",
        "At or below 0 for long: the critic adds noise; start it from the reward model, use "
        "critic_warmup_steps, raise critic_lr.",
    ),
    Metric(
        "value/mean",
        "reward",
        "Mean predicted return.",
        "mean of V over valid tokens",
        "follows returns/mean",
        "Drifts away from it: the critic lags or diverges.",
    ),
    Metric(
        "value/grad_norm",
        "",
        "Size of the critic's gradient.",
        _GRAD_FORMULA,
        "steady; larger than the actor's is normal",
        _GRAD_ADVICE,
    ),
    Metric(
        "value/lr",
        "",
        "Learning rate of the critic.",
        _LR_FORMULA,
        "follows the schedule, 10 x the actor's by default",
        "0 before the end: total steps were miscounted.",
    ),
    Metric(
        "value/skipped_steps",
        "steps",
        "Critic updates that were not taken.",
        _SKIP_FORMULA,
        "0",
        _SKIP_ADVICE,
    ),
)

SFT = (
    Metric(
        "sft/loss",
        "nats",
        "Cross-entropy of the answers' tokens.",
        "sum over trained tokens of -log p(token) / number of them",
        "falls, then levels off",
        "Flat: raise lr. Spikes or NaN: lower lr.",
        ("sft",),
    ),
    Metric(
        "sft/perplexity",
        "",
        "The loss as a number of equally likely choices.",
        "exp(sft/loss)",
        "falls towards 2 to 20, depending on the text",
        "See sft/loss.",
        ("sft",),
    ),
    Metric(
        "sft/tokens",
        "tokens",
        "Tokens that carried loss in the step.",
        "count over the whole batch",
        "steady",
        "Much smaller than the batch: check train.sft.train_on and truncation.",
        ("sft",),
    ),
    Metric(
        "sft/grad_norm",
        "",
        "Size of the gradient.",
        _GRAD_FORMULA,
        "steady, of the order of max_grad_norm or below",
        _GRAD_ADVICE,
        ("sft",),
    ),
    Metric(
        "sft/lr",
        "",
        "Learning rate.",
        _LR_FORMULA,
        "follows train.sft.lr_schedule",
        "0 before the end: total steps were miscounted.",
        ("sft",),
    ),
)

REWARD_MODEL = (
    Metric(
        "rm/loss",
        "nats",
        "Bradley-Terry loss.",
        "mean over pairs of -log sigmoid(s_chosen - s_rejected - margin) "
        "+ centering_coef * (s_chosen + s_rejected)^2",
        "starts at ln 2 = 0.693 and falls",
        "Stays at 0.693: nothing is learned, raise lr. Near 0: overfitting.",
        ("rm",),
    ),
    Metric(
        "rm/accuracy",
        "fraction",
        "Training pairs whose chosen answer scores higher.",
        "pairs with s_chosen > s_rejected / pairs",
        "0.6 to 0.95, near eval/accuracy",
        "Far above eval/accuracy: overfitting; one epoch, lower lr, more data.",
        ("rm",),
    ),
    Metric(
        "rm/margin_mean",
        "score",
        "Mean gap of chosen over rejected.",
        "mean over pairs of s_chosen - s_rejected",
        "grows, then levels off",
        "Grows without bound: overconfident; centering_coef, lower lr.",
        ("rm",),
    ),
    Metric(
        "rm/chosen_mean",
        "score",
        "Mean score of the chosen answers.",
        "mean of s_chosen",
        "above rm/rejected_mean",
        "Drifts far from 0 together with rm/rejected_mean: centering_coef=0.01.",
        ("rm",),
    ),
    Metric(
        "rm/rejected_mean",
        "score",
        "Mean score of the rejected answers.",
        "mean of s_rejected",
        "below rm/chosen_mean",
        "See rm/chosen_mean.",
        ("rm",),
    ),
    Metric(
        "rm/grad_norm", "", "Size of the gradient.", _GRAD_FORMULA, "steady", _GRAD_ADVICE, ("rm",)
    ),
    Metric(
        "rm/lr",
        "",
        "Learning rate.",
        _LR_FORMULA,
        "follows train.reward_model.lr_schedule",
        "0 before the end: total steps were miscounted.",
        ("rm",),
    ),
)

ENTRIES = POLICY + VALUE + SFT + REWARD_MODEL
