"""Train a hybrid with its MTP head on this machine's Python source, and export it.

    python -m treejax.train CONFIG.toml --out DIR [--resume] [--seconds S] [--log-every N]

DIR receives ``corpus/``, ``checkpoints/``, ``log.jsonl`` (the loss curve), ``config.toml``,
``command.txt`` and, at the end, ``model/``: a Hugging Face folder in bfloat16 with those three
and the corpus record beside the weights. Ctrl-C and SIGTERM save a checkpoint and say how to
resume; a kill loses what came after the last one. Progress goes to stderr.
"""

import argparse
import dataclasses
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from treejax.checkpoint import save_model
from treejax.cli.cache import use_compilation_cache
from treejax.cli.guard import Parser, run_command
from treejax.model import Model
from treejax.training import checkpoints, corpus, loop
from treejax.training.batches import Batches
from treejax.training.loss import AHEAD, cast_params
from treejax.training.settings import TrainSettings, read_settings

NAME = "treejax.train"
SHARD_BYTES = 12_000_000  # halves of the shipped model: hosts of code refuse much larger files
BESIDE_THE_MODEL = ("config.toml", "log.jsonl", "command.txt")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(f"python -m {NAME}", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", help="training configuration, TOML")
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--seconds", type=float, help="train about so long, whatever the configuration says"
    )
    parser.add_argument("--log-every", type=int, default=20, help="steps a line of the loss curve")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    settings = prepare_folder(options, arguments)
    use_compilation_cache()
    stopper = Stopper()
    console = Console(stderr=True)
    try:
        train(settings, options, console, stopper)
    except loop.Stopped:
        resume = [a for a in arguments if a != "--resume"] + ["--resume"]
        console.print(
            f"stopped and saved; to go on: python -m {NAME} {shlex.join(resume)}",
            soft_wrap=True,
            markup=False,
        )
        return 128 + stopper.signal
    return 0


class Stopper:
    """Remembers SIGINT or SIGTERM until a step is complete; a second one ends at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        if self.signal:
            raise SystemExit(128 + number)
        self.signal = number

    def __call__(self) -> bool:
        return self.signal != 0


def prepare_folder(options: argparse.Namespace, arguments: Sequence[str]) -> TrainSettings:
    """Read and check the settings, and write or compare the run folder's own copy."""
    settings = read_settings(options.config)
    if options.seconds is not None:
        schedule = dataclasses.replace(settings.schedule, steps=0, seconds=options.seconds)
        settings = dataclasses.replace(settings, schedule=schedule)
    out = Path(options.out)
    copy, text = out / "config.toml", Path(options.config).read_text(encoding="utf-8")
    if options.resume:
        if not copy.exists():
            raise ValueError(f"{out} holds no run to resume: leave out --resume")
        if copy.read_text(encoding="utf-8") != text:
            raise ValueError(f"{options.config} differs from {copy}, expected the run's own")
    elif (out / "checkpoints").exists():
        raise ValueError(f"{out} holds a run already: add --resume, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    copy.write_text(text, encoding="utf-8")
    with (out / "command.txt").open("a", encoding="utf-8") as file:
        file.write(f"python -m {NAME} {shlex.join(arguments)}\n")
    return settings


def train(
    settings: TrainSettings, options: argparse.Namespace, console: Console, stopper: Stopper
) -> None:
    out = Path(options.out)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    count = loop.parameter_count(checkpoints.abstract_state(settings).params)
    device = jax.devices()[0].device_kind
    say(f"{count:,} parameters on {device}; compiling while the corpus is built")
    with ThreadPoolExecutor(2) as threads:
        # The corpus is made by processes and the compiler has threads of its own.
        building = threads.submit(
            corpus.build,
            settings.corpus,
            settings.model.vocab_size,
            out / "corpus",
            Path(options.config).parent,
            say,
        )
        step = threads.submit(loop.compile_step, settings)
        step.add_done_callback(lambda _: say("compiled"))
        saved = checkpoints.Checkpoints(out / "checkpoints")
        if note := saved.note():
            say(note)
        if saved.has_any():
            state, progress = saved.load(settings)
            say(f"resuming after step {progress.step:,}")
        else:
            state = jax.block_until_ready(checkpoints.init_state(settings))
            progress = checkpoints.Progress(0, -1, 0.0)
        step = step.result()
        building.result()
    batches = Batches(
        np.load(out / "corpus" / "tokens.npy"),
        settings.schedule.batch,
        settings.schedule.window,
        AHEAD,
        settings.seed,
    )
    say(f"an epoch is {batches.steps_per_epoch:,} steps")
    curve = loop.Curve(out / "log.jsonl", progress.step)
    try:
        with bar(console, say, settings) as report:
            state = loop.run(
                settings,
                step,
                state,
                progress,
                batches,
                saved,
                curve,
                log_every=options.log_every,
                should_stop=stopper,
                report=report,
            )
    finally:
        curve.close()
        saved.close()
    export(settings, state.params, out)
    say(f"trained; the model is in {out / 'model'}")


class bar:
    """A progress bar on a terminal, a line every ``lines`` reports elsewhere."""

    def __init__(self, console: Console, say: Callable[[str], None], settings: TrainSettings):
        self._say = say
        self._tokens = settings.schedule.batch * settings.schedule.window
        self._progress = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(),
                console=console,
            )

    def __enter__(self) -> Callable[[loop.Row], None]:
        if self._progress is None:
            return self._line
        self._progress.start()
        self._task = self._progress.add_task("training", total=None)
        return self._advance

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _text(self, row: loop.Row) -> str:
        speed = self._tokens / row.step_ms / 1e3
        return (
            f"loss {row.main:.3f}, mtp {row.mtp:.3f}, chained {row.chained:.3f}, "
            f"{row.step_ms:.1f} ms, {speed:.3f} M tokens/s"
        )

    def _advance(self, row: loop.Row) -> None:
        assert self._progress is not None
        self._progress.update(
            self._task,
            completed=row.step,
            total=row.total if row.total > 0 else None,
            description=self._text(row),
        )

    def _line(self, row: loop.Row) -> None:
        total = row.total if row.total > 0 else "?"
        self._say(f"{row.seconds:7.1f} s  step {row.step} of {total}  {self._text(row)}")


def export(settings: TrainSettings, masters: dict, out: Path) -> None:
    """Write ``out/model``: bfloat16 weights, tokenizer, and how they came about."""
    tokenizer = Tokenizer.from_file(str(out / "corpus" / "tokenizer.json"))
    params = cast_params(masters, jnp.bfloat16)
    save_model(Model(params, settings.model, tokenizer), out / "model", shard_bytes=SHARD_BYTES)
    beside = out / "model" / "training"
    beside.mkdir(exist_ok=True)
    for name in BESIDE_THE_MODEL:
        shutil.copyfile(out / name, beside / name)
    shutil.copyfile(out / "corpus" / "corpus.json", beside / "corpus.json")


if __name__ == "__main__":
    sys.exit(run_command(NAME, main, sys.argv[1:]))
