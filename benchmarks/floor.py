"""The least time a PPO step can take here: its unavoidable operations over the matmul rate.

In: the sizes of the workload. Out: floating-point operations per stage, and matmul rates measured
on this machine (``python benchmarks/floor.py`` prints them as JSON; torch is imported only there).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

# m x k x n of the two products that the step consists of: a body layer and the LM head.
BODY_SHAPE = (1024, 576, 1536)
HEAD_SHAPE = (768, 576, 49152)


@dataclass(frozen=True)
class Workload:
    """Sizes that decide the operation counts of one PPO step."""

    body_parameters: int
    head_parameters: int
    prompt_tokens: int
    samples: int
    response_length: int
    ppo_epochs: int

    @property
    def response_tokens(self) -> int:
        """Tokens that are generated, scored and trained on."""
        return self.samples * self.response_length

    @property
    def tokens(self) -> int:
        """Real tokens of all sequences, prompts and responses, no padding."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one stage, by the matmul shape that does them."""

    body: float
    head: float

    @property
    def total(self) -> float:
        """All operations of the stage."""
        return self.body + self.head

    def seconds(self, body_rate: float, head_rate: float) -> float:
        """Return the time at the given rates, in operations per second."""
        return self.body / body_rate + self.head / head_rate


def body_parameters(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """Count the weights of a Llama trunk that take part in matrix products.

    Query and output projections, key and value projections, and the three MLP matrices of each
    layer; the embedding is a look-up and the norms are negligible.
    """
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    return layers * (attention + 3 * hidden * intermediate)


def operation_counts(work: Workload) -> dict[str, Operations]:
    """Count the operations that no implementation of this PPO step can avoid.

    A weight costs 2 operations per token in a forward pass and 4 more in a backward pass (gradient
    of the input and of the weight). Counted are real tokens only; the LM head only at the response
    positions; old log-probs come free from the sampler; attention scores are left out (below 2 %
    at these lengths), so the result stays a lower bound.

    - generation: prompts are read once, each new token but the last of a sample is fed once; head
      once per new token.
    - scoring: one forward pass each of reference (with head), critic and reward model.
    - update: ``ppo_epochs`` times forward and backward of actor (with head) and critic.

    Returns:
        ``generation``, ``scoring``, ``update`` and their sum ``total``.
    """
    forward_body = 2.0 * work.body_parameters
    forward_head = 2.0 * work.head_parameters * work.response_tokens
    fed_while_generating = work.tokens - work.samples
    stages = {
        "generation": Operations(forward_body * fed_while_generating, forward_head),
        "scoring": Operations(3 * forward_body * work.tokens, forward_head),
        "update": Operations(
            work.ppo_epochs * 2 * 3 * forward_body * work.tokens,
            work.ppo_epochs * 3 * forward_head,
        ),
    }
    stages["total"] = Operations(
        sum(stage.body for stage in stages.values()),
        sum(stage.head for stage in stages.values()),
    )
    return stages


def affordable_shape(
    shape: tuple[int, int, int], probed_rate: float, seconds: float
) -> tuple[int, int, int]:
    """Halve rows, then columns, until one product at ``probed_rate`` fits into ``seconds``.

    Only a precision that the CPU emulates is that slow, and its rate hardly depends on the shape.
    """
    rows, inner, columns = shape
    while 2.0 * rows * inner * columns / probed_rate > seconds and (rows > 64 or columns > 1024):
        if rows > 64:
            rows //= 2
        else:
            columns //= 2
    return rows, inner, columns


def matmul_rate(shape: tuple[int, int, int], dtype: str, seconds: float = 1.5) -> float:
    """Measure the best rate of a product in the layout of a linear layer.

    ``(m, k) @ (n, k).T``, as a layer computes its output. The fastest repetition counts: a floor
    must not be raised by noise. The output is allocated once, outside the timing.

    Returns:
        operations per second.
    """
    import torch

    kind = getattr(torch, dtype)

    def best_rate(rows: int, inner: int, columns: int, budget: float) -> float:
        inputs = torch.randn(rows, inner).to(kind)
        weights = torch.randn(columns, inner).to(kind)
        out = torch.empty(rows, columns, dtype=kind)
        best, repetitions, begin = float("inf"), 0, time.perf_counter()
        # two at least: the first also pays for starting threads and touching memory
        while repetitions < 2 or time.perf_counter() - begin < budget:
            start = time.perf_counter()
            torch.mm(inputs, weights.t(), out=out)
            best = min(best, time.perf_counter() - start)
            repetitions += 1
        return 2.0 * rows * inner * columns / best

    probed = best_rate(64, 576, 1024, 0.0)
    return best_rate(*affordable_shape(shape, probed, seconds), seconds)


def measure_machine(seconds: float) -> dict[str, object]:
    """Return the CPU as torch sees it and its matmul rates by dtype and shape."""
    import torch

    rates = {
        dtype: {
            "body": matmul_rate(BODY_SHAPE, dtype, seconds),
            "head": matmul_rate(HEAD_SHAPE, dtype, seconds),
        }
        for dtype in ("float32", "bfloat16")
    }
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "rates": rates,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the matmul rates of this machine.")
    parser.add_argument("--seconds", type=float, default=1.5, help="time per shape and dtype")
    print(json.dumps(measure_machine(parser.parse_args().seconds)))
