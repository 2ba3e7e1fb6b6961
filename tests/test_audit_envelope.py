"""An envelope's numbers: where they come from, and that they cannot change unnoticed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from treejax.audit.envelope import CEILINGS, FLOORS, LUMOTREE, Envelope, bounds_from, identity
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


def made(model):
    return Envelope(bounds_from("float32", WORST, 4.0), {"repeat": {"R": 0.0}}, identity(model))


def test_bounds_are_floor_plus_factor_times_the_controls():
    bounds, floor = bounds_from("float32", WORST, 4.0), FLOORS["float32"]
    assert bounds["R"] == pytest.approx([floor["relative"] + 4e-6, floor["relative"] + 12e-6])
    assert bounds["divergence"] == pytest.approx([floor["nats"] + 4e-11])
    assert bounds["margin"] == pytest.approx([2e-5])
    assert "logits" not in bounds


def test_float32_is_ten_times_tighter_than_lumotree_or_refused():
    for unit, theirs in LUMOTREE.items():
        assert CEILINGS["float32"][unit] <= theirs / 10
    for name, value in (("R", 1e-3), ("divergence", 0.01), ("C", float("nan"))):
        with pytest.raises(ValueError, match="no envelope of float32 can be calibrated"):
            bounds_from("float32", WORST | {name: np.array([value])}, 4.0)


def test_a_file_comes_back_and_an_edited_one_does_not(tmp_path):
    envelope, path = made(MODEL), tmp_path / "envelope.json"
    envelope.save(path)
    again = Envelope.load(path)
    assert again.bounds == envelope.bounds and again.digest == envelope.digest
    text = path.read_text(encoding="utf-8")
    for field in ("bounds", "controls", "provenance"):
        said = json.loads(text)
        inner = said[field]
        first = next(iter(inner))
        inner[first] = [1.0] if field == "bounds" else {"R": 1.0}
        path.write_text(json.dumps(said), encoding="utf-8")
        with pytest.raises(ValueError, match="was changed after it was calibrated") as caught:
            Envelope.load(path)
        assert "\n" not in str(caught.value)
    said = json.loads(text) | {"more": 1}
    path.write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(ValueError, match="was changed"):
        Envelope.load(path)


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
