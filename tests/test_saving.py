"""Orbax checkpoints: other devices, interruptions, exact dtypes (FC-25, FC-07)."""

import json
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from golden import checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treejax.checkpoint import load_model
from treejax.families.entries import leaves_by_path
from treejax.parameters import FLOAT32_ALWAYS, abstract
from treejax.saving import latest_step, restore_checkpoint, save_checkpoint
from treejax.state import init_state


def assert_same(got, expected):
    """The same tree, bit for bit and dtype for dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def small_tree(offset=0.0):
    return {"w": jnp.arange(6.0).reshape(2, 3) + offset, "n": jnp.int32(4)}


class Moments(NamedTuple):
    mean: jax.Array
    count: int


class Carry(struct.PyTreeNode):
    rows: jax.Array
    name: str = struct.field(pytree_node=False)


def test_any_tree_comes_back(tmp_path):
    tree = {
        "carry": Carry(jnp.ones((2, 3), jnp.bfloat16) / 3, name="static"),
        "moments": [Moments(jnp.float32(0.1), 12), None, ()],
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "empty": jnp.zeros((0, 4)),
        "host": np.array([2**60, -1]),
        "a/b": jnp.arange(5, dtype=jnp.int8),
        "loss": 0.1,
        "resumed": True,
        "text": "ok",
    }
    assert save_checkpoint(tmp_path, 3, tree) == tmp_path / "3"
    blank = jax.tree.map(lambda x: type(x)() if type(x) in (int, float, bool, str) else x, tree)
    step, restored, note = restore_checkpoint(tmp_path, blank)
    assert (step, note) == (3, None)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert restored["moments"][0].count == 12
    assert (restored["loss"], restored["resumed"], restored["text"]) == (0.1, True, "ok")
    assert isinstance(restored["host"], np.ndarray) and restored["host"].dtype == np.int64
    for name in ("carry", "empty", "host", "a/b"):
        assert_same(restored[name], tree[name])
    for name in ("key", "keys"):
        assert restored[name].dtype == tree[name].dtype
        assert_same(jax.random.key_data(restored[name]), jax.random.key_data(tree[name]))


def test_a_state_comes_back(tmp_path):
    """A State is a tree like any other: the target gives its configuration and policy."""
    config = load_model(checkpoint("qwen3_5")).config
    empty = init_state(config, batch=2, max_length=5, dtype="bfloat16", policy="wy")
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 9).astype(x.dtype), empty)
    save_checkpoint(tmp_path, 1, state)
    assert_same(restore_checkpoint(tmp_path, empty).tree, state)


def test_a_target_need_not_hold_values(tmp_path):
    save_checkpoint(tmp_path, 0, small_tree())
    target = jax.eval_shape(small_tree)
    assert_same(restore_checkpoint(tmp_path, target).tree, small_tree())


def test_steps_are_chosen_and_kept(tmp_path):
    assert latest_step(tmp_path / "nothing") is None
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        restore_checkpoint(tmp_path, small_tree())
    for step in (1, 5, 10, 9):
        save_checkpoint(tmp_path, step, small_tree(step), keep=3)
    assert latest_step(tmp_path) == 10
    assert restore_checkpoint(tmp_path, small_tree()).tree["w"][0, 0] == 10
    assert restore_checkpoint(tmp_path, small_tree(), step=5).tree["w"][0, 0] == 5
    with pytest.raises(ValueError, match="step 1 in .* does not exist; complete steps: 5, 9, 10"):
        restore_checkpoint(tmp_path, small_tree(), step=1)
    with pytest.raises(ValueError, match="already holds step 9"):
        save_checkpoint(tmp_path, 9, small_tree())


@pytest.mark.parametrize(
    "target, message",
    [
        ({"w": jnp.zeros((2, 3))}, "leaf 'n' is not in the target"),
        (small_tree() | {"x": jnp.zeros(2)}, "leaf 'x' is not in the checkpoint"),
        (
            small_tree() | {"w": jnp.zeros((3, 2))},
            r"'w' was saved as float32\[2, 3\], the target asks for float32\[3, 2\]",
        ),
        (small_tree() | {"n": 4}, r"'n' was saved as int32\[\], the target asks for int"),
    ],
    ids=["missing", "extra", "shape", "kind"],
)
def test_a_target_that_differs_is_refused(tmp_path, target, message):
    save_checkpoint(tmp_path, 1, small_tree())
    with pytest.raises(ValueError, match=message) as caught:
        restore_checkpoint(tmp_path, target)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match="leaf 'f' is a function, expected an array or a number"):
        save_checkpoint(tmp_path, 1, small_tree() | {"f": small_tree})
    with pytest.raises(ValueError, match="at least one array"):
        save_checkpoint(tmp_path, 1, {"x": 3})
    with pytest.raises(ValueError, match="two leaves of the tree are called 'a/b'"):
        save_checkpoint(tmp_path, 1, {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
    with pytest.raises(ValueError, match="step is -1"):
        save_checkpoint(tmp_path, -1, small_tree())
    assert latest_step(tmp_path) is None


# FC-25


def test_fc25_a_bfloat16_target_may_not_narrow_the_gates(tmp_path):
    """FC-25, FC-07: dtypes come back as saved; a target that would narrow A_log is an error."""
    model = load_model(checkpoint("qwen3_5_wrapped"), "bfloat16")
    save_checkpoint(tmp_path, 1, model.params)
    restored = restore_checkpoint(tmp_path, abstract(model.config, "bfloat16")).tree
    assert_same(restored, model.params)
    for path, leaf in leaves_by_path(restored).items():
        always = path[-1] in FLOAT32_ALWAYS
        assert leaf.dtype == (jnp.float32 if always else jnp.bfloat16), path
    narrow = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), model.params)
    message = r"'layers/0/mixer/A_log' was saved as float32\[4\], the target asks for bfloat16\[4\]"
    with pytest.raises(ValueError, match=message):
        restore_checkpoint(tmp_path, narrow)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), model.params)
    with pytest.raises(ValueError, match="was saved as bfloat16"):
        restore_checkpoint(tmp_path, wide)


RESTORE_ON_FEWER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
from treejax.saving import restore_checkpoint
assert len(jax.devices()) == int(sys.argv[2])
split = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
target = {
    "w": jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=split),
    "A_log": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split),
    "n": jax.ShapeDtypeStruct((), jnp.int32),
}
tree = restore_checkpoint(sys.argv[1], target).tree
assert tree["w"].sharding == split and len(tree["w"].addressable_shards) == len(jax.devices())
print(json.dumps({k: [str(v.dtype), np.asarray(v, np.float32).tolist()] for k, v in tree.items()}))
"""


@pytest.mark.parametrize("devices", [2, 1])
def test_fc25_saved_on_eight_devices_restored_on_fewer(tmp_path, devices):
    """FC-25: saved on 8 devices, restored on 2 and on 1 with equal values and dtypes."""
    assert len(jax.devices()) == 8
    split = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
    tree = {
        "w": jax.device_put(jnp.arange(48).reshape(16, 3).astype(jnp.bfloat16) / 7, split),
        "A_log": jax.device_put(jnp.linspace(0.1, 2.7, 8), split),
        "n": jnp.int32(11),
    }
    assert len(tree["w"].addressable_shards) == 8
    save_checkpoint(tmp_path, 1, tree)
    command = [sys.executable, "-W", "error", "-c", RESTORE_ON_FEWER, tmp_path, str(devices)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    expected = {k: [str(v.dtype), np.asarray(v, np.float32).tolist()] for k, v in tree.items()}
    assert got == expected


KILLED_WHILE_SAVING = """
import os, signal, sys
import jax.numpy as jnp
from orbax.checkpoint._src.path import async_path
from treejax.saving import save_checkpoint
save_checkpoint(sys.argv[1], 1, {"w": jnp.full(8, 1.0)})
async def killed(source, destination):  # all is written, only the last step is missing
    os.kill(os.getpid(), signal.SIGKILL)
async_path.rename = killed
save_checkpoint(sys.argv[1], 2, {"w": jnp.full(8, 2.0)})
"""


def test_fc25_killed_while_saving_step_2_uses_step_1_and_says_so(tmp_path):
    """FC-25: the next start uses step 1, says so, and can save step 2 again."""
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    (left,) = [path.name for path in tmp_path.iterdir() if path.name != "1"]
    assert left.startswith("2.orbax-checkpoint-tmp")

    target = {"w": jnp.zeros(8)}
    assert latest_step(tmp_path) == 1
    step, tree, note = restore_checkpoint(tmp_path, target)
    assert step == 1
    np.testing.assert_array_equal(tree["w"], 1.0)
    assert note == f"step 2 in {tmp_path} was not completed, using step 1"
    with pytest.raises(ValueError, match="step 2 in .* was not completed; complete steps: 1"):
        restore_checkpoint(tmp_path, target, step=2)

    save_checkpoint(tmp_path, 2, {"w": jnp.full(8, 3.0)})
    step, tree, note = restore_checkpoint(tmp_path, target)
    assert (step, note) == (2, None)
    np.testing.assert_array_equal(tree["w"], 3.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
