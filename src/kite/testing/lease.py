"""Who may write a ledger: what every database must keep, beside the rest of the contract in `kite.testing.ledger`."""

# ruff: noqa: S101 - these are tests: assert is the point, and expected numbers stand where they are asserted

import pytest

from kite.ledger import LeaseLost, Ledger, LedgerHeld, LedgerTooNew, Reader
from kite.ledger.backend import here
from kite.ledger.tables import REVISIONS
from kite.testing.ledger import attempt, drafts, outgoing


class LeaseContract:
    """Subclass it, with `LedgerContract`, in a test and give the fixture `url`, of a ledger that does not exist yet."""

    def test_a_reopened_ledger_continues_the_chain_under_the_next_epoch(self, url: str) -> None:
        for epoch in (1, 2, 3):
            with Ledger.open(url) as ledger:
                assert (ledger.head.epoch, ledger.head.pos) == (epoch, epoch - 1)
                ledger.append(drafts([epoch]))
        with Reader.open(url) as reader:
            assert [row.epoch for row in reader.rows()] == [1, 2, 3]
            reader.verify_chain(last=3)

    def test_a_second_writer_is_refused_until_the_first_has_closed(self, url: str) -> None:
        first = Ledger.open(url)
        with pytest.raises(LedgerHeld) as caught:
            Ledger.open(url)
        assert caught.value.retryable
        first.append(drafts([1]))
        first.close()
        first.close()
        with Ledger.open(url) as second:
            assert (second.head.pos, second.head.epoch) == (1, 2)

    def test_a_lease_that_was_given_back_is_free_at_once(self, url: str) -> None:
        with Ledger.open(url, holder="a") as first, Reader.open(url) as reader:
            assert (reader.lease.epoch, reader.lease.holder) == (1, "a")
            first.append(drafts([1]))
            first.close()
            assert (reader.lease.epoch, reader.lease.holder) == (1, "")
            with Ledger.open(url) as second:
                assert (reader.lease.epoch, reader.lease.holder) == (2, here())
                second.append(drafts([2]))
            assert reader.lease.holder == ""
            reader.verify_chain(last=2)

    def test_a_holder_that_lives_moves_the_counter_with_all_that_it_writes(self, url: str) -> None:
        with Ledger.open(url) as ledger, Reader.open(url) as reader:
            counters = [reader.lease.counter]
            for write in (
                lambda: ledger.append(drafts([1]), sends=[outgoing(0)]),
                lambda: ledger.append([]),
                lambda: ledger.sent(1),
                ledger.renew,
            ):
                write()
                counters.append(reader.lease.counter)
            assert counters == sorted(set(counters)), "no two states of the lease look the same"
            assert (reader.head.pos, reader.lease.epoch) == (1, 1)
        with Reader.open(url) as reader:
            ended = reader.lease
            Ledger.open(url).close()
            assert reader.lease.counter > ended.counter > counters[-1]

    def test_who_has_lost_the_lease_writes_nothing_and_is_told_who_has_it(self, url: str) -> None:
        with Ledger.open(url, holder="a") as ledger, Reader.open(url) as reader:
            ledger.append(drafts([1]), sends=[outgoing(0)])
            attempt(url, "UPDATE lease SET epoch = 2, holder = 'b'")
            taken = reader.lease
            for write in (lambda: ledger.append(drafts([2])), lambda: ledger.sent(1), ledger.renew):
                with pytest.raises(LeaseLost, match="epoch 1, it is now held by b in epoch 2") as caught:
                    write()
                assert (caught.value.retryable, caught.value.epoch, caught.value.present) == (True, 1, taken)
            assert (reader.head.pos, reader.lease) == (1, taken)
            assert [send.pos for send in ledger.pending(10)] == [1]
            ledger.close()
            assert reader.lease == taken, "what is another's is not given back"

    def test_a_ledger_of_a_later_kite_is_refused_and_left_alone(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1]))
        attempt(url, "UPDATE alembic_version SET version_num = '9999'")
        for opener in (Ledger.open, Ledger.open, Reader.open):
            with pytest.raises(LedgerTooNew) as caught:
                opener(url)
            assert caught.value.revision == "9999"
        attempt(url, f"UPDATE alembic_version SET version_num = '{REVISIONS[-1]}'")  # noqa: S608 - our own constant
        with Ledger.open(url) as ledger:
            assert (ledger.head.pos, ledger.head.epoch) == (1, 2)
