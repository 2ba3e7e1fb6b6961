"""draft_cost at the smallest sizes."""

import pytest
from lab_cases import context, rows_of

from treejax.ablation.draft_cost import DraftCost, HeadSizes, head_bytes

pytestmark = pytest.mark.compiles_fast

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "heads": 4,
    "key_value_heads": 2,
    "head_dim": 16,
    "vocabulary": 500,
    "dtype": "float32",
}
TOML = {
    "seed": 0,
    "repeats": 1,
    "drafts": ["mtp_tree:best6x3", "mtp:2,1"],
    "prefix": 32,
    "warm_up": 1,
    "rounds": 2,
    "sizes": SIZES,
}


def test_rows_stand_beside_the_chain_of_their_depth(tmp_path):
    experiment = DraftCost.from_toml(TOML, "small.toml")
    rows = rows_of(experiment, context(tmp_path))
    shapes = {row["arm"]: (row["nodes"], row["depth"]) for row in rows}
    assert shapes == {
        "mtp_tree:best6x3": (6, 3),
        "mtp:2,1": (4, 2),
        "mtp:chain3": (3, 3),
        "mtp:chain2": (2, 2),
    }
    read = head_bytes(HeadSizes(**SIZES).model(0))
    for row in rows:
        assert row["gate"] == "green" and row["problem"] is None and row["draft_ms"] > 0
        assert row["model_mb"] == pytest.approx(row["depth"] * read / 1e6) and row["model_ms"] > 0
    lines = {line["arm"]: line for line in experiment.summary(rows)}
    for arm, line in lines.items():
        chain = lines[f"mtp:chain{line['depth']}"]
        assert line["times_chain"] == line["draft_ms"] / chain["draft_ms"]
        assert line["times_chain"] == 1.0 or arm != f"mtp:chain{line['depth']}"
    (table,) = experiment.tables(rows)
    assert table.row_count == 4
    experiment.figures(rows, tmp_path)
    # A red chain takes the ratio with it, not the other figures.
    row = {"arm": "mtp:chain3", "batch": 1, "temperature": "0.0", "repeat": 0}
    red = row | {"gate": "red", "problem": "planted"}
    changed = [red if row["arm"] == "mtp:chain3" else row for row in rows]
    lines = {line["arm"]: line for line in experiment.summary(changed)}
    assert lines["mtp_tree:best6x3"]["times_chain"] is None
    assert lines["mtp_tree:best6x3"]["draft_ms"] > 0 and lines["mtp:2,1"]["times_chain"] > 0


@pytest.mark.parametrize("draft", ["suffix", "mtp+suffix:best9x4", "scripted:chain3", "budget"])
def test_drafters_of_other_things_than_head_passes_are_refused(draft):
    with pytest.raises(ValueError, match="is not made of head passes alone") as caught:
        DraftCost.from_toml(TOML | {"drafts": ["mtp:chain2", draft]}, "small.toml")
    assert str(caught.value).startswith("small.toml: draft") and "\n" not in str(caught.value)
