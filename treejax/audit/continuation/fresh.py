"""The resumed schedule in a process of its own: what a saved state is worth there.

The parent saves the engine half way, the model and the subject; the child restores all of it, takes
the remaining steps and saves the last one; the parent measures that step like any other.
"""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.continuation.schedules import Course, End, check_step, limits_of, step
from treejax.audit.continuation.verdict import Tally
from treejax.audit.elsewhere import Unmade, ended, environment, make_again, why_it_stays
from treejax.audit.raised import failed, said
from treejax.audit.step import Engine
from treejax.model import Model
from treejax.saving import restore_checkpoint, save_checkpoint

RAISED = "raised"  # the child's file of one line


def continue_elsewhere(course: Course, end: End, tally: Tally) -> None:
    """Check the last step of the resumed schedule as another process takes it.

    Args:
      end: what the schedule left in this process.

    What another process cannot make again, because it is defined in ``__main__``, is left out with
    a note. A process that fails is a failed check.
    """
    model, subject = course.model, course.subject
    if why := why_it_stays(subject):
        tally.left_out.append({"subject": subject.name, "left out": "fresh process", "why": why})
        return
    last = {"before": end.start, "after": end.engine, "shown": end.shown}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoint(folder / "state", 0, end.saved)
        save_checkpoint(folder / "model", 0, model.params)
        told = {
            "config": model.config,
            "subject": subject,
            "settings": course.settings,
            "precision": jax.config.jax_default_matmul_precision,
            "rows": course.rows,
            "batch": len(course.texts),
            "engine": _shapes(end.saved),
            "params": _shapes(model.params),
        }
        (folder / "told").write_bytes(pickle.dumps(told))
        done = subprocess.run(
            [sys.executable, "-m", "treejax.audit.continuation.fresh", name],
            env=environment(),
            capture_output=True,
            text=True,
        )
        if reason := _why_failed(folder, done):
            where = {"schedule": "fresh process"}
            tally.checks.append(failed("continuation", subject.name, where, reason))
            return
        restored = restore_checkpoint(folder / "last", _shapes(last)).tree
        # Onto this process's default device, where compiled programs take them.
        made = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), restored)
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(last), strict=True)
    same = [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs]
    tally.facts["fresh process"] = {"arrays": len(same), "bitwise as here": sum(same)}
    index = course.settings.cycles - 1
    limit = limits_of(course.settings, subject, index)
    there = end._replace(start=made["before"], engine=made["after"], shown=made["shown"])
    check_step(course, there, limit, {"schedule": "fresh process", "cycle": index}, tally)


def _why_failed(folder: Path, done: subprocess.CompletedProcess[str]) -> str | None:
    """What the child said went wrong, or what it was when it could not say; None if nothing."""
    if (folder / RAISED).exists():
        return (folder / RAISED).read_text(encoding="utf-8")
    if done.returncode or not (folder / "last").exists():
        return ended(done.returncode, done.stderr)
    return None


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def main(folder: Path) -> None:
    """The child: restore, step, save; or say in one line what was raised."""
    try:
        _go_on(folder)
    except Exception as error:  # a user's object may raise anything
        reason = str(error) if isinstance(error, Unmade) else said(error)
        (folder / RAISED).write_text(reason, encoding="utf-8")


def _go_on(folder: Path) -> None:
    told = make_again((folder / "told").read_bytes())
    jax.config.update("jax_default_matmul_precision", told["precision"])
    params = restore_checkpoint(folder / "model", told["params"]).tree
    model, subject, settings = Model(params, told["config"]), told["subject"], told["settings"]
    engine: Engine = restore_checkpoint(folder / "state", told["engine"]).tree
    weights = subject.drafter.init(model, told["batch"], told["rows"]).weights
    before, shown = engine, None
    for index in range(settings.cycles // 2, settings.cycles):
        before = engine
        limit = limits_of(settings, subject, index)
        engine, shown = step(subject, model, settings, weights, engine, limit)
    save_checkpoint(folder / "last", 0, {"before": before, "after": engine, "shown": shown})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
