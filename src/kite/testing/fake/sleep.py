"""How the fake sleeps: what it has given back, and what is lost by that, as with vLLM on a GPU.

vLLM tags its memory `weights` or `kv_cache`. Level 1 keeps a copy of the weights, level 2 forgets them: what is there
after its wake are other numbers until they are read again, and every adapter is lost while its name is still listed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

from kite.testing.fake.model import Refused, Served
from kite.testing.llama import Llama

WEIGHTS, CACHE = "weights", "kv_cache"
TAGS = frozenset({WEIGHTS, CACHE})
FORGETS_LEVEL = 2


@dataclass(slots=True)
class Sleep:
    """What is given back now, and the base while its weights are forgotten."""

    tags: set[str] = field(default_factory=set[str])
    level: int = 0
    kept: Llama | None = None

    def fall(self, level: int, served: Served) -> None:
        """Give back weights and cache; level 0 gives back nothing."""
        self.level = level
        if level:
            self.tags |= TAGS
        if level == FORGETS_LEVEL and self.kept is None:
            self.kept = served.base
            served.base = blank(served.base)
            served.adapters = dict.fromkeys(served.adapters)

    def release(self, *, paused: bool) -> None:
        """Give back the cache alone. Raises Refused unless all is there and nothing runs."""
        if not paused:
            raise Refused(
                HTTPStatus.INTERNAL_SERVER_ERROR, "release_kv_cache_memory() requires a completed pause first"
            )
        if self.tags:
            text = "release_kv_cache_memory() requires all executor memory to be resident"
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        self.tags.add(CACHE)

    def rise(self, tags: Iterable[str]) -> bool:
        """Take memory again, all of it without tags; say whether all is there."""
        wanted = set(tags) or self.tags
        if wanted <= self.tags:  # vLLM warns of one that is there, and does nothing
            self.tags -= wanted
        if not self.tags:
            self.level = 0
        return not self.tags

    def reload(self, served: Served) -> None:
        """Read the weights again."""
        if WEIGHTS in self.tags:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "")
        if self.kept is not None:
            served.base, self.kept = self.kept, None


def blank(model: Llama) -> Llama:
    """Return a model of the same shape whose weights are nothing."""
    return Llama(model.shape, {name: weight * 0 for name, weight in model.weights.items()})
