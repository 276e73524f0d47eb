"""Writing the folder of a deployment: all of it beside its place first, then moved there in one step, or nothing."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kite import durable
from kite.bus import Nkey
from kite.errors import Fault, KiteError
from kite.trust import new_key
from kite_cli.deploy import texts
from kite_cli.deploy.conf import TLS_FOLDER, Server, render
from kite_cli.deploy.members import OPERATOR, Member, members
from kite_cli.deploy.texts import Introduced

FILE_MODE, FOLDER_MODE = 0o600, 0o700
SECRETS = Path("secrets")
SEEDS, KEYS = SECRETS / "nats", SECRETS / "keys"
PASSWORD, PGPASS = SECRETS / "postgres.password", SECRETS / "pgpass"
CONF, ENV, TRUST = Path("nats.conf"), Path(".env"), Path("trust.json")
PASSWORD_BYTES = 32


class DeploymentExists(KiteError):
    """There is something where the deployment was to be written."""

    code = "deployment_exists"
    fault = Fault.USER

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"{directory} exists, and keys and passwords are never replaced",
            hint="name a folder that does not exist yet, or move the old one away",
        )
        self.directory = directory


class DeploymentUnwritable(KiteError):
    """The folder cannot be written; nothing was."""

    code = "deployment_unwritable"
    fault = Fault.OPERATOR

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(f"cannot write {directory}: {why}", hint="name a folder in one that you can write in")
        self.directory = directory
        self.why = why


class TrustFileUnusable(KiteError):
    """The list of keys that the ledger is to trust is not there, or not what `kite init` writes."""

    code = "trust_file_unusable"
    fault = Fault.USER

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} names no keys to trust: {why}", hint="name the folder that `kite init` made")
        self.path = path
        self.why = why


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write. `owner` and `group` are numbers; only root can give files away."""

    nodes: tuple[str, ...]
    server: Server = field(default_factory=Server)
    owner: int = field(default_factory=os.getuid)
    group: int = field(default_factory=os.getgid)

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody who takes part. Raises UsageError."""
        return members(self.nodes)


def files(plan: Plan) -> list[Path]:
    """Return what is written, relative to the folder, secrets last."""
    signing = [KEYS / f"{name}.{end}" for name in _signers(plan) for end in ("key", "pub")]
    seeds = [_seed(member.name) for member in plan.members]
    return [CONF, ENV, TRUST, PASSWORD, PGPASS, *seeds, *signing]


def write(directory: Path, plan: Plan) -> list[Path]:
    """Write a deployment and return what was written. Raises DeploymentExists, DeploymentUnwritable, UsageError.

    A run that is killed leaves at most a hidden folder beside the place, which only its owner enters.
    """
    names = files(plan)
    if os.path.lexists(directory):
        raise DeploymentExists(directory)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.absolute().parent))
        try:
            _fill(scratch, plan, directory.absolute())
            _settle(scratch, plan)
            scratch.rename(directory)  # takes the place of an empty folder at most
        except BaseException:
            shutil.rmtree(scratch)
            raise
        durable.sync(directory.absolute().parent)
    except OSError as error:
        if os.path.lexists(directory):
            raise DeploymentExists(directory) from error
        raise DeploymentUnwritable(directory, error.strerror or str(error)) from error
    return names


def introduced(directory: Path) -> list[Introduced]:
    """Return the keys of a deployment that its ledger is to trust. Raises TrustFileUnusable."""
    path = directory / TRUST
    try:
        return texts.read_trust(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrustFileUnusable(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise TrustFileUnusable(path, str(error)) from error


def _fill(folder: Path, plan: Plan, final: Path) -> None:
    """Write everything to a folder that becomes `final`."""
    found = plan.members
    nkeys = {member.name: Nkey.generate() for member in found}
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    introduced = _make_keys(folder, plan)
    contents: Mapping[Path, str] = {
        CONF: render(plan.server, found, {name: nkey.public for name, nkey in nkeys.items()}),
        ENV: texts.env(plan.nodes, folder=final, owner=plan.owner, group=plan.group, tls=plan.server.tls),
        TRUST: texts.trust(introduced),
        PASSWORD: f"{password}\n",
        PGPASS: texts.pgpass(password),
        **{_seed(name): f"{nkey.seed}\n" for name, nkey in nkeys.items()},
    }
    for path, content in contents.items():
        _put(folder / path, content)
    if plan.server.tls:
        (folder / TLS_FOLDER).mkdir(FOLDER_MODE)


def _make_keys(folder: Path, plan: Plan) -> Sequence[Introduced]:
    """Make the keys that sign, and return those that the ledger has to be told of."""
    made = {name: new_key(folder / KEYS / f"{name}.key").public.hex() for name in _signers(plan)}
    return [Introduced(source, made[name]) for name, source in _signers(plan).items() if source]


def _signers(plan: Plan) -> Mapping[str, str]:
    """Return whom each signing key speaks for, by its name; the operator's, which lets the others in, needs nobody."""
    return {OPERATOR: "", **{member.name: member.source for member in plan.members if member.source}}


def _seed(name: str) -> Path:
    return SEEDS / f"{name}.seed"


def _put(path: Path, content: str) -> None:
    path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _settle(folder: Path, plan: Plan) -> None:
    """Give everything its owner and its mode, the public halves of keys too."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        if (plan.owner, plan.group) != (os.getuid(), os.getgid()):
            os.chown(path, plan.owner, plan.group)
        if path.is_dir():
            durable.sync(path)
