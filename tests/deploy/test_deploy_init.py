"""`kite init`: one folder, its owner's alone, written in one step or not at all."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kite.bus import Login, inbox_of
from kite.trust import load_public, load_signer
from kite_cli.__main__ import main
from kite_cli.deploy import texts
from kite_cli.deploy.members import members
from kite_cli.deploy.texts import Introduced

LIMITED = """
import resource, sys
from kite_cli.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
sys.exit(main(["init", sys.argv[1]]))
"""


def init(directory: Path, *options: str) -> int:
    return main(["init", str(directory), *options])


def everything(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


def test_everything_is_its_owners_alone_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = tmp_path / "fleet"
    assert init(directory, "--node", "a", "--node", "b.c", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["nodes"] == ["a", "b.c"]
    written = [path for path in everything(directory) if path.is_file()]
    assert sorted(said["files"]) == sorted(map(str, written))
    for path in everything(directory):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert list(tmp_path.iterdir()) == [directory]


def test_the_secrets_fit_the_configuration(tmp_path: Path):
    directory = tmp_path / "fleet"
    assert init(directory) == 0
    conf = (directory / "nats.conf").read_text()
    publics: set[str] = set()
    for member in members(["local"]):
        path = directory / "secrets" / "nats" / f"{member.name}.seed"
        nkey = Login.load(path, None).nkey
        assert nkey is not None
        assert f"nkey: {nkey.public}" in conf
        assert f'"{inbox_of(nkey.public)}.>"' in conf
        assert nkey.seed not in conf
        publics.add(nkey.public)
    assert len(publics) == len(members(["local"])) == conf.count("nkey: ")
    trusted = texts.read_trust((directory / "trust.json").read_text())
    assert [one.source for one in trusted] == [
        "kite/arbitrator/leader",
        "kite/upcycle/local",
        "kite/yoco/local",
        "kite/guard/local",
    ]
    keys = directory / "secrets" / "keys"
    for name, one in zip(("arbitrator", "upcycle-local", "yoco-local", "guard-local"), trusted, strict=True):
        assert load_signer(keys / f"{name}.key").public.hex() == one.public_key
    assert load_public(keys / "operator.pub") == load_signer(keys / "operator.key").public


def test_no_secret_stands_in_what_docker_compose_and_the_server_read(tmp_path: Path):
    directory = tmp_path / "fleet"
    assert init(directory) == 0
    password = (directory / "secrets" / "postgres.password").read_text().strip()
    assert len(password) >= 40
    assert (directory / "secrets" / "pgpass").read_text() == f"*:*:kite:kite:{password}\n"
    secret = [password] + [path.read_text().split()[-1] for path in (directory / "secrets").rglob("*.key")]
    secret += [path.read_text().strip() for path in (directory / "secrets").rglob("*.seed")]
    for name in ("nats.conf", ".env", "trust.json"):
        text = (directory / name).read_text()
        assert not [one for one in secret if one in text]


def test_two_deployments_share_no_secret(tmp_path: Path):
    for name in ("one", "two"):
        assert init(tmp_path / name) == 0
    first, second = (
        {path.read_text() for path in (tmp_path / name / "secrets").rglob("*") if path.is_file()}
        for name in ("one", "two")
    )
    assert not first & second


def test_tls_is_said_and_has_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = tmp_path / "fleet"
    assert init(directory, "--tls") == 0
    assert "server.crt" in capsys.readouterr().err
    assert "cert_file" in (directory / "nats.conf").read_text()
    assert "KITE_NATS_URL=tls://nats:4222" in (directory / ".env").read_text()
    assert stat.S_IMODE((directory / "tls").stat().st_mode) == 0o700


def test_a_dry_run_names_the_same_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = tmp_path / "fleet"
    assert init(directory, "--dry-run", "--json") == 0
    tried = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    assert init(directory, "--json") == 0
    assert tried == {**json.loads(capsys.readouterr().out), "dry_run": True}


@pytest.mark.parametrize("what", ["folder", "full", "file", "link"])
def test_what_is_there_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str):
    directory = tmp_path / "fleet"
    match what:
        case "file":
            directory.write_text("mine")
        case "link":
            directory.symlink_to(tmp_path / "nowhere")
        case _:
            directory.mkdir()
            if what == "full":
                (directory / "mine").write_text("mine")
    before = [(path, path.lstat().st_mtime_ns) for path in everything(tmp_path)]
    assert init(directory) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "exists" in said.err
    assert "hint: " in said.err
    assert [(path, path.lstat().st_mtime_ns) for path in everything(tmp_path)] == before


def test_where_nothing_can_be_written_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file" / "fleet", tmp_path / "missing" / "fleet"):
        assert init(directory) == 1
        assert "cannot write" in capsys.readouterr().err


def test_a_disk_that_fills_up_leaves_nothing_half(tmp_path: Path):
    directory = tmp_path / "fleet"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(directory)], capture_output=True, check=False, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--node", ""),
        ("--node", "_"),
        ("--node", "a/b"),
        ("--node", "../a"),
        ("--node", "a b"),
        ("--node", "a\nb"),
        ("--node", "é"),
        ("--node", "a" * 64),
        ("--node", "a", "--node", "a"),
        ("--node", "a", "--node", "A"),
        ("--listen", "4222"),
        ("--listen", "host:0"),
        ("--monitor", "127.0.0.1:65536"),
    ],
)
def test_bad_input_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]):
    assert init(tmp_path / "fleet", *options) == 2
    assert "hint: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "keys": []}', '{"format": 1, "keys": [{"source": "a"}]}']
)
def test_what_is_no_list_of_keys_is_refused(text: str):
    with pytest.raises(ValueError):  # noqa: PT011 # whatever it says: `folder.introduced` puts the path before it
        texts.read_trust(text)


def test_the_list_of_keys_is_read_as_it_was_written():
    keys = [Introduced("kite/yoco/a", "00" * 32), Introduced("kite/guard/a", "ff" * 32)]
    assert texts.read_trust(texts.trust(keys)) == keys
