"""Upcycle on a real bus, a real engine process and the tiny base: what comes of each order, and that once."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from kite.engine import Engine, EngineProcess, free_port
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_schemas.proof import EffectMissing, EffectProven, Missing
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendFailed,
    BlendLoaded,
    BlendStored,
    LoadFailed,
    RollbackFailed,
    RolledBack,
)
from kite_upcycle.reader import TENSORS_NAME, digest
from kite_upcycle.testing.desk import INSTANCE, NODE, OUTCOME_S, TRACEPARENT, Desk, working
from kite_upcycle.testing.desk import desk as at_desk


@pytest_asyncio.fixture
async def desk(tmp_path: Path, tiny_base: Path) -> AsyncGenerator[Desk]:
    async with at_desk(tmp_path, tiny_base) as desk:
        yield desk


@pytest_asyncio.fixture
async def upcycle(desk: Desk) -> AsyncGenerator[None]:
    async with working(desk):
        yield


@asynccontextmanager
async def process(desk: Desk, *prefix: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run the service as the process it is in a fleet, behind a prefix of its command line."""
    env = {
        **os.environ,
        "KITE_NATS_URL": desk.url,
        "KITE_NODE": NODE,
        "KITE_STATE_DIR": str(desk.state),
        "KITE_ADAPTER_ROOT": str(desk.root),
        "OMP_NUM_THREADS": "1",
    }
    running = await asyncio.create_subprocess_exec(*prefix, sys.executable, "-m", "kite_upcycle", env=env)
    try:
        yield running
    finally:
        if running.returncode is None:
            running.terminate()
            assert await running.wait() == 0


@dataclass
class Tap:
    """An endpoint in front of an engine that counts what passes."""

    url: str
    server: asyncio.Server
    open: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])
    seen: bytearray = field(default_factory=bytearray)

    @property
    def loads(self) -> int:
        return self.seen.count(b"POST /v1/load_lora_adapter ")

    def cut(self) -> None:
        """Break every connection, and take no other: as when the engine's process dies."""
        self.server.close()
        for writer in self.open:
            writer.transport.abort()


@asynccontextmanager
async def tapped(engine: str) -> AsyncGenerator[Tap]:
    host, _, port = engine.removeprefix("http://").partition(":")

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        tap.open += [writer, inner_writer]
        with suppress(ConnectionError, ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, inner_writer, tap.seen))
                group.create_task(_copy(inner_reader, writer, bytearray()))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    tap = Tap(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", server)
    try:
        yield tap
    finally:
        tap.cut()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
    while chunk := await reader.read(65_536):
        seen += chunk
        writer.write(chunk)
        await writer.drain()
    writer.close()


async def names(url: str) -> tuple[str, ...]:
    async with Engine(url) as engine:
        return await engine.models()


# ------------------------------------------------------------------------------------------------------ the whole way


@pytest.fixture(scope="session", params=["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_url(request: pytest.FixtureRequest) -> str:
    """The address of a running engine with the tiny base."""
    server: EngineProcess = request.getfixturevalue(f"{request.param}_server")
    return server.url


@pytest.mark.usefixtures("upcycle")
async def test_an_adapter_is_verified_blended_stored_loaded_proven_and_rolled_back(desk: Desk, engine_url: str) -> None:
    credit, fraud = desk.adapter("credit", seed=1), desk.adapter("fraud", seed=2)
    verified = await desk.outcome(AdapterVerified, await desk.verify(credit))
    assert (verified.adapter, verified.rank, verified.request) == (credit, 4, desk.request)
    assert 0 < verified.share_ppm <= 8_000

    stored = await desk.outcome(BlendStored, await desk.admit((credit, 600_000), (fraud, 400_000)))
    resident = stored.resident
    assert (stored.method, stored.rank, stored.residual_ppm) == ("concatenate", 8, 0)
    assert resident.version == f"risk@{stored.digest[:12]}"
    assert resident.path == f"store/sha256/{stored.digest}"
    assert digest(desk.root / resident.path) == stored.digest

    order = await desk.load(resident, engine_url)
    proven = await desk.outcome(EffectProven, order)
    first, last = await desk.outcomes(order)
    assert isinstance(first, BlendLoaded)
    assert (first.done, last.done, first.attempt, last.attempt) == (False, True, 1, 1)
    assert proven.base_micronats > 100 * proven.base_min_micronats
    assert (desk.root / proven.effect_print.path).is_file()
    assert resident.version in await names(engine_url)

    printed = resident.model_copy(update={"effect_print": proven.effect_print})
    again = await desk.outcome(EffectProven, await desk.load(printed, engine_url))
    assert again.effect_print == proven.effect_print
    assert again.print_micronats is not None
    assert again.print_micronats <= (again.print_max_micronats or 0)

    await desk.outcome(RolledBack, await desk.roll_back(resident.version, engine_url))
    assert resident.version not in await names(engine_url)


@pytest.mark.usefixtures("upcycle")
async def test_every_fact_of_an_order_belongs_to_its_request_and_its_trace(
    desk: Desk, fake_server: EngineProcess
) -> None:
    resident = await desk.stored("traced")
    order = await desk.load(resident, fake_server.url)
    await desk.outcome(EffectProven, order)
    for event in await desk.facts(order):
        header = event.header
        assert (header.correlationid, header.causationid) == (desk.request, order)
        assert header.subject == f"instance/{INSTANCE}"
        assert header.source == f"kite/upcycle/{NODE}"
        assert (header.traceparent or "")[3:35] == TRACEPARENT[3:35]


@pytest.mark.usefixtures("upcycle")
async def test_every_request_to_the_engine_carries_the_trace_of_its_order(
    desk: Desk, fake_server: EngineProcess
) -> None:
    resident = await desk.stored("carried")
    async with tapped(fake_server.url) as tap:
        await desk.outcome(EffectProven, await desk.load(resident, tap.url))
        carried = tap.seen.count(f"traceparent: {TRACEPARENT[:35]}".encode())
        assert carried == tap.seen.count(b" HTTP/1.1\r\n")
        assert tap.seen.count(b"POST /collective_rpc") == 2, "what it holds is asked before the load and after it"


# -------------------------------------------------------------------------------------------------------- verification


@pytest.mark.usefixtures("upcycle")
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("nan", "not_finite"),
        ("wrong_prefix", "unknown_module"),
        ("rank_lies", "rank"),
        ("dora", "unsupported_field"),
        ("int8", "dtype"),
        ("too_large", "params_share"),
    ],
)
async def test_a_defective_adapter_is_refused_with_what_is_wrong(desk: Desk, kind: str, code: str) -> None:
    bad = desk.defective(desk.adapter("good"), kind)
    refused = await desk.outcome(AdapterRefused, await desk.verify(bad))
    assert code in {violation.code for violation in refused.violations}
    assert refused.total == len(refused.violations)
    assert refused.adapter == bad


def change(adapter: Path) -> None:
    shutil.copyfile(adapter.parent / "other" / TENSORS_NAME, adapter / TENSORS_NAME)


def remove(adapter: Path) -> None:
    shutil.rmtree(adapter)


def cut_short(adapter: Path) -> None:
    os.truncate(adapter / TENSORS_NAME, 1_000)


def scribble(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_bytes(b"\xff{")


def link_away(adapter: Path) -> None:
    remove(adapter)
    adapter.symlink_to("/")


@pytest.mark.usefixtures("upcycle")
@pytest.mark.parametrize(
    ("spoil", "codes"),
    [
        (change, ["digest_mismatch"]),
        (remove, ["missing_file"]),
        (cut_short, ["digest_mismatch", "header_size"]),
        (scribble, ["digest_mismatch", "config_json"]),
        (link_away, ["symlink"]),
    ],
)
async def test_what_happens_to_an_adapter_after_the_request_is_noticed(
    desk: Desk, spoil: Callable[[Path], None], codes: list[str]
) -> None:
    adapter = desk.adapter("credit", seed=1)
    desk.adapter("other", seed=2)
    spoil(desk.root / adapter.path)
    refused = await desk.outcome(AdapterRefused, await desk.verify(adapter))
    assert [violation.code for violation in refused.violations] == codes


@pytest.mark.usefixtures("upcycle")
async def test_an_adapter_is_not_held_against_another_base_than_the_ordered_one(desk: Desk) -> None:
    adapter = desk.adapter("credit")
    other = desk.base.model_copy(update={"digest": "0" * 64})
    gone = desk.base.model_copy(update={"path": "/nowhere/at/all"})
    for base, code in ((other, "base_mismatch"), (gone, "missing_path")):
        refused = await desk.outcome(AdapterRefused, await desk.verify(adapter, base=base))
        (violation,) = refused.violations
        assert (violation.code, violation.where) == (code, "base")
        assert base.path in violation.found
    await desk.outcome(AdapterVerified, await desk.verify(adapter))  # and the service lives on


# ------------------------------------------------------------------------------------------------------------ blending


@pytest.mark.usefixtures("upcycle")
async def test_the_same_blend_twice_is_one_version(desk: Desk) -> None:
    credit, fraud = desk.adapter("credit", seed=1), desk.adapter("fraud", seed=2)
    first = await desk.outcome(BlendStored, await desk.admit((credit, 600_000), (fraud, 400_000)))
    again = await desk.outcome(BlendStored, await desk.admit((fraud, 400_000), (credit, 600_000)))
    assert again.resident == first.resident
    assert [path.name for path in (desk.root / "store" / "sha256").iterdir()] == [first.digest]


@pytest.mark.usefixtures("upcycle")
async def test_a_blend_that_cannot_be_fails_with_its_reason(desk: Desk) -> None:
    credit, fraud = desk.adapter("credit", seed=1), desk.adapter("fraud", seed=2)
    too_high = await desk.outcome(BlendFailed, await desk.admit((credit, 500_000), (fraud, 500_000), rank=4))
    assert too_high.code == "rank_exceeded"
    both = ((credit, 500_000), (fraud, 500_000))
    too_lossy = await desk.outcome(BlendFailed, await desk.admit(*both, rank=4, residual_max_ppm=50_000))
    assert too_lossy.code == "residual_exceeded"
    assert "--max-lora-rank 8" in too_lossy.message
    lossy = await desk.outcome(BlendStored, await desk.admit(*both, rank=4, residual_max_ppm=900_000))
    assert (lossy.method, lossy.rank) == ("recompress", 4)
    assert 50_000 < lossy.residual_ppm < 900_000
    desk.adapter("other", seed=3)
    change(desk.root / credit.path)
    changed = await desk.outcome(BlendFailed, await desk.admit((credit, 500_000), (fraud, 500_000)))
    assert changed.code == "member_changed"
    assert credit.digest in changed.message
    remove(desk.root / fraud.path)
    gone = await desk.outcome(BlendFailed, await desk.admit((fraud, 500_000)))
    assert gone.code == "unreadable_adapter"


@pytest.mark.usefixtures("upcycle")
async def test_a_store_that_cannot_be_written_fails_the_blend_and_says_which(desk: Desk) -> None:
    (desk.root / "store").write_text("in the way")
    credit = desk.adapter("credit")
    failed = await desk.outcome(BlendFailed, await desk.admit((credit, 1_000_000)))
    assert failed.code == "store_unusable"
    assert str(desk.root / "store") in failed.message
    (desk.root / "store").unlink()
    await desk.outcome(BlendStored, await desk.admit((credit, 1_000_000)))


SMALL_DISK = 'mount -t tmpfs -o size=64k small "$0" && exec "$@"'


def may_mount() -> bool:
    unshare = shutil.which("unshare")
    probe = [unshare or "false", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs small /tmp"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a small disk needs a mount namespace, which is forbidden here")
async def test_a_full_store_fails_the_blend_and_says_so(desk: Desk) -> None:
    store = desk.root / "store"
    store.mkdir()
    on_small_disk = ("unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(store))
    credit, fraud = desk.adapter("credit", seed=1, rank=8), desk.adapter("fraud", seed=2, rank=8)
    async with process(desk, *on_small_disk):
        failed = await desk.outcome(BlendFailed, await desk.admit((credit, 500_000), (fraud, 500_000)))
        assert failed.code == "store_full"
        assert f"{store} is full" in failed.message


# ----------------------------------------------------------------------------------------------- loading, rolling back


@pytest.mark.usefixtures("upcycle")
async def test_a_version_that_is_there_is_proven_without_a_second_load(desk: Desk, fake_server: EngineProcess) -> None:
    resident = await desk.stored("there")
    async with tapped(fake_server.url) as tap:
        await desk.outcome(EffectProven, await desk.load(resident, tap.url))
        order = await desk.load(resident, tap.url)
        await desk.outcome(EffectProven, order)
        assert await desk.loaded(order)
        assert tap.loads == 1


@pytest.mark.usefixtures("upcycle")
async def test_an_engine_that_is_gone_fails_the_load_and_the_rollback(desk: Desk) -> None:
    resident = await desk.stored("gone")
    nobody = f"http://127.0.0.1:{free_port()}"
    failed = await desk.outcome(LoadFailed, await desk.load(resident, nobody))
    assert (failed.stage, failed.code) == ("list", "engine_unreachable")
    assert nobody in failed.message
    kept = await desk.outcome(RollbackFailed, await desk.roll_back(resident.version, nobody))
    assert kept.code == "engine_unreachable"


@pytest.mark.usefixtures("upcycle")
async def test_an_engine_that_dies_during_the_proof_fails_the_load_there(
    desk: Desk, fake_server: EngineProcess
) -> None:
    resident = await desk.stored("dying")
    async with tapped(fake_server.url) as tap, Engine(fake_server.url) as engine:
        await engine.pause()  # it takes the load and holds the proof
        try:
            order = await desk.load(resident, tap.url)
            await eventually(lambda: desk.loaded(order), OUTCOME_S)
            tap.cut()
            failed = await desk.outcome(LoadFailed, order)
        finally:
            await engine.resume()
    assert (failed.stage, failed.code) == ("prove", "engine_unreachable")


@pytest.mark.usefixtures("upcycle")
async def test_a_version_without_effect_is_told_and_left_for_the_arbitrator(
    desk: Desk, fake_server: EngineProcess
) -> None:
    faint = adapters.adapter(desk.root / "adapters" / "faint", Path(desk.base.path), scale=1e-6)
    order = await desk.admit((desk.reference(faint), 1_000_000), blend="faint")
    resident = (await desk.outcome(BlendStored, order)).resident
    missing = await desk.outcome(EffectMissing, await desk.load(resident, fake_server.url))
    assert (missing.code, missing.instance, missing.version) == (Missing.LIKE_BASE, INSTANCE, resident.version)
    assert resident.version in await names(fake_server.url)


@pytest.mark.usefixtures("upcycle")
async def test_something_else_under_the_name_of_a_version_does_not_pass_for_it(
    desk: Desk, fake_server: EngineProcess
) -> None:
    mine, theirs = await desk.stored("odd", seed=1), await desk.stored("odd", seed=2)
    proven = await desk.outcome(EffectProven, await desk.load(mine, fake_server.url))
    async with Engine(fake_server.url) as engine:
        await engine.unload(mine.version)
        await engine.load(mine.version, str(desk.root / theirs.path))
    printed = mine.model_copy(update={"effect_print": proven.effect_print})
    missing = await desk.outcome(EffectMissing, await desk.load(printed, fake_server.url))
    assert missing.code is Missing.UNLIKE_PRINT


@pytest.mark.usefixtures("upcycle")
async def test_nothing_but_an_undamaged_version_of_the_store_is_loaded(desk: Desk, fake_server: EngineProcess) -> None:
    resident = await desk.stored("safe")
    elsewhere = resident.model_copy(update={"path": "adapters/safe-1"})
    refused = await desk.outcome(LoadFailed, await desk.load(elsewhere, fake_server.url))
    assert (refused.stage, refused.code) == ("check", "not_a_version")
    tensors = desk.root / resident.path / TENSORS_NAME
    tensors.chmod(0o644)
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    damaged = await desk.outcome(LoadFailed, await desk.load(resident, fake_server.url))
    assert (damaged.stage, damaged.code) == ("check", "store_damaged")
    shutil.rmtree(desk.root / resident.path)
    gone = await desk.outcome(LoadFailed, await desk.load(resident, fake_server.url))
    assert (gone.stage, gone.code) == ("check", "missing_path")
    assert resident.version not in await names(fake_server.url)


@pytest.mark.usefixtures("upcycle")
async def test_a_rollback_twice_is_fine(desk: Desk, fake_server: EngineProcess) -> None:
    resident = await desk.stored("undone")
    await desk.outcome(EffectProven, await desk.load(resident, fake_server.url))
    for _ in range(2):
        await desk.outcome(RolledBack, await desk.roll_back(resident.version, fake_server.url))
        assert resident.version not in await names(fake_server.url)


# --------------------------------------------------------------------------------------------------------------- once


async def test_upcycle_killed_between_load_and_outcome_has_loaded_once(desk: Desk, fake_server: EngineProcess) -> None:
    """A paused engine takes the load and holds the proof: that is where the process is killed."""
    async with AsyncExitStack() as stack:
        tap = await stack.enter_async_context(tapped(fake_server.url))
        engine = await stack.enter_async_context(Engine(fake_server.url))
        first = await stack.enter_async_context(process(desk))
        resident = await desk.stored("once")
        await engine.pause()
        try:
            order = await desk.load(resident, tap.url)
            await eventually(lambda: desk.loaded(order), OUTCOME_S)
            first.kill()
            assert await first.wait() == -signal.SIGKILL
        finally:
            await engine.resume()
        assert await desk.ended(order) is None

        await stack.enter_async_context(process(desk))
        proven = await desk.outcome(EffectProven, order)
        told = [(type(outcome), outcome.attempt, outcome.done) for outcome in await desk.outcomes(order)]
        assert told == [(BlendLoaded, 1, False), (BlendLoaded, 2, False), (EffectProven, 2, True)]
        assert tap.loads == 1
        assert (await engine.models()).count(proven.version) == 1


async def test_upcycle_without_an_adapter_root_says_so_and_ends(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    desk.root.rmdir()
    async with process(desk) as running:
        assert await running.wait() == 1
    assert str(desk.root) in capfd.readouterr().err
