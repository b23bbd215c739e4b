"""Version numbers: staleness counted in batches, with the gaps that a resume leaves."""

import torch
from torch import Tensor

VersionGaps = tuple[tuple[int, int], ...]
"""Gaps in the version numbers: `(first number after the gap, count of numbers skipped so far)`."""


def lag_of(version: Tensor, *, at: int, version_gaps: VersionGaps) -> Tensor:
    """Return how many batches a policy at version `at` is ahead of each version in `version`.

    Every batch makes one version, so without gaps this is `at - version`, negative for a newer
    version. A resume may give the weights of version 4 the new number 7, because versions 5 and 6
    were published before a crash. Then 7 counts as 4, the next version 8 as 5, and so on. The lost
    versions still count as 5 and 6, and have lag 0 until the policy has trained as many batches.

    >>> lag_of(torch.tensor([3, 4, 5, 6, 7, 8]), at=9, version_gaps=((7, 3),)).tolist()
    [3, 2, 1, 0, 2, 1]
    >>> lag_of(torch.tensor([4, 6, 8, 11, 12]), at=12, version_gaps=((7, 3), (11, 5))).tolist()
    [3, 1, 2, 1, 0]
    """
    behind = num_batches(torch.tensor(at), version_gaps) - num_batches(version, version_gaps)
    return torch.where(version <= at, behind.clamp(min=0), behind)


def num_batches(version: Tensor, version_gaps: VersionGaps) -> Tensor:
    """Return the number of batches trained up to each version: its number less those skipped."""
    firsts = torch.tensor([first for first, _ in version_gaps], dtype=torch.long)
    skipped = torch.tensor([0, *(skipped for _, skipped in version_gaps)])
    return version - skipped[torch.bucketize(version, firsts, right=True)]
