"""Loading Hugging Face folders: nothing missing, nothing ignored (FC-09, FC-20)."""

import functools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from folders import assert_same, edit, stored_tensors
from golden import PRESETS, checkpoint
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from treejax import audit
from treejax import checkpoint as checkpoints
from treejax.checkpoint import load_model, save_model
from treejax.config import FULL, LINEAR
from treejax.families.entries import leaves_by_path
from treejax.parameters import abstract


@pytest.fixture
def edited(tmp_path):
    """``edit(preset, tensors, config)`` into this test's folder."""
    return functools.partial(edit, tmp_path)


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


@pytest.mark.parametrize("model", [5, b"python-11m", ["python-11m"]])
def test_what_is_no_folder_or_name_is_refused_in_a_line(model):
    with pytest.raises(ValueError, match=r"^model is .*, expected a folder, a name"):
        load_model(model)
    with pytest.raises(ValueError, match=r"^model is .*, expected a folder, a name"):
        audit.run(model=model, quick=True)


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
