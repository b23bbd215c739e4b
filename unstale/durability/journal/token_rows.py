"""Rows of the table `trained_tokens`: the token values of the episodes of a group in one step.

A row has the columns of all episodes one after the other, compressed together (raw deflate).
Numbers with several bytes are stored as byte planes: all first bytes, then all second bytes, and so
on, because adjacent equal bytes compress better.

    num_episodes  uint32
    episode       int64    [num_episodes]
    num_tokens    uint32   [num_episodes]
    minibatch     int16    [num_episodes]   -1 if the trainer did not run the episode
    scored        uint8    [num_episodes]   1 if `old_logp` was computed
    flags         uint8    all tokens       with 128 where the entropy is known
    advantage     float32  all tokens
    log_d         narrow   tokens of scored episodes
    weight        narrow   the same tokens
    log_s         narrow   tokens of episodes that the trainer ran
    entropy       narrow   tokens whose entropy is known

A narrow column begins with the number of bytes of each of its numbers: 2 for float16, 4 for
float32, which is used if a value exceeds the range of float16. A float16 differs by less than 2^-11
of the value, or by less than 2^-24 near 0. A value other than 0 never becomes 0.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unstale.durability.journal.tables import Record, insert
from unstale.token_values import TokenValues

if TYPE_CHECKING:
    from unstale.token_values import Values

LEVEL = 6
"""Compression level of deflate. Level 9 saves less than 1% more and takes longer."""

MAX_BYTES = 2**29
"""Largest size in bytes of a row before compression: 20 million tokens. A larger row is refused,
because a forged file could otherwise fill the reader's memory.
"""

_MEASURED = 128
"""The flag in a row that marks tokens whose entropy is known."""

_SMALLEST = 2.0**-24
"""The smallest float16 above 0."""

_LARGEST = 65504.0
"""The largest finite float16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens(TokenValues):
    """The values of an episode's trained tokens in one step, as the journal has them."""

    step: int
    version: int
    """The policy's version before the first optimizer step of the batch."""
    behavior_logp: "Values"

    @property
    def old_logp(self) -> "Values":
        """The old log-probability of each token, `[n]`.

        NaN if it was not computed. It has the rounding error of `log_d`.
        """
        values: Values = self.behavior_logp + self.log_d
        return values

    @property
    def logp(self) -> "Values":
        """The log-probability of each token under the weights in training, `[n]`.

        NaN if it was not computed.
        """
        values: Values = self.old_logp + self.log_s
        return values


def token_rows(
    values: Sequence[TokenValues], *, step: int, version: int, after: int
) -> Iterator[Record]:
    """Yield the statements that insert the values of a step's tokens, one row for each group."""
    groups: dict[int, list[TokenValues]] = {}
    for each in values:
        groups.setdefault(each.group, []).append(each)
    for number, members in groups.items():
        num_tokens = sum(len(each.flags) for each in members)
        row = (number, step, version, members[0].route, num_tokens, pack_tokens(members))
        yield insert("trained_tokens", *row, after)


def pack_tokens(values: Sequence[TokenValues]) -> bytes:
    """Return the token values of episodes of one group as bytes, for the column of a row."""
    import numpy as np

    counts = [len(each.flags) for each in values]
    scored = [not np.isnan(each.log_d).any() for each in values]
    run = [each.minibatch is not None for each in values]
    entropy = _join([each.entropy for each in values])
    known = ~np.isnan(entropy)
    flags = np.concatenate([np.empty(0, np.uint8), *(each.flags for each in values)])
    parts = [
        np.array([len(values)], "<u4").tobytes(),
        np.array([each.episode for each in values], "<i8").tobytes(),
        np.array(counts, "<u4").tobytes(),
        np.array(
            [-1 if each.minibatch is None else each.minibatch for each in values], "<i2"
        ).tobytes(),
        np.array(scored, np.uint8).tobytes(),
        (flags | np.where(known, _MEASURED, 0).astype(np.uint8)).tobytes(),
        _planes(_join([each.advantage for each in values]).astype("<f4")),
        _narrow(_join([each.log_d for each in values], where=scored)),
        _narrow(_join([each.weight for each in values], where=scored)),
        _narrow(_join([each.log_s for each in values], where=run)),
        _narrow(entropy[known]),
    ]
    packer = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS)
    return packer.compress(b"".join(parts)) + packer.flush()


def unpack_tokens(packed: bytes, *, group: int, route: str) -> list[TokenValues]:
    """Return the token values of the episodes in a row, in the order of the batch.

    Inverts `pack_tokens`. Raises ValueError if the row is not what `pack_tokens` wrote.
    """
    import numpy as np

    reader = _Reader(_decompress(packed))
    num_episodes = int(reader.take("<u4", 1)[0])
    episodes = reader.take("<i8", num_episodes)
    counts = reader.take("<u4", num_episodes).astype(np.int64)
    minibatches = reader.take("<i2", num_episodes)
    scored = reader.take("u1", num_episodes) != 0
    total = int(counts.sum())
    flags = reader.take("u1", total)
    run = minibatches >= 0
    of_scored, of_run = np.repeat(scored, counts), np.repeat(run, counts)
    known = (flags & _MEASURED) != 0
    everything = np.ones(total, bool)
    columns: dict[str, Any] = {
        "advantage": reader.planes(4, everything),
        "log_d": reader.narrow(of_scored),
        "weight": reader.narrow(of_scored),
        "log_s": reader.narrow(of_run),
        "entropy": reader.narrow(known),
    }
    columns["flags"] = flags & np.uint8(~_MEASURED & 0xFF)
    reader.require_end()
    ends = counts.cumsum()
    starts = ends - counts
    return [
        TokenValues(
            group=group,
            episode=int(episodes[i]),
            route=route,
            minibatch=int(minibatches[i]) if run[i] else None,
            **{name: column[starts[i] : ends[i]] for name, column in columns.items()},
        )
        for i in range(num_episodes)
    ]


def _decompress(packed: bytes) -> bytes:
    """Return the columns of a row. Raises ValueError if they are damaged or too large."""
    unpacker = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        columns = unpacker.decompress(packed, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"its token values cannot be decompressed: {error}") from error
    if not unpacker.eof:
        size = "are incomplete" if len(columns) < MAX_BYTES else f"exceed {MAX_BYTES:,} bytes"
        raise ValueError(f"its token values {size}")
    return columns


def to_trained(
    values: TokenValues, *, step: int, version: int, behavior_logp: "Values"
) -> TrainedTokens:
    """Return an episode's token values together with the step, the version and `behavior_logp`.

    Raises ValueError if the lengths differ.
    """
    if len(behavior_logp) != len(values.flags):
        raise ValueError(
            f"episode {values.episode} has {len(behavior_logp)} sampled tokens, but the values of "
            f"{len(values.flags)} are recorded"
        )
    columns: Mapping[str, Any] = {
        name: getattr(values, name) for name in TokenValues.__dataclass_fields__
    }
    return TrainedTokens(**columns, step=step, version=version, behavior_logp=behavior_logp)


def _join(arrays: Sequence["Values"], where: Sequence[bool] | None = None) -> "Values":
    """Return arrays joined into one: all of them, or only those for which `where` is True."""
    import numpy as np

    chosen = where or [True] * len(arrays)
    kept = [array for array, keep in zip(arrays, chosen, strict=True) if keep]
    return np.concatenate([np.empty(0, np.float32), *kept]).astype(np.float32)


def _planes(numbers: Any) -> bytes:
    """Return an array's numbers as byte planes: all first bytes, then all second bytes, and so
    on.
    """
    import numpy as np

    each = numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)
    return bytes(each.T.tobytes())


def _narrow(values: "Values") -> bytes:
    """Return numbers as float16 bytes, or as float32 bytes if one of them is out of range."""
    import numpy as np

    if len(values) and not np.abs(values).max() <= _LARGEST:
        return b"\x04" + _planes(values.astype("<f4"))
    small = values.astype("<f2")
    lost = (small == 0) & (values != 0)
    small[lost] = np.copysign(_SMALLEST, values[lost])
    return b"\x02" + _planes(small)


class _Reader:
    """Reads the columns of a row, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: str, count: int) -> Any:
        import numpy as np

        size = np.dtype(dtype).itemsize * count
        if len(self._data) - self._at < size:
            raise ValueError(f"its token values end after {len(self._data)} bytes")
        self._at += size
        return np.frombuffer(self._data, dtype, count, self._at - size)

    def planes(self, width: int, where: Any) -> "Values":
        """Return the next column as `[n]` float32, NaN at the tokens where `where` `[n]` is
        False.
        """
        import numpy as np

        if width not in (2, 4):
            raise ValueError(f"its token values have numbers of {width} bytes")
        count = int(where.sum())
        each = self.take("u1", width * count).reshape(width, count).T
        values = np.full(len(where), np.nan, np.float32)
        values[where] = np.ascontiguousarray(each).view(f"<f{width}").reshape(count)
        return values

    def narrow(self, where: Any) -> "Values":
        return self.planes(int(self.take("u1", 1)[0]), where)

    def require_end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes follow its token values")
