"""Read the parameters of an HTTP request. If one is missing or wrong, `BadQuestion` is raised."""

from starlette.requests import Request

from unstale.analysis.dashboard.factors import Brush, TokenChoice
from unstale.analysis.dashboard.table import BadQuestion

MAX_NUMBERS = 500
"""Largest number of times that a parameter may be given in one request."""


def token_choice(request: Request) -> TokenChoice:
    """Return the filter of trained tokens that a request's parameters describe."""
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
    """Return the values of a whole-number parameter that may be given several times or not at
    all.
    """
    texts = request.query_params.getlist(name)
    if len(texts) > MAX_NUMBERS:
        raise BadQuestion(f"{name} may be given {MAX_NUMBERS} times at most, got {len(texts)}")
    return [_as_int(name, text) for text in texts]


def whole(request: Request, name: str, default: int | None = None) -> int:
    """Return a parameter that must be a whole number. Without a `default`, it must be given."""
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
