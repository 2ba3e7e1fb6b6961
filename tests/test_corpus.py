"""The corpus: what is left out, how often files are used, and that it is reproducible."""

import dataclasses
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from treejax.training import corpus, passages
from treejax.training.corpus import CorpusSettings, PackageRule, SourceFile
from treejax.training.wheels import read_modules

FINGERPRINT = Path(__file__).parent.parent / "configs" / "train" / "astropy_passages.npz"


def lines(prefix: str, count: int) -> list[str]:
    return [
        f"    {prefix}_value_{i} = compute_{prefix}(argument_{i}, other={i})" for i in range(count)
    ]


def module(prefix: str, count: int = 60) -> str:
    return f'"""The {prefix} module."""\n\nimport os\n\n' + "\n".join(lines(prefix, count)) + "\n"


def test_passages_find_a_vendored_copy_whatever_its_dress():
    held_out = module("held")
    known = passages.fingerprint([held_out])
    copied = lines("held", 60)[20 : 20 + passages.WINDOW + passages.THIN - 1]
    body = "\n\n".join(f"\t# {i}\n  {line.strip()}" for i, line in enumerate(copied))
    assert passages.shares_passage(module("mine") + body + "\n" + module("more"), known)
    assert not passages.shares_passage(module("mine"), known)
    # Fewer lines than a passage has are common property.
    short = "\n".join(copied[: passages.WINDOW - 1])
    assert not passages.shares_passage(module("mine") + short + "\n" + module("more"), known)


def test_passages_ignore_comments_and_trivial_lines():
    licence = "\n".join(
        f"# Redistribution in source and binary form, clause {i}." for i in range(40)
    )
    closing = "\n".join(["    )", "    }", "    ]"] * 20)
    known = passages.fingerprint([licence + "\n" + closing + "\n" + module("held")])
    assert not passages.shares_passage(licence + "\n" + closing + "\n" + module("mine"), known)


def test_fingerprint_file_round_trip_and_mistakes(tmp_path):
    path = tmp_path / "known.npz"
    written = passages.write_fingerprint([module("held")], path)
    np.testing.assert_array_equal(passages.read_fingerprint(path), written)
    np.savez(path, hashes=written, window=4, thin=2)
    with pytest.raises(ValueError, match="passages of 4 lines"):
        passages.read_fingerprint(path)
    path.write_text("no archive")
    with pytest.raises(ValueError, match="no passage fingerprint file"):
        passages.read_fingerprint(path)


def test_committed_fingerprint_is_small_and_holds_hashes_alone():
    assert FINGERPRINT.stat().st_size <= 300_000
    hashes = passages.read_fingerprint(FINGERPRINT)
    assert hashes.dtype == np.uint64 and len(hashes) > 10_000
    assert (hashes[1:] > hashes[:-1]).all()


def source(name: str, size: int, number: int, package: str = "p", test: bool = False) -> SourceFile:
    digest = number.to_bytes(2, "big") * 8
    return SourceFile(name, package, digest, size, number / 65536, test)


def test_selection_caps_weights_and_duplicates():
    random = np.random.default_rng(0)
    digests = random.choice(65536, 900, replace=False).tolist()
    many = [source(f"a{i}", 1000, n, "big") for i, n in enumerate(digests[:300])]
    tests = [source(f"t{i}", 1000, n, "mid", test=True) for i, n in enumerate(digests[300:600])]
    rest = [source(f"m{i}", 1000, n, "mid") for i, n in enumerate(digests[600:])]
    twin = dataclasses.replace(rest[0], path="twin")
    settings = CorpusSettings(
        cap_mb=1.0,
        package=(PackageRule("big", cap_mb=0.05), PackageRule("mid", weight=1.5)),
        test_weight=0.2,
    )
    chosen = corpus.select_files([*many, *tests, *rest, twin], settings)
    paths = [f.path for f in chosen]
    assert sum(f.package == "big" for f in chosen) == 50  # 50 kB of 1 kB files
    assert "twin" not in paths
    middle = [p for p in paths if p.startswith("m")]
    assert set(middle) == {f.path for f in rest}
    # Weight 1.5: 300 files once and 150 of them twice; five standard deviations are 43.
    assert abs(len(middle) - 450) < 44
    # Weight 1.5 x 0.2 = 0.3 of 300: five standard deviations are 40.
    assert abs(sum(f.test for f in chosen) - 90) < 41
    assert chosen == corpus.select_files([twin, *rest, *tests, *many][::-1][:-1] + [twin], settings)


def make_packages(root: Path) -> None:
    for name in ("one", "two", "three"):
        (root / name).mkdir(parents=True)
        for i in range(4):
            (root / name / f"m{i}.py").write_text(module(f"{name}{i}"))
    (root / "one" / "copy.py").write_text(module("two1"))  # the same bytes twice
    (root / "two" / "vendored.py").write_text(module("mine") + module("secret"))
    (root / "three" / "table.py").write_text("x = [" + "1234567890, " * 500 + "]")
    (root / "three" / "latin.py").write_bytes(b"# \xe9\xe8\n" + module("latin").encode())
    (root / "three" / "short.py").write_text("x = 1\n")
    (root / "astropy_tools").mkdir()
    (root / "astropy_tools" / "m.py").write_text(module("tools"))


def test_build_leaves_out_what_it_must_and_is_reproducible(tmp_path):
    make_packages(tmp_path / "site")
    passages.write_fingerprint([module("secret")], tmp_path / "known.npz")
    settings = CorpusSettings(
        roots=("site",), exclude=("astropy",), held_out="known.npz", processes=1
    )
    said = []
    record = corpus.build(settings, 320, tmp_path / "a", tmp_path, said.append)
    assert record["files"] == 12
    assert [Path(p).name for p in record["copies_left_out"]] == ["vendored.py"]
    assert set(record["megabytes_by_package"]) == {"one", "two", "three"}
    assert "12 of 17 files" in said[0]

    tokens = np.load(tmp_path / "a" / "tokens.npy")
    tokenizer = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert tokens.dtype == np.uint16 and tokens[0] == tokens[-1] == 0
    assert tokenizer.token_to_id(corpus.FILE_TOKEN) == 0
    texts = [
        tokenizer.decode(piece.tolist())
        for piece in np.split(tokens, np.flatnonzero(tokens == 0))
        if len(piece) > 1
    ]
    expected = [module(f"{name}{i}") for name in ("one", "two", "three") for i in range(4)]
    assert sorted(texts) == sorted(expected)

    again = corpus.build(
        dataclasses.replace(settings, processes=2), 320, tmp_path / "b", tmp_path, said.append
    )
    assert again["tokens_sha256"] == record["tokens_sha256"]
    stamp = (tmp_path / "a" / "tokens.npy").stat().st_mtime_ns
    assert corpus.build(settings, 320, tmp_path / "a", tmp_path, said.append) == record
    assert (tmp_path / "a" / "tokens.npy").stat().st_mtime_ns == stamp
    assert json.loads((tmp_path / "a" / "corpus.json").read_text()) == record


def test_build_refuses_an_impossible_vocabulary_and_an_empty_corpus(tmp_path):
    make_packages(tmp_path / "site")
    settings = CorpusSettings(roots=("site/one",), processes=1)
    with pytest.raises(ValueError, match="model.vocab_size = 60000"):
        corpus.build(settings, 60000, tmp_path / "out", tmp_path, lambda _: None)
    settings = CorpusSettings(roots=("nothing",), processes=1)
    with pytest.raises(ValueError, match="the corpus is empty"):
        corpus.build(settings, 300, tmp_path / "out", tmp_path, lambda _: None)


def test_wheel_reader(tmp_path):
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("p/a.py", "a = 1\n")
        archive.writestr("p/tests/test_a.py", "assert True\n")
        archive.writestr("p/conftest.py", "")
        archive.writestr("p/contest.py", "é = 'text'\n")
        archive.writestr("p/bad.py", b"\xff\xfe")
        archive.writestr("p/data.txt", "no code")
    assert read_modules(wheel) == {"p/a.py": "a = 1\n", "p/contest.py": "é = 'text'\n"}
    with pytest.raises(ValueError, match="no such wheel"):
        read_modules(tmp_path / "missing.whl")
    (tmp_path / "b.whl").write_text("text")
    with pytest.raises(ValueError, match="is not a wheel"):
        read_modules(tmp_path / "b.whl")
