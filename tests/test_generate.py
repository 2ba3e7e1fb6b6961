"""``python -m treejax.generate``: streams, exit statuses, mistakes; FC-10, FC-20, FC-22, FC-26."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import byte_model
import jax
import pytest

from treejax import agreement, generate
from treejax.checkpoint import save_model
from treejax.cli import printing
from treejax.cli.guard import run_command
from treejax.engine import complete
from treejax.policies import REGISTRY
from treejax.stats import Stats

pytestmark = pytest.mark.compiles_fast

PROMPT = "print(1)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The byte model on disk."""
    path = tmp_path_factory.mktemp("model") / "byte"
    save_model(byte_model.model(), path)
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """The command sets JAX's cache folder: a temporary one, and as it was afterwards."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def command(folder, capsys):
    """Run the command in this process: (exit status, stdout, stderr)."""

    def run(*arguments, checkpoint=folder):
        try:
            status = run_command(
                generate.NAME, generate.main, ["--checkpoint", checkpoint, *arguments]
            )
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


def expected(max_tokens, **settings):
    return complete(byte_model.model(), PROMPT, max_tokens=max_tokens, **settings).text


def test_fc26_all_defaults_run_end_to_end_and_the_summary_tells(command):
    """FC-26: defaults with --check: the text alone on stdout; drafter, policy, shape, counts."""
    status, out, err = command("--prompt", PROMPT, "--max-tokens", "40", "--check")
    assert status == 0, err
    assert out == expected(40)
    lines = dict(line.split(maxsplit=1) for line in err.splitlines())
    names = "prompt generated tree drafted acceptance visits memory policy kernels check"
    assert set(lines) == set(names.split())
    assert lines["kernels"] == "none: the kernels need a Hopper GPU, the default device is a CPU"
    assert lines["prompt"].startswith("8 tok") and "not in rates" in lines["prompt"]
    assert lines["generated"].startswith("40 tok")
    policy = lines["policy"].split(":")[0]
    assert f"[{policy} | mtp+suffix | hydra8 | xla | float32 | cpu]" in lines["generated"]
    assert policy in REGISTRY and "on cpu" in lines["policy"]
    assert lines["tree"].startswith("8 nodes   depth 8   1 path")
    drafted = re.match(r"(\d+) nodes in (\d+) drafts   accepted (\d+)", lines["drafted"])
    assert drafted is not None
    nodes, drafts, accepted = map(int, drafted.groups())
    length = f"{1 + accepted / drafts:.2f} tok/draft = 1 + {accepted}/{drafts}"
    assert lines["acceptance"].startswith(length) and nodes >= drafts >= 1
    assert re.match(r"equal 40/40   (R .*|R, C, K bitwise equal)", lines["check"])


def test_nothing_asked_for_is_one_line_and_no_table(command):
    """The figures that were asked for are all there, and all 0."""
    status, out, err = command("--prompt", PROMPT, "--max-tokens", "0")
    assert (status, out) == (0, "")
    said = "nothing was generated: --max-tokens is 0, expected 1 or more for a text"
    assert err == f"treejax.generate: {said}\n"
    status, out, err = command("--prompt", PROMPT, "--max-tokens", "0", "--stats", "json")
    assert (status, out, json.loads(err)["tokens"]) == (0, "", 0)


def test_plain_and_its_statistics_as_json_to_stderr_and_to_a_file(command, tmp_path):
    """--plain; names exactly as the interface lists them; the file has the same figures."""
    file = tmp_path / "stats.json"
    arguments = ["--plain", "--stats", "json", "--stats-file", str(file)]
    status, out, err = command("--prompt", PROMPT, "--max-tokens", "20", *arguments)
    assert status == 0 and out == expected(20, drafter=None)
    assert file.read_text() == err and err.count("\n") == 1
    figures = json.loads(err)
    assert set(figures) == set(Stats().as_dict())
    assert figures["tokens"] == 20 and figures["drafter"] == "plain"
    assert figures["num_drafts"] == 0 and figures["steps"] == 19
    assert figures["finish_reason"] == "length"
    _, _, err = command("--prompt", PROMPT, "--max-tokens", "20", "--plain")
    assert "none: plain decoding" in err and "drafted" not in err


def test_prompts_come_from_arguments_files_and_stdin(command, tmp_path, monkeypatch):
    """The same bytes by three ways give the same text; nothing is stripped or added."""
    quiet = ["--plain", "--max-tokens", "8", "--stats", "none"]
    text = " é\n"
    status, first, err = command("--prompt", text, *quiet)
    assert (status, err) == (0, "") and len(first) > 0
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    assert command("--prompt-file", str(file), *quiet) == (0, first, "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert command("--prompt", "-", *quiet) == (0, first, "")
    assert command("--prompt", text.strip(), *quiet)[1] != first


def test_stop_strings_end_the_text(command):
    """--stop may be given several times; the first to come ends the text before it."""
    whole = expected(20, drafter=None)
    quiet = ["--plain", "--max-tokens", "20", "--stats", "json"]
    status, out, err = command(
        "--prompt", PROMPT, "--stop", whole[9:11], "--stop", whole[5:7], *quiet
    )
    assert (status, out) == (0, whole[:5])
    assert json.loads(err)["finish_reason"] == "stop"


def test_steps_per_visit_reach_the_loop(command):
    """The same text; the statistics say how often the host looked."""
    base = ["--prompt", PROMPT, "--plain", "--max-tokens", "20", "--stats", "json"]
    for count, visits in (("1", 19), ("8", 3)):
        status, out, err = command(*base, "--steps-per-visit", count)
        assert (status, out) == (0, expected(20, drafter=None))
        figures = json.loads(err)
        assert (figures["visits"], figures["steps_per_visit"]) == (visits, int(count))
        assert figures["steps"] == 19 and figures["wasted_steps"] == 0
        assert 0 < figures["wait_s"] <= figures["decode_s"] and figures["idle_s"] >= 0


def test_sampling_options_reach_the_sampler(command):
    """Same seed, same text; another seed or setting, another text."""
    base = ["--prompt", PROMPT, "--plain", "--max-tokens", "16", "--stats", "none"]
    drawn = [*base, "--temperature", "1.5", "--top-k", "200", "--top-p", "0.99", "--min-p", "1e-6"]
    status, out, err = command(*drawn, "--seed", "3")
    assert (status, err) == (0, "")
    assert command(*drawn, "--seed", "3")[1] == out
    assert command(*drawn, "--seed", "4")[1] != out
    narrow = [*drawn, "--top-k", "1"]  # the last one counts: k = 1 is greedy
    assert command(*narrow, "--seed", "4")[1] == expected(16, drafter=None)


def test_a_seed_that_changes_nothing_is_said(command):
    """No mistake, since scripts pass one always: the text of no seed, and one line."""
    quiet = ["--prompt", PROMPT, "--plain", "--max-tokens", "8", "--stats", "none"]
    said = "--seed has no effect at temperature 0 (greedy): add --temperature for another"
    for seed in ("0", "7"):
        status, out, err = command(*quiet, "--seed", seed)
        assert (status, out) == (0, expected(8, drafter=None))
        assert err == f"treejax.generate: {said}\n"


def test_a_large_trees_programs_are_announced(command, monkeypatch):
    """They compile for minutes: said wherever stderr goes, and not where nothing is compiled."""
    monkeypatch.setattr(generate, "LARGE_TREE", 4)
    how = ["--prompt", PROMPT, "--drafter", "suffix", "--tree", "chain4", "--stats", "none"]
    said = "compiling, unless it is in the cache, for a tree of 5 rows (chain4): this may take min"
    status, out, err = command(*how, "--max-tokens", "4")
    assert (status, out) == (0, expected(4, drafter=None))
    assert said in err and err.count("\n") == 1
    assert command(*how, "--max-tokens", "0") == (0, "", "")
    assert command(*how[:-3], "chain3", *how[-2:], "--max-tokens", "4") == (0, out, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["--prompt", "x", "--prompt-file", "y"], "not allowed with"),
        (["--prompt-file", "/no/such/file"], "/no/such/file: No such file"),
        (["--prompt", "x", "--bogus"], "unrecognized arguments: --bogus"),
        (["--prompt", "x", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["--prompt", "x", "--max-tokens", "-1"], "max_tokens is -1"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1"),
        (["--prompt", "x", "--temperature", "1", "--top-p", "0"], "top_p is 0"),
        (["--prompt", "x", "--seed", "-1"], "seed is -1"),
        (["--prompt", "x", "--policy", "magic"], "'magic', expected one of: snapshot"),
        (["--prompt", "x", "--drafter", "magic"], "'magic' is unknown"),
        (["--prompt", "x", "--drafter", "scripted"], "needs the true continuation"),
        (["--prompt", "x", "--tree", "oak"], "tree 'oak' is unknown"),
        (["--prompt", "x", "--drafter", "mtp", "--tree", "best4x2"], "cannot fill"),
        (["--prompt", "x", "--dtype", "float16"], "invalid choice"),
        (["--prompt", "x", "--steps-per-visit", "33"], "'33' is no number of steps, expected an"),
        (["--prompt", "x", "--steps-per-visit", "few"], "'few' is no number of steps"),
        (["--prompt", "x", "--stop", ""], "a stop string is empty"),
        (["--prompt", "x", "--stats-file", "/no/such/dir/f"], "/no/such/dir/f: No such file"),
        (["--prompt", "x\udcff"], "the prompt is not valid UTF-8 at byte 1"),
        (["--prompt", "x" * 2048], "shorten it"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command, arguments, message):
    status, out, err = command(*arguments)
    assert status == 2 and out == ""
    assert message in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "0.9"], "--top-p has no effect at temperature 0"),
        (["--top-k", "5"], "--top-k has no effect at temperature 0"),
        (["--min-p", "0.1"], "--min-p has no effect at temperature 0"),
        (["--exact-top-k"], "--exact-top-k has no effect without --top-k"),
        (["--plain", "--rule", "typical"], "--plain has no candidates to accept"),
        (["--check", "--rule", "typical"], "only rule match keeps plain's"),
        (["--drafter", "mtp", "--rule", "traversal"], "rule 'traversal' needs candidates"),
        (["--plain", "--drafter", "mtp"], "--plain drafts nothing: leave out --drafter"),
        (["--plain", "--tree", "chain3"], "--plain drafts nothing: leave out --tree"),
        (["--plain", "--check"], "--check compares with plain decoding"),
        (["--check", "--max-tokens", "0"], "--check has nothing to compare: --max-tokens is 0"),
        (["--implementation", "mosaic_gpu"], "'mosaic_gpu': the kernels need a Hopper GPU"),
    ],
)
def test_fc26_an_option_that_cannot_act_is_refused(command, arguments, message):
    """FC-26: never silently without effect."""
    status, out, err = command("--prompt", "x", *arguments)
    assert status == 2 and out == "" and message in err and err.count("\n") == 1


def test_fc10_an_empty_prompt_is_refused(command, tmp_path):
    """FC-10: length 0 is refused with a message and a non-zero exit code."""
    status, out, err = command("--prompt", "")
    assert (status, out) == (2, "") and "the prompt is empty" in err
    (tmp_path / "empty").touch()
    status, out, err = command("--prompt-file", str(tmp_path / "empty"))
    assert (status, out) == (2, "") and "is empty" in err and err.count("\n") == 1


def test_fc20_the_mtp_drafter_of_a_model_without_one(command, tmp_path):
    """FC-20: asked for, it fails before generating; not asked for, the model runs and says so."""
    plain = str(tmp_path / "plain")
    save_model(byte_model.model(mtp=False), plain)
    status, out, err = command("--prompt", "x", "--drafter", "mtp", checkpoint=plain)
    assert (status, out) == (2, "") and "no mtp.* tensors" in err and err.count("\n") == 1
    arguments = ["--prompt", "x", "--max-tokens", "0", "--stats", "none"]
    status, out, err = command(*arguments, checkpoint=plain)
    assert (status, out) == (0, "") and "no MTP head, so 'suffix' drafts" in err


def red():
    return agreement.Agreement(40, 7, (1, 2), 3.5, 1e-5, {}, 1e-5)


def test_fc22_a_red_check_is_said_and_exits_1(command, monkeypatch):
    """FC-22: a difference that no rounding explains is a failure, with its place and margin."""
    monkeypatch.setattr(agreement, "compare", lambda *_, **__: red())
    arguments = ["--prompt", PROMPT, "--max-tokens", "40", "--check", "--stats"]
    status, _, err = command(*arguments, "text")
    assert status == 1
    assert "DIFFERS at token 7 of 40: plain 1, drafted 2, margin 3.5 >= 1e-05 nats" in err
    status, _, err = command(*arguments, "json")
    assert status == 1 and json.loads(err)["check"]["ok"] is False
    status, _, err = command(*arguments, "none")
    assert (status, err) == (1, "")


def test_an_interrupt_prints_the_statistics_so_far(command, monkeypatch):
    """Ctrl-C while text streams: what came, its figures, exit status 130."""
    shown = []

    def show(self, piece):
        if len(shown) == 5:
            raise KeyboardInterrupt
        shown.append(piece)

    monkeypatch.setattr(printing.TextPrinter, "show", show)
    status, _, err = command("--prompt", PROMPT, "--plain", "--max-tokens", "20")
    assert status == 130 and "generated   6 tok" in err and "end: interrupted" in err


def test_list_names_what_the_options_accept(command):
    status, out, err = command("--list")
    assert (status, err) == (0, "")
    for name in ("policies", "drafters", "trees", "families", "models", "devices"):
        assert re.search(rf"^{name} ", out, re.MULTILINE), name
    assert "hydra27" in out and "qwen3_next" in out and "replay" in out
    assert "xla (not mosaic_gpu: the kernels need a Hopper GPU" in out


def test_a_profile_is_written(command, tmp_path):
    arguments = [
        "--plain",
        "--max-tokens",
        "4",
        "--stats",
        "none",
        "--profile",
        str(tmp_path / "p"),
    ]
    status, _, err = command("--prompt", PROMPT, *arguments)
    assert (status, err) == (0, "")
    assert list((tmp_path / "p").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_processes_a_second_start_a_closed_pipe_and_an_interrupt(folder, tmp_path):
    """Real processes: nothing of Python's or XLA's on stderr, programs reused, quiet ends."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "shared")}
    environment.pop("TREEJAX_TYPECHECK", None)

    def start(*arguments):
        command = [sys.executable, "-m", "treejax.generate", "--checkpoint", folder, "--plain"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*command, "--prompt", PROMPT, *arguments], env=environment, stdout=pipe, stderr=pipe
        )

    short = ["--max-tokens", "20", "--stats", "none"]
    text = expected(20, drafter=None).encode()
    first = start(*short)
    assert first.communicate(timeout=300) == (text, b"") and first.returncode == 0
    cached = {file.name for file in (tmp_path / "shared").rglob("*-cache")}
    assert any("jit_step" in name for name in cached)
    second = start(*short)
    assert second.communicate(timeout=300) == (text, b"") and second.returncode == 0
    assert {file.name for file in (tmp_path / "shared").rglob("*-cache")} == cached

    with start(*short) as closed:
        assert closed.stdout is not None and closed.stderr is not None
        closed.stdout.close()  # as ``| head -c 0`` does
        assert closed.stderr.read() == b"" and closed.wait(timeout=300) == 0

    with start("--max-tokens", "248", "--steps-per-visit", "1") as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.read(1)
        stopped.send_signal(signal.SIGINT)
        _, err = stopped.communicate(timeout=300)
    assert stopped.returncode in (0, 130)  # 0 if it was done already, and Python at its own end
    assert stopped.returncode == 0 or b"Traceback" not in err
    assert (b"end: interrupted" in err) == (stopped.returncode == 130)
