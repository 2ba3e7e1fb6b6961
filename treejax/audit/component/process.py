"""The same blocks in fresh processes: whatever a policy gives there must be the same bytes.

A process of its own compiles everything anew and shares no memory with this one. What it runs
comes to it pickled, so the class of a policy must be importable there: one that was written into a
notebook's cell is run again in this process, with its programs compiled anew, and the report says
which it was.
"""

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from treejax.audit.component.block import Case, run_block
from treejax.audit.component.operands import Shape
from treejax.audit.component.rig import Rig
from treejax.audit.raised import said
from treejax.policies import Policy

WORK = "from treejax.audit.component.process import serve; serve()"


class Job(NamedTuple):
    """Blocks to run: every policy over every operand set, ``runs`` times each."""

    policies: tuple[Policy, ...]
    shape: Shape
    seeds: tuple[tuple[int, ...], ...]
    runs: int


def digests(job: Job) -> list[list[str] | str]:
    """Per policy the digests of all its runs, set by set, run by run; or what it raised."""
    rigs = [Rig(policy) for policy in job.policies]
    made: list[list[str]] = [[] for _ in rigs]
    raised: dict[int, str] = {}
    for seed in job.seeds:
        case = Case.of(job.shape, *seed)
        for at, rig in enumerate(rigs):
            if at in raised:
                continue
            try:
                made[at] += [run_block(rig, case).digest for _ in range(job.runs)]
            except Exception as error:  # a user's policy may raise anything
                raised[at] = said(error)
    return [raised.get(at, each) for at, each in enumerate(made)]


def can_travel(policy: Policy) -> bool:
    """Whether a fresh process could make this object again."""
    if type(policy).__module__ == "__main__":
        return False
    try:
        return pickle.loads(pickle.dumps(policy)) == policy
    except Exception:  # whatever its class does when it is pickled, it does not travel
        return False


def serve() -> None:
    """What a fresh process runs: a job from stdin, its digests to stdout."""
    job = pickle.loads(base64.b64decode(sys.stdin.read()))
    json.dump(digests(job), sys.stdout)


class Fresh:
    """A process at work on a job."""

    def __init__(self, job: Job):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if jax.default_backend() == "gpu":  # this process may have taken most of the memory
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORK],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._err,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(pickle.dumps(job)).decode())
        self._process.stdin.close()

    def result(self) -> list[list[str] | str]:
        """Wait for what ``digests`` gives there.

        Raises:
          RuntimeError: the process failed; its last line says why.
        """
        code = self._process.wait()
        for file in (self._out, self._err):
            file.seek(0)
        if code:
            said = self._err.read().strip().splitlines() or ["nothing"]
            raise RuntimeError(f"a fresh process of the audit ended with {code}: {said[-1]}")
        return json.load(self._out)

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._err.close()


@contextlib.contextmanager
def fresh_processes(job: Job, count: int) -> Iterator[Sequence[Any]]:
    """``count`` processes on the same job, ended on the way out."""
    if not job.policies:
        count = 0
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            process = Fresh(job)
            stack.callback(process.close)
            started.append(process)
        yield started
