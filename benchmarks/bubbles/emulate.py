"""Sleeps in the place of devices: passes and vision work take as long as they are told to.

The arithmetic of a small model is done as well, so that everything is sent that a run sends. It
counts as part of the time; a backward pass alone takes it besides. Four processes share two cores
for it, but not for their sleeps.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_pretrain.dep.encoder import EncoderPass
from kimi_pretrain.dep.unit_pass import UnitPass
from kimi_pretrain.engine.backbone import Backbone

BACKWARD = 2.0  # forwards that a backward takes, of a pass and of the encoder


@dataclass(frozen=True)
class Device:
    """Seconds of a device.

    Attributes:
        forward: of a pass of one virtual stage.
        patch: of the encoder's forward for each patch.
    """

    forward: float
    patch: float

    def emulate(self, backbone: Backbone) -> None:
        """Have this process take as long, whatever it does."""
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
        """Slow what a schedule calls; whoever counts passes has wrapped it before, and is told of a
        pass before its sleep.
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
