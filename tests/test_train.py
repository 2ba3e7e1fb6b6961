"""The training command: it learns, survives a kill, resumes exactly, and refuses mistakes."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import treejax
from treejax import train
from treejax.cli import guard
from treejax.training import checkpoints, corpus, loop, settings
from treejax.training.batches import Batches

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "configs" / "train" / "smoke.toml"
SMALL = ROOT / "configs" / "train" / "small.toml"


def write_config(path: Path, **changes: str) -> Path:
    """The smoke configuration with some lines replaced, its root made absolute."""
    text = SMOKE.read_text().replace("../../treejax", str(ROOT / "treejax" / "training"))
    for name, value in changes.items():
        old = [line for line in text.splitlines() if line.startswith(f"{name} = ")]
        assert len(old) == 1, name
        text = text.replace(old[0], f"{name} = {value}")
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """That of the module's runs: they share a compilation cache, and compile in a hurry."""
    kept = {name: value for name, value in os.environ.items() if name != "TREEJAX_TYPECHECK"}
    cache = str(tmp_path_factory.mktemp("cache"))
    return kept | {"XDG_CACHE_HOME": cache, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "treejax.train", *map(str, arguments)]


def run_command(environment, *arguments: object) -> str:
    """stderr of a run that must succeed."""
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def mistake(capsys, *arguments: object) -> str:
    """The one line of a run in this process that the user got wrong."""
    try:
        status = guard.run_command(train.NAME, train.main, [str(a) for a in arguments])
    except SystemExit as stop:  # argparse
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    return err.removesuffix("\n")


def curve(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def same_weights(one: Path, two: Path) -> None:
    a, b = treejax.load_model(one / "model"), treejax.load_model(two / "model")
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, environment):
    """An uninterrupted run of 60 steps through the command: its folder and its stderr."""
    folder = tmp_path_factory.mktemp("train")
    config = write_config(folder / "c.toml", steps="60")
    stderr = run_command(environment, config, "--out", folder / "run", "--log-every", 1)
    return folder / "run", config, stderr


def test_training_learns_and_exports_a_model(whole_run):
    folder, config, stderr = whole_run
    rows = curve(folder)
    assert [row["step"] for row in rows] == list(range(1, 61))
    for term in ("main", "mtp", "chained"):
        # A uniform guess over 300 tokens is 5.70 nats; byte frequencies alone give about 4.
        assert 5.5 < rows[0][term] < 6.0
        assert np.mean([row[term] for row in rows[-10:]]) < rows[0][term] - 1.0
    assert "Traceback" not in stderr and "Warning" not in stderr
    model = treejax.load_model(folder / "model", dtype="bfloat16")
    assert model.config == dataclasses.replace(settings.read_settings(config).model)
    assert model.tokenizer.token_to_id(corpus.FILE_TOKEN) == 0
    beside = folder / "model" / "training"
    assert (beside / "config.toml").read_text() == config.read_text()
    assert (beside / "log.jsonl").read_text() == (folder / "log.jsonl").read_text()
    assert (beside / "command.txt").read_text().startswith("python -m treejax.train ")
    assert json.loads((beside / "corpus.json").read_text())["tokens"] > 10_000


KILLED_WHILE_SAVING = """
import dataclasses, os, signal, sys
from orbax.checkpoint._src.path import async_path
from treejax import train
from treejax.training import loop
from treejax.training.checkpoints import Checkpoints

run, save = loop.run, Checkpoints.save

async def killed(source, destination):  # all is written, only the last step is missing
    os.kill(os.getpid(), signal.SIGKILL)

def due_at_every_step(settings, *rest, **named):
    return run(dataclasses.replace(settings, checkpoint_seconds=0.0), *rest, **named)

def save_two(self, state, progress):
    if progress.step == 31:
        self.wait()
        async_path.rename = killed
    if progress.step in (17, 31):
        save(self, state, progress)

loop.run, Checkpoints.save = due_at_every_step, save_two
train.main(sys.argv[1:])
"""


def test_fc25_killed_while_saving_resumes_to_the_same_parameters(whole_run, environment, tmp_path):
    """FC-25: SIGKILL in the save of step 31; --resume says so, goes on from 17, ends bitwise alike.

    Alike the uninterrupted run, on one CPU.
    """
    folder, config, _ = whole_run
    out = tmp_path / "run"
    shutil.copytree(folder / "corpus", out / "corpus")
    arguments = [config, "--out", out, "--log-every", 1]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(curve(out)) > 17
    stderr = run_command(environment, *arguments, "--resume")
    note = f"step 31 in {out / 'checkpoints'} was not completed, using step 17"
    lines = stderr.splitlines()  # "compiled", said by another thread, may stand between the two
    assert lines.index(note) < lines.index("resuming after step 17")
    same_weights(folder, out)
    assert [row["step"] for row in curve(out)] == list(range(1, 61))
    losses = [[row["main"] for row in curve(f)] for f in (folder, out)]
    assert losses[0] == losses[1]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["17", "60"]


def test_sigterm_saves_and_says_how_to_resume(whole_run, environment, tmp_path, capsys):
    folder, _, _ = whole_run
    config = write_config(tmp_path / "c.toml", steps="100000", checkpoint_seconds="1000.0")
    out = tmp_path / "run"
    shutil.copytree(folder / "corpus", out / "corpus")
    process = subprocess.Popen(
        command(config, "--out", out, "--log-every", 1),
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None:
        if (out / "log.jsonl").exists() and len(curve(out)) > 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert f"python -m treejax.train {config} --out {out} --log-every 1 --resume" in stderr
    saved = checkpoints.Checkpoints(out / "checkpoints")
    assert saved.note() is None
    _, progress = saved.load(settings.read_settings(config))
    saved.close()
    assert progress.step == curve(out)[-1]["step"]
    assert "holds a run already: add --resume" in mistake(capsys, config, "--out", out)


def test_fc25_a_first_save_that_was_killed_leaves_a_note(tmp_path):
    """FC-25: with no complete step before it, the run begins again and says why."""
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    saved = checkpoints.Checkpoints(tmp_path)
    assert not saved.has_any()
    assert saved.note() == f"step 5 in {tmp_path} was not completed, there is no earlier one"
    saved.close()


def test_time_budget_sets_the_schedule_and_ends_in_time(whole_run, tmp_path, monkeypatch):
    folder, config, _ = whole_run
    made = settings.read_settings(config)
    schedule = dataclasses.replace(made.schedule, steps=0, seconds=10.0)
    made = dataclasses.replace(made, schedule=schedule, checkpoint_seconds=100.0)
    batches = Batches(np.load(folder / "corpus" / "tokens.npy"), 4, 64, 3, 0)
    saved = checkpoints.Checkpoints(tmp_path / "c")
    curve_file = loop.Curve(tmp_path / "log.jsonl", 0)
    rows: list[loop.Row] = []

    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(loop, "time", clock)

    def step(state, tokens, rate):
        clock.now += 0.0625  # exact in binary
        return state, np.full(4, rate)

    loop.run(
        made,
        step,
        jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), checkpoints.abstract_state(made)
        ),
        checkpoints.Progress(0, -1, 0.0),
        batches,
        saved,
        curve_file,
        log_every=1,
        should_stop=lambda: False,
        report=rows.append,
    )
    curve_file.close()
    _, progress = saved.load(made)
    saved.close()
    assert rows[-1].step == rows[-1].total == progress.total
    assert (progress.total, progress.seconds) == (160, 10.0)
    # The cosine ends at 1 % of the peak: one step before its end it is barely above.
    assert rows[-1].main == pytest.approx(0.01 * made.optimizer.learning_rate, rel=0.05)


def test_batches_are_a_function_of_the_step():
    tokens = np.arange(10_000, dtype=np.uint16)
    batches = Batches(tokens, batch=4, window=64, ahead=3, seed=1)
    steps = batches.steps_per_epoch
    assert steps == (10_000 - 63 - 3) // 64 // 4
    epoch = np.concatenate([batches.starts(s) for s in range(steps)])
    assert len(set(epoch.tolist())) == 4 * steps and len(set((epoch % 64).tolist())) == 1
    block = batches[3]
    np.testing.assert_array_equal(block - block[:, :1], np.tile(np.arange(67), (4, 1)))
    later = Batches(tokens, batch=4, window=64, ahead=3, seed=1)
    np.testing.assert_array_equal(later[5 * steps + 2], batches[5 * steps + 2])
    assert not np.array_equal(np.sort(epoch), np.sort(batches.starts(steps)))
    with pytest.raises(ValueError, match="too few for one batch"):
        Batches(tokens[:200], batch=4, window=64, ahead=3, seed=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": "0"}, "expected exactly one of them above 0"),
        ({"window": "100"}, "schedule.window is 100, expected a multiple of 64"),
        ({"window": "512"}, "above model.max_position_embeddings"),
        ({"dtype": '"float16"'}, "dtype is 'float16', expected one of: float32, bfloat16"),
        ({"batch": '"many"'}, "schedule.batch is 'many', expected int"),
        ({"warmup": "5\nspeed = 3"}, "unknown key 'speed'"),
        ({"mtp_weights": "[0.3]"}, "mtp_weights has 1 numbers, expected 2"),
        ({"mtp_num_hidden_layers": "0"}, "model.mtp_num_hidden_layers is 0"),
        ({"vocab_size": "100"}, "model.vocab_size is 100, expected 257 to 65536"),
    ],
)
def test_configuration_mistakes_are_one_line(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        settings.read_settings(write_config(tmp_path / "c.toml", **changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_command_reports_mistakes_on_one_line(tmp_path, capsys):
    missing, out = tmp_path / "missing.toml", tmp_path / "run"
    said = mistake(capsys, missing, "--out", out)
    assert said == f"treejax.train: no such configuration file: {missing}"
    config = write_config(tmp_path / "c.toml")
    said = mistake(capsys, config, "--out", out, "--resume")
    assert said == f"treejax.train: {out} holds no run to resume: leave out --resume"
    assert not out.exists()
    out.mkdir()
    write_config(out / "config.toml", steps="41")
    assert "expected the run's own" in mistake(capsys, config, "--out", out, "--resume")
    assert "required: --out" in mistake(capsys, config)


def test_shipped_recipe_fits_its_promises():
    made = settings.read_settings(SMALL)
    count = loop.parameter_count(checkpoints.abstract_state(made).params)
    assert 8e6 <= count <= 11.7e6
    model = made.model
    assert model.layer_types.count("linear_attention") == 3 * len(model.full_layers)
    assert model.linear_num_value_heads == 2 * model.linear_num_key_heads
    assert made.schedule.window >= 2048 and 4096 <= model.vocab_size <= 8192
    assert "astropy" in made.corpus.exclude
    held_out = SMALL.parent / tomllib.loads(SMALL.read_text())["corpus"]["held_out"]
    assert held_out.exists() and os.path.getsize(held_out) <= 300_000
