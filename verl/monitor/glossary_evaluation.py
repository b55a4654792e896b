"""Glossary entries of held-out evaluation: PPO, SFT and reward model."""

from __future__ import annotations

from verl.monitor.metric import Metric

_CI = "1.96 * standard deviation (n - 1) / sqrt(number of held-out prompts)"
_CI_ADVICE = "Too wide to decide anything: raise eval.num_prompts."
_RM = ("rm",)

EVAL_PPO = (
    Metric(
        "eval/score_greedy_mean",
        "score",
        "Reward-model score of greedy held-out answers.",
        "mean over the held-out prompts, temperature 0",
        "rises above the start policy's",
        "Flat while score/mean rises: overfitting to the training prompts.",
    ),
    Metric(
        "eval/score_greedy_ci95",
        "score",
        "Half width of its 95 % confidence interval.",
        _CI,
        "well below the gain you hope for",
        _CI_ADVICE,
    ),
    Metric(
        "eval/score_sampled_mean",
        "score",
        "Reward-model score of sampled held-out answers.",
        "mean over the held-out prompts, at eval.temperature",
        "rises by 1 standard deviation of the start policy or more",
        "Flat: raise actor_lr, lower kl_coef, train longer.",
    ),
    Metric(
        "eval/score_sampled_ci95",
        "score",
        "Half width of its 95 % confidence interval.",
        _CI,
        "well below the gain you hope for",
        _CI_ADVICE,
    ),
    Metric(
        "eval/score_sampled_std",
        "score",
        "Spread of the sampled scores; at step 0 the yardstick for the whole run.",
        "standard deviation (n - 1) over the held-out prompts",
        "stable or shrinking slowly",
        "Near 0: every prompt gets the same answer. Read the samples.",
    ),
    Metric(
        "eval/win_rate",
        "fraction",
        "How often the answer beats the start policy's answer to the same prompt.",
        "(wins + ties / 2) / prompts, by reward-model score of sampled answers",
        "0.5 at step 0, then above",
        "Below 0.5: the policy got worse. Near 1 with odd answers: reward hacking.",
    ),
    Metric(
        "eval/win_rate_ci95",
        "fraction",
        "Half width of its 95 % confidence interval.",
        _CI,
        "below 0.1",
        _CI_ADVICE,
    ),
    Metric(
        "eval/kl_sequence_mean",
        "nats",
        "KL from the reference on held-out prompts.",
        "as kl/sequence_mean, on the sampled held-out answers",
        "close to kl/sequence_mean, below the alert limit",
        "See kl/sequence_mean.",
    ),
    Metric(
        "eval/length_mean",
        "tokens",
        "Length of the held-out answers.",
        "mean number of tokens of the sampled answers, the EOS included",
        "within about half to double of step 0",
        "See response/length_mean.",
    ),
    Metric(
        "eval/finished_fraction",
        "fraction",
        "Held-out answers that ended by themselves.",
        "sampled answers with finish_reason = stop / answers",
        "above 0.9, not falling",
        "See response/finished_fraction.",
    ),
    Metric(
        "eval/distinct_1",
        "fraction",
        "Variety of words over all held-out answers.",
        "different words / words, split at white space, over all sampled answers (Li et al. 2016)",
        "falls by less than a third from step 0",
        "Drops: answers repeat each other or themselves; raise kl_coef or entropy_coef.",
    ),
    Metric(
        "eval/distinct_2",
        "fraction",
        "Variety of word pairs over all held-out answers.",
        "different pairs of neighbouring words / such pairs, over all sampled answers",
        "falls by less than a third from step 0",
        "See eval/distinct_1.",
    ),
    Metric(
        "eval/same_opening",
        "fraction",
        "Held-out answers that begin with the same three words.",
        "answers with the most frequent opening / sampled answers",
        "below 0.3",
        "Rises: the policy has found an opening that the reward model likes; raise kl_coef.",
    ),
)

EVAL_SUPERVISED = (
    Metric(
        "eval/loss",
        "nats",
        "Loss on the held-out file.",
        "as the training loss on held-out rows; for the reward model without margin and centring",
        "falls with the training loss",
        "Rises while the training loss falls: overfitting; fewer epochs, lower lr.",
        ("sft", "rm"),
    ),
    Metric(
        "eval/perplexity",
        "",
        "The held-out loss as a number of equally likely choices.",
        "exp(eval/loss)",
        "falls",
        "See eval/loss.",
        ("sft",),
    ),
)

EVAL_REWARD_MODEL = (
    Metric(
        "eval/accuracy",
        "fraction",
        "Held-out pairs whose chosen answer scores higher.",
        "pairs with s_chosen > s_rejected / pairs",
        "0.65 to 0.75 on noisy human labels, above 0.85 on clear-cut pairs",
        "Near 0.5: not learned; more data, higher lr, a better base model.",
        _RM,
    ),
    Metric(
        "eval/accuracy_ci_low",
        "fraction",
        "Lower end of its 95 % confidence interval.",
        "Wilson score interval of eval/accuracy",
        "above 0.5",
        "Below 0.5: no evidence that anything was learned.",
        _RM,
    ),
    Metric(
        "eval/accuracy_ci_high",
        "fraction",
        "Upper end of its 95 % confidence interval.",
        "Wilson score interval of eval/accuracy",
        "near eval/accuracy",
        "Far from it: use more held-out pairs.",
        _RM,
    ),
    Metric(
        "eval/score_mean",
        "score",
        "Mean score of the held-out answers, chosen and rejected.",
        "mean over all held-out answers",
        "near 0 with centering_coef",
        "Far from 0: harmless for PPO with normalize_reward, else centering_coef=0.01.",
        _RM,
    ),
    Metric(
        "eval/score_std",
        "score",
        "Spread of the held-out scores; kept for normalisation.",
        "standard deviation (n - 1) over all held-out answers",
        "0.5 to 5",
        "Near 0: the model does not distinguish. Very large: overconfident.",
        _RM,
    ),
    Metric(
        "eval/length_bias",
        "",
        "How far scores just follow length.",
        "correlation over pairs of s_chosen - s_rejected with length_chosen - length_rejected",
        "-0.3 to 0.3",
        "Beyond +-0.4: PPO will learn to write longer (or shorter) answers; "
        "balance the lengths in the pairs.",
        _RM,
    ),
    Metric(
        "eval/accuracy_small_margin",
        "fraction",
        "Accuracy on the third of close pairs.",
        "accuracy over the third of pairs with the smallest |s_chosen - s_rejected|",
        "above 0.5",
        "Near 0.5: close pairs are coin flips to this model, which is common.",
        _RM,
    ),
    Metric(
        "eval/accuracy_medium_margin",
        "fraction",
        "Accuracy on the middle third of pairs.",
        "accuracy over the middle third of pairs by |s_chosen - s_rejected|",
        "above the small-margin accuracy",
        "See eval/accuracy.",
        _RM,
    ),
    Metric(
        "eval/accuracy_large_margin",
        "fraction",
        "Accuracy on the third of clear pairs.",
        "accuracy over the third of pairs with the largest |s_chosen - s_rejected|",
        "above 0.8",
        "Low: confidently wrong; look for swapped labels.",
        _RM,
    ),
)

ENTRIES = EVAL_PPO + EVAL_SUPERVISED + EVAL_REWARD_MODEL
