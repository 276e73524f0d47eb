"""Where the facts come from: this machine, and the bus, the ledger and the folder of a fleet. Nothing is changed."""

import asyncio
import platform
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path

import psutil

from kite import __version__
from kite.bus import DEC, EVT, Bus, BusServerMissing, sync_always
from kite.bus.server import find_server
from kite.clock import wall_us
from kite.errors import KiteError, Unreachable
from kite.ledger import LedgerTooOld, Reader
from kite.ledger.address import parse
from kite_cli import place
from kite_cli.doctoring import facts
from kite_cli.doctoring.facts import Disk, Engines, Fleet, Listener, Machine, Secret, Unknown
from kite_cli.doctoring.fleet import MONITOR_HINT
from kite_cli.place import FLEET_FILE, MONITOR, OPERATOR_KEY, Place
from kite_cli.running import run
from kite_cli.settings import PlaceSettings
from kite_schemas.envelope import decode
from kite_schemas.yoco import NodeRegistered
from kite_yoco.offers import vllm_version

HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
ENGINES = ("vllm.entrypoints", "VLLM::", "kite.testing.fake")
"""Words of the command line of an engine, beside `vllm serve`."""
DEV_MODE = "VLLM_SERVER_DEV_MODE"
CONNECT_S = 2.0
ASK_S = 10.0
VERSION_S = 10.0


def machine() -> Machine:
    """Return what is known of this machine."""
    vllm = vllm_version()
    return Machine(
        kite=__version__,
        python=platform.python_version(),
        vllm=vllm[1] if vllm else "",
        nats_server=_nats_server(),
        hugepages=_hugepages(),
        engines=_engines(),
    )


def _nats_server() -> str:
    """Return the version of the server that `kite up` would start, empty without one."""
    try:
        program = asyncio.run(find_server())
    except BusServerMissing:
        return ""
    told = subprocess.run(  # noqa: S603 # the program that the bus would be started with
        [program, "--version"], capture_output=True, text=True, check=False, timeout=VERSION_S
    )
    return told.stdout.strip().rpartition("v")[2]


def _hugepages() -> int | Unknown:
    try:
        return int(HUGEPAGES.read_text())
    except (OSError, ValueError) as error:
        return Unknown(f"{HUGEPAGES} cannot be read: {error}")


def _engines() -> Engines | Unknown:
    try:
        sockets = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return Unknown("this user may not see the sockets of this machine", "run `kite doctor` as root")
    listening = (one for one in sockets if one.status == psutil.CONN_LISTEN)
    bound = [(one.pid, one.laddr.ip, one.laddr.port) for one in listening if one.laddr]
    hidden = sum(pid is None and not ip_address(address).is_loopback for pid, address, _ in bound)
    seen = {pid: _dev_mode(pid) for pid, _, _ in bound if pid is not None and _is_engine(pid)}
    found = (Listener(address, port, pid, seen[pid]) for pid, address, port in bound if pid in seen)
    return Engines(tuple(sorted(found, key=lambda one: (one.pid, one.port))), hidden)


def _is_engine(pid: int) -> bool:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:  # it has ended meanwhile
        return False
    return is_engine(words)


def is_engine(words: Sequence[str]) -> bool:
    """Tell whether a command line is that of an engine.

    >>> is_engine(["python", "-m", "vllm.entrypoints.openai.api_server"]), is_engine(["/usr/bin/vllm", "serve", "x"])
    (True, True)
    >>> is_engine(["vim", "vllm.md"])
    False
    """
    names = [word.rpartition("/")[2] for word in words]
    served = ("vllm", "serve") in pairwise(names)
    return served or any(word.startswith(ENGINES) for word in words)


def _dev_mode(pid: int) -> bool | None:
    try:
        return psutil.Process(pid).environ().get(DEV_MODE, "0") not in {"", "0"}
    except psutil.Error:
        return None


def fleet(found: Place, settings: PlaceSettings) -> Fleet:
    """Return what is known of a fleet: the bus and the ledger are asked, the folder is looked at."""
    folder = Path(found.name) if (Path(found.name) / FLEET_FILE).is_file() else None
    told, vllm = _ledger(found)
    return Fleet(
        name=found.name,
        bus=_bus(found, _monitor(folder, settings)),
        ledger=told,
        now_us=wall_us(),  # after both: what they wrote meanwhile is not from the future
        disks=tuple(_disks(found, folder)),
        secrets=tuple(_secrets(found, folder, settings)),
        vllm=vllm,
    )


def _monitor(folder: Path | None, settings: PlaceSettings) -> str:
    """Return the address of the bus's monitoring port, empty where it is not known."""
    port = place.read(folder).ports.get(MONITOR) if folder else None
    return settings.nats_monitor_url or (f"http://127.0.0.1:{port}" if port else "")


def _bus(found: Place, monitor: str) -> facts.Bus | Unknown:
    if not found.nats_url:
        return Unknown("the fleet was stopped", "start it with `kite up`")
    try:
        return run(_ask(found.nats_url, monitor))
    except KiteError as error:
        return _failed(error)
    except TimeoutError:
        return Unknown(f"the bus at {found.nats_url} does not answer within {ASK_S:g} s", silent=True)


async def _ask(url: str, monitor: str) -> facts.Bus:
    async with asyncio.timeout(ASK_S), await Bus.connect(url, "doctor", login=place.login(), wait_s=CONNECT_S) as bus:
        return facts.Bus(
            url=url,
            peer=bus.peer,
            storages=tuple([await bus.storage(stream) for stream in (EVT, DEC)]),
            states=tuple([await bus.stream(stream) for stream in (EVT, DEC)]),
            sync_always=await _synced(monitor),
        )


async def _synced(monitor: str) -> bool | Unknown:
    if not monitor:
        return Unknown("whether the server syncs before it acknowledges is not known", MONITOR_HINT)
    try:
        return await sync_always(monitor)
    except KiteError as error:
        return Unknown(str(error), MONITOR_HINT)
    except ValueError:
        return Unknown(f"{monitor} is no monitoring port of a NATS server", MONITOR_HINT)


def _ledger(found: Place) -> tuple[facts.Ledger | Unknown, Mapping[str, str]]:
    try:
        with place.reading(found) as reader:
            return _read(found, reader), _vllm(reader)
    except KiteError as error:
        return _failed(error), {}


def _read(found: Place, reader: Reader) -> facts.Ledger:
    head = reader.head
    where = parse(found.ledger_url)
    shown = str(where) if isinstance(where, Path) else where.place
    return facts.Ledger(shown, reader.schema, head.pos, head.ledger_us, _facts_seq(reader))


def _facts_seq(reader: Reader) -> int | Unknown:
    try:
        cursor = reader.cursor(EVT)
    except LedgerTooOld as error:
        return Unknown(str(error), error.hint)
    return cursor.seq if cursor else 0


def _vllm(reader: Reader) -> Mapping[str, str]:
    """Return the version of vLLM that each node registered last."""
    found: dict[str, str] = {}
    for row in reader.find(types=[NodeRegistered.TYPE]):
        data = decode(row.raw).data
        if isinstance(data, NodeRegistered):
            found[data.node] = next((one.version for one in data.engines if one.kind == "vllm"), "")
    return {node: version for node, version in sorted(found.items()) if version}


def _failed(error: KiteError) -> Unknown:
    return Unknown(str(error), error.hint, silent=isinstance(error, Unreachable), wrong=True)


def _disks(found: Place, folder: Path | None) -> Iterator[Disk]:
    """Yield the file systems of the folder, of the adapters, and of a ledger that is a file, each once."""
    where = parse(found.ledger_url)
    ledger = where.parent if isinstance(where, Path) else None
    seen: set[int] = set()
    for path in (folder, found.adapter_root, ledger):
        if path is not None and path.is_dir() and (device := path.stat().st_dev) not in seen:
            seen.add(device)
            usage = shutil.disk_usage(path)
            yield Disk(path, usage.free, usage.total)


def _secrets(found: Place, folder: Path | None, settings: PlaceSettings) -> Iterator[Secret]:
    """Yield the secrets in the fleet's folder and those that this command uses, with what lies beside them."""
    kept = [folder / FLEET_FILE, *_beside(folder / OPERATOR_KEY)] if folder else []
    own = [path for path in (found.signing_key, settings.nats_nkey_file) if path is not None]
    beside = [other for path in own for other in _beside(path)]
    for path in dict.fromkeys([*kept, *own, *beside]):
        if path.is_file():
            yield Secret(path, stat.S_IMODE(path.stat().st_mode))


def _beside(path: Path) -> list[Path]:
    """Return the files of the same kind in a secret's folder; a name without a suffix tells no kind."""
    return sorted(path.parent.glob(f"*{path.suffix}")) if path.suffix else []
