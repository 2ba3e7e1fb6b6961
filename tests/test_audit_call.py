"""``treejax.audit.run``: what the call takes and says; and the command in whole, in a process."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from audit_calls import answering, subjects

import treejax
from treejax.audit.whole import run as run_audits
from treejax.drafters import MTP
from treejax.model import Model
from treejax.policies import WY, Snapshot


@pytest.fixture
def calls(monkeypatch, tmp_path):
    yield from answering(monkeypatch, tmp_path)


def test_the_call_takes_objects_and_says_the_same(calls):
    """A user's policy in one call; names and objects may be mixed."""
    model = treejax.load_model()
    how = {"quick": True, "model": model, "seed": 3}
    report = run_audits(policy=[WY(), "snapshot"], drafter=MTP("chain3"), **how)
    assert report.green and "GREEN" in report._repr_html_()
    assert calls.given["continuation"][0] is model
    assert subjects(calls) == ["wy/mtp:chain3", "snapshot/mtp:chain3"]
    assert [type(p) for p in calls.given["component"][0]] == [WY, Snapshot]
    assert report.facts["audited"]["model"].startswith("a loaded model, float32")
    assert "detection" not in calls.given
    run_audits("component", policy="wy", quick=True, faults=False)
    with pytest.raises(ValueError, match="dtype cannot act on a model that is loaded"):
        run_audits(model=model, dtype="bfloat16")
    with pytest.raises(ValueError, match="int is no drafter: it lacks name"):
        run_audits(drafter=5, model=model)
    for wrong, said in ((object(), "object is no policy: it lacks name"), (WY, r"WY \(a class\)")):
        with pytest.raises(ValueError, match=said):
            run_audits(policy=["wy", wrong], model=model)
    for faults in (["nope"], "nope"):
        with pytest.raises(ValueError, match="fault 'nope' is unknown"):
            run_audits(faults=faults)
    for name in ("seed", "seeds"):
        with pytest.raises(ValueError, match=f"{name} is 2.5, expected an integer of at least"):
            run_audits(**{name: 2.5})
    calls.answers["sampler"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_audits("sampler", quick=True)


def test_a_model_without_a_head_is_audited_with_what_can_serve_it(calls):
    config = dataclasses.replace(tiny.CONFIG, mtp_num_hidden_layers=0)
    model = Model(tiny.random_params(config), config)
    run_audits("continuation", policy="wy", quick=True, model=model)
    assert subjects(calls) == ["wy/suffix:best16x8"]
    with pytest.raises(ValueError, match="MTP"):
        run_audits("continuation", policy="wy", drafter="mtp:chain3", quick=True, model=model)


@pytest.mark.slow
def test_quick_is_green_on_the_model_that_ships(tmp_path):
    """The real command in a new process with an empty cache, as CI runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "treejax.audit", "--quick", "--out", str(tmp_path / "out")],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    said = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {check["audit"] for check in said["checks"]} == {"component", "continuation", "sampler"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<svg" in page and "p-values of the G-tests" in page and "by layer" in page
