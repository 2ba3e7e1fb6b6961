"""Folders of weights for the loading and saving tests: read, compare, and edit golden ones."""

import json
import shutil

import numpy as np
from golden import checkpoint
from safetensors.numpy import load_file, save_file

from treejax.families.entries import leaves_by_path


def stored_tensors(folder):
    """All tensors of a folder, whatever files they are in."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same(got, expected):
    """The same parameters, bit for bit and dtype for dtype."""
    got, expected = leaves_by_path(got), leaves_by_path(expected)
    assert got.keys() == expected.keys()
    for path, leaf in expected.items():
        assert got[path].dtype == leaf.dtype, path
        assert np.asarray(got[path]).tobytes() == np.asarray(leaf).tobytes(), path


def edit(parent, preset, tensors=lambda t: None, config=lambda c: None):
    """Copy a golden folder into ``parent`` with its tensors and configuration changed in place."""
    folder = parent / preset
    shutil.copytree(checkpoint(preset), folder)
    content = stored_tensors(folder)
    tensors(content)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(content, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    config(settings)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
