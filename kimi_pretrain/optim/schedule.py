"""Learning rate: linear warm-up, a constant stretch, then a descent (K2, arXiv:2507.20534, 2.5)."""

import math

from kimi_pretrain.optim.config import OptimConfig


def learning_rate(step: int, config: OptimConfig) -> float:
    """Learning rate of one update.

    Args:
        step: updates done before this one; the first update is step 0.
        config: lengths and heights.

    Returns:
        lr * (step + 1) / warmup_steps while warming up, lr while stable, then the cosine (or line)
        that reaches min_lr on the last decay step and stays there.

    Raises:
        ValueError: step is negative.
    """
    if step < 0:
        raise ValueError(f"learning rate asked for step {step}; steps count from 0")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decayed = step + 1 - config.warmup_steps - config.stable_steps
    if config.decay_steps == 0 or decayed <= 0:
        return config.lr
    progress = min(1.0, decayed / config.decay_steps)
    left = (1 + math.cos(math.pi * progress)) / 2 if config.decay == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * left
