"""step_cost at the smallest sizes: rows, gates, resumption, planted faults."""

import dataclasses

import pytest
from lab_cases import FAULTS, context, rows_of

from treejax.ablation import step_cost_peer
from treejax.ablation.rows import is_time
from treejax.ablation.step_cost import StepCost
from treejax.ablation.step_cost_timing import PHASES
from treejax.policies import REGISTRY

MODEL = {
    "layers": 3,
    "attention_every": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "heads": 4,
    "key_value_heads": 2,
    "head_dim": 8,
    "value_heads": 4,
    "key_heads": 2,
    "key_dim": 8,
    "value_dim": 8,
    "vocabulary": 211,
    "dtype": "float32",
}
CONTEXTS = [16, 40]  # everywhere: states of one size share their programs
GROUP = {"contexts": CONTEXTS, "arms": ["plain", "wy 2,1", "wy 2,1 no_attention"], "loop": True}
TOML = {
    "seed": 0,
    "repeats": 1,
    "lengths": [2, 3],
    "lot": 1,
    "calls": 2,
    "rounds": 2,
    "model": MODEL,
    "groups": [GROUP],
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The experiment, its folder and its rows."""
    experiment, folder = StepCost.from_toml(TOML, "small.toml"), tmp_path_factory.mktemp("out")
    return experiment, folder, rows_of(experiment, context(folder))


def test_every_arm_is_green_beside_plain(ran):
    _, _, rows = ran
    places = [(row["arm"], row["context"]) for row in rows]
    # Lot by lot, plain with the first.
    assert sorted(places[:4]) == [("plain", 16), ("plain", 40), ("wy 2,1", 16), ("wy 2,1", 40)]
    assert places[4:] == [("wy 2,1 no_attention", 16), ("wy 2,1 no_attention", 40)]
    for row in rows[4:]:  # on a CPU verify attends through XLA anyway
        assert row["gate"] == "not run" and "through XLA here anyway" in row["problem"]
    for row in rows[:4]:
        assert row["gate"] == "green" and row["rows"] == 296 and row["batch"] == 1
        assert row["logits_error"] < 1e-5 and row["native_error"] < 1e-5
        assert row["state_error"] < 1e-5 and row["conv_error"] < 1e-5 and row["kv_error"] < 1e-5
        assert row.get("bitwise") is (None if row["arm"] == "wy 2,1" else True)
        assert all(row[f"{part}_ms"] > 0 for part in (*PHASES, "step", "visit"))
        assert row["times_plain"] == row["step_ms"] / row["plain_step_ms"]
        assert row["compile_s"] > 0 and row["temporary_mib"] > 0 and row["state_mib"] > 0
        # A context is data: attention rows are all that is read more of.
        more = 2 * 4 * 1 * (row["context"] - 16) * 2 * 8
        assert row["kv_mb"] == pytest.approx((2 * 4 * 16 * 2 * 8 + more) / 1e6)
        if row["arm"] == "plain":
            assert row["nodes"] == 0 and row["speedup_at_1"] == pytest.approx(1.0)
            assert row["logits_error"] == 0.0 and "stranger_error" not in row
        else:
            assert row["nodes"] == 4 and row["depth"] == 2 and row["stranger_error"] > 0.1
            rate = {n: row[f"tokens_per_s_at_{n}"] / row[f"speedup_at_{n}"] for n in (2, 3)}
            assert rate[2] == pytest.approx(rate[3])  # both over plain's


def test_tables_summary_and_figures_hold_what_was_measured(ran):
    experiment, folder, rows = ran
    lines = experiment.summary(rows)
    assert len(lines) == len(rows)
    for line in lines:
        assert line["break_even_length"] == line.get("times_plain")
        assert line["break_even_with_head"] is None  # no arm drafts with the head
    head = {"arm": "wy 2,1 mtp100", "draft_ms": 5.0, "gate": "green", "problem": None}
    row = next(row for row in rows if row["arm"] == "wy 2,1")
    lines = experiment.summary([*rows, row | head])
    line = next(line for line in lines if line["arm"] == "wy 2,1")
    own = row["step_ms"] - row["draft_ms"] + 5.0
    assert line["break_even_with_head"] == pytest.approx(own / row["plain_step_ms"])
    counts = [table.row_count for table in experiment.tables(rows)]
    assert counts == [6, 4, 2, 4, 2]  # steps, facts, gates, decoding, switches
    experiment.figures(rows, folder)
    assert (folder / "step_cost.svg").exists() and (folder / "step_cost_decoding.svg").exists()


def test_a_resumed_run_measures_what_is_missing_beside_plain(ran, tmp_path):
    experiment, _, rows = ran
    cells = [cell for cell in experiment.cells(context(tmp_path)) if cell.arm == "wy 2,1"]
    again = rows_of(experiment, context(tmp_path), cells[:1])
    assert [(row["arm"], row["context"]) for row in again] == [("wy 2,1", 16)]
    assert again[0]["gate"] == "green" and again[0]["times_plain"] > 0
    # Out of time: the lot under way comes to its end and no other begins.
    over = dataclasses.replace(context(tmp_path), over=lambda: True)
    some = [row["arm"] for row in rows_of(experiment, over)]
    assert some == [row["arm"] for row in rows[:4]]


@pytest.mark.parametrize("fault", ["sibling", "swapped", "broken"])
def test_a_planted_fault_turns_its_row_red(fault, tmp_path, monkeypatch):
    monkeypatch.setitem(REGISTRY, fault, FAULTS[fault])
    phases = fault == "swapped"  # the others fail as whole steps
    group = {"contexts": CONTEXTS, "arms": [f"{fault} 2,1"], "phases": phases}
    experiment = StepCost.from_toml(TOML | {"groups": [group]}, "small.toml")
    row, _ = rows_of(experiment, context(tmp_path))
    said = {
        "sibling": ("state_error is",),
        "swapped": ("logits_error is", "native_error is", "state_error is"),
        "broken": ("NotImplementedError: planted",),
    }
    assert row["gate"] == "red"
    assert all(each in row["problem"] for each in said[fault]), row["problem"]
    assert not [name for name in row if is_time(name)]
    (line,) = experiment.summary([row])
    assert line["gate"] == "red" and line.get("step_ms") is None
    assert experiment.tables([row])[0].row_count == 1


def test_a_fault_of_the_whole_step_alone_is_seen(tmp_path, monkeypatch):
    """Phases that are right say nothing of the program that is timed."""
    from treejax.ablation import step_cost_switches

    whole = step_cost_switches.step

    class Late:
        lower = staticmethod(whole.lower)

        def __call__(self, config, drafter, *rest):
            carry, emission = whole(config, drafter, *rest)
            if drafter.name == "scripted":  # the convolution history of the step before
                carry = carry.replace(state=carry.state.replace(conv=1.01 * carry.state.conv))
            return carry, emission

    monkeypatch.setattr(step_cost_switches, "step", Late())
    group = {"contexts": CONTEXTS, "arms": ["wy 2,1"], "phases": False}
    experiment = StepCost.from_toml(TOML | {"groups": [group]}, "small.toml")
    row, _ = rows_of(experiment, context(tmp_path))
    assert row["gate"] == "red" and "conv_error is" in row["problem"]


def test_the_peer_says_why_it_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(step_cost_peer.importlib.util, "find_spec", lambda name: None)
    table = TOML | {"peer": {"contexts": [16], "tokens": 4}}
    experiment = StepCost.from_toml(table, "small.toml")
    cells = [cell for cell in experiment.cells(context(tmp_path)) if cell.arm == "transformers"]
    (row,) = rows_of(experiment, context(tmp_path), cells)
    assert row["gate"] == "not run" and "torch and transformers not installed" in row["problem"]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"arms": ["wy"]}, "arm 'wy' has 1 words"),
        ({"arms": ["best 2,1"]}, "arm 'best' names policy 'best'"),
        ({"arms": ["wy best9x3"]}, "has no fixed shape"),
        ({"arms": ["wy 2,1 no_luck"]}, "ends in 'no_luck'"),
        ({"arms": ["wy 2,1 mtp"], "batch": 2}, "expected batch 1"),
        ({"arms": ["wy 2,1", "wy 2,1"]}, "asked for twice"),
        ({"arms": ["wy 2,1"], "contexts": []}, "groups need at least one"),
        ({"arms": ["wy 2,1"], "batch": 0}, r"groups\[0\].batch is 0, expected an integer"),
        ({"arms": ["wy 2,1"], "lengths": [3, 2]}, "lengths are"),
        ({"arms": ["wy 2,1"], "lengths": [3, 4]}, "lengths hold 4, and no tree of their arms emit"),
        ({"arms": ["wy chain1"]}, "lengths hold 3, and no tree of their arms emits more than 2 to"),
        ({"arms": ["plain", "wy 2,1 mtp"], "lengths": [2]}, "lengths hold 2, and no tree"),
        ({"arms": ["wy 2,1"], "lengths": [3]}, "every group has lengths of its own"),
    ],
)
def test_what_no_run_could_do_is_refused(change, said):
    with pytest.raises(ValueError, match=said) as caught:
        StepCost.from_toml(TOML | {"groups": [GROUP | change]}, "small.toml")
    assert str(caught.value).startswith("small.toml") and "\n" not in str(caught.value)


def test_a_length_need_be_reached_by_one_tree_alone():
    """And those that nobody asked for by none."""
    arms = {"arms": ["plain", "wy chain1", "wy chain2"]}
    StepCost.from_toml(TOML | {"groups": [GROUP | arms]}, "small.toml")
    other = {key: value for key, value in TOML.items() if key != "lengths"}
    StepCost.from_toml(other | {"groups": [GROUP | {"arms": ["wy chain1"]}]}, "small.toml")


@pytest.mark.parametrize("name", ["repeats", "rounds", "lot"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"small.toml: {name} is -3, expected an integer"):
        StepCost.from_toml(TOML | {name: -3}, "small.toml")
    with pytest.raises(ValueError, match="model.vocabulary is 2"):
        StepCost.from_toml(TOML | {"model": TOML["model"] | {"vocabulary": 2}}, "small.toml")
