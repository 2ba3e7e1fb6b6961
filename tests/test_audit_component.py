"""The component audit: its truth, its rule, its verdict on right policies and on wrong ones."""

import dataclasses
import functools
from types import SimpleNamespace

import audited_policies as audited
import numpy as np
import oracle
import pytest
import random_trees

from treejax.audit import component, step
from treejax.audit.component.block import WIDE
from treejax.audit.component.operands import HYDRA, Shape, draw, draw_states, random_parents
from treejax.audit.component.repeats import repeats
from treejax.audit.component.rules import REBUILT, RELATIVE, SOLVED, promise_of
from treejax.audit.component.settings import Settings
from treejax.audit.component.sizes import wrong_buffers
from treejax.audit.component.subject import Subject
from treejax.audit.component.tally import label_of
from treejax.audit.component.truth import STRICT, Errors, along, errors, exact, native
from treejax.audit.raised import RAISED
from treejax.drafters import MTP
from treejax.policies import REGISTRY, WY, SolveReplay
from treejax.steps.rules import REGISTRY as RULES
from treejax.tree import Tree

TINY = Shape(2, 3, key_heads=1, value_heads=2, key_dim=8, value_dim=8)
SETTINGS = Settings(TINY, 1, 5, 1, (), 3, TINY, processes=0, runs=1)
run = functools.partial(component.run, settings=SETTINGS)


def red(report):
    """Names of what failed, without what was measured at each place."""
    return {check.name.split(",")[0] for check in report.red}


def test_the_tree_is_lumotrees():
    """28 rows as the reference has them, and the four masked ones behind them."""
    assert list(HYDRA) == random_trees.HYDRA27
    physical = [-1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 7, 8, 9, 9, 9, 12, 13, 14, 14, 14, 17, 18, 19,
                23, 24, 25, 26, 28, 29, 30]  # fmt: skip
    masked = [bit + 1 for bit in range(31) if not 0x7ABDFFFF >> bit & 1]
    order = [row for row in range(32) if row not in masked] + masked
    assert list(WIDE) == random_trees.permute(physical, order)


def test_truth_is_the_oracles_and_native_is_near_it():
    """Trees of different sizes in any packing, every instance by itself."""
    rng = np.random.default_rng(0)
    trees = [random_parents(rng, size, 11) for size in (1, 9, 32)]
    drawn, R = draw(TINY, [1]), draw_states(TINY, [1])
    truth = along(R.astype(np.float64), trees, drawn, exact)
    decoded = along(R, trees, drawn, native)
    assert decoded.states.dtype == np.float32
    for i in range(TINY.layers):
        for b, parents in enumerate(trees):
            rows = [getattr(drawn, name)[i, b, : len(parents)] for name in "q k v g beta".split()]
            outputs, states = oracle.delta_rule_tree(R[i, b], parents, *rows)
            for nodes, tolerance in ((truth, 1e-12), (decoded, 3e-6)):
                for made, expected in ((nodes.outputs, outputs), (nodes.states, states)):
                    made = made[: len(parents), i, b]
                    np.testing.assert_allclose(made, expected, tolerance, tolerance)


def test_random_trees_are_packed_in_any_order_and_never_too_deep():
    rng, late = np.random.default_rng(2), 0
    for _ in range(50):
        parents = random_parents(rng, int(rng.integers(2, 40)), 5)
        Tree.from_parents(list(range(len(parents))), parents, max_depth=5)
        late += any(above > row for row, above in enumerate(parents))
    assert late > 25


def test_the_rule_is_lumotrees():
    """1.10 E_native + 2^-24 M + 2^-149, RMS and largest alike; what is no number never passes."""
    allowed = 1.10 * 3e-7 + 2.0 * 2.0**-24 + 2.0**-149
    decoded = Errors(*(np.array([x]) for x in (3e-7, 3e-7, 1.0, 2.0)))
    for rms, largest, passes in ((0.999, 0.999, True), (1.001, 0.5, False), (0.5, 1.001, False)):
        made = Errors(*(np.array([x]) for x in (rms * allowed, largest * allowed, 1.0, 2.0)))
        assert STRICT.passes(made, decoded).tolist() == [passes]
        np.testing.assert_allclose(STRICT.ratios(made, decoded), [[rms], [largest]])
    zero = np.zeros((1, 4))
    for bad in (np.nan, np.inf, -np.inf):
        found = errors(np.array([[0.0, bad, 0.0, 0.0]], np.float32), zero, 1)
        assert not STRICT.passes(found, errors(zero, zero, 1)).any()


def test_every_policy_is_green():
    report = run([cls() for cls in REGISTRY.values()])
    assert report.green, report.red
    (_, protocol), (_, steps), (_, controls) = report.tables
    assert protocol[0]["outputs bitwise"] == "3,004 and 3,018 of 3,072"
    mine = {(row["policy"], row["split"]): row for row in protocol}
    assert mine["replay", "held-out"]["outputs bitwise"] == f"{6 * 32} of {6 * 32}"
    assert mine["solve_replay", "calibration"]["states bitwise"] == f"{6 * 28} of {6 * 28}"
    assert mine["replay", "held-out"]["1.10 E_native rule"] == f"{6 * 60} of {6 * 60}"
    wrote = {row["policy"]: row["verifies that wrote"] for row in steps}
    assert [name for name, count in wrote.items() if count] == ["fused", "ring"]
    assert all(row["sibling"] == "3 of 3" and row["false alarms"] == "0 of 3" for row in controls)
    assert {check.where.get("layer") for check in report.checks} == {None, 0, 1}


def test_random_shapes_are_audited():
    """More rows, more value than key heads, and one sequence that is away in one step."""
    shape = Shape(2, 1, key_heads=2, value_heads=4, key_dim=8, value_dim=16, rows=40, depth=33)
    report = run([WY()], settings=dataclasses.replace(SETTINGS, random=(shape,), journeys=2))
    assert report.green, report.red
    assert {row["shape"] for row in report.tables[1][1]} == {str(TINY), str(shape)}


@pytest.mark.parametrize(
    "policy, found",
    [
        (audited.Forgetful(), {"states"}),
        (audited.Rounding(), {"states"}),
        (audited.Restless(), {"idle sequences that changed"}),
        (audited.Leaking(), {"changed by off-path rows: huge outputs"}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_wrong_policy_is_red(policy, found):
    names = red(run([policy]))
    assert found <= names
    assert "runs whose bytes differ" not in names
    if policy.name in ("restless", "leaking"):  # and nothing else
        assert names == found


def test_a_cursor_that_is_wrong_at_second_commits_is_found_in_later_steps():
    """One step, or two, show nothing: behind the end of a new ring are zeros."""
    report = run([audited.TwiceAhead(rows=40)])
    places = [check.where for check in report.red if check.name.startswith(("outputs", "states"))]
    assert places and all("steps" in where for where in places)


def test_fresh_processes_give_the_same_bytes_or_are_red():
    settings = dataclasses.replace(SETTINGS, processes=1, runs=2)
    report = run([WY(), audited.ByProcess()], settings=settings)
    (differ,) = report.red
    assert (differ.subject, differ.name) == ("by_process", "runs whose bytes differ")
    (check,) = [c for c in report.checks if (c.subject, c.name) == ("wy", differ.name)]
    assert check.note == "6 runs of 2 blocks, in 1 fresh processes"


def test_what_a_fresh_process_raised_is_red_where_it_was_raised():
    """Of two policies that both ran here; no process runs."""
    subjects = [Subject(name, *[None] * 2, digests=[["ab"], ["cd"]]) for name in ("one", "other")]
    reason = "RuntimeError, raised at audited_policies.py:1 in plan"
    process = SimpleNamespace(result=lambda: [["ab", "cd"], reason])
    settings = dataclasses.replace(SETTINGS, processes=1)
    stays = dict.fromkeys(("one", "other"))
    repeats(subjects, stays, [process], settings, [(0, 0, 0), (0, 1, 0)], lambda what: None)
    (same,), (raised,) = (subject.checks for subject in subjects)
    assert same.green and same.note == "4 runs of 2 blocks, in 1 fresh processes"
    assert (raised.name, raised.note, raised.green) == (RAISED, reason, False)
    assert subjects[0].runs and not subjects[1].runs


def test_a_users_policy_of_a_notebook_is_audited_in_one_call(monkeypatch):
    """Its class cannot travel: it is run anew here, and the report says so."""
    monkeypatch.setattr(audited.Own, "__module__", "__main__")
    report = run([audited.Own()], settings=dataclasses.replace(SETTINGS, processes=1))
    assert report.green, report.red
    assert report.tables[0][1][1]["gated by"] == "solved / rebuilt"
    (check,) = [check for check in report.checks if check.name == "runs whose bytes differ"]
    assert "Own is defined in __main__, which a fresh process cannot import" in check.note


@pytest.mark.parametrize(
    "policies, message",
    [
        ([], "there is no policy to audit, expected at least one"),
        (["wy"], r"a policy is an object, got the name 'wy': make_policy\('wy'\) makes it one"),
        ([WY], r"WY \(a class\) is no policy: it must be an object, call it with its settings"),
        ([7], r"int is no policy: it lacks name, implementation, init\(\), plan\(\)"),
        ([WY(), WY()], "policy wy is given twice"),
        ([audited.Unhashable()], "policy 'own' cannot be hashed.*frozen dataclass"),
    ],
)
def test_what_is_no_policy_is_named_in_one_line(policies, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(policies)
    assert "\n" not in str(caught.value)


def test_memory_that_cannot_be_is_red():
    """Plans and statistics add up what ``buffers()`` says."""
    assert wrong_buffers(audited.Own(), TINY) == []
    for policy in REGISTRY.values():
        assert wrong_buffers(policy(), TINY) == []
    found = wrong_buffers(audited.Unsized(), TINY)
    assert set(found) == {"scratch: -1", "scratch: -32", "ring: 1.5", "ring: 4.5", "rest: True"}
    (check,) = run([audited.Unsized()]).red
    assert check.name == "buffers() that are no bytes" and check.value == 5
    assert "scratch: -1, ring: 1.5" in check.note and "\n" not in check.note


def test_a_name_that_is_another_classs_is_told_apart():
    """A policy that inherits its name would be reported as the one that it comes from."""

    class Mine(WY):
        pass

    class Taken(audited.Own):
        name = "wy"

    assert [label_of(p) for p in (WY(), Mine(), Mine("ieee", "auto"), Taken(), audited.Own())] == [
        "wy",
        "wy (Mine)",
        "wy (Mine)@implementation=auto",
        "wy (Taken)",
        "own",
    ]
    assert label_of(audited.Unhashable()) == "own (Unhashable)"
    assert step.Subject(Mine(), MTP("chain2"), RULES["match"]).name == "wy (Mine)/mtp:chain2"


def test_a_policy_that_raises_is_red_and_the_others_are_audited():
    """Whatever it raises, wherever: when it is traced, or in one shape alone."""
    small = dataclasses.replace(TINY, rows=8, depth=7)
    settings = dataclasses.replace(SETTINGS, random=(small,))
    report = run(
        [audited.Halved(), audited.Growing(), audited.Broken(), audited.Narrow()],
        settings=settings,
    )
    said = {check.subject: check for check in report.red}
    assert len(said) == len(report.red)
    assert all(check.name == RAISED for check in report.red)
    place = "raised at audited_policies.py:"
    for name, where, message in (
        ("halved", "while", "expected (2, 3, 32, 2, 8) and float32"),
        ("growing", "while", "the carry after commit() has leaves"),
        ("broken", "while", f"KeyError: 'no such plan', {place}"),
        ("narrow", "shape", f"ValueError: too narrow, {place}"),
    ):
        assert message in said[name].note and where in said[name].where, said[name]
        assert "\n" not in str(said[name])
    kept = {check.name.split(",")[0] for check in report.checks if check.subject == "narrow"}
    assert {"outputs", "states", RAISED} <= kept  # what was checked before it raised
    assert "RED" in str(report)


def test_settings_that_cannot_be_are_named():
    for change, message in (
        ({"steps": 4}, "steps is 4, expected at least 5: a ring of two commits"),
        ({"sets": 0}, "sets is 0, expected at least 1"),
        ({"shape": dataclasses.replace(TINY, rows=28)}, "shape has 28 rows and depth 11"),
        ({"controls": dataclasses.replace(TINY, layers=1)}, "controls needs two layers"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SETTINGS, **change)
    with pytest.raises(ValueError, match="3 value heads do not share 2 key heads evenly"):
        Shape(key_heads=2, value_heads=3)


def test_what_gates_follows_the_precision():
    """Coarser products have their own bounds; what is replayed stays strict."""
    assert (promise_of(WY()).outputs, promise_of(WY()).states) == (SOLVED, REBUILT)
    loose = promise_of(WY(precision="tf32"))
    assert (loose.outputs, loose.states, loose.exact) == (*[RELATIVE["tf32"]] * 2, False)
    replayed = promise_of(SolveReplay(precision="bf16x3"))
    assert (replayed.outputs, replayed.states) == (RELATIVE["bf16x3"], STRICT)
