"""A fleet of containers, for tests: docker-compose as a person calls it, and what Docker says of what runs."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from kite.clock import US_PER_S, mono_us
from kite.testing.eventually import eventually
from kite_cli.testing import Ended

COMPOSE_S = 300.0
HEALTHY_S = 180.0
PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
RUN = "com.docker.compose.oneoff"

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Container:
    """One container, as `docker inspect` tells of it."""

    service: str
    found: Json

    def at(self, *path: str) -> object:
        """Return what is at a path of it, None when there is nothing."""
        here: object = self.found
        for name in path:
            here = cast("Json", here).get(name) if isinstance(here, dict) else None
        return here

    @property
    def pid(self) -> int:
        """Its first process, as this machine numbers it."""
        return int(cast("int", self.at("State", "Pid")))

    @property
    def life(self) -> str:
        """When it was started last: another one after every start."""
        return str(self.at("State", "StartedAt"))

    @property
    def is_well(self) -> bool:
        """Whether it runs and its health check says so, or did its one job."""
        if self.at("State", "Status") == "exited":
            return self.at("State", "ExitCode") == 0 and self.at("HostConfig", "RestartPolicy", "Name") == "no"
        return self.at("State", "Health", "Status") == "healthy"


class Stack:
    """The services of docker-compose.yml under a project name of their own; `env` goes before the deployment's."""

    def __init__(
        self,
        root: Path,
        directory: Path,
        env: Mapping[str, str],
        profile: str = "fake",
        *,
        name: str = "main",
        env_file: str = ".env",
    ) -> None:
        """`root` is the folder of docker-compose.yml, `directory` what `kite init` made."""
        self.project = f"kite-test-{os.getpid()}-{name}"
        self.profile = profile
        self.up_s = 0.0
        self._root = root
        self._env_file = directory / env_file
        self.env = {**os.environ, **env, "COMPOSE_PROJECT_NAME": self.project}

    def compose(self, *words: str, profile: str | None = None, env: Mapping[str, str] | None = None) -> Ended:
        """Run docker-compose to its end. Raises TimeoutExpired."""
        chosen = self.profile if profile is None else profile
        front = ["docker-compose", "--env-file", str(self._env_file), *(["--profile", chosen] if chosen else [])]
        return ended([*front, *words], self._root, {**self.env, **(env or {})})

    def __enter__(self) -> Self:
        """Bring everything up; the end of the block removes it, with its volumes. Raises AssertionError."""
        try:
            self.up_s = self.up()
        except BaseException:
            self.down("-v")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down("-v")

    def up(self) -> float:
        """Bring everything up and return the seconds that docker-compose took. Raises AssertionError."""
        began_us = mono_us()
        done = self.compose("up", "-d")
        if done.code:
            raise AssertionError(done.err)
        return (mono_us() - began_us) / US_PER_S

    def down(self, *words: str) -> None:
        """Remove the containers, with `-v` the volumes too. Raises AssertionError."""
        done = self.compose("down", *words)
        if done.code:
            raise AssertionError(done.err)

    def kite(self, *words: str, mount: Path | None = None) -> Ended:
        """Run a `kite` command in a container of its own, which sees `mount` at /in."""
        mounted = ["-v", f"{mount}:/in:ro"] if mount else []
        return self.compose("run", "--rm", "-T", *mounted, "cli", *words)

    def told(self, *words: str, mount: Path | None = None) -> list[dict[str, object]]:
        """Run a `kite` command and return the JSON that it prints. Raises AssertionError unless it exits with 0."""
        done = self.kite(*words, "--json", mount=mount)
        if done.code:
            raise AssertionError(f"kite {' '.join(words)}: exit {done.code}\n{done.out}{done.err}")
        return [json.loads(line) for line in done.out.splitlines()]

    def containers(self) -> dict[str, Container]:
        """Return the containers of the services by their names, running or not."""
        labels = [f"--filter=label={label}" for label in (f"{PROJECT}={self.project}", f"{RUN}=False")]
        names = ended(["docker", "ps", "--all", "--quiet", *labels], self._root, self.env).out.split()
        if not names:
            return {}
        found = json.loads(ended(["docker", "inspect", *names], self._root, self.env).out)
        every = [Container(str(one["Config"]["Labels"][SERVICE]), one) for one in found]
        return {one.service: one for one in every}

    def inside(self, service: str, *words: str) -> Ended:
        """Run a command in a running container."""
        return ended(["docker", "exec", str(self.containers()[service].at("Id")), *words], self._root, self.env)

    def kill(self, service: str) -> Container:
        """End a container's first process as the kernel does when memory runs out: Docker knows nothing of it."""
        found = self.containers()[service]
        os.kill(found.pid, signal.SIGKILL)
        return found

    async def well(self, *after: Container, limit_s: float = HEALTHY_S) -> None:
        """Wait until all containers are well, and those of `after` live again. Raises AssertionError."""

        def unwell() -> list[str]:
            found = self.containers()
            dead = [one.service for one in after if found[one.service].life == one.life]
            return dead + [name for name, one in found.items() if not one.is_well]

        await eventually(lambda: not unwell(), limit_s)

    async def resting(self, limit_s: float = HEALTHY_S) -> Json:
        """Wait until `kite status` calls the fleet healthy, and return that. Raises AssertionError."""

        def healthy() -> Json | None:
            done = self.kite("status", "--json")
            if done.code:  # bus or ledger are not back yet
                return None
            whole = json.loads(done.out.splitlines()[0])
            return whole if whole["verdict"] == "healthy" and whole["instances"] else None

        found = await eventually(healthy, limit_s)
        assert found is not None  # noqa: S101 # `eventually` waited for it
        return found


def ended(argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> Ended:
    """Run a program to its end. Raises TimeoutExpired after COMPOSE_S."""
    done = subprocess.run(  # noqa: S603 # what the caller names
        argv, cwd=folder, env=dict(env), capture_output=True, check=False, text=True, timeout=COMPOSE_S
    )
    return Ended(done.returncode, done.stdout, done.stderr)
