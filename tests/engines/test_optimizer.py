"""AdamW on float32 masters: schedule, precision, bad gradients, state."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.engines.conftest import draw_rows, policy, train
from verl.config.schema import Optimizer
from verl.engines.optimizer import MasterAdamW, learning_rate
from verl.engines.torch_engine import TorchEngine
from verl.errors import CheckpointError, TrainingStopped
from verl.workers.updates import StepLog, optimizer_steps

FolderOf = Callable[[str], Path]
ROWS = draw_rows(1, [(3, 4), (2, 6)])


def weights(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def negative_logprob(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
    return -outputs["logprobs"].sum() / 10


def test_five_steps_equal_torch_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    section = Optimizer(
        lr_schedule="linear", weight_decay=0.1, adam_betas=(0.8, 0.9), max_grad_norm=0.5
    )
    optimizer = MasterAdamW(ours.named_parameters(), section, 0.1, 10)
    reference = torch.optim.AdamW(theirs.parameters(), betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(5):
        x = torch.randn(6, 4)
        ours(x).square().sum().backward()
        theirs(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.param_groups[0]["lr"] = 0.1 * (1 - step / 10)
        reference.step()
        reference.zero_grad()
        result = optimizer.step()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert result.lr == pytest.approx(0.1 * (1 - step / 10))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
            assert a.grad is None


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0.0, [1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 0.5, [0.5, 1.0, 1.0, 0.5]),
        ("cosine", 0.0, [1.0, 0.853553, 0.5, 0.146447]),
        ("constant", 0.3, [0.5, 1.0, 1.0, 1.0]),  # half a warm-up step counts as one
    ],
)
def test_schedule_values(schedule: str, warmup: float, expected: list[float]) -> None:
    section = Optimizer(lr_schedule=schedule, warmup_ratio=warmup)
    rates = [learning_rate(section, 1.0, step, 4) for step in range(4)]
    assert rates == pytest.approx(expected, abs=1e-6)


def test_e06_rate_reaches_its_end_at_the_last_optimiser_step() -> None:
    # 10 rows, batch 4, 3 epochs: 6 rollout steps; mini-batch 2, 2 PPO epochs: 4 steps each.
    total = 6 * optimizer_steps(samples=4, size=2, epochs=2)
    assert total == 24
    section = Optimizer(lr_schedule="linear")
    assert learning_rate(section, 1.0, 23, total) == pytest.approx(1 / 24)
    assert learning_rate(section, 1.0, 6, total) == pytest.approx(18 / 24)
    assert learning_rate(section, 1.0, 24, total) == 0.0
    assert learning_rate(section, 1.0, 30, total) == 0.0  # past the horizon never negative


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_h06_bad_gradient_changes_nothing_and_is_counted(bad: float, folder_of: FolderOf) -> None:
    engine = policy(folder_of("llama"))
    train(engine)
    engine.backward(ROWS, negative_logprob)
    assert not engine.step().skipped
    before, state = weights(engine), engine.optimizer.state()
    moments = {k: v.clone() for k, v in state.items() if k.startswith("exp_avg")}
    engine.backward(ROWS, lambda out, index: negative_logprob(out, index) * bad)
    assert engine.step().skipped
    assert all(torch.equal(p, before[n]) for n, p in engine.model.named_parameters())
    assert all(torch.equal(engine.optimizer.state()[k], v) for k, v in moments.items())
    engine.backward(ROWS, negative_logprob)
    assert not engine.step().skipped  # nothing of the bad gradient stayed behind
    assert all(p.isfinite().all() for p in engine.model.parameters())


def test_h06_run_stops_after_bad_steps_in_a_row(
    folder_of: FolderOf, caplog: pytest.LogCaptureFixture
) -> None:
    engine = policy(folder_of("llama"))
    train(engine)
    log = StepLog("actor", max_bad_steps=2)

    def take(factor: float, step: int) -> None:
        total = engine.backward(ROWS, lambda out, index: negative_logprob(out, index) * factor)
        log.take(engine, total, lambda: f"step {step}")

    take(math.nan, 1)
    take(1.0, 2)
    take(math.nan, 3)
    assert log.bad_in_a_row == 1
    metrics = log.metrics("policy")
    assert metrics["policy/skipped_steps"] == 2
    assert math.isfinite(metrics["policy/loss"])
    assert math.isfinite(metrics["policy/grad_norm"])
    assert "actor: gradient norm nan is not finite (step 3)" in caplog.text
    before = weights(engine)
    with pytest.raises(TrainingStopped, match=r"actor: 2 optimiser steps in a row .*step 4"):
        take(math.nan, 4)
    assert all(torch.equal(p, before[n]) for n, p in engine.model.named_parameters())


def test_bfloat16_masters_hold_what_the_parameters_round(folder_of: FolderOf) -> None:
    engine = policy(folder_of("llama"), dtype=torch.bfloat16)
    optimizer = train(engine, lr=1e-3)
    engine.backward(ROWS, negative_logprob)
    assert all(p.grad is None for p in engine.model.parameters())
    assert {m.grad.dtype for m in optimizer.masters.values()} == {torch.float32}
    engine.step()
    different = 0
    for name, parameter in engine.trainable():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, optimizer.masters[name].bfloat16())
        different += int((parameter.float() != optimizer.masters[name]).sum())
    assert different > 1000
    exported = dict(engine.export_view().model.named_parameters())
    assert all(torch.equal(exported[n], m) for n, m in optimizer.masters.items())


def test_bfloat16_does_not_lose_updates_below_its_resolution(folder_of: FolderOf) -> None:
    engine = policy(folder_of("llama"), dtype=torch.bfloat16)
    optimizer = train(engine, lr=1e-6)
    name = "model.norm.weight"  # all ones: the next bfloat16 below is 1 - 2^-8
    for _ in range(50):
        engine.backward(ROWS, negative_logprob)
        engine.step()
    moved = (optimizer.masters[name] - 1).abs()
    assert torch.equal(dict(engine.trainable())[name], torch.ones(32, dtype=torch.bfloat16))
    assert (moved > 1e-5).float().mean() > 0.8  # 50 steps of about 1e-6 in one direction


def test_bfloat16_sums_micro_batches_in_float32(folder_of: FolderOf) -> None:
    rows = draw_rows(3, [(2, 6)] * 32)
    low = policy(folder_of("llama"), dtype=torch.bfloat16)
    full = policy(folder_of("llama"))
    train(low)

    def gathered(parts: list[list[int]]) -> dict[str, Tensor]:
        low.backward(rows.select([i for p in parts for i in p]), lambda out, i: -out["logprobs"].sum(),
                     plan=[[k] for k in range(len(parts))])  # fmt: skip
        found = {n: m.grad.clone() for n, m in low.optimizer.masters.items()}
        for master in low.optimizer.masters.values():
            master.grad = None
        return found

    together = gathered([[i] for i in range(32)])
    single = [gathered([[i]]) for i in range(32)]
    full.backward(rows, lambda out, index: -out["logprobs"].sum())
    for name, parameter in full.trainable():
        exact = sum(part[name].double() for part in single)
        scale = exact.norm()
        assert (together[name] - exact).norm() / scale < 1e-6, name  # bfloat16 sums miss by 1e-2
        assert (together[name] - parameter.grad).norm() / scale < 0.1, name


def test_state_restores_masters_moments_and_the_schedule(folder_of: FolderOf) -> None:
    def run(engine: TorchEngine, steps: int) -> None:
        for _ in range(steps):
            engine.backward(ROWS, negative_logprob)
            engine.step()

    for dtype in (torch.float32, torch.bfloat16):
        straight, resumed = (policy(folder_of("llama"), dtype=dtype) for _ in range(2))
        train(straight, lr_schedule="linear")
        run(straight, 2)
        saved = {k: v.clone() for k, v in straight.optimizer.state().items()}
        train(resumed, lr_schedule="linear").load_state(saved, "here")
        run(straight, 2)
        run(resumed, 2)
        assert resumed.optimizer.steps_taken == 4
        after = straight.optimizer.state()
        assert after.keys() == resumed.optimizer.state().keys()
        assert all(torch.equal(v, after[k]) for k, v in resumed.optimizer.state().items())
        assert all(torch.equal(p, weights(straight)[n]) for n, p in weights(resumed).items())


def test_parameter_that_never_had_a_gradient_is_restored_without_moments() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})

    def optimizer() -> MasterAdamW:
        return MasterAdamW(model.named_parameters(), Optimizer(), 0.1, 4)

    first = optimizer()
    model["used"](torch.ones(1, 2)).sum().backward()
    first.step()
    state = first.state()
    assert float(state["step/unused.weight"]) == 0
    assert "exp_avg/unused.weight" not in state
    optimizer().load_state(state, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("exp_avg_sq/weight"), r"missing: \['exp_avg_sq/weight'\]"),
        (lambda s: [s.pop(k) for k in list(s) if k.startswith(("exp_", "step/"))],
         r"missing: \['exp_avg/bias', 'exp_avg/weight'"),
        (lambda s: s.pop("steps_taken"), r"missing: \['steps_taken'\]"),
        (lambda s: s.update({"weight/old": torch.ones(1)}), r"unknown: \['weight/old'\]"),
        (lambda s: s.update({"weight/weight": torch.ones(1)}), r"another shape: \['weight/weight'"),
    ],
)  # fmt: skip
def test_d07_state_that_does_not_fit_is_refused_whole(
    change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    model = nn.Linear(4, 2)
    optimizer = MasterAdamW(model.named_parameters(), Optimizer(), 0.1, 4)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {k: v.clone() for k, v in optimizer.state().items()}
    change(state)
    fresh = nn.Linear(4, 2)
    before = fresh.weight.detach().clone()
    with pytest.raises(CheckpointError, match=f"actor.safetensors: .*{message}"):
        MasterAdamW(fresh.named_parameters(), Optimizer(), 0.1, 4).load_state(
            state, "actor.safetensors"
        )
    assert torch.equal(fresh.weight, before)
