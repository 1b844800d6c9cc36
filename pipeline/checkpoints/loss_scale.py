"""fp16's loss scale after a resume: the JSON says how it acts, the checkpoint where it stands."""

from __future__ import annotations

from typing import Any

from pipeline.engine.engine import TrainEngine


def loss_scaler_of(engine: TrainEngine) -> Any:
    """DeepSpeed's loss scaler, also where it scales nothing (bf16, fp32); None at ZeRO stage 0."""
    return getattr(engine.deepspeed.optimizer, "loss_scaler", None)


def continue_loss_scale(engine: TrainEngine, configured: Any, saved: Any) -> None:
    """Let `engine` scale as its JSON says; a dynamic scale goes on from a dynamic one.

    Between a fixed and a dynamic one nothing carries over: what an overflow made of the one says nothing
    about the other, and a scale chosen by hand is meant as it is written.

    Args:
        configured: The scaler that the engine was built with.
        saved: The checkpoint's; None where it has none.
    """
    if configured is None:
        return
    if saved is not None and configured.dynamic and saved.dynamic:
        _go_on(configured, saved)
    optimizer = engine.deepspeed.optimizer
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = configured, configured.dynamic


def _go_on(scaler: Any, saved: Any) -> None:
    scaler.cur_iter, scaler.last_overflow_iter = saved.cur_iter, saved.last_overflow_iter
    # Below a new floor an overflow would raise the scale to it.
    scaler.cur_scale = max(saved.cur_scale, scaler.min_scale)
    # Overflows that are used up stay so. The last one that is left halves the scale and is not used up.
    used_up = saved.delayed_shift - saved.cur_hysteresis
    scaler.cur_hysteresis = max(scaler.delayed_shift - used_up, 1)
