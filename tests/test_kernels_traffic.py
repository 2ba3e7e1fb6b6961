"""Byte floors of the benchmark, by hand and for a 27B model on an H200."""

import pytest

from pallas_kernels.bench.settings import parse
from pallas_kernels.bench.traffic import Sizes, floor_bytes, sizes_of
from pallas_kernels.bench.trees import make_tree


def test_floors_by_hand():
    sizes = Sizes(layers=2, batch=3, nodes=4, capacity=8, path=2, key_heads=1, value_heads=2,
                  key_dim=16, value_dim=8, item=2)  # fmt: skip
    states = 6 * 2 * 8 * 16 * 4
    scan = states + 6 * (4 * (2 * 16 * 2 + 16 * 2 + 2 * 2 * 4) + 8 * 16 * 4)
    replay = 2 * states + 6 * 2 * (16 * 2 + 16 * 2 + 2 * 2 * 4)
    commit = 2 * states + 6 * 2 * (16 * 2 + 16 * 4 + 2 * 4)
    solve = scan + 6 * 4 * 16 * 4
    assert floor_bytes("path_scan", sizes) == scan
    assert floor_bytes("replay", sizes) == replay
    assert floor_bytes("wy_commit", sizes) == commit
    assert floor_bytes("wy_solve", sizes) == solve
    assert floor_bytes("node_scan", sizes) == scan + 4 * states
    assert floor_bytes("wy_commit_solve", sizes) == solve + commit - states
    assert floor_bytes("path_scan+replay", sizes) == scan + replay
    assert floor_bytes("chain", sizes) == scan + states
    conv = 2 * 48 * (2 * (3 * 7 + 4) + 4 * 12) + 6 * 4 * 2 * (2 * 2 + 3 * 4)
    assert floor_bytes("tree_conv", sizes) == conv


def test_floors_of_the_27b_model_on_an_h200():
    """All states are 151 MB; verify and publish floors at 4.24 TB/s are .05 and .073 ms."""
    sizes = sizes_of(parse([]), 1, make_tree("hydra27"), 48)
    assert sizes.states == 48 * 48 * 128 * 128 * 4 == 150_994_944
    assert 1e3 * floor_bytes("path_scan", sizes) / 4.24e12 == pytest.approx(0.054, rel=0.1)
    assert 1e3 * floor_bytes("replay", sizes) / 4.24e12 == pytest.approx(0.073, rel=0.02)
