"""The tables of drafting, from made-up rows."""

import pytest

from treejax.ablation.drafting import BUDGETS, Drafting, column_of, label_of
from treejax.ablation.requests_report import accepted_by_depth

DRAFTS = ["mtp:chain4", "mtp:chain6", "mtp:chain5", "mtp:chain99", "budget", "suffix:best7x7"]
NODES = dict(zip(DRAFTS, (4, 6, 5, 99, 20, 7), strict=True))
TOML = {
    "seed": 0,
    "repeats": 2,
    "policy": "wy",
    "drafts": DRAFTS,
    "max_tokens": 8,
    "prompts": ["x"],
    "modes": [{"name": "greedy"}],
}
GREEDY = {"corpus": "a", "mode": "greedy", "prompt": "x"}


def row(draft, repeat, steps, accepted, proposed, decode_s):
    """A row in which every step proposes and the first accepted candidates are of depth 1."""
    nodes = NODES.get(draft, 0)
    measures = {
        "tokens": 21,
        "steps": steps,
        "drafts": steps if nodes else 0,
        "proposed": proposed,
        "accepted": accepted,
        "accepted_per_pos": (accepted,) if nodes else (),
        "tokens_per_s": 20 / decode_s,
        "decode_s": decode_s,
        "acceptance_length": 1 + accepted / steps if nodes else None,
        "compile_s": 0.0,
        "prefill_s": 0.1,
        "scratch_bytes": 0,
        "state_bytes": 0,
    }
    arm = f"wy/{draft}" if nodes else "plain"
    about = {"policy": "wy", "drafter": "x", "tree": "x", "nodes": nodes, "width": 1, "depth": 1}
    head = GREEDY | {"arm": arm, "repeat": repeat, "gate": "green", "problem": None}
    return head | about | {"implementation": "xla"} | measures


ROWS = [row(None, repeat, 20, 0, 0, 2.0) for repeat in (0, 1)]
for name in DRAFTS[:4] + DRAFTS[5:]:
    ROWS += [row(name, r, 10, NODES[name], 10 * NODES[name], 1.0) for r in (0, 1)]
# Chosen by the clock: the second repeat drafts more and accepts more.
ROWS += [row("budget", 0, 10, 5, 50, 1.0), row("budget", 1, 5, 10, 70, 0.5)]


@pytest.mark.parametrize(
    "arm, label",
    [
        ("plain", "plain"),
        ("wy/mtp:chain27", "mtp chain"),
        ("wy/mtp:2,1,1", "mtp widths"),
        ("wy/mtp:caterpillar5x3", "mtp caterpillar"),
        ("wy/mtp_tree@form=marginal:best27x12", "mtp_tree@form=marginal best"),
        ("wy/mtp+suffix:hydra3x2+4/2", "mtp+suffix hydra"),
        ("wy/budget", "budget"),
    ],
)
def test_arms_of_one_drafter_share_a_label(arm, label):
    assert label_of(arm) == label


def test_a_tree_stands_under_the_smallest_budget_that_holds_it():
    assert [column_of(n) for n in (1, 3, 4, 7, 16, 63, 64)] == [3, 3, 7, 7, 27, 63, None]


def test_the_largest_tree_of_a_column_is_shown():
    tables = {t.title: t for t in Drafting.from_toml(TOML, "small.toml").tables(ROWS)}
    shown = tables["nodes a step: a, greedy"]
    labels = list(shown.columns[0].cells)
    assert labels == ["mtp chain", "budget", "suffix best"]
    cells = [list(column.cells) for column in shown.columns[1:]]
    lines = {n: [column[i] for column in cells] for i, n in enumerate(labels)}
    assert lines["mtp chain"] == ["-", "6 (6)", "-", "-", "-"]  # neither 5 nor 4, and 99 is too big
    assert lines["suffix best"] == ["-", "7", "-", "-", "-"]
    assert lines["budget"] == ["-", "-", "-", "8 (20)", "-"]
    assert len(shown.columns) == 1 + len(BUDGETS)
    ratio = tables["times plain's tokens a second: a, greedy"]
    assert list(ratio.columns[2].cells) == ["2.00 (6)", "-", "2.00"]


def test_repeats_that_draft_otherwise_are_pooled():
    lines = {x["arm"]: x for x in Drafting.from_toml(TOML, "small.toml").summary(ROWS)}
    line = lines["wy/budget"]
    assert (line["steps"], line["proposed"], line["accepted"]) == (10, 50, 5)  # the first repeat's
    assert line["nodes_a_step"] == 120 / 15
    assert line["acceptance_length"] == 1 + 15 / 15
    assert line["node_use"] == 15 / 120 and line["first_accepted"] == 1.0
    assert accepted_by_depth([r for r in ROWS if r["arm"] == "wy/budget"]) == [1.0]
    assert lines["plain"]["acceptance_length"] is None and lines["plain"]["label"] == "plain"
    assert lines["wy/mtp:chain6"]["nodes_a_step"] == 6.0
    assert lines["wy/mtp:chain6"]["acceptance_length"] == 1.6
