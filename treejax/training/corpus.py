"""Python source of this machine as training tokens: collect, select, train a BPE, encode.

Sources are the standard library and the packages of the running interpreter, plus any roots that
the settings name. Invariants: no path that contains an excluded word, no file that shares a
passage with the held-out fingerprint, no file twice; the same files and settings give the same
token array, whatever the number of processes. A token array is uint16, each file preceded by
``FILE_TOKEN`` (id 0), and one more at the end: the token separates files and ends a text.

A finished corpus is a folder with ``tokens.npy``, ``tokenizer.json`` and ``corpus.json`` (what was
used); ``corpus.json`` is written last and records the settings, so an unfinished or different one
is built again.
"""

import dataclasses
import glob
import hashlib
import json
import multiprocessing
import os
import signal
import site
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from treejax.training.passages import read_fingerprint, shares_passage
from treejax.training.wheels import is_test

FILE_TOKEN = "<|file|>"
LEAST_BYTES, MOST_BYTES = 64, 400_000


@dataclasses.dataclass(frozen=True)
class PackageRule:
    """How much of one package to use: at most ``cap_mb``, each file ``weight`` times."""

    name: str
    cap_mb: float = 1e9
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
    """What the training text is made of.

    Attributes:
      roots: folders to search (globs, relative ones from the configuration file's folder);
        empty: the running interpreter's.
      extra_roots: folders (globs) searched besides; ones that do not exist are passed over.
      exclude: a path that contains any of these words is left out.
      held_out: fingerprint file of ``treejax.training.passages``; a relative path starts at the
        configuration file's folder. Empty: none.
      cap_mb: the most of any package without a rule of its own.
      package: rules for single packages (a top-level name, or ``stdlib``).
      test_weight: multiplies the weight of test modules.
      most_digits: files whose printable characters are digits beyond this share are data tables.
      bpe_mb: how much text the BPE is trained on.
      processes: 0 for one a core.
    """

    roots: tuple[str, ...] = ()
    extra_roots: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    held_out: str = ""
    cap_mb: float = 1e9
    package: tuple[PackageRule, ...] = ()
    test_weight: float = 1.0
    most_digits: float = 0.3
    bpe_mb: float = 60.0
    seed: int = 0
    processes: int = 0


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One usable file: ``draw`` in [0, 1) is fixed by its content and decides selection."""

    path: str
    package: str
    digest: bytes
    size: int
    draw: float
    test: bool


def _open_text(path: str) -> tuple[bytes, str] | None:
    try:
        data = Path(path).read_bytes()
        if LEAST_BYTES <= len(data) <= MOST_BYTES:
            return data, data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _examine(
    paths: list[tuple[str, str]], held_out: np.ndarray, most_digits: float, seed: int
) -> tuple[list[SourceFile], list[str]]:
    """Usable files among ``paths`` (path, package), and those that share a held-out passage."""
    good, copies = [], []
    for path, package in paths:
        opened = _open_text(path)
        if opened is None:
            continue
        data, text = opened
        values = np.frombuffer(data, np.uint8)
        digits = np.count_nonzero((values >= ord("0")) & (values <= ord("9")))
        if digits > most_digits * np.count_nonzero(values > ord(" ")):
            continue
        if shares_passage(text, held_out):
            copies.append(path)
            continue
        digest = hashlib.blake2b(data, digest_size=16, salt=seed.to_bytes(8, "little")).digest()
        draw = int.from_bytes(digest[:6], "little") / 2**48
        good.append(SourceFile(path, package, digest, len(data), draw, is_test(path)))
    return good, copies


_ENCODERS: dict[str, Tokenizer] = {}  # one per worker process: reading a tokenizer takes 20 ms


def _encode(paths: list[str], tokenizer_path: str) -> np.ndarray:
    if tokenizer_path not in _ENCODERS:
        _ENCODERS[tokenizer_path] = Tokenizer.from_file(tokenizer_path)
    parts = []
    for path in paths:
        opened = _open_text(path)
        if opened is None:
            raise ValueError(f"{path} changed while the corpus was built: start again")
        ids = _ENCODERS[tokenizer_path].encode(opened[1]).ids
        parts.append(np.array([0, *ids], np.uint16))
    return np.concatenate(parts)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def find_files(settings: CorpusSettings, base: Path) -> list[tuple[str, str]]:
    """All candidate ``.py`` files as (path, package), sorted by path; roots relative to base."""
    places = sysconfig.get_paths()
    found: dict[str, str] = {}
    roots = list(settings.roots) or [places["stdlib"], places["purelib"], places["platlib"]]
    if not settings.roots:
        roots += site.getsitepackages()
    for pattern in (*roots, *settings.extra_roots):
        for root in sorted(glob.glob(os.path.join(base, pattern))):
            for folder, _, names in os.walk(root):
                for name in names:
                    path = os.path.join(os.path.realpath(folder), name)
                    if name.endswith(".py") and not any(w in path for w in settings.exclude):
                        found[path] = _package_of(path, os.path.realpath(root))
    return sorted(found.items())


def _package_of(path: str, root: str) -> str:
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in path:
            return path.rsplit(marker, 1)[1].split("/")[0]
    if root == os.path.realpath(sysconfig.get_paths()["stdlib"]) or "/lib/python3" in path:
        return "stdlib"
    return os.path.relpath(path, root).split(os.sep)[0]


def _name_of(path: str) -> str:
    """A path without the machine's part of it: from its package, or from ``python3.x``, on."""
    for marker in ("/site-packages/", "/dist-packages/", "/lib/"):
        if marker in path:
            return path.rsplit(marker, 1)[1] if marker != "/lib/" else path.split(marker, 1)[1]
    return path


def select_files(files: list[SourceFile], settings: CorpusSettings) -> list[SourceFile]:
    """The files of the training set, each as often as its weight says, in training order.

    Per package, files are taken in the order of their ``draw`` until the cap is full; a weight's
    fractional part is decided by the draw too. Reproducible: it depends on content and seed alone.
    """
    unique: dict[bytes, SourceFile] = {}
    for file in files:
        unique.setdefault(file.digest, file)
    rules = {rule.name: rule for rule in settings.package}
    default = PackageRule("", cap_mb=settings.cap_mb)
    used: Counter[str] = Counter()
    chosen: list[tuple[float, SourceFile]] = []
    for file in sorted(unique.values(), key=lambda f: f.draw):
        rule = rules.get(file.package, default)
        weight = rule.weight * (settings.test_weight if file.test else 1.0)
        # The cap cuts by small draws, so the weight must use digits that the cap did not look at.
        repeats = int(weight + int.from_bytes(file.digest[8:12], "little") / 2**32)
        if repeats == 0 or used[file.package] + file.size > rule.cap_mb * 1e6:
            continue
        used[file.package] += file.size
        for copy in range(repeats):
            place = hashlib.blake2b(file.digest + bytes([copy % 256]), digest_size=6).digest()
            chosen.append((int.from_bytes(place, "little"), file))
    chosen.sort(key=lambda pair: (pair[0], pair[1].digest))
    return [file for _, file in chosen]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose id 0 is ``FILE_TOKEN``; decoding returns every text unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[FILE_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build(
    settings: CorpusSettings,
    vocab_size: int,
    folder: str | Path,
    base: Path,
    say: Callable[[str], None] = print,
) -> dict:
    """Build the corpus in ``folder`` unless a finished one of these settings is there.

    Args:
      vocab_size: entries of the byte-level BPE, ``FILE_TOKEN`` included: 257 to 65536.
      base: the folder where a relative ``held_out`` path starts.

    Returns:
      The record in ``corpus.json``: settings, files, MB by package, tokens, copies left out.
    """
    folder = Path(folder)
    record_path = folder / "corpus.json"
    wanted = dataclasses.asdict(settings) | {"vocab_size": vocab_size}
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as they will be when read
    if record_path.exists():
        record = json.loads(record_path.read_text())
        if record["settings"] == wanted:
            say(f"corpus: {record['tokens']:,} tokens from {folder}")
            return record
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    held_out = np.zeros(0, np.uint64)
    if settings.held_out:
        held_out = read_fingerprint(base / settings.held_out)
    candidates = find_files(settings, base)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["treejax.training.corpus"])
    workers = settings.processes or os.cpu_count() or 1
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        jobs = [
            pool.submit(
                _examine, candidates[i : i + 100], held_out, settings.most_digits, settings.seed
            )
            for i in range(0, len(candidates), 100)
        ]
        examined = [job.result() for job in jobs]
        files = select_files([f for good, _ in examined for f in good], settings)
        copies = sorted(_name_of(path) for _, found in examined for path in found)
        if not files:
            raise ValueError("the corpus is empty: no usable .py file under its roots")
        say(f"corpus: {len(files):,} of {len(candidates):,} files, {len(copies)} share a passage")
        tokenizer = train_tokenizer(_sample(files, settings.bpe_mb), vocab_size)
        if tokenizer.get_vocab_size() != vocab_size:
            raise ValueError(
                f"the text yields {tokenizer.get_vocab_size()} BPE entries, expected "
                f"model.vocab_size = {vocab_size}: lower it or add text"
            )
        tokenizer_path = str(folder / "tokenizer.json")
        tokenizer.save(tokenizer_path)
        paths = [f.path for f in files]
        jobs = [
            pool.submit(_encode, paths[i : i + 64], tokenizer_path)
            for i in range(0, len(paths), 64)
        ]
        tokens = np.concatenate([*(job.result() for job in jobs), np.zeros(1, np.uint16)])
    np.save(folder / "tokens.npy", tokens)
    total = sum(f.size for f in files)
    by_package: Counter[str] = Counter()
    for file in files:
        by_package[file.package] += file.size
    record = {
        "settings": wanted,
        "files": len(files),
        "tokens": len(tokens),
        "megabytes": total / 1e6,
        "bytes_per_token": total / len(tokens),
        "copies_left_out": copies,
        "megabytes_by_package": {k: round(v / 1e6, 3) for k, v in by_package.most_common()},
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    record_path.write_text(json.dumps(record, indent=1))
    most = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in by_package.most_common(12))
    say(
        f"corpus: {len(tokens):,} tokens, {total / 1e6:.1f} MB, {total / len(tokens):.2f} bytes a "
        f"token, {time.perf_counter() - began:.0f} s; most MB: {most}"
    )
    return record


def _sample(files: list[SourceFile], megabytes: float) -> list[str]:
    texts, size, seen = [], 0, set()
    for file in files:
        if size >= megabytes * 1e6:
            break
        if file.digest not in seen:
            seen.add(file.digest)
            opened = _open_text(file.path)
            if opened is not None:
                texts.append(opened[1])
                size += file.size
    return texts
