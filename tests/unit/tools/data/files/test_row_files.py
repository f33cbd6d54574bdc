"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recipes.files import atomic_writer


@pytest.mark.parametrize(("number", "is_named"), [(errno.ENOSPC, True), (errno.ECONNRESET, False)])
def test_a_full_disk_is_named_by_the_file_and_the_old_one_stays(tmp_path: Path, number: int, is_named: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match=os.strerror(number)) as raised, atomic_writer(path) as file:
        file.write(b"new")
        raise OSError(number, os.strerror(number))
    assert raised.value.filename == (str(path) if is_named else None)
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("rows.jsonl", b"old")]
