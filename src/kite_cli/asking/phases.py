"""The phases of what is followed: each event as a step, and beside the spinner where it is and for how long."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from kite_cli.asking.telling import tell
from kite_cli.output import Progress, note
from kite_schemas.envelope import Event
from kite_schemas.model import Data
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import (
    AdapterVerified,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    InjectionAdmitted,
    InjectionDeferred,
    LoadOrdered,
    RebuildOrdered,
    RollbackOrdered,
    VerificationOrdered,
)

PHASES: Mapping[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    VerificationOrdered: lambda data: f"verifying {data.adapter.name}",
    AdapterVerified: lambda _: "waiting to be admitted",
    InjectionDeferred: lambda data: f"put off: {data.why.reason}",
    InjectionAdmitted: lambda data: f"blending on {data.node}",
    RebuildOrdered: lambda data: f"making {data.version} again on {data.node}",
    BlendStored: lambda _: "stored, to be loaded",
    LoadOrdered: lambda data: f"loading into {data.instance}",
    BlendLoaded: lambda data: f"proving on {data.instance}",
    EffectProven: lambda data: f"proven on {data.instance}, the others follow",
    RollbackOrdered: lambda data: f"taking it out of {data.instance}",
    BlendPromoted: lambda _: "promoted",
}
"""What is under way once an event has happened."""


class Phases:
    """A progress that knows phases. Being interrupted, it says that what was asked for goes on in the fleet.

    >>> with Phases("injecting credit", "risk") as phases:
    ...     phases.step("copied")
    """

    def __init__(self, text: str, blend: str) -> None:
        self._progress = Progress(text)
        self._blend = blend
        self._heard = False

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is KeyboardInterrupt:
            note(self.farewell)

    def stop(self) -> None:
        """Take the spinner away; steps are still printed."""
        self._progress.stop()

    def step(self, text: str) -> None:
        """Print one step."""
        self._progress.step(text)

    def see(self, event: Event) -> None:
        """Print an event as a step, and turn to the phase that it begins."""
        self._heard = True
        self.step(tell(event) or event.header.type)
        phase = PHASES.get(type(event.data)) if event.data is not None else None
        if phase is not None:
            self._progress.timing(phase(event.data))

    @property
    def farewell(self) -> str:
        """What to know for whoever leaves before the end."""
        if not self._heard:
            return "nothing was heard of it yet; `kite timeline` tells whether it was taken up"
        return (
            "it goes on in the fleet: `kite timeline --follow` shows it, "
            f"`kite upcycle show {self._blend}` what the blend means then"
        )
