"""The automatic policy: the table it is read from, the nearest place, and what it says."""

import logging

import jax
import pytest
import tiny

import treejax
from treejax.ablation.lab_operands import Sizes
from treejax.ablation.measured import places
from treejax.policies import REGISTRY, make_policy
from treejax.policies.choose import DEFAULT, choose_policy, parse_table, read_table

DEVICE = jax.devices()[0].device_kind


def place(batch, nodes, device=DEVICE, dtype="float32", **ms):
    config = tiny.CONFIG
    return {
        "device": device,
        "implementation": "xla",
        "layers": len(config.linear_layers),
        "heads": [config.linear_num_key_heads, config.linear_num_value_heads],
        "widths": [config.linear_key_head_dim, config.linear_value_head_dim],
        "dtype": dtype,
        "batch": batch,
        "nodes": nodes,
        "names": list(ms),
        "ms": list(ms.values()),
    }


TABLE = parse_table(
    [
        place(1, 8, replay=1.0, wy=2.0, ring=3.0, snapshot=4.0),
        place(8, 8, replay=3.0, wy=2.0),
        place(1, 64, replay=9.0, ring=1.5, wy=2.0),
        place(1, 8, dtype="bfloat16", per_path=0.1),
        place(1, 8, device="another", snapshot=0.1),
    ]
)


def test_the_fastest_that_was_measured_here():
    assert choose_policy(tiny.CONFIG, 1, 8, "xla", TABLE).policy == "replay"
    assert choose_policy(tiny.CONFIG, 8, 8, "xla", TABLE).policy == "wy"
    assert choose_policy(tiny.CONFIG, 1, 64, "xla", TABLE).policy == "ring"
    why = choose_policy(tiny.CONFIG, 1, 8, "xla", TABLE).why
    assert why.startswith(f"1 ms a step (wy 2, ring 3) on {DEVICE} at ")
    assert why.endswith("batch 1, 8 nodes")


@pytest.mark.parametrize(
    "batch, nodes, policy", [(2, 8, "replay"), (6, 9, "wy"), (1, 40, "ring"), (64, 1, "wy")]
)
def test_elsewhere_the_nearest_place_which_is_said(batch, nodes, policy):
    pick = choose_policy(tiny.CONFIG, batch, nodes, "xla", TABLE)
    assert pick.policy == policy
    assert pick.why.endswith(f", batch {batch}, {nodes} nodes")
    assert ", the nearest measured to " in pick.why


def test_a_device_without_measurements_gets_the_default():
    pick = choose_policy(tiny.CONFIG, 1, 8, "xla", TABLE[4:])
    assert pick == (DEFAULT, f"the default: nothing was measured on {DEVICE} with xla")


def test_what_ships_is_a_table_of_known_policies():
    assert all(name in REGISTRY for place in read_table() for name in place.names)
    # Of two records of one place the second would never be read.
    places = [(place.device, place.implementation, place.place) for place in read_table()]
    assert len(set(places)) == len(places)


def test_rows_of_an_ablation_become_places():
    """Medians of green rows; arms with settings of their own are left out, and those that
    are red at any batch."""
    config = tiny.CONFIG
    sizes = Sizes(
        layers=len(config.linear_layers),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        dtype="float32",
    )
    timed = [
        ("replay", 8, 0.1),
        ("wy", 1, 3.0),
        ("wy", 1, 1.0),
        ("wy", 1, 2.0),
        ("ring", 8, 1.0),
        ("ring:rows=9", 1, 0.1),
    ]
    rows = [
        {"arm": arm, "batch": batch, "gate": "green", "implementation": "xla", "step_ms": ms}
        for arm, batch, ms in timed
    ]
    rows.append({"arm": "replay", "batch": 1, "gate": "red", "problem": "planted"})
    made = parse_table(places(rows, sizes, DEVICE, nodes=8))
    assert [(p.batch, p.nodes, p.names, p.ms) for p in made] == [
        (1, 8, ("wy",), (2.0,)),
        (8, 8, ("ring",), (1.0,)),
    ]
    assert choose_policy(config, 8, 8, "xla", made).policy == "ring"


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="place 0: unknown key 'speed'"):
        parse_table([place(1, 8, wy=1.0) | {"speed": 3}])
    with pytest.raises(ValueError, match="batch 1, 8 nodes: 1 policies, 2 times"):
        parse_table([place(1, 8, wy=1.0) | {"ms": [1.0, 2.0]}])
    with pytest.raises(ValueError, match="'auto' depends on batch and tree: complete and stream"):
        make_policy("auto")


@pytest.mark.parametrize("place", [(0, 0), (0, 8), (1, 0), (1.5, 8), (True, 8), (1, None)])
def test_a_batch_or_tree_that_cannot_be_is_refused(place):
    with pytest.raises(ValueError, match=r"(batch|nodes) is .*, expected an integer of at least 1"):
        choose_policy(tiny.CONFIG, *place, "xla", TABLE)


def test_generation_by_default_says_what_it_picked(caplog):
    model = tiny.model()
    with caplog.at_level(logging.INFO, "treejax"):
        made = treejax.complete(model, [1, 2, 3], max_tokens=3, drafter=None, implementation="xla")
    pick = choose_policy(model.config, 1, 1, "xla")
    assert made.stats.policy == pick.policy
    assert f"policy {pick.policy}: {pick.why}" in caplog.text
