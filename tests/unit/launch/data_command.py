"""What tests of `kimi-pretrain data` have in common."""

from typer.testing import CliRunner

from launch.cli.main import app


def run(*arguments: object, code: int = 0):
    """Run `kimi-pretrain data ARGUMENTS`; a user's error is one line."""
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == code, result.output
    if code == 2:
        [told] = result.stderr.splitlines()
        assert told.startswith("error: ")
    return result
