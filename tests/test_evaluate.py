"""The evaluation command against direct computations: treejax.score, and decoding with drafts."""

import dataclasses
import json
import lzma
import zipfile
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import treejax
from treejax import engine, evaluate
from treejax.checkpoint import save_model
from treejax.cli.guard import run_command
from treejax.config import LINEAR
from treejax.model import Model
from treejax.requests import make_requests
from treejax.training import measures
from treejax.training.corpus import train_tokenizer

pytestmark = pytest.mark.compiles_fast

WINDOW, STRIDE, PREFIXES = 64, 32, 4


def module(name: str, count: int) -> str:
    lines = [f"{name}_{i} = compute(argument_{i * i}, é={i})\n" for i in range(count)]
    return "".join(lines)


TEXTS = {
    "p/__init__.py": "",
    "p/long.py": module("long", 40),
    "p/longer.py": module("other", 60),
    "p/short.py": "import os\n",
}
TESTS = {"p/tests/test_long.py": module("tested", 50), "p/conftest.py": "import pytest\n"}


def write_wheel(path, texts):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def make_model() -> Model:
    """Random but for three matrices: a token is mostly followed by the next id.

    Embeddings outweigh the layers, ``lm_head`` shifts by one, and the MTP head passes the embedding
    on. So chains are sometimes right as a whole, sometimes in part and sometimes not at all.
    """
    config = dataclasses.replace(
        tiny.CONFIG,
        layer_types=(LINEAR,),  # and the attention layer of the head
        vocab_size=300,
        bos_token_id=0,
        max_position_embeddings=1024,
    )
    params = tiny.random_params(config)
    params["embed"] = 35.0 * params["embed"]
    params["lm_head"] = 0.1 * jnp.roll(params["embed"], 1, axis=0)
    size = config.hidden_size
    params["mtp"]["fc"] = jnp.concatenate([2.0 * jnp.eye(size), params["mtp"]["fc"][size:]])
    return Model(params, config, train_tokenizer(list(TEXTS.values()), 300))


class Evaluated(NamedTuple):
    model: Model
    files: list[np.ndarray]
    result: dict[str, Any]
    table: str


def run(*arguments):
    return run_command(evaluate.NAME, evaluate.main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """One run of the command over the wheel: what it read and what it reported."""
    folder = tmp_path_factory.mktemp("evaluate")
    wheel = write_wheel(folder / "p-1.0-py3-none-any.whl", TEXTS | TESTS)
    model = make_model()
    save_model(model, folder / "model")
    options = f"--batch 2 --window {WINDOW} --stride {STRIDE} --prefixes {PREFIXES}".split()
    options += ["--wheel", wheel, "--checkpoint", folder / "model", "--json", folder / "report"]
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as table:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("COLUMNS", "100")
        assert run(*options) == 0
    jax.config.update("jax_compilation_cache_dir", before)
    files = [np.array([0, *model.tokenizer.encode(text).ids]) for text in TEXTS.values()]
    return Evaluated(model, files, json.loads((folder / "report").read_text()), table.getvalue())


def test_bits_per_byte_equal_scores_of_the_same_windows(evaluated):
    """Token i counts in the first window that reaches it, with all that the window holds before."""
    pieces, wanted = [], []
    for ids in evaluated.files:
        for i in range(1, len(ids)):
            start = 0 if i <= WINDOW else -(-(i - WINDOW) // STRIDE) * STRIDE
            if not wanted or i == 1 or start != wanted[-1][1]:
                pieces.append(ids[start : start + WINDOW + 1])
            wanted.append((len(pieces) - 1, start, i - start - 1))
    lengths = np.array([len(piece) for piece in pieces])
    padded = np.stack([np.pad(piece, (0, WINDOW + 1 - len(piece))) for piece in pieces])
    scores = np.asarray(treejax.score(evaluated.model, padded, lengths), np.float64)
    bits = -sum(scores[piece, row] for piece, _, row in wanted) / np.log(2)
    size = sum(len(text.encode()) for text in TEXTS.values())
    result = evaluated.result
    assert result["tokens"] == len(wanted) and max(lengths) == WINDOW + 1 > min(lengths)
    # Two float32 forwards that sum in another order.
    assert result["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)
    assert f"{bits / size:.4f}" in evaluated.table


def test_modules_alone_count(evaluated):
    """Test modules are left out, an empty module is a file; xz sees the concatenation."""
    data = "".join(TEXTS.values()).encode()
    packed = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    result = evaluated.result
    assert (result["files"], result["bytes"]) == (len(TEXTS), len(data))
    assert result["xz_bits_per_byte"] == 8 * len(packed) / len(data)
    low, _, high = result["bits_per_byte_quartiles"]
    assert 0 < low < result["bits_per_byte"] < 2 * high
    assert "p 1.0: 4 files" in evaluated.table


def first_chains(model, prompts):
    """Drafts accepted in the first step after each prompt, and the tokens that follow it."""
    requests = make_requests(model, prompts, measures.GENERATED + 8, ())
    steps = list(engine.run(model, requests, "replay", "mtp", "chain3", None, 0))
    return np.array([sum(piece.drafted) for piece in steps[1]]), [r.tokens for r in requests]


def test_acceptance_equals_decoding_with_the_drafter(evaluated):
    """The command's two means are what the loop accepts at those places."""
    model, result = evaluated.model, evaluated.result
    prefixes = measures.true_prefixes(evaluated.files, PREFIXES, seed=0)
    after_true, own = first_chains(model, prefixes.tolist())
    assert set(after_true) == {1, 2, 3}, after_true
    extended = [
        [*prefix, *ids[: measures.GENERATED]] for prefix, ids in zip(prefixes, own, strict=True)
    ]
    generating, _ = first_chains(model, extended)
    for name, accepted in (
        ("accepted_after_true_prefix", after_true),
        ("accepted_while_generating", generating),
    ):
        got, error = result[name], accepted.std() / PREFIXES**0.5
        assert (got["mean"], got["error"]) == pytest.approx((accepted.mean(), error), rel=1e-12)
        by_position = [
            sum(accepted > j) / max(sum(accepted >= j), 1) for j in range(measures.CHAIN)
        ]
        assert got["by_position"] == pytest.approx(by_position, rel=1e-12)
        assert f"{accepted.mean():.3f} ± {error:.3f}" in evaluated.table


def test_limit_takes_whole_files_until_it_is_reached():
    chosen = evaluate.choose_files(TEXTS, 0.0012)
    assert chosen == {name: TEXTS[name] for name in chosen} and 1 <= len(chosen) < len(TEXTS)
    sizes = [len(text.encode()) for text in chosen.values()]
    assert sum(sizes[:-1]) < 1200 <= sum(sizes)
    assert evaluate.choose_files(TEXTS, None) == TEXTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--wheel {0}/none.whl", "no such wheel: {0}/none.whl"),
        ("--wheel {0}/empty.whl", "{0}/empty.whl holds no Python source"),
        ("--wheel {0}/p.whl --checkpoint {0}/none", "{0}/none"),
        ("--wheel {0}/p.whl --json {0}/none/report", "{0}/none/report: No such file"),
        ("--wheel {0}/p.whl --window 100", "--window must be a multiple of 64"),
        ("--wheel {0}/p.whl --stride 4096", "--stride at most --window"),
        ("--wheel {0}/p.whl --limit-mb 0", "--limit-mb must be above 0"),
        ("--wheel {0}/p.whl --batch 0", "--batch must be above 0"),
        ("--wheel {0}/p.whl --prefixes -1", "--prefixes must be 0 or more"),
        ("", "the following arguments are required: --wheel"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(evaluate, "use_compilation_cache", lambda: None)
    write_wheel(tmp_path / "p.whl", TEXTS)
    write_wheel(tmp_path / "empty.whl", TESTS | {"p/__init__.py": ""})
    try:
        status = run(*arguments.format(tmp_path).split())
    except SystemExit as stop:  # argparse
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message.format(tmp_path) in err and "treejax.evaluate: " in err


def test_a_model_without_what_it_needs_is_refused_before_it_is_scored(evaluated):
    model = evaluated.model
    options = evaluate.parse_arguments(["--wheel", "p.whl"])
    with pytest.raises(ValueError, match="no tokenizer or no bos_token_id"):
        evaluate.evaluate(dataclasses.replace(model, tokenizer=None), TEXTS, options)
    with pytest.raises(ValueError, match="no file has more than 516 tokens"):
        evaluate.evaluate(model, {"short.py": "import os\n"}, options)
