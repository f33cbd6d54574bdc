"""The user and password of each registry, from Docker's files or from two variables.

A password is only ever given to the host that it belongs to. Docker's files name the host of each password. Those in
APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD belong to Docker Hub, or to the host in SIF_LOGIN_HOST.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import LaunchError, Problem
from tools.sif.registry.references import DOCKER_HUB

USER, PASSWORD = "APPTAINER_DOCKER_USERNAME", "APPTAINER_DOCKER_PASSWORD"
LOGIN_HOST = "SIF_LOGIN_HOST"
HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")
HELPER_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the passwords are: the environment, and the contents of Docker's files."""

    environ: Mapping[str, str]
    files: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Credentials:
        """Read Docker's files; raises `LaunchError` for one that is not a JSON object."""
        home = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME", "/")) / ".docker")
        places = [home / "config.json"]
        if environ.get("XDG_RUNTIME_DIR"):
            places.append(Path(environ["XDG_RUNTIME_DIR"]) / "containers" / "auth.json")
        if environ.get("REGISTRY_AUTH_FILE"):
            places.insert(0, Path(environ["REGISTRY_AUTH_FILE"]))
        return cls(environ, tuple(_read(place) for place in places if place.is_file()))

    def basic(self, host: str) -> str | None:
        """Return the header "Basic ..." for a host, None where there is no password for it."""
        has_variables = self.environ.get(USER) and self.environ.get(PASSWORD)
        if has_variables and host == (self.environ.get(LOGIN_HOST) or DOCKER_HUB):
            return _header(self.environ[USER], self.environ[PASSWORD])
        keys = (host, f"https://{host}", *(HUB_KEYS if host == DOCKER_HUB else ()))
        for file in self.files:
            for key in keys:
                helper = (file.get("credHelpers") or {}).get(key)
                entry = (file.get("auths") or {}).get(key)
                if entry and entry.get("auth"):
                    return f"Basic {entry['auth']}"
                if helper or (entry is not None and file.get("credsStore")):
                    return _ask(str(helper or file["credsStore"]), key)
        return None


def _read(path: Path) -> Mapping[str, Any]:
    fix = "run `docker login` again, or remove the file"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        problem = Problem(where=str(path), wrong=f"cannot be read as JSON ({type(error).__name__})", fix=fix)
        raise LaunchError(problem) from error
    if not isinstance(content, dict):
        raise LaunchError(Problem(where=str(path), got=type(content).__name__, expected="a JSON object", fix=fix))
    return content


def _ask(helper: str, key: str) -> str | None:
    """Ask the program in which Docker keeps passwords."""
    words = [f"docker-credential-{helper}", "get"]
    try:
        answer = subprocess.run(words, input=key, text=True, capture_output=True, timeout=HELPER_SECONDS, check=True)
        given = json.loads(answer.stdout)
        return _header(given["Username"], given["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None


def _header(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
