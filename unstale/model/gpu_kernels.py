"""Parts of a decoder layer and of the output head as Triton kernels for GPUs, with gradients.

Triton is part of torch's builds for CUDA. The kernels compute in float32 what the functions of
`kernels.c` compute on CPUs. They round where transformers rounds: a normalised value and an
activation are rounded before they are multiplied. No sum depends on the order in which a GPU runs
its blocks. Only torch's flash attention, which runs together with these kernels, adds gradients in
any order.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Number of rows that one GPU block processes. The block adds the rows' contributions to a weight's
gradient into one partial sum.
"""
COLUMNS = 1024
"""Number of columns that one GPU block of an elementwise function processes."""
LOGITS = 4096
"""Number of logits of one row that a GPU block reads at once."""


class GpuKernels:
    """The Triton kernels as methods, with the same arguments as the functions of `kernels.c`.

    All tensors have the same dtype (bfloat16, float16 or float32), except `roots` (the inverse RMS
    of each row) and `sums` (partial sums of a gradient), which are float32. A tensor with an
    argument `stride` may be a slice of the columns of a contiguous tensor.
    """

    def pieces(self, rows: int) -> int:
        """Return the number of partial sums from which a weight's gradient over `rows` rows is
        added up.
        """
        return triton.cdiv(rows, ROWS)

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        roots: Tensor,
        rows: int,
        width: int,
    ) -> None:
        with device_of(x):
            _norm[(rows,)](x, weight, eps, out, roots, width, WIDTH=_power(width))

    def norm_backward(
        self,
        x: Tensor,
        weight: Tensor,
        roots: Tensor,
        grad: Tensor,
        out: Tensor,
        sums: Tensor,
        rows: int,
        width: int,
    ) -> None:
        with device_of(x):
            _norm_backward[(self.pieces(rows),)](
                x, weight, roots, grad, out, sums, rows, width, ROWS=ROWS, WIDTH=_power(width)
            )

    def heads(
        self,
        x: Tensor,
        stride: int,
        weight: Tensor | None,
        eps: float,
        cosine: Tensor,
        sine: Tensor,
        out: Tensor,
        roots: Tensor | None,
        rows: int,
        count: int,
        width: int,
    ) -> None:
        with device_of(x):
            _heads[(rows,)](
                x,
                stride,
                x if weight is None else weight,
                eps,
                cosine,
                sine,
                out,
                out if roots is None else roots,
                count,
                width // 2,
                NORMED=weight is not None,
                COUNT=_power(count),
                HALF=_power(width // 2),
            )

    def heads_backward(
        self,
        x: Tensor,
        stride: int,
        weight: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        roots: Tensor | None,
        grad: Tensor,
        out: Tensor,
        sums: Tensor,
        rows: int,
        count: int,
        width: int,
    ) -> None:
        with device_of(x):
            _heads_backward[(self.pieces(rows),)](
                x,
                stride,
                x if weight is None else weight,
                cosine,
                sine,
                sums if roots is None else roots,
                grad,
                out,
                sums,
                rows,
                count,
                width // 2,
                ROWS=ROWS,
                NORMED=weight is not None,
                COUNT=_power(count),
                HALF=_power(width // 2),
            )

    def swiglu(self, both: Tensor, out: Tensor, rows: int, width: int) -> None:
        with device_of(both):
            grid = (rows, triton.cdiv(width, COLUMNS))
            _swiglu[grid](both, out, width, COLUMNS=COLUMNS)

    def swiglu_backward(
        self, both: Tensor, grad: Tensor, inner: Tensor, slopes: Tensor, rows: int, width: int
    ) -> None:
        with device_of(both):
            grid = (rows, triton.cdiv(width, COLUMNS))
            _swiglu_backward[grid](both, grad, inner, slopes, width, COLUMNS=COLUMNS)

    def add_logits(
        self,
        logits: Tensor,
        targets: Tensor,
        low: int,
        temperature: float,
        logp: Tensor,
        highest: Tensor,
        total: Tensor,
        entropy: Tensor | None,
    ) -> None:
        """Add the logits `[R, W]` of a part of the vocabulary to the sums of an online softmax.

        `targets` `[R]` are the tokens whose log-probability is computed, and `low` is the id of the
        part's first token. `logp`, `highest`, `total` and `entropy`, each `[R]`, are the running
        sums (`head._Sums`) and are updated in place. `entropy` may be None.
        """
        rows, width = logits.shape
        with device_of(logits):
            _add_logits[(rows,)](
                logits,
                logits.stride(0),
                targets,
                low,
                width,
                temperature,
                logp,
                highest,
                total,
                total if entropy is None else entropy,
                WITH_ENTROPY=entropy is not None,
                BLOCK=LOGITS,
            )

    def logit_slopes(
        self,
        logits: Tensor,
        targets: Tensor,
        low: int,
        temperature: float,
        total: Tensor,
        grad: Tensor,
        entropies: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Replace the logits `[R, W]` of a part of the vocabulary by their gradients, in place.

        `total` `[R]` is the logarithm of the softmax's denominator. `grad` `[R]` is the gradient
        with respect to the log-probability of `targets` `[R]`. `low` is the id of the part's first
        token. `entropies` are the entropy `[R]` and the gradient with respect to it, or None if the
        loss does not depend on the entropy.
        """
        rows, width = logits.shape
        entropy, grad_entropy = (total, total) if entropies is None else entropies
        with device_of(logits):
            _logit_slopes[(rows, triton.cdiv(width, LOGITS))](
                logits,
                logits.stride(0),
                targets,
                low,
                width,
                temperature,
                total,
                grad.contiguous(),
                entropy,
                grad_entropy.contiguous(),
                WITH_ENTROPY=entropies is not None,
                BLOCK=LOGITS,
            )

    def round_weights(
        self,
        weights: Tensor,
        out: Tensor,
        count: int,
        first: int,
        low: int,
        high: int,
        half: bool,
    ) -> None:
        """Round float32 `weights` `[count]` stochastically into `out`, as `rounding.c` does.

        `out` is float16 with `half`, otherwise bfloat16. `first` is the index of the first weight
        in its tensor. `low` and `high` are the keys of the random bits (`rounding.Draw.keys`).
        """
        with device_of(weights):
            _round_weights[(triton.cdiv(count, COLUMNS),)](
                weights.view(torch.int32),
                out.view(torch.int16),
                count,
                _word(first),
                _word(low),
                _word(high),
                HALF=half,
                COLUMNS=COLUMNS,
            )


def _word(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit
def _norm(x, weight, eps, out, roots, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    normed = (values * root).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (normed * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(roots + row, root)


@triton.jit
def _norm_backward(
    x, weight, roots, grad, out, sums, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    piece = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for i in range(ROWS):
        row = piece * ROWS + i
        here = inside & (row < rows)
        root = tl.load(roots + row, mask=row < rows, other=0.0)
        normed = tl.load(x + row * width + at, mask=here, other=0.0).to(tl.float32) * root
        slope = tl.load(grad + row * width + at, mask=here, other=0.0).to(tl.float32)
        total += slope * normed
        slope = slope * scale
        along = tl.sum(slope * normed, 0) / width
        back = root * (slope - normed * along)
        tl.store(out + row * width + at, back.to(out.dtype.element_ty), mask=here)
    tl.store(sums + piece * width + at, total, mask=inside)


@triton.jit
def _heads(
    x,
    stride,
    weight,
    eps,
    cosine,
    sine,
    out,
    roots,
    count,
    half,
    NORMED: tl.constexpr,
    COUNT: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, COUNT)[:, None]
    at = tl.arange(0, HALF)[None, :]
    in_half = at < half
    inside = (head < count) & in_half
    place = head * (2 * half) + at
    left = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + row * stride + place + half, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if NORMED:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        root = 1.0 / tl.sqrt(squares / (2 * half) + eps)
        number = tl.arange(0, COUNT)
        tl.store(roots + row * count + number, root, mask=number < count)
        scale = tl.load(weight + at, mask=in_half, other=0.0).to(tl.float32)
        left = (left * root[:, None]).to(kind).to(tl.float32) * scale
        left = left.to(kind).to(tl.float32)
        scale = tl.load(weight + half + at, mask=in_half, other=0.0).to(tl.float32)
        right = (right * root[:, None]).to(kind).to(tl.float32) * scale
        right = right.to(kind).to(tl.float32)
    turn = row * (2 * half) + at
    cosine_left = tl.load(cosine + turn, mask=in_half, other=0.0).to(tl.float32)
    cosine_right = tl.load(cosine + turn + half, mask=in_half, other=0.0).to(tl.float32)
    sine_left = tl.load(sine + turn, mask=in_half, other=0.0).to(tl.float32)
    sine_right = tl.load(sine + turn + half, mask=in_half, other=0.0).to(tl.float32)
    to = out + row * count * (2 * half) + place
    tl.store(to, (left * cosine_left - right * sine_left).to(kind), mask=inside)
    tl.store(to + half, (right * cosine_right + left * sine_right).to(kind), mask=inside)


@triton.jit
def _heads_backward(
    x,
    stride,
    weight,
    cosine,
    sine,
    roots,
    grad,
    out,
    sums,
    rows,
    count,
    half,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    COUNT: tl.constexpr,
    HALF: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, COUNT)
    head = number[:, None]
    at = tl.arange(0, HALF)[None, :]
    in_half = at < half
    place = head * (2 * half) + at
    kind = out.dtype.element_ty
    total_left = tl.zeros([HALF], dtype=tl.float32)
    total_right = tl.zeros([HALF], dtype=tl.float32)
    if NORMED:
        scale_left = tl.load(weight + at, mask=in_half, other=0.0).to(tl.float32)
        scale_right = tl.load(weight + half + at, mask=in_half, other=0.0).to(tl.float32)
    for i in range(ROWS):
        row = piece * ROWS + i
        inside = (head < count) & in_half & (row < rows)
        turn = row * (2 * half) + at
        here = in_half & (row < rows)
        cosine_left = tl.load(cosine + turn, mask=here, other=0.0).to(tl.float32)
        cosine_right = tl.load(cosine + turn + half, mask=here, other=0.0).to(tl.float32)
        sine_left = tl.load(sine + turn, mask=here, other=0.0).to(tl.float32)
        sine_right = tl.load(sine + turn + half, mask=here, other=0.0).to(tl.float32)
        from_ = grad + row * count * (2 * half) + place
        up = tl.load(from_, mask=inside, other=0.0).to(tl.float32)
        down = tl.load(from_ + half, mask=inside, other=0.0).to(tl.float32)
        left = up * cosine_left + down * sine_right
        right = down * cosine_right - up * sine_left
        if NORMED:
            root = tl.load(
                roots + row * count + number, mask=(number < count) & (row < rows), other=0.0
            )[:, None]
            x_left = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
            x_right = tl.load(x + row * stride + place + half, mask=inside, other=0.0)
            x_left = x_left * root
            x_right = x_right.to(tl.float32) * root
            total_left += tl.sum(left * x_left, 0)
            total_right += tl.sum(right * x_right, 0)
            left = left * scale_left
            right = right * scale_right
            along = (tl.sum(left * x_left, 1) + tl.sum(right * x_right, 1)) / (2 * half)
            left = root * (left - x_left * along[:, None])
            right = root * (right - x_right * along[:, None])
        to = out + row * stride + place
        tl.store(to, left.to(kind), mask=inside)
        tl.store(to + half, right.to(kind), mask=inside)
    if NORMED:
        column = tl.arange(0, HALF)
        to_sums = sums + piece * (2 * half) + column
        tl.store(to_sums, total_left, mask=column < half)
        tl.store(to_sums + half, total_right, mask=column < half)


@triton.jit
def _swiglu(both, out, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    kind = out.dtype.element_ty
    gate = tl.load(both + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * width + at, (active * up).to(kind), mask=inside)


@triton.jit
def _swiglu_backward(both, grad, inner, slopes, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    kind = slopes.dtype.element_ty
    gate = tl.load(both + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    back = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    likely = 1.0 / (1.0 + tl.exp(-gate))
    active = (gate * likely).to(kind).to(tl.float32)
    tl.store(inner + row * width + at, (active * up).to(kind), mask=inside)
    slope = back * up * likely * (1.0 + gate * (1.0 - likely))
    tl.store(slopes + row * 2 * width + at, slope.to(kind), mask=inside)
    tl.store(slopes + row * 2 * width + width + at, (back * active).to(kind), mask=inside)


@triton.jit
def _add_logits(
    logits,
    stride,
    targets,
    low,
    width,
    temperature,
    logp,
    highest,
    total,
    entropy,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    peak = tl.load(highest + row)
    sums = tl.load(total + row)
    spread = 0.0
    if WITH_ENTROPY:
        spread = tl.load(entropy + row)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < width
        values = tl.load(first + at, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        top = tl.maximum(peak, tl.max(values, 0))
        fall = peak - top
        likely = tl.exp(values - top)
        if WITH_ENTROPY:
            gap = tl.where(likely > 0, values - top, 0.0)
            spread = (spread + fall * sums) * tl.exp(fall) + tl.sum(likely * gap, 0)
        sums = sums * tl.exp(fall) + tl.sum(likely, 0)
        peak = top
    tl.store(highest + row, peak)
    tl.store(total + row, sums)
    if WITH_ENTROPY:
        tl.store(entropy + row, spread)
    place = tl.load(targets + row) - low
    is_here = (place >= 0) & (place < width)
    value = tl.load(first + place, mask=is_here, other=0.0).to(tl.float32) / temperature
    tl.store(logp + row, tl.load(logp + row) + value)


@triton.jit
def _logit_slopes(
    logits,
    stride,
    targets,
    low,
    width,
    temperature,
    total,
    grad,
    entropy,
    grad_entropy,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    place = logits + row * stride + at
    values = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32) / temperature
    values = values - tl.load(total + row)
    likely = tl.exp(values)
    back = tl.load(grad + row)
    if WITH_ENTROPY:
        gap = tl.where(likely > 0, values, 0.0) + tl.load(entropy + row)
        slope = likely * (gap * (-tl.load(grad_entropy + row)) - back)
    else:
        slope = likely * (-back)
    slope = slope + tl.where(at == tl.load(targets + row) - low, back, 0.0)
    tl.store(place, (slope / temperature).to(logits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "low", "high"])
def _round_weights(
    weights, out, count, first, low, high, HALF: tl.constexpr, COLUMNS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < count
    word = tl.load(weights + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    x = at.to(tl.uint32) + (first + low).to(tl.uint32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11)) + high.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    bits = x ^ (x >> 14)
    size = word & 0x7FFFFFFF
    if HALF:
        normal = (size + (bits >> 19) - 0x38000000) >> 13
        normal = tl.where(normal > 0x7BFF, 0x7BFF, normal)
        kept = tl.where((size >= 0x800000) & (size < 0x38800000), size, 0)
        value = kept.to(tl.float32, bitcast=True) * 16777216.0
        whole = value.to(tl.int32)
        share = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        small = (whole + (share < value - whole.to(tl.float32)).to(tl.int32)).to(tl.uint32)
        narrow = tl.where(size < 0x38800000, small, normal)
        narrow = tl.where(size >= 0x47800000, 0x7C00, narrow)
        narrow = tl.where(size > 0x7F800000, 0x7E00, narrow)
    else:
        raised = size + (bits >> 16)
        raised = tl.where((raised & 0x7F800000) == 0x7F800000, size, raised)
        narrow = tl.where(size < 0x7F800000, raised, size) >> 16
        narrow = tl.where(size > 0x7F800000, narrow | 0x40, narrow)
    narrow = narrow | ((word >> 16) & 0x8000)
    tl.store(out + at, narrow.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
