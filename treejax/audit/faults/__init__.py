"""Faults of the engine that an audit must catch; one line each."""

from treejax.audit.faults.attention import RotaryByRow, WrittenEarly, WrongRemap
from treejax.audit.faults.base import Course, Fault, Hit, Strike
from treejax.audit.faults.carries import DEFERRED
from treejax.audit.faults.convolution import GatherSkipped, PreviousCount, StorageOrder
from treejax.audit.faults.drafting import BeforeNorm, HiddenOrder, OneRowOff
from treejax.audit.faults.recurrent import (
    SCRATCHES,
    CommitSkipped,
    FillerDecays,
    OtherSlot,
    PackedParent,
    PublishedByAnother,
    RoundedGate,
    RoundedState,
    SiblingPublished,
)
from treejax.audit.faults.recurrent import PreviousCount as PreviousCommit
from treejax.audit.faults.ring import CursorTwice, OutOfStep
from treejax.audit.faults.stepping import BonusLost, OneTooMany, RowsMixedUp, StaleRoot

_LINES: tuple[Fault, ...] = (
    StaleRoot("stale root", "the previous pending token is verified as the root"),
    PackedParent("packed parent", "a row's recurrence continues the row before it"),
    RowsMixedUp("rows mixed up", "two neighbouring rows come back exchanged"),
    GatherSkipped("conv gather skipped", "a history stays as it was"),
    StorageOrder("conv in storage order", "a history takes the window's first rows for the path"),
    PreviousCount("conv by previous count", "a history is shifted by the step before's count"),
    CommitSkipped("commit skipped", "a recurrent matrix stays as it was"),
    PreviousCommit("commit by previous count", "as many nodes are committed as the step before"),
    SiblingPublished("sibling published", "a matrix is that of the last node's sibling"),
    OtherSlot("other slot", "a matrix is the neighbouring sequence's"),
    PublishedByAnother("other policy publishes", "scratch is read as another policy's", SCRATCHES),
    FillerDecays("filler decays", "decays of unused rows reach a matrix"),
    RoundedState("rounded state", "a stored matrix is rounded to bfloat16"),
    RoundedGate("rounded gate", "decay and write strength are bfloat16 in the commit alone"),
    CursorTwice("ring cursor twice", "the ring's count moves on twice"),
    OutOfStep("ring out of step", "the ring was emptied into a checkpoint that lacks its rows"),
    WrongRemap("KV remap", "attention rows are the window's first, not the path's"),
    WrittenEarly("KV written early", "attention rows land one slot early, on the prefix"),
    RotaryByRow("rotary by row", "a key is rotated by its row and not by its depth"),
    BonusLost("bonus lost", "at full acceptance one node too few is kept"),
    OneTooMany("one too many", "a cut path leaves one node too many in the state"),
    OneRowOff("drafter one row off", "the head's new cache rows lie one slot too far"),
    BeforeNorm("drafter before norm", "the head is given a row from before the final norm"),
    HiddenOrder("drafter in storage order", "the head is given the window's first rows"),
)

REGISTRY: dict[str, Fault] = {fault.name: fault for fault in _LINES}

__all__ = ["DEFERRED", "REGISTRY", "Course", "Fault", "Hit", "Strike"]
