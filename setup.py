"""Package discovery and package data, which pyproject.toml cannot express.

All other packaging facts are in pyproject.toml. configs/ stays at the top level of the checkout and
is installed as the package `kimi_pretrain.configs`.
"""

from setuptools import find_packages, setup

ROOMS = ("data_pipeline", "kimi_pretrain", "launch", "moonvit3d", "typed_config")

setup(
    packages=[
        *find_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")]),
        "kimi_pretrain.configs",
    ],
    package_dir={"kimi_pretrain.configs": "configs"},
    package_data={
        "kimi_pretrain.configs": ["*.yaml", "stages/*.yaml"],
        "launch.pages": ["*.css"],
        "launch.slurm": ["*.sbatch"],
        "launch.web": ["static/*", "templates/*"],
    },
)
