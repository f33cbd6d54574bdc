"""Lineage from data to checkpoint: record splits and runs in the artifact store, and print what they were made from.

    python -m tools.data.lineage.record --data data/rlvr1            record the splits of a blend
    python -m tools.data.lineage.record --run-dir results/NAME       record a run's newest export, print its lineage
    python -m tools.data.lineage.record super3-rl-rlvr-model:v2      print the lineage of an artifact
    python -m tools.data.lineage.record                              print the lineage of all artifacts

run.lock.json ties a run to its data by the hash of their manifest, and to its start weights by their hash. When
WANDB_PROJECT is set, each recorded version is logged to W&B as well, with the alias `store-vN`.

The artifact store: numbered versions of data and models, what each was made from, without W&B.

    ROOT/NAME/v1/{manifest.json, metadata.json}    ROOT/NAME/latest, the text `v1`

ROOT is a directory or any fsspec URL. A version never changes. It exists as soon as its manifest does, which is written
after its metadata; then `latest` is updated. A reference is NAME, NAME:v3 or NAME:latest; a slash in NAME counts as a
dash.
"""

from __future__ import annotations

import argparse
import json
import os
import posixpath
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from recipes.config.load import load_stages
from recipes.errors import DataError, Problem
from recipes.files import sha256_of, write_atomically
from recipes.grpo.checkpoint import complete_checkpoints
from tools.command_line import exit_status
from tools.data.files.manifest import read_manifest
from tools.data.files.row_blocks import TEST, TRAIN, VALIDATION
from tools.draft.provenance import model_digest
from tools.locks import only_one

MANIFEST, METADATA, LATEST = "manifest.json", "metadata.json", "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One version of data or a model: the files at `path`, facts about them, and what they were made from."""

    name: str
    version: int
    type: str
    path: str
    created_at: str
    producer: str  # the run that made it; "local": made without a run
    metadata: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]]  # inputs outside the store: uri, revision, hash
    used_artifacts: Sequence[str]  # references into this store

    @property
    def reference(self) -> str:
        """The name with the version."""
        return f"{self.name}:v{self.version}"


class Store:
    """The artifacts below one root."""

    def __init__(self, root: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(root)

    def names(self) -> list[str]:
        """Return every name of which a version exists."""
        if not self._fs.exists(self._root):
            return []
        entries = [posixpath.basename(str(path).rstrip("/")) for path in self._fs.ls(self._root, detail=False)]
        return sorted(name for name in entries if self._versions(name))

    def find(self, reference: str) -> Artifact:
        """Return the artifact of a reference; raises `DataError` with the existing versions or names."""
        name, _, version = reference.partition(":")
        name = registered_name(name)
        versions = self._versions(name)
        numbers = {f"v{number}": number for number in versions}
        wanted = max(versions, default=0) if version in ("", LATEST) else numbers.get(version, 0)
        if not wanted:
            known = ", ".join(numbers) or ", ".join(self.names())
            wrong = "there is no such artifact" + (f" (known: {known})" if known else ": the store is empty")
            raise DataError(Problem(where=reference, wrong=wrong, fix="correct the name, or record it first"))
        return self._read(name, wanted)

    def all(self) -> Iterator[Artifact]:
        """Yield every version of every name."""
        for name in self.names():
            for version in self._versions(name):
                yield self._read(name, version)

    def add(self, draft: Artifact) -> Artifact:
        """Record `draft` as the next version, unless the latest version is equal; return the version."""
        is_local = isinstance(self._fs, LocalFileSystem)
        with only_one(Path(self._root) / ".lock") if is_local else nullcontext():
            versions = self._versions(draft.name)
            if versions:
                latest = self._read(draft.name, versions[-1])
                if _content(latest) == _content(draft):
                    return latest
            version = versions[-1] + 1 if versions else 1
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = {"name": draft.name, "version": version, "created_at": created, **_content(draft)}
            self._write(draft.name, f"v{version}/{METADATA}", json.dumps(entry["metadata"], indent=2) + "\n")
            self._write(draft.name, f"v{version}/{MANIFEST}", json.dumps(entry, indent=2) + "\n")
            self._write(draft.name, LATEST, f"v{version}")
        return self._read(draft.name, version)

    def _versions(self, name: str) -> list[int]:
        pattern = posixpath.join(self._root, name, "v*", MANIFEST)
        numbers = [posixpath.basename(posixpath.dirname(str(path)))[1:] for path in self._fs.glob(pattern)]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def _read(self, name: str, version: int) -> Artifact:
        path = posixpath.join(self._root, name, f"v{version}", MANIFEST)
        try:
            return Artifact(**json.loads(self._fs.cat_file(path)))
        except (ValueError, TypeError) as error:
            fix = "remove this version, and record it again"
            raise DataError(Problem(where=path, wrong=f"the manifest is damaged ({error})", fix=fix)) from error

    def _write(self, name: str, file: str, text: str) -> None:
        path = posixpath.join(self._root, name, file)
        if isinstance(self._fs, LocalFileSystem):
            write_atomically(Path(path), text.encode())
        else:  # an object store shows a file only when it is complete
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.pipe_file(path, text.encode())


def registered_name(name: str) -> str:
    """Return the name of an artifact in the store: for `super3/rl/rlvr1/data?sample=9`, `super3-rl-rlvr1-data`."""
    return name.partition("?")[0].replace("/", "-")


def draft(name: str, *, kind: str, path: Path, metadata: Mapping[str, Any], producer: str = "local") -> Artifact:
    """Return an artifact that is not recorded yet and has no inputs."""
    return Artifact(
        name=registered_name(name),
        version=0,
        type=kind,
        path=str(path.resolve()),
        created_at="",
        producer=producer,
        metadata=metadata,
        inputs=(),
        used_artifacts=(),
    )


def _content(artifact: Artifact) -> dict[str, Any]:
    """Return what is compared to decide whether two versions are equal."""
    kept = ("type", "path", "producer", "metadata", "inputs", "used_artifacts")
    content: dict[str, Any] = json.loads(json.dumps({key: getattr(artifact, key) for key in kept}))
    return content


DEFAULT_ROOT = "artifacts"
DATA_TYPE, MODEL_TYPE = "SplitJsonlDataArtifact", "model"


def record_data(store: Store, directory: Path) -> Artifact:
    """Record the splits of a blend and return the artifact. The validation split may be missing."""
    manifest = _manifest(directory / "manifest.json", fix="run `make data` first")
    rows = {output["file"]: output["rows"] for output in manifest.get("outputs", []) if "rows" in output}
    if TRAIN not in rows:
        wrong = f"it describes no {TRAIN} ({', '.join(rows) or 'no rows at all'})"
        fix = "name a directory that `make data` or `make curriculum` wrote"
        raise DataError(Problem(where=f"{directory}/manifest.json", wrong=wrong, fix=fix))
    metadata = {
        "path": str((directory / "manifest.json").resolve()),
        "manifest_sha256": sha256_of(directory / "manifest.json"),
        "total_sequences": sum(rows.values()),
        "train": str((directory / TRAIN).resolve()),
        "val": str((directory / VALIDATION).resolve()) if VALIDATION in rows else "",
        "test": str((directory / TEST).resolve()) if TEST in rows else "",
        "train_rows": rows[TRAIN],
        "val_rows": rows.get(VALIDATION, 0),
        "parameters": manifest["parameters"],
    }
    inputs = list({entry["uri"]: entry for entry in source_datasets(manifest)}.values())
    found = draft(f"super3-rl-{directory.resolve().name}-data", kind=DATA_TYPE, path=directory, metadata=metadata)
    return store.add(replace(found, inputs=inputs))


def source_datasets(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the outside inputs of a step and of the steps before it: data sets at a commit, files on this machine."""
    parameters = manifest.get("parameters", {})
    if manifest.get("tool") == "download":
        uri = f"hf://datasets/{parameters['dataset']}@{parameters['revision']}/{parameters['file']}"
        output = manifest["outputs"][0]
        yield {"uri": uri, "name": parameters["dataset"], "num_rows": output["rows"], "size_bytes": output["bytes"]}
    for entry in manifest.get("inputs", []):
        if "made_by" in entry:
            yield from source_datasets(entry["made_by"])
        elif "source" not in entry:
            yield {"uri": f"file:{entry['file']}", "name": entry["file"], "sha256": entry["sha256"]}
    sources = parameters.get("sources")
    for source in sources.values() if isinstance(sources, dict) else ():
        name, revision = source["dataset"], source["revision"]
        uri = f"hf://datasets/{name}@{revision}" if revision else f"file:{name}"
        yield {"uri": uri, "name": name, "split": source["split"]}


def record_run(store: Store, run_dir: Path) -> Artifact:
    """Record the newest complete export of a run, with references to its data and its start weights."""
    lock = _manifest(
        run_dir / "run.lock.json", fix="name the directory of a run that was started by make or the launcher"
    )
    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    if not checkpoints:
        wrong, fix = "the run has no complete checkpoint", "let the run save once"
        raise DataError(Problem(where=str(run_dir), wrong=wrong, fix=fix))
    step, checkpoint = max(checkpoints.items())
    export = checkpoint / "hf"
    metadata = {
        "step": step,
        "absolute_path": str(export.resolve()),
        "aliases": [checkpoint.name, "latest"],
        **model_digest(export),
        "git": lock["git"],
        "config": lock["config"],
        "seed": lock["seed"],
    }
    by_manifest = {a.metadata["manifest_sha256"]: a.reference for a in store.all() if a.type == DATA_TYPE}
    by_weights = {a.metadata["weights_sha256"]: a.reference for a in store.all() if a.type == MODEL_TYPE}
    used: list[str] = []
    inputs: list[dict[str, Any]] = []
    parent = lock["model"]
    if (weights := parent.get("weights_sha256")) in by_weights:
        used.append(by_weights[weights])
    else:
        inputs.append({"uri": f"file:{parent['path']}", "weights_sha256": weights})
    for name, digest in sorted(lock["data"].items()):
        if (reference := by_manifest.get(digest.get("manifest_sha256"))) is None:
            inputs.append({"uri": f"file:{name}", **digest})
        elif reference not in used:
            used.append(reference)
    name = f"super3-rl-{model_name(lock['stage'])}-model"
    found = draft(name, kind=MODEL_TYPE, path=export, metadata=metadata, producer=run_dir.resolve().name)
    return store.add(replace(found, inputs=inputs, used_artifacts=used))


def model_name(stage_id: str) -> str:
    """Return the upstream name of a stage's model: rlvr for all three RLVR stages, else the stage's own name."""
    names = {stage.id: stage.name for stage in load_stages()}
    return re.sub(r"^(rlvr)\d$", r"\1", names.get(stage_id, stage_id or "custom"))


def tree(store: Store, artifact: Artifact, depth: int = 0) -> Iterator[str]:
    """Yield the lines of an artifact's lineage; what it was made from is indented below it."""
    pad = "  " * depth
    made = f"by {artifact.producer}, {artifact.created_at}" if artifact.producer != "local" else artifact.created_at
    facts = artifact.metadata
    what = f"step {facts['step']}" if "step" in facts else f"{facts['train_rows']} + {facts['val_rows']} rows"
    yield f"{pad}{artifact.reference}  {what}, {made}"
    for reference in artifact.used_artifacts:
        yield from tree(store, store.find(reference), depth + 1)
    for entry in artifact.inputs:
        yield f"{pad}  {entry['uri']}"


def log_to_wandb(store: Store, artifact: Artifact) -> None:
    """Log an artifact to W&B, linked to the versions that it was made from, when WANDB_PROJECT is set.

    Each version of the store becomes a version in W&B with the alias `store-vN`. Raises `DataError` when W&B cannot be
    used.
    """
    if not os.environ.get("WANDB_PROJECT"):
        return
    if not os.environ.get("WANDB_MODE"):
        os.environ.pop("WANDB_MODE", None)  # W&B refuses a mode that is there and empty
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        wrong, fix = "it is set, but the package wandb is not installed", "install wandb, or unset WANDB_PROJECT"
        raise DataError(Problem(where="WANDB_PROJECT", wrong=wrong, fix=fix)) from error
    try:
        with wandb.init(job_type="lineage", name=artifact.reference) as run:
            if not run.offline:
                for used in map(store.find, artifact.used_artifacts):
                    run.use_artifact(_as_wandb(wandb, used), aliases=[_alias(used)])
            elif artifact.used_artifacts:
                print(
                    f"lineage: W&B is offline, so {artifact.reference} is logged without links to "
                    f"{', '.join(artifact.used_artifacts)}; repeat the command when W&B is online"
                )
            aliases = [*artifact.metadata.get("aliases", ["latest"]), _alias(artifact)]
            run.log_artifact(_as_wandb(wandb, artifact), aliases=aliases)
    except wandb.Error as error:
        wrong = f"W&B failed ({str(error).splitlines()[0]})"
        fix = "run `wandb login`, set WANDB_MODE=offline, or unset WANDB_PROJECT; the store itself is complete"
        raise DataError(Problem(where="WANDB_PROJECT", wrong=wrong, fix=fix)) from error


def _as_wandb(wandb: Any, artifact: Artifact) -> Any:
    """Return the W&B form of an artifact: a reference to the directory, and the store's manifest as a file.

    W&B makes a new version only when a file changes, and the reference is the same for all versions of a directory.
    """
    logged = wandb.Artifact(artifact.name, type=artifact.type, metadata=dict(artifact.metadata))
    logged.add_reference(Path(artifact.path).as_uri(), name="output", checksum=False)
    with logged.new_file(MANIFEST) as file:
        json.dump(asdict(artifact), file, indent=2)
    return logged


def _alias(artifact: Artifact) -> str:
    return f"store-v{artifact.version}"


def _manifest(path: Path, *, fix: str) -> dict[str, Any]:
    manifest = read_manifest(path)
    if manifest is None:
        raise DataError(Problem(where=str(path), wrong="the file is missing or is no JSON object", fix=fix))
    return manifest


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.lineage.record", description=__doc__.split("\n", 1)[0])
    parser.add_argument("reference", nargs="?", help="artifact whose lineage is printed")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="directories of splits to record")
    parser.add_argument("--run-dir", type=Path, help="run whose newest export is recorded")
    default = os.environ.get("ARTIFACTS_ROOT", DEFAULT_ROOT)
    parser.add_argument("--root", default=default, help="directory or URL of the store; ARTIFACTS_ROOT, or ./artifacts")
    options = parser.parse_args(arguments)
    store = Store(options.root)
    recorded = [record_data(store, directory) for directory in options.data]
    if options.run_dir:
        recorded.append(record_run(store, options.run_dir))
    asked = [store.find(options.reference)] if options.reference else []
    for artifact in [*recorded, *asked] or store.all():
        print("\n".join(tree(store, artifact)))
    for artifact in recorded:
        log_to_wandb(store, artifact)
    return 0


if __name__ == "__main__":
    sys.exit(main())
