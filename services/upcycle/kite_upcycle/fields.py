"""Fields of a config.json, by their aliases: what is no number is refused by name, and never read as one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kite.errors import Fault, KiteError
from kite_upcycle.strict import JSON
from kite_upcycle.violations import clip

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# More layers, heads or features than any model has: beyond it a number is a mistake, and what is built from it bursts.
COUNT_MAX = 2**24
LAYERS_MAX = 4096


class UnreadableBase(KiteError):
    """The base folder is not a Hugging Face checkpoint in safetensors, or its configuration does not hold together."""

    code: ClassVar[str] = "unreadable_base"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"base {path} cannot be read: {reason}",
            hint=f"a base is a folder with {CONFIG_NAME} and {SINGLE_NAME}, or shards with {INDEX_NAME}",
        )
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class Fields:
    """An object of a configuration. `inside` says where in the file it lies: "text_config.", or nothing at the top."""

    config: Mapping[str, JSON]
    path: Path
    inside: str = ""

    def refusal(self, name: str, reason: str) -> UnreadableBase:
        """Return the error that names a field."""
        return UnreadableBase(self.path, f"{CONFIG_NAME}: {self.inside}{name} {reason}")

    def name(self, *aliases: str) -> str | None:
        """Return the first alias under which the object holds a value; null is none."""
        return next((alias for alias in aliases if self.config.get(alias) is not None), None)

    def object(self, name: str) -> "Fields | None":
        """Return a nested object, None if it is absent or null. Raises UnreadableBase for anything else."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "no object", value)
        return None if value is None else Fields(value, self.path, f"{self.inside}{name}.")

    def number(self, *aliases: str, default: float | None = None) -> float:
        """Return a finite number, the default if it is absent. Raises UnreadableBase, also where aliases differ."""
        name = self.name(*aliases)
        if name is None:
            return self._absent(aliases, default)
        value = self._finite(name)
        other = next((alias for alias in aliases if self.name(alias) and self._finite(alias) != value), None)
        if other is not None:
            raise self.refusal(name, f"is {self.config[name]}, but {other} is {self.config[other]}")
        return value

    def positive(self, *aliases: str, default: float | None = None) -> float:
        """Return a finite number above zero as float64. Raises UnreadableBase."""
        value = self.number(*aliases, default=default)
        if value <= 0:
            raise self.refusal(self.name(*aliases) or aliases[0], f"must be above 0, is {value}")
        return value

    def count(self, *aliases: str, default: int | None = None, most: int = COUNT_MAX) -> int:
        """Return a whole number from 1 to `most`; 32.0 is 32. Raises UnreadableBase."""
        value = self.number(*aliases, default=default)
        if value != int(value) or not 1 <= value <= most:
            name = self.name(*aliases) or aliases[0]
            raise self.refusal(name, f"must be a whole number from 1 to {most}, is {value}")
        return int(value)

    def flag(self, *aliases: str, default: bool = False) -> bool:
        """Return a JSON boolean, the default if it is absent. Raises UnreadableBase for anything else."""
        name = self.name(*aliases)
        value = default if name is None else self.config[name]
        if not isinstance(value, bool):
            raise self._wrong(name or aliases[0], "no boolean", value)
        return value

    def items(self, name: str) -> list[JSON] | None:
        """Return a list, None if it is absent or null. Raises UnreadableBase for anything else."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, list):
            raise self._wrong(name, "no list", value)
        return value

    def text(self, name: str) -> str | None:
        """Return a string, None if it is absent or null. Raises UnreadableBase for anything else."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "no string", value)
        return value

    def _absent(self, aliases: tuple[str, ...], default: float | None) -> float:
        if default is None:
            raise self.refusal(" or ".join(aliases), "is missing")
        return default

    def _finite(self, name: str) -> float:
        value = finite(self.config[name])
        if value is None:
            raise self._wrong(name, "no finite number", self.config[name])
        return value

    def _wrong(self, name: str, what: str, value: JSON) -> UnreadableBase:
        return self.refusal(name, f"is {what}: {clip(repr(value))}")


def finite(value: JSON) -> float | None:
    """Return a number as float64, None for whatever is none: booleans, strings, NaN, infinities, beyond the range.

    >>> [finite(value) for value in (1, 1e4, True, "1", float("nan"), 10**400)]
    [1.0, 10000.0, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        return None
    return number if math.isfinite(number) else None
