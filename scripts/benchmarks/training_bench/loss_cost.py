"""Estimate the GPU time of the loss study's trainings from their arithmetic."""

from __future__ import annotations

from benchmarks.training_bench.gpu_losses import MODELS, RANKS, Method

#: dense bf16 peak of one H100 SXM in operations per second, and the range of shares that such
#: models reach in torch
PEAK, SHARE = 989e12, (0.35, 0.45)
#: host seconds per step of a training, independent of tokens: 73 ms were measured
HOST_S = 0.075
#: seconds from the fork of a training's ranks to its first step
START_S = 30.0
#: operations of a forward pass relative to a whole step
FORWARD = 1 / 3


def parameters(model: str, vocabulary: int) -> int:
    """Return the example's parameters: tied embedding, four C x C and two C x 4C a layer."""
    layers, width, _, _ = MODELS[model]
    return vocabulary * width + layers * (12 * width * width + 2 * width) + width


def step_flops(method: Method, vocabulary: int) -> float:
    """Return the operations of a step: 6 per weight and token, plus attention."""
    layers, width, _, length = MODELS[method.model]
    attention = 6 * layers * width * length  # causal: half of the square
    weights = 6 * parameters(method.model, vocabulary)
    return float((weights + attention) * method.tokens_per_step)


def step_seconds(method: Method, vocabulary: int, trainings: int, share: float) -> float:
    """Return the seconds of a step of ``trainings`` side by side on one H100.

    Their GPU work adds up, while their host work runs in parallel.
    """
    return max(HOST_S, trainings * step_flops(method, vocabulary) / (share * PEAK))


def equal_steps(method: Method) -> float:
    """Return the number of training steps that takes as long as a training with its evaluations."""
    return method.steps + method.evaluations * method.eval_batches * FORWARD


def told(method: Method, vocabulary: int, pairs: int) -> str:
    """Format the time of so many pairs on an H100, for both shares of its peak."""
    slow, fast = (step_seconds(method, vocabulary, 2, share) for share in SHARE)
    minutes = [(START_S + pairs * equal_steps(method) * s) / 60 for s in (fast, slow)]
    return (
        f"{parameters(method.model, vocabulary) / 1e6:.1f} M parameters, "
        f"{method.tokens_per_step:,} tokens a step on {RANKS} ranks, "
        f"{step_flops(method, vocabulary) / 1e12:.1f} TFLOP: a step of a pair takes "
        f"{fast * 1e3:.0f} to {slow * 1e3:.0f} ms on an H100, {pairs} pairs of {method.steps} "
        f"steps {minutes[0]:.1f} to {minutes[1]:.1f} minutes"
    )
