"""Read the parameters of an HTTP request. A wrong parameter raises `BadQuestion`."""

from starlette.requests import Request

from unstale.analysis.dashboard.factors import Brush, TokenChoice
from unstale.analysis.dashboard.table import BadQuestion

MAX_NUMBERS = 500
"""Largest number of values of a parameter that may be repeated."""


def token_choice(request: Request) -> TokenChoice:
    """Return the choice of trained tokens that a request names."""
    limits = ("step_min", "step_max", "lag_min", "lag_max")
    given = {name: whole(request, name) for name in limits if request.query_params.get(name)}
    return TokenChoice(**given, exact=text(request, "exact", "all"))


def brush(request: Request) -> Brush:
    limits = ("d_min", "d_max", "s_min", "s_max")
    given = {name: number(request, name, 0.0) for name in limits if request.query_params.get(name)}
    return Brush(**given)


def text(request: Request, name: str, default: str | None = None) -> str:
    value = request.query_params.get(name, default)
    if value is None:
        raise BadQuestion(f"the parameter {name} is missing")
    if len(value) > 2000:
        raise BadQuestion(f"{name} may have at most 2000 characters, got {len(value)}")
    return value


def ints(request: Request, name: str) -> list[int]:
    """Return the whole numbers of a parameter that may be repeated."""
    texts = request.query_params.getlist(name)
    if len(texts) > MAX_NUMBERS:
        raise BadQuestion(f"{name} may be given {MAX_NUMBERS} times at most, got {len(texts)}")
    return [_as_int(name, text) for text in texts]


def whole(request: Request, name: str, default: int | None = None) -> int:
    """Return a parameter that is a whole number."""
    return _as_int(name, text(request, name, None if default is None else str(default)))


def _as_int(name: str, text: str) -> int:
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit():
        raise BadQuestion(f"{name} must be a whole number, got {text!r}")
    if len(text) > 15:
        raise BadQuestion(f"{name} is too large: {text}")
    return int(text)


def number(request: Request, name: str, default: float) -> float:
    """Return a parameter that is a number."""
    found = text(request, name, str(default))
    try:
        return float(found)
    except ValueError:
        raise BadQuestion(f"{name} must be a number, got {found!r}") from None
