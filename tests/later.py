"""Modules of other people that tests import late."""

from types import ModuleType
from typing import Any

import pytest


class Later:
    """A module that is imported when a test first uses it; without it that test is skipped.

    Every worker of xdist collects every file, and transformers alone takes 2 s of a core.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module(), name)

    def module(self) -> ModuleType:
        """Import it, if nobody has."""
        return pytest.importorskip(self._name)
