"""Tokens and what comes with them, for a language model ─► what does not fit."""

from collections.abc import Iterator

from jaxtyping import Array, Int

from functree.argument_checks import FLAG, Takes, check, is_integers, parameter_error, shown
from functree.errors import FunctreeValueError, Problem, count
from functree.nn.attention.layer import Positions, Segments, check_order
from functree.nn.cache import Cache
from functree.nn.config import TransformerConfig

Tokens = Int[Array, "*batch seq"]
TOKENS = Takes(
    "an array of integers, with a dimension for the sequence",
    lambda x: is_integers(x) and x.ndim > 0,
)

CACHE = Takes("an `ft.nn.Cache`", lambda value: isinstance(value, Cache)).or_none()


def check_tokens(
    config: TransformerConfig,
    tokens: Tokens,
    positions: Positions,
    segments: Segments,
    cache: Cache | None,
    in_order: bool,
    losses: bool,
) -> None:
    """Raise FunctreeError for tokens that a model cannot read, and for what does not fit them.

    Args:
        config: the config of the model.
        tokens: the tokens.
        positions: as in a call of the model.
        segments: as in a call of the model.
        cache: as in a call of the model.
        in_order: as in a call of the model.
        losses: as in a call of the model.
    """
    check(
        "Transformer cannot read these tokens",
        tokens=(tokens, TOKENS),
        cache=(cache, CACHE),
        in_order=(in_order, FLAG),
        losses=(losses, FLAG),
    )
    if not in_order:
        check_order(positions, cache is not None)
    seq = tokens.shape[-1]
    if not tokens.size:
        raise FunctreeValueError(f"tokens of shape {tokens.shape}: there is no token to read")
    if seq > config.max_seq:
        raise FunctreeValueError(
            f"tokens of shape {tokens.shape}: a sequence of {seq} is longer than "
            f"max_seq={config.max_seq}; shorten it, or build the model with a larger "
            "max_seq"
        )
    problems: list[Problem] = []
    why = f"must be integers of the shape of the tokens, {tokens.shape}"
    # Positions may be those of all rows.
    if positions is not None and not _are_integers(positions, tokens.shape, (seq,)):
        problems.append(Problem(None, None, f"positions={shown(positions)}", why))
    if segments is not None and not _are_integers(segments, tokens.shape):
        problems.append(Problem(None, None, f"segments={shown(segments)}", why))
    if cache is not None:
        problems += _cache_problems(config, cache, tokens, segments)
    if problems:
        given = [value for value in (positions, segments) if value is not None]
        right_type = all(map(is_integers, given))
        raise parameter_error(
            "Transformer cannot read these tokens", problems, right_type=right_type
        )
    if losses:
        _check_losses(config, cache)


def _check_losses(config: TransformerConfig, cache: Cache | None) -> None:
    """Raise FunctreeError if there are no losses of experts."""
    problems: list[Problem] = []
    if config.experts is None:
        problems.append(Problem(None, None, "losses of experts", "the config has no experts"))
    if cache is not None:
        why = "a model that has a cache is not trained"
        problems.append(Problem(None, None, "losses=True with a cache", why))
    if problems:
        raise FunctreeValueError("Transformer has no losses of experts", problems)


def _are_integers(value: object, *shapes: tuple[int, ...]) -> bool:
    """Whether a value is an array of integers of one of some shapes."""
    return is_integers(value) and getattr(value, "shape", None) in shapes


def _cache_problems(
    config: TransformerConfig, cache: Cache, tokens: Tokens, segments: Segments
) -> Iterator[Problem]:
    """What does not go with a cache."""
    if segments is not None:
        why = "a row of a cache is one text"
        yield Problem(None, None, "segments", why, "give each text a row of its own")
    rows = cache.filled.shape[0]
    if tokens.ndim != 2 or tokens.shape[0] != rows:
        why = f"must be (batch, seq), and the cache has {count(rows, 'row')}"
        yield Problem(None, None, f"tokens of shape {tokens.shape}", why)
    if not cache.fits(config):
        what, remedy = f"cache.key={shown(cache.key)}", "ft.nn.Cache.create(model, ...)"
        yield Problem(None, None, what, "it is of another model", remedy)
