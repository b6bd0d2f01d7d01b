"""Third-party modules that tests import lazily."""

from types import ModuleType
from typing import Any

import pytest


class Later:
    """A module that is imported on first use; the test is skipped if it is not installed.

    Every xdist worker collects every file, and importing transformers takes 2 s of a core.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module(), name)

    def module(self) -> ModuleType:
        """Import and return the module."""
        return pytest.importorskip(self._name)
