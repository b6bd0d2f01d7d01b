"""Runs the `kimi-pretrain` command for `python -m launch.cli`."""

from launch.cli.main import main

main()
