"""Rows of the table `trained_tokens`: the values of the tokens of one group that a step trained on.

`token_values.TokenValues` describes the values. A row has all values of one kind for all episodes,
then all of the next kind, compressed together (raw deflate). A number with several bytes is stored
as byte planes: all first bytes, then all second bytes, and so on, because adjacent equal bytes
compress better.

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
"""Compression level of deflate. Level 9 makes rows less than 1% smaller and takes longer."""

MAX_BYTES = 2**29
"""Largest size in bytes of an uncompressed row, enough for 20 million tokens. A larger row is
refused, because a forged file could otherwise fill the reader's memory.
"""

_MEASURED = 128
"""The flag in a row that marks tokens whose entropy is known."""

_SMALLEST = 2.0**-24

_LARGEST = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens(TokenValues):
    """The values of an episode's tokens in one step that trained on them, as the journal has them.

    Arrays are `[n]`, over the episode's sampled tokens.
    """

    step: int
    version: int
    """The policy's version before the step."""
    behavior_logp: "Values"

    @property
    def old_logp(self) -> "Values":
        """The old log-probability of each token, `[n]`. NaN if it was not computed.

        It has the rounding error of the stored `log_d`.
        """
        values: Values = self.behavior_logp + self.log_d
        return values

    @property
    def logp(self) -> "Values":
        """The log-probability of each token under the weights before its optimizer step, `[n]`.

        NaN if it was not computed. It has the rounding errors of the stored `log_d` and `log_s`.
        """
        values: Values = self.old_logp + self.log_s
        return values


def token_rows(
    values: Sequence[TokenValues], *, step: int, version: int, after: int
) -> Iterator[Record]:
    """Yield the SQL statements that insert the values of a step's trained tokens, one row for each
    group.

    `version` is the policy's version before the step. `after` is the number of the newest
    checkpoint.
    """
    groups: dict[int, list[TokenValues]] = {}
    for each in values:
        groups.setdefault(each.group, []).append(each)
    for number, members in groups.items():
        num_tokens = sum(len(each.flags) for each in members)
        row = (number, step, version, members[0].route, num_tokens, pack_tokens(members))
        yield insert("trained_tokens", *row, after)


def pack_tokens(values: Sequence[TokenValues]) -> bytes:
    """Return the token values of a group's episodes as bytes, in the format that this module
    describes.
    """
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
    """Return the token values that `pack_tokens` packed, one element for each episode.

    `route` is the way in which `old_logp` was computed. Raises ValueError if `packed` is not what
    `pack_tokens` returns.
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
    """Return the bytes of a row, uncompressed.

    Raises ValueError if they are damaged or too large.
    """
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
    """Return an episode's token values with the step, the version and `behavior_logp`.

    `version` is the policy's version before the step. Raises ValueError if `behavior_logp` has
    another length than the values.
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
    """Return the concatenation of arrays. With `where`, only of those for which `where` is True."""
    import numpy as np

    chosen = where or [True] * len(arrays)
    kept = [array for array, keep in zip(arrays, chosen, strict=True) if keep]
    return np.concatenate([np.empty(0, np.float32), *kept]).astype(np.float32)


def _planes(numbers: Any) -> bytes:
    import numpy as np

    each = numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)
    return bytes(each.T.tobytes())


def _narrow(values: "Values") -> bytes:
    """Return numbers as a narrow column: float16, or float32 if one of them is out of range."""
    import numpy as np

    if len(values) and not np.abs(values).max() <= _LARGEST:
        return b"\x04" + _planes(values.astype("<f4"))
    small = values.astype("<f2")
    lost = (small == 0) & (values != 0)
    small[lost] = np.copysign(_SMALLEST, values[lost])
    return b"\x02" + _planes(small)


class _Reader:
    """A reader of the uncompressed bytes of a row, one column after the other."""

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
        """Return the next column as `[n]` float32.

        `where` `[n]` is True for the tokens that have a value in it. The others get NaN. `width` is
        the number of bytes of each value.
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
