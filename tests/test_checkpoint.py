"""Hugging Face folders: nothing missing, nothing ignored, exact round trips (FC-07, 09, 20)."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import PRESETS, checkpoint
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from treejax import checkpoint as checkpoints
from treejax import export
from treejax.checkpoint import load_model, save_model
from treejax.config import FULL, LINEAR, ModelConfig
from treejax.families.entries import leaves_by_path
from treejax.model import Model
from treejax.parameters import FLOAT32_ALWAYS, abstract

FUSED_EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def stored_tensors(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same(got, expected):
    """The same tree, bit for bit and dtype for dtype."""
    got, expected = leaves_by_path(got), leaves_by_path(expected)
    assert got.keys() == expected.keys()
    for path, leaf in expected.items():
        assert got[path].dtype == leaf.dtype, path
        assert np.asarray(got[path]).tobytes() == np.asarray(leaf).tobytes(), path


def random_model(config, dtype="float32"):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), abstract(config, dtype)
    )
    return Model(params, config)


@pytest.fixture
def edited(tmp_path):
    """Copy a golden folder; return a function that changes its tensors and configuration."""

    def edit(preset, tensors=lambda t: None, config=lambda c: None):
        folder = tmp_path / preset
        shutil.copytree(checkpoint(preset), folder)
        content = stored_tensors(folder)
        tensors(content)
        for path in folder.glob("model*"):
            path.unlink()
        save_file(content, folder / "model.safetensors")
        settings = json.loads((folder / "config.json").read_text())
        config(settings)
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    return edit


def one_line(folder, dtype="float32"):
    """The message of the error that loading gives."""
    with pytest.raises(ValueError) as caught:
        load_model(folder, dtype)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_golden_checkpoints_load(preset, dtype):
    model = load_model(checkpoint(preset), dtype)
    wanted = leaves_by_path(abstract(model.config, dtype))
    given = leaves_by_path(model.params)
    assert given.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert (given[path].shape, given[path].dtype) == (leaf.shape, leaf.dtype), path
    assert model.config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert model.config.mtp_num_hidden_layers == 1
    assert model.tokenizer is None
    assert model.summary.parameters == sum(leaf.size for leaf in wanted.values())
    assert model.summary.bytes == sum(leaf.nbytes for leaf in given.values())


def test_values_go_where_the_layout_says():
    stored = stored_tensors(checkpoint("qwen3_5"))
    params = load_model(checkpoint("qwen3_5")).params
    same = {
        "linear_attn.in_proj_qkv.weight": params["layers"][1]["mixer"]["qkv"].T,
        "linear_attn.conv1d.weight": params["layers"][1]["mixer"]["conv"].T[:, None],
        "linear_attn.A_log": params["layers"][1]["mixer"]["A_log"],
        "linear_attn.norm.weight": params["layers"][1]["mixer"]["norm_gated"],
        "post_attention_layernorm.weight": params["layers"][1]["norm_post"],
        "mlp.up_proj.weight": params["layers"][1]["mlp"]["up"].T,
    }
    for name, value in same.items():
        np.testing.assert_array_equal(stored[f"model.layers.1.{name}"], value, err_msg=name)
    np.testing.assert_array_equal(stored["mtp.fc.weight"], params["mtp"]["fc"].T)
    np.testing.assert_array_equal(stored["lm_head.weight"], params["lm_head"])


def test_fused_and_split_experts_load_alike(edited):
    def split(tensors):
        for name in [n for n in tensors if ".experts." in n]:
            stem = name.rsplit(".", 1)[0]
            for e, value in enumerate(tensors.pop(name)):
                parts = {"down": value}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate", "up"), np.split(value, 2), strict=True))
                for part, x in parts.items():
                    tensors[f"{stem}.{e}.{part}_proj.weight"] = np.ascontiguousarray(x)

    assert_same(
        load_model(edited("qwen3_5_moe", split)).params,
        load_model(checkpoint("qwen3_5_moe")).params,
    )


# FC-07: dtypes


def test_fc07_gates_stay_float32_through_a_bfloat16_checkpoint(tmp_path, edited):
    """FC-07: A_log and dt_bias are widened, not rounded, through load, save and load again."""
    exact = np.float32(2.7)  # 2.703125 in bfloat16

    def store(tensors):
        for name, value in tensors.items():
            if name.endswith("A_log"):
                tensors[name] = np.full_like(value, exact, np.float32)
            if name.endswith("dt_bias"):
                assert value.dtype == jnp.bfloat16  # as published

    folder = edited("qwen3_5_wrapped", store)
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


def test_fc07_gates_stored_in_bfloat16_are_widened(edited):
    """FC-07: a checkpoint that stores A_log in bfloat16 gives float32 of the stored value."""

    def narrow(tensors):
        for name in [n for n in tensors if n.endswith(("A_log", "linear_attn.norm.weight"))]:
            tensors[name] = tensors[name].astype(jnp.bfloat16)

    folder = edited("qwen3_5", narrow)
    A_log = load_model(folder, "bfloat16").params["layers"][2]["mixer"]["A_log"]
    assert A_log.dtype == jnp.float32
    stored = stored_tensors(folder)["model.layers.2.linear_attn.A_log"]
    np.testing.assert_array_equal(A_log, stored.astype(np.float32))


def test_bfloat16_rounds_to_nearest(edited):
    stored = stored_tensors(checkpoint("qwen3_5"))["model.embed_tokens.weight"]
    embed = load_model(checkpoint("qwen3_5"), "bfloat16").params["embed"]
    np.testing.assert_array_equal(embed, jnp.asarray(stored).astype(jnp.bfloat16))


# FC-09e


@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf, 100.0])
def test_fc09e_unusable_decay_is_reported_at_load(edited, value):
    """FC-09 (e): an A_log of -inf (or nan, or one whose exp overflows) names its layer."""

    def spoil(tensors):
        tensors["model.layers.2.linear_attn.A_log"][1] = value

    message = one_line(edited("qwen3_5", spoil))
    assert "A_log of layer 2 is" in message and f"{value}" in message


# FC-20: nothing missing, nothing ignored


def test_fc20_an_absent_shard_is_named(tmp_path):
    """FC-20: a shard that the index names and the folder lacks is an error naming it."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_5_wrapped"), folder)
    (folder / "model-00003-of-00004.safetensors").unlink()
    message = one_line(folder)
    assert "model-00003-of-00004.safetensors" in message and "absent" in message


def test_fc20_a_cut_shard_is_named(tmp_path):
    """FC-20: a broken download (a file that ends early) is an error naming the file."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_5_wrapped"), folder)
    path = folder / "model-00002-of-00004.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-100])
    message = one_line(folder)
    assert path.name in message and "damaged or incomplete" in message


def test_fc20_a_tensor_missing_from_its_shard_is_named(tmp_path):
    """FC-20: the index promises a tensor that its shard does not hold."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_5_wrapped"), folder)
    path = folder / "model-00004-of-00004.safetensors"
    tensors = load_file(path)
    del tensors["mtp.fc.weight"]
    path.unlink()
    save_file(tensors, path)
    message = one_line(folder)
    assert "'mtp.fc.weight'" in message and path.name in message


def test_fc20_every_tensor_is_used_or_listed_as_skipped():
    """FC-20: the summary accounts for every stored tensor; only vision tensors are skipped."""
    for preset, head in zip(PRESETS, (35, 15, 15, 19), strict=True):
        summary = load_model(checkpoint(preset)).summary
        names = stored_tensors(checkpoint(preset))
        visual = {name for name in names if name.startswith("model.visual.")}
        assert set(summary.skipped) == visual
        assert summary.tensors == len(names) - len(visual)
        assert summary.mtp_tensors == head
        assert f"{head} of the MTP head" in str(summary) and "\n" not in str(summary)
    assert len(visual) == 0 and "skipped" not in str(summary)
    wrapped = load_model(checkpoint("qwen3_5_wrapped")).summary
    assert "21 vision tensors skipped" in str(wrapped)


def test_fc20_an_unknown_tensor_is_an_error(edited):
    """FC-20: a tensor that the model does not have is named, not ignored."""

    def add(tensors):
        tensors["model.layers.0.linear_attn.bias"] = np.zeros(3, np.float32)

    assert "'model.layers.0.linear_attn.bias'" in one_line(edited("qwen3_5", add))


def test_fc20_an_unused_mtp_tensor_is_an_error(edited):
    """FC-20: mtp.* beyond the head's own, or without a head in the configuration."""

    def add(tensors):
        tensors["mtp.layers.1.input_layernorm.weight"] = np.zeros(48, np.float32)

    assert "'mtp.layers.1.input_layernorm.weight'" in one_line(edited("qwen3_5", add))


def test_fc20_a_head_that_the_configuration_denies_is_an_error(edited):
    """FC-20: 15 mtp.* tensors and mtp_num_hidden_layers 0."""

    def deny(config):
        config["mtp_num_hidden_layers"] = 0

    message = one_line(edited("qwen3_5", config=deny))
    assert "15 tensors" in message and "mtp_num_hidden_layers 0" in message


def test_fc20_half_a_head_is_an_error(edited):
    """FC-20: some mtp.* tensors but not all."""
    message = one_line(edited("qwen3_next", lambda t: t.pop("mtp.norm.weight")))
    assert "'mtp.norm.weight' is missing" in message


@pytest.mark.parametrize("preset", PRESETS)
def test_fc20_a_model_without_mtp_tensors_loads_plain(edited, preset):
    """FC-20: the configuration announces MTP layers, the folder has none: no head, no error."""

    def remove(tensors):
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    model = load_model(edited(preset, remove))
    assert model.config.mtp_num_hidden_layers == 0
    assert "mtp" not in model.params
    assert model.summary.mtp_tensors == 0


def test_fc20_an_untied_model_needs_its_head(edited):
    """FC-20: tie_word_embeddings false and no lm_head.weight is an error that says why."""
    message = one_line(edited("qwen3_5", lambda t: t.pop("lm_head.weight")))
    assert "'lm_head.weight' is missing (tie_word_embeddings is false)" in message


def test_fc20_an_untied_head_is_used(edited):
    """FC-20: tie_word_embeddings false -> lm_head.weight is the head, not the embedding."""
    params = load_model(checkpoint("qwen3_5")).params
    assert np.abs(params["lm_head"] - params["embed"]).max() > 0.01


def test_fc20_a_tied_model_may_store_its_head_twice(edited):
    """FC-20: an equal copy is skipped and listed; a different one contradicts the configuration."""

    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]

    def other(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 0

    folder = edited("qwen3_5_wrapped", copy)
    model = load_model(folder)
    assert "lm_head.weight" in model.summary.skipped and "lm_head" not in model.params
    tensors = stored_tensors(folder)
    other(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight differs" in one_line(folder)


def test_a_wrong_shape_names_tensor_got_and_expected(edited):
    """The usual sign of a converted checkpoint is conv1d without its middle axis."""
    name = "model.layers.0.linear_attn.conv1d.weight"

    def squeeze(tensors):
        tensors[name] = np.ascontiguousarray(tensors[name][:, 0])

    message = one_line(edited("qwen3_5", squeeze))
    assert f"'{name}' has shape [80, 4], expected [80, 1, 4]" in message


def test_a_quantised_tensor_is_refused(edited):
    def quantise(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)

    assert "'model.norm.weight' has dtype I8" in one_line(edited("qwen3_5", quantise))


# Folders, names, end tokens, tokenizers


def test_a_folder_without_the_files_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    assert "has neither model.safetensors nor" in one_line(tmp_path / "model")
    shutil.copy(checkpoint("qwen3_5") / "model.safetensors", tmp_path / "model")
    assert "has no config.json" in one_line(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": ')
    assert "config.json is not valid JSON" in one_line(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    message = one_line(tmp_path / "model")
    assert "config.json: model_type 'gpt2' is not supported" in message


def test_names_of_shipped_models(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="no model folder 'nowhere'; models that ship: "):
        load_model("nowhere")
    with pytest.raises(ValueError, match="dtype is 'float16', expected float32 or bfloat16"):
        load_model(checkpoint("qwen3_5"), "float16")
    monkeypatch.setattr(checkpoints, "SHIPPED", {"pocket": checkpoint("qwen3_5")})
    assert load_model().config == load_model("pocket").config
    assert load_model(str(checkpoint("qwen3_next"))).config.family == "qwen3_next"


def test_generation_config_adds_end_tokens(edited):
    def ends(config):
        config["eos_token_id"] = 5

    folder = edited("qwen3_5", config=ends)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load_model(folder).config.eos_token_ids == (5, 7)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_model(folder).config.eos_token_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "generation_config.json: eos_token_id is 'x'" in one_line(folder)


def words(count):
    return Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))


def test_tokenizer_is_read_saved_and_checked(tmp_path, edited):
    folder = edited("qwen3_5", config=lambda c: c.update(eos_token_id=3))
    words(97).save(str(folder / "tokenizer.json"))
    model = load_model(folder)
    assert model.tokenizer.encode("w5").ids == [5]
    save_model(model, tmp_path / "again")
    assert load_model(tmp_path / "again").tokenizer.to_str() == model.tokenizer.to_str()
    settings = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "w3"
    words(98).save(str(folder / "tokenizer.json"))
    assert "has 98 tokens, expected at most vocab_size (97)" in one_line(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert "is not a readable tokenizer" in one_line(folder)


# Saving


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
