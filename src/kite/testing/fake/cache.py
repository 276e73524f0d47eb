"""The prefix cache of the fake: which blocks of which prompts it has computed before, as vLLM counts them."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from threading import Lock

BLOCKS_MAX = 4_096
"""The blocks used longest ago leave."""


class PrefixCache:
    """Counts the prompt tokens that were looked up, and those that lay in whole blocks that are known."""

    def __init__(self, block_tokens: int) -> None:
        self.queries = 0
        self.hits = 0
        self.block_tokens = block_tokens
        self._known: OrderedDict[Hashable, None] = OrderedDict()
        self._lock = Lock()

    def look_up(self, model: str, prompt: Sequence[int]) -> None:
        """Count one prompt for a served name, and know its whole blocks from here on."""
        blocks = [(model, tuple(prompt[:end])) for end in range(self.block_tokens, len(prompt) + 1, self.block_tokens)]
        computed = blocks[: (len(prompt) - 1) // self.block_tokens]  # the last token is computed in any case
        with self._lock:
            known = 0
            while known < len(computed) and computed[known] in self._known:
                known += 1
            self.queries += len(prompt)
            self.hits += known * self.block_tokens
            for block in blocks:
                self._known[block] = None
                self._known.move_to_end(block)
            while len(self._known) > BLOCKS_MAX:
                self._known.popitem(last=False)

    def clear(self) -> None:
        """Know nothing any more; what was counted stays."""
        with self._lock:
            self._known.clear()
