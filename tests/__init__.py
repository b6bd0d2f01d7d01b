"""The root of the project, whatever folder a test lies in."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
