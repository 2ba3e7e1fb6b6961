"""Request replay end to end, on the smallest model: the gate, what is shown, recorded requests.

Runs share compiled programs: the same drafter, modes and state size everywhere.
"""

import csv
import dataclasses
import json
import types
from pathlib import Path
from typing import ClassVar

import byte_model
import jax
import jax.numpy as jnp
import pytest
from compiling import compilations

from treejax import ablate
from treejax.ablation.serving import Reference, Server, Task
from treejax.agreement import Recording
from treejax.checkpoint import save_model
from treejax.cli.guard import run_command
from treejax.policies import REGISTRY, WY
from treejax.sampling import Sampling
from treejax.stats import Stats

pytestmark = pytest.mark.compiles_fast

TOML = """
experiment = "requests"
seed = 5
repeats = 1
policy = "wy"
drafts = ["mtp:2,1"]
max_tokens = 12
prompts = ["def f(x):", "import os"]
[[modes]]
name = "greedy"
"""
SAMPLED = """
[[modes]]
name = "sampled"
sampling = { temperature = 0.6, top_p = 0.95, top_k = 20 }
"""


@dataclasses.dataclass(frozen=True)
class Forgetful(WY):
    """Skips the publication: the state stays where it was."""

    name: ClassVar[str] = "forgetful"

    def commit(self, carry, scratch, path):
        return carry


@dataclasses.dataclass(frozen=True)
class Neighbour(WY):
    """Publishes the row beside each accepted one: another node's state."""

    name: ClassVar[str] = "neighbour"

    def commit(self, carry, scratch, path):
        beside = jnp.minimum(path.nodes + 1, scratch[0].u.shape[1] - 1)
        return super().commit(carry, scratch, path.replace(nodes=beside))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "byte"
    save_model(byte_model.model(), path)
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def command(capsys, folder, tmp_path):
    """Run a TOML of this text in this process: (exit status, stdout, stderr)."""

    def run(text, *arguments):
        config = tmp_path / "requests.toml"
        config.write_text(text)
        arguments = [str(config), "--checkpoint", str(folder), *map(str, arguments)]
        try:
            status = run_command(ablate.NAME, ablate.main, arguments)
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


def rows_in(out):
    lines = (out / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


@pytest.mark.slow
def test_fc26_planted_wrong_policies_print_no_rate(command, tmp_path, monkeypatch):
    """FC-26: two policies publish a wrong state: status 1, the place said, no figure at all."""
    monkeypatch.setitem(REGISTRY, "forgetful", Forgetful)
    monkeypatch.setitem(REGISTRY, "neighbour", Neighbour)
    others = '[others]\npolicies = ["forgetful", "neighbour"]\ndrafts = ["mtp:2,1"]\nrequests = 1\n'
    out = tmp_path / "out"
    status, shown, err = command(TOML + others, "--out", out, "--repeats", "2")
    assert status == 1
    wrong = {"forgetful/mtp:2,1", "neighbour/mtp:2,1"}
    for row in rows_in(out):
        if row["arm"] not in wrong:
            assert row["gate"] == "green" and row["tokens_per_s"] > 0, row
            continue
        assert row["gate"] == "red" and row["problem"], row
        assert not {"decode_s", "tokens_per_s", "acceptance_length", "steps"} & set(row)
        assert row["repeat"] == 0 or row["problem"].startswith("as in repeat 0: ")
    for arm in wrong:
        assert f"{arm}, prompts, prompt 0, greedy, repeat 0: " in err
        (line,) = [line for line in shown.splitlines() if f"│ {arm}" in line]
        assert "red" in line and [cell.strip() for cell in line.split("│")[-5:-2]] == ["-"] * 3
    summary = json.loads((out / "summary.json").read_text())["rows"]
    assert {r["arm"] for r in summary if r.get("tokens_per_s")} == {"plain", "wy/mtp:2,1"}
    assert all(
        "tokens_per_s" not in r and "accepted" not in r for r in summary if r["arm"] in wrong
    )
    assert not any("forgetful" in name for name in (out / "requests.csv").read_text().splitlines())


def test_fc26_the_summary_shows_all_that_acted(command, tmp_path):
    """FC-26: drafter, policy, width, depth, steps, proposed, accepted, emitted, first position."""
    out = tmp_path / "out"
    status, shown, err = command(TOML + SAMPLED, "--out", out)
    assert (status, err) == (0, "")
    rows, summary = rows_in(out), json.loads((out / "summary.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 and {row["gate"] for row in rows} == {"green"}
    for row in rows:
        assert row["tokens"] == row["compared"] == row["equal"] == 12
        assert {"distance_R", "distance_C", "distance_K"} <= set(row)
    assert [(r["mode"], r["arm"]) for r in summary] == [
        (mode, arm) for mode in ("greedy", "sampled") for arm in ("plain", "wy/mtp:2,1")
    ]
    drafted = summary[1]
    assert (drafted["drafter"], drafted["policy"], drafted["tree"]) == ("mtp", "wy", "2,1")
    assert (drafted["nodes"], drafted["width"], drafted["depth"]) == (4, 2, 2)
    mine = [r for r in rows if (r["arm"], r["mode"]) == ("wy/mtp:2,1", "greedy")]
    for name in ("steps", "proposed", "accepted", "tokens"):
        assert drafted[name] == sum(row[name] for row in mine)
    assert drafted["proposed"] > 0 and drafted["steps"] + drafted["accepted"] == 22
    assert 0 <= drafted["first_accepted"] <= 1 and drafted["acceptance_length"] >= 1
    rate = 22 / sum(row["decode_s"] for row in mine)
    assert drafted["tokens_per_s"] == pytest.approx(rate)
    for head in ("n/w/d", "steps", "proposed", "accepted", "emitted", "first", "length", "tok/s"):
        assert head in shown
    with (out / "requests.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["prompt"], line["mode"], line["prompt_tokens"]) for line in lines] == [
        ("prompt 0", "greedy", "9"),
        ("prompt 0", "sampled", "9"),
        ("prompt 1", "greedy", "9"),
        ("prompt 1", "sampled", "9"),
    ]
    assert all(float(line["wy/mtp:2,1 tokens_per_s"]) > 0 for line in lines)
    for name in ("rates", "acceptance"):
        assert (out / f"{name}.png").stat().st_size > 1000
        assert (out / f"{name}.svg").read_text().startswith("<?xml")


def test_fc23_another_repeat_compiles_nothing(command, tmp_path):
    """FC-23: after the first repeat, requests of any length run the programs that are there."""
    out, text = tmp_path / "out", TOML.replace('"import os"', f'"{"y = 1; " * 30}"')
    assert command(text, "--out", out)[0] == 0
    first = rows_in(out)
    with compilations() as seen:
        assert command(text, "--out", out, "--resume", "--repeats", "3")[0] == 0
    assert not {"step", "absorb", "prime", "adopt", "first_token"} & set(seen), seen
    rows = rows_in(out)
    assert rows[: len(first)] == first and len(rows) == 3 * len(first)
    order = [row["arm"] for row in rows if row["prompt"] == "prompt 0"]
    assert order == ["plain", "wy/mtp:2,1", "wy/mtp:2,1", "plain", "plain", "wy/mtp:2,1"]


def test_recorded_requests_run_with_their_own_settings(command, tmp_path):
    """Text, token ids and settings; a greedy and a sampled request in one file."""
    file = tmp_path / "traffic.jsonl"
    sampled = {"temperature": 0.6, "top_p": 0.9, "top_k": 5}
    requests = [
        {"prompt": "class A:", "id": "first", "sampling": {"temperature": 0}, "max_tokens": 5},
        {"tokens": [1, 2, 3], "sampling": sampled, "seed": 9},
        {"prompt": "x = "},
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in requests) + "\n")
    out = tmp_path / "out"
    status, _, err = command(TOML + SAMPLED, "--requests", file, "--out", out, "--arms", "plain")
    assert (status, err) == (0, "")
    rows = {(row["prompt"], row["mode"]): row for row in rows_in(out)}
    assert set(rows) == {
        ("first", "recorded"),
        ("line 2", "recorded"),
        ("line 3", "greedy"),
        ("line 3", "sampled"),
    }
    assert rows["first", "recorded"]["tokens"] == 5
    assert rows["line 2", "recorded"]["prompt_tokens"] == 3
    assert {row["corpus"] for row in rows.values()} == {"traffic"}
    file.write_text('{"prompt": "other"}\n')
    status, _, err = command(TOML + SAMPLED, "--requests", file, "--out", out, "--resume")
    assert status == 2 and "made with requests" in err and err.count("\n") == 1


def task(budget=6):
    return Task("c", "p", "greedy", (5, 6, 7, 8), budget, Sampling(), 0)


def test_a_reference_goes_on_to_where_a_drafted_state_is():
    """A step may accept past a stop; plain decoding without stops reaches the same state."""
    server = Server(byte_model.model(), "xla", 256, ignore_eos=True)
    reference = Reference(server, task())
    assert int(reference.plain.state.length[0]) == 4 + 6 - 1
    assert reference.holding(9) is reference.plain
    further = reference.holding(11)
    assert int(further.state.length[0]) == 11
    assert further.tokens[:6] == reference.plain.tokens and len(further.tokens) == 8
    reference.forget()
    assert reference.plain.state is None


def test_ending_elsewhere_than_plain_is_red():
    """Equal as far as both go is not equal: a stop was missed, or made up."""
    server = Server(byte_model.model(), "xla", 256, ignore_eos=False)
    plain = types.SimpleNamespace(plain=Recording((1, 2, 3), Stats(), None))
    for count, problem in [(2, "after 2 tokens"), (3, None), (4, "after 4 tokens")]:
        made = Recording((1, 2, 3, 4)[:count], Stats(), None)
        verdict = server.judge(task(), made, plain)
        expected = problem and f"ends {problem}, plain after 3"
        assert (verdict.gate, verdict.problem) == ("red" if problem else "green", expected)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (('"wy"', '"magic"'), [], "policy 'magic' is unknown, expected one of: snapshot"),
        (('"mtp:2,1"', '"mtp@x=1"'), [], "setting 'x' is unknown, expected of: draws"),
        (('"mtp:2,1"', '"mtp:oak"'), [], "tree 'oak' is unknown"),
        (('"mtp:2,1"', '"scripted:2,1"'), [], "needs the true continuation"),
        (("max_tokens = 12", "max_tokens = 0"), [], "max_tokens is 0, expected at least 1"),
        (('"import os"', '""'), [], "requests.toml: prompt 0 is empty"),
        (('"import os"', '"x", "y"'), ["--wheel", "w"], "names no passages: leave out --wheel"),
        (("prompts =", "passages ="), [], "no such configuration file"),
        (('prompts = ["def f(x):", "import os"]', ""), [], "expected prompts or passages"),
        (('name = "greedy"', 'name = "g"\nsampling = {temperature = -1}'), [], "mode 'g': temp"),
        (('name = "greedy"', 'name = "g"\nsampling = {top_k = 1}'), [], "missing key 'temperat"),
        (("", ""), ["--implementation", "mosaic_gpu"], "mosaic_gpu"),
        (("", ""), ["--requests", "none.jsonl"], "none.jsonl: No such file"),
        (("", ""), ["--arms", "wy/suffix"], "--arms wy/suffix: no such arm"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command, tmp_path, change, arguments, message):
    status, shown, err = command(TOML.replace(*change), "--out", tmp_path / "out", *arguments)
    assert (status, shown) == (2, "") and message in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


def test_fc26_an_mtp_arm_of_a_model_without_a_head_is_refused(tmp_path, capsys):
    """FC-26: the drafter cannot act, so nothing is measured."""
    save_model(byte_model.model(mtp=False), tmp_path / "headless")
    config = tmp_path / "requests.toml"
    config.write_text(TOML)
    arguments = [str(config), "--checkpoint", str(tmp_path / "headless"), "--dry-run"]
    assert run_command(ablate.NAME, ablate.main, arguments) == 2
    assert "drafter 'mtp' needs an MTP head" in capsys.readouterr().err


def test_the_plan_shows_memory_by_arm(command, folder):
    status, shown, err = command(TOML + SAMPLED, "--dry-run", "--repeats", "3")
    assert (status, err) == (0, "") and "24 cells, 24 to run" in shown
    lines = [line.split("│") for line in shown.splitlines() if line.startswith("│")]
    arms = {line[1].strip(): line[2].strip() for line in lines}
    assert arms == {"plain": "12", "wy/mtp:2,1": "12"} and "pseudo_values" in shown


def test_corpora_are_43_and_a_disjoint_43():
    """The committed lists: as many files as prompts, none in both."""
    from treejax.cli.passages import Passages
    from treejax.config import from_mapping, read_toml

    folder = Path(__file__).parent.parent / "configs" / "prompts"
    files = []
    for name in ("requests_a", "requests_b"):
        corpus = from_mapping(Passages, read_toml(folder / f"{name}.toml"), name)
        assert (corpus.package, corpus.version, corpus.source) == ("astropy", "8.0.2", "wheel")
        assert len(corpus.passages) == 43
        files += [passage.path for passage in corpus.passages]
        sizes = sorted(passage.bytes for passage in corpus.passages)
        assert sizes[0] < 300 and sizes[-1] > 8000
    assert len(set(files)) == 86
