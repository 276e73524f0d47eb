"""Shares: decimals on the command line, parts per million everywhere else."""

from decimal import Decimal, InvalidOperation

from kite.errors import UsageError

PPM = 1_000_000  # as in kite_schemas.model, which would cost `--help` the import of pydantic


def ppm(text: str) -> int:
    """Turn a decimal share into parts per million, exactly. Raises UsageError.

    >>> ppm("0.93"), ppm("1"), ppm("0")
    (930000, 1000000, 0)
    """
    try:
        scaled = Decimal(text) * PPM
    except InvalidOperation:
        raise UsageError(f"{text!r} is no number", hint="a share is a decimal such as 0.3") from None
    if not scaled.is_finite() or scaled != scaled.to_integral_value():
        raise UsageError(f"{text} is no share", hint="a decimal such as 0.3, with six places at most")
    return int(scaled)
