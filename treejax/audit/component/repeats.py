"""Whether every run of a block gives the same bytes: again, compiled anew, in a fresh process."""

from collections.abc import Callable, Mapping, Sequence

from treejax.audit.component.process import Fresh, Job, digests
from treejax.audit.component.settings import Settings
from treejax.audit.component.subject import Subject
from treejax.audit.component.tally import AUDIT
from treejax.audit.raised import failed


def repeats(
    subjects: Sequence[Subject],
    stays: Mapping[str, str | None],
    processes: Sequence[Fresh],
    settings: Settings,
    seeds: Sequence[tuple[int, ...]],
    clock: Callable[[str], None],
) -> None:
    """Every run of every block must have given the same bytes.

    Args:
      stays: by label, why a subject is run anew in this process; None for those that
        ``processes`` work on, in their order.
    """
    apart = [label for label, why in stays.items() if why is None]
    results = [process.result() for process in processes]
    for subject in subjects:
        clock(f"{subject.label}: repeats")
        if not subject.runs:
            continue
        why = stays[subject.label]
        if why is None:
            others = [result[apart.index(subject.label)] for result in results]
            note = f"in {len(results)} fresh processes"
        else:
            job = Job((subject.rig.policy,), settings.shape, tuple(seeds), settings.runs)
            others = [digests(job)[0] for _ in range(settings.processes)]
            note = f"compiled anew in this process: {why}"
        _compare(subject, others, note, settings, len(seeds))


def _compare(
    subject: Subject,
    others: Sequence[list[str] | str],
    note: str,
    settings: Settings,
    blocks: int,
) -> None:
    """The digests of all runs, those of ``others`` beside the subject's own."""
    for other in others:
        if isinstance(other, str):
            subject.checks.append(failed(AUDIT, subject.label, {"while": "run again"}, other))
            return
        for i, own in enumerate(subject.digests):
            own += other[i * settings.runs : (i + 1) * settings.runs]
    runs = sum(len(own) for own in subject.digests)
    differ = sum(len(set(own)) - 1 for own in subject.digests)
    note = f"{runs} runs of {blocks} blocks, {note}"
    subject.add("runs whose bytes differ", {}, differ, note)
    subject.controls["runs that differ"] = f"{differ} of {runs}"
