"""Path of the project root, for tests in any folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
