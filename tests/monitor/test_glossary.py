"""The glossary is complete, and the documentation is written from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.monitor.glossary import _GROUPS, GLOSSARY, glossary_markdown, unknown_metric_message

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"

#: The names other parts log; one that is missing here would stop a run.
CONTRACT_TEXT = """
score/mean score/std score/min score/max reward/mean reward/std reward/shaped_return_mean
kl/token_mean kl/token_k3_mean kl/sequence_mean kl/coef
policy/loss policy/entropy policy/clip_fraction policy/dual_clip_fraction policy/ratio_mean
policy/ratio_max policy/first_ratio_deviation policy/approx_kl policy/kl_loss policy/grad_norm
policy/lr policy/skipped_steps value/loss value/clip_fraction value/explained_variance value/mean
value/grad_norm value/lr value/skipped_steps returns/mean returns/std advantages/mean
advantages/std response/length_mean response/length_max response/finished_fraction
response/empty_count rollout/logprob_gap_mean rollout/logprob_gap_max
time/rollout time/score time/old_logprobs time/reference time/values time/advantages
time/update_critic time/update_actor time/evaluate time/save time/step
throughput/samples_per_second throughput/tokens_per_second memory/peak_gib data/epoch
eval/score_greedy_mean eval/score_greedy_ci95 eval/score_sampled_mean eval/score_sampled_ci95
eval/score_sampled_std eval/win_rate eval/win_rate_ci95 eval/kl_sequence_mean eval/length_mean
eval/finished_fraction eval/distinct_1 eval/distinct_2 eval/same_opening
sft/loss sft/perplexity sft/tokens sft/grad_norm sft/lr eval/loss eval/perplexity
rm/loss rm/accuracy rm/margin_mean rm/chosen_mean rm/rejected_mean rm/grad_norm rm/lr
eval/accuracy eval/accuracy_ci_low eval/accuracy_ci_high eval/score_mean eval/score_std
eval/length_bias eval/accuracy_small_margin eval/accuracy_medium_margin
eval/accuracy_large_margin
"""


def test_document_is_what_the_glossary_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == glossary_markdown()


@pytest.mark.parametrize("name", CONTRACT_TEXT.split())
def test_contract_names_have_entries(name: str) -> None:
    assert name in GLOSSARY


@pytest.mark.parametrize("entry", GLOSSARY.values(), ids=lambda entry: entry.name)
def test_entries_are_filled(entry) -> None:
    for part in ("meaning", "formula", "healthy", "advice"):
        assert getattr(entry, part).strip(), f"{entry.name}: {part} is empty"
    assert entry.stages and set(entry.stages) <= {"ppo", "sft", "rm"}
    assert entry.name.split("/")[0] in _GROUPS
    assert f"### `{entry.name}`" in glossary_markdown()


def test_no_name_is_defined_twice() -> None:
    text = glossary_markdown()
    assert text.count("\n### ") == len(GLOSSARY)


def test_unknown_name_gets_a_suggestion() -> None:
    assert "did you mean 'policy/entropy'?" in unknown_metric_message("policy/entropi")
