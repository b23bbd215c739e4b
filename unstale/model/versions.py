"""Versions."""

import torch
from torch import Tensor

VersionGaps = tuple[tuple[int, int], ...]
"""Where the numbers of versions jumped: the first number after it, and all that were skipped up to there."""


def lag_of(version: Tensor, *, at: int, version_gaps: VersionGaps) -> Tensor:
    """How stale, counted in batches, what `version` sampled is for the policy `at` a version. Below 0 if newer.

    Every batch leads to one version, so without jumps it is `at - version`. After a resume the weights of version 4 may
    be called 7, because 5 and 6 were published before their training was lost: 7 then has the place of 4 in the
    schedule. A lost version keeps its own place, and is of lag 0 until the policy gets there; what its tokens were
    sampled from, the exact routes know all the same.

    >>> lag_of(torch.tensor([3, 4, 5, 6, 7, 8]), at=9, version_gaps=((7, 3),)).tolist()
    [3, 2, 1, 0, 2, 1]
    >>> lag_of(torch.tensor([4, 6, 8, 11, 12]), at=12, version_gaps=((7, 3), (11, 5))).tolist()
    [3, 1, 2, 1, 0]
    """
    behind = schedule_positions(torch.tensor(at), version_gaps) - schedule_positions(
        version, version_gaps
    )
    return torch.where(version <= at, behind.clamp(min=0), behind)


def schedule_positions(version: Tensor, version_gaps: VersionGaps) -> Tensor:
    """Batches that led to each version: its number, less all that was skipped before it."""
    firsts = torch.tensor([first for first, _ in version_gaps], dtype=torch.long)
    skipped = torch.tensor([0, *(skipped for _, skipped in version_gaps)])
    return version - skipped[torch.bucketize(version, firsts, right=True)]
