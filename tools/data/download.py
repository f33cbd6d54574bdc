"""Download a published blend: named files of one data set at one commit, each checked by its hash.

    python -m tools.data.download --blend rlvr1 --out data/rlvr1/raw [--revision COMMIT] [--dataset NAME]

The same command resumes after a failure or a kill; it does nothing for files that are complete. HF_TOKEN is used for
data sets that need a login, HF_ENDPOINT names a mirror of the hub.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem, suggestion
from recipes.retry import RetryPolicy
from tools.command_line import exit_status
from tools.data.blends import BLENDS_FILE, Blend, load_blends
from tools.data.files.manifest import TOOL_VERSION, changes, manifest_of, write_manifest
from tools.data.files.transfer import RemoteFile, download_file, is_commit, list_files, no_commit


def find_blend(name: str, blends_file: Path, revision: str | None) -> Blend:
    """Return the blend of a name, at `revision` or at the commit in the blends file."""
    blends = load_blends(blends_file)
    if name not in blends:
        expected = f"one of {', '.join(blends)}"
        raise DataError(Problem(where="--blend", got=name, expected=expected, fix=suggestion(name, blends)))
    blend = replace(blends[name], revision=revision or blends[name].revision)
    if not is_commit(blend.revision):
        where = "--revision" if revision else f"{blends_file}: datasets.{blend.dataset}.revision"
        fix = f"take the commit from https://huggingface.co/datasets/{blend.dataset}/commits/main"
        raise DataError(no_commit(where, blend.revision, fix=fix))
    return blend


def download(blend: Blend, dataset: str, out: Path, policy: RetryPolicy) -> list[Path]:
    """Download each file of the blend that `out` lacks, and write its manifest; return all files."""
    assert blend.revision is not None
    pending: dict[str, list[str]] = {}
    for name in blend.files:
        if reasons := changes(manifest_of(out / name), _known(dataset, blend.revision, name)):
            pending[name] = reasons
        else:
            print(f"download: {out / name} is up to date")
    listed = list_files(dataset, blend.revision, sorted(pending), policy) if pending else {}
    for name, reasons in pending.items():
        _download_one(listed[name], out, blend.files[name], policy)
        print(f"download: {out / name} ({', '.join(reasons)}): done")
    return [out / name for name in blend.files]


def _known(dataset: str, revision: str, name: str) -> dict[str, Any]:
    parameters = {"dataset": dataset, "revision": revision, "file": name}
    return {"tool": "download", "tool_version": TOOL_VERSION, "parameters": parameters}


def _download_one(file: RemoteFile, out: Path, rows: int | None, policy: RetryPolicy) -> None:
    target = out / file.name
    received = download_file(file, target, policy)
    if rows is not None and received.rows != rows:
        got, expected = f"{received.rows} rows", f"{rows}, as published"
        fix = "the commit holds other rows than the blends file says; correct one of the two"
        raise DataError(Problem(where=str(target), got=got, expected=expected, fix=fix))
    output = {"file": target.name, "sha256": received.sha256, "bytes": received.size, "rows": received.rows}
    known = _known(file.repository, file.revision, file.name)
    write_manifest(manifest_of(target), {**known, "hub_hash": file.identity, "outputs": [output]})


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    policy = RetryPolicy()
    parser = argparse.ArgumentParser(prog="python -m tools.data.download", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blend", required=True, help="name in the blends file, e.g. rlvr1")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--dataset", help="name of the data set on the hub; both published names are accepted")
    parser.add_argument("--revision", help="commit of the data set, instead of the one in the blends file")
    parser.add_argument("--blends", type=Path, default=BLENDS_FILE, help="table of blends")
    parser.add_argument("--retries", type=int, default=policy.max_retries, help="in a row, without more bytes")
    parser.add_argument("--back-off", type=float, default=policy.first_seconds, help="seconds; doubles")
    options = parser.parse_args(arguments)
    blend = find_blend(options.blend, options.blends, options.revision)
    dataset = blend.dataset_called(options.dataset)
    policy = RetryPolicy(max_retries=options.retries, first_seconds=options.back_off)
    download(blend, dataset, options.out, policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
