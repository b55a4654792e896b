"""Advantage estimators and the registry they are chosen from.

In: token rewards, values, scores and masks of the global batch. Out: (advantages, returns), each
(B, T), 0 outside the mask, without gradient and not whitened.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.masked import as_float, select

AdvantageFunction = Callable[..., tuple[Tensor, Tensor]]
GROUP_EPS = 1e-6


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator: its function and the batch columns it reads."""

    name: str
    function: AdvantageFunction
    needs: tuple[str, ...]


ADVANTAGES: dict[str, AdvantageEstimator] = {}


def advantage_estimator(
    name: str, needs: Sequence[str]
) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register an estimator under `name`; `needs` are the batch columns it reads."""

    def register(function: AdvantageFunction) -> AdvantageFunction:
        ADVANTAGES[name] = AdvantageEstimator(name, function, tuple(needs))
        return function

    return register


@advantage_estimator("gae", needs=("token_rewards", "values", "response_mask"))
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    The tokens with mask 1 of a row form one trajectory: a token with mask 0 between them (a tool
    result) is neither a step nor a source of reward or value, and costs no factor gamma * lam.

    Args:
        rewards: (B, T) token rewards.
        values: (B, T) value of the state that chose each token.
        mask: (B, T) response mask.
        gamma: discount, 0..1.
        lam: trace decay, 0..1.
        bootstrap: (B,) value of the state after the last token; 0 (terminal) when None.

    Returns:
        advantages (B, T) and returns (B, T) = advantages + values.

    Raises:
        ValueError: gamma or lam outside 0..1.
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} is {factor}; it must be between 0 and 1")
    valid = mask.bool()
    reward = select(rewards.detach(), mask)
    value = select(values.detach(), mask)
    next_value = (
        torch.zeros_like(value[:, 0]) if bootstrap is None else bootstrap.detach().to(value)
    )
    running = torch.zeros_like(next_value)
    advantages = torch.zeros_like(value)
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        running = torch.where(valid[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(valid[:, t], value[:, t], next_value)
        advantages[:, t] = running
    advantages = select(advantages, mask)
    return advantages, select(advantages + value, mask)


def _group_index(groups: Sequence[Hashable], device: torch.device) -> Tensor:
    """Return (B,) int64 numbers of the groups, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor(
        [numbers.setdefault(group, len(numbers)) for group in groups],
        dtype=torch.long,
        device=device,
    )


def _group_sum(x: Tensor, index: Tensor) -> Tensor:
    """Return for every sample the sum of `x` over its group, (B,) -> (B,)."""
    sums = torch.zeros(len(index), dtype=x.dtype, device=x.device)
    return sums.index_add(0, index, x)[index]


def _over_tokens(per_sample: Tensor, mask: Tensor) -> Tensor:
    return select(per_sample.unsqueeze(-1).expand(mask.shape), mask)


@advantage_estimator("grpo", needs=("score", "group", "response_mask"))
def grpo(scores: Tensor, groups: Sequence[Hashable], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Score minus group mean over the group's unbiased std (Shao et al. 2024, DeepSeekMath §4.1).

    Args:
        scores: (B,).
        groups: B keys; samples of the same prompt instance share one.
        mask: (B, T) response mask.

    Returns:
        advantages (B, T), and the scores spread over the tokens as returns (B, T). A group of one,
        and a group whose scores are all equal, gives 0.
    """
    scores = as_float(scores.detach())
    index = _group_index(groups, scores.device)
    count = _group_sum(torch.ones_like(scores), index)
    centred = scores - _group_sum(scores, index) / count
    std = (_group_sum(centred.square(), index) / (count - 1).clamp(min=1)).sqrt()
    highest = torch.full_like(scores, -torch.inf).scatter_reduce(0, index, scores, "amax")[index]
    lowest = torch.full_like(scores, torch.inf).scatter_reduce(0, index, scores, "amin")[index]
    # Equal scores leave rounding noise in `centred` of the order of the eps; compare them exactly.
    advantages = torch.where(highest > lowest, centred / (std + GROUP_EPS), 0.0)
    return _over_tokens(advantages, mask), _over_tokens(scores, mask)


@advantage_estimator("rloo", needs=("score", "group", "response_mask"))
def rloo(scores: Tensor, groups: Sequence[Hashable], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Score minus the mean of the other scores of the group (Ahmadian et al. 2024, eq. 8).

    Arguments and returns as for `grpo`; a group of one has no baseline and gives 0.
    """
    scores = as_float(scores.detach())
    index = _group_index(groups, scores.device)
    count = _group_sum(torch.ones_like(scores), index)
    others = (_group_sum(scores, index) - scores) / (count - 1).clamp(min=1)
    advantages = torch.where(count > 1, scores - others, 0.0)
    return _over_tokens(advantages, mask), _over_tokens(scores, mask)


@advantage_estimator("remax", needs=("token_rewards", "greedy_score", "response_mask"))
def remax(rewards: Tensor, mask: Tensor, greedy_score: Tensor) -> tuple[Tensor, Tensor]:
    """Reward-to-go minus the score of one greedy response (Li et al. 2024, ReMax, eq. 5).

    Args:
        rewards: (B, T) token rewards.
        mask: (B, T) response mask.
        greedy_score: (B,) score of the greedy response to the same prompt.

    Returns:
        advantages (B, T) and the rewards-to-go as returns (B, T).
    """
    to_go = select(rewards.detach(), mask).flip(-1).cumsum(-1).flip(-1)
    baseline = greedy_score.detach().to(to_go).unsqueeze(-1)
    return select(to_go - baseline, mask), select(to_go, mask)
