"""Field cases FC-01 to FC-05: the state after acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_trees
import reference_run as run
from golden import checkpoint
from stepping import Surfaces, assert_consistent, choose

from treejax.checkpoint import load_model
from treejax.delta_rule import Operands
from treejax.drafters import make_drafter
from treejax.drafters.scripted import Scripted
from treejax.engine import complete
from treejax.model import prefill
from treejax.policies import REGISTRY, Path, make_policy
from treejax.state import init_state
from treejax.steps.publish import advance_history, publish
from treejax.steps.select import select
from treejax.steps.verify import verify
from treejax.tree import Tree, conv_rows, describe

policies = pytest.mark.parametrize("policy", REGISTRY)


def grow(parents, tokens):
    """Trees of the shared capacity and depth bound, one a sequence."""
    return Tree.from_parents(
        tokens, parents, run.CAPACITY, run.MAX_DEPTH, vocabulary=run.CONFIG.vocab_size
    )


def wrong(token):
    """A token other than the reference's."""
    return (int(token) + 1) % run.CONFIG.vocab_size


@policies
def test_fc01_a_step_with_nothing_to_verify_after_one_that_accepted(policy):
    """FC-01: three right drafts, then none, then one right, then none, for 64 greedy tokens.

    The four sequences run the pattern out of phase, so that in every step one proposes nothing.
    """
    reference, pattern = run.greedy_reference(), [3, 0, 1, 0]
    out, state = run.prefilled(policy)
    steps = [0] * run.BATCH
    emitted = [[int(token)] for token in np.argmax(out.logits, -1)]
    turn = 0
    while min(map(len, emitted)) < 64:
        chains = []
        for b in range(run.BATCH):
            drafts = pattern[(turn + b) % 4]
            chains.append([emitted[b][-1], *reference.tokens[steps[b] + 1 :, b][:drafts]])
        tree = grow([random_trees.chain(len(chain)) for chain in chains], chains)
        out, scratch = verify(run.model(), state, tree)
        choice = select(tree, out.logits)
        state = publish(run.model(), state, tree, scratch, choice)
        tokens, count = choice.emitted(tree)
        for b, chain in enumerate(chains):
            assert count[b] == len(chain)  # every right draft is accepted
            emitted[b] += np.asarray(tokens)[b, : count[b]].tolist()
            steps[b] += int(count[b])
        reference.check(state, steps)
        turn += 1
    for b in range(run.BATCH):
        np.testing.assert_array_equal(emitted[b][:64], reference.tokens[:64, b])


def test_fc01_the_loop_with_a_drafter_that_may_propose_nothing():
    """FC-01: the same pattern through ``complete``; the stream is the plain one."""
    reference = run.greedy_reference()
    drafter = Scripted(
        tree="chain3",
        truth=tuple(tuple(reference.tokens[:, b].tolist()) for b in range(run.BATCH)),
        schedule=((3, 3), (0, 0), (1, 1), (0, 0)),
    )
    results = complete(run.model(), run.prompts(), max_tokens=64, drafter=drafter)
    for b, result in enumerate(results):
        np.testing.assert_array_equal(result.tokens, reference.tokens[:64, b])
        assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens
        assert result.stats.num_drafts < result.stats.steps  # steps that proposed nothing


def test_fc02_history_after_each_number_of_accepted_drafts():
    """FC-02: width 4, history x1 x2 x3, window t4 d5 d6 d7; accept 0, 1, 2, 3."""
    history = jnp.array([[1.0], [2.0], [3.0]])
    window = jnp.array([[4.0], [5.0], [6.0], [7.0]])
    expected = {0: [2, 3, 4], 1: [3, 4, 5], 2: [4, 5, 6], 3: [5, 6, 7]}
    for accepted, columns in expected.items():
        nodes = np.full(4, -1, np.int32)
        nodes[: accepted + 1] = range(accepted + 1)
        path = Path(jnp.array(nodes), jnp.array(accepted + 1, jnp.int32))
        np.testing.assert_array_equal(advance_history(history, window, path)[:, 0], columns)
    nothing = Path(jnp.full(4, -1, jnp.int32), jnp.array(0, jnp.int32))
    np.testing.assert_array_equal(advance_history(history, window, nothing), history)


def follow(policy, schedule):
    """Verify chains of ``drafts`` of which ``accepted`` are right, sequence b starting at turn b.

    Checks all surfaces after every step, and every row's scores against plain decoding.
    """
    reference = run.random_reference()
    _, state = run.prefilled(policy)
    steps = [0] * run.BATCH
    for turn in range(len(schedule)):
        chains, taken = [], []
        for b in range(run.BATCH):
            drafts, accepted = schedule[(turn + b) % len(schedule)]
            chain = reference.tokens[steps[b] : steps[b] + 1 + drafts, b].tolist()
            if accepted < drafts:
                chain[accepted + 1] = wrong(chain[accepted + 1])
            chains.append(chain)
            taken.append(accepted + 1)
        tree = grow([random_trees.chain(len(chain)) for chain in chains], chains)
        out, scratch = verify(run.model(), state, tree)
        for b, count in enumerate(taken):
            for row in range(count):  # the scores at each right row are those of the next step
                np.testing.assert_allclose(
                    out.logits[b, row], reference.logits[steps[b] + row + 1][b], rtol=0, atol=1e-3
                )  # logits are around 10, states within 1e-5 of them: measured below 2e-4
        choice = choose([range(count) for count in taken], run.MAX_DEPTH)
        state = publish(run.model(), state, tree, scratch, choice)
        steps = [before + count for before, count in zip(steps, taken, strict=True)]
        reference.check(state, steps)


@policies
def test_fc02_consecutive_windows_of_four_rows(policy):
    """FC-02: accepts of 3, 0, 2, 1: each shift uses the count of the step just verified."""
    follow(policy, [(3, 3), (3, 0), (3, 2), (3, 1)])


@policies
def test_fc05_window_size_changes_from_step_to_step(policy):
    """FC-05: windows of 4, 1, 3, 0, 2 drafts with 3, 0, 1, 0, 2 accepted, twenty times over."""
    follow(policy, [(4, 3), (1, 0), (3, 1), (0, 0), (2, 2)] * 20)


@policies
def test_fc03_a_node_continues_its_parent(policy):
    """FC-03: the toy cell, S = 2, rows m a b d c with values 1 2 4 3 -1; d and c hang below a."""
    policy = make_policy(policy)
    values, parents = [1.0, 2.0, 4.0, 3.0, -1.0], [-1, 0, 0, 1, 1]
    ones = jnp.ones((1, 5, 1, 1))
    operands = Operands(
        q=ones,
        k=ones,
        v=jnp.array(values).reshape(1, 5, 1, 1),
        g=jnp.full((1, 5, 1), jnp.log(0.5)),
        alpha=jnp.full((1, 5, 1), 0.5),
        beta=jnp.full((1, 5, 1), 0.5),
    )
    tree = Tree.from_parents(range(5), parents)

    @jax.jit
    def scan_and_commit(nodes, length):
        carry = policy.init(jnp.full((1, 1, 1, 1, 1), 2.0), 1)
        out, scratch, carry = policy.scan(carry, 0, operands, policy.plan(describe(tree)))
        carry = policy.commit(carry, (scratch,), Path(nodes, length))
        return out[0, :, 0, 0], policy.read(carry)[0, 0, 0, 0, 0]

    nodes = jnp.array([[0, 1, 3, -1, -1]], jnp.int32)
    states, committed = scan_and_commit(nodes, jnp.array([3], jnp.int32))
    # The toy numbers are dyadic: exact but where decays are exp of a rounded log 0.5.
    atol = 0 if policy.name in ("snapshot", "replay", "solve_replay", "per_path") else 1e-6
    expected = [1.0, 1.25, 2.25, 1.8125, -0.1875]
    np.testing.assert_allclose(states, expected, rtol=0, atol=atol)
    np.testing.assert_allclose(committed, 1.8125, rtol=0, atol=atol)


def test_fc03_the_convolution_window_follows_the_parents():
    """FC-03: the window of d is [.., m, a, d]; history columns are 0 1 2, rows start at 3."""
    topology = jax.tree.map(
        lambda leaf: leaf[0], describe(Tree.from_parents(range(5), [-1, 0, 0, 1, 1]))
    )
    m, a, b, d, c = 3, 4, 5, 6, 7
    expected = [[0, 1, 2, m], [1, 2, m, a], [1, 2, m, b], [2, m, a, d], [2, m, a, c]]
    np.testing.assert_array_equal(conv_rows(topology, 4), expected)


@policies
def test_fc03_other_branches_do_not_reach_a_node(policy):
    """FC-03: changing tokens on a branch leaves all other nodes' outputs bit for bit as they were.

    Row 4 (parent 6) and row 6 are packed after and before their relatives on purpose.
    """
    _, state = run.prefilled(policy)
    parents, changed = [-1, 0, 0, 1, 6, 2, 2], [2, 4, 5, 6]  # the subtree of row 2
    kept = [0, 1, 3]
    trees = [
        grow([parents] * run.BATCH, [tokens] * run.BATCH)
        for tokens in ([9, 1, 2, 3, 4, 5, 6], [9, 1, 22, 3, 24, 25, 26])
    ]
    (first, _), (second, _) = (verify(run.model(), state, tree) for tree in trees)
    for name in ("logits", "hidden"):
        a, b = (np.asarray(getattr(out, name)) for out in (first, second))
        np.testing.assert_array_equal(a[:, kept].view(np.uint32), b[:, kept].view(np.uint32))
        assert (a[:, changed] != b[:, changed]).any(-1).all()


def test_fc03_other_branches_do_not_reach_a_node_through_experts():
    """FC-03: the same where rows are sorted by expert, and so share matrix products."""
    model = load_model(checkpoint("qwen3_5_moe"))
    state = init_state(model.config, 1, 64)
    _, state = prefill(model, state, np.arange(20)[None], [20])
    parents, kept = [-1, 0, 0, 1, 6, 2, 2], [0, 1, 3]
    outputs = []
    for tokens in ([9, 1, 2, 3, 4, 5, 6], [9, 1, 22, 3, 24, 25, 26], [9, 1, 32, 3, 34, 35, 36]):
        tree = Tree.from_parents(tokens, parents, run.CAPACITY, run.MAX_DEPTH)
        outputs.append(np.asarray(verify(model, state, tree)[0].logits)[0, kept])
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0].view(np.uint32), other.view(np.uint32))


SCATTERED = [-1, 0, 0, 1, 2, 2]
PATHS = [[0, 2, 5], [0, 1], [0], [0, 1, 3]]  # one a sequence, different lengths in one batch


@policies
def test_fc04_accepted_nodes_are_scattered_in_the_window(policy):
    """FC-04: parents - 0 0 1 2 2, path 0 2 5: rows P.. hold those nodes, R and C are node 5's."""
    reference = run.random_reference()
    _, state = run.prefilled(policy)
    published, hidden = [], []
    for offset in (1, 7):  # two trees that differ in every node off the path
        trees = []
        for b, path in enumerate(PATHS):
            tokens = (np.arange(6) * 3 + offset + 20 * b) % run.CONFIG.vocab_size
            tokens[path] = reference.tokens[: len(path), b]
            trees.append(tokens)
        tree = Tree.from_parents(
            trees, [SCATTERED] * run.BATCH, run.CAPACITY, run.MAX_DEPTH, unique=False
        )
        out, scratch = verify(run.model(), state, tree)
        choice = choose(PATHS, run.MAX_DEPTH)
        published.append(publish(run.model(), state, tree, scratch, choice))
        hidden.append([out.hidden[b, path[-1]] for b, path in enumerate(PATHS)])
        reference.check(published[-1], [len(path) for path in PATHS])
    # Nothing of the other nodes is visible later: two different sets of them leave the same bits.
    first, second = (Surfaces(s) for s in published)
    for b, path in enumerate(PATHS):
        for name, array in first.row(b).items():
            np.testing.assert_array_equal(array, second.row(b)[name])
        np.testing.assert_array_equal(hidden[0][b], hidden[1][b])
        expected = reference.logits[len(path)][b]
        got = run.model().params["lm_head"] @ hidden[0][b]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)  # as in ``follow``


def test_fc04_the_drafter_is_handed_the_rows_of_the_path():
    """FC-04: what waits in the MTP head's memory are the hidden rows of nodes 0, 2, 5."""
    _, state = run.prefilled("replay")
    drafter = make_drafter("mtp", f"chain{run.MAX_DEPTH}")
    draft = drafter.init(run.model(), run.BATCH, run.ROWS)
    tree = grow([SCATTERED] * run.BATCH, [range(6)] * run.BATCH)
    out, _ = verify(run.model(), state, tree)
    after = drafter.observe(draft, tree, choose(PATHS, run.MAX_DEPTH), out.hidden).memory
    for b, path in enumerate(PATHS):
        assert after.count[b] == len(path)
        np.testing.assert_array_equal(after.waiting[b, : len(path)], out.hidden[b, np.array(path)])


def test_fc05_one_rollback_is_applied_once():
    """FC-05: publishing a step's choice twice is two steps from one state, not a longer one."""
    _, state = run.prefilled("replay")
    tree = grow([random_trees.chain(4)] * run.BATCH, [range(4)] * run.BATCH)
    _, scratch = verify(run.model(), state, tree)
    choice = choose([[0, 1], [0], [0, 1, 2, 3], [0, 1]], run.MAX_DEPTH)
    once, again = (publish(run.model(), state, tree, scratch, choice) for _ in range(2))
    for b in range(run.BATCH):
        assert_consistent(Surfaces(again).row(b), Surfaces(once).row(b), 1e-30)
    np.testing.assert_array_equal(once.length, np.array(run.PROMPTS) + choice.length)
