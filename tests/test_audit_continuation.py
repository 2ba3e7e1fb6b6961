"""The continuation audit: green for what is right, red for what is not, on a small model."""

import dataclasses
import json
import time
from typing import ClassVar
from unittest.mock import ANY

import jax.numpy as jnp
import numpy as np
import pytest
from audit_cases import small

from treejax.audit import continuation
from treejax.audit.continuation import Envelope, Settings, calibrate, run
from treejax.audit.continuation.tightness import noise
from treejax.audit.continuation.verdict import WORDS, Tally
from treejax.audit.envelope import LUMOTREE
from treejax.audit.faults import REGISTRY as FAULTS
from treejax.audit.faults.recurrent import narrowed
from treejax.audit.prefixes import digest, prefixes
from treejax.audit.raised import RAISED
from treejax.audit.report import tightness
from treejax.audit.step import Subject
from treejax.audit.surfaces import EXACT, SURFACES
from treejax.drafters import MTP
from treejax.policies.base import Path
from treejax.policies.replay import Replay
from treejax.policies.ring import Ring
from treejax.policies.wy import WY
from treejax.steps.rules import REGISTRY as RULES
from treejax.steps.rules.match import Match
from treejax.tree import Tree, describe

SHORT = Settings(
    prefixes=2,  # as many as the long run has texts, so that both are served by the same programs
    length=24,
    shorter=3,
    cycles=4,
    long_tokens=256,
    long_every=24,
)
ONE_SCHEDULE = dataclasses.replace(
    SHORT, schedules=("cold",), long_tokens=0, fresh_process=False, tightness=False
)
DRAFTER = MTP("2,1")


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def envelope(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("envelope") / "envelope.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(continuation.long_control, "PIECE", 64)  # a text is two
        calibrate(model, SHORT).save(path)
    return Envelope.load(path)


def test_what_is_not_yet_compiled_is_left_when_an_audit_ends(model, envelope, monkeypatch):
    """Otherwise the process would go on until every subject's program is there."""
    begun = []

    def compile_slowly(*_):
        begun.append(time.monotonic())
        time.sleep(0.05)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(continuation.audit, "compile_step", compile_slowly)
    monkeypatch.setattr(continuation.audit, "plain_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, [Subject(WY(), DRAFTER, RULES["match"])] * 20, ONE_SCHEDULE, envelope)
    count = len(begun)
    time.sleep(0.5)
    assert len(begun) <= count + 1


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def report(model, envelope, told):
    subject = Subject(Ring(), DRAFTER, RULES["match"])
    return run(model, [subject], SHORT, envelope, lambda *what: told.append(what))


def test_fc_22_streams_of_256_tokens_are_plain_s(report):
    """Float32: the same tokens, in every schedule, process and in the long run."""
    assert report.green, report.red[:3]
    facts = report.facts["continuation"]["subjects"]["ring/mtp:2,1"]
    assert facts["near ties"] == 0
    assert facts["long run"]["tokens"] >= 256 and all(facts["long run"]["to the end"])
    assert facts["tokens"] > facts["steps"]  # drafts were accepted
    assert facts["never published"] == []
    tokens = [check for check in report.checks if check.name == WORDS["tokens"]]
    assert {check.where["schedule"] for check in tokens} == {
        *continuation.SCHEDULES,
        "fresh process",
        "long",
    }


def test_every_surface_layer_and_cycle_is_checked(model, report):
    linear, full = model.config.linear_layers, model.config.full_layers
    for schedule in continuation.SCHEDULES:
        for cycle in range(2 if schedule == "lengths" else SHORT.cycles):
            mine = [
                check
                for check in report.checks
                if check.where["schedule"] == schedule and check.where["cycle"] == cycle
            ]
            for surface in SURFACES:
                layers = [check.where.get("layer") for check in mine if check.name == surface]
                kinds = {"R": linear, "C": linear, "new K": full, "old K": full}
                assert layers == list(kinds.get(surface, [None]))
            assert {WORDS[name] for name in EXACT} <= {check.name for check in mine}
    names = {check.name for check in report.checks}
    assert {"bytes changed while sitting out", "arrays that a saved state lost"} <= names


def test_the_report_says_how_tight_it_is(report):
    tables = dict(report.tables)
    caught = {row["perturbed"]: row for row in tables["smallest perturbation caught"]}
    assert len(caught) == 2 * 9  # after the last schedule, and after the long run
    for name, row in caught.items():
        assert 0 < row["smallest caught"] < LUMOTREE["relative"] / 10, name
    assert 1e-5 < caught["R: one head, long run"]["smallest caught"] < 1e-4
    assert 0 < caught["logits: one row"]["its nats"] < LUMOTREE["nats"] / 10
    bounded = (*tables["envelope"], *tables["envelope of long runs"])
    bounded = [row for row in bounded if "margin" not in row["surface"]]
    for row in bounded:
        assert 0 < row["largest bound"] <= row["LumoTree"] / 10
    least = min(row["LumoTree"] / row["largest bound"] for row in bounded)
    assert tightness(report) == (ANY, least)
    for row in tables["envelope of long runs"]:
        assert 0 < row["of the short bound"] < 5 and "control long" in row
    assert len(tables["long run, by cycle"]) > 1
    json.dumps(report.as_json())


def test_the_long_run_is_held_by_bounds_of_its_own(model, report, envelope):
    """They come from a control as long, on other texts; nothing else is held by them."""
    assert envelope.long["R"] != envelope.bounds["R"]
    for check in report.checks:
        if check.name in SURFACES:
            bounds = envelope.long if check.where["schedule"] == "long" else envelope.bounds
            assert check.bound in bounds[check.name], check
    surfaces = {row["surface"] for row in dict(report.tables)["largest distances"]}
    assert surfaces == {*SURFACES, *(f"{name}, long run" for name in SURFACES)}
    control = envelope.provenance["long run"]
    assert (control["texts"], control["tokens"]) == (2, SHORT.long_tokens)
    texts = prefixes(model, "calibration", 2, SHORT.length, SHORT.seed + 1)
    assert control["prefixes"] == digest(texts)


def test_an_error_of_1e_4_in_one_head_is_caught_in_the_long_run(model, envelope, monkeypatch):
    """It strikes one head of one text half way, in an engine that is right before and after."""
    subject, steps = Subject(Ring(), DRAFTER, RULES["match"]), iter(range(10_000))
    tally, right = Tally(model, subject, envelope), continuation.long_run.cycle
    struck = 2 * SHORT.long_every  # a step that is measured

    def striking(*given):
        engine, shown = right(*given)
        if next(steps) == struck:
            R = np.array(engine.state.recurrent.R)
            R[0, 1, 1] += (1e-4 * noise(R[0, 1, 1], np.random.default_rng(0))).astype(R.dtype)
            carry = engine.state.recurrent.replace(R=jnp.asarray(R))
            engine = engine.replace(state=engine.state.replace(recurrent=carry))
        return engine, shown

    monkeypatch.setattr(continuation.long_run, "cycle", striking)
    continuation.long_run.run(model, subject, SHORT, tally, lambda *_: None)
    red = [check for check in tally.checks if not check.green]
    first = {name: red[0].where[name] for name in ("cycle", "prefix", "layer", "head")}
    assert first == {"cycle": struck, "prefix": 1, "layer": 0, "head": 1}
    assert red[0].name == "R" and 5e-5 < red[0].value < 1.1e-4  # of what is read: a sum


def test_an_envelope_without_long_bounds_serves_no_long_run(model, envelope):
    provenance = {name: said for name, said in envelope.provenance.items() if name != "long run"}
    earlier = Envelope(envelope.bounds, envelope.controls, provenance)
    with pytest.raises(ValueError, match="a long run of 0 tokens, expected 256: calibrate again"):
        run(model, [Subject(Replay(), DRAFTER, RULES["match"])], SHORT, earlier)


def test_progress_and_facts(report, told, envelope):
    facts = report.facts["continuation"]
    assert facts["envelope"] == envelope.digest and facts["calibrated"] == "before"
    assert facts["held-out prefixes"] != envelope.provenance["prefixes"]
    assert told[0] == ("envelope", 0, 2) and told[-1] == ("continuation", 2, 2)


class Forgetful(Replay):
    """A policy that leaves the last node out of the state where exactly three were accepted."""

    def commit(self, carry, scratch, path):
        length = jnp.where(path.length == 3, 2, path.length)
        return super().commit(carry, scratch, Path(nodes=path.nodes, length=length))


def test_a_fault_of_one_length_of_path_is_caught_by_the_quick_profile(model, envelope):
    """The head's own candidates never fare so well here: without a script nothing is wrong."""
    quick = dataclasses.replace(Settings.quick(), prefixes=2, length=24, shorter=3, tightness=False)
    assert quick.schedules == continuation.SCHEDULES
    report = run(model, [Subject(Forgetful(), DRAFTER, RULES["match"])], quick, envelope)
    (facts,) = report.facts["continuation"]["subjects"].values()
    assert facts["never published"] == []
    assert {(check.name, check.where["schedule"]) for check in report.red} == {("R", "lengths")}


class PackedParent(WY):
    """The last row of every tree continues the row before it: it is hardly ever on a path."""

    def plan(self, topology):
        parent, rows = topology.parent, jnp.arange(topology.parent.shape[1])[None, :]
        moved = (rows > 0) & (rows == topology.size[:, None] - 1)
        parent = jnp.where(moved, rows - 1, parent)
        size, depth = topology.size, topology.max_depth + 1
        return super().plan(describe(Tree(parent, parent, parent, size, max_depth=depth)))


class RoundedCheckpoint(Ring):
    """One head of the ring's checkpoint is kept in bfloat16."""

    def commit(self, carry, scratch, path):
        after = super().commit(carry, scratch, path)
        rounded = after.R[:, :, 0].astype(jnp.bfloat16).astype(jnp.float32)
        return after.replace(R=after.R.at[:, :, 0].set(rounded))


class RoundedGate(Ring):
    """Decay and write strength are bfloat16 where they are committed, float32 in outputs."""

    def scan(self, carry, layer, operands, plan):
        alpha, beta = narrowed(operands.alpha), narrowed(operands.beta)
        gates = operands.replace(alpha=alpha, g=jnp.log(alpha), beta=beta)
        right = super().scan(carry, layer, operands, plan)
        return right._replace(scratch=super().scan(carry, layer, gates, plan).scratch)


@dataclasses.dataclass(frozen=True)
class Second(Match):
    """A rule that ends every path with the token that comes second: several nats away."""

    name: ClassVar[str] = "second"

    def choose(self, tree, logits, sampling, key, position, history, q):
        choice = super().choose(tree, logits, sampling, key, position, history, q)
        last = logits[choice.path[jnp.maximum(choice.length - 1, 0)]]
        return choice.replace(pending=jnp.argsort(-last)[1].astype(jnp.int32))


@pytest.mark.parametrize(
    ("policy", "seen"),
    [
        (PackedParent(), {"row logits"}),
        (RoundedCheckpoint(), {"R", WORDS["narrow vectors"]}),
        (RoundedGate(), {"R"}),
    ],
    ids=["packed parent", "rounded checkpoint", "FC-07 rounded gate"],
)
def test_a_wrong_policy_is_red_in_its_surface_at_once(model, envelope, policy, seen):
    """Those that the fault matrix plants, and continuation by itself catches: see each class."""
    report = run(model, [Subject(policy, DRAFTER, RULES["match"])], ONE_SCHEDULE, envelope)
    red = report.red
    first = min(check.where["cycle"] for check in red)
    assert first == 0
    assert {check.name for check in red if check.where["cycle"] == first} == seen


def test_fc_22_a_structural_divergence_is_no_rounding(model, envelope):
    report = run(model, [Subject(Replay(), DRAFTER, Second())], ONE_SCHEDULE, envelope)
    red = [check for check in report.red if check.name == WORDS["tokens"]]
    assert red and red[0].where["cycle"] == 0
    assert report.facts["continuation"]["subjects"]["replay/mtp:2,1 by second"]["near ties"] == 0


class Unready(Replay):
    """A policy that cannot be traced."""

    def commit(self, carry, scratch, path):
        raise KeyError("no such layer")


class Unread(MTP):
    """A drafter that cannot follow a path."""

    def observe(self, draft, tree, choice, hidden):
        raise RuntimeError("no such row\nnor another")


class Unruly(Match):
    """A rule that raises."""

    name = "unruly"

    def choose(self, tree, logits, sampling, key, position, history, q):
        raise ZeroDivisionError


def test_what_raises_is_red_and_the_others_are_audited(model, envelope):
    match = RULES["match"]
    subjects = [
        Subject(Unready(), DRAFTER, match),
        Subject(Replay(), Unread("2,1"), match),
        Subject(Replay(), DRAFTER, Unruly()),
    ]
    report = run(model, subjects, ONE_SCHEDULE, envelope)
    assert [check.subject for check in report.red] == [subject.name for subject in subjects]
    for check, what in zip(
        report.red,
        ("KeyError: 'no such layer'", "RuntimeError: no such row", "ZeroDivisionError"),
        strict=True,
    ):
        assert check.name == RAISED
        assert f"{what}, raised at test_audit_continuation.py:" in check.note
        assert "\n" not in str(check)
    assert set(report.facts["continuation"]["subjects"]) == {s.name for s in subjects}


def test_what_cannot_be_audited_is_refused(model, envelope):
    faulty = Subject(Replay(), DRAFTER, RULES["match"], FAULTS["stale root"])
    with pytest.raises(ValueError, match="has a planted fault, expected none"):
        run(model, [faulty], SHORT, envelope)
    with pytest.raises(ValueError, match="is lossy and its stream is not plain's"):
        run(model, [Subject(Replay(), DRAFTER, RULES["typical"])], SHORT, envelope)
    with pytest.raises(ValueError, match="calibrated for another model"):
        run(small(seed=1), [Subject(Replay(), DRAFTER, RULES["match"])], SHORT, envelope)
    for wrong in (
        {"schedules": ("warm",)},
        {"schedules": ("cold",)},  # the fresh process goes on from the resumed one
        {"prefixes": 0},
        {"cycles": 1},
        {"factor": 0.5},
        {"length": 10},
    ):
        with pytest.raises(ValueError, match="expected|fresh process"):
            dataclasses.replace(SHORT, **wrong)
    with pytest.raises(ValueError, match="expected at most the context of 256"):
        calibrate(model, dataclasses.replace(SHORT, length=600))
