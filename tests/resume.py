"""Shared resume test for stateful objects: stop at every step, restore, and compare the rest."""

import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def assert_resumes_anywhere(
    make: Callable[[], Any], steps: int, digest: Callable[[Any], Any] | None = None
) -> list[Any]:
    """Assert that `make()` continues identically from its state at each of 0..steps steps.

    `make` returns a fresh object with `next`, `state_dict` and `load_state_dict`. `digest`
    (default: `fingerprint`) compares the values that `next` returns. States are pickled, so that
    they share nothing with the original object. Returns the digests of all steps.
    """
    digest = digest or fingerprint
    whole: list[Any] = []
    runner = make()
    states = [pickle.dumps(runner.state_dict())]
    for _ in range(steps):
        whole.append(digest(next(runner)))
        states.append(pickle.dumps(runner.state_dict()))
    for stop, state in enumerate(states):
        fresh = make()
        fresh.load_state_dict(pickle.loads(state))
        rest = [digest(next(fresh)) for _ in range(steps - stop)]
        assert rest == whole[stop:], f"resumed at step {stop}: the rest differs"
        _close(fresh)
    # Also restore an object that has advanced: nothing may leak from its later state.
    runner.load_state_dict(pickle.loads(states[0]))
    assert [digest(next(runner)) for _ in range(steps)] == whole, "a used object does not go back"
    _close(runner)
    return whole


def fingerprint(value: Any) -> str:
    """Return a sha256 over numbers, strings, arrays, tensors and containers of them."""
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    hasher.update(f"<{type(value).__name__}>".encode())
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.dtype.itemsize == 2 and value.dtype.is_floating_point:
            value = value.float()  # exact; numpy has no bfloat16
        value = value.numpy()
    if isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _feed(hasher, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _feed(hasher, key)
            _feed(hasher, item)
    elif isinstance(value, str | bytes | int | float | bool | np.generic | None):
        hasher.update(repr(value).encode())
    elif isinstance(value, Sequence):
        hasher.update(str(len(value)).encode())
        for item in value:
            _feed(hasher, item)
    else:
        raise TypeError(f"cannot fingerprint {type(value)}")


def _close(thing: Any) -> None:
    if hasattr(thing, "close"):
        thing.close()
