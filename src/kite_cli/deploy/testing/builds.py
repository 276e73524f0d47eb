"""The images that a test of containers runs: built on the spot from Debian, nothing is pulled."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

BUILD_S = 1_800.0
MIRROR_PORT = 18_999
"""Fixed: it is written into the base image, and so into every layer above it."""

KEPT = ("cert", "extra-index-url", "find-links", "index-url", "timeout")
"""Settings of pip that a build needs."""


class Unbuilt(Exception):
    """An image could not be built, or no Docker engine answers."""


def build(root: Path, folder: Path, scratch: Path, *, cpu: bool = False) -> dict[str, str]:
    """Build every image and return the variables that name them; what did not change is not built again.

    `root` is the repository, `folder` that of the images that stand for others. Raises Unbuilt.
    """
    _require_engine()
    conf, shared = pip_conf()
    base = f"kite-test-base:{hashlib.sha256(conf.encode()).hexdigest()[:12]}"
    node_args = (f"PYTHON_IMAGE={base}", f"PIP_EXTRA_INDEX_URL={os.environ.get('PIP_EXTRA_INDEX_URL', '')}")
    with mirror(shared, scratch):
        if not _ok("docker", "image", "inspect", base):
            (scratch / "pip.conf").write_text(conf)
            _run(str(folder / "base.sh"), base, str(scratch / "pip.conf"))
        images = {"PYTHON_IMAGE": base}
        for target in ("control", "node", *(["node-cpu"] if cpu else [])):
            name = f"KITE_{target.replace('-', '_').upper()}_IMAGE"
            images[name] = _image(root, f"kite-test-{target}", "--target", target, args=node_args)
        for part in ("nats", "postgres"):
            images[f"{part.upper()}_IMAGE"] = _stand_in(folder, part, node_args[0])
        images["JAEGER_IMAGE"] = _stand_in(folder, "jaeger", f"CONTROL_IMAGE={images['KITE_CONTROL_IMAGE']}")
    return images


def sizes(images: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of each image, by its name."""
    found = json.loads(_run("docker", "image", "inspect", *images.values()))
    return {name: int(one["Size"]) for name, one in zip(images.values(), found, strict=True)}


def pip_conf() -> tuple[str, list[Path]]:
    """Return this machine's pip settings as a build can use them, and the folders that have to be served for it."""
    listed = _run(sys.executable, "-m", "pip", "config", "list")
    settings: dict[str, list[str]] = {}
    shared: set[Path] = set()
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in KEPT:
            settings[key] = [_served(word, shared) if key != "cert" else word for word in value.strip("'").split()]
    lines = [f"{key} = {f'{os.linesep}    '.join(words)}" for key, words in sorted(settings.items())]
    return "\n".join(["[global]", *lines, ""]), sorted(shared)


def _served(word: str, shared: set[Path]) -> str:
    """Return where a build finds what `word` names; a folder of this machine is added to `shared`."""
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute():
        return word
    top = path.parent if path.name == "simple" else path  # the pages of an index point beside it
    shared.add(top)
    return f"http://127.0.0.1:{MIRROR_PORT}{path}"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the server's signature
        """Stay quiet."""


@contextmanager
def mirror(shared: list[Path], scratch: Path) -> Generator[None]:
    """Serve folders of this machine, and nothing else of it, on loopback for the time of the block."""
    top = scratch / "mirror"
    top.mkdir(parents=True, exist_ok=True)
    for folder in shared:
        link = top / str(folder).lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(folder)
    with ThreadingHTTPServer(("127.0.0.1", MIRROR_PORT), partial(_Quiet, directory=str(top))) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def _stand_in(folder: Path, part: str, arg: str) -> str:
    return _image(folder, f"kite-test-{part}", "--file", str(folder / f"{part}.Dockerfile"), args=(arg,))


def _image(context: Path, name: str, *words: str, args: tuple[str, ...]) -> str:
    given = [word for arg in args for word in ("--build-arg", arg)]
    _run("docker", "build", "--quiet", "--network", "host", *given, *words, "--tag", name, str(context))
    return name


def _require_engine() -> None:
    try:
        _run("docker", "version")
        _run("docker-compose", "version")
    except (OSError, Unbuilt) as error:
        raise Unbuilt(
            "no Docker engine answers: install docker.io, docker-compose and debootstrap, and start dockerd"
        ) from error


def _ok(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False, timeout=BUILD_S).returncode == 0  # noqa: S603


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, check=False, text=True, timeout=BUILD_S)  # noqa: S603 # our own
    if done.returncode:
        raise Unbuilt(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout[-4_000:]}{done.stderr[-4_000:]}")
    return done.stdout
