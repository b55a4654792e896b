"""Which curves each report shows: declarations only, drawn by `draw.py`.

A plot has one panel, or two stacked ones where the quantities have different units.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.monitor.report.load import RunData, Stage


@dataclass(frozen=True)
class Curve:
    """One metric in a panel.

    Attributes:
        metric: glossary name.
        label: legend text.
        kind: records it is taken from. `eval` is drawn as points joined by a line.
        spread: metric drawn as a band (train) or error bars (eval) of +- its value.
        bounds: metrics of the lower and upper end, instead of `spread`.
    """

    metric: str
    label: str
    kind: str = "train"
    spread: str | None = None
    bounds: tuple[str, str] | None = None


@dataclass(frozen=True)
class Panel:
    """Axes with a unit; `range` fixes the limits where the quantity has natural ones."""

    ylabel: str
    curves: tuple[Curve, ...]
    range: tuple[float, float] | None = None
    limit_key: str | None = None


@dataclass(frozen=True)
class Plot:
    """A titled figure with a sentence on how to read it."""

    key: str
    title: str
    caption: str
    panels: tuple[Panel, ...]

    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics in it, in order."""
        return tuple(dict.fromkeys(c.metric for panel in self.panels for c in panel.curves))


#: Stage timings that are stacked: legend text -> metrics.
TIMINGS: dict[str, tuple[str, ...]] = {
    "rollout": ("time/rollout",),
    "score": ("time/score",),
    "log-probs, values": (
        "time/old_logprobs", "time/reference", "time/values", "time/advantages",
    ),
    "update critic": ("time/update_critic",),
    "update actor": ("time/update_actor",),
    "evaluate": ("time/evaluate",),
    "save": ("time/save",),
}  # fmt: skip

_PPO = (
    Plot(
        "score", "Reward-model score",
        "Training batches with their spread; held-out answers with 95 % intervals.",
        (Panel("score", (
            Curve("score/mean", "training batch ± std", spread="score/std"),
            Curve("eval/score_sampled_mean", "held-out, sampled", "eval",
                  "eval/score_sampled_ci95"),
            Curve("eval/score_greedy_mean", "held-out, greedy", "eval", "eval/score_greedy_ci95"),
        )),),
    ),
    Plot(
        "kl", "Distance from the reference policy",
        "Should level off below the alert limit. Below: the penalty's weight.",
        (
            Panel("KL [nats / response]", (
                Curve("kl/sequence_mean", "training"),
                Curve("eval/kl_sequence_mean", "held-out", "eval"),
            ), limit_key="monitor.alerts.sequence_kl.limit"),
            Panel("coefficient", (Curve("kl/coef", "coefficient"),)),
        ),
    ),
    Plot(
        "reward", "Reward paid to PPO",
        "After normalisation and penalties; the shaped return also pays for KL.",
        (Panel("reward", (
            Curve("reward/mean", "before KL"),
            Curve("reward/shaped_return_mean", "after KL (shaped return)"),
        )),),
    ),
    Plot(
        "entropy", "Policy entropy", "A slow fall is normal, a collapse is not.",
        (Panel("entropy [nats / token]", (Curve("policy/entropy", "entropy"),)),),
    ),
    Plot(
        "explained_variance", "Value: explained variance",
        "Share of the returns that the critic predicts; at or below 0 it does not help.",
        (Panel("explained variance", (
            Curve("value/explained_variance", "explained variance"),
        )),),
    ),
    Plot(
        "clip", "Clip fraction", "Tokens whose update was stopped by clipping.",
        (Panel("fraction of tokens", (
            Curve("policy/clip_fraction", "policy"), Curve("value/clip_fraction", "value"),
        )),),
    ),
    Plot(
        "length", "Response length and endings",
        "Length drift and unfinished answers are the usual signs of reward hacking.",
        (
            Panel("tokens", (
                Curve("response/length_mean", "mean, training"),
                Curve("eval/length_mean", "mean, held-out", "eval"),
            )),
            Panel("finished", (
                Curve("response/finished_fraction", "training"),
                Curve("eval/finished_fraction", "held-out", "eval"),
            ), (0, 1)),
        ),
    ),
    Plot(
        "variety", "Held-out: wins and variety",
        "Win rate against the start policy; distinct words and word pairs over all answers; share "
        "of answers with the most frequent opening.",
        (Panel("fraction", (
            Curve("eval/win_rate", "win rate", "eval", "eval/win_rate_ci95"),
            Curve("eval/distinct_1", "distinct-1", "eval"),
            Curve("eval/distinct_2", "distinct-2", "eval"),
            Curve("eval/same_opening", "same opening", "eval"),
        ), (0, 1)),),
    ),
    Plot(
        "gradients", "Gradient norms", "Before clipping to max_grad_norm.",
        (Panel("norm", (
            Curve("policy/grad_norm", "actor"), Curve("value/grad_norm", "critic"),
        )),),
    ),
    Plot(
        "losses", "Losses", "The policy loss need not fall; the value loss should.",
        (
            Panel("policy", (Curve("policy/loss", "policy"),)),
            Panel("value", (Curve("value/loss", "value"),)),
        ),
    ),
)  # fmt: skip

_SFT = (
    Plot(
        "loss", "Loss", "Held-out loss should fall with the training loss.",
        (Panel("nats / token", (
            Curve("sft/loss", "training"), Curve("eval/loss", "held-out", "eval"),
        )),),
    ),
    Plot(
        "perplexity", "Perplexity", "The loss as a number of equally likely choices.",
        (Panel("perplexity", (
            Curve("sft/perplexity", "training"), Curve("eval/perplexity", "held-out", "eval"),
        )),),
    ),
    Plot("gradients", "Gradient norm", "Before clipping to max_grad_norm.",
         (Panel("norm", (Curve("sft/grad_norm", "gradient"),)),)),
    Plot("lr", "Learning rate", "Follows the schedule.",
         (Panel("learning rate", (Curve("sft/lr", "learning rate"),)),)),
    Plot("tokens", "Tokens with loss per step", "Small values: short or truncated answers.",
         (Panel("tokens", (Curve("sft/tokens", "tokens"),)),)),
)  # fmt: skip

_RM = (
    Plot(
        "accuracy", "Accuracy", "Pairs whose chosen answer scores higher; chance is 0.5.",
        (Panel("fraction of pairs", (
            Curve("rm/accuracy", "training"),
            Curve("eval/accuracy", "held-out, 95 %", "eval",
                  bounds=("eval/accuracy_ci_low", "eval/accuracy_ci_high")),
        ), (0, 1)),),
    ),
    Plot(
        "loss", "Bradley-Terry loss", "Starts at ln 2 = 0.693.",
        (Panel("nats / pair", (
            Curve("rm/loss", "training"), Curve("eval/loss", "held-out", "eval"),
        )),),
    ),
    Plot(
        "scores", "Scores of chosen and rejected answers", "The gap should open.",
        (Panel("score", (
            Curve("rm/chosen_mean", "chosen"), Curve("rm/rejected_mean", "rejected"),
            Curve("rm/margin_mean", "margin"),
        )),),
    ),
    Plot(
        "buckets", "Held-out accuracy by margin", "Clear pairs should be ranked better.",
        (Panel("fraction of pairs", (
            Curve("eval/accuracy_small_margin", "small", "eval"),
            Curve("eval/accuracy_medium_margin", "medium", "eval"),
            Curve("eval/accuracy_large_margin", "large", "eval"),
        ), (0, 1)),),
    ),
    Plot(
        "statistics", "Held-out scores and length bias",
        "Mean ± std is what `reference` normalisation uses; bias beyond ±0.4 pays for length.",
        (
            Panel("score", (Curve("eval/score_mean", "mean ± std", "eval", "eval/score_std"),)),
            Panel("length bias", (Curve("eval/length_bias", "correlation", "eval"),), (-1, 1)),
        ),
    ),
    Plot("gradients", "Gradient norm", "Before clipping to max_grad_norm.",
         (Panel("norm", (Curve("rm/grad_norm", "gradient"),)),)),
    Plot("lr", "Learning rate", "Follows the schedule.",
         (Panel("learning rate", (Curve("rm/lr", "learning rate"),)),)),
)  # fmt: skip

_BY_STAGE: dict[Stage, tuple[Plot, ...]] = {"ppo": _PPO, "sft": _SFT, "rm": _RM}


def plots_for(run: RunData) -> list[Plot]:
    """The plots of the run's stage that have at least one value to show."""
    return [
        plot
        for plot in _BY_STAGE[run.stage]
        if any(value == value for name in plot.metrics() for value in run.series(name)[1])
    ]
