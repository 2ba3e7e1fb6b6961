"""The match rule node by node, its field cases, and the interface of ``select``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trees import children_first, permute, random_parents, random_tokens, shuffle
from scipy import stats
from toy_target import Target

from treejax.history import begin
from treejax.sampling import Sampling, draw, sample
from treejax.steps.rules.match import follow, walk
from treejax.steps.select import Choice, select
from treejax.tree import Tree, ancestors

DRAWS = 20_000


def oracle(tokens, parents, draws):
    """Independent oracle of the walk: (path, pending). Among equal siblings the first row wins."""
    path = [0]
    while True:
        token = draws[path[-1]]
        below = [v for v, above in enumerate(parents) if above == path[-1] and tokens[v] == token]
        if not below:
            return path, token
        path.append(below[0])


@jax.jit
def _walk(tree, draws):
    """The choice node by node, which must be the one from all draws at once."""
    choice = jax.vmap(lambda t, y: walk(t, lambda node, depth, _: y[node]))(tree, draws)
    return choice, jax.vmap(follow)(tree, draws)


def walked(tree, draws):
    choice, other = _walk(tree, draws)
    jax.tree.map(np.testing.assert_array_equal, choice, other)
    return choice


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_the_walk_agrees_with_an_independent_one(seed, size):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, size)
    tokens = rng.integers(0, 3, size)  # few tokens: deep matches, and equal siblings
    draws = rng.integers(0, 3, 12).astype(np.int32)
    tree = Tree.from_parents(tokens, parents, capacity=12, unique=False)
    choice = walked(tree, draws[None])
    path, pending = oracle(tokens, parents, draws)
    assert choice.length[0] == len(path) and choice.pending[0] == pending
    np.testing.assert_array_equal(choice.path[0], path + [-1] * (12 - len(path)))
    emitted, count = choice.emitted(tree)
    expected = [tokens[v] for v in path[1:]] + [pending]
    np.testing.assert_array_equal(emitted[0], expected + [-1] * (12 - len(expected)))
    assert count[0] == len(expected) and choice.accepted[0] == len(path) - 1


def test_drawing_at_all_rows_chooses_what_walking_chooses():
    """What a GPU runs: the same draws, hence the same path, for every sequence's own tree."""
    rng, count, batch = np.random.default_rng(0), 12, 64
    parents = [random_parents(rng, count) for _ in range(batch)]
    tree = Tree.from_parents(rng.integers(0, 4, (batch, count)), parents, unique=False)
    logits = jnp.asarray(rng.standard_normal((batch, count, 4)), jnp.float32)
    sampling = Sampling(temperature=0.7, top_p=0.95).prepared(4)
    keys = jax.random.split(jax.random.key(3), batch)
    choice = select(tree, logits, sampling=sampling, key=keys, position=5)

    def at_once(tree, logits, key):
        depth = jnp.asarray(ancestors(tree.parent).sum(axis=1, dtype=jnp.int32)) - 1
        each = jax.vmap(lambda row, d: draw(row, sampling, key, 6 + d, None))
        return follow(tree, each(logits, depth))

    jax.tree.map(
        np.testing.assert_array_equal, choice, jax.jit(jax.vmap(at_once))(tree, logits, keys)
    )
    assert len(set(choice.length.tolist())) > 3


def test_a_gpu_waits_for_no_loop():
    """Each turn of a loop is a visit of the host there; a CPU saves the draws nobody needs."""
    tree = Tree.from_parents([5, 1, 2], [-1, 0, 1])
    logits = jnp.zeros((1, 3, 8))
    warm = Sampling(temperature=0.7, top_k=3, top_p=0.9, presence_penalty=1.0)
    seen = begin(jnp.zeros((1, 2), jnp.int32), jnp.array([2]), 8)
    settings = [{}, {"sampling": warm, "key": jax.random.key(0), "position": 2, "history": seen}]
    for setting in settings:
        program = jax.jit(functools.partial(select, **setting)).trace(tree, logits)
        on_gpu = program.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.while" not in on_gpu and "while" in program.lower().as_text()


def test_rank_decides_between_equal_siblings_then_the_row():
    tree = Tree.from_parents([9, 4, 4, 4], [-1, 0, 0, 0], unique=False)
    draws = jnp.full((1, 4), 4)
    assert walked(tree, draws).path[0, 1] == 1
    assert walked(tree.replace(rank=jnp.asarray([[0, 2, 1, 1]])), draws).path[0, 1] == 2


def test_rows_past_size_and_padding_never_match():
    tree = Tree.from_parents([[7, 1], [7, 1]], [[-1, 0], [-1, 0]], capacity=4, max_depth=3)
    stale = tree.replace(  # row 2 holds what an earlier, larger tree left: a child with the draw
        tokens=tree.tokens.at[:, 2].set(5), parent=tree.parent.at[:, 2].set(0)
    )
    logits = jnp.zeros((2, 4, 8)).at[:, 0, 5].set(3.0)
    choice = select(stale, logits)
    np.testing.assert_array_equal(choice.length, [1, 1])
    np.testing.assert_array_equal(choice.pending, [5, 5])
    # A draw of the last token must not match token -1 by negative indexing.
    choice = select(tree, jnp.zeros((2, 4, 8)).at[..., 7].set(3.0))
    np.testing.assert_array_equal(choice.length, [1, 1])


def test_the_depth_bound_ends_the_walk():
    tree = Tree.from_parents([5, 5, 5, 5], [-1, 0, 1, 2]).replace(max_depth=2)
    choice = walked(tree, jnp.full((1, 4), 5))
    np.testing.assert_array_equal(choice.path, [[0, 1, 2]])
    assert choice.length[0] == 3 and choice.pending[0] == 5


def test_a_row_that_takes_no_part_emits_nothing():
    tree = Tree.from_parents([[7, 1], [7, 1]], [[-1, 0], [-1, 0]], capacity=2)
    choice = select(tree, jnp.zeros((2, 2, 8)).at[..., 1].set(3.0))
    masked = choice.mask(jnp.asarray([True, False]))
    np.testing.assert_array_equal(masked.length, [2, 0])
    np.testing.assert_array_equal(masked.accepted, [1, 0])
    np.testing.assert_array_equal(masked.path, [[0, 1], [-1, -1]])
    tokens, count = masked.emitted(tree)
    np.testing.assert_array_equal(tokens, [[1, 1], [-1, -1]])
    np.testing.assert_array_equal(count, [2, 0])


def log_rows(p):
    """Logits of probability rows, -inf where p is 0, with a batch axis."""
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.asarray(p, np.float64)), jnp.float32)


def test_fc13_a_mismatch_emits_the_very_sample_it_was_compared_with():
    """FC-13 (the part of match): drafts from q, or always token 0; the output law is p."""
    p, q = [0.6, 0.2, 0.1, 0.1], [0.7, 0.2, 0.05, 0.05]
    keys = jax.random.split(jax.random.key(2), DRAWS)
    logits = jnp.broadcast_to(log_rows(p), (DRAWS, 2, 4))
    plain = np.asarray(sample(logits[:, 0], sampling=Sampling(1.0), key=keys, position=8))
    for drafts in (np.zeros(DRAWS, int), np.random.default_rng(1).choice(4, DRAWS, p=q)):
        tree = Tree(
            tokens=jnp.asarray(np.stack([np.full(DRAWS, 3), drafts], axis=1), jnp.int32),
            parent=jnp.broadcast_to(jnp.asarray([-1, 0]), (DRAWS, 2)),
            rank=jnp.zeros((DRAWS, 2), jnp.int32),
            size=jnp.full(DRAWS, 2),
            max_depth=1,
        )
        choice = select(tree, logits, sampling=Sampling(1.0), key=keys, position=7)
        first = np.asarray(choice.emitted(tree)[0])[:, 0]
        np.testing.assert_array_equal(first, plain)
        mismatch = np.asarray(choice.length) == 1
        np.testing.assert_array_equal(mismatch, drafts != plain)
        np.testing.assert_array_equal(np.asarray(choice.pending)[mismatch], plain[mismatch])
        counts = np.bincount(first, minlength=4)
        assert stats.chisquare(counts, np.array(p) * DRAWS).pvalue > 0.001
        for wrong in ([0.624, 0.224, 0.076, 0.076], [0.66, 0.22, 0.06, 0.06]):
            assert stats.chisquare(counts, np.array(wrong) * DRAWS).pvalue < 1e-6


def test_fc14_one_draw_a_node_and_equal_siblings_count_once():
    """FC-14: (a) a draw per path would make token a win .88, not .5; (b) two trials give .75."""
    a, b, c, d, e, f = range(6)
    keys = jax.random.split(jax.random.key(3), DRAWS)
    tree = Tree.from_parents([0, a, e, b, c, d, f], [-1, 0, 0, 1, 1, 1, 2])
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (DRAWS, *x.shape[1:])), tree)
    rows = np.full((7, 6), 1 / 6)
    rows[0] = [0.5, 0, 0, 0, 0.5, 0]
    logits = jnp.broadcast_to(log_rows(rows), (DRAWS, 7, 6))
    choice = select(many, logits, sampling=Sampling(1.0), key=keys, position=0)
    first = np.asarray(choice.emitted(many)[0])[:, 0]
    assert set(first) == {a, e}
    assert stats.binomtest(int((first == a).sum()), DRAWS, 0.5).pvalue > 0.001

    tree = Tree.from_parents([1, 0, 0], [-1, 0, 0], unique=False)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (DRAWS, *x.shape[1:])), tree)
    logits = jnp.broadcast_to(log_rows([0.5, 0.5]), (DRAWS, 3, 2))
    choice = select(many, logits, sampling=Sampling(1.0), key=keys, position=0)
    zero = np.asarray(choice.emitted(many)[0])[:, 0] == 0
    assert stats.binomtest(int(zero.sum()), DRAWS, 0.5).pvalue > 0.001
    np.testing.assert_array_equal(np.asarray(choice.path)[:, 1], np.where(zero, 1, -1))


def test_a_root_only_tree_is_plain_decoding():
    logits, keys = jax.random.normal(jax.random.key(0), (3, 50)), jax.random.key(1)
    tree = Tree.root_only(jnp.asarray([1, 2, 3]), capacity=4, max_depth=2)
    rows = jnp.pad(logits[:, None], ((0, 0), (0, 3), (0, 0)))
    sampling = Sampling(1.0)
    choice = select(tree, rows, sampling=sampling, key=keys, position=jnp.asarray([4, 5, 6]))
    expected = sample(logits, sampling=sampling, key=keys, position=jnp.asarray([5, 6, 7]))
    np.testing.assert_array_equal(choice.pending, expected)
    np.testing.assert_array_equal(choice.length, [1, 1, 1])
    np.testing.assert_array_equal(choice.path, [[0, -1, -1]] * 3)
    assert {x.dtype for x in jax.tree.leaves(choice)} == {jnp.dtype("int32")}


def test_topology_size_and_settings_are_data_under_jit():
    traces = []

    @jax.jit
    def step(tree, logits, sampling, key, position) -> Choice:
        traces.append(1)
        return select(tree, logits, sampling=sampling, key=key, position=position)

    rng = np.random.default_rng(0)
    for size in (1, 4, 9):
        parents = random_parents(rng, size, 3)
        tokens = random_tokens(rng, parents, 5 * size)
        tree = Tree.from_parents(tokens, parents, capacity=9, max_depth=3)
        logits = jnp.asarray(rng.standard_normal((1, 9, 45)), jnp.bfloat16)
        sampling, key = Sampling(0.1 * size, top_p=0.5).prepared(), jax.random.key(size)
        inside = step(tree, logits, sampling, key, jnp.int32(size))
        outside = select(tree, logits, sampling=sampling, key=key, position=size)
        jax.tree.map(np.testing.assert_array_equal, inside, outside)
    assert len(traces) == 1


def test_bfloat16_ties_go_to_the_lowest_id_as_in_float32():
    tree = Tree.from_parents([0, 1, 2], [-1, 0, 0])
    logits = jnp.asarray([0.0, 1.0, 1.001, 0.5], jnp.bfloat16)  # tokens 1 and 2 are equal
    choice = select(tree, jnp.broadcast_to(logits, (1, 3, 4)))
    np.testing.assert_array_equal(choice.path[0], [0, 1, -1])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rule": "mach"}, "rule 'mach' is unknown, expected one of: match, multi_step"),
        ({"rule": "typical", "q": jnp.ones((1, 3, 5))}, "rule 'typical' does not read q"),
        ({"q": jnp.ones((1, 3, 5))}, "rule 'match' does not read q: leave it out, or use one of"),
        ({"rule": "multi_step"}, "rule 'multi_step' needs q, the probabilities"),
        ({"rule": "block", "q": jnp.ones((1, 3, 4))}, "q has shape (1, 3, 4) and type float32"),
        ({"sampling": Sampling(1.0)}, "sampling needs a key"),
        ({"sampling": Sampling(1.0), "key": jax.random.key(0)}, "sampling needs a position"),
        ({"sampling": Sampling(0.0, frequency_penalty=0.5)}, "need the history of the sequence"),
        ({"logits": jnp.zeros((2, 3))}, "logits have shape (2, 3), expected (B, N, V)"),
        ({"logits": jnp.zeros((1, 4, 5))}, "the tree's (B, N) = (1, 3)"),
        ({"logits": jnp.zeros((1, 3, 5), jnp.int32)}, "logits are of type int32"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    tree = Tree.from_parents([0, 1, 2], [-1, 0, 0])
    arguments = {"logits": jnp.zeros((1, 3, 5))} | arguments
    with pytest.raises(ValueError) as error:
        select(tree, arguments.pop("logits"), **arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_repacking_a_tree_changes_no_output():
    rng = np.random.default_rng(7)
    parents = random_parents(rng, 10, 4)
    tokens = random_tokens(rng, parents, 12)
    target = Target(seed=2, vocabulary=12)
    outputs = []
    for order in ([*range(10)], shuffle(parents, rng)[1], children_first(parents)[1]):
        packed, moved = permute(parents, order), tokens[np.asarray(order)]
        rows = target.tree_rows([5], moved, packed, 10)
        # A greedy tie-free target that leads into the tree: raise the logit of a child's token.
        for node in range(10):
            below = [moved[v] for v in range(10) if packed[v] == node]
            rows[node, max(below, default=0)] += 20
        tree = Tree.from_parents(moved, packed)
        outputs.append(
            [np.asarray(x).tolist() for x in select(tree, jnp.asarray(rows[None])).emitted(tree)]
        )
    assert outputs[0] == outputs[1] == outputs[2] and outputs[0][1][0] > 2
