"""Exact decimals: what people write on the command line, as the whole numbers that KITE computes with."""

from decimal import Context, Inexact, InvalidOperation

from kite.errors import UsageError

PPM = 1_000_000  # as in kite_schemas.model, which would cost `--help` the import of pydantic
DIGITS_MAX = 28

_EXACT = Context(prec=DIGITS_MAX, Emax=DIGITS_MAX, Emin=-DIGITS_MAX, traps=[Inexact, InvalidOperation])


def ppm(text: str) -> int:
    """Turn a decimal share into parts per million, exactly. Raises UsageError.

    >>> ppm("0.93"), ppm("1"), ppm("0")
    (930000, 1000000, 0)
    """
    return whole(text, PPM, hint="a share is a decimal such as 0.3, with six places at most")


def whole(text: str, scale: int, *, hint: str) -> int:
    """Return a decimal times `scale`. Raises UsageError, with `hint`, when that is no whole number exactly.

    >>> whole("0.417", 1_000_000, hint="")
    417000
    """
    try:
        scaled = _EXACT.multiply(_EXACT.create_decimal(text), scale)
        exact = scaled.is_finite() and scaled == scaled.to_integral_value()
    except InvalidOperation:
        raise UsageError(f"{text!r} is no number", hint=hint) from None
    except Inexact:  # more digits than are kept: it is not rounded, it is refused
        exact = False
        scaled = None
    if scaled is None or not exact:
        raise UsageError(f"{text!r} is too fine or too large", hint=hint)
    return int(scaled)
