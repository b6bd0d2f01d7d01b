"""`python -m launch.cli`: the same as `kimi-pretrain`."""

from launch.cli.main import main

main()
