"""The text of nats.conf: JetStream that syncs, one account for the fleet, one nkey user for each of its members."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kite.bus import inbox_of
from kite.bus.server import MEMORY_BYTES, STORE_BYTES
from kite_cli.deploy.members import Member

ACCOUNT, SYSTEM = "KITE", "SYS"
TLS_FOLDER = "tls"
SERVER_CERT, SERVER_KEY, AUTHORITY = (f"{TLS_FOLDER}/{name}" for name in ("server.crt", "server.key", "ca.crt"))


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is: `listen` and `monitor` are HOST:PORT, `store` a folder; paths of `tls` are relative."""

    listen: str = "0.0.0.0:4222"
    monitor: str = "127.0.0.1:8222"
    store: str = "/data/jetstream"
    tls: bool = False


def render(server: Server, members: Iterable[Member], publics: Mapping[str, str]) -> str:
    """Return nats.conf; `publics` are the nkeys' public halves by the members' names."""
    users = "\n".join(_user(member, publics[member.name]) for member in members)
    tls = _TLS if server.tls else ""
    return f"""# Written by `kite init`. It holds public keys only; the seeds are in secrets/nats.
server_name: "kite"
listen: {_text(server.listen)}
http: {_text(server.monitor)}
{tls}
jetstream {{
  store_dir: {_text(server.store)}
  sync_interval: always  # what is acknowledged is on disk
  max_file_store: {STORE_BYTES}
  max_memory_store: {MEMORY_BYTES}
}}

accounts {{
  {ACCOUNT} {{
    jetstream: enabled
    users: [
{users}
    ]
  }}
  {SYSTEM} {{}}
}}
system_account: {SYSTEM}
"""


_TLS = f"""
tls {{
  cert_file: "{SERVER_CERT}"  # relative to the folder that the server is started in
  key_file: "{SERVER_KEY}"
  min_version: "1.3"
}}
"""


def _user(member: Member, public: str) -> str:
    publish = "".join(f"\n            {_text(subject)}" for subject in member.publish)
    return f"""      {{  # {member.name}
        nkey: {public}
        permissions {{
          publish: {{ allow: [{publish}
          ] }}
          subscribe: {{ allow: [{_text(f"{inbox_of(public)}.>")}] }}
        }}
      }}"""


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
