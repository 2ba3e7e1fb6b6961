"""``python -m treejax.compare``: the model that ships against itself, and the command around it.

Two prompts of a package that it never saw, 48 tokens, greedy and sampled. The ten prompts and 256
tokens of the full comparison take minutes and are run by hand.
"""

import csv
import hashlib
import json
import zipfile
from pathlib import Path

import byte_model
import jax
import pytest

from treejax import agreement, compare
from treejax.checkpoint import save_model
from treejax.cli.arms import DRAFTS, Arm, make_arms, pool_rates
from treejax.cli.guard import run_command
from treejax.cli.passages import read_passages
from treejax.drafters import REGISTRY
from treejax.policies import REGISTRY as POLICIES

pytestmark = pytest.mark.compiles_fast

PROMPTS = Path(__file__).parent.parent / "configs" / "prompts"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """The command sets JAX's cache folder: a temporary one, and as it was afterwards."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def command(capsys):
    """Run the command in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        try:
            status = run_command(compare.NAME, compare.main, list(arguments))
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "drafts"),
    [
        ("snapshot", ("suffix:best16x8",)),
        ("replay", ("mtp:chain3", "mtp+suffix:hydra27")),
        ("wy", ("mtp+suffix:hydra8",)),
    ],
)
def test_fc22_the_shipped_model_drafts_what_it_would_have_said(command, tmp_path, policy, drafts):
    """FC-22: tokens, and published R, C, K, greedy and sampled, of each way to draft.

    The audits hold every policy and drafter against plain decoding; here it is the command that
    users run.
    """
    flags = [flag for draft in drafts for flag in ("--drafter", draft)]
    out = tmp_path / "out"
    status, shown, err = command(
        *(str(PROMPTS / "beartype.toml"), "--max-tokens", "48", "--together"),
        *("--policy", policy, *flags, "--out", str(out)),
    )
    assert status == 0, err
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(drafts) * 2 * 2
    for row in rows:
        assert row["ok"] and row["stats"]["tokens"] == row["compared"] == 48, row
        assert row["equal"] == 48 or row["margin"] is not None
        if row["equal"] == 48:
            assert set(row["surfaces"]) == {"R", "C", "K"}
    assert sum(row["equal"] == 48 for row in rows) >= len(rows) - 1  # a near tie is rare
    # Far more than a coin's luck: the trained head, and the text itself, predict what comes.
    with (out / "summary.csv").open(newline="") as file:
        table = {line["arm"]: line for line in csv.DictReader(file)}
    for draft in drafts:
        arm = table[f"{policy}/{draft}"]
        assert float(arm["acceptance_length"]) > 1.5 and arm["tokens_per_s"] == ""
        assert arm["arm"] in shown
    assert (out / "arms.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "byte"
    save_model(byte_model.model(), path)
    return str(path)


def test_fc26_no_rate_for_an_arm_that_differs(command, folder, tmp_path, monkeypatch):
    """FC-26: one arm is made to differ: named on stderr, not timed, exit status 1."""
    really = agreement.compare

    def compare_or_fail(model, prompt, drafted, plain, sampling=None, seed=0):
        agreed = really(model, prompt, drafted, plain, sampling, seed)
        if drafted.stats.tree == "2,1":
            fault = {"R": 0.5}
            return agreement.Agreement(16, 16, None, 0.0, 1e-5, fault, 1e-5)
        return agreed

    monkeypatch.setattr(agreement, "compare", compare_or_fail)
    arguments = ["--checkpoint", folder, "--prompts", "1", "--max-tokens", "16", "--together"]
    arguments += ["--policy", "wy", "--drafter", "mtp:chain2", "--drafter", "mtp:2,1"]
    arguments += ["--time", "wy/mtp:chain2", "--time", "wy/mtp:2,1", "--repeats", "1"]
    status, shown, err = command(
        str(PROMPTS / "beartype.toml"), *arguments, "--out", str(tmp_path / "out")
    )
    assert status == 1
    assert "wy/mtp:2,1, greedy" in err and "NOT within" in err
    assert "wy/mtp:2,1 DIFFERS" in shown and "wy/mtp:chain2 DIFFERS" not in shown
    arms = {
        a["arm"]: a for a in json.loads((tmp_path / "out" / "summary.json").read_text())["arms"]
    }
    assert arms["wy/mtp:chain2"]["tokens_per_s"] > 0 and arms["wy/mtp:chain2"]["ratio"] > 0
    assert arms["wy/mtp:2,1"]["tokens_per_s"] is None and arms["wy/mtp:2,1"]["ratio"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "no such configuration file: nowhere.toml"),
        ([str(PROMPTS / "astropy.toml")], "needs --wheel FILE, a wheel of astropy 8.0.2"),
        ([str(PROMPTS / "astropy.toml"), "--wheel", __file__], "is not a readable wheel"),
        ([str(PROMPTS / "beartype.toml"), "--wheel", __file__], "leave out --wheel"),
        ([str(PROMPTS / "beartype.toml"), "--drafter", "mtp"], "'mtp' names no tree"),
        ([str(PROMPTS / "beartype.toml"), "--drafter", "mtp:oak"], "tree 'oak' is unknown"),
        ([str(PROMPTS / "beartype.toml"), "--time", "wy/mtp:oak"], "no such arm"),
        ([str(PROMPTS / "beartype.toml"), "--prompts", "0"], "--prompts is 0"),
        ([str(PROMPTS / "beartype.toml"), "--policy", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command, arguments, message):
    status, shown, err = command(*arguments)
    assert (status, shown) == (2, "") and message in err and err.count("\n") == 1


def test_passages_are_read_from_a_wheel_and_are_what_the_file_says(tmp_path):
    """Package, version, path and hash are checked; nothing is read past the passage."""
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some-1.0.dist-info/METADATA", "Name: some")
        archive.writestr("some/a.py", "x = 1\nday = 2\nz = 3\n")

    def config(version="1.0", path="some/a.py", text="day = 2\n", source="wheel"):
        digest = hashlib.sha256(text.encode()).hexdigest()
        file = tmp_path / "prompts.toml"
        file.write_text(
            f'package = "some"\nversion = "{version}"\nsource = "{source}"\n[[passages]]\n'
            f'path = "{path}"\noffset = 6\nbytes = 8\nsha256 = "{digest}"\n'
        )
        return file

    assert read_passages(config(), wheel) == {"some/a.py@6": "day = 2\n"}
    for wrong, message in [
        ({"version": "2.0"}, "is not a wheel of some 2.0"),
        ({"path": "some/b.py"}, "has no file 'some/b.py'"),
        ({"text": "other"}, "not the passage"),
        ({"source": "web"}, "expected wheel or installed"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_passages(config(**wrong), wheel)
    with pytest.raises(ValueError, match="some is not installed"):
        read_passages(config(source="installed"), None)


def test_every_policy_meets_every_drafter():
    arms = make_arms(("wy", "replay"), DRAFTS)
    assert len({arm.name for arm in arms}) == 2 * len(set(DRAFTS))
    assert compare.DEFAULT_ARM in {arm.name for arm in make_arms(tuple(POLICIES), DRAFTS)}
    # A budget has no tree of its own, and chooses by the clock among drafters that are here.
    assert {draft.partition(":")[0] for draft in DRAFTS} == set(REGISTRY) - {"budget"}
    assert Arm("wy", "mtp", "2,1").name == "wy/mtp:2,1"


def test_rates_are_sums_by_sums_and_ranges_over_repeats():
    """Pooled over prompts: 30 tokens in 3 s and 60 in 4 s; the ratio is taken repeat by repeat."""
    timings = [("plain", 0, 10, 1.0), ("plain", 0, 20, 2.0), ("plain", 1, 60, 4.0)]
    timings += [("arm", 0, 20, 1.0), ("arm", 0, 20, 1.0), ("arm", 1, 60, 2.0)]
    rates = pool_rates(timings)
    assert rates["plain"].tokens_per_s == 12.5 and rates["plain"].tokens_per_s_range == (10, 15)
    assert rates["arm"].ratio == 2.0 and rates["arm"].ratio_range == (2.0, 2.0)
    assert rates["arm"].tokens_per_s == 25.0
