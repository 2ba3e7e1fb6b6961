"""The resumed schedule in a process of its own: what a saved state is worth there.

The parent saves the engine half way, the model and the subject; the child restores all of it, takes
the remaining steps and saves the last one; the parent measures that step like any other.
"""

import os
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
from treejax.audit.step import Engine
from treejax.model import Model
from treejax.saving import restore_checkpoint, save_checkpoint


def continue_elsewhere(course: Course, end: End, tally: Tally) -> None:
    """Check the last step of the resumed schedule as another process takes it.

    Args:
      end: what the schedule left in this process.

    What another process cannot know, because it is defined in ``__main__``, is left out with a
    note.

    Raises:
      ValueError: one line: the process failed.
    """
    model, subject = course.model, course.subject
    kinds = subject.policy, subject.drafter, subject.rule
    local = [type(kind).__name__ for kind in kinds if type(kind).__module__ == "__main__"]
    if local:
        why = f"{local[0]} is defined in __main__, where another process cannot find it"
        tally.left_out.append({"subject": subject.name, "left out": "fresh process", "why": why})
        return
    last = {"before": end.start, "after": end.engine, "shown": end.shown}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoint(folder / "state", 0, end.saved)
        save_checkpoint(folder / "model", 0, model.params)
        said = {
            "config": model.config,
            "subject": subject,
            "settings": course.settings,
            "precision": jax.config.jax_default_matmul_precision,
            "rows": course.rows,
            "batch": len(course.texts),
            "engine": _shapes(end.saved),
            "params": _shapes(model.params),
        }
        (folder / "said").write_bytes(pickle.dumps(said))
        # The parent may hold most of a GPU's memory: take what is needed, and no more.
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(
            [sys.executable, "-m", "treejax.audit.continuation.fresh", name],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(f"the fresh process of {subject.name} failed: {reason}")
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


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def main(name: str) -> None:
    """The child: restore, step, save."""
    folder = Path(name)
    said = pickle.loads((folder / "said").read_bytes())
    jax.config.update("jax_default_matmul_precision", said["precision"])
    params = restore_checkpoint(folder / "model", said["params"]).tree
    model, subject, settings = Model(params, said["config"]), said["subject"], said["settings"]
    engine: Engine = restore_checkpoint(folder / "state", said["engine"]).tree
    weights = subject.drafter.init(model, said["batch"], said["rows"]).weights
    before, shown = engine, None
    for index in range(settings.cycles // 2, settings.cycles):
        before = engine
        limit = limits_of(settings, subject, index)
        engine, shown = step(subject, model, settings, weights, engine, limit)
    save_checkpoint(folder / "last", 0, {"before": before, "after": engine, "shown": shown})


if __name__ == "__main__":
    main(sys.argv[1])
