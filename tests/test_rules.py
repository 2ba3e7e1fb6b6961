"""The rules by their published numbers, through ``select``, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_trees import HYDRA27
from rules_exact import Model, compiled, joint_law
from scipy import stats

from treejax.drafters.topologies import Best, parse
from treejax.sampling import Sampling
from treejax.steps.rules import (
    REGISTRY,
    Block,
    MultiStep,
    Traversal,
    Typical,
    WithoutReplacement,
    rule_for,
)
from treejax.steps.select import select
from treejax.tree import Tree

pytestmark = pytest.mark.compiles_fast

DRAWS, ROWS, TOKENS = 20_000, 7, 6
P5, Q5 = np.array([6, 4, 5, 8, 11]) / 34, np.array([12, 8, 1, 144, 1]) / 166  # far apart
COIN_RULES = [MultiStep(), WithoutReplacement(), Traversal("iid"), Traversal(), Typical()]
LOSSLESS = [rule for rule in COIN_RULES if rule.lossless]


def one(tree):
    return jax.tree.map(lambda x: x[0], tree)


def many(tree, count):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), tree)


def log_rows(p):
    """Logits of probability rows, -inf where p is 0."""
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.asarray(p, np.float64)), jnp.float32)


def drawn_siblings(rng, q, width, replaced):
    """[DRAWS, width] tokens drawn from q, with or without replacement."""
    if replaced:
        return rng.choice(len(q), (DRAWS, width), p=q)
    with np.errstate(divide="ignore"):
        keys = np.log(q) + rng.gumbel(size=(DRAWS, len(q)))
    return np.argsort(-keys, axis=1)[:, :width]


def star(tokens):
    """[DRAWS] trees of siblings [DRAWS, width] below a root."""
    return packed(tokens, [-1] + [0] * tokens.shape[1])


def packed(tokens, parents):
    """[DRAWS] trees of one shape, with the tokens [DRAWS, n - 1] below their roots."""
    tree = many(Tree.from_parents([0] * len(parents), parents, ROWS, 2, unique=False), DRAWS)
    spare = ((0, 0), (1, ROWS - len(parents)))
    return tree.replace(tokens=jnp.asarray(np.pad(tokens, spare, constant_values=-1), jnp.int32))


def chosen(tree, p, q, rule, seed):
    """``select`` over DRAWS sequences that share p and q; the first token that each emits.

    p and q are [V] for every row or [n, V]; rows and tokens are added, so that one program serves
    all tests of a rule.
    """
    p, q = (np.broadcast_to(np.asarray(x, float), (ROWS, np.shape(x)[-1])) for x in (p, q))
    p, q = (np.pad(x, ((0, 0), (0, TOKENS - x.shape[1]))) for x in (p, q))
    rows = jnp.broadcast_to(log_rows(p), (DRAWS, ROWS, TOKENS))
    given = jnp.broadcast_to(jnp.asarray(q, jnp.float32), rows.shape)
    keys = jax.random.split(jax.random.key(seed), DRAWS)
    choice = select(
        tree, rows, sampling=Sampling(1.0), key=keys, position=3, rule=rule,
        q=given if rule.needs_q else None,
    )  # fmt: skip
    return choice, np.asarray(choice.emitted(tree)[0])[:, 0]


def fit(tokens, p):
    counts = np.bincount(tokens, minlength=len(p))
    p = np.asarray(p)
    assert counts[p == 0].sum() == 0
    return stats.chisquare(counts[p > 0], p[p > 0] * len(tokens)).pvalue


# Published numbers


def test_the_block_example_accepts_eleven_ninths_of_two():
    """arXiv 2403.10444, section 2: token by token 10/9, as a block 11/9."""
    with jax.enable_x64(True):
        model = Model.constant([1 / 3, 2 / 3], [2 / 3, 1 / 3], 2)
        rng = np.random.default_rng(0)

        def accepted(rule):
            return joint_law(compiled(rule.law), model, [-1, 0, 1], "iid", rng, 3)[1]

        assert accepted(MultiStep()) == pytest.approx(10 / 9, abs=1e-12)
        assert accepted(Block()) == pytest.approx(11 / 9, abs=1e-12)
        assert accepted(Traversal()) == pytest.approx(11 / 9, abs=1e-12)


def block_formula(p, q, tokens):
    """Chances h_1..h_D and residuals at 0..D of one chain, as the paper writes them."""
    joint, chances, residuals = 1.0, [], []
    for i, token in enumerate(tokens):
        rest = np.maximum(joint * p[i] - q[i], 0)
        residuals.append(rest / rest.sum() if rest.any() else None)  # None: it never ends there
        if i:
            chances.append(rest.sum() / (rest.sum() + 1 - joint))
        joint = min(1.0, joint * p[i, token] / q[i, token])
    return [*chances, joint], [*residuals, p[len(tokens)]]


def test_block_follows_the_papers_formulas():
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        for length in (1, 2, 5):
            q = rng.dirichlet(np.ones(6), length + 1)
            p = 0.6 * q + 0.4 * rng.dirichlet(np.ones(6), length + 1)
            tokens = rng.integers(0, 6, length)
            tree = one(Tree.from_parents([0, *tokens], list(range(-1, length))))
            law = Block().law(tree, jnp.asarray(p), jnp.asarray(q))
            chances, residuals = block_formula(p, q, tokens)
            np.testing.assert_allclose(law.chance[1:], chances, rtol=1e-12)
            for weights, expected in zip(law.weights, residuals, strict=True):
                if expected is not None:
                    np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-15)


def test_longer_paths_are_accepted_leaves_first_than_step_by_step():
    """Traversal accepts more than the rule of single steps for the same draws (2505.12398)."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        for parents in ([-1, 0, 1, 2], [-1, 0, 1, 0, 3], [-1, 0, 0, 1, 1]):
            model = Model(rng, 3, 3, zeros=0)
            for draws, steps in (("iid", MultiStep()), ("without_replacement",) * 2):
                steps = WithoutReplacement() if isinstance(steps, str) else steps
                by_step, by_path = (
                    joint_law(compiled(rule.law), model, parents, draws, rng, 5)[1]
                    for rule in (steps, Traversal(draws))
                )
                assert by_path > by_step + 1e-3
        # What keeps q accepts more of independent draws than what takes tokens out of it.
        designed = Model.constant(
            np.array([6, 4, 5, 8, 11]) / 34, np.array([12, 8, 1, 144, 1]) / 166, 1
        )
        keeps, takes = (
            joint_law(compiled(rule.law), designed, [-1, 0, 0, 0], "iid", rng, 4)[1]
            for rule in (MultiStep(), WithoutReplacement())
        )
        assert keeps > takes + 1e-3


# Field cases


P13, Q13 = [0.6, 0.2, 0.1, 0.1], [0.7, 0.2, 0.05, 0.05]


def test_fc13_acceptance_and_leftover_have_the_stated_numbers():
    """FC-13: leftover [0, 0, .5, .5], acceptance .9."""
    with jax.enable_x64(True):
        p, q = (jnp.asarray([row] * 2) for row in (P13, Q13))
        for rule in LOSSLESS:
            accepted = 0.0
            for token in range(4):
                tree = one(Tree.from_parents([0, token], [-1, 0]))
                law = rule.law(tree, p, q)
                accepted += Q13[token] * float(law.chance[1])
                np.testing.assert_allclose(law.weights[0], [0, 0, 0.5, 0.5], atol=1e-12)
                np.testing.assert_allclose(law.weights[1], P13, atol=1e-12)
            assert accepted == pytest.approx(0.9, abs=1e-12)


@pytest.mark.parametrize("rule", LOSSLESS, ids=str)
def test_fc13_outputs_follow_p_with_the_q_that_was_drawn_from(rule):
    """FC-13: drawn from q; drawn with top-k 2; always token 0. And the wrong q, which shows."""
    rng = np.random.default_rng(3)
    top2 = [4 / 7, 3 / 7, 0, 0]
    for p, q in ((P13, Q13), ([0.5, 0.1, 0.4, 0], top2), (P13, [1, 0, 0, 0])):
        tree = star(drawn_siblings(rng, np.array(q), 1, replaced=True))
        choice, first = chosen(tree, p, q, rule, seed=4)
        assert fit(first, p) > 0.001
        expected = np.minimum(p, q).sum()
        hits = int(np.asarray(choice.accepted).sum())
        assert stats.binomtest(hits, DRAWS, expected).pvalue > 0.001
    raw = [0.4, 0.3, 0.2, 0.1]
    tree = star(drawn_siblings(rng, np.array(top2), 1, replaced=True))
    _, first = chosen(tree, [0.5, 0.1, 0.4, 0], raw, rule, seed=5)
    assert fit(first, [2 / 3, 1 / 7, 4 / 21, 0]) > 0.001
    _, first = chosen(star(np.zeros((DRAWS, 1), int)), P13, Q13, rule, seed=6)
    assert fit(first, [6 / 7, 0, 1 / 14, 1 / 14]) > 0.001


@pytest.mark.parametrize("rule", LOSSLESS, ids=str)
def test_fc14_equal_siblings_count_once_and_each_node_is_decided_once(rule):
    """FC-14: two siblings with token 0 and p .5 give it .5, where two trials would give .75."""
    q = [1.0, 0.0]
    tree = star(np.zeros((DRAWS, 2), int))
    choice, first = chosen(tree, [0.5, 0.5], q, rule, seed=7)
    assert stats.binomtest(int((first == 0).sum()), DRAWS, 0.5).pvalue > 0.001
    np.testing.assert_array_equal(np.asarray(choice.path)[:, 1], np.where(first == 0, 1, -1))

    # (a) p(a) = p(e) = .5 and paths ab, ac, ad, ef: a draw for each path would give a .88.
    a, b, c, d, e, f = range(6)
    rng = np.random.default_rng(8)
    replaced = "without_replacement" not in rule.serves
    tops = drawn_siblings(rng, np.array([0.5, 0, 0, 0, 0.5, 0]), 2, replaced)
    parents = [-1, 0, 0, 1, 1, 1, 2]
    tree = packed(np.concatenate([tops, np.tile([b, c, d, f], (DRAWS, 1))], axis=1), parents)
    rows = np.full((7, 6), 1 / 6)
    rows[0] = [0.5, 0, 0, 0, 0.5, 0]
    _, first = chosen(tree, rows, rows, rule, seed=9)
    assert set(first) == {a, e}
    assert stats.binomtest(int((first == a).sum()), DRAWS, 0.5).pvalue > 0.001


@pytest.mark.parametrize("rule", LOSSLESS, ids=str)
def test_siblings_of_each_way_of_drawing_give_p_through_select(rule):
    """float32, keys and batch: 20,000 sequences, three siblings each, p and q far apart."""
    for kind in sorted(rule.serves):
        tokens = drawn_siblings(np.random.default_rng(10), Q5, 3, kind == "iid")
        choice, first = chosen(star(tokens), P5, Q5, rule, seed=11)
        assert fit(first, P5) > 0.001
        _, again = chosen(star(tokens), P5, Q5, rule, seed=11)
        np.testing.assert_array_equal(first, again)
        assert 0.3 < float(choice.accepted.mean()) < 0.9


# What is refused


CHAIN, TREE = parse("chain5"), parse("hydra27")


def test_a_rule_is_fitted_to_what_the_drafter_says():
    assert TREE.parents == tuple(HYDRA27)
    assert rule_for("traversal", "iid", TREE) == Traversal("iid")
    assert rule_for("traversal", "without_replacement", TREE) == Traversal("without_replacement")
    assert rule_for(Traversal(), "iid", TREE) == Traversal("without_replacement")
    assert rule_for("match", "fixed", Best(27, 5)) is REGISTRY["match"]
    for name in ("multi_step", "without_replacement", "block", "traversal"):
        for proposals in ("iid", "without_replacement"):
            rule_for(name, proposals, CHAIN)
    for proposals in ("fixed", "coupled", "iid", "without_replacement"):
        rule_for("match", proposals, TREE)
        rule_for("typical", proposals, TREE)
    assert [name for name, rule in REGISTRY.items() if not rule.lossless] == ["typical"]
    assert all(rule.name == name for name, rule in REGISTRY.items())


@pytest.mark.parametrize(
    "rule, proposals, shape, message",
    [
        ("block", "iid", TREE, "rule 'block' serves chains only, the tree 'hydra27' branches: use"),
        ("block", "iid", Best(4, 4), "the tree 'best4x4' branches"),
        ("multi_step", "fixed", CHAIN, "the drafter's are fixed: use rule 'match'"),
        ("traversal", "coupled", TREE, "the drafter's are coupled: use rule 'match'"),
        ("multi_step", "without_replacement", TREE, "use rule 'without_replacement'"),
        (Traversal("iid"), "without_replacement", TREE, "needs candidates of kind iid, the"),
        ("match", "drawn", TREE, "proposals 'drawn' are unknown, expected one of: fixed, coupled"),
        ("nucleus", "iid", TREE, "rule 'nucleus' is unknown, expected one of: match"),
    ],
)
def test_refusals_are_one_line(rule, proposals, shape, message):
    with pytest.raises(ValueError) as error:
        rule_for(rule, proposals, shape)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_traversal_names_its_ways_of_drawing():
    with pytest.raises(ValueError, match="expected one of: iid, without_replacement"):
        Traversal("fixed")
