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

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax import contrib

import treejax
from treejax.training import checkpoints, corpus, loop, settings
from treejax.training.batches import Batches
from treejax.training.optimizer import OptimizerSettings, learning_rate, make_optimizer

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


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "treejax.train", *map(str, arguments)]


def run_command(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True)


def curve(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def same_weights(one: Path, two: Path) -> None:
    a, b = treejax.load_model(one / "model"), treejax.load_model(two / "model")
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """An uninterrupted run of 60 steps through the command: its folder and its stderr."""
    folder = tmp_path_factory.mktemp("train")
    config = write_config(folder / "c.toml", steps="60", checkpoint_seconds="0.2")
    done = run_command(config, "--out", folder / "run", "--log-every", 1)
    assert done.returncode == 0, done.stderr
    return folder / "run", config, done.stderr


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


def test_killed_run_resumes_to_the_same_parameters(whole_run, tmp_path):
    """SIGKILL in the middle, then --resume: bitwise the uninterrupted run on one CPU."""
    folder, config, _ = whole_run
    out = tmp_path / "run"
    shutil.copytree(folder / "corpus", out / "corpus")
    process = subprocess.Popen(
        command(config, "--out", out, "--log-every", 1), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(p.name.isdigit() for p in (out / "checkpoints").glob("*")):
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    resumed = run_command(config, "--out", out, "--log-every", 1, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stderr
    same_weights(folder, out)
    assert [row["step"] for row in curve(out)] == list(range(1, 61))
    losses = [[row["main"] for row in curve(f)] for f in (folder, out)]
    assert losses[0] == losses[1]


def test_sigterm_saves_and_says_how_to_resume(whole_run, tmp_path):
    folder, _, _ = whole_run
    config = write_config(tmp_path / "c.toml", steps="100000", checkpoint_seconds="1000.0")
    out = tmp_path / "run"
    shutil.copytree(folder / "corpus", out / "corpus")
    process = subprocess.Popen(
        command(config, "--out", out, "--log-every", 1),
        cwd=ROOT,
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
    _, progress = saved.load(settings.read_settings(config))
    saved.close()
    assert progress.step == curve(out)[-1]["step"]
    again = run_command(config, "--out", out)
    assert again.returncode == 2 and "holds a run already" in again.stderr


def test_time_budget_sets_the_schedule_and_ends_in_time(whole_run, tmp_path):
    folder, config, _ = whole_run
    made = settings.read_settings(config)
    schedule = dataclasses.replace(made.schedule, steps=0, seconds=4.0)
    made = dataclasses.replace(made, schedule=schedule, checkpoint_seconds=100.0)
    batches = Batches(np.load(folder / "corpus" / "tokens.npy"), 4, 64, 3, 0)
    saved = checkpoints.Checkpoints(tmp_path / "c")
    curve_file = loop.Curve(tmp_path / "log.jsonl", 0)
    rows: list[loop.Row] = []

    def step(state, tokens, rate):  # 10 ms each, whatever else the machine does
        time.sleep(0.01)
        return state, jnp.full(4, rate)

    loop.run(
        made,
        step,
        checkpoints.init_state(made),
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
    # Sleeping 10 ms takes 10 to 13 ms; the first steps are not timed.
    assert 250 < progress.total <= 400 and 3.0 < progress.seconds < 6.0
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


@pytest.fixture
def optax_promotion():
    """optax relies on implicit promotion, which the tests forbid to our own code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_optimizer_equals_muon_and_adam_leaf_by_leaf(optax_promotion):
    """Stacking equal shapes and transposing tall ones changes nothing but the rounding."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    params = {
        "up": jax.random.normal(next(keys), (6, 10)),
        "down": jax.random.normal(next(keys), (10, 6)),
        "experts": jax.random.normal(next(keys), (2, 6, 10)),
        "embed": jax.random.normal(next(keys), (12, 6)),
        "norm": jax.random.normal(next(keys), (6,)),
    }
    made = OptimizerSettings(clip=1e9)
    optimizer = make_optimizer(made)
    state = optimizer.init(params)
    matrices = {
        "up": params["up"],
        "down": params["down"],
        "first": params["experts"][0],
        "second": params["experts"][1],
    }
    dims = jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), matrices)
    reference = contrib.scale_by_muon(beta=made.muon_momentum, weight_dimension_numbers=dims)
    reference_state = reference.init(matrices)
    for _ in range(2):
        grads = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape), params)
        updates, state = optimizer.update(grads, state, params)
        expected, reference_state = reference.update(
            {
                "up": grads["up"],
                "down": grads["down"],
                "first": grads["experts"][0],
                "second": grads["experts"][1],
            },
            reference_state,
        )
    got = updates | {"first": updates["experts"][0], "second": updates["experts"][1]}
    for name, leaf in matrices.items():
        wanted = 0.2 * 10**0.5 * expected[name] + 0.1 * leaf
        # Newton-Schulz amplifies float32 rounding by a few steps of slope 3.4.
        np.testing.assert_allclose(got[name], wanted, rtol=2e-4, atol=2e-4)
    # Adam's second step on two random gradients; norms do not decay, tables do.
    assert float(jnp.abs(updates["norm"]).max()) <= 1.01
    rest = updates["embed"] - 0.1 * params["embed"]
    assert float(jnp.abs(rest).max()) <= 1.01


def test_optimizer_clips_the_global_norm(optax_promotion):
    params = {"norm": jnp.zeros(4), "up": jnp.zeros((3, 4))}
    grads = {"norm": jnp.full(4, 1e3), "up": jnp.full((3, 4), 1e3)}
    optimizer = make_optimizer(OptimizerSettings())
    _, state = optimizer.update(grads, optimizer.init(params), params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,)]
    # 16 equal numbers of norm 1 are 0.25 each; the first moment keeps a tenth of it.
    np.testing.assert_allclose(moments[0], 0.025, rtol=1e-5)


def test_schedule_warms_up_and_ends_at_one_percent():
    made = OptimizerSettings(learning_rate=1.0)
    assert learning_rate(made, 0, None, 10) == pytest.approx(0.1)
    assert learning_rate(made, 500, None, 10) == 1.0
    assert learning_rate(made, 500, 1000, 10) == pytest.approx(0.505)
    assert learning_rate(made, 1000, 1000, 10) == pytest.approx(0.01)


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


def test_command_reports_mistakes_on_one_line(tmp_path):
    done = run_command(tmp_path / "missing.toml", "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == (
        f"treejax.train: no such configuration file: {tmp_path / 'missing.toml'}"
    )


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
