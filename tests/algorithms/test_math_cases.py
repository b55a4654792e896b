"""Every numeric case of tests/cases/math.json, run against verl.algorithms.

A case states what is right (`expected`, or `accept_any` where the field disagrees) and, in
`wrong_answers`, what a known bug returns: a failing test names the bug whose answer it got.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from verl.algorithms.advantages import gae, grpo, remax, rloo
from verl.algorithms.aggregation import aggregate, pool, token_weights
from verl.algorithms.arithmetic import batch_arithmetic, step_counts, validate_batches
from verl.algorithms.controllers import AdaptiveKLController
from verl.algorithms.kl import KL_ESTIMATORS, kl_penalty
from verl.algorithms.logprobs import (
    entropy_from_logits,
    logprobs_from_logits,
    position_ids,
    response_logprobs,
    response_mask,
)
from verl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from verl.algorithms.partition import karmarkar_karp, plan_microbatches
from verl.algorithms.policy_loss import clipped
from verl.algorithms.preference import bradley_terry
from verl.algorithms.rewards import token_rewards
from verl.algorithms.value_loss import value_loss

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "cases" / "math.json").read_text()
)["cases"]
Case = dict[str, Any]
Runner = Callable[[Case], None]
RUNNERS: dict[str, Runner] = {}


def runs(*functions: str) -> Callable[[Runner], Runner]:
    def register(runner: Runner) -> Runner:
        for name in functions:
            RUNNERS[name] = runner
        return runner

    return register


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: Case) -> None:
    RUNNERS[case["fn"]](case)


def decode(value: Any) -> Any:
    """Turn the file's "nan", "inf" and "-inf" into numbers, at any depth."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def tensor(case: Case, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(decode(case["input"][key]), dtype=dtype)


def mask_of(case: Case) -> Tensor:
    return torch.tensor(case["input"]["mask"]).bool()


def plain(value: Any) -> Any:
    return value.detach().tolist() if isinstance(value, Tensor) else value


def close(got: Any, want: Any, atol: float) -> bool:
    """Compare at any depth; None is not compared; the float32 rule of the file."""
    if want is None:
        return True
    if isinstance(want, list):
        return (
            isinstance(got, list)
            and len(got) == len(want)
            and all(close(g, w, atol) for g, w in zip(got, want, strict=True))
        )
    if isinstance(want, str) or isinstance(got, list):
        return False
    if not math.isfinite(want):
        return bool(got == want or (math.isnan(want) and math.isnan(got)))
    return abs(got - want) <= max(atol, 1e-5 * abs(want))


def check(case: Case, got: Any, want: Any, what: str = "result") -> None:
    """Fail with the name of the known bug when the wrong answer is one on file."""
    got, want = plain(got), decode(want)
    if close(got, want, case["atol"]):
        return
    bugs = [
        name
        for name, answer in case.get("wrong_answers", {}).items()
        if close(got, decode(answer), case["atol"])
    ]
    known = f"; this is the known bug: {', '.join(bugs)}" if bugs else ""
    pytest.fail(f"{case['id']} {what}: got {got}, want {want}{known}")


def check_choice(case: Case, got: Any, convention: str) -> None:
    """Compare with the convention of docs/conventions.md among those accepted."""
    check(case, got, case["accept_any"][convention], f"convention {convention!r}")


@runs("gae")
def run_gae(case: Case) -> None:
    args = case["input"]
    advantages, returns = gae(
        tensor(case, "rewards"), tensor(case, "values"), mask_of(case), args["gamma"], args["lam"]
    )
    check(case, advantages, case["expected"]["advantages"], "advantages")
    check(case, returns, case["expected"]["returns"], "returns")


@runs("masked_whiten")
def run_masked_whiten(case: Case) -> None:
    values, mask = tensor(case, "values"), mask_of(case)
    got = masked_whiten(values, mask)
    if case["id"] == "WHT-01":
        check(case, masked_mean(values, mask), case["expected"]["mean"], "mean")
        check(case, masked_var(values, mask), case["expected"]["var_unbiased"], "variance")
        check_choice(case, got, "unbiased")
    elif case["id"] == "WHT-03":
        check_choice(case, got, "centred")
    else:
        check(case, got, case["expected"])
    assert (got[~mask] == 0).all()


@runs("masked_mean")
def run_masked_mean(case: Case) -> None:
    got = masked_mean(tensor(case, "values"), mask_of(case))
    if "accept_any" in case:
        check_choice(case, got, "zero")
    else:
        check(case, got, case["expected"])


@runs("kl_estimators")
def run_kl_estimators(case: Case) -> None:
    if case["id"] == "KL-01":
        logp, ref = tensor(case, "logp"), tensor(case, "ref_logp")
        for kind, want in case["expected"].items():
            check(case, kl_penalty(logp, ref, kind), want, kind)
        return
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KL_ESTIMATORS:
            logp = tensor(case, "logp", dtype).requires_grad_()
            got = kl_penalty(logp, tensor(case, "ref_logp", dtype), kind)
            got.sum().backward()
            assert logp.grad is not None
            assert got.isfinite().all(), f"{case['id']} {kind} {dtype}: float32 exp overflow"
            assert logp.grad.isfinite().all(), (
                f"{case['id']} {kind} {dtype}: gradient through a later clamp (0*inf)"
            )
            if kind == "k3":
                assert (got >= case["accept_any"]["clamped_log_ratio_or_output"]["k3_min"]).all()


@runs("masked_kl_mean")
def run_masked_kl_mean(case: Case) -> None:
    mask, kind = mask_of(case), case["input"]["kind"]
    logp, ref = tensor(case, "logp").requires_grad_(), tensor(case, "ref_logp")
    check(case, masked_mean(kl_penalty(logp, ref, kind), mask), case["expected"], "mask in mean")
    got = masked_mean(kl_penalty(logp, ref, kind, mask), mask)
    check(case, got, case["expected"], "mask in both")
    got.backward()
    check(case, logp.grad, [1.0, 0.0], "gradient")


@runs("policy_loss_per_token")
def run_policy_loss(case: Case) -> None:
    args, want = case["input"], case["expected"]
    logp = tensor(case, "logp", torch.float32).requires_grad_()
    mask = torch.ones(logp.shape, dtype=torch.bool)
    got = clipped(
        logp,
        tensor(case, "old_logp"),
        tensor(case, "advantages"),
        mask,
        args["clip_low"],
        args["clip_high"],
        args["dual_clip"],
    )
    check(case, got.loss, want["loss"], "loss")
    got.loss.sum().backward()
    check(case, logp.grad, want.get("grad_logp_of_sum"), "gradient")
    check(case, masked_mean(got.loss, mask), want.get("token_mean"), "token mean")
    check(case, masked_mean(got.clipped, mask), want.get("clipfrac"), "clip fraction")
    check(
        case,
        masked_mean(got.dual_clipped, mask),
        want.get("dual_clipfrac_of_all_tokens"),
        "dual-clip fraction",
    )


@runs("agg_loss")
def run_aggregate(case: Case) -> None:
    loss, mask = tensor(case, "loss").requires_grad_(), mask_of(case)
    if case["id"] == "AGG-01":
        for mode, want in case["expected"].items():
            check(case, aggregate(loss, mask, mode), want, mode)
        return
    for total in (case["input"]["global_tokens"], None, 0):
        got = aggregate(loss, mask, case["input"]["mode"], total_tokens=total)
        check(case, got, case["expected"], f"total_tokens={total}")
        (gradient,) = torch.autograd.grad(got, loss)
        assert (gradient == 0).all()


@runs("agg_loss over micro-batches")
def run_aggregate_microbatches(case: Case) -> None:
    parts = case["input"]["micro_batches"]
    total = sum(part["tokens"] for part in parts)
    shares = [
        aggregate(
            torch.full((1, part["tokens"]), part["mean_loss"]),
            torch.ones(1, part["tokens"]),
            case["input"]["mode"],
            total_tokens=total,
        )
        for part in parts
    ]
    check(case, torch.stack(shares).sum(), case["expected"])


@runs("agg_loss over ranks")
def run_aggregate_ranks(case: Case) -> None:
    args, want = case["input"], case["expected"]
    masks = {rank: torch.tensor(args[rank]["mask"]) for rank in ("rank0", "rank1")}
    total = sum(int(mask.sum()) for mask in masks.values())
    # Gradients are averaged over 2 ranks, so each rank sends twice its share backward.
    local = {
        rank: 2 * aggregate(torch.tensor(args[rank]["loss"]), mask, args["mode"], total)
        for rank, mask in masks.items()
    }
    for rank, loss in local.items():
        check(case, loss, want["local_loss_to_backward"][rank], rank)
    check(case, (local["rank0"] + local["rank1"]) / 2, want["global_loss"], "global loss")


@runs("value_loss_per_token")
def run_value_loss(case: Case) -> None:
    want = case["expected"]
    values = tensor(case, "values").requires_grad_()
    got = value_loss(
        values, tensor(case, "old_values"), tensor(case, "returns"), case["input"]["clip"]
    )
    check(case, got.loss, want["loss"], "loss")
    got.loss.sum().backward()
    check(case, values.grad, want.get("grad_of_sum"), "gradient")
    check(case, got.clipped.float().mean(), want.get("clipfrac"), "clip fraction")


def rewards_of(case: Case, kl: Tensor) -> Tensor:
    args = case["input"]
    return token_rewards(
        torch.tensor([args["score"]]),
        kl,
        mask_of(case).unsqueeze(0),
        args["beta"],
        args.get("score_clip"),
    )


@runs("token_rewards")
def run_token_rewards(case: Case) -> None:
    check(case, rewards_of(case, tensor(case, "kl").unsqueeze(0))[0], case["expected"])


@runs("token_rewards + metrics")
def run_token_rewards_and_metrics(case: Case) -> None:
    want, mask = case["expected"], mask_of(case).unsqueeze(0)
    kl = tensor(case, "kl").unsqueeze(0)
    rewards = rewards_of(case, kl)
    check(case, rewards[0], want["rewards"], "rewards")
    kl_mean = float(masked_mean(kl, mask))
    assert kl_mean == pytest.approx(want["metric_kl_mean"]), "KL tensor reused in place"
    check(case, masked_sum(rewards, mask), want["metric_shaped_return"], "shaped return")


@runs("response_mask")
def run_response_mask(case: Case) -> None:
    got = response_mask(torch.tensor(case["input"]["ids"]), case["input"]["eos"])
    check(case, got.int(), case["expected"])


@runs("response_logprobs")
def run_response_logprobs(case: Case) -> None:
    logits, ids = tensor(case, "logits")[None], torch.tensor(case["input"]["input_ids"])[None]
    check(case, response_logprobs(logits, ids, case["input"]["prompt_len"])[0], case["expected"])


@runs("position_ids")
def run_position_ids(case: Case) -> None:
    attention_mask = torch.tensor(case["input"]["attention_mask"])
    got = position_ids(attention_mask)
    check(case, got, case["expected"])
    assert ((got >= 0) & (got < attention_mask.shape[1])).all()


@runs("logprob(temperature)", "logprob(temperature=0)")
def run_logprob(case: Case) -> None:
    logits, label = tensor(case, "logits"), torch.tensor(case["input"]["label"])
    for temperature in case["input"].get("temperatures", []):
        want = case["expected"][str(temperature)]
        check(case, logprobs_from_logits(logits, label, temperature), want, f"T={temperature}")
    if "temperature" in case["input"]:
        got = logprobs_from_logits(logits, label, case["input"]["temperature"])
        check_choice(case, got, "untempered")


@runs("adaptive_kl")
def run_adaptive_kl(case: Case) -> None:
    args = case["input"]
    if case["id"] == "AKL-03":
        for bad in args["cases"]:
            with pytest.raises(ValueError, match=r"target|horizon"):
                AdaptiveKLController(0.2, bad["target"], bad["horizon"])
        return
    if case["id"] == "AKL-01":
        controllers = [
            AdaptiveKLController(args["coef"], args["target"], args["horizon"]) for _ in args["kl"]
        ]
        for controller, kl in zip(controllers, args["kl"], strict=True):
            controller.update(kl, args["n"])
        check(case, [controller.value for controller in controllers], case["expected"])
        return
    controller = AdaptiveKLController(args["coef"], args["target"], args["horizon"])
    for kl in args["kl_sequence"]:
        saved = json.loads(json.dumps(controller.state_dict()))
        controller.update(kl, args["n"])
    check(case, controller.value, case["expected"], "uninterrupted")
    resumed = AdaptiveKLController(args["coef"], args["target"], args["horizon"])
    resumed.load_state_dict(saved)
    resumed.update(args["kl_sequence"][-1], args["n"])
    check(case, resumed.value, case["expected"], "resumed before the last update")


@runs("entropy")
def run_entropy(case: Case) -> None:
    # The rows of a case have different widths.
    rows = [torch.tensor(decode(row)).requires_grad_() for row in case["input"]["logits"]]
    got = [entropy_from_logits(row) for row in rows]
    check(case, torch.stack(got), case["expected"])
    for row, entropy in zip(rows, got, strict=True):
        (gradient,) = torch.autograd.grad(entropy, row)
        assert gradient.isfinite().all(), f"{case['id']}: 0 * -inf in the gradient"


@runs("bradley_terry")
def run_bradley_terry(case: Case) -> None:
    chosen = tensor(case, "chosen").requires_grad_()
    margin = tensor(case, "margin") if "margin" in case["input"] else None
    got = bradley_terry(chosen, tensor(case, "rejected"), margin)
    check(case, got, case["expected"]["per_pair"], "per pair")
    check(case, got.mean(), case["expected"].get("mean"), "mean")
    got.sum().backward()
    check(case, chosen.grad, case["expected"].get("grad_chosen_of_sum"), "gradient")


@runs("grpo")
def run_grpo(case: Case) -> None:
    scores = tensor(case, "rewards")
    got = grpo(scores, case["input"]["group"], torch.ones(len(scores), 1))[0][:, 0]
    if case["id"] == "GRP-02":
        check(case, got, case["expected"])
    else:
        check_choice(case, got, "unbiased" if case["id"] == "GRP-01" else "zero")


@runs("rloo")
def run_rloo(case: Case) -> None:
    scores = tensor(case, "rewards")
    got = rloo(scores, case["input"]["group"], torch.ones(len(scores), 1))[0][:, 0]
    if "accept_any" in case:
        check_choice(case, got, "zero")
    else:
        check(case, got, case["expected"])


@runs("remax")
def run_remax(case: Case) -> None:
    advantages, _ = remax(
        tensor(case, "token_rewards"), mask_of(case), tensor(case, "greedy_score")
    )
    check(case, advantages, case["expected"])


@runs("partition")
def run_partition(case: Case) -> None:
    args, want = case["input"], case["expected"]
    lengths: list[int] = args["lengths"]
    parts = karmarkar_karp(lengths, args["k"], args["equal_size"])
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in parts]
    if case["id"] == "KKP-01":
        assert max(sums) != want["greedy_longest_first_max"], "greedy under another name"
        check(case, max(sums), want["largest_differencing_max"], "largest sum")
    else:
        assert len({len(part) for part in parts}) == 1
        check(case, sorted(sums), want.get("sums"), "sums")
        check(case, sorted(len(part) for part in parts), want.get("sizes"), "sizes")
        check(case, max(sums), want.get("max_allowed"), "max")


@runs("micro_batch_plan")
def run_micro_batch_plan(case: Case) -> None:
    args, want = case["input"], case["expected"]
    budget = args["max_tokens_per_micro_batch"]
    alone = {r: len(plan_microbatches(x, budget)) for r, x in args["rank_tokens"].items()}
    assert alone == want["min_micro_batches"]
    most = max(alone.values())
    for rank, lengths in args["rank_tokens"].items():
        plan = plan_microbatches(lengths, budget, minimum=most)
        check(case, len(plan), want["micro_batches_every_rank"], rank)


@runs("pooled_metric")
def run_pool(case: Case) -> None:
    parts = case["input"]["micro_batches"]
    got = pool([part["clipfrac"] for part in parts], [part["tokens"] for part in parts])
    check(case, got, case["expected"])


@runs("step_counts")
def run_step_counts(case: Case) -> None:
    args, want = case["input"], case["expected"]
    got = step_counts(
        num_rows=args["dataset"],
        batch_size=args["train_batch_size"],
        drop_last=args["drop_last"],
        epochs=args["epochs"],
        minibatch_size=args["mini_batch_size"],
        ppo_epochs=args["ppo_epochs"],
    )
    for name, number in want.items():
        check(case, getattr(got, name), number, name)


@runs("batch_arithmetic")
def run_batch_arithmetic(case: Case) -> None:
    args = case["input"]
    # The case counts the mini-batch in prompts, batch_arithmetic in samples.
    got = batch_arithmetic(
        args["train_batch"],
        args["n"],
        args["mini_batch"] * args["n"],
        args["micro_per_gpu"],
        args["gpus"] // args["sequence_parallel"],
    )
    for name, number in case["expected"].items():
        check(case, getattr(got, name), number, name)


@runs("batch_validation")
def run_batch_validation(case: Case) -> None:
    for sizes in case["input"]["cases"]:
        with pytest.raises(ValueError, match="minibatch_size") as caught:
            validate_batches(
                sizes["mini_batch"],
                batch_size=sizes.get("train_batch"),
                microbatch_size=sizes.get("micro_per_gpu"),
                ranks=sizes.get("gpus", 1),
            )
        message = str(caught.value)
        other = (
            "batch_size"
            if "train_batch" in sizes
            else ("microbatch_size" if "micro_per_gpu" in sizes else "ranks")
        )
        assert f"minibatch_size {sizes['mini_batch']}" in message
        assert other in message


def test_failure_names_the_known_bug() -> None:
    case = next(case for case in CASES if case["id"] == "GAE-02")
    with pytest.raises(pytest.fail.Exception, match="pad value bootstraps valid tokens"):
        check(case, torch.tensor([[5.7, 6.0, 0.0]]), case["expected"]["advantages"])


def test_weights_reproduce_the_aggregated_loss() -> None:
    case = next(case for case in CASES if case["id"] == "AGG-01")
    loss, mask = tensor(case, "loss"), mask_of(case)
    for mode, want in case["expected"].items():
        check(case, (loss * token_weights(mask, mode)).sum(), want, mode)


def test_every_case_is_explained_in_the_conventions() -> None:
    text = (Path(__file__).parents[2] / "docs" / "conventions.md").read_text(encoding="utf-8")
    missing = [case["id"] for case in CASES if f"| {case['id']} |" not in text]
    assert not missing
