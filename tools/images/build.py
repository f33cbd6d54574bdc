"""Build container images, check them from inside, push or import them, and record their digests.

    make container [ENGINE=native|nemo_rl], make swe-container, make sandbox [SANDBOX=nemo-skills], make sandbox-sqsh

Variables: BUILDER (docker, podman or buildah; empty = the first that works), REGISTRY (prefix of the name), TAG,
DRY_RUN=1 (print the commands), PUSH=1, SQSH=FILE (import the image to this file), the build arguments of the Dockerfile
(BASE, APPTAINER_SHA256, ...), and BUILD_FLAGS, further arguments of the build command, as for a proxy or a mirror.

How each builder (docker buildx, podman, buildah) is told to build, run, push and describe an image.

The base images of a build, by digest: looked up once, recorded in the lock, and used again by every later build.

A tag can name another image tomorrow, a digest cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.errors import LaunchError, Problem, RunError
from recipes.files import nearest_existing
from tools.command_line import FALSE, TRUE, exit_status
from tools.images.lock import DIGEST, LOCK, LockedImage, hash_inputs, read_lock, record_of, write_lock
from tools.images.table import IMAGES, Image, build_arguments

ARGUMENTS = ("BASE", "UV")  # build arguments that name an image
_LOCAL = "localhost/"  # built here, in no registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """One image of a registry that a build begins from or copies from, named by its tag."""

    argument: str  # the build argument that names it
    name: str
    is_given: bool  # by the user; otherwise the Dockerfile's default

    def by_digest(self, digest: str) -> str:
        """Return NAME@DIGEST for NAME:TAG."""
        return f"{re.sub(r':[^:/]+$', '', self.name)}@{digest}"


def bases_of(image: Image, given: Mapping[str, str], root: Path) -> tuple[Base, ...]:
    """Return the bases of an image of ours. The training image of `swe` is none: the lock has its digest already."""
    if image.source is not None:
        return ()
    defaults = dict(
        re.findall(r"^ARG (\w+)=(\S+)$", (root / image.dockerfile).read_text(encoding="utf-8"), re.MULTILINE)
    )
    found = (
        Base(argument=argument, name=given.get(argument) or defaults[argument], is_given=argument in given)
        for argument in ARGUMENTS
        if argument in image.arguments and (argument in given or not image.on_training_image)
    )
    return tuple(base for base in found if not base.name.startswith(_LOCAL) and DIGEST.search(base.name) is None)


def digests(
    bases: Sequence[Base],
    recorded: Mapping[str, str],
    builder: str,
    *,
    ask: Callable[[Sequence[str]], str],
    run: Callable[[Sequence[str]], None],
) -> dict[str, str]:
    """Return name -> digest: the recorded one, or for a base that the user names, or a new one, that of its tag now.

    The tag is pulled before its digest is asked: what the builder's store has under that name may be old. Where it
    cannot be pulled, as without a network, the copy in the store is taken, and a line says so. `ask` returns what a
    command prints, "" where it fails. `run` runs one and raises `RunError` where it fails, as this does when there is
    no digest.
    """
    found = {}
    for base in bases:
        digest = None if base.is_given else recorded.get(base.name)
        if digest is None:
            digest = _digest_now(base.name, builder, ask=ask, run=run)
        found[base.name] = digest
    return found


def _digest_now(
    name: str, builder: str, *, ask: Callable[[Sequence[str]], str], run: Callable[[Sequence[str]], None]
) -> str:
    question, failed = base_digest_words(builder, name), None
    try:
        run([builder, "pull", name])
    except RunError as error:
        failed = error
    match = DIGEST.search(ask(question))
    if match is None:
        raise failed or RunError(f"containers: no digest of {name} from: {shlex.join(question)}")
    if failed:
        print(f"containers: {name} could not be pulled: the copy on this machine is taken, {match[0]}", flush=True)
    return match[0]


NAMES = ("docker", "podman", "buildah")
PROBE_SECONDS = 20
_PROBES = {"docker": ("docker", "buildx", "inspect"), "podman": ("podman", "info"), "buildah": ("buildah", "info")}
_DAEMON = {"docker": "dockerd", "podman": "podman"}  # builder -> the name of its store for enroot


def find_builder(wanted: str, *, is_dry: bool = False) -> str:
    """Return the builder `wanted`, or the first that works; raises `LaunchError` where none works.

    A dry run also takes a builder that does not work, so that any machine can print the commands.
    """
    if wanted and wanted not in NAMES:
        raise LaunchError(Problem(where="BUILDER", got=wanted, expected=" or ".join(NAMES), fix="correct the value"))
    candidates = (wanted,) if wanted else NAMES
    for name in candidates:
        if shutil.which(name) and _works(_PROBES[name]):
            return name
    if is_dry:
        return candidates[0]
    raise LaunchError(
        Problem(
            where="BUILDER" if wanted else "this machine",
            wrong=f"{wanted} does not work here" if wanted else "no builder works: neither docker, podman nor buildah",
            fix="install one (apt-get install podman), or look at the error of "
            + " or ".join(f"`{' '.join(_PROBES[name])}`" for name in candidates),
        )
    )


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def build_words(builder: str, tag: str, dockerfile: Path, context: Path, options: Sequence[str]) -> list[str]:
    """Return the command that builds an image into the builder's own store."""
    words = ["docker", "buildx", "build", "--load"] if builder == "docker" else [builder, "build"]
    if builder != "docker":
        words += ["--format=docker"]  # the OCI format has no SHELL
    return [*words, f"--file={dockerfile}", f"--tag={tag}", *options, str(context)]


def check_words(builder: str, tag: str, command: Sequence[str]) -> list[list[str]]:
    """Return the commands that run one command in a new container of the image."""
    if builder == "buildah":
        container = "check-" + "".join(letter if letter.isalnum() else "-" for letter in tag)
        return [
            ["buildah", "from", f"--name={container}", "--pull-never", tag],
            ["buildah", "run", container, "--", *command],
            ["buildah", "rm", container],
        ]
    return [[builder, "run", "--rm", "--network=none", "--entrypoint=", tag, *command]]


def push_words(builder: str, tag: str, digest_file: Path) -> list[str]:
    """Return the command that pushes an image to the registry in its name.

    podman and buildah compress during the push, so the digest in the registry is another one: they write it to a file.
    """
    return ["docker", "push", tag] if builder == "docker" else [builder, "push", f"--digestfile={digest_file}", tag]


def digest_words(builder: str, tag: str) -> list[str]:
    """Return the command that prints the digest of an image: in the builder's store, for docker in the registry."""
    if builder == "docker":
        pushed = "{{with .RepoDigests}}{{index . 0}}{{else}}{{.Id}}{{end}}"
        return ["docker", "image", "inspect", f"--format={pushed}", tag]
    if builder == "podman":
        return ["podman", "image", "inspect", "--format={{.Digest}}", tag]
    return ["buildah", "inspect", "--type=image", "--format={{.FromImageDigest}}", tag]


def base_digest_words(builder: str, name: str) -> list[str]:
    """Return the command that prints the digest by which a registry knows an image of the builder's store."""
    if builder == "docker":  # without a digest for an image that was built here
        return ["docker", "image", "inspect", "--format={{range .RepoDigests}}{{.}} {{end}}", name]
    return digest_words(builder, name)


def size_words(builder: str, tag: str) -> list[str]:
    """Return the command that prints the unpacked size of an image in bytes."""
    return ["docker" if builder == "docker" else "podman", "image", "inspect", "--format={{.Size}}", tag]


def import_words(builder: str, tag: str, output: Path) -> list[str]:
    """Return the command that writes an image as a squashfs file for pyxis."""
    store = _DAEMON.get(builder, "podman")  # podman and buildah share one store
    return ["enroot", "import", "--output", str(output), f"{store}://{tag}"]


ROOT = Path(__file__).resolve().parents[2]
LOCAL = "localhost/super-rl"  # prefix of names without a registry
SPACE_FACTOR = 2.5  # enroot unpacks the layers in ENROOT_TEMP_PATH, then packs them there
BUILD_SECONDS, ANSWER_SECONDS = 6 * 3600, 120
NEMO_RL_FORMS = {  # build argument -> its form, and the form in words
    "CUDA": (r"cu\d{3}", "cu and three digits, such as cu130"),
    "VLLM_VERSION": (r"lock|\d+\.\d+\.\d+", "lock or three numbers, such as 0.20.0"),
    "WHEEL_ARCH": (r"x86_64|aarch64", "x86_64 or aarch64"),
    "PREFETCH": (r"[\w./-]+\.yaml( [\w./-]+\.yaml)*", "YAML files of NeMo RL with a space between them"),
}
_VERSION = re.compile(r":v(\d+)\.(\d+)")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_REGISTRY = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-f:]+\])(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One image to build, and what to do with it afterwards."""

    image: Image
    builder: str
    tag: str
    arguments: Mapping[str, str]
    bases: Sequence[Base]
    flags: Sequence[str]
    push: bool
    sqsh: Path | None

    @property
    def commands(self) -> list[list[str]]:
        """All commands in their order."""
        image = self.image
        options = [f"--build-context={base}=docker-image://docker.io/{base}" for base in image.short_bases]
        options += [f"--build-arg={name}={value}" for name, value in self.arguments.items()]
        options += self.flags
        commands = [build_words(self.builder, self.tag, image.dockerfile, image.context, options)]
        if image.source:
            url, commit = image.source
            place = str(image.context)
            commands[:0] = [
                ["git", "init", "--quiet", place],
                ["git", "-C", place, "fetch", "--quiet", "--depth=1", url, commit],
                ["git", "-C", place, "checkout", "--quiet", "--force", "--detach", commit],
            ]
        commands += check_words(self.builder, self.tag, image.check)
        if self.push:
            commands.append(push_words(self.builder, self.tag, self.digest_file))
        if self.sqsh:
            commands.append(import_words(self.builder, self.tag, self.sqsh))
        return commands

    @property
    def digest_file(self) -> Path:
        """The file to which podman and buildah write the digest in the registry."""
        return Path("build") / f"{self.image.name}.digest"


def build_of(name: str, environ: Mapping[str, str], builder: str) -> Build:
    """Return the build of an image; raises `LaunchError` with every wrong variable."""
    if found := wrong_values(name, environ):
        raise LaunchError(found)
    image = IMAGES[name]
    arguments = build_arguments(image, environ)
    bases = bases_of(image, arguments, ROOT)
    if image.on_training_image:
        arguments.setdefault("BASE", tag_of(environ.get("ENGINE") or "native", environ))
    return Build(
        image=image,
        builder=builder,
        tag=tag_of(name, environ),
        arguments=arguments,
        bases=bases,
        flags=shlex.split(environ.get("BUILD_FLAGS", "")),
        push=environ.get("PUSH", "").lower() in TRUE,
        sqsh=Path(environ["SQSH"]).absolute() if environ.get("SQSH") else None,
    )


def tag_of(name: str, environ: Mapping[str, str]) -> str:
    """Return the full name of an image. That of NeMo RL has the tag of its base, where the doctor reads its version."""
    prefix = environ.get("REGISTRY") or LOCAL
    tag = re.search(r":([\w.-]+)$", nemo_rl_base(environ).partition("@")[0]) if name == "nemo_rl" else None
    return f"{prefix.rstrip('/')}/{name.replace('_', '-')}:{environ.get('TAG') or (tag[1] if tag else 'latest')}"


def nemo_rl_base(environ: Mapping[str, str]) -> str:
    """Return the image of NeMo RL that ours is made from: BASE, or the Dockerfile's."""
    if given := environ.get("BASE"):
        return given
    text = (ROOT / IMAGES["nemo_rl"].dockerfile).read_text(encoding="utf-8")
    found = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    return found[1] if found else ""


def wrong_values(name: str, environ: Mapping[str, str]) -> list[Problem]:
    """Return a problem for every variable with a wrong value."""
    fix = "correct the value"
    given = {variable: environ.get(variable, "") for variable in ("REGISTRY", "TAG", "PUSH", "DRY_RUN", "BUILD_FLAGS")}
    expected = {switch: "true or false" for switch in ("PUSH", "DRY_RUN") if given[switch].lower() not in TRUE + FALSE}
    if name not in IMAGES:
        given["ENGINE or SANDBOX"], expected["ENGINE or SANDBOX"] = name, " or ".join(sorted(IMAGES))
    if given["REGISTRY"] and not _REGISTRY.fullmatch(given["REGISTRY"]):
        expected["REGISTRY"] = "HOST[:PORT][/PATH], the path in lower case and no https://"
    if given["TAG"] and not _TAG.fullmatch(given["TAG"]):
        expected["TAG"] = "up to 128 letters, digits and . _ -"
    try:
        shlex.split(given["BUILD_FLAGS"])
    except ValueError as error:
        expected["BUILD_FLAGS"] = f"words quoted as for a shell ({error})"
    found = [Problem(where=where, got=given[where], expected=text, fix=fix) for where, text in expected.items()]
    found += nemo_rl_problems(environ) if name == "nemo_rl" else []
    if given["PUSH"].lower() in TRUE and not given["REGISTRY"]:
        fix = "set REGISTRY=your.registry/path"
        found.append(Problem(where="PUSH", wrong="REGISTRY is not set, so there is nowhere to push to", fix=fix))
    return found


def nemo_rl_problems(environ: Mapping[str, str]) -> list[Problem]:
    """Return a problem for every build argument of NeMo RL's image that cannot be meant."""
    found = [
        Problem(where=name, got=environ[name], expected=expected, fix="correct it, or leave it out")
        for name, (form, expected) in NEMO_RL_FORMS.items()
        if environ.get(name) and not re.fullmatch(form, environ[name])
    ]
    base, asked = nemo_rl_base(environ), environ.get("VLLM_VERSION", "")
    version, own = (_VERSION.search(image) for image in (base, nemo_rl_base({})))
    if version and own and tuple(map(int, version.groups())) < tuple(map(int, own.groups())) and asked != "lock":
        expected = f"lock: the servers of {base} get what its own lock pins"
        found.append(Problem(where="VLLM_VERSION", got=asked or "none", expected=expected, fix="set VLLM_VERSION=lock"))
    return found


def problems(build: Build) -> list[Problem]:
    """Return what would make the build fail late on this machine: a missing program, base or directory."""
    found = []
    base = build.arguments.get("BASE", "")
    if base.startswith("localhost/") and not _succeeds(digest_words(build.builder, base)):
        wrong, fix = f"{build.builder} has no image {base}", "build it with `make container`, or name another BASE"
        found.append(Problem(where="BASE", wrong=wrong, fix=fix))
    if "APPTAINER_SHA256" in build.image.arguments and not build.arguments.get("APPTAINER_SHA256"):
        fix = "set it to the sha256 that Apptainer's release page gives for the .deb package of that version"
        found.append(Problem(where="APPTAINER_SHA256", wrong="not set, so the download cannot be checked", fix=fix))
    needed = {"git": "the checkout of its source"} if build.image.source else {}
    if build.sqsh:
        needed |= {"enroot": "SQSH"} | ({"podman": "SQSH"} if build.builder == "buildah" else {})
    for program, purpose in needed.items():
        if shutil.which(program) is None:
            fix = f"install {program}, or run this on a node that has it"
            found.append(Problem(where=program, wrong=f"not on PATH, but {purpose} needs it", fix=fix))
    if build.sqsh and build.sqsh.is_dir():
        got, fix = f"the directory {build.sqsh}", f"set SQSH={build.sqsh}/{build.image.name}.sqsh"
        found.append(Problem(where="SQSH", got=got, expected="the name of a file", fix=fix))
    elif build.sqsh:
        parent = nearest_existing(build.sqsh.parent)
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            wrong = f"{parent} is not a directory that you may write to"
            found.append(Problem(where="SQSH", wrong=wrong, fix="name a file elsewhere"))
    return found


def make(build: Build, root: Path = ROOT) -> LockedImage:
    """Build the image from bases with a digest, and record all digests; raises `RunError` with what failed."""
    earlier = read_lock(root / LOCK).get(build.image.name)  # a damaged lock ends this before the build
    (root / build.digest_file.parent).mkdir(exist_ok=True)
    bases = digests(
        build.bases,
        earlier.bases if earlier else {},
        build.builder,
        ask=lambda command: _ask(command, root).stdout,
        run=lambda command: execute(command, root),
    )
    pinned = {base.argument: base.by_digest(bases[base.name]) for base in build.bases}
    for command in replace(build, arguments={**build.arguments, **pinned}).commands:
        if command[:2] == ["enroot", "import"]:
            import_image(build, root)
            continue
        if command[:2] == ["buildah", "from"]:
            _succeeds(["buildah", "rm", command[2].partition("=")[2]])  # left by a check that was killed
        execute(command, root)
    digest = digest_of(build, root)
    inputs = hash_inputs(root, build.image.inputs) if build.image.inputs else (build.image.source or ("", ""))[1]
    arguments = dict(build.arguments)
    entry = LockedImage(tag=build.tag, digest=digest, inputs=inputs, arguments=arguments, bases=bases)
    lock = read_lock(root / LOCK)
    lock[build.image.name] = entry
    write_lock(root / LOCK, lock)
    return entry


def execute(command: Sequence[str], root: Path) -> None:
    """Run one command, its output to the terminal."""
    print(f"containers: {shlex.join(command)}", flush=True)
    try:
        status = subprocess.run(command, cwd=root, timeout=BUILD_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"containers: not finished after {BUILD_SECONDS // 3600} hours: {shlex.join(command)}"
        ) from error
    if status != 0:
        raise RunError(f"containers: status {status} of: {shlex.join(command)}")


def _ask(command: Sequence[str], root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"containers: no answer after {ANSWER_SECONDS} s: {shlex.join(command)}") from error


def _succeeds(command: Sequence[str]) -> bool:
    return _ask(command).returncode == 0


def output_of(command: Sequence[str], root: Path) -> str:
    """Return what a command prints; raises `RunError` when it fails or takes too long."""
    result = _ask(command, root)
    if result.returncode != 0:
        raise RunError(f"containers: {result.stderr.strip()} from: {shlex.join(command)}")
    return result.stdout.strip()


def digest_of(build: Build, root: Path) -> str:
    """Return the digest of the built image, after a push the one in the registry."""
    if build.push and build.builder != "docker":
        text = (root / build.digest_file).read_text(encoding="utf-8")
    else:
        text = output_of(digest_words(build.builder, build.tag), root)
    found = DIGEST.search(text)
    if found is None:
        raise RunError(f"containers: no digest of {build.tag}: {build.builder} says {text!r}")
    return found[0]


def import_image(build: Build, root: Path) -> None:
    """Import to a squashfs file, which appears when it is complete, and write its tag and digest beside it."""
    assert build.sqsh is not None
    build.sqsh.parent.mkdir(parents=True, exist_ok=True)
    size = int(output_of(size_words(build.builder, build.tag), root))
    if shortage := space_problems(size, build.sqsh.parent, os.environ):
        raise LaunchError(shortage)
    partial = build.sqsh.with_name(f".{build.sqsh.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        execute(import_words(build.builder, build.tag, partial), root)
        record = {"tag": build.tag, "digest": digest_of(build, root), "bytes": partial.stat().st_size}
        record_of(build.sqsh).write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.replace(build.sqsh)
    finally:
        partial.unlink(missing_ok=True)


def space_problems(image_bytes: int, output: Path, environ: Mapping[str, str]) -> list[Problem]:
    """Check both disks that an import fills: that of the file, and enroot's temporary one, often a small /tmp."""
    temporary = environ.get("ENROOT_TEMP_PATH") or environ.get("TMPDIR") or "/tmp"
    places = {"SQSH": (output, 1.0), "ENROOT_TEMP_PATH": (Path(temporary), SPACE_FACTOR)}
    found = []
    for variable, (place, factor) in places.items():
        if not place.is_dir():
            fix = "create it, or name another directory"
            found.append(Problem(where=variable, wrong=f"{place} is not a directory", fix=fix))
            continue
        free = shutil.disk_usage(place).free
        if free < image_bytes * factor:
            got, expected = f"{free / 2**30:.1f} GiB free in {place}", f"{image_bytes * factor / 2**30:.1f} GiB"
            fix = f"free some disk, or set {variable} to another one"
            found.append(Problem(where=variable, got=got, expected=expected, fix=fix))
    return found


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Build one image."""
    parser = argparse.ArgumentParser(prog="tools.images.build", description="Build a container image.")
    parser.add_argument("image", help=", ".join(sorted(IMAGES)))
    args = parser.parse_args(argv)
    is_dry = os.environ.get("DRY_RUN", "").lower() in TRUE
    build = build_of(args.image, os.environ, find_builder(os.environ.get("BUILDER", ""), is_dry=is_dry))
    if is_dry:
        print("\n".join(shlex.join(command) for command in build.commands))
        return 0
    if found := problems(build):
        raise LaunchError(found)
    entry = make(build)
    print(f"containers: OK: {entry.tag} {entry.digest}, recorded in {LOCK}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
