"""Visits: how many steps the loop asks for, who waited for whom, and what runs on a GPU."""

import dataclasses
import functools
import math

import byte_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import compilations
from kernel_cases import lower_for_h200

from treejax import loop, parameters
from treejax.drafters import MTP, Budget
from treejax.drafters.ledger import RECENT, Ledger
from treejax.drafters.pace import Plan
from treejax.engine import complete
from treejax.model import Model, prompt_blocks
from treejax.policies import make_policy
from treejax.sampling import Sampling
from treejax.steps import visits
from treejax.steps.many import MOST_STEPS, end_tokens, steps
from treejax.steps.prompt import variants
from treejax.steps.rules import REGISTRY as RULES
from treejax.steps.together import Carry, step

PROMPT = list(b"print(1)")


@functools.cache
def plain():
    """Its greedy continuation."""
    how = {"max_tokens": 34, "policy": "wy", "drafter": None}
    return complete(byte_model.model(), PROMPT, **how).tokens


@dataclasses.dataclass(frozen=True)
class Switching(Budget):
    """A budget that runs plans of its own, and remembers what it was asked and told."""

    plans: tuple[Plan, ...] = ()
    asked: list = dataclasses.field(default_factory=list, compare=False)
    told: list = dataclasses.field(default_factory=list, compare=False)

    def pace(self, sampling):
        return Order(self)


class Order:
    def __init__(self, drafter):
        self.drafter, self.turns = drafter, iter(drafter.plans)

    def choose(self, most, seconds):
        self.drafter.asked.append((most, seconds, len(self.drafter.told)))
        return next(self.turns, Plan(0, 1, False))

    def record(self, form, steps, seconds, accepted):
        assert steps >= len(accepted) and seconds > 0
        self.drafter.told.append((form, steps, list(accepted)))


def test_a_drafter_of_several_forms_says_how_long_each_runs_and_learns_of_every_step():
    """In visits of one program; the next is asked for at once, but after a plan that waits."""
    model, expected = byte_model.model(), plain()
    plans = (
        Plan(1, 3, True),
        Plan(0, 4, True),
        Plan(1, 1, False),
        Plan(1, 2, True),
        Plan(0, 32, True),
    )
    how = {"max_tokens": len(expected), "policy": "wy", "steps_per_visit": 5}
    drafter = Switching((MTP("chain1"),), plans=plans)
    made = complete(model, PROMPT, drafter=drafter, **how)
    assert made.tokens == expected
    assert [(form, len(steps)) for form, _, steps in drafter.told[:4]] == [
        *((1, 3), (0, 4), (1, 1), (1, 2))
    ]
    assert [known for *_, known in drafter.asked[:6]] == [0, 0, 1, 3, 3, 4]
    assert {asked[:2] for asked in drafter.asked} == {(5, math.inf)}
    accepted = sum(sum(steps) for *_, steps in drafter.told)
    assert accepted == made.stats.num_accepted_tokens
    assert made.stats.num_drafts == made.stats.num_draft_tokens == 6
    assert made.stats.steps == sum(len(steps) for *_, steps in drafter.told)
    assert made.stats.visits == len(drafter.told)
    quiet = Switching((MTP("chain1"),), plans=plans, ledger=Ledger((0, 1)))
    how = {"max_tokens": len(expected), "policy": "wy", "drafter": quiet}
    assert complete(model, PROMPT, stop=("never comes",), **how).tokens == expected
    assert {asked[:2] for asked in quiet.asked} == {(1, loop.VISIT_SECONDS)}  # by "auto"


def test_a_budget_rests_in_visits_as_long_as_plain_decodings(monkeypatch):
    """Many steps a visit, of each form one program, whatever the numbers of steps."""
    monkeypatch.setattr(loop, "VISIT_SECONDS", 1e9)
    model, drafter = byte_model.model(), Budget((MTP("chain1"),))
    how = {"max_tokens": 34, "policy": "wy", "drafter": drafter}
    assert complete(model, PROMPT, **how).tokens == plain()
    for _ in range(RECENT):
        drafter.ledger.record(1, 1, 1e6)  # a draft that is not worth a trial
    with compilations() as compiled:
        made = complete(model, PROMPT, **how)
    assert made.tokens == plain() and not compiled
    assert (made.stats.steps, made.stats.visits, made.stats.num_drafts) == (33, 2, 0)


@pytest.mark.parametrize(("seconds", "most", "visits"), [(1e9, MOST_STEPS, 3), (0.0, 1, 33)])
def test_auto_says_what_it_picked(monkeypatch, seconds, most, visits):
    """Two visits of a step are under way before the first was timed; then what fits."""
    monkeypatch.setattr(loop, "VISIT_SECONDS", seconds)
    made = complete(byte_model.model(), PROMPT, max_tokens=34, drafter=None, policy="wy")
    assert made.tokens == plain()
    assert made.stats.visits == visits and made.stats.steps_per_visit == min(most, 31)
    how = {"max_tokens": 12, "drafter": None, "policy": "wy"}
    made = complete(byte_model.model(), PROMPT, stop=("never comes",), **how)
    assert made.tokens == plain()[:12] and made.stats.steps_per_visit == 1


class Clock:
    """A clock that is set by hand, and visits that take as long as they are told."""

    def __init__(self, monkeypatch, made):
        self.now, self.ready, self.made = 0.0, 0.0, made
        self.asked = []
        monkeypatch.setattr(visits.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(visits, "steps", self.steps)
        monkeypatch.setattr(visits, "_is_ready", lambda _: self.now >= self.ready)
        monkeypatch.setattr(visits.jax, "device_get", self.fetch)

    def steps(self, name, carry, left, rest, ended, count, rehearse):
        self.asked.append((name, carry, left, rest, ended.tolist(), int(count), bool(rehearse)))
        self.ready = max(self.now, self.ready) + 2.0  # each visit takes two seconds
        self.ends = [*getattr(self, "ends", []), self.ready]
        return carry + 1, left + 1, visits.Visit(None, self.made)

    def fetch(self, what):
        self.now = max(self.now, self.ends.pop(0)) + 0.5  # and half a second to be fetched
        return what


def test_visits_tell_who_waited_for_whom(monkeypatch):
    """Carry and left go from visit to visit; times by a clock that is set by hand."""
    clock = Clock(monkeypatch, 3)
    ahead = visits.Visits([("a",), ("b",)], 0, 10, ("rest",))
    ahead.ask(0, 3, [False, True])
    ahead.ask(1, 2, [False, False])
    assert ahead.under_way == 2 and ahead.carry == 2
    assert clock.asked[0] == ("a", 0, 10, "rest", [False, True], 3, False)
    assert clock.asked[1] == ("b", 1, 11, "rest", [False, False], 2, False)
    first = ahead.fetch()
    assert (first.form, first.made, first.seconds, first.wait, first.idle) == (0, 3, 2.5, 2.5, 0)
    assert ahead.wants(True) and not ahead.wants(False)
    clock.now += 1.0  # 3.5: the second runs to 4, so the device does not wait
    ahead.ask(0, 3, [False, False])
    second = ahead.fetch()  # 4.5
    assert (second.form, second.seconds, second.wait, second.idle) == (1, 2.0, 1.0, 0)
    clock.now += 7.0  # 11.5: the third ended at 6
    ahead.ask(0, 3, [False, False])
    third, fourth = ahead.fetch(), ahead.fetch()
    assert (third.seconds, third.wait, third.idle) == (7.5, 0.5, 0)
    assert (fourth.seconds, fourth.wait, fourth.idle) == (2.0, 2.0, 7.0)
    clock.now += 3.0  # nothing is under way
    ahead.ask(0, 3, [False, False])
    fifth = ahead.fetch()
    assert (fifth.seconds, fifth.busy, fifth.wait, fifth.idle) == (5.5, 2.5, 2.5, 3.0)


def test_a_device_whose_loops_keep_the_host_has_one_visit_at_a_time(monkeypatch):
    """Each is timed by itself, and the host's time in asking is spent waiting."""
    clock = Clock(monkeypatch, 3)

    def steps(*given):
        made = clock.steps(*given)
        clock.now += 1.5  # of its two seconds
        return made

    monkeypatch.setattr(visits, "steps", steps)
    kept = visits.Visits([("a",)], 0, 10, ("rest",), blocking=True)
    assert kept.wants(True)
    kept.ask(0, 3, [False])
    assert not kept.wants(True)
    first = kept.fetch()
    assert (first.seconds, first.busy, first.wait, first.idle) == (2.5, 2.5, 2.5, 0)
    clock.now += 1.0  # the host's work, in which the device rests
    kept.ask(0, 3, [False])
    second = kept.fetch()
    assert (second.seconds, second.busy, second.wait, second.idle) == (3.5, 2.5, 2.5, 1.0)


def test_only_a_gpus_loops_keep_the_host_and_its_programs_are_rehearsed(monkeypatch):
    assert not visits.keeps_host(True) and not visits.keeps_host(False)
    assert visits.rehearsals(True) == 1 and visits.rehearsals(False) == 0

    class Device:
        platform = "gpu"

    monkeypatch.setattr(visits.jax, "devices", lambda: [Device])
    assert visits.keeps_host(True) and not visits.keeps_host(False)
    assert visits.rehearsals(True) > 1 and visits.rehearsals(False) == 0


@pytest.mark.parametrize("count", [0, 33, -1, 2.0, True, "many", None])
def test_a_number_of_steps_that_no_visit_can_make_is_refused(count):
    with pytest.raises(ValueError, match=r"expected an integer in 1\.\.32, or 'auto'") as caught:
        complete(byte_model.model(), "x", steps_per_visit=count)
    assert "\n" not in str(caught.value)


def test_a_warm_up_runs_each_program_of_the_prompt_once():
    lengths = np.array([5000, 70])
    blocks = list(prompt_blocks(np.ones((2, 5000), np.int32), lengths))
    made = variants(blocks)
    widths = [tokens.shape[1] for tokens, _ in blocks]
    assert len(blocks) > len(set(widths))
    assert sorted(tokens.shape[1] for tokens, _ in made) == sorted(set(widths))
    assert all(not count.any() and len(count) == 2 for _, count in made)


@pytest.mark.parametrize(
    ("count", "left", "ended", "rehearse"),
    [
        (1, [5, 3], [False, True], False),
        (0, [5, 3], [False, False], False),
        (1, [0, 0], [False, False], False),
        (1, [0, 0], [False, False], True),
    ],
    ids=["one ended", "none asked for", "none left", "rehearsed"],
)
def test_one_step_without_a_loop_is_a_visit_of_one_step(count, left, ended, rehearse):
    """But for a last bit, which a compiler may round otherwise, and spare rows, which any step may
    write; also where no step is made."""
    model, drafter = byte_model.model(), MTP("chain1")
    begin = jax.jit(lambda: loop.init_state(model.config, 2, 64, policy=make_policy("wy", "xla")))
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    rest = keys, Sampling().prepared(model.config.vocab_size), np.bool_(False)
    rest += end_tokens([set(), {3}]), np.array(ended), np.int32(count), np.bool_(rehearse)
    made = []
    for looped in (True, False):
        draft = drafter.init(model, 2, 64)
        carry = Carry(state=begin(), memory=draft.memory, pending=jnp.array([65, 66], jnp.int32))
        given = model.config, drafter, RULES["match"], looped, model.params, draft.weights, carry
        made.append(jax.device_get(steps(*given, jnp.array(left, jnp.int32), *rest)))
    (many, left_many, visit), (one, left_one, single) = made
    assert visit.made == single.made == int(bool(count) and (rehearse or any(left)))
    assert left_many.tolist() == left_one.tolist()
    if visit.made:
        first = jax.tree.map(lambda rows: rows[:1], visit.emission)
        jax.tree.map(np.testing.assert_array_equal, first, single.emission)
        assert single.emission.count.tolist()[0][1] == 0
    for mine, theirs in zip(*map(jax.tree.leaves, (many, one)), strict=True):
        rows = [slice(64 if size == 64 + 1 else None) for size in mine.shape]
        np.testing.assert_allclose(mine[*rows], theirs[*rows], rtol=1e-5, atol=1e-6)


def test_a_text_is_the_same_by_visits_without_a_loop(monkeypatch):
    """End tokens, budgets and wasted visits as by the loop."""
    monkeypatch.setattr(loop, "choose_loop", lambda model, count: (False, 1))
    how = {"max_tokens": 34, "policy": "wy"}
    for drafter in (None, MTP("2,1,1")):
        made = complete(byte_model.model(), PROMPT, drafter=drafter, **how)
        assert made.tokens == plain() and made.stats.visits == made.stats.steps
    end = plain()[-10]
    made = complete(byte_model.model(), PROMPT, drafter=None, stop=(end,), **how)
    assert made.tokens in (plain()[: plain().index(end) + kept] for kept in (0, 1))
    assert made.stats.finish_reason == "stop" and made.stats.wasted_steps <= 1


def test_a_gpu_makes_the_steps_of_a_large_model_one_by_one(monkeypatch):
    """What counts is what a layer weighs; a number that was asked for stays."""

    @dataclasses.dataclass
    class Weight:
        nbytes: float

    def sized(size):
        return Model({"layers": [{"up": Weight(size)}] * 4, "embed": Weight(1e12)}, tiny.CONFIG)

    class Device:
        platform = "gpu"

    assert visits.choose_loop(sized(8e8), None) == (True, None)  # a CPU
    assert visits.choose_loop(sized(8e8), 1) == (True, 1)
    monkeypatch.setattr(visits.jax, "devices", lambda: [Device])
    assert visits.choose_loop(sized(8e8), None) == (False, 1)
    assert visits.choose_loop(sized(2e8), None) == (True, None)
    assert visits.choose_loop(sized(8e8), 4) == (True, 4)
    assert visits.choose_loop(sized(2e8), 1) == (False, 1)


def test_many_steps_lowered_for_a_gpu_hold_the_kernels_of_one():
    """And the loop around them holds nothing that runs on the host."""
    config, drafter = tiny.CONFIG, MTP("chain1")
    params = parameters.abstract(config)
    made = dataclasses.replace(make_policy("wy", "xla"), implementation="mosaic_gpu")
    state = jax.eval_shape(lambda: loop.init_state(config, 2, 64, policy=made))
    draft = jax.eval_shape(lambda p: drafter.init(Model(p, config), 2, 64), params)
    carry = Carry(state=state, memory=draft.memory, pending=jnp.zeros(2, jnp.int32))
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    both = params, draft.weights, carry, jnp.zeros(2, jnp.int32), keys
    both += Sampling().prepared(), np.bool_(False)
    visit = end_tokens([set(), {3}]), np.zeros(2, bool), np.int32(4), np.bool_(False)
    how = config, drafter, RULES["match"]
    one = lower_for_h200(functools.partial(step, *how), *both)
    many = lower_for_h200(functools.partial(steps, *how, True), *both, *visit)
    queued = lower_for_h200(functools.partial(steps, *how, False), *both, *visit)
    kernels = [text.count("custom_call @mosaic_gpu") for text in (one, many, queued)]
    assert kernels[0] == kernels[1] == kernels[2] > 0
    assert "stablehlo.while" in many and "callback" not in many
    assert "stablehlo.while" not in queued and "callback" not in queued
