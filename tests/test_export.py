"""Saving Hugging Face folders: exact round trips, shards, whole folders, kept dtypes (FC-07)."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import assert_same, edit, stored_tensors
from golden import PRESETS, checkpoint
from safetensors.numpy import load_file

from treejax import export
from treejax.checkpoint import load_model, save_model
from treejax.config import FULL, LINEAR, ModelConfig
from treejax.families.entries import leaves_by_path
from treejax.model import Model
from treejax.parameters import FLOAT32_ALWAYS, abstract

FUSED_EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def random_model(config, dtype="float32"):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), abstract(config, dtype)
    )
    return Model(params, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_save_and_load_is_bitwise(tmp_path, preset, dtype):
    model = load_model(checkpoint(preset), dtype)
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model", dtype)
    assert again.config == model.config
    assert_same(again.params, model.params)
    assert again.summary.mtp_tensors == {"qwen3_next": 35, "qwen3_5_moe": 19}.get(preset, 15)
    names = stored_tensors(tmp_path / "model")
    assert (FUSED_EXPERTS in names) == (preset == "qwen3_5_moe")


@pytest.mark.parametrize("preset", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_saved_tensors_equal_those_that_transformers_wrote(tmp_path, preset):
    """The golden checkpoints come from ``save_pretrained``, the text-only ones in our names."""
    save_model(load_model(checkpoint(preset)), tmp_path / "model")
    theirs, ours = stored_tensors(checkpoint(preset)), stored_tensors(tmp_path / "model")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_weights_go_into_shards_below_the_bound(tmp_path):
    model = load_model(checkpoint("qwen3_5"))
    save_model(model, tmp_path / "model", shard_bytes=100_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) == 6 and "model-00006-of-00006.safetensors" in files
    for file in files:
        path = tmp_path / "model" / file
        assert sum(x.nbytes for x in load_file(path).values()) <= 100_000
        assert path.stat().st_mode == (tmp_path / "model" / "config.json").stat().st_mode
    assert index["metadata"]["total_size"] == model.summary.bytes
    assert_same(load_model(tmp_path / "model").params, model.params)


def test_a_head_less_and_a_tied_model_are_saved(tmp_path):
    config = dataclasses.replace(
        load_model(checkpoint("qwen3_next")).config,
        mtp_num_hidden_layers=0,
        tie_word_embeddings=True,
    )
    model = random_model(config)
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config == config
    assert_same(again.params, model.params)


def test_saving_again_replaces_the_weights_and_keeps_other_files(tmp_path):
    folder = tmp_path / "deep" / "model"
    save_model(load_model(checkpoint("qwen3_5")), folder, shard_bytes=100_000)
    (folder / "notes.txt").write_text("mine")
    (folder / "training").mkdir()
    (folder / "training" / "log.jsonl").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    moe = load_model(checkpoint("qwen3_5_moe"))
    save_model(moe, folder)
    files = {"config.json", "model.safetensors", "notes.txt", "training"}
    assert {path.name for path in folder.iterdir()} == files
    assert (folder / "training" / "log.jsonl").read_text() == "{}"
    assert_same(load_model(folder).params, moe.params)
    assert os.listdir(folder.parent) == ["model"]


def test_relative_paths_and_links_are_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to("disk")
    model = load_model(checkpoint("qwen3_5_wrapped"))
    for target in ("model", "disk/inner"):
        save_model(model, target)
        assert_same(load_model(target).params, model.params)
    assert (tmp_path / "model").is_symlink()
    monkeypatch.chdir(tmp_path / "disk" / "inner")
    save_model(model, ".")
    assert_same(load_model(tmp_path / "disk" / "inner").params, model.params)


def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch):
    model = load_model(checkpoint("qwen3_5"))
    save_model(model, tmp_path / "model")

    def full(folder, tensors, shard_bytes):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "write_tensors", full)
    with pytest.raises(OSError, match="no space"):
        save_model(model, tmp_path / "model")
    with pytest.raises(OSError, match="no space"):
        save_model(model, tmp_path / "other")
    assert os.listdir(tmp_path) == ["model"]
    assert_same(load_model(tmp_path / "model").params, model.params)


KILLED_WHILE_SAVING = """
import os, signal, sys
from treejax import export
from treejax.checkpoint import load_model, save_model
assert "orbax" not in sys.modules, "loading a model must not pay for orbax"
write = export.write_tensors
def killed(folder, tensors, shard_bytes):
    write(folder, dict(list(tensors.items())[:40]), shard_bytes)
    os.kill(os.getpid(), signal.SIGKILL)
export.write_tensors = killed
save_model(load_model(sys.argv[1]), sys.argv[2])
"""


def test_a_killed_save_leaves_no_half_folder(tmp_path):
    """Also: importing and loading does not import orbax."""
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, checkpoint("qwen3_5")]
    done = subprocess.run([*command, tmp_path / "model"], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "model").exists()
    save_model(load_model(checkpoint("qwen3_5")), tmp_path / "model")
    load_model(tmp_path / "model")


def test_parameters_that_do_not_fit_are_refused(tmp_path):
    model = load_model(checkpoint("qwen3_5"))
    mixer = model.params["layers"][0]["mixer"]

    def saved(**change):
        params = {**model.params, **change}
        with pytest.raises(ValueError) as caught:
            save_model(dataclasses.replace(model, params=params), tmp_path / "model")
        assert not os.listdir(tmp_path)
        return str(caught.value)

    def with_mixer(**change):
        first = {**model.params["layers"][0], "mixer": {**mixer, **change}}
        return saved(layers=[first, *model.params["layers"][1:]])

    assert "'norm',) is float32[3], expected float32[48]" in saved(norm=jnp.zeros(3))
    assert "'A_log') is bfloat16[6], expected float32[6]" in with_mixer(
        A_log=mixer["A_log"].astype(jnp.bfloat16)
    )
    assert "'extra') is not part of the configuration" in with_mixer(extra=jnp.zeros(3))
    headless = {k: v for k, v in model.params.items() if k != "lm_head"}
    with pytest.raises(ValueError, match="'lm_head',\\) is missing"):
        save_model(dataclasses.replace(model, params=headless), tmp_path / "model")


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(ValueError, match="is a file, expected a folder"):
        save_model(load_model(checkpoint("qwen3_5")), tmp_path / "model")


def test_a_configuration_without_attention_or_recurrence_is_saved(tmp_path):
    """Nothing guarantees that both kinds of layer are there."""
    for kinds in ((LINEAR,), (FULL, FULL)):
        config = ModelConfig(
            family="qwen3_5",
            vocab_size=11,
            hidden_size=8,
            layer_types=kinds,
            intermediate_size=12,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=4,
            linear_conv_kernel_dim=3,
            rotary_dim=6,
            eos_token_ids=(1, 2),
            bos_token_id=3,
        )
        model = random_model(config, "bfloat16")
        save_model(model, tmp_path / "model")
        again = load_model(tmp_path / "model", "bfloat16")
        assert again.config == config
        assert_same(again.params, model.params)


def test_fc07_gates_stay_float32_through_a_bfloat16_checkpoint(tmp_path):
    """FC-07: A_log and dt_bias are widened, not rounded, through load, save and load again."""
    exact = np.float32(2.7)  # 2.703125 in bfloat16

    def store(tensors):
        for name, value in tensors.items():
            if name.endswith("A_log"):
                tensors[name] = np.full_like(value, exact, np.float32)
            if name.endswith("dt_bias"):
                assert value.dtype == jnp.bfloat16  # as published

    folder = edit(tmp_path, "qwen3_5_wrapped", store)
    dt_bias = stored_tensors(folder)["model.language_model.layers.0.linear_attn.dt_bias"]
    model = load_model(folder, "bfloat16")
    save_model(model, tmp_path / "again")
    for loaded in (model, load_model(tmp_path / "again", "bfloat16")):
        for path, leaf in leaves_by_path(loaded.params).items():
            always = path[-1] in FLOAT32_ALWAYS
            assert leaf.dtype == (jnp.float32 if always else jnp.bfloat16), path
        mixer = loaded.params["layers"][0]["mixer"]
        np.testing.assert_array_equal(mixer["A_log"], exact)
        np.testing.assert_array_equal(mixer["dt_bias"], dt_bias.astype(np.float32))
    names = stored_tensors(tmp_path / "again")
    kept = [n for n in names if n.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))]
    assert len(kept) == 9
    assert all(names[n].dtype == np.float32 for n in kept)


def test_fc07_gates_stored_in_bfloat16_are_widened(tmp_path):
    """FC-07: a checkpoint that stores A_log in bfloat16 gives float32 of the stored value."""

    def narrow(tensors):
        for name in [n for n in tensors if n.endswith(("A_log", "linear_attn.norm.weight"))]:
            tensors[name] = tensors[name].astype(jnp.bfloat16)

    folder = edit(tmp_path, "qwen3_5", narrow)
    A_log = load_model(folder, "bfloat16").params["layers"][2]["mixer"]["A_log"]
    assert A_log.dtype == jnp.float32
    stored = stored_tensors(folder)["model.layers.2.linear_attn.A_log"]
    np.testing.assert_array_equal(A_log, stored.astype(np.float32))
