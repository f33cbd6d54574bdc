"""The words that run a command in an image."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.environments.sandbox import images
from tools.task_images.run import ImageRunner, words_of


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("user", [0, 1000])
def test_apptainer_confines_an_image_that_is_checked_as_it_does_in_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: bool, user: int
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr(images.shutil, "which", lambda name: name if name == "apptainer" else None)
    image = tmp_path / "task.sif"
    image.touch()
    rollout = list(images.words_of(str(image), network=network))
    checked = words_of(ImageRunner(apptainer=True, network=network), image, tmp_path / "work", tmp_path / "inputs")
    options = rollout[2 : rollout.index(str(image))]
    assert checked == ["apptainer", "exec", *options, "--bind", f"{tmp_path}/inputs:/inputs:ro", str(image)]
    assert "--containall" in options
    assert ("--network=none" in options) != network
    assert ("--no-privs" in options) == (user == 0)
