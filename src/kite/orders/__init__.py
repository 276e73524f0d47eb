"""Orders: the loop of every worker. It carries out each order once, whatever crashes, and says how it ended."""

from kite.orders.errors import JournalHeld, JournalTooNew, JournalUnwritable, NotAJournal
from kite.orders.journal import Entry, Journal, State
from kite.orders.task import Emit, Failed, Handler, Notices, Received, Task, Tasks, stage
from kite.orders.verdict import ATTEMPTS_MAX, GRACE_US, Step, Verdict, decide
from kite.orders.worker import ACK_WAIT_S, RENEW_S, Begin, Worker

__all__ = [
    "ACK_WAIT_S",
    "ATTEMPTS_MAX",
    "GRACE_US",
    "RENEW_S",
    "Begin",
    "Emit",
    "Entry",
    "Failed",
    "Handler",
    "Journal",
    "JournalHeld",
    "JournalTooNew",
    "JournalUnwritable",
    "NotAJournal",
    "Notices",
    "Received",
    "State",
    "Step",
    "Task",
    "Tasks",
    "Verdict",
    "Worker",
    "decide",
    "stage",
]
