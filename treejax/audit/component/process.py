"""The same blocks in fresh processes: whatever a policy gives there must be the same bytes.

A process of its own compiles everything anew and shares no memory with this one. What it runs
comes to it pickled, so the class of a policy must be importable there: one that was written into a
notebook's cell or a script is run again in this process, with its programs compiled anew, and the
report says which it was.
"""

import base64
import contextlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treejax.audit.component.block import Case, run_block
from treejax.audit.component.operands import Shape
from treejax.audit.component.rig import Rig
from treejax.audit.elsewhere import Unmade, ended, environment, make_again
from treejax.audit.raised import said
from treejax.policies import Policy

WORK = "import sys; from treejax.audit.component.process import serve; serve(sys.argv[1])"


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


class Parcel(NamedTuple):
    """A job on its way: policies as they were pickled, each by itself, and the rest of it."""

    policies: tuple[bytes, ...]
    shape: Shape
    seeds: tuple[tuple[int, ...], ...]
    runs: int


def unpacked(parcel: Parcel) -> list[list[str] | str]:
    """``digests``, in the fresh process; for a policy that it cannot make again, why not."""
    made: list[Any] = []
    for packed in parcel.policies:
        try:
            made.append(make_again(packed))
        except Unmade as unmade:
            made.append(str(unmade))
    policies = tuple(each for each in made if not isinstance(each, str))
    found = iter(digests(Job(policies, *parcel[1:])))
    return [each if isinstance(each, str) else next(found) for each in made]


def serve(answer: str) -> None:
    """What a fresh process runs: a parcel from stdin, its digests to a file.

    To a file, because what modules print when they are imported goes to stdout.
    """
    parcel = pickle.loads(base64.b64decode(sys.stdin.read()))
    found = unpacked(parcel)
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


class Fresh:
    """A process at work on a job."""

    def __init__(self, job: Job):
        parcel = Parcel(tuple(map(pickle.dumps, job.policies)), *job[1:])
        self._count = len(job.policies)
        self._folder = tempfile.TemporaryDirectory()
        self._answer = Path(self._folder.name) / "answer"
        self._err = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORK, self._answer],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._err,
            text=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``result`` says how
            self._process.stdin.write(base64.b64encode(pickle.dumps(parcel)).decode())
            self._process.stdin.close()

    def result(self) -> list[list[str] | str]:
        """Wait for what ``unpacked`` gives there; if nothing comes, why not, for each policy."""
        code = self._process.wait()
        if self._answer.exists():
            return json.loads(self._answer.read_text(encoding="utf-8"))
        self._err.seek(0)
        return [ended(code, self._err.read())] * self._count

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._err.close()
        self._folder.cleanup()


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
