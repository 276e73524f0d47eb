"""Checks of the machine: each takes facts and gives one verdict. Pure."""

from collections.abc import Iterator
from ipaddress import ip_address

from kite.bus.server import LEAST
from kite_cli.doctoring.facts import Engines, Listener, Machine, Unknown
from kite_cli.doctoring.verdict import Finding, Said, Verdict, ok, unknown, worst
from kite_cli.output import count
from kite_yoco.offers import VLLM_MIN, numbers

NATS_MIN = LEAST
HUGEPAGES_MIN = 512
PYTHON_MIN = (3, 11)
CVES = "CVE-2026-27893, CVE-2026-22807"

LOOPBACK_HINT = "start engines with `--host 127.0.0.1`, as yoco does: their control routes ask for no key"
DEV_HINT = "VLLM_SERVER_DEV_MODE=1 opens /collective_rpc, which runs what it is told: keep it to loopback"
HIDDEN_HINT = "run `kite doctor` as root, and where the engines run"


def versions(machine: Machine) -> Finding:
    """Say which versions are here, and which of them are too old."""
    told = f"KITE {machine.kite}, Python {machine.python}, {_named('nats-server', machine.nats_server)}, " + _named(
        "vLLM", machine.vllm
    )
    return worst("versions", list(_old(machine)), told)


def _named(name: str, version: str) -> str:
    return f"{name} {version}" if version else f"no {name}"


def _old(machine: Machine) -> Iterator[Said]:
    if machine.vllm and (said := old_vllm(machine.vllm, "here")):
        yield said
    if machine.nats_server and numbers(machine.nats_server) < NATS_MIN:
        oldest = ".".join(map(str, NATS_MIN))
        yield Verdict.PROBLEM, f"nats-server {machine.nats_server}", f"KITE needs nats-server {oldest} or newer"
    if numbers(machine.python) < PYTHON_MIN:
        yield Verdict.PROBLEM, f"Python {machine.python}", "KITE needs Python 3.11 or newer"


def old_vllm(version: str, where: str) -> Said | None:
    """Say that a vLLM has known holes, None when it has none.

    >>> old_vllm("0.17.2", "here")[1]
    'vLLM 0.17.2 here is older than 0.18.0 (CVE-2026-27893, CVE-2026-22807)'
    >>> old_vllm("0.32.0+cpu", "here")
    """
    if numbers(version) >= VLLM_MIN:
        return None
    oldest = ".".join(map(str, VLLM_MIN))
    found = f"vLLM {version} {where} is older than {oldest} ({CVES})"
    return Verdict.PROBLEM, found, f"install vLLM {oldest} or newer: yoco starts no older one"


def exposed(machine: Machine) -> Finding:
    """Say which engines can be reached from elsewhere."""
    found = machine.engines
    if isinstance(found, Unknown):
        return unknown("engine ports", found)
    said = [_exposure(one) for one in found.listeners if not _loopback(one)]
    if said or not found.hidden:
        return worst("engine ports", said, f"{_counted(found)}, none off loopback")
    return unknown("engine ports", _hidden(found))


def _exposure(one: Listener) -> Said:
    address = ip_address(one.address)
    narrow = address.is_private and not address.is_unspecified
    verdict = Verdict.WARNING if narrow else Verdict.PROBLEM
    return verdict, f"an engine (pid {one.pid}) listens on {where(one)}", LOOPBACK_HINT


def dev_mode(machine: Machine) -> Finding:
    """Say which engines take commands from elsewhere."""
    found = machine.engines
    if isinstance(found, Unknown):
        return unknown("dev mode", found)
    open_ones = [one for one in found.listeners if not _loopback(one)]
    said = [
        (Verdict.PROBLEM, f"the engine on {where(one)} (pid {one.pid}) is in dev mode", DEV_HINT)
        for one in open_ones
        if one.dev_mode
    ]
    if not said and (found.hidden or any(one.dev_mode is None for one in open_ones)):
        return unknown("dev mode", _hidden(found))
    return worst("dev mode", said, "no engine off loopback is in dev mode")


def where(one: Listener) -> str:
    """Return an address with its port.

    >>> where(Listener("::", 8000, 1)), where(Listener("0.0.0.0", 8000, 1))
    ('[::]:8000', '0.0.0.0:8000')
    """
    return f"[{one.address}]:{one.port}" if ":" in one.address else f"{one.address}:{one.port}"


def _loopback(one: Listener) -> bool:
    address = ip_address(one.address)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _hidden(found: Engines) -> Unknown:
    unread = found.hidden + sum(one.dev_mode is None for one in found.listeners if not _loopback(one))
    return Unknown(f"{count(unread, 'socket')} off loopback, of processes this user cannot look into", HIDDEN_HINT)


def _counted(found: Engines) -> str:
    return f"{count(len({one.pid for one in found.listeners}), 'engine')} here"


def hugepages(machine: Machine) -> Finding:
    """Say whether there are huge pages to start engines in."""
    found = machine.hugepages
    if isinstance(found, Unknown):
        return unknown("hugepages", found)
    if found >= HUGEPAGES_MIN:
        return ok("hugepages", f"vm.nr_hugepages is {found}")
    return Finding(
        "hugepages",
        Verdict.WARNING,
        f"vm.nr_hugepages is {found}, {HUGEPAGES_MIN} or more are recommended",
        f"`sysctl -w vm.nr_hugepages={HUGEPAGES_MIN}`: without them hand-overs of 800 ms have been seen",
    )


CHECKS = (versions, exposed, dev_mode, hugepages)
