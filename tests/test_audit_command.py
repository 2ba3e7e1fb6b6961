"""``python -m treejax.audit`` and ``treejax.audit.run``: options, exit statuses, files.

The audits themselves are replaced by reports made by hand, see ``audit_calls``.
"""

import json
from types import SimpleNamespace

import audit_reports as made
import jax
import pytest
from audit_calls import answering, subjects

import treejax
from treejax.audit import __main__ as command_module
from treejax.audit import work
from treejax.audit.base import Report
from treejax.audit.faults import REGISTRY as ENGINE_FAULTS
from treejax.audit.raised import RAISED
from treejax.audit.sampler.faults import REGISTRY as SAMPLER_FAULTS
from treejax.audit.whole import run as run_audits
from treejax.cli.guard import run_command
from treejax.drafters import MTP
from treejax.policies import REGISTRY as POLICIES


@pytest.fixture
def calls(monkeypatch, tmp_path):
    yield from answering(monkeypatch, tmp_path)


@pytest.fixture
def command(calls, capsys):
    """Run the command in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        name, main = command_module.NAME, command_module.main
        try:
            status = run_command(name, main, [str(each) for each in arguments])
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


def test_all_audits_run_and_a_green_one_exits_with_0(command, calls, tmp_path):
    out = tmp_path / "a" / "out"
    status, shown, err = command("--quick", "--out", out)
    assert (status, err) == (0, "")
    assert set(calls.given) == {"component", "continuation", "sampler"}
    assert shown.rstrip().splitlines()[-1].startswith("GREEN: all ")
    said = json.loads((out / "report.json").read_text())
    assert said["green"] and said["facts"]["made with"]["jax"] == jax.__version__
    assert {"commit", "device", "python", "model's model"} <= set(said["facts"]["made with"])
    assert "python-11m, float32" in said["facts"]["audited"]["model"]
    assert (out / "report.txt").read_text().splitlines()[-1] in shown
    assert "<strong>GREEN</strong>" in (out / "report.html").read_text()


def test_a_red_audit_exits_with_1(command, calls):
    calls.answers["sampler"] = Report((made.REJECTED,))
    status, shown, _ = command("--quick")
    assert status == 1 and "failed: sampler block: joint G-test 1e-09" in shown
    assert shown.rstrip().splitlines()[-1].startswith("RED: 1 of ")


def test_an_audit_that_checked_nothing_is_red(command, calls):
    """FC-26: no checks are no proof, and those of the others must not hide it."""
    calls.answers["sampler"] = Report(())
    for audits in ((), ("sampler",)):
        status, shown, _ = command(*audits, "--quick")
        assert status == 1 and "failed: sampler all of it: checks 0, at least 1" in shown


def test_what_is_shown_names_who_was_audited_and_what_was_not(command, calls):
    _, shown, _ = command("continuation", "--quick", "--policy", "wy", "--drafter", "mtp:chain3")
    head, _, rest = shown.partition("Not audited:")
    assert "policies:       wy\n" in head and "drafters:       mtp:chain3\n" in head
    assert "audits component, sampler: not asked for" in rest
    assert "policies snapshot, replay" in rest and "drafters mtp_tree, suffix" in rest
    assert "models in bfloat16" in rest and "kernels on a GPU" in rest
    assert "planted faults" in rest


def test_quick_audits_what_generation_takes_by_itself(command, calls):
    command("--quick")
    (policy,) = calls.given["component"][0]
    model = treejax.load_model()
    assert policy.name == treejax.choose_policy(model.config, 1, 9, "xla").policy
    assert subjects(calls) == [f"{policy.name}/mtp+suffix:hydra8"]


def test_the_full_profile_audits_every_policy_and_every_kind_of_drafter(command, calls):
    """FC-26: what "all" says is all there is."""
    _, shown, _ = command()
    assert {p.name for p in calls.given["component"][0]} == set(POLICIES)
    names = subjects(calls)
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == set(POLICIES)
    drafters = {subject.drafter.name for subject in calls.given["continuation"][1]}
    assert drafters == {"mtp", "mtp_tree", "suffix", "mtp+suffix", "resting"}
    assert len(calls.given["sampler"][1]) == 5  # and typical says itself that it is lossy
    assert "drafters scripted\n" in shown and "rules typical\n" in shown
    assert f"paths of 2 rows under {names[0]}: none was accepted" in shown
    assert "policies" not in shown.partition("Not audited")[2]


def test_policies_and_drafters_that_were_asked_for_are_all_paired(command, calls):
    command(
        *("continuation", "--policy", "wy,snapshot", "--quick"),
        *("--drafter", "mtp:3,2", "--drafter", "suffix:chain4"),
    )
    assert subjects(calls) == [
        "wy/mtp:3,2",
        "wy/suffix:chain4",
        "snapshot/mtp:3,2",
        "snapshot/suffix:chain4",
    ]


def test_every_form_of_a_drafter_is_audited(command, calls):
    command("continuation", "--quick", "--drafter", "budget", "--policy", "wy")
    assert [name.partition("/")[2] for name in subjects(calls)][:2] == [
        "resting:root",
        "mtp:chain2",
    ]
    assert len(subjects(calls)) == 5


def test_a_rule_brings_a_drafter_whose_candidates_it_takes(command, calls):
    command("--quick", "--policy", "wy", "--rule", "block,traversal")
    assert subjects(calls) == [
        "wy/mtp@draws=iid:chain3 by block",
        "wy/mtp@draws=without_replacement:3,2 by traversal",
    ]
    assert [rule.name for rule in calls.given["sampler"][1]] == ["block", "traversal"]


def test_numbers_and_settings_reach_the_audits(command, calls):
    command("--quick", "--seed", "7", "--seeds", "2", "--dtype", "bfloat16", "--faults")
    assert calls.given["component"][1].seed == 7
    assert calls.given["continuation"][2].seed == 7
    assert (calls.given["sampler"][2].seed, calls.given["sampler"][2].seeds) == (7, 2)
    model, names, settings, _ = calls.given["detection"]
    assert (str(model.dtype), names, settings.seeds, settings.seed) == ("bfloat16", None, 2, 7)
    names, settings, *_ = calls.given["sampler_detection"]
    assert (names, settings.fault_seeds, settings.seed) == (None, 2, 7)


def test_faults_are_planted_where_they_must_be_caught(command, calls):
    command("--quick", "--fault", "stale root,KV remap,same_coin")
    assert calls.given["detection"][1] == ("stale root", "KV remap")
    assert calls.given["sampler_detection"][0] == ("same_coin",)
    calls.given.clear()
    _, shown, _ = command("sampler", "--quick", "--faults")
    assert set(calls.given) == {"sampler", "sampler_detection"}
    head, _, rest = shown.partition("Not audited")
    assert "sampler, planted faults: quick" in head and "fault" not in rest
    calls.given.clear()
    _, shown, _ = command("continuation", "--quick", "--faults")
    assert "faults drafter one row off" in shown.partition("Not audited")[2]
    calls.given.clear()
    command("continuation", "--quick", "--fault", "stale root")
    assert set(calls.given) == {"continuation", "detection"}
    status, _, err = command("continuation", "--quick", "--fault", "same_coin")
    assert status == 2 and "fault 'same_coin' cannot act in the audit continuation" in err


def test_faults_are_listed_with_what_each_does(command, calls):
    """The names that --fault takes, no more and no fewer; an unknown name names them all too."""
    status, shown, err = command("--list-faults")
    assert (status, err, calls.given) == (0, "", {})
    listed, known = {}, {**ENGINE_FAULTS, **SAMPLER_FAULTS}
    for line in shown.splitlines():
        if line.startswith("  "):
            name, _, says = line.strip().partition("  ")
            listed[name] = says.strip()
    assert listed == {name: fault.says for name, fault in known.items()}
    assert all(listed.values()) and max(map(len, shown.splitlines())) <= 120
    assert "--list-faults" in command("--help")[1]
    _, _, err = command("--fault", "nope")
    assert ", ".join(known) in err and "--list-faults says what each does" in err


def test_interpreted_kernels_are_audited_if_asked_for(command, calls):
    _, shown, _ = command("--quick", "--implementation", "interpret", "--policy", "replay")
    (policy,) = calls.given["component"][0]
    assert policy.implementation == "interpret" and "runs on:        cpu: cpu, interpret" in shown
    assert calls.given["continuation"][1][0].policy.implementation == "interpret"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "audit 'nothing' is unknown, expected of: component"),
        (["continuation", "--rule", "typical"], "rule 'typical' is lossy and its stream"),
        (["--policy", "nope"], "unknown policy 'nope', expected one of: snapshot"),
        (["--policy", "auto"], "policy 'auto' depends on batch and tree"),
        (["--drafter", "nope:chain3"], "drafter 'nope' is unknown, expected one of: mtp"),
        (["--drafter", "mtp:best9x3"], "cannot fill the tree 'best9x3'"),
        (["--drafter", "mtp@speed=2:chain3"], "setting 'speed' is unknown"),
        (["--drafter", "scripted:2,2"], "drafter 'scripted' needs the answers"),
        (["--rule", "nope"], "rule 'nope' is unknown, expected one of: match"),
        (["--rule", "block", "--drafter", "mtp:chain3"], "rule 'block' needs candidates of kind"),
        (["--fault", "nope"], "fault 'nope' is unknown, expected of: "),
        (["--fault", "stale root", "--faults"], "--faults plants every fault"),
        (["component", "--envelope", "f"], "envelope cannot act in the audit component"),
        (["sampler", "--calibrate", "f"], "calibrate cannot act in the audit sampler"),
        (["sampler", "--policy", "wy"], "policy cannot act in the audit sampler"),
        (["component", "--drafter", "mtp"], "drafter cannot act in the audit component"),
        (["component", "--checkpoint", "x"], "model cannot act in the audit component"),
        (["sampler", "--implementation", "xla"], "implementation cannot act in the audit"),
        (["component", "--faults"], "faults cannot act in the audit component"),
        (["--envelope", "x", "--calibrate", "y"], "envelope and calibrate were both given"),
        (["--envelope", "/no/such"], "no envelope file '/no/such'"),
        (["--implementation", "mosaic_gpu"], "the kernels need a Hopper GPU"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--checkpoint", "/no/such"], "no model folder '/no/such'"),
        (["--seed", "-1"], "seed is -1, expected an integer of at least 0"),
        (["component", "--seeds", "3"], "seeds cannot act in component: leave it out"),
        (["--time-limit", "nan"], "--time-limit is nan, expected seconds above 0"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command, calls, arguments, message):
    """FC-26: nothing that was asked for is silently off."""
    status, shown, err = command("--quick", *arguments)
    assert (status, shown, calls.given) == (2, "", {})
    assert message in err and err.count("\n") == 1


def test_a_mistake_that_an_audit_finds_is_one_line_too(command, calls):
    calls.answers["component"] = ValueError("policy 'x' cannot be hashed")
    said = "treejax.audit: policy 'x' cannot be hashed\n"
    assert command("component", "--quick") == (2, "", said)


def test_a_failure_keeps_what_was_audited_before(command, calls, tmp_path):
    calls.answers["continuation"] = ValueError("no room")
    status, shown, err = command("--quick", "--out", tmp_path / "out")
    assert status == 2 and err == "treejax.audit: no room\n"
    assert "continuation all of it: finished 0, at least 1 (failed: no room)" in shown
    assert "RED" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("profile", ["--quick", "--seed=0"])
def test_an_audit_that_fails_of_itself_is_red_and_the_others_run(command, calls, tmp_path, profile):
    calls.answers["component"] = calls.answers["continuation"] = KeyError("no such layer")
    who = "--policy", "wy", "--drafter", "mtp:chain3"
    status, shown, err = command(*who, profile, "--out", tmp_path)
    assert (status, err) == (1, "") and "sampler" in calls.given
    for name in ("component", "continuation"):
        assert f"failed: {name} all of it: {RAISED} 1, at most 0 (KeyError" in shown
    said = json.loads((tmp_path / "report.json").read_text())
    assert {check["audit"] for check in said["checks"] if check["green"]} == {"sampler"}


def test_a_drafter_that_raises_is_left_to_the_audit(calls):
    """What refuses to serve is a mistake, what fails is a finding."""

    class Unready(MTP):
        def init(self, model, batch, max_length):
            raise KeyError("no such weights")

    run_audits("continuation", policy="wy", drafter=Unready("chain3"), quick=True)
    assert subjects(calls) == ["wy/mtp:chain3"]


def test_an_edited_envelope_is_refused_before_anything_runs(command, calls, tmp_path):
    path = tmp_path / "envelope.json"
    path.write_text('{"bounds": {}, "controls": {}, "provenance": {}, "digest": "0"}')
    status, _, err = command("continuation", "--quick", "--envelope", path)
    assert status == 2 and "was changed after it was calibrated" in err and not calls.given


@pytest.mark.parametrize("profile", ["--quick", "--seed=0"])
def test_an_interrupted_audit_keeps_what_it_had(command, calls, tmp_path, profile):
    calls.answers["continuation"] = KeyboardInterrupt()
    who = "--policy", "wy", "--drafter", "mtp:chain3"
    status, shown, err = command(*who, profile, "--out", tmp_path)
    assert status == 130 and err == "treejax.audit: interrupted\n"
    said = json.loads((tmp_path / "report.json").read_text())
    assert not said["green"]
    assert [c["audit"] for c in said["checks"] if c["name"] == "states"] == ["component"]
    assert "continuation: interrupted" in shown and "sampler: interrupted" in shown


def test_an_audit_that_is_out_of_time_is_red(command, calls, monkeypatch):
    now = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr(work, "time", clock)  # read at the start and at each piece of progress
    who = "--policy", "wy", "--drafter", "mtp:chain3"
    status, shown, err = command(*who, "--time-limit", "3.5")
    assert status == 1 and err == "treejax.audit: out of time after 3.5 s\n"
    assert list(calls.given) == ["component", "continuation"]  # and its report is lost
    assert "continuation all of it: finished 0" in shown and "RED" in shown
