"""Reports made by hand, for what shows them."""

from treejax.audit.base import Check, Report

SURFACES = {"R": 0.3, "C": 0.05, "new K": 0.1, "old K": 0.0, "divergence": 0.02, "drafter": 0.7}
BOUND = 1e-5


def checks():
    """Three audits, all green; each surface uses up its share of the bound at most."""
    made = []
    for name, part in SURFACES.items():
        for cycle in range(4):
            for layer in range(3):
                value = BOUND * part * (cycle + layer + 1) / 6
                where = {"prefix": cycle % 2, "cycle": cycle, "layer": layer}
                made.append(Check("continuation", "wy/mtp:chain3", name, where, value, BOUND))
    for step in range(6):
        p = 0.15 * (step + 1)
        made.append(Check("sampler", "traversal", "joint G-test", {"step": step}, p, 1e-4, True))
    made.append(Check("component", "wy", "states", {"layer": 1}, 0.9e-6, 1e-6, note="<&> \u00e9"))
    return tuple(made)


def planted():
    """A fault that is caught in both policies, one that is missed once, one of a sampler."""
    found = {"wy/mtp with stale root": 1.0, "ring/mtp with stale root": 0.99, "same_coin": 1.0}
    found["wy/mtp with KV remap"] = 0.25
    for subject, share in found.items():
        where = {"seeds": 100}
        yield Check(
            "faults", subject, "detection power", where, share, 0.99, True, note="why & how"
        )


TABLE = (
    "Planted faults",
    (
        {"fault": "stale root", "caught": 1.0, "seeds": 100, "green": True},
        {"fault": "KV remap", "caught": 0.25, "seeds": 100, "green": False},
    ),
)
FACTS = {
    "audited": {"policies": "wy", "model": "python-11m <script>"},
    "not audited": ["models in bfloat16"],
    "made with": {"jax": "0.11.2", "commit": None},
}


def green():
    return Report(checks(), (TABLE,), FACTS)


def red(*more):
    """``green`` and failed checks."""
    return Report((*checks(), *more), (TABLE,), FACTS)


NAN = Check("component", "wy", "outputs", {"layer": 2, "row": 7}, float("nan"), 1e-6)
REJECTED = Check("sampler", "block", "joint G-test", {"step": 0}, 1e-9, 1e-4, True)
