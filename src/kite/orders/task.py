"""What a service gives the worker: how each type of order is carried out, how its failure is told, who hears what."""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, Never, TypeAlias, TypeVar

from kite_schemas.envelope import Header
from kite_schemas.why import Decision, Order, Outcome

O_co = TypeVar("O_co", bound=Order, covariant=True)
O_contra = TypeVar("O_contra", bound=Order, contravariant=True)

FIRST_STAGE = "begin"


@dataclass(frozen=True, slots=True)
class Received(Generic[O_co]):
    """An order as its handler gets it.

    `attempt` counts from 1; above 1 an earlier attempt was cut off anywhere, so look before you act. 0 is only told of:
    the order was never begun. `deadline_us` is the wall time at which the worker stops the handler.
    """

    id: str
    attempt: int
    data: O_co
    header: Header
    deadline_us: int


Emit: TypeAlias = Callable[[Outcome], Awaitable[None]]
"""Publishes a fact of this order that is not its last; returns when the bus has it. Order and attempt are filled in."""

Handler: TypeAlias = Callable[[Received[O_contra], Emit], Awaitable[Outcome]]
"""Carries an order out and returns its last outcome; the worker fills in `order`, `attempt` and `done`.

A KiteError becomes the failure of the order; any other exception ends the worker, and the order is tried again by the
next one. The handler is cancelled at its deadline, when the order is expired, and when the service ends; what it began
in a thread goes on, so it must not leave one behind.
"""

Failed: TypeAlias = Callable[[Received[O_contra], str, str, str], Outcome]
"""Returns the outcome that says: failed in this stage, with this code and this message."""


@dataclass(frozen=True, slots=True)
class Task(Generic[O_contra]):
    """How one type of order is carried out, and how its failure is told."""

    handler: Handler[O_contra]
    failed: Failed[O_contra]


Tasks: TypeAlias = Mapping[type[Order], Task[Never]]
"""The table of a service: each task takes exactly the orders of its key."""

Notices: TypeAlias = Mapping[type[Decision], Callable[[Never, str], None]]
"""Decisions that a worker only has to know about: who is called with each type and its event id. They have no outcome.

The newest of each subject is remembered in the journal, and passed on again when the worker starts anew.

Called at each delivery, which is acknowledged then: so a call must do no more the second time, and must not raise. A
notice that is delivered again behind a newer one on its subject no longer holds and is passed over.
"""

_stage: ContextVar[str] = ContextVar("kite_order_stage", default=FIRST_STAGE)


def stage(name: str) -> None:
    """Say, inside a handler, which stage of the order begins: should it fail, the failure names the stage."""
    _stage.set(name)


def current_stage() -> str:
    """Return the stage that the running order is in."""
    return _stage.get()
