"""The images that this project builds: Dockerfile, context, build arguments, and the check of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SKILLS_URL = "https://github.com/NVIDIA-NeMo/Skills.git"
SKILLS_COMMIT = "a5da59797890284af4df1c2a9c10990b33623a9d"  # the commit that the published recipe names
SKILLS_DIR = Path("build/nemo-skills")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image. Paths are relative to the root of the repository."""

    name: str
    dockerfile: Path
    arguments: tuple[str, ...]  # build arguments that the user may give, as variables of the same name
    check: tuple[str, ...]  # a command that succeeds inside a good image
    context: Path = Path()
    source: tuple[str, str] | None = None  # repository and commit that are checked out as the context
    short_bases: tuple[str, ...] = ()  # bases without a host in its Dockerfile, which podman refuses
    on_training_image: bool = False  # without BASE its base is the training image of ENGINE
    inputs: tuple[Path, ...] = ()  # files of this repository that the image is built from


def _imports(python: str, *modules: str) -> tuple[str, ...]:
    return (python, "-c", f"import {', '.join(modules)}")


_GPU_LOCK, _CPU_LOCK = Path("containers/requirements-gpu.lock"), Path("containers/requirements-cpu.lock")

IMAGES: Mapping[str, Image] = {
    image.name: image
    for image in (
        Image(
            name="native",
            dockerfile=Path("containers/native/Dockerfile"),
            arguments=("BASE", "UV", "MAX_JOBS"),
            check=_imports("python", "torch", "ray", "transformers", "megatron.core", "vllm"),
            inputs=(Path("containers/native"), _GPU_LOCK),
        ),
        Image(
            name="nemo_rl",
            dockerfile=Path("containers/nemo_rl/Dockerfile"),
            arguments=("BASE", "CUDA", "VLLM_VERSION", "WHEEL_ARCH", "PREFETCH"),
            check=_imports("python", "torch", "ray", "nemo_rl"),
            inputs=(Path("containers/nemo_rl"),),
        ),
        Image(
            name="swe",
            dockerfile=Path("containers/swe/Dockerfile"),
            arguments=("BASE", "APPTAINER_VERSION", "APPTAINER_SHA256", "DEB_ARCH"),
            check=("sh", "-c", "apptainer --version && python -c 'import torch, ray'"),
            on_training_image=True,
            inputs=(Path("containers/swe"),),
        ),
        Image(
            name="sandbox",
            dockerfile=Path("containers/sandbox/Dockerfile"),
            arguments=("BASE", "PACKAGES"),
            check=("sh", "-c", "bwrap --version && cd /sandbox && python3 -c 'import server'"),
            inputs=(Path("containers/sandbox"), Path("recipes/__init__.py"), Path("recipes/confinement")),
        ),
        Image(
            name="nemo-skills",
            dockerfile=SKILLS_DIR / "dockerfiles" / "Dockerfile.sandbox",
            arguments=("GITHUB_CI", "NUM_WORKERS"),
            check=("sh", "-c", "python -c 'import flask, IPython, sympy' && lake --version"),
            context=SKILLS_DIR,
            source=(SKILLS_URL, SKILLS_COMMIT),
            short_bases=("tiangolo/uwsgi-nginx-flask:python3.10",),
        ),
        Image(
            name="cpu_test",
            dockerfile=Path("containers/cpu_test/Dockerfile"),
            arguments=("BASE",),
            check=_imports("python", "torch", "ray", "vllm", "megatron.core"),
            inputs=(Path("containers/cpu_test"), Path("tools/dev"), Path("pyproject.toml"), _CPU_LOCK),
        ),
    )
}


def build_arguments(image: Image, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the build arguments that the environment sets; the Dockerfile has the defaults."""
    return {name: environ[name] for name in image.arguments if environ.get(name)}
