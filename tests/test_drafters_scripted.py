"""The scripted drafter does exactly what its script says: other tests rely on it."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from treejax import complete
from treejax.drafters import Scripted
from treejax.steps.select import Choice

pytestmark = pytest.mark.compiles_fast

VOCABULARY = 11  # small, so that wrong tokens often equal a later right one
MODEL = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY))
KEY = jax.random.key(5)


def answers(seed, count, length):
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(0, VOCABULARY, length).tolist()) for _ in range(count))


def follow(tree, b, answer):
    """The row path that a target which says ``answer`` below the root accepts."""
    path = [0]
    for token in answer:
        rows = range(1, int(tree.size[b]))
        below = [v for v in rows if tree.parent[b, v] == path[-1]]
        assert len({tree.tokens[b, v] for v in below}) == len(below), "siblings must differ"
        match = [v for v in below if tree.tokens[b, v] == token]
        if not match:
            break
        path += match
    return path


def depth_of(tree, b):
    """Levels of candidates in the tree."""
    depths = [0]
    for parent in tree.parent[b, 1 : int(tree.size[b])]:
        depths.append(depths[parent] + 1)
    return max(depths)


@functools.cache
def compiled(drafter):
    def propose(draft, length, pending, key):
        return drafter.propose(draft, SimpleNamespace(length=length), pending, key)

    return jax.jit(propose), jax.jit(drafter.observe)


def play(drafter, steps, batch, key=KEY, prompt=6):
    """Drive a drafter against targets that say its truth: per step and sequence the outcome."""
    truth = drafter.truth
    draft = drafter.init(MODEL, batch, 400)
    propose, observe = compiled(drafter)
    emitted, log = np.zeros(batch, np.int32), []
    for _ in range(steps):
        said = [
            truth[b][emitted[b]] if b < len(truth) and emitted[b] < len(truth[b]) else 0
            for b in range(batch)
        ]
        length = jnp.asarray(prompt + emitted)
        tree, q, draft = propose(draft, length, jnp.array(said, jnp.int32), key)
        assert q is None
        tree_here = jax.device_get(tree)
        bound = drafter.max_depth + 1
        paths, row = np.full((batch, bound), -1, np.int32), []
        for b in range(batch):
            rest = truth[b][emitted[b] + 1 :] if b < len(truth) else ()
            path = follow(tree_here, b, rest)
            paths[b, : len(path)] = path
            row.append((depth_of(tree_here, b), len(path) - 1, tuple(path)))
        log.append(row)
        lengths = jnp.asarray((paths >= 0).sum(axis=1).astype(np.int32))
        choice = Choice(jnp.asarray(paths), lengths, jnp.zeros(batch, jnp.int32))
        draft = observe(draft, tree, choice, jnp.zeros((batch, drafter.capacity, 1)))
        emitted += np.asarray(lengths)
    return log


@pytest.mark.parametrize("spec", ["chain4", "hydra27", "3,2,1,1"])
def test_schedule_is_kept(spec):
    """Each step proposes and gets accepted what its entry says, (0, 0) included."""
    schedule = ((3, 3), (0, 0), (1, 1), (0, 0), (4, 2), (4, 4), (2, 0))
    drafter = Scripted(spec, answers(1, 2, 60), schedule)
    log = play(drafter, 2 * len(schedule), batch=2)
    for step, row in enumerate(log):
        for proposed, accepted, _ in row:
            assert (proposed, accepted) == schedule[step % len(schedule)]


def test_accepted_rows_are_scattered():
    drafter = Scripted("hydra27", answers(2, 1, 200), ((4, 3),))
    paths = {row[0][2] for row in play(drafter, 12, batch=1)}
    assert len(paths) == 5, "all five nodes of depth 3 must be reached"
    assert any(path != tuple(range(len(path))) for path in paths)


def test_sequences_have_their_own_truth_and_end():
    """Nothing is proposed past the end of a truth, nor for a sequence without one."""
    truth = (answers(3, 1, 40)[0], answers(4, 1, 7)[0])
    drafter = Scripted("chain3", truth, ((3, 3),))
    log = play(drafter, 4, batch=3)
    assert [row[0][:2] for row in log] == [(3, 3)] * 4
    assert [row[1][:2] for row in log] == [(3, 3), (2, 2), (0, 0), (0, 0)]
    assert [row[2][:2] for row in log] == [(0, 0)] * 4


def test_idle_sequences_do_not_advance():
    drafter = Scripted("chain2", answers(5, 2, 20), ((2, 2), (0, 0)))
    draft = drafter.init(MODEL, 2, 30)
    length = jnp.full(2, 4, jnp.int32)
    pending, (propose, observe) = jnp.zeros(2, jnp.int32), compiled(drafter)
    tree, _, draft = propose(draft, length, pending, KEY)
    path = jnp.array([[0, 1, 2], [-1, -1, -1]], jnp.int32)
    choice = Choice(path, jnp.array([3, 0], jnp.int32), pending)
    draft = observe(draft, tree, choice, jnp.zeros((2, 3, 1)))
    assert draft.memory.emitted.tolist() == [3, 0] and draft.memory.step.tolist() == [1, 0]


def test_probability_by_depth():
    """Depth d is right with its probability given those above; all depths are proposed."""
    chances = (0.9, 0.5, 0.0)
    drafter = Scripted("chain4", answers(6, 64, 150), probability=chances)
    log = play(drafter, 40, batch=64)
    accepted = np.array([[outcome[1] for outcome in row] for row in log])
    assert {outcome[0] for row in log for outcome in row} == {4}
    for depth, chance in enumerate(chances, start=1):
        reached = (accepted >= depth - 1).sum()
        share = (accepted >= depth).sum() / reached
        # five standard errors of a share over this many independent draws
        assert abs(share - chance) <= 5 * np.sqrt(chance * (1 - chance) / reached)
    one = play(Scripted("chain4", answers(6, 2, 150), probability=(1.0,) * 4), 20, batch=2)
    assert {outcome[1] for row in one for outcome in row} == {4}


def test_probability_depends_on_key_and_position_alone():
    truth = answers(7, 4, 200)
    drafter = Scripted("chain4", truth, probability=(0.6,) * 4)
    first, again = play(drafter, 15, batch=4), play(drafter, 15, batch=4)
    assert first == again
    assert first != play(drafter, 15, batch=4, key=jax.random.key(6))
    assert first != play(drafter, 15, batch=4, prompt=7)
    alone = Scripted("chain4", truth[:1], probability=(0.6,) * 4)
    assert [row[:1] for row in first] == play(alone, 15, batch=1)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "needs either a schedule or a probability"),
        ({"schedule": ((1, 1),), "probability": (0.5,)}, "needs either"),
        ({"schedule": ((1, 2),)}, r"entry \(1, 2\) is impossible in 'chain3'"),
        ({"schedule": ((4, 2),)}, "right <= proposed <= 3"),
        ({"schedule": ((2, -1),)}, "impossible"),
        ({"schedule": ()}, "needs either a schedule or a probability"),
        ({"probability": (0.5, 1.5)}, "must lie between 0 and 1"),
    ],
)
def test_impossible_scripts(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        Scripted("chain3", ((1, 2, 3),), **settings)
    assert "\n" not in str(caught.value)


def test_scripts_that_do_not_fit_the_run():
    drafter = Scripted("chain3", ((1, 2, 3), (4, 5)), ((1, 1),))
    with pytest.raises(ValueError, match="2 continuations for 1 sequences"):
        drafter.init(MODEL, 1, 16)
    with pytest.raises(ValueError, match="token 11 .* below the vocabulary of 11"):
        Scripted("chain3", ((1, 11),), ((1, 1),)).init(MODEL, 1, 16)
    with pytest.raises(ValueError, match="11 siblings"):
        Scripted("11", ((1, 2),), ((1, 1),)).init(MODEL, 1, 16)


def test_fc06_everything_accepted_fifty_times():
    """FC-06: a drafter equal to the target at depth 4: 50 steps of 5 tokens, all accepted."""
    model, prompt = tiny.model(), [3, 1, 4, 1, 5]
    plain = complete(model, prompt, max_tokens=251, drafter=None)
    drafter = Scripted("chain4", (plain.tokens,), ((4, 4),))
    drafted = complete(model, prompt, max_tokens=251, drafter=drafter)
    assert drafted.tokens == plain.tokens and len(plain.tokens) == 251
    stats = drafted.stats
    assert (stats.steps, stats.num_drafts, stats.num_accepted_tokens) == (50, 50, 200)
    assert stats.num_draft_tokens == 200 and stats.acceptance_length == 5.0


def test_chances_are_drawn_for_greedy_targets_too():
    """Through the loop, which gives keys to drafters whatever the target's temperature is."""
    settings = {"max_tokens": 24, "policy": "wy"}
    plain = complete(tiny.model(), [5, 9, 2], drafter=None, **settings)
    half = Scripted("chain2", truth=(plain.tokens,), probability=(0.5, 0.5))
    drafted = complete(tiny.model(), [5, 9, 2], drafter=half, **settings)
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.stats.num_accepted_tokens < drafted.stats.num_draft_tokens
