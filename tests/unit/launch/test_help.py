"""Tests that every command's help shows its examples unwrapped on a terminal of 80 columns."""

import inspect

import pytest
import typer
from typer.testing import CliRunner

from launch.cli.main import app


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_line_of_an_example_is_wrapped(path):
    text = inspect.cleandoc(COMMANDS[path].help or "")
    _, found, examples = text.partition("\b\n")
    assert found, "a command's help ends with examples"
    assert f"kimi-pretrain {' '.join(path)}" in examples
    # The panel has a margin of one column on each side of the 80.
    shown = CliRunner().invoke(app, [*path, "--help"], terminal_width=80, env={"COLUMNS": "80"})
    lines = [line[1:].rstrip() for line in shown.output.splitlines()]
    for line in examples.splitlines():
        assert line.rstrip() in lines
    # A continued line ends with a backslash, so the last line must not.
    assert not examples.rstrip().endswith("\\")
