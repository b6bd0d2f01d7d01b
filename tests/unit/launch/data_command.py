"""Helper for the tests of `kimi-pretrain data`."""

from typer.testing import CliRunner

from launch.cli.main import app


def run(*arguments: object, code: int = 0):
    """Run `kimi-pretrain data ARGUMENTS` and check that a user error (code 2) prints one line."""
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == code, result.output
    if code == 2:
        [told] = result.stderr.splitlines()
        assert told.startswith("error: ")
    return result
