"""Version numbers: staleness counted in batches, with the gaps that a resume leaves."""

import torch
from torch import Tensor

VersionGaps = tuple[tuple[int, int], ...]
"""Gaps in the version numbers: `(first number after the gap, count of numbers skipped so far)`."""


def lag_of(version: Tensor, *, at: int, version_gaps: VersionGaps) -> Tensor:
    """Return the staleness of `version`, in batches, for a policy at version `at`.

    Every batch makes one version, so without gaps it is `at - version`; below 0 for a newer
    version. A resume may give the weights of version 4 the number 7, because 5 and 6 were published
    before the crash. In the schedule 7 then counts as 4. A lost version keeps its own place, and
    has lag 0 until the policy reaches it. Exact routes still answer with the weights that sampled
    its tokens.

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
