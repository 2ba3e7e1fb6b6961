"""A report as one HTML page that needs nothing else: no script, no file, no network.

The first screen says green or red, of what, and what came nearest to its bound. Colours follow the
reader's light or dark setting; tables scroll by themselves where a screen is narrow.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treejax.ablation.figures import HINT, can_draw
from treejax.audit import report as texts
from treejax.audit.base import Check, Report
from treejax.audit.figures import figures

_LONG = 12  # a table of more rows is folded

_STYLE = """
:root { color-scheme: light dark; --good: #1d7f4e; --bad: #c2322b; --soft: #8884; --card: #8881; }
@media (prefers-color-scheme: dark) { :root { --good: #4cc38a; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.05rem; font-weight: 600; margin: 0 0 .2rem; opacity: .75; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { border-left: .4rem solid var(--tone); background: var(--card); padding: .8rem 1rem;
  border-radius: .3rem; }
.verdict strong { color: var(--tone); font-size: 1.7rem; line-height: 1.2; display: block; }
.verdict p { margin: .3rem 0 0; }
.good { --tone: var(--good); } .bad { --tone: var(--bad); }
td.good, td.bad { color: var(--tone); font-weight: 600; }
.matrix td.n { background: color-mix(in srgb, var(--tone, transparent) 12%, transparent); }
.cards, .figures { display: grid; gap: 1rem; }
.cards { grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); margin: 1rem 0; }
.card { background: var(--card); border-radius: .3rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.25rem; color: var(--tone); }
.card small { opacity: .8; overflow-wrap: anywhere; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
figcaption { font-size: .85rem; opacity: .8; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--soft); }
th { font-weight: 600; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; }
li { overflow-wrap: anywhere; }
footer { margin-top: 2rem; font-size: .8rem; opacity: .7; }
"""


def page(report: Report) -> str:
    """The whole page."""
    title = f"treejax audit: {'green' if report.green else 'red'}"
    parts = [*_first_screen(report), *_red(report), *_drawn(report), *_faults(report)]
    parts += [
        "<h2>What was measured</h2>",
        _table([line.row() for line in texts.lines(report)]),
        *(_folded(name, rows) for name, rows in report.tables if rows),
        *_missing(report),
        *_provenance(report),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def short(report: Report) -> str:
    """The verdict and one line for everything measured: what a notebook shows."""
    colour = "#1d7f4e" if report.green else "#c2322b"
    rows = [line.row() for line in texts.lines(report)]
    head = f'<p style="color:{colour};font-weight:600">{_text(texts.verdict(report))}</p>'
    failed = "".join(_failed(report))
    return head + _table(rows) + (f"<p>failed:</p><ul>{failed}</ul>" if failed else "")


def _first_screen(report: Report) -> Iterable[str]:
    tone = _tone(report.green)
    colour, _, rest = texts.verdict(report).partition(": ")
    yield "<h1>treejax audit</h1>"
    yield f'<div class="verdict {tone}"><strong>{colour}</strong>{_text(rest)}'
    for name, value in report.facts.get("audited", {}).items():
        yield f"<p><b>{_text(name)}:</b> {_text(texts.show(value))}</p>"
    yield "</div>"
    yield '<div class="cards">'
    for audit in dict.fromkeys(check.audit for check in report.checks):
        mine = [check for check in report.checks if check.audit == audit]
        failed, worst = sum(not check.green for check in mine), texts.nearest(mine)
        said = f"{failed:,} of {len(mine):,} failed" if failed else f"{len(mine):,} passed"
        part = texts.part_of_bound(worst)
        sign = "at least" if worst.at_least else "at most"
        number = f"{worst.name} {texts.show(worst.value)}, {sign} {texts.show(worst.bound)}"
        number += f" ({part})" if part else ""
        yield _card(audit, said, f"worst: {number}, {worst.subject}", _tone(not failed))
    tight = texts.tightness(report)
    if tight is not None:
        yield _card("envelope", f"{tight[1]:,.0f} times tighter", texts.tight_text(*tight), "")
    yield "</div>"


def _card(head: str, said: str, more: str, tone: str) -> str:
    inner = f"<small>{_text(head)}</small><b>{_text(said)}</b><small>{_text(more)}</small>"
    return f'<div class="card {tone}">{inner}</div>'


def _red(report: Report) -> Iterable[str]:
    if not report.red:
        return
    yield "<h2>What failed</h2><ul>"
    yield from _failed(report)
    yield "</ul>"


def _failed(report: Report) -> Iterable[str]:
    """The worst check of every kind of failure, so that none hides another."""
    for checks in texts.failed_kinds(report):
        more = f" (and {len(checks) - 1:,} more of this kind, in report.json)"
        yield f"<li>{_text(str(checks[0]) + more * (len(checks) > 1))}</li>"


def _drawn(report: Report) -> Iterable[str]:
    made = figures(report)
    if not can_draw():
        yield f"<p>{_text(HINT)}</p>"
    if made:
        yield '<h2>How near to the bounds</h2><div class="figures">'
        for each in made:
            caption = f"<b>{_text(each.title)}.</b> {_text(each.caption)}"
            yield f"<figure>{each.svg}<figcaption>{caption}</figcaption></figure>"
        yield "</div>"


def _faults(report: Report) -> Iterable[str]:
    """The fault matrix, a column for each thing that faults were planted in; then false alarms."""
    rows = texts.fault_matrix(report)
    if not rows:
        return
    columns = list(dict.fromkeys(where for row in rows for where in row.caught))
    heads = "".join(f"<th>{_text(column)}</th>" for column in columns)
    yield "<h2>Planted faults: share of seeds in which each was caught</h2>"
    yield f'<div class="scroll"><table class="matrix"><tr><th>fault</th>{heads}<th></th></tr>'
    for row in rows:
        cells = "".join(_caught(row.caught.get(column)) for column in columns)
        yield f"<tr><td>{_text(row.fault)}</td>{cells}<td>{_text(row.says)}</td></tr>"
    yield "</table></div>"


def _caught(check: Check | None) -> str:
    if check is None:
        return "<td></td>"
    seeds = check.where.get("seeds")
    of = f" of {seeds}" if seeds is not None else ""
    return f'<td class="n {_tone(check.green)}">{100 * check.value:.4g} %{of}</td>'


def _missing(report: Report) -> Iterable[str]:
    missing = report.facts.get("not audited", ())
    if missing:
        yield "<h2>Not audited</h2><ul>"
        yield from (f"<li>{_text(texts.show(line))}</li>" for line in missing)
        yield "</ul>"


def _provenance(report: Report) -> Iterable[str]:
    """All other facts, folded."""
    shown = {k: v for k, v in report.facts.items() if k not in ("audited", "not audited")}
    if shown:
        yield "<h2>Made with</h2>"
    for name, value in shown.items():
        rows = value.items() if isinstance(value, Mapping) else [(name, value)]
        inner = "".join(
            f"<tr><th>{_text(str(key))}</th><td>{_text(texts.show(each))}</td></tr>"
            for key, each in rows
        )
        yield f"<details><summary>{_text(str(name))}</summary>"
        yield f'<div class="scroll"><table>{inner}</table></div></details>'


def _folded(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    is_open = " open" if len(rows) <= _LONG else ""
    count = f" ({len(rows):,} rows)" if not is_open else ""
    return f"<details{is_open}><summary>{_text(title)}{count}</summary>{_table(rows)}</details>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    rows = texts.shaped(rows)
    numbers = {name for name, value in rows[0].items() if texts.is_number(value)}
    head = "".join(f"<th{_right(name in numbers)}>{_text(str(name))}</th>" for name in rows[0])
    body = "".join(
        f"<tr>{''.join(_cell(value, name in numbers) for name, value in row.items())}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any, right: bool) -> str:
    if isinstance(value, bool):
        return f'<td class="{_tone(value)}">{texts.show(value)}</td>'
    return f"<td{_right(right)}>{_text(texts.show(value))}</td>"


def _right(right: bool) -> str:
    return ' class="n"' if right else ""


def _tone(good: bool) -> str:
    return "good" if good else "bad"


def _text(text: str) -> str:
    return html.escape(text)
