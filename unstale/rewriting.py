"""Change the text of an episode after it was sampled, such as to remove a hint."""

from collections.abc import Sequence
from dataclasses import replace

from unstale.records import Edit, Piece, Placed, Provenance, Sampled, common_prefix


def replace_prompt(pieces: Sequence[Piece], prompt: tuple[int, ...]) -> tuple[Piece, ...]:
    """Return an episode's pieces (runs of tokens) with another prompt as the first piece.

    Sampled text after it gets the origin REWRITTEN, because it was sampled in another context.
    """
    given = pieces[0].tokens
    first = common_prefix([given, prompt])
    last = common_prefix([given[::-1], prompt[::-1]])
    last = min(last, len(given) - first, len(prompt) - first)
    edit = Edit(first, len(prompt) - last, given[first : len(given) - last])
    rest = tuple(_rest(piece, 0, edit) for piece in pieces[1:])
    return (replace(pieces[0], tokens=prompt), *rest)


def remove_text(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """Return an episode's pieces (runs of tokens) without the tokens `start` to `stop`.

    Sampled text after them gets the origin REWRITTEN, because it was sampled in another context.
    Raises ValueError if the episode has no such tokens. Also raises it if text after them is
    REWRITTEN already, or was sampled with top-p, top-k or min-p.
    """
    tokens = [token for piece in pieces for token in piece.tokens]
    if not 0 <= start < stop <= len(tokens):
        raise ValueError(f"an episode of {len(tokens)} tokens has no tokens {start} to {stop}")
    edit = Edit(start, start, tuple(tokens[start:stop]))
    left: list[Piece] = []
    at = 0
    for piece in pieces:
        end = at + len(piece.tokens)
        if at < start:
            left.append(_first(piece, start - at))
        if end > stop:
            left.append(_rest(piece, max(0, stop - at), edit))
        at = end
    return tuple(left)


def _first(piece: Piece, count: int) -> Piece:
    if isinstance(piece, Sampled):
        return piece.first(count)
    cut = replace(piece, tokens=piece.tokens[:count])
    if isinstance(cut, Placed) and cut.source_logp is not None:
        return replace(cut, source_logp=cut.source_logp[:count])
    return cut


def _rest(piece: Piece, skip: int, edit: Edit) -> Piece:
    """Return a piece without its first `skip` tokens, marked as text whose context was edited."""
    tokens = piece.tokens[skip:]
    if isinstance(piece, Sampled):
        if piece.kept_sets is not None:
            raise ValueError("text that was drawn from kept sets cannot be rewritten: use top_p 1")
        logps = piece.behavior_logp[skip:]
        return Placed(tokens, Provenance.REWRITTEN, piece.version, logps, edit)
    if isinstance(piece, Placed) and piece.edit:
        raise ValueError("the context of REWRITTEN text cannot be edited again")
    if isinstance(piece, Placed):  # its source is not known in another context
        return Placed(tokens, piece.provenance)
    return replace(piece, tokens=tokens)
