"""Runs the planned vision work of one rank in the bubbles of its pipeline.

The schedule reports when it is about to wait and which pass it begins (`engine.slots`); slot n is
the time before pass n. In its slots, a rank runs pieces of its units and sends each output at once.
A first-stage rank posts receives a few microbatches ahead and assembles a microbatch's leaf when
the first pass of the microbatch begins. Once the leaf has its gradient, the rank sends it back,
unit by unit. Backward work waits for the gradient in a slot that the plan puts after its arrival.
After the last pass, the encoder's gradients start their sum over all ranks as the last unit's
pieces complete them.

Sends are waited for only at the end. Inside the schedule, a rank waits for at most the events that
`bubble_check` checked: it may run forward work earlier than planned and postpone backward work.
Such local decisions do not change results, because gradients of each piece are added in the order
of units and the sums of the backbone are not affected.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import Work

from kimi_pretrain.dep.bubble_links import Links
from kimi_pretrain.dep.bubble_plan import OVER
from kimi_pretrain.dep.bubble_times import RankTimes
from kimi_pretrain.dep.encoder import DecoupledEncoder, Pixels
from kimi_pretrain.dep.step_bubbles import FILLED, KINDS, OVERRUN, WAIT, WASTED
from kimi_pretrain.dep.timeline import Pass
from kimi_pretrain.dep.unit_pass import UnitPass
from kimi_pretrain.dep.vision_plan import Ints, VisionPlan, runs
from kimi_pretrain.engine.microbatch import Microbatch
from kimi_pretrain.telemetry.stopwatch import Stopwatch


class OutOfOrder(RuntimeError):
    """The schedule runs another pass than the planned one; the message names both."""


@dataclass
class _Message:
    """Some rows of a unit in transit to a first-stage rank.

    Attributes:
        peer: rank on the other side; may be this rank.
        rows: rows of the unit's output, or positions in the microbatch, int64.
        buffer: rows in wire format, [rows, hidden].
    """

    unit: int
    peer: int
    rows: Ints
    buffer: Tensor | None = None
    work: Work | None = None

    def take(self) -> Tensor:
        """Wait for the rows and return them; releases the buffer."""
        if self.work is not None:
            self.work.wait()
        buffer, self.buffer, self.work = self.buffer, None, None
        assert buffer is not None, f"unit {self.unit} from rank {self.peer} is not there"
        return buffer


@dataclass
class _Unit:
    """A unit on the rank that encodes it, and the destinations of its rows."""

    run: UnitPass
    to: list[_Message] = field(default_factory=list)


class BubbleRun:
    """One step's vision work in bubbles on one rank; implements `Slots` for its schedule.

    Args:
        vision: plan of the step, with bubbles.
        stage: pipeline stage of this rank.
        links: connections to the other ranks.
        grids: (frames, height, width) of all items of the step, [items, 3].
        pixels: pixels of this rank's items.
        ahead: number of microbatches between posting receives and the first pass.
        wire: dtype in transit; None: the encoder's.
        complete: True if no later work adds to the encoder's gradients, so they can be reduced.
        phase: returns a context manager that records work under a phase name.

    Attributes:
        waits: stopwatch of idle waits.
    """

    def __init__(
        self,
        vision: VisionPlan,
        stage: int,
        encoder: DecoupledEncoder,
        links: Links,
        grids: NDArray[np.int64],
        pixels: Pixels,
        ahead: int,
        wire: torch.dtype | None,
        complete: bool,
        phase: Callable[[str], AbstractContextManager[None]],
    ):
        assert vision.bubbles is not None
        self.bubbles, self.plan, self.stage = vision.bubbles, vision.bubbles.plan, stage
        self.encoder, self.links, self.rank = encoder, links, links.rank
        self.grids, self.pixels, self.ahead = grids, pixels, ahead
        self.wire, self.phase = wire or encoder.dtype, phase
        self.waits = Stopwatch(encoder.device)
        self._slots = defaultdict[int, Stopwatch](lambda: Stopwatch(encoder.device))
        self._kinds = [(Stopwatch(encoder.device), list[float]()) for _ in KINDS]  # took, modelled
        self.passes = self.plan.schedule.passes[stage]
        chunks = range(self.plan.schedule.chunks)
        self._running: Stopwatch | None = None
        self._passes = {
            (chunk, backward): Stopwatch(encoder.device)
            for chunk in chunks
            for backward in (False, True)
        }
        self.started = 0  # number of started passes, which is also the slot before the next pass
        self._room = self.bubbles.room[stage]
        # On CUDA the host finishes a slot before the device begins it.
        self._timed = encoder.device.type == "cpu"
        self._units: dict[int, _Unit] = {}
        self._forward = deque(_pieces(self.plan.forward[self.rank]))
        later = self.plan.backward[self.rank] if encoder.trainable else []
        self._backward = deque(_pieces(later))
        self._sums = encoder.sums if complete and encoder.trainable else None
        self._last_unit = later[-1].unit if later else -1
        if self._sums is not None:
            self._sums.hold()
        self._sent: list[tuple[Tensor, Work]] = []
        self._leaves: Sequence[Microbatch] = ()
        self._outgoing: dict[int, list[_Message]] = {}
        self._arriving: dict[int, list[_Message]] = {}  # by microbatch
        self._find_messages(vision)
        self._unposted = deque(m for number in sorted(self._arriving) for m in self._of(number))
        self._returned: dict[int, Tensor] = {}  # gradients of this rank's units from its own leaves

    # Events of the schedule ----------------------------------------------------------------------

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Run the work that the plan has before the first pass; the schedule follows.

        Args:
            microbatches: in order; with leaves for the items that several ranks encoded together.
        """
        self._leaves = microbatches
        self._post(self.ahead - 1)
        if self.stage == 0:  # it has no receive to post first, unlike other stages
            self._encode(0)

    def fill(self, *, gradient: bool) -> None:
        """Work while the stage waits for a gradient, or for the input of a forward pass.

        The awaited input may belong to a pass after the next one, which will then not wait again.
        So this also runs the forward work planned in the slot of that pass.
        """
        self._pass_ends()
        passes = range(self.started, len(self.passes))
        until = next((n for n in passes if self.passes[n].backward == gradient), self.started)
        began, watch = perf_counter(), self._slots[self.started]
        watch.start()
        self._encode(until)
        room = self._room.get(self.started, 0.0)
        while self._backward and self._backward[0][0] <= self.started:
            _, unit, piece = self._backward[0]
            # Postpone when time is up: no rank waits for this work before the end of the step.
            within = (1 - OVER) * self.bubbles.seconds(unit, piece)
            late = perf_counter() - began + within > room
            if self._timed and late:
                break
            self._backward.popleft()
            self._go_back(unit, piece)
        watch.stop()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Measure a wait."""
        with self.phase(WAIT), self.waits.running():
            yield

    def forward(self, chunk: int, microbatch: int) -> None:
        """Handle the begin of a forward pass; on the first stage, its media are ready on return.

        Raises:
            OutOfOrder: the plan has another pass.
        """
        self._pass_ends()
        self._encode(self.started)
        self._begins(Pass(False, chunk, microbatch))
        if self.stage == 0 and chunk == 0:
            self._make_leaf(microbatch)
        self._pass_begins(chunk, backward=False)

    def backward(self, chunk: int, microbatch: int) -> None:
        """Handle the begin of a backward pass.

        Raises:
            OutOfOrder: the plan has another pass or vision work.
        """
        if self._forward and self._forward[0][0] <= self.started:
            raise OutOfOrder(
                f"stage {self.stage} did not wait before the {Pass(True, chunk, microbatch)}, "
                "where the plan has vision work"
            )
        self._pass_ends()
        self._begins(Pass(True, chunk, microbatch))
        self._pass_begins(chunk, backward=True)

    def finish(self) -> None:
        """Run the remaining work after the last pass, then wait until all sends have completed."""
        self._pass_ends()
        if self.started < len(self.passes):
            raise OutOfOrder(f"stage {self.stage} ended before the {self.passes[self.started]}")
        assert not self._forward
        if self._sums is not None:
            # Not earlier: other ranks' buckets may depend on passes that wait for this rank.
            self._sums.release()
        together = int(self.plan.together[self.rank])
        while len(self._backward) > together:
            _, unit, piece = self._backward.popleft()
            self._go_back(unit, piece)
        for _, unit, piece in sorted(self._backward, key=itemgetter(2)):  # keeps the order of units
            self._go_back(unit, piece)
        self._backward.clear()
        if self._sums is not None:
            self._sums.send_all()
        with self.idle():
            for _, work in self._sent:
                work.wait()
        self._sent = []

    def seconds(self) -> dict[str, float]:
        """Return the measured seconds of each kind in `MEASURED`."""
        between = {slot: watch for slot, watch in self._slots.items() if slot}
        over = [watch.seconds() - self._room.get(slot, 0.0) for slot, watch in between.items()]
        return {
            FILLED: sum(watch.seconds() for watch, _ in self._kinds),
            WASTED: self.waits.seconds(),
            OVERRUN: sum(max(0.0, seconds) for seconds in over),
        }

    def times(self) -> RankTimes:
        """Return the measured seconds of passes and pieces."""
        passes = [
            (self._passes[chunk, False].mean(), self._passes[chunk, True].mean())
            for chunk in range(self.plan.schedule.chunks)
        ]
        pieces = [(watch.seconds(), sum(modelled)) for watch, modelled in self._kinds]
        return RankTimes(self.stage, tuple(passes), tuple(pieces))

    def _pass_begins(self, chunk: int, *, backward: bool) -> None:
        self._running = self._passes[chunk, backward]
        self._running.start()

    def _pass_ends(self) -> None:
        if self._running is not None:
            self._running.stop()

    def _begins(self, this: Pass) -> None:
        if self.started == len(self.passes) or this != self.passes[self.started]:
            planned = "the end" if self.started == len(self.passes) else self.passes[self.started]
            raise OutOfOrder(
                f"stage {self.stage} begins the {this}, where the plan of vision work in bubbles "
                f"has {planned}: Megatron-Core's schedule is not the one that it was made for"
            )
        self.started += 1

    # Work of an encoding rank ---------------------------------------------------------------------

    def _encode(self, until: int) -> None:
        """Run the forward pieces of all slots up to `until`."""
        while self._forward and self._forward[0][0] <= until:
            _, unit, piece = self._forward.popleft()
            with self._working("2 vision forward", unit, 0):
                if piece == 0:
                    self._units[unit] = self._unit(unit)
                output = self._units[unit].run.forward(piece)
            if output is not None:
                self._send(self._units[unit], output)
                if not self.encoder.trainable:
                    del self._units[unit]

    def _unit(self, unit: int) -> _Unit:
        items, kept = self.bubbles.items(unit), int(self.plan.kept[unit])
        grids = [(int(t), int(h), int(w)) for t, h, w in self.grids[items]]
        pixels = [self.pixels[item] for item in items]
        run = UnitPass(self.encoder, pixels, grids, self.plan.pieces, kept=kept)
        return _Unit(run, self._outgoing.get(unit, []))

    def _send(self, unit: _Unit, output: Tensor) -> None:
        for message in unit.to:
            rows = torch.from_numpy(message.rows).to(output.device)
            wire = output.index_select(0, rows).to(self.wire)
            if message.peer == self.rank:
                microbatch = int(self.plan.microbatch[message.unit])
                (own,) = [m for m in self._of(microbatch) if m.unit == message.unit]
                own.buffer = wire
            else:
                self._sent.append((wire, self.links.send("over", wire, message.peer)))

    def _go_back(self, unit: int, piece: int) -> None:
        """Run the backward pass of a piece, after its recompute if it was not kept."""
        work, kind, gradient = self._units[unit], self.bubbles.kind(unit, piece), None
        if piece == 0:
            for message in work.to:
                self._expect_gradient(message)
        with self._working("6 vision backward", unit, kind):
            work.run.again(piece)
        if piece == 0:
            gradient = self._gradient(work)
        last = unit == self._last_unit and self._sums is not None
        with (
            self._working("6 vision backward", unit, kind, more=True),
            self.encoder.sums.last() if last else nullcontext(),
        ):
            work.run.backward(gradient)
        if piece == self.plan.pieces - 1:
            del self._units[unit]

    def _expect_gradient(self, message: _Message) -> None:
        if message.peer == self.rank:
            return
        message.buffer = self._buffer(len(message.rows))
        message.work = self.links.receive("back", message.buffer, message.peer)

    def _gradient(self, unit: _Unit) -> Tensor:
        """Wait for the gradient of a unit's output, [tokens, hidden]."""
        tokens = sum(len(message.rows) for message in unit.to)
        like = {"dtype": self.encoder.dtype, "device": self.encoder.device}
        gradient = torch.empty(tokens, self.encoder.config.out_width, **like)
        for message in unit.to:
            if message.peer == self.rank:
                message.buffer = self._returned.pop(message.unit)
            with self.idle():
                arrived = message.take()
            rows = torch.from_numpy(message.rows).to(gradient.device)
            gradient.index_copy_(0, rows, arrived.to(gradient.dtype))
        return gradient

    @contextmanager
    def _working(self, phase: str, unit: int, kind: int, *, more: bool = False) -> Iterator[None]:
        """Measure a piece, or with `more` the rest of a piece."""
        took, modelled = self._kinds[kind]
        if not more:
            modelled.append(self.bubbles.modelled(unit, kind))
        try:
            with self.phase(phase), took.running():
                yield
        except Exception as error:
            items = ", ".join(map(str, self.bubbles.items(unit)))
            error.add_note(f"in the {phase[2:]} of item {items}, on rank {self.rank}, in a bubble")
            raise

    # Work of a first stage ------------------------------------------------------------------------

    def _of(self, microbatch: int) -> list[_Message]:
        return self._arriving.get(microbatch, [])

    def _post(self, until: int) -> None:
        """Post the receives of all microbatches up to `until`, in the order of units."""
        while self._unposted and self.plan.microbatch[self._unposted[0].unit] <= until:
            message = self._unposted.popleft()
            if message.peer != self.rank:
                message.buffer = self._buffer(len(message.rows))
                message.work = self.links.receive("over", message.buffer, message.peer)

    def _make_leaf(self, number: int) -> None:
        """Assemble a microbatch's leaf, appending to the leaf that it may already have."""
        self._post(number + self.ahead)
        messages, microbatch = self._of(number), self._leaves[number]
        if not messages:
            return
        with self.idle():
            parts = [message.take().to(self.encoder.dtype) for message in messages]
        places = torch.from_numpy(np.concatenate([message.rows for message in messages]))
        places, shared = places.to(self.encoder.device), microbatch.leaf
        if shared is not None:
            assert microbatch.leaf_positions is not None
            parts.insert(0, shared.detach())
            places = torch.cat([microbatch.leaf_positions, places])
        leaf = torch.cat(parts).requires_grad_(self.encoder.trainable)
        microbatch.leaf, microbatch.leaf_positions = leaf, places
        if self.encoder.trainable:

            def done(leaf: Tensor) -> None:
                assert leaf.grad is not None
                microbatch.leaf = shared
                start = 0 if shared is None else len(shared)
                if shared is not None:
                    shared.grad = leaf.grad[:start]
                self._give_back(messages, leaf.grad[start:])

            leaf.register_post_accumulate_grad_hook(done)

    def _give_back(self, messages: Sequence[_Message], gradient: Tensor) -> None:
        """Send the gradient of a microbatch's leaf to the encoding ranks, unit by unit."""
        sizes = [len(message.rows) for message in messages]
        for message, rows in zip(messages, gradient.split(sizes), strict=True):
            wire = rows.to(self.wire).contiguous()
            if message.peer == self.rank:
                self._returned[message.unit] = wire
            else:
                self._sent.append((wire, self.links.send("back", wire, message.peer)))

    # Messages -------------------------------------------------------------------------------------

    def _find_messages(self, vision: VisionPlan) -> None:
        """Derive this rank's messages from the plan; both ends derive the same rows."""
        unit_of, first = self.bubbles.unit, self.bubbles.begins(vision.tokens)
        spans = vision.spans[unit_of[vision.spans.item] >= 0]
        out = spans[spans.source == self.rank]
        begin = first[out.item] + out.begin
        for unit, dest, some in _messages(unit_of[out.item], out.dest, begin):
            rows = runs(begin[some], out.count[some])
            self._outgoing.setdefault(unit, []).append(_Message(unit, dest, rows))
        into = spans[spans.dest == self.rank]
        begin = first[into.item] + into.begin
        for unit, source, some in _messages(unit_of[into.item], into.source, begin):
            rows = runs(into.position[some], into.count[some])
            number = int(self.plan.microbatch[unit])
            self._arriving.setdefault(number, []).append(_Message(unit, source, rows))

    def _buffer(self, rows: int) -> Tensor:
        width = self.encoder.config.out_width
        return torch.empty(rows, width, dtype=self.wire, device=self.encoder.device)


def _pieces(slices) -> Iterator[tuple[int, int, int]]:
    """Yield (slot, unit, piece) of a rank's slices."""
    for unit, slot, begin, end in slices:
        yield from ((slot, unit, piece) for piece in range(begin, end))


def _messages(unit: Ints, peer: Ints, begin: Ints) -> Iterator[tuple[int, int, Ints]]:
    """Yield (unit, peer, its spans in the order of tokens), in the order of units and peers."""
    order = np.lexsort((begin, peer, unit))
    key = np.stack([unit[order], peer[order]])
    borders = np.flatnonzero((key[:, 1:] != key[:, :-1]).any(axis=0)) + 1
    for some in np.split(order, borders) if len(order) else ():
        yield int(unit[some[0]]), int(peer[some[0]]), some
