"""How many steps and micro-batches a set of batch sizes makes, and which sets make none.

In: plain integers. Out: plain integers, or a ValueError that names both settings in conflict.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCounts:
    """Steps of a run; a learning-rate horizon takes the one in whose unit it is stepped."""

    steps_per_epoch: int
    rollout_steps: int
    optimizer_steps: int


@dataclass(frozen=True)
class BatchArithmetic:
    """What one step does.

    Attributes:
        samples: responses generated per step.
        per_rank: samples of one optimiser step on each rank.
        micro_batches: forward/backward passes per optimiser step on each rank.
        loss_scale_per_micro: share of each micro-batch in a sample mean.
    """

    samples: int
    per_rank: int
    micro_batches: int
    loss_scale_per_micro: float


def step_counts(
    num_rows: int,
    batch_size: int,
    drop_last: bool,
    epochs: int,
    minibatch_size: int,
    ppo_epochs: int,
) -> StepCounts:
    """Count rollout and optimiser steps of a run with one response per prompt.

    Args:
        num_rows: prompts in the training set.
        batch_size: prompts per rollout step.
        drop_last: leave out the last incomplete batch of each epoch, or train on it.
        epochs: passes over the training set.
        minibatch_size: samples per optimiser step; a remainder makes a smaller one.
        ppo_epochs: passes over each rollout batch.

    Raises:
        ValueError: a number below 1, or no step at all.
    """
    _positive(
        num_rows=num_rows,
        batch_size=batch_size,
        epochs=epochs,
        minibatch_size=minibatch_size,
        ppo_epochs=ppo_epochs,
    )
    full, rest = divmod(num_rows, batch_size)
    if drop_last and full == 0:
        raise ValueError(
            f"{num_rows} rows are fewer than batch_size {batch_size} and the last "
            "incomplete batch is dropped, so no step is left: lower batch_size or "
            "keep the last batch"
        )
    batches = [batch_size] * full + ([rest] if rest and not drop_last else [])
    per_epoch = sum(_ceil_div(size, minibatch_size) for size in batches) * ppo_epochs
    return StepCounts(len(batches), len(batches) * epochs, per_epoch * epochs)


def batch_arithmetic(
    batch_size: int,
    samples_per_prompt: int,
    minibatch_size: int,
    microbatch_size: int,
    ranks: int = 1,
) -> BatchArithmetic:
    """Work out one step of `batch_size` prompts with micro-batches of a fixed number of samples.

    Args:
        batch_size: prompts per rollout step.
        samples_per_prompt: responses to each.
        minibatch_size: samples per optimiser step over all ranks.
        microbatch_size: samples per forward/backward pass on one rank.
        ranks: data-parallel ranks.

    Raises:
        ValueError: as for `validate_batches`, or a number below 1.
    """
    _positive(batch_size=batch_size, samples_per_prompt=samples_per_prompt)
    samples = batch_size * samples_per_prompt
    validate_batches(minibatch_size, samples, microbatch_size, ranks)
    per_rank = minibatch_size // ranks
    micro_batches = per_rank // microbatch_size
    return BatchArithmetic(samples, per_rank, micro_batches, 1.0 / micro_batches)


def validate_batches(
    minibatch_size: int,
    batch_size: int | None = None,
    microbatch_size: int | None = None,
    ranks: int = 1,
) -> None:
    """Refuse batch sizes that do not fit into each other.

    Args:
        minibatch_size: samples per optimiser step over all ranks.
        batch_size: samples per rollout step; not checked when None.
        microbatch_size: samples per pass on one rank; not checked when None (token budget).
        ranks: data-parallel ranks.

    Raises:
        ValueError: naming the two settings, their values and what to change.
    """
    _positive(minibatch_size=minibatch_size, ranks=ranks)
    if batch_size is not None:
        _positive(batch_size=batch_size)
        if batch_size % minibatch_size:
            raise ValueError(
                f"minibatch_size {minibatch_size} does not divide batch_size {batch_size}: the "
                "optimiser steps of one rollout would have unequal sizes; "
                "make batch_size a multiple of minibatch_size"
            )
    if minibatch_size % ranks:
        raise ValueError(
            f"minibatch_size {minibatch_size} cannot be shared by {ranks} ranks "
            "evenly; make minibatch_size a multiple of the number of ranks"
        )
    if microbatch_size is not None:
        _positive(microbatch_size=microbatch_size)
        per_rank = minibatch_size // ranks
        if per_rank % microbatch_size:
            raise ValueError(
                f"microbatch_size {microbatch_size} does not divide minibatch_size "
                f"{minibatch_size} ({per_rank} samples on each of {ranks} ranks); "
                "lower microbatch_size or make minibatch_size a multiple of it"
            )


def _positive(**settings: int) -> None:
    for name, number in settings.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
