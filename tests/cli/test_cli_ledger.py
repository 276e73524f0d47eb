"""`kite ledger`: on real ledgers whose rows real keys have signed, and what was done to some of them."""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from kite.bus import FLEET, Bus, dec_subject
from kite.ledger import Ledger, Reader
from kite.ledger.address import sqlite_path
from kite.ledger.sqlite import connect
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.eventually import eventually
from kite.testing.ledger import forge
from kite.trust import Signer, new_key
from kite_cli import place
from kite_cli.place import FleetFile
from kite_cli.testing import Ended, command
from kite_incident.testing import Book
from kite_schemas.arbitration import GapAcknowledged
from kite_schemas.ledger import BusEpochChanged, BusGap, EpochEnd, EventIdConflict, Refusal, Rejected, Tick

Kite = Callable[..., Ended]
Record = dict[str, Any]  # JSON

ARBITRATOR, YOCO = (Signer.of(bytes([number]) * 32) for number in (1, 2))
FACT, CHECKPOINT, HEAD = 4, 6, 8
"""Positions in the told ledger: the first fact, the checkpoint (of the position before it), and the end."""

CHANGED = BusEpochChanged(
    stream="KITE_EVT", bus_epoch=2, why=EpochEnd.SHORTER, seq=9, msg_id="i", created="c", found="f"
)


class Told:
    """A fleet's folder with a ledger: 1 created, 2 and 3 keys, 4 and 5 facts, 6 checkpoint, 7 fact, 8 tick."""

    def __init__(self, folder: Path, nats_url: str = "") -> None:
        self.dir = folder
        self.url = f"sqlite:///{folder / 'ledger.db'}"
        self.nats_url = nats_url
        self.operator = new_key(folder / "operator.key")
        self.public = folder / "operator.pub"
        file = FleetFile(node="n", nats_url=nats_url, ledger_url=self.url, adapter_root=str(folder), pid=1)
        place.write(folder, file)
        with Book.new(self.url, self.operator) as book:
            self.id = book.id
            book.let_in("kite/arbitrator/1", ARBITRATOR)
            book.let_in("kite/yoco/a", YOCO)
            self.fact = book.fact(1, YOCO)
            book.fact(2, YOCO)
            self.checkpoint = book.checkpoint(ARBITRATOR)
            book.fact(3, YOCO)
            book.put(Tick())

    def past_kite(self, *statements: str) -> None:
        """Write to the database as nobody should, the triggers dropped."""
        connection = connect(sqlite_path(self.url))
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f'DROP TRIGGER "{name}"')
        for statement in statements:
            connection.execute(statement)
        connection.close()


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


@pytest.fixture
def ledger(kite: Kite, told: Told) -> Kite:
    """Run `kite ledger …` on the told ledger."""

    def run(*arguments: str | Path) -> Ended:
        return kite("ledger", *arguments, "--dir", told.dir)

    return run


def one(ended: Ended) -> Record:
    (line,) = ended.out.splitlines()
    return json.loads(line)


def lines(ended: Ended) -> list[Record]:
    return [json.loads(line) for line in ended.out.splitlines()]


def broken(ended: Ended) -> tuple[int, str]:
    """Return position and kind of a break, which the exit code must tell too."""
    assert ended.code == 3
    found = one(ended)
    assert not found["ok"]
    return found["broken"]["pos"], found["broken"]["what"]


def kept(ledger: Kite, tmp_path: Path) -> Path:
    path = tmp_path / "kept.json"
    path.write_text(ledger("checkpoint").out)
    return path


def test_an_untouched_ledger_verifies_and_says_what_could_not_be_noticed(ledger: Kite, told: Told):
    ended = ledger("verify", "--operator-key", told.public)
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "rows: 8 checked, positions 1 to 8 of 8",
        "signatures: 5 checked, 0 not checked",
        "checkpoints: 1, the signatures of 1 checked; the last is of position 5, 3 rows behind it",
        "outside: no checkpoint to compare with: a tail that was cut off would not be noticed",
    ]
    assert ended.err == "the bus was not asked for its newest checkpoint: the fleet is not running\n"
    found = one(ledger("verify", "--json"))
    assert (found["ok"], found["signatures"], found["unchecked_signatures"], found["ledger"]) == (True, 3, 2, told.id)
    part = one(ledger("verify", "--from", "4", "--to", "6", "--operator-key", told.public, "--json"))
    assert (part["ok"], part["rows"], part["signatures"], part["checkpoints"]) == (True, 3, 2, 1)


def test_a_flipped_byte_is_named_and_left_as_it_is(ledger: Kite, told: Told):
    raw = told.fact.raw.replace(b'"instances":1', b'"instances":9')
    forge(told.url, FACT, raw, rehashed=False)
    ended = ledger("verify")
    assert ended.code == 3
    assert f"error: broken at position {FACT}, altered: expected hash {told.fact.hash.hex()}" in ended.err
    assert "nothing was repaired" in ended.err
    assert broken(ledger("verify", "--json")) == (FACT, "altered"), "still there"


def test_with_a_chain_that_fits_the_signature_gives_it_away(ledger: Kite, told: Told):
    forge(told.url, FACT, told.fact.raw.replace(b'"instances":1', b'"instances":9'), rehashed=True)
    assert broken(ledger("verify", "--json")) == (FACT, "signature")


def test_what_nobody_signed_is_given_away_by_the_checkpoint(ledger: Kite, told: Told):
    told.past_kite("UPDATE ledger SET key_id = '', signature = x'' WHERE pos = 4")
    forge(told.url, FACT, told.fact.raw, rehashed=True)
    assert broken(ledger("verify", "--json")) == (CHECKPOINT - 1, "checkpoint")
    assert broken(ledger("verify", "--operator-key", told.public, "--json")) == (FACT, "signature")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("DELETE FROM ledger WHERE pos = 5", (5, "missing")),
        ("UPDATE ledger SET raw = 'text' WHERE pos = 5", (5, "altered")),
        ("UPDATE ledger SET subject = CAST(x'ff' AS TEXT) WHERE pos = 5", (5, "altered")),
        ("UPDATE ledger SET hash = x'00' WHERE pos = 8", (8, "altered")),
    ],
    ids=["row gone", "another kind", "no UTF-8", "hash"],
)
def test_each_damage_is_named_by_its_position(ledger: Kite, told: Told, statement: str, expected: tuple[int, str]):
    told.past_kite(statement)
    assert broken(ledger("verify", "--json")) == expected


def test_a_cut_tail_is_noticed_by_a_checkpoint_kept_in_a_file(ledger: Kite, told: Told, tmp_path: Path):
    file = kept(ledger, tmp_path)
    whole = ledger("verify", "--checkpoint", file)
    assert whole.code == 0
    assert "outside: position 5 is there, 3 rows behind it: a tail cut off there would not be noticed\n" in whole.out
    told.past_kite("DELETE FROM ledger WHERE pos > 4")
    assert ledger("verify").code == 0, "the rows that are left fit"
    assert broken(ledger("verify", "--checkpoint", file, "--json")) == (5, "cut_tail")
    ended = ledger("verify", "--checkpoint", file)
    assert "broken at position 5, cut tail" in ended.err
    assert "the ledger ends at position 4" in ended.err


def test_a_checkpoint_is_what_was_signed_with_the_key_to_check_it_by(ledger: Kite, told: Told):
    found = one(ledger("checkpoint"))
    assert (found["ledger"], found["pos"], found["key_id"]) == (told.id, 5, ARBITRATOR.key_id)
    assert found["public_key"] == ARBITRATOR.public.hex()
    assert found["at"].endswith("Z")


def test_rubbish_is_no_checkpoint(ledger: Kite, tmp_path: Path):
    good = json.loads(kept(ledger, tmp_path).read_text())
    (tmp_path / "other").mkdir()
    other = {**good, "ledger": Told(tmp_path / "other").id}
    wrong: list[tuple[str, str]] = [
        ("", "Invalid JSON"),
        ("[1]", "object"),
        ("{}", "ledger: Field required"),
        (json.dumps({**good, "pos": 0}), "pos: "),
        (json.dumps({**good, "hash": "zz"}), "hash: "),
        (json.dumps({**good, "pos": 7}), "not that of its public key"),
        (json.dumps({**good, "pos": 7, "public_key": None}), "not that of an arbitrator's key"),
        (json.dumps({**other, "public_key": None}), "it is of ledger"),
        ("x" * 70_000, "more than 65536 bytes"),
    ]
    path = tmp_path / "wrong.json"
    for text, why in wrong:
        path.write_text(text)
        ended = ledger("verify", "--checkpoint", path)
        assert ended.code == 1, text[:80]
        assert f"error: {path} is no checkpoint to verify by: " in ended.err
        assert why in ended.err
    for unreadable in (tmp_path / "missing.json", tmp_path):
        assert ledger("verify", "--checkpoint", unreadable).code == 1


def test_wrong_lines_are_one_error_each(ledger: Kite, tmp_path: Path):
    (tmp_path / "no.key").write_text("rubbish")
    for line, code, why in [
        (("verify", "--from", "9"), 2, "positions 9 to 8 are no range of a ledger that ends at 8"),
        (("verify", "--to", "9"), 2, "positions 1 to 9"),
        (("verify", "--from", "5", "--to", "4"), 2, "positions 5 to 4"),
        (("verify", "--operator-key", tmp_path / "no.key"), 1, "is no key"),
        (("get", "9"), 1, "the ledger has no row 9"),
        (("get", "0"), 1, "no row 0"),
        (("get", "9" * 30), 1, "no row 999"),
        (("get", "01890000-0000-7000-8000-000000000000"), 1, "no row of event"),
        (("get", "\udcff"), 1, "no row of event"),
        (("get", "1", "--raw", "--json"), 2, "--raw prints the event as it is"),
        (("tail", "--type", "bogus"), 2, "no event type"),
        (("tail", "--subject", "\udcff"), 2, "is no subject"),
        (("tail", "-n", "0"), 2, "greater than or equal to 1"),
    ]:
        ended = ledger(*line)
        assert (ended.code, ended.out) == (code, ""), line
        assert ended.err.startswith("error: ")
        assert why in ended.err.splitlines()[0]


def test_an_empty_ledger_and_what_is_no_ledger(kite: Kite, tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    place.write(tmp_path, FleetFile(node="n", nats_url="", ledger_url=url, adapter_root="/", pid=0))
    Ledger.open(url).close()
    ended = kite("ledger", "verify", "--dir", tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert "error: the ledger is empty" in ended.err
    assert "the ledger has no checkpoint" in kite("ledger", "checkpoint", "--dir", tmp_path).err
    assert kite("ledger", "tail", "--json", "--dir", tmp_path).out == ""
    assert kite("ledger", "gaps", "--dir", tmp_path).err.startswith("no gap")
    (tmp_path / "empty.db").write_bytes(b"not a database at all" * 100)
    for line in ("verify", "checkpoint", "tail", "get 1", "gaps"):
        ended = kite("ledger", *line.split(), "--dir", tmp_path)
        assert ended.code == 1
        assert "is not a KITE ledger" in ended.err


def test_the_last_rows_are_listed_all_or_of_a_kind(ledger: Kite):
    assert [row["pos"] for row in lines(ledger("tail", "--json"))] == list(range(1, HEAD + 1))
    table = ledger("tail", "-n", "2").out.splitlines()
    assert table[0].split() == ["POS", "TIME", "TYPE", "SUBJECT", "SIGNER", "BYTES"]
    assert [line.split()[0] for line in table[1:]] == ["7", "8"]
    assert table[1].split()[1:5] == ["1970-01-01T00:00:07.000Z", "kite.yoco.channel_sampled.v1", "node/a", YOCO.key_id]
    assert table[2].split()[4] == "-"
    for name in ("channel_sampled", "kite.yoco.channel_sampled.v1"):
        assert [row["pos"] for row in lines(ledger("tail", "-n", "2", "--type", name, "--json"))] == [5, 7]
    assert [row["pos"] for row in lines(ledger("tail", "--subject", "node/a", "--json"))] == [4, 5, 7]
    assert lines(ledger("tail", "--type", "kite.later.thing.v9", "--json")) == []


async def test_the_tail_is_followed_until_ctrl_c(told: Told, tmp_path: Path):
    out = tmp_path / "followed"
    argv = command("ledger", "tail", "-n", "1", "-f", "--type", "tick", "--json", "--dir", str(told.dir))
    with out.open("w") as stream:
        process = await asyncio.create_subprocess_exec(*argv, stdout=stream, stderr=asyncio.subprocess.PIPE)
    try:
        await eventually(lambda: len(out.read_text().splitlines()) == 1)
        with Book.of(told.url, told.id, told.operator) as book:
            book.fact(4, YOCO)
            book.put(Tick())
        await eventually(lambda: len(out.read_text().splitlines()) == 2)
    finally:
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert [json.loads(line)["pos"] for line in out.read_text().splitlines()] == [HEAD, HEAD + 2]


def test_one_row_is_shown_whole_by_position_or_id(ledger: Kite, told: Told):
    by_pos = ledger("get", str(FACT), "--json")
    found = one(by_pos)
    assert (found["pos"], found["event_id"], found["hash"]) == (FACT, told.fact.event_id, told.fact.hash.hex())
    assert (found["signature"], found["event"]["data"]) == (told.fact.signature.hex(), {"node": "a", "instances": 1})
    assert ledger("get", told.fact.event_id, "--json").out == by_pos.out
    shown = ledger("get", str(FACT)).out
    assert f"key_id      {YOCO.key_id}\n" in shown
    assert '    "instances": 1\n' in shown


def test_raw_is_byte_for_byte(told: Told):
    argv = command("ledger", "get", str(FACT), "--raw", "--dir", str(told.dir))
    assert subprocess.run(argv, capture_output=True, check=True).stdout == told.fact.raw


def test_bytes_that_are_no_event_are_shown_as_none(ledger: Kite, told: Told):
    forge(told.url, FACT, b"\xff\x00", rehashed=False)
    assert one(ledger("get", str(FACT), "--json"))["event"] is None


def test_what_never_came_in_is_told_with_who_looked_at_it(ledger: Kite, told: Told):
    with Book.of(told.url, told.id, told.operator) as book:
        book.put(BusGap(stream="KITE_EVT", first=5, last=7))
        book.put(GapAcknowledged(actor="ana", reason="the disk was full"), "arbitration/fleet", bus="KITE_EVT")
        book.put(BusGap(stream="KITE_EVT", first=9, last=9))
        book.put(CHANGED)
        for code in (Refusal.UNSIGNED, Refusal.MALFORMED, Refusal.UNSIGNED):
            book.put(Rejected(stream="KITE_EVT", seq=20, bus_subject="x", code=code, message="", content=""))
        book.put(EventIdConflict(stream="KITE_EVT", seq=30, event_id=told.fact.event_id), bus="KITE_EVT")
    found = lines(ledger("gaps", "--json"))
    assert [one["kind"] for one in found] == ["gap", "gap", "epoch", "refused", "refused", "refused"]
    assert [(gap["first"], gap["actor"], gap["reason"]) for gap in found[:2]] == [
        (5, "ana", "the disk was full"),
        (9, None, ""),
    ]
    assert (found[2]["bus_epoch"], found[2]["why"], found[2]["seq"]) == (2, "shorter", 9)
    counted = {one["code"]: (one["count"], one["first_pos"], one["last_pos"]) for one in found[3:]}
    assert counted == {"unsigned": (2, 13, 15), "malformed": (1, 14, 14), "event_id_conflict": (1, 16, 16)}
    shown = ledger("gaps").out
    for text in ("by ana at position 10", "OTHER BUS", "shorter", "REFUSED", "event_id_conflict"):
        assert text in shown
    assert ledger("verify", "--json").code == 0


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Told]:
    """The told ledger, and a bus that has its streams."""
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        yield Told(tmp_path, server.url)


async def verified(told: Told) -> Ended:
    argv = command("ledger", "verify", "--json", "--dir", str(told.dir))
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def test_a_cut_tail_is_noticed_by_the_checkpoint_on_the_bus(running: Told):
    empty = one(await verified(running))
    assert (empty["ok"], empty["outside"], empty["bus_unasked"]) == (True, [], None)
    subject = dec_subject(FLEET, FLEET, "checkpointed", "ledger/fleet")
    forged = running.checkpoint.raw.replace(b'"pos":5', b'"pos":7')
    async with await Bus.connect(running.nats_url, "test") as bus:
        for number, payload in enumerate((running.checkpoint.raw, b"rubbish", forged)):
            await bus.publish(subject, payload, f"event-{number}")
    whole = await verified(running)
    assert whole.code == 0
    assert [(one["pos"], one["standing"]) for one in one(whole)["outside"]] == [(5, "there"), (7, "not_genuine")]
    running.past_kite("DELETE FROM ledger WHERE pos > 4")
    assert broken(await verified(running)) == (5, "cut_tail")


def test_a_bus_that_does_not_answer_is_told_and_does_not_stop_the_check(kite: Kite, tmp_path: Path):
    told = Told(tmp_path, "nats://127.0.0.1:1")
    ended = kite("ledger", "verify", "--dir", told.dir)
    assert ended.code == 0
    assert "the bus was not asked for its newest checkpoint: no NATS server answers" in ended.err
    with Reader.open(told.url) as reader:
        assert reader.head.pos == HEAD
