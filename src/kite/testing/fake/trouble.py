"""Ways in which a fake can stop serving while its process lives, or end: asked for at `POST /trouble?how=…`."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Final

BLOCK_BYTES = 64 * 1024**2
RUBBISH: Final = b"<html>502 Bad Gateway</html>"


class Trouble:
    """What a fake does wrong, if anything."""

    def __init__(self) -> None:
        self.rubbish = False
        self.hangs = False
        self._never = threading.Event()

    def begin(self, how: str) -> bool:
        """Do wrong from now on; False when nobody knows how."""
        act = self._acts.get(how)
        if act is None:
            return False
        act()
        return True

    def hang(self) -> None:
        """Answer nothing while it hangs: the connection is taken, and that is all."""
        while self.hangs:
            self._never.wait(0.05)

    @property
    def _acts(self) -> Mapping[str, Callable[[], None]]:
        return {
            "hang": lambda: setattr(self, "hangs", True),
            "rubbish": lambda: setattr(self, "rubbish", True),
            "none": self._none,
            "eat": lambda: threading.Thread(target=eat).start(),
            "exit": lambda: os._exit(3),
        }

    def _none(self) -> None:
        self.hangs = self.rubbish = False


def eat() -> None:
    """Take memory until there is none, and end as a program does that has not reckoned with it."""
    taken: list[bytearray] = []
    try:
        while True:
            taken.append(bytearray(BLOCK_BYTES))
    except MemoryError:
        taken.clear()
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
