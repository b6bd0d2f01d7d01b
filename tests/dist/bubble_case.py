"""Actions of worker.py on vision work in bubbles: the same step without and with bubbles."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kimi_pretrain.dep.bubble_check import check
from tests.dist.basic_case import line_of

LANGUAGE = "language_model."
SEEDS, PROPOSALS = 3, 200
LONGEST_SLEEP = 0.02


def bubbles(run) -> dict[str, Any]:
    """Take one step with DEP, then with the same ranks' work in bubbles, at varying times.

    Variants: "planned"; "moved N", with pieces of work in random other slots, as far as no deadlock
    arises; "asleep", the same with random pauses on all ranks; "summed behind", as "planned", but
    no bucket is sent before all are done. Each variant reports per rank: "encoder" and "backbone",
    the largest relative difference of any tensor's gradient from DEP's; "loss", whether it is
    bit-identical; "bits", whether the encoder's gradients equal those of "planned"; the pieces
    planned between two passes ("forward inside", "backward inside"); how often a unit continues
    after pieces of a later one ("forward mixed", "backward mixed"); the pieces run between two
    passes ("done inside"); patches "kept"; the number of gradient "buckets" of the encoder, and how
    many had "left" with the last piece (None if more gradients follow); the (unit, piece) pairs
    whose backward ran "together" at the end; seconds. Totals: "shared" items, "units", and units of
    several items ("joined").
    """
    from kimi_pretrain.step import TrainStep

    batch = next(run.loader)
    step, vision = run.train_step, run.planner.plan(batch.plan)
    sums = run.encoder.sums
    sums._limit = 4_000
    sums.to_owners(run.update.optimizer.owner_ranks("encoder"))
    kept: list[dict[str, torch.Tensor]] = []

    def gradients(plan, **patched) -> tuple[dict[str, torch.Tensor], Any]:
        planned = _patched(run.planner, plan=lambda _: plan)
        with _without_update(run), planned, _patched(step, **patched):
            report = step.run(batch)
        named = {t.name: t for t in run.update.named if run.update.optimizer.leads(t.name)}
        return {name: tensor.grad().clone() for name, tensor in named.items()}, report

    dep, plain = gradients(
        replace(vision, bubbles=None), _decoupled=partial(TrainStep._decoupled, step)
    )
    moves = [(f"moved {seed}", _moved(vision.bubbles, seed)) for seed in range(SEEDS)]
    found = {}
    last = "summed behind", vision.bubbles
    for name, plan in [("planned", vision.bubbles), *moves, ("asleep", moves[0][1]), last]:
        began = time.time()
        with ExitStack() as around:
            done = around.enter_context(_done_inside())
            if name == "asleep":
                around.enter_context(_sleeps(run.mesh.rank))
            if name == "summed behind":
                around.enter_context(_patched(sums, last=nullcontext))
            left = around.enter_context(_left(sums))
            behind = around.enter_context(_done_behind())
            mine, report = gradients(replace(vision, bubbles=plan))
        kept.append(mine)
        errors = {name: _error(mine[name], want) for name, want in dep.items()}
        ours = {
            "encoder": max((e for n, e in errors.items() if not n.startswith(LANGUAGE)), default=0),
            "backbone": max((e for n, e in errors.items() if n.startswith(LANGUAGE)), default=0),
            "loss": report.loss == plain.loss,
            "bits": all(torch.equal(mine[name], first) for name, first in kept[0].items()),
            "done inside": len(done),
            "buckets": len(sums._parts),
            "left": left[0] if left else None,
            "together": list(behind)[-plan.plan.together[run.mesh.rank] or len(behind) :],
            "kept": report.kept_patches,
            "measured": report.bubble_seconds,
            "seconds": time.time() - began,
        } | _inside(plan.plan, run.mesh.rank)
        found[name] = run.mesh.all_gather_object(ours)
    found["shared"] = int((vision.parts > 1).sum())
    found["units"] = len(vision.bubbles.units)
    found["joined"] = int((np.bincount(vision.bubbles.unit + 1)[1:] > 1).sum())
    found["dep loss"] = plain.loss
    return found


def bubble_training(run) -> list[dict]:
    """Take the steps of a run with updates; return the line of each."""
    reports = [run.train_step.run(next(run.loader)) for _ in range(run.config.train.steps)]
    return [
        line_of(run, report)
        | {
            "encoded": report.bubble_seconds is not None,
            "moved": sum(
                sum(one.values()) for one in run.mesh.all_gather_object(report.exchange_bytes)
            ),
            "timeline": run.mesh.all_gather_object(
                {
                    "sections": report.bubble_sections,
                    "seconds": report.bubble_seconds,
                    "spans": {n: s for n, s in report.spans.items() if n.startswith("4 backbone")},
                }
            ),
        }
        for report in reports
    ]


def bubble_learning(run) -> list[dict]:
    """Take the steps of a run and feed the measured times back; return the line of each.

    Each line adds all ranks' "slots" of the planned work and "factors" of the cost model.
    """
    lines = []
    for _ in range(run.config.train.steps):
        batch = next(run.loader)
        bubbles = run.planner.plan(batch.plan).bubbles
        report = run.train_step.run(batch)
        run.planner.learning.add(batch.plan.step, run.mesh.all_gather_object(report.bubble_times))
        slots = [bubbles.plan.forward, bubbles.plan.backward]
        told = {"factors": run.mesh.all_gather_object(bubbles.factors), "slots": slots}
        lines.append(line_of(run, report) | told)
    return lines


def bubble_rules(run) -> dict[str, Any]:
    """Return the errors for a deviating schedule, and the message of a run without a pipeline."""
    from kimi_pretrain.dep.bubble_links import Links
    from kimi_pretrain.dep.bubble_run import BubbleRun, OutOfOrder
    from kimi_pretrain.dep.bubble_step import dep_step
    from kimi_pretrain.engine.slots import SlotCommunicator

    batch = next(run.loader)
    vision, links = run.planner.plan(batch.plan), run.train_step.links
    assert isinstance(links, Links)
    vision = replace(vision, bubbles=replace(vision.bubbles, plan=_nothing(vision.bubbles.plan)))
    work = BubbleRun(
        vision, 0, run.encoder, links, [], {}, 0, None, False, lambda phase: ExitStack()
    )
    work._make_leaf = lambda microbatch: None
    work.forward(0, 0)
    messages = []

    def fails(method, *args):
        try:
            method(*args)
        except (OutOfOrder, ValueError) as error:
            messages.append(str(error))

    fails(work.backward, 0, 0)
    work._forward.append((1, 0, 0))
    fails(work.backward, 0, 0)
    work._forward.clear()
    fails(work.finish)
    config = run.config.replace(layout=run.config.layout.replace(pp=1, vpp=1))
    with _heard("kimi_pretrain.train") as heard:
        step = dep_step(config, run.mesh, run.model, run.update, run.planner)
    engine = copy(run.backbone.engine)
    engine.batch_p2p_comm = True
    group = run.mesh.groups["encoder"]
    fails(SlotCommunicator, group, engine, work)
    *disorder, batched = messages
    kind = type(step).__name__
    return {"disorder": disorder, "batched": batched, "no pipeline": (kind, "".join(heard))}


def _nothing(plan):
    """Return the plan without its work."""
    none = [[] for _ in plan.stage]
    return replace(plan, forward=none, backward=none)


@contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    """Collect the messages of a logger."""
    heard = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    yield heard
    logging.getLogger(name).removeHandler(handler)


def bubble_fault(run) -> None:
    """Take a step in which encoding an item fails inside the last rank's schedule."""
    from kimi_pretrain.dep.unit_pass import UnitPass

    if run.mesh.rank == run.mesh.world_size - 1:
        UnitPass.backward = _broken
    run.train_step.run(next(run.loader))


def bubble_disorder(run) -> None:
    """Take a step whose plan swaps two forward passes of the first stage."""
    from kimi_pretrain.dep.bubble_run import BubbleRun

    class Other(BubbleRun):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            first, second, *rest = self.passes
            self.passes = (second, first, *rest)

    import kimi_pretrain.dep.bubble_step as module

    module.BubbleRun = Other
    run.train_step.run(next(run.loader))


def _broken(*args) -> None:
    raise RuntimeError("planted")


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if torch.equal(found, wanted):
        return 0.0
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _inside(plan, rank: int) -> dict[str, int]:
    """Count a rank's pieces between two passes, and its returns to a unit after a later one."""
    last, found = plan.schedule.num_passes, {}
    for way, slices in (("forward", plan.forward[rank]), ("backward", plan.backward[rank])):
        found[f"{way} inside"] = sum(s.end - s.begin for s in slices if 0 < s.slot < last)
        found[f"{way} mixed"] = sum(a.unit > b.unit for a, b in pairwise(slices))
    return found


@contextmanager
def _done_inside() -> Iterator[list[int]]:
    """Collect the units of the pieces that run between two passes."""
    from kimi_pretrain.dep.bubble_run import BubbleRun

    working, done = BubbleRun._working, list[int]()

    def told(self, phase: str, unit: int, kind: int, *, more: bool = False):
        if 0 < self.started < len(self.passes) and not more:
            done.append(unit)
        return working(self, phase, unit, kind, more=more)

    BubbleRun._working = told
    yield done
    BubbleRun._working = working


@contextmanager
def _done_behind() -> Iterator[list[tuple[int, int]]]:
    """Collect each (unit, piece) whose backward runs after the last pass."""
    from kimi_pretrain.dep.bubble_run import BubbleRun

    go_back, done = BubbleRun._go_back, list[tuple[int, int]]()

    def told(self, unit: int, piece: int) -> None:
        if self.started == len(self.passes):
            done.append((unit, piece))
        go_back(self, unit, piece)

    BubbleRun._go_back = told
    yield done
    BubbleRun._go_back = go_back


@contextmanager
def _left(sums) -> Iterator[list[int]]:
    """Collect how many buckets were sent before the final send, inside the schedule.

    No bucket may be sent before its release. Nothing is collected if buckets are not held.
    """
    left, held, early = list[int](), list[int](), list[int]()
    kind, send_all = type(sums), sums.send_all

    def hold() -> None:
        held.append(1)
        kind.hold(sums)

    def release() -> None:
        early.append(len(sums._work))
        kind.release(sums)

    def last() -> None:
        if held:
            left.append(len(sums._work))
        send_all()

    def finish() -> None:
        assert not held or len(sums._work) == len(sums._parts)  # before other sums
        kind.finish(sums)

    with _patched(sums, hold=hold, release=release, send_all=last, finish=finish):
        yield left
    assert not any(early)


def _moved(bubbles, seed: int):
    """Move work to random other slots, as far as the plan check allows."""
    plan, draw = bubbles.plan, np.random.Generator(np.random.Philox(key=seed))
    last = plan.schedule.num_passes

    def pieces(slices):
        return [s._replace(begin=n, end=n + 1) for s in slices for n in range(s.begin, s.end)]

    plan = replace(
        plan,
        forward=[pieces(slices) for slices in plan.forward],
        backward=[pieces(slices) for slices in plan.backward],
    )
    for _ in range(PROPOSALS):
        way, rank = str(draw.choice(["forward", "backward"])), int(draw.integers(len(plan.stage)))
        mine = list(getattr(plan, way)[rank])
        if not mine:
            continue
        at, slot = int(draw.integers(len(mine))), int(draw.integers(last + 1))
        kind = draw.random()
        if kind < 0.2:
            mine[at : at + 2] = [
                s._replace(slot=place.slot)
                for s, place in zip(mine[at : at + 2][::-1], mine[at : at + 2])
            ]
        elif kind < 0.6:
            mine[at:] = [s._replace(slot=max(s.slot, slot)) for s in mine[at:]]
        else:
            mine[: at + 1] = [s._replace(slot=min(s.slot, slot)) for s in mine[: at + 1]]
        passes = plan.schedule.passes[int(plan.stage[rank])]
        # The last chunk's backward pass waits for no message, so forward work cannot precede it.
        if way == "forward" and any(
            s.slot < last and _own(plan.schedule, int(plan.stage[rank]), passes[s.slot])
            for s in mine
        ):
            continue
        other = [*getattr(plan, way)[:rank], mine, *getattr(plan, way)[rank + 1 :]]
        proposed = replace(plan, **{way: other})
        try:
            check(proposed)
        except ValueError:  # a cycle, or units out of order
            continue
        plan = proposed
    wide = [dict.fromkeys(range(1, last), 1e9) for _ in bubbles.room]
    return replace(bubbles, plan=plan, room=wide)


def _own(schedule, stage: int, this) -> bool:
    needed = schedule.needed(stage, this)
    return this.backward and needed is not None and not needed[1].backward


@contextmanager
def _patched(thing, **attributes) -> Iterator[None]:
    """Set attributes of one object temporarily."""
    for name, value in attributes.items():
        setattr(thing, name, value)
    yield
    for name in attributes:
        delattr(thing, name)


@contextmanager
def _without_update(run) -> Iterator[None]:
    """Keep weights and gradients unchanged after a step."""
    from kimi_pretrain.update import UpdateReport

    def update(loss_tokens: int, loss: float) -> UpdateReport:
        run.backbone.undo_routing_biases()
        run.backbone.take_max_logits()
        return UpdateReport(0.0, 0.0, applied=False)

    with _patched(run.update, run=update):
        yield


@contextmanager
def _sleeps(rank: int) -> Iterator[None]:
    """Pause at random wherever the schedule or a message meets bubble work."""
    from kimi_pretrain.dep.bubble_run import BubbleRun

    draw = np.random.Generator(np.random.Philox(key=1000 + rank))
    names = ("fill", "forward", "backward", "finish", "_send", "_give_back", "_go_back", "_post")
    before = {name: getattr(BubbleRun, name) for name in names}

    def slow(method):
        def run(self, *args, **options):
            if draw.random() < 0.5:
                time.sleep(LONGEST_SLEEP * draw.random())
            return method(self, *args, **options)

        return run

    for name, method in before.items():
        setattr(BubbleRun, name, slow(method))
    yield
    for name, method in before.items():
        setattr(BubbleRun, name, method)


ACTIONS = {
    "bubbles": bubbles, "bubble_training": bubble_training, "bubble_learning": bubble_learning,
    "bubble_fault": bubble_fault, "bubble_disorder": bubble_disorder, "bubble_rules": bubble_rules,
}  # fmt: skip
