"""Runs other work inside pipeline bubbles, under Megatron-Core's unmodified schedules.

The schedules take a communicator as an argument. `SlotCommunicator` posts a stage's sends and
receives, runs the work of the slot, and then waits. On CUDA the work precedes the wait for the
receive on the compute stream, so it runs inside the bubble. The data iterators and a hook on each
output report which pass begins.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    _build_default_pg_collection,  # pyright: ignore[reportPrivateUsage]
)

from kimi_pretrain.engine.microbatch import Microbatch


class Slots(Protocol):
    """Work for the pipeline's slots; implemented in `dep.bubble_run`."""

    def fill(self, *, gradient: bool) -> None:
        """Run work while the stage waits for a gradient or for the input of a forward pass."""
        ...

    def idle(self) -> AbstractContextManager[None]:
        """Return a context that measures the remaining wait."""
        ...

    def forward(self, chunk: int, microbatch: int) -> None:
        """Record the start of a forward pass."""
        ...

    def backward(self, chunk: int, microbatch: int) -> None:
        """Record the start of a backward pass."""
        ...

    def finish(self) -> None:
        """Run the remaining work after the last pass."""
        ...


class SlotSchedule:
    """One of Megatron-Core's pipeline schedules, with work in its slots.

    Attributes:
        slots: work for the slots of the next training step; None for no work.
    """

    def __init__(self, schedule: Callable[..., Any]):
        self.schedule = schedule
        self.slots: Slots | None = None

    def __call__(
        self, *, forward_step_func, data_iterator, model, forward_only: bool = False, **options
    ) -> Any:
        """Run the schedule and, after its last pass, the remaining work of the slots."""
        slots, plain = self.slots, dict(model=model, forward_only=forward_only, **options)
        if slots is None or forward_only:
            data = dict(forward_step_func=forward_step_func, data_iterator=data_iterator)
            return self.schedule(**data, **plain)
        several = isinstance(model, list)
        models, iterators = (model, data_iterator) if several else ([model], [data_iterator])
        told = [_told(slots, chunk, each) for chunk, each in enumerate(iterators)]
        group = parallel_state.get_pipeline_model_parallel_group()
        found = self.schedule(
            forward_step_func=_hooked(slots, forward_step_func, models),
            data_iterator=told if several else told[0],
            p2p_communicator=SlotCommunicator(group, models[0].config, slots),
            pg_collection=_build_default_pg_collection(),
            **plain,
        )
        slots.finish()
        return found


class SlotCommunicator(P2PCommunicator):
    """Communicator that runs other work between posting a receive and waiting for it."""

    def __init__(self, group, config, slots: Slots):
        super().__init__(group, config)
        if config.batch_p2p_comm:
            raise ValueError(
                "dep.bubbles with batched p2p: its requests cannot be waited for later"
            )
        self.slots = slots

    def _communicate(
        self, *, recv_prev: bool, recv_next: bool, wait_on_reqs: bool = True, **kwargs
    ):
        previous, following, requests = super()._communicate(
            recv_prev=recv_prev, recv_next=recv_next, wait_on_reqs=False, **kwargs
        )
        if not wait_on_reqs:
            for name in {"recv_prev", "recv_next"} & requests.keys():
                requests[name] = _Handle(requests[name], self.slots, name == "recv_next")
            return previous, following, requests
        if recv_prev:
            self.slots.fill(gradient=False)
        if recv_next:
            self.slots.fill(gradient=True)
        with self.slots.idle():
            for request in requests.values():
                request.wait()
        return previous, following, None


class _Handle:
    """Handle of a receive that the schedule waits for later; handles of sends are not wrapped."""

    def __init__(self, request, slots: Slots, gradient: bool):
        self.request, self.slots, self.gradient = request, slots, gradient

    def wait(self) -> None:
        self.slots.fill(gradient=self.gradient)
        with self.slots.idle():
            self.request.wait()


def _told(slots: Slots, chunk: int, microbatches: Iterator[Microbatch]) -> Iterator[Microbatch]:
    """Yield microbatches and report each to `slots`, as a forward pass begins with this request."""
    for number, microbatch in enumerate(microbatches):
        slots.forward(chunk, number)
        yield microbatch


def _hooked(slots: Slots, forward_step: Callable[..., Any], models: Sequence[Any]):
    """Return a forward step whose output reports the start of its backward pass to `slots`."""
    done = [0] * len(models)

    def step(microbatches, model, *args):
        output, loss = forward_step(microbatches, model, *args)
        chunk = next(n for n, one in enumerate(models) if one is model)
        number, done[chunk] = done[chunk], done[chunk] + 1
        output.register_hook(lambda gradient: slots.backward(chunk, number))
        return output, loss

    return step
