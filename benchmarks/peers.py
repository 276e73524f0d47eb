"""What KITE's ledger is measured against: `eventsourcing`, on a SQLite file, as its documentation says to use it.

Each subject of KITE's events is one aggregate, and each event one `Recorded` with the same bytes as text. Its SQLite
recorder has the same durability as KITE's ledger: a write-ahead log, and one fsync for each transaction.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import StoredEvent
from spending import Spent, spending

from kite.ledger import Draft

BATCH = 1_000


class Subject(Aggregate):
    """What events are about."""

    @event("Recorded")
    def record(self, event_id: str, type_name: str, raw: str) -> None:
        """Take note of one event; nothing is folded."""


def application(folder: Path) -> Application[UUID]:
    """Return an application on a file of its own."""
    return Application({"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(folder / "events.db")})


def saved(drafts: Sequence[Draft], folder: Path, batch: int = BATCH) -> Spent:
    """Let the application save all events, `batch` in one call; the aggregates exist already."""
    texts = [(draft.subject, draft.event_id, draft.type, draft.raw.decode()) for draft in drafts]
    with closing(application(folder)) as store:
        subjects = {subject: Subject() for subject, *_ in texts}
        store.save(*subjects.values())
        with spending(len(drafts)) as spent:
            for first in range(0, len(texts), batch):
                changed: dict[str, Subject] = {}
                for subject, *told in texts[first : first + batch]:
                    changed[subject] = subjects[subject]
                    subjects[subject].record(*told)
                store.save(*changed.values())
    return spent[0]


def recorded(drafts: Sequence[Draft], folder: Path) -> Spent:
    """Let its recorder alone insert BATCH events a call that are ready: bytes as they are, versions given."""
    batches = list(_batches(_stored(drafts)))
    with closing(application(folder)) as store, spending(len(drafts)) as spent:
        for batch in batches:
            store.recorder.insert_events(batch)
    return spent[0]


def _stored(drafts: Sequence[Draft]) -> list[StoredEvent]:
    versions: dict[str, int] = {}
    found: list[StoredEvent] = []
    for draft in drafts:
        versions[draft.subject] = versions.get(draft.subject, 0) + 1
        aggregate = uuid5(NAMESPACE_URL, draft.subject)
        found.append(StoredEvent(aggregate, versions[draft.subject], draft.type, draft.raw))
    return found


def _batches(events: Sequence[StoredEvent]) -> Iterable[Sequence[StoredEvent]]:
    return (events[first : first + BATCH] for first in range(0, len(events), BATCH))
