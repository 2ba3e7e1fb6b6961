"""An envelope's numbers: where they come from, and that they cannot change unnoticed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from treejax.audit.envelope import (
    CEILINGS,
    FLOORS,
    LONG_CEILING,
    LUMOTREE,
    Envelope,
    bounds_from,
    identity,
    long_bounds_from,
)
from treejax.model import Model

MODEL = Model(tiny.random_params(tiny.CONFIG), tiny.CONFIG)  # nothing is compiled for it
WORST = {
    "R": np.array([1e-6, 3e-6]),
    "C": np.array([0.0, 1e-6]),
    "new K": np.array([1e-6]),
    "old K": np.array([0.0]),
    "divergence": np.array([1e-11]),
    "row logits": np.array([1e-7]),
    "drafter": np.array([1e-6]),
    "logits": np.array([1e-5]),
}


LONGER = WORST | {"R": np.array([1e-5, 3e-6])}


def made(model):
    return Envelope(bounds_from("float32", WORST, 4.0), {"repeat": {"R": 0.0}}, identity(model))


def made_long(model, tokens=500):
    """One that was calibrated with a long run."""
    short = made(model)
    return dataclasses.replace(
        short,
        long=long_bounds_from("float32", LONGER, 4.0),
        provenance={**short.provenance, "long run": {"tokens": tokens}},
    )


def test_bounds_are_floor_plus_factor_times_the_controls():
    bounds, floor = bounds_from("float32", WORST, 4.0), FLOORS["float32"]
    assert bounds["R"] == pytest.approx([floor["relative"] + 4e-6, floor["relative"] + 12e-6])
    assert bounds["divergence"] == pytest.approx([floor["nats"] + 4e-11])
    assert bounds["margin"] == pytest.approx([2e-5])
    assert "logits" not in bounds


def test_bounds_of_long_runs_are_the_same_sum_and_stay_small():
    """An error of 1e-4 is caught unless the control itself lies near it."""
    floor = FLOORS["float32"]["relative"]
    worst = WORST | {"R": np.array([1e-5, 3.6e-5, 9e-5])}
    bounds, free = (make("float32", worst, 4.0) for make in (long_bounds_from, bounds_from))
    assert bounds["R"] == pytest.approx([floor + 4e-5, LONG_CEILING, 1.8e-4])
    assert free["R"][1] > 1e-4 > LONG_CEILING
    assert {name: made for name, made in bounds.items() if name != "R"} == {
        name: made for name, made in free.items() if name != "R"
    }
    assert long_bounds_from("bfloat16", worst, 4.0) == bounds_from("bfloat16", worst, 4.0)


def test_float32_is_ten_times_tighter_than_lumotree_or_refused():
    for unit, theirs in LUMOTREE.items():
        assert CEILINGS["float32"][unit] <= theirs / 10
    for name, value in (("R", 1e-3), ("divergence", 0.01), ("C", float("nan"))):
        with pytest.raises(ValueError, match="no envelope of float32 can be calibrated"):
            bounds_from("float32", WORST | {name: np.array([value])}, 4.0)


def test_a_file_comes_back_and_an_edited_one_does_not(tmp_path):
    envelope, path = made_long(MODEL), tmp_path / "envelope.json"
    envelope.save(path)
    again = Envelope.load(path)
    assert again.bounds == envelope.bounds and again.digest == envelope.digest
    assert again.long == envelope.long and again.over_long_runs().bounds == envelope.long
    text = path.read_text(encoding="utf-8")
    for field in ("bounds", "controls", "provenance", "long"):
        said = json.loads(text)
        inner = said[field]
        first = next(iter(inner))
        inner[first] = {"R": 1.0} if field in ("controls", "provenance") else [1.0]
        path.write_text(json.dumps(said), encoding="utf-8")
        with pytest.raises(ValueError, match="was changed after it was calibrated") as caught:
            Envelope.load(path)
        assert "\n" not in str(caught.value)
    said = json.loads(text) | {"more": 1}
    path.write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(ValueError, match="was changed"):
        Envelope.load(path)


def test_one_without_a_long_run_is_written_as_ever_and_serves_no_long_run(tmp_path):
    """Of a quick profile, or of before long runs had bounds: such files hold no "long"."""
    path = tmp_path / "envelope.json"
    made(MODEL).save(path)
    assert "long" not in json.loads(path.read_text(encoding="utf-8"))
    short = Envelope.load(path)
    short.check_use(MODEL)
    with pytest.raises(ValueError, match="bounds for a long run of 0 tokens, expected 500"):
        short.check_use(MODEL, long_tokens=500)
    made_long(MODEL).check_use(MODEL, long_tokens=500)
    made_long(MODEL).check_use(MODEL)
    with pytest.raises(ValueError, match="of 500 tokens, expected 10,000: calibrate again"):
        made_long(MODEL).check_use(MODEL, long_tokens=10_000)


def test_what_is_no_envelope_is_said_in_one_line(tmp_path):
    path = tmp_path / "envelope.json"
    with pytest.raises(ValueError, match="no such envelope"):
        Envelope.load(path)
    for text in ("{}", "[]", "not json", '{"digest": "x", "bounds": 3}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="is no envelope"):
            Envelope.load(path)


def test_it_serves_the_model_it_was_calibrated_for_and_no_other():
    model = MODEL
    envelope = made(model)
    envelope.check_use(model)
    scaled = {**model.params, "norm": model.params["norm"] + 1e-3}
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    longer = dataclasses.replace(model.config, max_position_embeddings=1024)
    for other, what in (
        (Model(scaled, model.config), "model"),
        (Model(narrow, model.config), "dtype"),
        (Model(model.params, longer), "config"),
    ):
        with pytest.raises(ValueError, match=f"calibrated for another {what}"):
            envelope.check_use(other)


def test_one_without_a_bound_for_every_surface_is_refused():
    """What an earlier version wrote, say: a surface without a bound would pass unseen."""
    model = MODEL
    whole = made(model)
    less = {name: values for name, values in whole.bounds.items() if name != "row logits"}
    with pytest.raises(ValueError, match="no bounds for row logits, expected all of what is"):
        Envelope(less, whole.controls, whole.provenance).check_use(model)
    long = made_long(model)
    less = {name: values for name, values in long.long.items() if name != "C"}
    with pytest.raises(ValueError, match="no bounds for C, expected all of what is"):
        dataclasses.replace(long, long=less).check_use(model, long_tokens=500)
