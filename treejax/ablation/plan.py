"""The plan of a run: cells by arm, and what each arm needs in memory."""

from collections.abc import Sequence

from rich.table import Table

from treejax.ablation.base import Cell

MIB = 2**20


def plan_table(cells: Sequence[Cell], left: Sequence[Cell]) -> Table:
    """One line an arm: its cells, those still to run, and its largest cell's buffers in MiB."""
    table = Table(title=f"{len(cells)} cells, {len(left)} to run")
    names = list(dict.fromkeys(name for cell in cells for name in cell.bytes))
    table.add_column("arm")
    for name in ("cells", "to run", "MiB", *names):
        table.add_column(name, justify="right")
    for arm in dict.fromkeys(cell.arm for cell in cells):
        mine = [cell for cell in cells if cell.arm == arm]
        largest = max(mine, key=lambda cell: sum(cell.bytes.values()))
        parts = [f"{largest.bytes[n] / MIB:,.1f}" if n in largest.bytes else "" for n in names]
        total = f"{sum(largest.bytes.values()) / MIB:,.1f}" if largest.bytes else ""
        waiting = sum(cell.arm == arm for cell in left)
        table.add_row(arm, str(len(mine)), str(waiting), total, *parts)
    return table
