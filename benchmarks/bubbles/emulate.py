"""Emulates devices with sleeps, so that passes and vision work take a configured time.

The arithmetic of a small model runs as well, so that all messages of a real run are sent. It counts
as part of the configured time, except in the backward passes of the pipeline, where it comes on
top. Four processes share two cores for the arithmetic, but not for their sleeps.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_pretrain.dep.encoder import EncoderPass
from kimi_pretrain.dep.unit_pass import UnitPass
from kimi_pretrain.engine.backbone import Backbone

BACKWARD = 2.0  # backward over forward time, for passes and for the encoder


@dataclass(frozen=True)
class Device:
    """Timing of an emulated device.

    Attributes:
        forward: seconds of a forward pass of one virtual stage.
        patch: seconds of the encoder's forward pass per patch.
    """

    forward: float
    patch: float

    def emulate(self, backbone: Backbone) -> None:
        """Make the passes and the encoder of this process take the configured time."""
        backbone.schedule = self._slow_schedule(backbone.schedule)
        EncoderPass.forward = self._slow(EncoderPass.forward, self._chunks_forward)
        EncoderPass.backward = self._slow(EncoderPass.backward, self._chunks_backward)
        UnitPass.forward = self._slow(UnitPass.forward, self._piece_forward)
        UnitPass.again = self._slow(UnitPass.again, self._piece_again)
        UnitPass.backward = self._slow(UnitPass.backward, self._piece_backward)

    def _slow(self, method: Callable[..., Any], seconds: Callable[..., float]):
        def slow(one: Any, *args: Any) -> Any:
            until = time.perf_counter() + seconds(one, *args)
            found = method(one, *args)
            _sleep(until)
            return found

        return slow

    def _chunks_forward(self, one: EncoderPass) -> float:
        return self.patch * sum(_patches(chunk.grids) for chunk in one.chunks)

    def _chunks_backward(self, one: EncoderPass, _: Any) -> float:
        passes = [(BACKWARD + (not chunk.keep), chunk) for chunk in one.chunks]
        return self.patch * sum(times * _patches(chunk.grids) for times, chunk in passes)

    def _piece_forward(self, one: UnitPass, _: int) -> float:
        return self.patch * _patches(one.grids) / one.pieces

    def _piece_again(self, one: UnitPass, piece: int) -> float:
        return self._piece_forward(one, piece) * (piece >= one.kept)

    def _piece_backward(self, one: UnitPass, _: Any = None) -> float:
        return self._piece_forward(one, 0) * BACKWARD

    def _slow_schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Return a schedule whose passes take the configured time.

        A wrapper that counts passes must already be installed; it then sees a pass before its
        sleep.
        """

        def run(*, forward_step_func: Callable[..., Any], **options: Any) -> Any:
            def step(microbatches: Iterator[Any], model: Any, *args: Any) -> Any:
                until = time.perf_counter() + self.forward
                output, loss = forward_step_func(microbatches, model, *args)
                _sleep(until)
                if output.requires_grad:
                    output.register_hook(lambda gradient: time.sleep(BACKWARD * self.forward))
                return output, loss

            return schedule(forward_step_func=step, **options)

        return run


def _sleep(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))


def _patches(grids: Sequence[tuple[int, int, int]]) -> int:
    return sum(t * h * w for t, h, w in grids)
