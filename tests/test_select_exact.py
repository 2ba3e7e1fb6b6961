"""The exact law of the match rule: every draw of every small tree, and many seeds at once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from random_trees import children_first, shuffle
from rules_exact import Model, depths_of, topologies, total_variation
from scipy import stats
from toy_target import contexts

from treejax.sampling import Sampling, sample
from treejax.steps.select import select, walk
from treejax.tree import Tree

DRAWS = 20_000
V, D, ROWS = 3, 2, 7
STRINGS = list(itertools.product(range(V), repeat=D + 1))


def random_law(rng):
    """p(next | context) for every context of up to D tokens; some tokens have probability 0."""
    law = {}
    for length in range(D + 1):
        for context in itertools.product(range(V), repeat=length):
            p = rng.dirichlet(np.ones(V)) * (rng.random(V) > 0.15)
            law[context] = p / p.sum() if p.sum() > 0 else np.full(V, 1 / V)
    return law


def probability(law, string, start=0):
    """p of the tokens of ``string`` from ``start`` on, given those before."""
    return np.prod([law[string[:i]][string[i]] for i in range(start, len(string))])


def depth_2_trees():
    """All trees of depth 2 with distinct siblings and at most ROWS rows: (tokens, parents)."""
    subsets = [s for n in range(V + 1) for s in itertools.combinations(range(V), n)]
    for below in itertools.product([None, *subsets], repeat=V):
        tokens, parents = [0], [-1]
        for token, grandchildren in enumerate(below):
            if grandchildren is not None:
                tokens, parents = [*tokens, token], [*parents, 0]
                child = len(tokens) - 1
                tokens, parents = (
                    [*tokens, *grandchildren],
                    [*parents, *[child] * len(grandchildren)],
                )
        if len(tokens) <= ROWS:
            yield np.array(tokens), np.array(parents)


EVERY_DRAW = np.array(list(itertools.product(range(V), repeat=ROWS)), np.int32)


def independent_draws(rows):
    """Every vector of draws with its probability when the nodes draw independently."""
    weight = np.ones(len(EVERY_DRAW))
    for node in range(ROWS):
        p = rows[node] if node < len(rows) else np.eye(V)[0]
        weight *= p[EVERY_DRAW[:, node]]
    return EVERY_DRAW, weight


def shared_draws(rows, depth):
    """The same when all nodes of a depth share one uniform number, by inverse CDF of each."""
    cells = []
    for level in range(D + 1):
        cdfs = [np.cumsum(p)[:-1] for p, d in zip(rows, depth, strict=True) if d == level]
        edges = np.unique(np.concatenate([[0.0, 1.0], *cdfs]).clip(0, 1))
        cells.append([((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)])
    draws, weight = np.zeros_like(EVERY_DRAW), np.zeros(len(EVERY_DRAW))
    for i, cell in enumerate(itertools.product(*cells)):
        weight[i] = np.prod([width for _, width in cell])
        for node, (p, d) in enumerate(zip(rows, depth, strict=True)):
            draws[i, node] = np.searchsorted(np.cumsum(p)[:-1], cell[d][0], side="right")
    return draws, weight


def law_of_outputs(law, emitted, count, weight):
    """Joint law of D + 1 tokens: what a step emits, completed by plain sampling."""
    joint = np.zeros(len(STRINGS))
    for length in range(1, D + 2):
        chosen = count == length
        code = emitted[chosen, :length] @ V ** np.arange(length)[::-1]
        mass = np.bincount(code, weight[chosen], minlength=V**length)
        for index, string in enumerate(STRINGS):
            prefix = int(np.dot(string[:length], V ** np.arange(length)[::-1]))
            if mass[prefix]:
                joint[index] += mass[prefix] * probability(law, string, start=length)
    return joint


_walk_every_draw = jax.jit(
    jax.vmap(lambda tree, y: walk(tree, lambda node, depth, _: y[node]), in_axes=(None, 0))
)


def test_the_law_is_exact_for_every_small_tree_under_both_couplings():
    """All depth-2 trees over 3 tokens of at most 7 rows, every draw enumerated, any packing."""
    rng = np.random.default_rng(0)
    worst, redrawn, trees = 0.0, [], list(depth_2_trees())
    for number, (tokens, parents) in enumerate(trees):
        parents, order = shuffle(parents, rng) if number % 2 else children_first(parents)
        tokens = tokens[order]
        law = random_law(rng)
        plain = np.array([probability(law, string) for string in STRINGS])
        above = contexts(tokens, parents)
        rows, depth = [law[c] for c in above], [len(c) for c in above]
        tree = Tree.from_parents(tokens, parents, capacity=ROWS, max_depth=D)
        one = jax.tree.map(lambda x: x[0], tree)
        couplings = [independent_draws(rows)]
        couplings += [shared_draws(rows, depth)] if number % 4 == 0 else []
        for draws, weight in couplings:
            assert abs(weight.sum() - 1) < 1e-12
            choice = _walk_every_draw(one, draws)
            batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(EVERY_DRAW), *x.shape)), one)
            emitted, count = (np.asarray(x) for x in choice.emitted(batch))
            joint = law_of_outputs(law, emitted, count, weight)
            worst = max(worst, total_variation(joint, plain))
        if number % 10 == 0:
            # The known fault: after a mismatch the token is drawn again from p at that node.
            path_rows = np.asarray(choice.path)[np.arange(len(draws)), count - 1]
            fault = np.zeros(len(STRINGS))
            for token in range(V):
                again = np.array([rows[v][token] for v in range(len(rows))])[path_rows]
                changed = emitted.copy()
                changed[np.arange(len(draws)), count - 1] = token
                fault += law_of_outputs(law, changed, count, weight * again)
            redrawn.append(total_variation(fault, plain))
    assert len(trees) > 250
    assert worst < 1e-12  # float64 sums of a few thousand terms
    assert np.mean(redrawn) > 0.1  # the test can see a fault


def test_the_law_is_exact_on_every_tree_of_up_to_seven_rows():
    """All 197 ordered trees over 3 to 5 tokens: whatever was drafted, equal siblings included.

    The draws of all rows are enumerated for one random draft of each tree: exact for every fixed
    draft is exact for every drafter.
    """
    rng = np.random.default_rng(1)
    for vocabulary, rows in ((3, 7), (4, 6), (5, 5)):
        every = np.array(list(itertools.product(range(vocabulary), repeat=rows)), np.int32)
        for parents in (tree for size in range(1, rows + 1) for tree in topologies(size)):
            depth = max(depths_of(parents))
            model = Model(rng, vocabulary, depth)
            packed, order = shuffle(parents, rng)
            tokens = rng.integers(0, vocabulary, len(parents)).astype(np.int32)[order]
            tree = Tree.from_parents(tokens, packed, capacity=rows, unique=False)
            choice = _walk_every_draw(jax.tree.map(lambda x: x[0], tree), every)
            weight = np.ones(len(every))
            for node, context in enumerate(contexts(tokens, packed)):
                code = int(np.dot(context, vocabulary ** np.arange(len(context))[::-1]))
                weight *= model.p[model.offset[len(context)] + code][every[:, node]]
            for spare in range(len(parents), rows):
                weight *= every[:, spare] == 0
            batch = tree.replace(tokens=jnp.repeat(tree.tokens, len(every), axis=0))
            emitted, count = (np.asarray(x) for x in choice.emitted(batch))
            mass = []
            for length in range(1, depth + 2):
                chosen = count == length
                code = emitted[chosen, :length] @ vocabulary ** np.arange(length)[::-1]
                mass.append(np.bincount(code, weight[chosen], minlength=vocabulary**length))
            assert total_variation(model.complete(mass), model.plain(depth)) < 1e-12


def test_outputs_of_many_seeds_follow_the_joint_law():
    """Chi-square over strings of 3 tokens: 20,000 sequences, each with its own random tree."""
    vocabulary, rng = 3, np.random.default_rng(4)
    settings, law = Sampling(0.8), random_law(rng)
    logits = {c: 0.8 * np.log(np.maximum(p, 1e-30)) for c, p in law.items()}
    pool = []
    for tokens, parents in depth_2_trees():
        parents, order = shuffle(parents, rng)
        tokens = tokens[order]
        rows = [logits[c] for c in contexts(tokens, parents)]
        rows += [np.zeros(vocabulary)] * (ROWS - len(rows))
        pool.append((tokens, parents, np.array(rows, np.float32)))
    chosen = rng.integers(0, len(pool), DRAWS)
    unique = Tree.from_parents(
        [p[0] for p in pool], [p[1] for p in pool], capacity=ROWS, max_depth=D
    )
    trees = jax.tree.map(lambda x: x[chosen], unique)
    rows = jnp.asarray(np.stack([p[2] for p in pool])[chosen])
    keys = jax.random.split(jax.random.key(6), DRAWS)
    choice = select(trees, rows, sampling=settings, key=keys, position=10)
    tokens, count = (np.array(x) for x in choice.emitted(trees))
    assert 1.2 < count.mean() < 2.5
    for place in (1, 2):  # complete what a step left open, with the keys of the next positions
        table = np.array([logits[tuple(int(t) for t in row[:place])] if n <= place else logits[()]
                          for row, n in zip(tokens, count, strict=True)], np.float32)  # fmt: skip
        more = sample(jnp.asarray(table), sampling=settings, key=keys, position=11 + place)
        tokens[:, place] = np.where(count <= place, more, tokens[:, place])
    observed = np.bincount(tokens @ np.array([9, 3, 1]), minlength=27)
    expected = np.array([probability(law, string) for string in STRINGS])
    assert observed[expected == 0].sum() == 0
    common = expected * DRAWS >= 5  # chi-square needs five expected counts a cell
    observed = [*observed[common], observed[~common].sum()]
    expected = np.array([*expected[common], expected[~common].sum()]) * DRAWS
    keep = expected > 0
    assert stats.chisquare(np.array(observed)[keep], expected[keep]).pvalue > 0.001
