"""The process group of the ranks that share their media."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def scope_group(
    scopes: Sequence[Sequence[int]], timeout_seconds: float
) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share their media with this one.

    Every rank of the job calls it with the same arguments; see `sharded.blocks` for why.

    Args:
        scopes: ranks of each such group, rising; together all ranks.

    Returns:
        None, which means everyone, where there is a single scope.
    """
    if len(scopes) == 1:
        return None
    found = None
    for ranks in scopes:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_seconds))
        if isinstance(group, dist.ProcessGroup):  # a number where this rank has no part in it
            found = group
    return found
