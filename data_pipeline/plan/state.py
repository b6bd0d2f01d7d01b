"""Planner state: fields that must match for a resume, and checks that refuse other states."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from data_pipeline.config import DataConfig
from data_pipeline.index.columns import SourceIndex
from data_pipeline.names import listed
from typed_config.section import Section

SCHEMA = 3
# Supported schemas. Schema 2 has no `changes`, because --change-data was added later.
_READ = (2, SCHEMA)
_HASH = 12  # hexadecimal digits of a source's content hash in a state

# Progress fields, added by the planner.
OWN_FIELDS = ("blend", "window", "row", "opened", "step", "tokens", "quarantine", "changes")
# Fields added only if there are tombstones or redactions (`Tombstones.fields`).
TOMBSTONES = ("tombstones", "redacted")

State = dict[str, Any]


class Identity:
    """Fields that identify a run's data in every state: sources, packing, decoders, seed.

    Args:
        indices: indices of the sources, in the planner's order.
        config: config of the run.
    """

    def __init__(self, indices: Sequence[SourceIndex], config: DataConfig):
        self.config, self.indices = config, indices
        names = [index.name for index in indices]
        chosen = {name: f" {choice.bounds}" for name in names if (choice := config.chosen(name))}
        contents = "\n".join(
            f"{index.name} {index.identity}{chosen.get(index.name, '')}" for index in indices
        )
        self.manifest = hashlib.sha256(contents.encode()).hexdigest()
        # Name -> content hash, followed by the length bounds if there are any.
        self._contents = {
            index.name: index.identity[:_HASH] + chosen.get(index.name, "") for index in indices
        }
        self._packing = packing_of(config)

    def fields(self) -> State:
        """Return the identity fields of a state."""
        return {
            "schema": SCHEMA,
            "manifest": self.manifest,
            "sources": dict(self._contents),
            "packing": dict(self._packing),
            "decoders": _decoders() if self.config.same_decoders else None,
            "seed": self.config.seed,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Check a state field by field; refuse a malformed state or a state of another run.

        Raises:
            ValueError: a field does not match; the message names it.
        """
        expected = self.fields()
        fields = {*expected, *OWN_FIELDS}
        # States of earlier versions may lack `sources`, `tokens` and `changes`.
        missing = {"sources", "tokens", *(("changes",) if state.get("schema") == 2 else ())}
        if ({*state} | missing) - {*TOMBSTONES} != fields:
            raise ValueError(
                f"state has fields {listed(sorted(state))}; expected {listed(sorted(fields))}"
            )
        if state["schema"] not in _READ:
            _same("schema", state["schema"], expected["schema"])
        if state["manifest"] != self.manifest:
            raise ValueError(_other_sources(state.get("sources"), self._contents))
        _same("seed", state["seed"], expected["seed"])
        packing = state["packing"] if isinstance(state["packing"], dict) else {}
        for field, value in self._packing.items():
            _same(f"packing.{field}", packing.get(field), value)
        if self.config.same_decoders and state["decoders"] not in (None, expected["decoders"]):
            raise ValueError(
                f"state field 'decoders' is {state['decoders']!r}, installed are "
                f"{expected['decoders']!r}: pictures may decode to other pixels; install those "
                "versions, or accept the difference with same_decoders: false"
            )
        for field in ("window", "row", "opened", "step"):
            value = state[field]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"state field {field!r} is {value!r}; expected an integer >= 0")
        self._check_lists(state)
        self._check_tokens(state.get("tokens"))

    def _check_tokens(self, tokens: object) -> None:
        if tokens is None:
            if self.config.budget is not None:
                raise ValueError(
                    "state field 'tokens' is missing: the state was written by an earlier version, "
                    "so nobody knows what is left of data.budget; leave it out, or begin a new run "
                    "from its weights (train.start_from)"
                )
            return
        counts = tokens if isinstance(tokens, list) else []
        if len(counts) != 2 or not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(
                f"state field 'tokens' is {tokens!r}; expected [text, vision], integers >= 0"
            )

    def _check_lists(self, state: Mapping[str, Any]) -> None:
        """Refuse `blend`, `changes` or `quarantine` if malformed or from other data."""
        window = self.config.pack_window
        try:
            starts = [start for start, _ in blend_segments_of(state)]
        except (TypeError, ValueError):
            starts = []
        if not starts or starts[0] != 0 or any(start % window for start in starts):
            raise ValueError(
                f"state field 'blend' is {state['blend']!r}; expected [[0, weights], ...] with "
                f"starts at multiples of {window}"
            )
        try:
            changes = [(int(a), int(b), [*map(str, c)]) for a, b, c in state.get("changes", ())]
        except (TypeError, ValueError):
            changes = [(0, -1, [""])]
        if any(step < 1 or at % window for step, at, _ in changes):
            raise ValueError(
                f"state field 'changes' is {state['changes']!r}; expected [[step, position, new "
                f"sources], ...] with steps from 1 and positions at multiples of {window}"
            )
        try:
            entries = [(int(a), int(b), int(c)) for a, b, c in state["quarantine"]]
        except (TypeError, ValueError):
            raise ValueError(
                f"state field 'quarantine' is {state['quarantine']!r}; expected [[source, sample, "
                "step], ...]"
            ) from None
        for source, sample, _ in entries:
            inside = 0 <= source < len(self.indices)
            if not inside or not 0 <= sample < self.indices[source].num_samples:
                raise ValueError(
                    f"state field 'quarantine' names sample {sample} of source {source}, which "
                    "this data does not have"
                )


def blend_segments_of(state: Mapping[str, Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return (start, weights) of the blend segments that a state holds."""
    return tuple((int(start), tuple(weights)) for start, weights in state["blend"])


def _other_sources(found: object, here: Mapping[str, str]) -> str:
    """Return the message on how a state's sources (name -> hash, bounds) differ from this run's."""
    told: list[str] = []
    if isinstance(found, Mapping):
        told += [f"source {name!r} is no longer among them" for name in sorted({*found} - {*here})]
        told += [f"source {name!r} is new" for name in sorted({*here} - {*found})]
        for name in sorted({*here} & {*found}):
            (before, by), (now, by_now) = (
                str(one[name]).partition(" ")[::2] for one in (found, here)
            )
            if before != now:
                told.append(f"source {name!r} holds other data than it did")
            elif by != by_now:
                every = "no bounds"
                told.append(
                    f"source {name!r} was chosen by {by or every}, this run has {by_now or every}"
                )
    what = "; ".join(told) or "the state does not say which source differs"
    return (
        "state field 'manifest': the state belongs to other sources than this configuration's "
        f"{listed(here)}: {what}. Its rows would not be continued: give the sources that the run "
        "began with, go over to these from the next window on (train --resume latest "
        "--change-data), or begin a new run (train.start_from takes the weights along)"
    )


def packing_of(config: DataConfig) -> dict[str, Any]:
    """Return the remaining settings that the rows depend on, in a form for states."""
    augment = json.dumps([[name, _text(config.augment[name])] for name in sorted(config.augment)])
    return {
        "seq_len": config.seq_len,
        "pack_window": config.pack_window,
        "shard_window": config.shard_window,
        "limits": [config.limits.image, config.limits.frame, config.limits.side],
        "split_text": config.split_text,
        "shrink_media": config.shrink_media,
        "augment": hashlib.sha256(augment.encode()).hexdigest()[:16] if config.augment else None,
    }


def _text(value: object) -> str:
    """Return a section as Name(key=value, ...), so that hashes do not depend on pydantic's repr."""
    if not isinstance(value, Section):
        return repr(value)
    keys = (f"{name}={_text(getattr(value, name))}" for name in type(value).model_fields)
    return f"{type(value).__name__}({', '.join(keys)})"


@lru_cache(maxsize=1)
def _decoders() -> str:
    """Return names and versions of the decoder libraries."""
    return " ".join(f"{name} {version(name)}" for name in ("pillow", "av"))


def _same(field: str, value: object, expected: object) -> None:
    if value != expected:
        raise ValueError(
            f"state field {field!r} is {value!r}, this run has {expected!r}: the state belongs "
            "to another run and its rows would not be continued"
        )
