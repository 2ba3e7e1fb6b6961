"""What one step is measured by: clean steps are near, and each wrong thing shows where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from treejax.audit.intake import engine_of, take_in
from treejax.audit.memories import fragile, worst_row
from treejax.audit.reference import decode
from treejax.audit.rows import RowLogits
from treejax.audit.step import Subject, cycle, never
from treejax.audit.surfaces import EXACT, SURFACES, kl, measure, narrow_vectors, right_path
from treejax.drafters import MTP
from treejax.model import Model
from treejax.policies.replay import Replay
from treejax.sampling import Sampling
from treejax.state import init_state
from treejax.steps.rules import REGISTRY
from treejax.tree import Tree

MODEL = Model(tiny.random_params(tiny.CONFIG), tiny.CONFIG)  # nothing is compiled for it
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2]]
ROWS, COUNT, GREEDY = 32, 12, Sampling()
KEYS = jax.vmap(jax.random.key)(jnp.arange(2))
SUBJECT = Subject(Replay(), MTP("2,1"), REGISTRY["match"])


@pytest.fixture(scope="module")
def plain():
    how = {"sampling": GREEDY, "keys": KEYS, "max_length": ROWS}
    return decode(MODEL, PROMPTS, COUNT, drafter=SUBJECT.drafter, **how)


@pytest.fixture(scope="module")
def expected(plain):
    return RowLogits(MODEL, plain)


@pytest.fixture(scope="module")
def stepped(plain):
    """Weights, and the engines and outputs of the second step."""
    model = MODEL
    start = take_in(model, PROMPTS, SUBJECT.drafter, max_length=ROWS)
    engine, weights = engine_of(SUBJECT, start, plain.tokens[:, 0]), start.draft.weights
    offset, rest = np.zeros(2, np.int64), None
    for index in range(2):
        before, began = engine, offset
        engine, shown = cycle(
            *(model.config, SUBJECT, model.params, weights, before, KEYS),
            *(GREEDY.prepared(model.config.vocab_size), never(2), jnp.int32(index)),
        )
        rest = before, engine, shown, began
        offset = offset + np.asarray(shown.count)
    return weights, *rest


def measured(expected, stepped, after=None, shown=None):
    weights, before, engine, made, offset = stepped
    return measure(
        *(MODEL, SUBJECT, weights, before, after or engine, shown or made, expected, offset),
        keys=KEYS,
        sampling=GREEDY,
    )


def seen(step, clean):
    """Names of what moved away from the clean step's."""
    far = {n for n in SURFACES if (step.distances[n] > clean.distances[n] + 1e-5).any()}
    return far | {n for n in EXACT if (step.counts[n] != clean.counts[n]).any()}


def test_a_right_step_is_near_and_exact(expected, stepped):
    step = measured(expected, stepped)
    config = MODEL.config
    assert {n: step.distances[n].shape for n in SURFACES} == {
        "R": (2, 1, config.linear_num_value_heads),
        "C": (2, 1),
        "new K": (2, 1, 2, 2),
        "old K": (2, 1, 2, 2),
        "divergence": (2,),
        "row logits": (2, 5),
        "drafter": (2,),
    }
    assert max(values.max() for values in step.distances.values()) < 1e-4
    assert not any(counts.any() for counts in step.counts.values())


def test_each_surface_shows_where_it_was_touched(expected, stepped):
    engine, clean = stepped[2], measured(expected, stepped)
    state, memory, end = engine.state, engine.memory, int(clean.offset[0]) + len(PROMPTS[0])
    cases = {
        "R": state.replace(recurrent=state.recurrent.at[0, 0, 1].multiply(1.001)),
        "C": state.replace(conv=state.conv.at[0, 0, 0].add(0.01)),
        "new K": state.replace(keys=state.keys.at[0, 0, end - 1, 1].multiply(1.001)),
        "length": state.replace(length=state.length.at[0].add(1)),
    }
    for name, wrong in cases.items():
        step = measured(expected, stepped, engine.replace(state=wrong))
        assert seen(step, clean) == {name}, name
        assert not seen(
            step._replace(
                distances={n: v[1:] for n, v in step.distances.items()},
                counts={n: v[1:] for n, v in step.counts.items()},
            ),
            clean._replace(
                distances={n: v[1:] for n, v in clean.distances.items()},
                counts={n: v[1:] for n, v in clean.counts.items()},
            ),
        ), "the other sequence is as it was"
    wrong = state.replace(values=state.values.at[0, 0, 2].multiply(1.001))
    step = measured(expected, stepped, engine.replace(state=wrong))
    assert seen(step, clean) == {"old K", "old rows"} and step.counts["old rows"][0] == 1
    wrong = memory.replace(values=memory.values.at[0, 3].multiply(1.001))
    assert "drafter" in seen(measured(expected, stepped, engine.replace(memory=wrong)), clean)
    wrong = memory.replace(rows=memory.rows.at[0].add(1))  # one row off
    step = measured(expected, stepped, engine.replace(memory=wrong))
    assert step.distances["drafter"][0] == np.inf and step.distances["drafter"][1] < 1e-4


def test_tokens_and_logits_are_plain_s(expected, stepped):
    engine, shown, clean = stepped[2], stepped[3], measured(expected, stepped)
    wrong = shown.replace(tokens=shown.tokens.at[0, 0].add(1))
    assert measured(expected, stepped, shown=wrong).counts["tokens"].tolist() == [1, 0]
    more = shown.replace(count=shown.count + 1)
    assert (measured(expected, stepped, shown=more).counts["tokens"] > 0).all()
    other = engine.replace(pending=engine.pending.at[1].add(1))
    assert measured(expected, stepped, other).counts["tokens"].tolist() == [0, 1]
    best = expected.plain.tokens[0, stepped[4][0] + 1]
    moved = shown.replace(logits=shown.logits.at[0, 0, best].add(-20.0))
    step = measured(expected, stepped, shown=moved)
    assert seen(step, clean) == {"divergence", "row logits"}
    assert step.distances["logits"][0] == pytest.approx(20.0, abs=1e-3)


def test_nothing_that_is_not_finite_looks_near(expected, stepped):
    engine, shown = stepped[2], stepped[3]
    state = engine.state
    wrong = state.replace(
        recurrent=state.recurrent.at[0, 0].set(jnp.nan), keys=state.keys.at[0, 1, 0].set(jnp.inf)
    )
    step = measured(expected, stepped, engine.replace(state=wrong))
    assert not (step.distances["R"][0] <= 1.0).any()
    assert not (step.distances["old K"][1, :, 0] <= 1.0).any()
    lost = shown.replace(logits=shown.logits.at[0, 0, 0].set(jnp.nan))
    assert not measured(expected, stepped, shown=lost).distances["divergence"][0] <= 1.0


def test_a_row_off_the_path_shows_alone(expected, stepped):
    """Every row of the trees, rejected ones too, is held against decoding along its own path."""
    shown, offset, clean = stepped[3], stepped[4], measured(expected, stepped)
    path = right_path(shown.tree, expected.plain, offset, np.arange(2))
    off = [row for row in range(int(shown.tree.size[1])) if row not in path[1]]
    assert off
    for row in off:
        moved = shown.replace(logits=shown.logits.at[1, row, 0].add(0.5))
        step = measured(expected, stepped, shown=moved)
        assert seen(step, clean) == {"row logits"}
        far = step.distances["row logits"] > clean.distances["row logits"] + 1e-5
        assert np.argwhere(far).tolist() == [[1, row]]
    tree, logits = shown.tree, np.full(shown.logits.shape, np.nan, np.float32)
    far = expected.distances(tree, logits, offset, np.arange(2), np.array([0, -1]))
    assert np.argwhere(far != 0).tolist() == [[0, 0]]  # the others were not to be verified
    assert not far[0, 0] <= 1.0


def test_what_was_not_followed_before_it_closed_counts_as_equal(expected, stepped):
    shown, offset = stepped[3], stepped[4]
    closed = RowLogits(MODEL, expected.plain)
    closed.close()
    assert not closed.distances(shown.tree, shown.logits + 1.0, offset, np.arange(2)).any()


@pytest.mark.parametrize("policy", ["replay", "ring"])
def test_vectors_that_were_rounded_are_counted(policy):
    """Of the carry itself: what a ring's decays have left of its checkpoint may be nothing."""
    state = init_state(tiny.CONFIG, 2, 8, policy=policy)
    random = np.random.default_rng(1)
    carry = jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape), x.dtype) if x.ndim > 3 else x,
        state.recurrent,
    )
    assert narrow_vectors(carry).tolist() == [0, 0]
    R = carry if policy == "replay" else carry.R
    for rounded in (R.astype(jnp.bfloat16).astype(jnp.float32), jnp.round(R)):
        struck = R.at[0, 1, 2, :3].set(rounded[0, 1, 2, :3])
        struck = struck if policy == "replay" else carry.replace(R=struck)
        whole = bool((rounded == jnp.round(rounded)).all())  # a count or a mask is no rounding
        assert narrow_vectors(struck).tolist() == [0, 0 if whole else 3]


def test_the_right_path_follows_plain_and_not_the_engine(plain):
    right = plain.tokens[0, :4].tolist()
    other = [(token + 1) % 61 for token in right]
    # Rows in scrambled order: right[1] in row 3, right[2] in row 1 below it, and wrong siblings.
    tree = Tree.from_parents([right[0], right[2], other[1], right[1]], [-1, 3, 0, 0])
    where = np.zeros(1, np.int64)
    assert right_path(tree, plain, where, where)[0].tolist() == [0, 3, 1, -1]
    assert right_path(tree, plain, where, where, np.array([0]))[0].tolist() == [0, -1, -1, -1]
    assert right_path(tree, plain, where, where, np.array([-1]))[0].tolist() == [-1] * 4
    with pytest.raises(ValueError, match="decode more"):
        right_path(tree, plain, np.array([COUNT - 1]), where)


def test_a_memory_of_another_drafter_is_refused(expected, stepped):
    other = Subject(Replay(), MTP("chain2"), REGISTRY["match"])
    weights, before, engine, shown, offset = stepped
    with pytest.raises(ValueError, match="plain was recorded with drafter"):
        measure(
            *(MODEL, other, weights, before, engine, shown, expected, offset),
            keys=KEYS,
            sampling=GREEDY,
        )


def test_a_proposal_far_from_a_tie_survives_noise_of_a_bound(expected, stepped):
    weights, _, engine, _, offset = stepped
    how = {"keys": KEYS, "sampling": GREEDY}
    rest = MODEL, SUBJECT, weights, engine.memory, expected.plain, offset
    assert not fragile(*rest, size=1e-5, **how).any()
    assert fragile(*rest, size=10.0, **how).all()  # noise that drowns the memory changes it


def test_a_row_shows_at_its_full_size():
    random = np.random.default_rng(0)
    rows = random.standard_normal((2, 50, 3, 16)).astype(np.float32)
    moved = rows.copy()
    moved[1, 7, 2] *= 1.01
    far = worst_row(moved, rows)
    norm = np.linalg.norm(rows[1, :, 2], axis=1)
    assert far[1, 2] == pytest.approx(0.01 * norm[7] / np.sqrt((norm**2).mean()), rel=1e-4)
    assert np.count_nonzero(far) == 1
    assert worst_row(rows[:, :0], rows[:, :0]).tolist() == [[0.0] * 3] * 2


def test_divergence_in_nats():
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    want = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert kl(p + 3.0, q - 1.0) == pytest.approx(want)
    assert kl(p, p) == 0.0 and kl(p, np.full(3, np.nan)) == np.inf
