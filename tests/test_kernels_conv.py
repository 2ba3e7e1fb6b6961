"""tree_conv against float64: convolution over ancestors, activation, norms, heads and gates."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_trees
import tiny
from kernel_cases import lower_for_h200, relative_rms

from pallas_kernels import implementation as dispatch
from pallas_kernels.tree_conv import mosaic_gpu, tree_conv
from treejax import layers
from treejax.tree import Tree, conv_rows, describe

# Relative RMS of float32 results against float64: a few roundings of 6e-8 each.
TOLERANCE = 3e-7
# With bfloat16 inputs silu is rounded to eight bits. Where float32 and float64 fall on two sides of
# a tie, one element moves by 2^-9 or so; without that rounding the error would be 1e-3.
BF16_TOLERANCE = 1e-4
FLIPS = 1e-3  # share of elements that may fall on the other side
GATES = 1e-6  # relative error of every single gate

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
LAYERS, LAYER = 2, 1
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """One program a head and sequence: the interpreter's time goes by programs."""
    monkeypatch.setattr(mosaic_gpu, "PROGRAMS", 1)


@dataclasses.dataclass
class Case:
    """Arrays in the order of tree_conv's arguments, and what they were made from."""

    trees: list
    heads: tuple
    dims: tuple
    inputs: jax.Array
    history: jax.Array
    taps: jax.Array
    rows: jax.Array
    a: jax.Array
    b: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array

    def arrays(self):
        return (
            *(self.inputs, self.history, jnp.int32(LAYER), self.taps, self.rows),
            *(self.a, self.b, self.A_log, self.dt_bias),
        )

    def run(self, implementation, **arrays):
        """The outputs as float64 NumPy; keywords replace arrays."""
        case = dataclasses.replace(self, **arrays)
        made = call(*case.arrays(), self.heads[0], self.dims[0], implementation)
        assert all(x.dtype == jnp.float32 for x in made)
        return type(made)(*(np.asarray(x, np.float64) for x in made))


@functools.partial(jax.jit, static_argnums=(9, 10, 11))
def call(*arguments):
    *arrays, key_heads, key_dim, implementation = arguments
    return tree_conv(*arrays, key_heads=key_heads, key_dim=key_dim, implementation=implementation)


def make_case(trees, capacity, heads=(1, 2), dims=(16, 16), width=4, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    batch, channels = len(trees), 2 * heads[0] * dims[0] + heads[1] * dims[1]
    tokens = [list(range(len(tree))) for tree in trees]
    topology = describe(Tree.from_parents(tokens, trees, capacity))

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return Case(
        trees=trees,
        heads=heads,
        dims=dims,
        inputs=normal(batch, capacity, channels),
        history=normal(LAYERS, batch, width - 1, channels),
        taps=normal(width, channels),
        rows=jax.vmap(lambda one: conv_rows(one, width))(topology),
        a=normal(batch, capacity, heads[1]),
        b=normal(batch, capacity, heads[1]),
        A_log=jnp.asarray(rng.uniform(0, np.log(16), heads[1]), jnp.float32),
        dt_bias=jnp.asarray(rng.standard_normal(heads[1]) - 3, jnp.float32),
    )


def exact(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def expected_gates(case):
    x = exact(case.a) + exact(case.dt_bias)
    g = -np.exp(exact(case.A_log)) * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
    return g, oracle.sigmoid(exact(case.b))


def expected_heads(case, b):
    """Float64 q, k, v of sequence b's tree; rounded where the model rounds."""
    tree, (key_heads, value_heads), (dk, dv) = case.trees[b], case.heads, case.dims
    inputs, history = exact(case.inputs)[b, : len(tree)], exact(case.history)[LAYER, b]
    y = oracle.convolve_tree(history, tree, inputs, exact(case.taps))
    y = exact(jnp.asarray(y.astype(np.float32)).astype(case.inputs.dtype))
    q, k, v = np.split(y, [key_heads * dk, 2 * key_heads * dk], axis=1)
    q, k = (oracle.unit(x.reshape(-1, key_heads, dk)) for x in (q, k))
    return q * dk**-0.5, k, v.reshape(-1, value_heads, dv)


def check(case, made):
    low = case.inputs.dtype == jnp.bfloat16
    for b, tree in enumerate(case.trees):
        wanted = dict(zip("qkv", expected_heads(case, b), strict=True))
        for name, reference in wanted.items():
            actual = getattr(made, name)[b, : len(tree)]
            assert relative_rms(actual, reference) <= (BF16_TOLERANCE if low else TOLERANCE), name
        if low:
            assert np.mean(made.v[b, : len(tree)] != wanted["v"]) < FLIPS
    g, beta = expected_gates(case)
    # g is the logarithm of the float32 alpha, up to half a unit (3e-8) from exp(g): where alpha is
    # above 1/2, g moves by up to twice that.
    np.testing.assert_allclose(made.g, g, rtol=GATES, atol=6.5e-8)
    kept = np.asarray(made.alpha) > 0.5
    alpha, log_alpha = (np.asarray(x, np.float64)[kept] for x in (made.alpha, made.g))
    assert np.all(np.abs(np.exp(log_alpha) - alpha) <= 2e-7 * np.abs(log_alpha))
    np.testing.assert_allclose(made.beta, beta, rtol=GATES)
    # The exponential of g as it is: an error of g itself grows by |g| in any float32 alpha.
    np.testing.assert_allclose(made.alpha, np.exp(made.g), rtol=GATES, atol=1e-37)
    assert all(np.isfinite(x).all() for x in made)  # inactive rows too


TREES = {  # trees and capacity
    "one node": ([[-1]], 1),
    "star of 27": ([random_trees.star(27)], 27),
    "random of 31": ([random_trees.random_parents(RNG, 31)], 31),
    "comb, children first, and a root alone": (
        [random_trees.children_first(random_trees.comb(9))[0], [-1]],
        10,
    ),
}
PACKINGS = [  # tree, dtype, heads, implementation
    ("one node", "f32", (1, 2), "interpret"),
    ("star of 27", "bf16", (1, 1), "interpret"),
    ("comb, children first, and a root alone", "f32", (1, 2), "interpret"),
    ("comb, children first, and a root alone", "bf16", (1, 2), "xla"),
]


@pytest.mark.parametrize("name, dtype, heads, implementation", PACKINGS)
def test_every_packing_of_trees(name, dtype, heads, implementation):
    trees, capacity = TREES[name]
    case = make_case(trees, capacity, heads, dtype=DTYPES[dtype])
    check(case, case.run(implementation))


SIZES = {  # chain length, heads, dims, width, dtype
    "dk 24, dv 40": (7, (1, 1), (24, 40), 4, jnp.float32),
    "two taps, ratio 3": (3, (1, 3), (8, 8), 2, jnp.bfloat16),
    "64 and 64, two key heads": (5, (2, 2), (64, 64), 4, jnp.bfloat16),
    "dk 48, dv 80": (2, (1, 1), (48, 80), 3, jnp.float32),
    "dk 128, dv 256": (2, (1, 1), (128, 256), 4, jnp.float32),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_size_of_heads(name):
    length, heads, dims, width, dtype = SIZES[name]
    trees = [random_trees.chain(length)]
    case = make_case(trees, length, heads, dims, width, dtype, seed=1)
    check(case, case.run("interpret"))


def test_several_programs_a_head_and_several_chunks_a_program(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "PROGRAMS", 6)
    assert mosaic_gpu.chunks_per_program(batch=1, nodes=31, heads=3) == 2
    case = make_case(*TREES["random of 31"], heads=(1, 1), dims=(8, 8), seed=2)
    check(case, case.run("interpret"))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_extreme_gates(implementation):
    """FC-09. softplus(-20) keeps its relative accuracy; nothing overflows."""
    case = make_case([random_trees.chain(8)], 8, dims=(8, 8))
    a = np.zeros((1, 8, 2), np.float32)
    a[0, :, 0] = [30, -30, -20, -8, -1e-3, 0, 100, -60]
    a[0, :, 1] = a[0, ::-1, 0]
    case = dataclasses.replace(
        case,
        a=jnp.asarray(a),
        b=jnp.asarray(np.clip(a, -80, 100)),
        A_log=jnp.asarray([6.0, -jnp.inf]),  # decays by 400 a unit; and not at all
        dt_bias=jnp.asarray([0.0, 1.0]),
    )
    check(case, case.run(implementation))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_degenerate_keys(implementation):
    """FC-09. A zero key normalises to zero; the epsilon stands inside the root."""
    case = make_case([random_trees.chain(8)], 8, dims=(8, 8))
    inputs = np.asarray(case.inputs).copy()
    inputs[:, :, :16] = 0
    inputs[:, 5, 8] = 5.9998200e-5  # silu gives 3e-5
    taps = np.zeros((4, 32), np.float32)
    taps[-1] = 1
    made = case.run(implementation, inputs=jnp.asarray(inputs), taps=jnp.asarray(taps))
    assert (made.q == 0).all()
    np.testing.assert_allclose(made.k[0, 5, 0, 0], 0.029987, rtol=2e-5)
    assert np.count_nonzero(made.k) == 1


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_one_product_serves_as_inputs_and_gates(implementation):
    """Columns of a wider array, with others between them and behind: bit for bit the same."""
    case = make_case(*TREES["comb, children first, and a root alone"], dims=(8, 8), seed=4)
    apart = case.run(implementation)
    between, last = (jnp.full((*case.b.shape[:2], n), jnp.nan) for n in (6, 6))
    whole = jnp.concatenate([case.inputs, between, case.b, case.a, last], axis=-1)
    b_at = case.inputs.shape[-1] + 6
    together = tree_conv(
        *(whole, case.history, jnp.int32(LAYER), case.taps, case.rows, whole, whole),
        *(case.A_log, case.dt_bias),
        key_heads=1,
        key_dim=8,
        a_at=b_at + 2,
        b_at=b_at,
        implementation=implementation,
    )
    for wanted, made in zip(apart, together, strict=True):
        np.testing.assert_array_equal(wanted, np.asarray(made, np.float64))


def test_a_path_never_reads_another_branch_or_layer():
    """Changing one node changes its descendants within reach, and no other row."""
    tree = [-1, 0, 0, 1, 3, 4, 5, 2]
    case = make_case([tree], 8, dims=(8, 8))
    before = case.run("interpret")
    after = case.run("interpret", inputs=case.inputs.at[0, 1].add(1.0))
    changed = [row for row in range(8) if (before.v[0, row] != after.v[0, row]).any()]
    assert changed == [1, 3, 4, 5]  # row 6 lies five below: four taps do not reach
    other = case.run("interpret", history=case.history.at[1 - LAYER].add(1.0))
    np.testing.assert_array_equal(before.v, other.v)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_the_reference_is_the_model_bit_for_bit(dtype):
    trees = [random_trees.random_parents(RNG, 13), random_trees.star(5)]
    case = make_case(trees, 14, heads=(2, 4), dims=(24, 40), dtype=dtype, seed=3)
    config = dataclasses.replace(
        tiny.CONFIG, linear_num_key_heads=2, linear_key_head_dim=24, linear_num_value_heads=4
    )

    @jax.jit
    def model(case_arrays):
        inputs, history, layer, taps, rows, a, b, A_log, dt_bias = case_arrays
        full = jnp.concatenate([history[layer], inputs], axis=1).astype(jnp.float32)
        window = jax.vmap(lambda full, rows: full[rows])(full, rows)
        total = window[:, :, 0] * taps[None, None, 0].astype(jnp.float32)
        for tap in range(1, 4):
            total = total + window[:, :, tap] * taps[None, None, tap].astype(jnp.float32)
        mixed = jax.nn.silu(total).astype(dtype)
        return layers.delta_operands(config, {"A_log": A_log, "dt_bias": dt_bias}, mixed, a, b)

    made, wanted = case.run("auto"), model(case.arrays())
    for name, x in made._asdict().items():
        np.testing.assert_array_equal(x, np.asarray(getattr(wanted, name), np.float64), name)


@pytest.mark.parametrize("batch, nodes, heads, dims", [
    (1, 32, (16, 48), (128, 128)),
    (8, 32, (16, 48), (128, 128)),
    (2, 27, (2, 2), (24, 40)),
    (1, 1, (1, 1), (8, 256)),
])  # fmt: skip
def test_lowers_for_an_h200(monkeypatch, batch, nodes, heads, dims):
    """The kernel itself, not the reference, and with layouts that fit."""
    monkeypatch.undo()  # with as many programs as on the device
    channels = 2 * heads[0] * dims[0] + heads[1] * dims[1]

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    text = lower_for_h200(
        lambda *arrays: tree_conv(*arrays, key_heads=heads[0], key_dim=dims[0]),
        *(array(batch, nodes, channels), array(3, batch, 3, channels), array(dtype=jnp.int32)),
        *(array(4, channels), array(batch, nodes, 4, dtype=jnp.int32)),
        *(array(batch, nodes, heads[1]), array(batch, nodes, heads[1])),
        *(array(heads[1], dtype=jnp.float32), array(heads[1], dtype=jnp.float32)),
    )
    assert text.count("custom_call @mosaic_gpu") == 1


def test_what_does_not_fit_is_refused():
    case = make_case([random_trees.chain(4)], 4)
    with pytest.raises(ValueError, match=r"needs? a Hopper GPU"):
        case.run("mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        case.run("cuda")
    with pytest.raises(ValueError, match=r"rows has shape \(1, 4, 3\), expected \(1, 4, 4\)"):
        case.run("xla", rows=case.rows[:, :, 1:])
    with pytest.raises(ValueError, match=r"history has shape"):
        case.run("xla", history=case.history[:, :, 1:])
    with pytest.raises(
        ValueError, match=r"a has shape \(1, 4, 1\), expected \(1, 4\) and 2 columns"
    ):
        case.run("xla", a=case.a[:, :, 1:])
    with pytest.raises(ValueError, match="inputs have 48 channels, expected at least the 64"):
        case.run("xla", inputs=case.inputs[:, :, 16:])
    with pytest.raises(ValueError, match="history is bfloat16 and inputs are float32"):
        case.run("xla", history=case.history.astype(jnp.bfloat16))
    case.heads = (3, 2)
    with pytest.raises(ValueError, match="64 channels: 3 key heads of 16 twice leave -32"):
        case.run("xla")


def test_sizes_beyond_the_kernel_run_the_reference(caplog):
    """With one notice for each reason; asked for by name they are an error."""
    dispatch._notice.cache_clear()
    case = make_case([random_trees.chain(4)], 4, dims=(12, 16))
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        check(case, case.run("auto"))
        case.run("auto")
    assert [record.message for record in caplog.records] == [
        "pallas_kernels: the kernel takes multiples of 8 up to 256 as key_dim, got 12; "
        "running the XLA reference"
    ]
    with pytest.raises(ValueError, match="got 12; use 'auto' or 'xla'"):
        case.run("interpret")
