"""Conversion of requests and results from and to the format of Tinker's client, version 0.38."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstale.records import Sampled
from unstale.research.tinker import protobuf
from unstale.research.tinker.losses import LOSSES
from unstale.rollout.endpoint.schemas import MAX_STOPS, Refused

TARGETS = "target_tokens"
_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
"""For each number format of a tensor in a request, NumPy's name: float32, int64 or int32."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STOPS = {"stop": 0, "length": 1}
_MAX_TOKENS = 1 << 30
_LEAST_TEMPERATURE = 1e-3
_MAX_STOP_TEXT = 1000
"""Largest number of characters of a stop text."""
_NO_EXTRAS = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)
"""Fields of a sampling request that are not supported. They must be missing, 0 or false."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence to train on: N input tokens, and for each position its target token."""

    tokens: tuple[int, ...]
    targets: Tensor
    """The target tokens, `[N]` int64."""
    inputs: Mapping[str, Tensor]
    """The inputs of the loss, by name, `[N]` float32 each."""


@dataclass(frozen=True, slots=True)
class Training:
    """A request for a forward pass, and for gradients unless it is `forward_only`."""

    model_id: str
    seq_id: int | None
    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request for `count` replies, or for log-probabilities of its prompt."""

    tokens: tuple[int, ...]
    count: int
    max_tokens: int
    temperature: float
    seed: int | None
    stop_tokens: tuple[int, ...] | None
    """Tokens that end a reply. None: only the model's own end tokens. Empty: only `max_tokens` ends
    it.
    """
    stop_texts: tuple[str, ...]
    scored: int | None
    """Number of tokens at the end of the prompt whose log-probabilities are requested. None: not
    requested.
    """


def field(body: Mapping[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    """Return a field of a request. Raises `Refused` if it is missing or of another type.

    With a `default`, the field may be missing. null counts as missing.
    """
    value = body.get(name)
    if value is None:
        if default is ...:
            raise Refused(f"{name} is missing", param=name)
        return default
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise Refused(f"{name} is too large", param=name) from None
    if type(value) is not kind:
        got = f"{type(value).__name__} {str(value)[:60]!r}"
        raise Refused(f"{name} must be of type {kind.__name__}, got {got}", param=name)
    return value


def checkpoint_name(name: str) -> str:
    """Return the name of a checkpoint. Raises `Refused` if it is not safe as a file name."""
    if not _NAME.fullmatch(name):
        raise Refused(
            f"path must be up to 128 letters, digits, '.', '_' or '-', got {name[:140]!r}",
            param="path",
        )
    return name


def read_training(data: bytes) -> Training:
    """Read the body of `forward_backward`. Raises `Refused` if it is invalid."""
    try:
        body = protobuf.decode(data)
        loss = protobuf.text(body.get(4, []))
        options = _options(body)
        seq_id = protobuf.integers(body[2])[-1] if body.get(2) else None
        model_id = protobuf.text(body.get(1, []))
        rows = [protobuf.decode(each) for each in body.get(3, [])]
    except (ValueError, IndexError) as error:
        raise Refused(f"the body is no ForwardBackwardRequest: {error}") from None
    if loss not in LOSSES:
        raise Refused(f"loss_fn must be one of {', '.join(LOSSES)}, got {loss[:60]!r}")
    if wrong := options.keys() - LOSSES[loss].options.keys():
        raise Refused(f"loss_fn_config of {loss} has no option {min(wrong)[:60]!r}")
    if not rows:
        raise Refused("data is empty")
    read = [_datum(row, loss, f"data[{index}]") for index, row in enumerate(rows)]
    return Training(model_id, seq_id, read, loss, options, bool(body.get(6, [0])[-1]))


def _options(body: protobuf.Fields) -> dict[str, float]:
    """Return the options of a loss by name. Of two maps of them, the second is used."""
    options = {}
    for entry in map(protobuf.decode, body.get(5, [])):
        options[protobuf.text(entry.get(1, []))] = protobuf.double(entry.get(2, []))
    for entry in map(protobuf.decode, body.get(7, [])):
        name, value = protobuf.text(entry.get(1, [])), protobuf.decode(entry.get(2, [b""])[-1])
        if 2 in value:
            raise ValueError(f"loss_fn_config.{name[:60]} must be a number")
        options[name] = protobuf.double(value.get(1, []))
    return options


def _datum(row: protobuf.Fields, loss: str, where: str) -> Datum:
    try:
        tokens = _chunks(row.get(1, []))
        tensors = {}
        for entry in map(protobuf.decode, row.get(2, [])):
            tensors[protobuf.text(entry.get(1, []))] = _tensor(entry.get(2, [b""])[-1])
    except ValueError as error:
        raise Refused(f"{where}: {error}") from None
    needs, allowed = LOSSES[loss].needs, {*LOSSES[loss].needs, *LOSSES[loss].options, TARGETS}
    if missing := [name for name in (TARGETS, *needs) if name not in tensors]:
        raise Refused(f"{where}.loss_fn_inputs lacks {missing[0]}, which {loss} needs")
    if unknown := tensors.keys() - allowed:
        raise Refused(f"{where}.loss_fn_inputs has {min(unknown)[:60]!r}, unknown to {loss}")
    for name, tensor in tensors.items():
        if tensor.shape != (len(tokens),):
            raise Refused(
                f"{where}.{name} has shape {list(tensor.shape)}; it must have one value for each "
                f"of the {len(tokens)} tokens of model_input"
            )
        if not tensor.isfinite().all():
            raise Refused(f"{where}.{name} has a value that is not finite")
    targets = tensors.pop(TARGETS)
    if targets.is_floating_point():
        raise Refused(f"{where}.{TARGETS} must be integers")
    inputs = {name: tensor.float() for name, tensor in tensors.items()}
    return Datum(tokens, targets.long(), inputs)


def _chunks(chunks: Sequence[int | bytes]) -> tuple[int, ...]:
    tokens: list[int] = []
    for chunk in map(protobuf.decode, chunks):
        if set(chunk) != {1}:
            raise ValueError("model_input must be tokens: images and audio are not supported")
        packed = protobuf.decode(chunk[1][-1]).get(1, [b""])[-1]
        tokens += _numbers(packed, "<i4").tolist()
    if not tokens:
        raise ValueError("model_input has no tokens")
    return tuple(tokens)


def _tensor(message: int | bytes) -> Tensor:
    fields = protobuf.decode(message)
    if 2 in fields:
        raise ValueError("sparse tensors are not supported: give one value for each token")
    dtype = _DTYPES.get(protobuf.integers(fields.get(3, [0]))[-1])
    if dtype is None:
        raise ValueError("a tensor must be float32, int64 or int32")
    flat = _numbers(fields.get(1, [b""])[-1], dtype)
    shape = protobuf.integers(fields.get(4, []))
    return torch.from_numpy(flat.reshape(shape or [len(flat)]).copy())


def _numbers(data: int | bytes, dtype: str) -> Any:
    if isinstance(data, int):
        raise ValueError("a tensor has no bytes")
    return np.frombuffer(data, dtype)


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    """Read the body of `asample`. Raises `Refused` if it is invalid or not supported."""
    if extras := [name for name in _NO_EXTRAS if body.get(name)]:
        raise Refused(f"{extras[0]} is not supported", param=extras[0])
    tokens: list[int] = []
    for chunk in field(field(body, "prompt", dict), "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise Refused("prompt must be chunks of type encoded_text", param="prompt")
        tokens += _integers(chunk.get("tokens"), "prompt")
    options = field(body, "sampling_params", dict)
    if field(options, "top_k", int, -1) > 0 or field(options, "top_p", float, 1.0) != 1.0:
        raise Refused(
            "top_k and top_p must stay -1 and 1: log-probabilities would be those of a cut "
            "distribution, and no loss of this service takes the tokens that were kept"
        )
    count = field(body, "num_samples", int, 1)
    max_tokens = field(options, "max_tokens", int, _MAX_TOKENS)
    temperature = field(options, "temperature", float, 1.0)
    for name, value, low, high in (
        ("num_samples", count, 1, 1024),
        ("max_tokens", max_tokens, 1, _MAX_TOKENS),
        ("temperature", temperature, 0, 100),
    ):
        if not low <= value <= high:
            raise Refused(f"{name} must be between {low} and {high}, got {value}", param=name)
    if 0 < temperature < _LEAST_TEMPERATURE:  # logits divided by less may not be finite
        raise Refused(
            f"temperature must be 0 or at least {_LEAST_TEMPERATURE}", param="temperature"
        )
    stop_tokens, stop_texts = _stops(options.get("stop"))
    scored = None
    if field(body, "prompt_logprobs", bool, False):
        most = max(len(tokens) - 1, 0)
        scored = field(body, "prompt_logprobs_last_n", int, most)
        if not min(most, 1) <= scored <= most:
            raise Refused(f"prompt_logprobs_last_n must be 1 to {most}, got {scored}")
    seed = field(options, "seed", int, None)
    return Sampling(
        tuple(tokens), count, max_tokens, temperature, seed, stop_tokens, stop_texts, scored
    )


def _stops(stop: Any) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    if stop is None:
        return None, ()
    items = [stop] if isinstance(stop, str) else stop
    if isinstance(items, list) and all(type(each) is str and each for each in items) and items:
        if len(items) > MAX_STOPS or max(map(len, items)) > _MAX_STOP_TEXT:
            raise Refused(
                f"stop must be up to {MAX_STOPS} texts of up to {_MAX_STOP_TEXT} characters",
                param="stop",
            )
        return None, tuple(items)
    return tuple(_integers(items, "stop")), ()


def _integers(values: Any, name: str) -> list[int]:
    if not isinstance(values, list) or any(type(each) is not int for each in values):
        raise Refused(f"{name} must have integers", param=name)
    return values


def sample_result(
    replies: Sequence[tuple[Sampled, str]], prompt_logps: Sequence[float] | None
) -> bytes:
    """Return a SampleResponse: replies with the reasons why they ended, and the prompt's values.

    Values of the prompt that were not computed are NaN.
    """
    fields: list[tuple[int, protobuf.Value]] = []
    for piece, stop in replies:
        tokens = np.array(piece.tokens, "<i4").tobytes()
        logps = np.array(piece.behavior_logp, "<f4").tobytes()
        fields.append((1, protobuf.encode((1, _STOPS[stop]), (2, tokens), (3, logps))))
    if prompt_logps is not None:
        fields.append((2, np.array(prompt_logps, "<f4").tobytes()))
    return protobuf.encode(*fields)


def training_result(logps: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput: log-probabilities of each sequence, `[N]`, and metrics."""
    ends = np.cumsum([0, *(4 * len(each) for each in logps)]).astype("<i8")
    data = b"".join(each.numpy().astype("<f4").tobytes() for each in logps)
    values = protobuf.encode((1, data), (2, ends.tobytes()), (3, 1))
    record = protobuf.encode((2, protobuf.encode((1, "logprobs"), (2, values))), (3, len(logps)))
    return protobuf.encode(
        (1, "ArrayRecord"),
        (2, record),
        *((3, protobuf.encode((1, name), (2, value))) for name, value in metrics.items()),
    )
