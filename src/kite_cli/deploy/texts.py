"""The small files of a deployment: what docker-compose reads, whom the ledger is to trust, how PostgreSQL lets in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kite_cli.deploy.conf import AUTHORITY

TRUST_FORMAT = 1
DATABASE = "kite"


@dataclass(frozen=True, slots=True)
class Introduced:
    """A key that the ledger is to trust: whom it speaks for, and its 64 hex digits."""

    source: str
    public_key: str


def env(nodes: Sequence[str], *, folder: Path, owner: int, group: int, tls: bool) -> str:
    """Return `.env`: what varies between deployments. It holds no secret: those are files, mounted one by one."""
    values = {
        "KITE_DEPLOY": str(folder),
        "KITE_UID": str(owner),
        "KITE_GID": str(group),
        "KITE_NODE": nodes[0],
        "KITE_NODES": ",".join(nodes),
        "KITE_NATS_URL": f"{'tls' if tls else 'nats'}://nats:4222",
        "KITE_LEDGER_URL": f"postgresql://{DATABASE}@postgres/{DATABASE}",
        **({"KITE_NATS_CA_FILE": AUTHORITY} if tls else {}),
    }
    head = "# Written by `kite init`. docker-compose reads it; secrets are the files in secrets/, never variables."
    return "\n".join([head, *(f"{name}={value}" for name, value in values.items())]) + "\n"


def trust(keys: Sequence[Introduced]) -> str:
    """Return `trust.json`: whom `kite key introduce` has the ledger trust."""
    return json.dumps({"format": TRUST_FORMAT, "keys": [_record(key) for key in keys]}, indent=2) + "\n"


def read_trust(text: str) -> list[Introduced]:
    """Return the keys of a `trust.json`. Raises ValueError for anything else."""
    found = json.loads(text)
    try:
        if found["format"] != TRUST_FORMAT:
            raise ValueError(f"it has format {found['format']!r}, not {TRUST_FORMAT}")
        return [Introduced(str(key["source"]), bytes.fromhex(key["public_key"]).hex()) for key in found["keys"]]
    except (LookupError, TypeError) as error:
        raise ValueError("it is not what `kite init` writes") from error


def _record(key: Introduced) -> Mapping[str, str]:
    return {"source": key.source, "public_key": key.public_key}


def pgpass(password: str) -> str:
    """Return a password file of libpq, which PGPASSFILE names: a password in a URL would show in lists of processes."""
    return f"*:*:{DATABASE}:{DATABASE}:{password}\n"
