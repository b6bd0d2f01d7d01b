"""All packaging facts are in pyproject.toml; this file serves tools that still call setup.py."""

from setuptools import setup

setup()
