"""Budgets: several sizes over one memory give plain's text, and rest where drafting is no use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from treejax.drafters import MTP, Budget, Lookup, MTPSuffix, MTPTree, Resting, Suffix
from treejax.drafters.adaptive import empty_mix, observe_mix, rest_mix
from treejax.drafters.base import Draft
from treejax.drafters.head_cache import (
    Passes,
    empty_head,
    observe_head,
    prime_head,
    rest_head,
)
from treejax.drafters.ledger import Ledger
from treejax.drafters.pace import Plan
from treejax.drafters.store import ResponseStore
from treejax.engine import complete
from treejax.sampling import Sampling
from treejax.steps.select import Choice
from treejax.tree import Tree

pytestmark = pytest.mark.compiles_fast

PROMPT = [5, 9, 2, 9, 2, 11]
SIZES = (MTP("chain1"), MTPTree("best4x3", beam=2, branch=3))


class Order:
    """A pace that runs forms in an order of its own."""

    def __init__(self, ledger, order):
        self.ledger, self.order, self.at = ledger, order, 0

    def choose(self, most, seconds):
        self.at += 1
        return Plan(self.order[self.at % len(self.order)], 1, self.at % 3 > 0)

    def record(self, form, steps, seconds, accepted):
        self.ledger.record(form, steps, seconds)


@dataclasses.dataclass(frozen=True)
class Script(Budget):
    """A budget whose loop is told what to run."""

    order: tuple[int, ...] = ()

    def pace(self, sampling):
        return Order(self.ledger, self.order)


def test_any_order_of_forms_gives_plains_text():
    """Rests of every length up to more than the head can hold back, between drafts; greedy and
    sampled side by side."""
    sampling = Sampling(jnp.array([0.0, 0.9]), top_k=8)
    drafter = Script(SIZES, order=(0, 2, 0, 0, 1, *[0] * 9, 2, 2, 1, 0, 1))
    settings = {"max_tokens": 60, "policy": "wy", "sampling": sampling}
    drafted = complete(tiny.model(), [PROMPT, PROMPT[:4]], drafter=drafter, **settings)
    plain = complete(tiny.model(), [PROMPT, PROMPT[:4]], drafter=None, **settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert {row["form"] for row in drafter.ledger.table()} == {0, 1, 2}
    assert drafted[0].stats.drafter == "budget"


def test_the_ledger_outlives_a_call_and_serves_no_other_batch():
    drafter = Budget(SIZES)
    drafter.init(tiny.model(), 2, 40)  # nothing was measured yet
    complete(tiny.model(), PROMPT, max_tokens=20, drafter=drafter, policy="wy")
    before = drafter.ledger.visits(0)
    assert drafter.ledger.tried(0)
    complete(tiny.model(), PROMPT, max_tokens=20, drafter=drafter, policy="wy")
    assert drafter.ledger.visits(0) >= before and len(drafter.ledger.table()) > 1
    assert dataclasses.replace(drafter, patience=3).ledger is drafter.ledger
    with pytest.raises(ValueError, match="another model, device or size of batch"):
        drafter.init(tiny.model(), 2, 40)
    assert drafter.init(tiny.model(), 1, 40) is not None


def follow(draft, memory, plan, hidden, tokens):
    """Observe ``tokens`` one after the other as plans say: drafted in one go, or resting."""
    at = 0
    for rest, count in plan:
        pending = tokens[None, at]
        stored = (_rest if rest else _as_drafted)(draft, memory, pending)
        rows = np.arange(count)
        tree = Tree.from_parents(tokens[at : at + count], rows - 1, capacity=4, max_depth=3)
        path = np.full((1, 4), -1)
        path[0, :count] = rows
        choice = Choice(jnp.asarray(path, jnp.int32), jnp.array([count]), jnp.array([0]))
        shown = jnp.zeros((1, 4, hidden.shape[-1])).at[:, :count].set(hidden[None, at : at + count])
        memory = _observe(stored, tree, choice, shown)
        at += count
    return memory


@jax.jit
def _as_drafted(draft, memory, pending):
    return Passes(draft, memory, pending).memory


_rest, _observe = jax.jit(rest_head), jax.jit(observe_head)


def test_resting_leaves_the_cache_that_drafting_leaves():
    """The rows in the cache are those of the same hidden rows and tokens, whenever they enter."""
    model = tiny.model()
    weights = {name: model.params[name] for name in ("mtp", "embed", "lm_head")}
    draft = Draft(weights=weights, memory=None, config=model.config)
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.standard_normal((24, model.config.hidden_size)), jnp.float32)
    tokens = jnp.asarray(random.integers(0, 61, 24), jnp.int32)
    empty = empty_head(model.config, jnp.float32, 1, 40, 3)
    begun = prime_head(draft, empty, hidden[None, :3], tokens[None, :3], jnp.array([3]))
    rest, later = hidden[3:], tokens[3:]
    plans = {
        "drafts": [(False, 2), (False, 1), (False, 4), (False, 3), (False, 1), (False, 1)],
        "rests": [(True, 1)] * 11 + [(False, 1)],
        "mixed": [(True, 1)] * 3 + [(False, 3)] + [(True, 1)] * 5 + [(False, 1)],
    }
    made = {name: follow(draft, begun, plan, rest, later) for name, plan in plans.items()}
    for memory in made.values():
        assert int(memory.rows[0] + memory.count[0]) == 15
        assert int(memory.count[0]) <= memory.waiting.shape[1]
        rows = int(memory.rows[0])
        whole = made["rests"]
        shared = min(rows, int(whole.rows[0]))
        np.testing.assert_allclose(
            memory.keys[0, :shared], whole.keys[0, :shared], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_array_equal(memory.waiting[0, int(memory.count[0]) - 1], rest[11])


def test_a_resting_drafter_rests_as_its_inner_one_does():
    """Twice as many plain steps as hidden rows can wait: by either way the cache takes them in."""
    model, inner, steps = tiny.model(), MTP("chain1"), 4
    random = np.random.default_rng(1)
    hidden = random.standard_normal((1, steps + 1, model.config.hidden_size)).astype(np.float32)
    tokens = jnp.asarray(random.integers(0, 61, (1, steps + 2)), jnp.int32)
    path = Choice(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32))
    made = []
    for drafter in (inner, Resting(inner=inner)):
        rest, observe = jax.jit(drafter.rest), jax.jit(drafter.observe)
        draft = drafter.prime(
            drafter.init(model, 1, 40), hidden[:, :1], tokens[:, :1], jnp.ones(1, jnp.int32)
        )
        for at in range(1, steps + 1):
            tree = Tree.root_only(tokens[:, at])
            draft = rest(draft, tree.tokens[:, 0])
            draft = observe(draft, tree, path, hidden[:, at : at + 1])
        made.append(draft.memory)
    mine, theirs = made
    assert int(theirs.count[0]) <= theirs.waiting.shape[1] < steps
    assert int(theirs.rows[0] + theirs.count[0]) == steps + 1
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def test_a_resting_drafter_learns_for_its_inner_one():
    store = ResponseStore(6)
    Resting(inner=Suffix("chain2", store=store)).learn([3, 4])
    assert store.tokens.tolist() == [-1, -1, -1, 3, 4, -1]


def test_a_row_that_takes_no_part_keeps_its_memory():
    model = tiny.model()
    drafter = Resting(inner=MTP("chain3"))
    draft = drafter.init(model, 1, 40)
    hidden = jnp.ones((1, 4, model.config.hidden_size))
    tokens = jnp.array([[1, 2, 3, 4]], jnp.int32)
    draft = drafter.prime(draft, hidden, tokens, jnp.array([4]))
    tree, _, after = drafter.propose(draft, None, jnp.array([7]), None)
    nobody = Choice(jnp.full((1, 1), -1), jnp.array([0]), jnp.array([7]))
    after = drafter.observe(after, tree, nobody, hidden[:, :1])
    kept, before = after.memory, draft.memory
    assert int(kept.rows[0]) == int(before.rows[0]) and int(kept.count[0]) == int(before.count[0])
    jax.tree.map(np.testing.assert_array_equal, kept.waiting, before.waiting)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(()), "needs sizes"),
        (lambda: Budget((MTP("chain5"), MTP("chain2"))), "expected growing ones"),
        (lambda: Budget((MTP("chain2"), MTP("chain5", draws="coupled"))), "differ in proposals"),
        (lambda: Budget(SIZES, ledger=Ledger((0, 2))), r"a ledger of depths \(0, 2\)"),
        (lambda: Budget(SIZES, ledger=Ledger((0, 1, 3))), r"and rows \(1, 2, 4\), expected"),
    ],
)
def test_budgets_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_of_different_memories_are_refused():
    with pytest.raises(ValueError, match="differ in lookup"):
        Budget((MTP("chain2"), Suffix("best9x4")))
    with pytest.raises(ValueError, match="cannot go on from the memory"):
        Budget((MTPSuffix("best3x2"), MTPSuffix("best6x4"))).init(tiny.model(), 1, 40)
    assert Budget((Suffix("chain2"), Suffix("best9x4"))).init(tiny.model(), 1, 40) is not None


def test_a_full_memory_makes_room_for_all_and_a_finished_sequence_asks_for_no_more():
    """When one sequence has no room left, every sequence's older rows enter the cache, so that one
    that ended with a full memory does not make the head work at every later rest."""
    model, drafter = tiny.model(), MTP("chain3")
    draft = drafter.init(model, 2, 40)
    full = draft.memory.replace(
        count=jnp.array([4, 2]), waiting=jnp.arange(2 * 4 * 16, dtype=jnp.float32).reshape(2, 4, 16)
    )
    rested = rest_head(draft, full, jnp.array([7, 8]))
    assert rested.count.tolist() == [1, 1] and rested.rows.tolist() == [3, 1]
    np.testing.assert_array_equal(rested.waiting[0, 0], full.waiting[0, 3])
    np.testing.assert_array_equal(rested.waiting[1, 0], full.waiting[1, 1])
    assert rested.after[:, 0].tolist() == [7, 8]
    again = rest_head(draft, rested, jnp.array([7, 8]))
    for name in ("rows", "count", "waiting", "after", "stored"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rested, name))
    np.testing.assert_array_equal(again.keys[:, :-1], rested.keys[:, :-1])  # the last is a spare


def test_drawn_sizes_serve_coin_rules_and_every_size_must_suit_the_rule():
    sizes = (MTP("2", draws="iid"), MTP("2,2", draws="iid"))
    drafter = Script(sizes, order=(0, 1, 2, 0, 2))
    made = complete(
        *(tiny.model(), PROMPT),
        **{"max_tokens": 30, "policy": "wy", "rule": "multi_step", "drafter": drafter},
        sampling=Sampling(0.8, top_k=20),
    )
    assert len(made.tokens) == 30 and made.stats.rule == "multi_step"
    mixed = Budget((MTP("2", draws="iid"), MTP("chain4", draws="iid")))
    with pytest.raises(ValueError, match="serves chains only"):
        complete(tiny.model(), PROMPT, drafter=mixed, rule="block", sampling=Sampling(0.8))


def test_a_step_without_a_proposal_teaches_nothing():
    """What was copied before a rest is not held against the tokens that plain steps emit."""
    memory = empty_mix(2, Lookup(), 4)
    offered = memory.copies.replace(
        tokens=jnp.full((2, 4), 7, jnp.int32),
        ratios=jnp.ones((2, 4), jnp.float32),
        length=jnp.full(2, 3, jnp.int32),
    )
    memory = memory.replace(copies=offered, made=jnp.int32(5))
    emitted, count = jnp.full((2, 1), 7, jnp.int32), jnp.ones(2, jnp.int32)
    learned = observe_mix(memory, emitted, count, 0.98)
    assert float(learned.trust.offered.sum()) == 2.0 and int(learned.passes) == 5
    rested = observe_mix(rest_mix(memory), emitted, count, 0.98)
    assert float(rested.trust.offered.sum()) == 0.0 and int(rested.passes) == 0
