"""Where a fleet is: `DIR/fleet.json`, or the environment."""

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kite.errors import Fault, KiteError, Unreachable, UsageError

if TYPE_CHECKING:
    from kite.bus import Login
    from kite.ledger import Reader
    from kite.trust import Signer

DEFAULT_DIR = Path(".kite")
FLEET_FILE = "fleet.json"
FORMAT = 1
FILE_MODE = 0o600
MONITOR = "nats_monitor"
"""Under which name the ports of `fleet.json` have the bus's monitoring port."""

OPERATOR_KEY = Path("keys/operator.key")
"""The private key that `kite up` makes for whoever may read its folder: it signs requests."""


class Address(Protocol):
    """What a request needs to know of a fleet."""

    @property
    def nats_url(self) -> str:
        """Where the bus listens."""
        ...

    @property
    def ledger_url(self) -> str:
        """The ledger's database."""
        ...

    @property
    def adapter_root(self) -> Path | None:
        """The folder that adapters are given below, as the fleet's services see it."""
        ...

    @property
    def signing_key(self) -> Path | None:
        """The file of the private key that signs requests, None when they go unsigned."""
        ...


class NoFleet(Unreachable):
    """No fleet is named, or none runs where it was named."""

    code = "no_fleet"
    fault = Fault.USER


class FleetFileUnreadable(KiteError):
    """`fleet.json` is there and is not what `kite up` writes."""

    code = "fleet_file_unreadable"
    fault = Fault.USER

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} cannot be read: {why}", hint="`kite up` writes it anew")
        self.path = path


@dataclass(frozen=True, slots=True)
class Place:
    """A fleet that was found; `operator_key` is the operator's public one, where the fleet's folder has it."""

    nats_url: str
    ledger_url: str
    adapter_root: Path | None
    name: str
    signing_key: Path | None = None
    operator_key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """The content of `fleet.json`; `nats_url` is empty when the fleet was stopped in order."""

    node: str
    nats_url: str
    ledger_url: str
    adapter_root: str
    pid: int
    pids: dict[str, int] = field(default_factory=dict[str, int])
    ports: dict[str, int] = field(default_factory=dict[str, int])
    format: int = FORMAT


def find(directory: Path | None) -> Place:
    """Return the fleet in `directory`, else in `KITE_DIR`, else by the URLs of the environment, else in `.kite`.

    Its requests are signed with the key that the environment names, else with the operator's in the fleet's folder.
    Raises NoFleet, FleetFileUnreadable, and UsageError when only one of the two URLs is set.
    """
    from kite_cli.settings import PlaceSettings

    settings = PlaceSettings()
    chosen = directory or settings.dir
    if chosen is not None:
        return in_folder(chosen, settings.signing_key)
    if settings.nats_url and settings.ledger_url:
        own = settings.signing_key
        return Place(settings.nats_url, settings.ledger_url, settings.adapter_root, settings.nats_url, own)
    if settings.nats_url or settings.ledger_url:
        raise UsageError("only one of KITE_NATS_URL and KITE_LEDGER_URL is set", hint="set both, or name --dir")
    return in_folder(DEFAULT_DIR, settings.signing_key)


def folder(directory: Path | None) -> Path:
    """Return the folder of the fleet that `find` would find. Raises what it raises, and NoFleet when it has none."""
    from kite_cli.settings import PlaceSettings

    found = find(directory)
    chosen = directory or PlaceSettings().dir or DEFAULT_DIR
    if found.name != str(chosen):
        raise NoFleet(
            "the fleet is named by its URLs, which tell of no folder",
            hint="name the folder of `kite up` by --dir; elsewhere logs are in `logs` of the yoco's KITE_STATE_DIR",
        )
    return chosen


def in_folder(directory: Path, signing_key: Path | None = None) -> Place:
    """Return the fleet that `kite up` runs or ran in a folder. Raises NoFleet and FleetFileUnreadable."""
    from kite.trust import public_path

    file = read(directory)
    operators = directory / OPERATOR_KEY
    own = signing_key or (operators if os.access(operators, os.R_OK) else None)  # others may look, and do not sign
    public = public_path(operators)
    known = public if public.is_file() else None
    return Place(file.nats_url, file.ledger_url, Path(file.adapter_root), str(directory), own, known)


def read(directory: Path) -> FleetFile:
    """Read `fleet.json` of a folder. Raises NoFleet and FleetFileUnreadable."""
    path = directory / FLEET_FILE
    try:
        return FleetFile(**json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise NoFleet(
            f"no fleet in {directory}", hint="start one with `kite up`, or name its folder by --dir"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise FleetFileUnreadable(path, str(error)) from error


def write(directory: Path, file: FleetFile) -> None:
    """Write `fleet.json` in one step, readable by its owner only."""
    handle, scratch = tempfile.mkstemp(dir=directory, prefix=f".{FLEET_FILE}.")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(asdict(file), stream, indent=2)
        stream.write("\n")
    Path(scratch).chmod(FILE_MODE)
    Path(scratch).rename(directory / FLEET_FILE)


def bus_url(fleet: Address) -> str:
    """Return where the bus of a running fleet listens. Raises NoFleet when it was stopped."""
    if not fleet.nats_url:
        raise NoFleet("the fleet is not running", hint="start it with `kite up`")
    return fleet.nats_url


def login() -> "Login":
    """Return who this command is to the bus, as the environment says. Raises the errors of `Login.load`."""
    from kite.bus import Login
    from kite_cli.settings import PlaceSettings

    settings = PlaceSettings()
    return Login.load(settings.nats_nkey_file, settings.nats_ca_file)


def signer(fleet: Address) -> "Signer | None":
    """Return the key that signs requests to a fleet. Raises the errors of `load_signer`."""
    from kite.trust import load_signer

    return load_signer(fleet.signing_key) if fleet.signing_key else None


class LedgerUnreadable(KiteError):
    """The ledger holds a row that this version cannot read."""

    code = "ledger_unreadable"
    fault = Fault.OPERATOR

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"the ledger {url} has a row that cannot be read: {why}", hint="use the version that wrote it")
        self.url = url


@contextmanager
def reading(fleet: Address) -> "Generator[Reader]":
    """Open the ledger of a fleet, running or not. Raises the errors of `Reader.open`, and LedgerUnreadable."""
    from kite.ledger import Reader
    from kite_schemas.envelope import MalformedEvent

    with Reader.open(fleet.ledger_url) as reader:
        try:
            yield reader
        except MalformedEvent as error:
            raise LedgerUnreadable(fleet.ledger_url, str(error)) from error
