"""How far one version of the weights is behind another, counted in batches (the lag).

Version numbers alone do not give the lag, because a resumed run may skip some.
"""

import torch
from torch import Tensor

VersionGaps = tuple[tuple[int, int], ...]
"""Skipped version numbers: a pair for each gap, (first number after the gap, count of all numbers
skipped so far).
"""


def lag_of(version: Tensor, *, at: int, version_gaps: VersionGaps) -> Tensor:
    """Return how many batches a policy at version `at` was trained on since each `version`.

    This number is the lag. Each batch makes one version. So without gaps the result is `at -
    version`, negative for a newer version. A gap arises if versions 5 and 6 were published before a
    crash and the run resumes with the weights of version 4. These get the new number 7. For the
    lag, 7 then counts as 4, the next version 8 as 5, and so on. Tokens of the lost versions 5 and 6
    count as 5 and 6. Their lag is 0 until the policy has trained on as many batches.

    >>> lag_of(torch.tensor([3, 4, 5, 6, 7, 8]), at=9, version_gaps=((7, 3),)).tolist()
    [3, 2, 1, 0, 2, 1]
    >>> lag_of(torch.tensor([4, 6, 8, 11, 12]), at=12, version_gaps=((7, 3), (11, 5))).tolist()
    [3, 1, 2, 1, 0]
    """
    if not version_gaps:
        return at - version
    behind = num_batches(torch.tensor(at), version_gaps) - num_batches(version, version_gaps)
    return torch.where(version <= at, behind.clamp(min=0), behind)


def num_batches(version: Tensor, version_gaps: VersionGaps) -> Tensor:
    """Return how many batches each version was trained on: its number minus those that were
    skipped.
    """
    firsts = torch.tensor([first for first, _ in version_gaps], dtype=torch.long)
    skipped = torch.tensor([0, *(skipped for _, skipped in version_gaps)])
    return version - skipped[torch.bucketize(version, firsts, right=True)]
