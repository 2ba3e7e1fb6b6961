"""The HTML page: whole, alone, safe, and the same verdict as the report."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import audit_reports as made
import pytest

from treejax.ablation.figures import HINT
from treejax.audit import figures as drawing
from treejax.audit import page as pages
from treejax.audit.base import Check, Report
from treejax.audit.page import page, short

VOID = {"meta", "br", "link", "img"}


class Outline(HTMLParser):
    """Tags that are open, attributes seen, and the text."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.text, self.counts = [], [], [], {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def outline(text):
    parser = Outline()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


@pytest.fixture(scope="module")
def green():
    return page(made.green())


def test_the_page_needs_nothing_else(green):
    """No script, no file, no network: every reference is to something on the page itself."""
    seen = outline(green)
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.counts)
    ids = {value for _, name, value in seen.attributes if name == "id"}
    for _, name, value in seen.attributes:
        assert not name.startswith("on"), name
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#") and value[1:] in ids
    for target in re.findall(r"url\(([^)]*)\)", green):
        assert target.strip("'\"#") in ids
    assert "@import" not in green


def test_the_page_is_for_phones_and_for_light_and_dark(green):
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in green
    assert "color-scheme: light dark" in green and "prefers-color-scheme: dark" in green
    assert green.count("<table>") == green.count('<div class="scroll"><table>')  # wide ones scroll


def test_ids_are_given_once(green):
    """Figures on one page: the second must not be clipped by the first one's shapes."""
    ids = [value for _, name, value in outline(green).attributes if name == "id"]
    assert ids and len(ids) == len(set(ids))


def test_the_first_screen_says_green_or_red_of_what_and_how_near():
    for report, colour in ((made.green(), "GREEN"), (made.red(made.REJECTED), "RED")):
        text = page(report)
        first = text[: text.index("How near to the bounds")]
        assert f"<strong>{colour}</strong>" in first
        assert "<title>treejax audit: " + colour.lower() in first
        assert "python-11m &lt;script&gt;" in first  # who was audited, as text
        assert "drafter 7e-06, at most 1e-05 (70 %), wy/mtp:chain3" in first
        assert "states 9e-07, at most 1e-06 (90 %), wy" in first
    assert "1 of 7 failed" in first
    assert "sampler block: joint G-test 1e-09, at least 0.0001 [step 0]" in first


def test_the_first_screen_says_how_tight_the_envelope_is(green):
    assert "tighter" not in green
    rows = [
        {"surface": "R", "largest bound": 1e-5, "LumoTree": 0.02},
        {"surface": "divergence", "largest bound": 1e-3, "LumoTree": 0.15},
        {"surface": "margin", "largest bound": 1.0},
    ]
    report = Report(made.checks(), (("envelope", tuple(rows)),))
    assert "<b>150 times tighter</b>" in page(report)
    assert "at least 150 times below LumoTree&#x27;s (least on divergence)" in page(report)


def test_no_kind_of_failure_hides_another():
    report = made.red(*[made.NAN] * 57, made.REJECTED)
    for shown in ("".join(pages._red(report)), short(report)):
        assert shown.count("component wy: outputs nan") == 1
        assert "(and 56 more of this kind, in report.json)" in shown
        assert "sampler block: joint G-test 1e-09, at least 0.0001 [step 0]</li>" in shown


def test_what_a_user_named_is_text_and_never_markup(green):
    assert "<script>" not in green and "(&lt;&amp;&gt; \u00e9)" not in green
    failed = Check("component", "wy<b>", "states", {"layer": "<i>"}, 2.0, 1.0, note="<u>&")
    text = page(made.red(failed))
    assert "wy&lt;b&gt;" in text and "&lt;i&gt;" in text and "&lt;u&gt;&amp;" in text
    assert "<i>" not in text and "<u>" not in text


def test_figures_show_every_measure(green):
    assert outline(green).counts["svg"] == outline(green).counts["figure"] == 4
    for figure in drawing.figures(made.green()):
        root = ElementTree.fromstring(figure.svg.replace("xlink:", ""))
        words = {"".join(node.itertext()).strip() for node in root.iter() if "text" in node.tag}
        if "continuation" in figure.title:
            assert set(made.SURFACES) <= words and "bound" in words
        assert "currentColor" in figure.svg  # readable on any ground


def test_a_figure_shows_the_worst_of_each_place():
    figure = drawing.by_place(made.checks(), "continuation", "cycle")
    again = drawing.by_place(reversed(made.checks()), "continuation", "cycle")
    assert figure is not None and again is not None and figure.title == again.title
    worse = (*made.checks(), Check("continuation", "x", "R", {"cycle": 2}, 1.0, made.BOUND))
    changed = drawing.by_place(worse, "continuation", "cycle")
    assert changed is not None and changed.svg != figure.svg
    milder = (*made.checks(), Check("continuation", "x", "R", {"cycle": 2}, 0.0, made.BOUND))
    same = drawing.by_place(milder, "continuation", "cycle")
    assert same is not None and same.svg == figure.svg  # and the same bytes for the same numbers


def test_figures_of_numbers_that_are_not_finite():
    bad = Check("continuation", "x", "R", {"cycle": 1, "layer": 0}, float("nan"), 1.0)
    text = page(Report((bad,)))
    assert outline(text).counts["svg"] == 2 and "R nan, at most 1 (beyond), x" in text
    assert "nan" not in drawing.figures(Report((bad,)))[0].svg


def test_a_report_without_places_has_no_figures_and_one_without_checks_is_red():
    seen = page(Report((Check("component", "wy", "states", {}, 0.5, 1.0),)))
    assert "<svg" not in seen and "GREEN" in seen
    empty = page(Report(()))
    assert "<strong>RED</strong>nothing was checked" in empty


def test_without_matplotlib_the_page_is_whole_and_says_so(monkeypatch):
    for module in (pages, drawing):
        monkeypatch.setattr(module, "can_draw", lambda: False)
    text = page(made.green())
    assert "<svg" not in text and HINT in "".join(outline(text).text)
    assert "KV remap" in text and "What was measured" in text


def test_the_fault_matrix_has_a_row_a_fault_and_a_column_a_place(green):
    assert "Planted faults: share" not in green
    text = page(made.red(*made.planted()))
    matrix = text[text.index('<table class="matrix">') :]
    rows = matrix[: matrix.index("</table>")].split("<tr>")[1:]
    assert re.findall("<th>([^<]*)</th>", rows[0]) == ["fault", "wy/mtp", "ring/mtp", "faults", ""]
    assert [re.findall("<td>([^<]+)</td>", row)[0] for row in rows[1:]] == [
        "stale root",
        "same_coin",
        "KV remap",
    ]
    assert '<td class="n good">99 % of 100</td>' in rows[1] and "why &amp; how" in rows[1]
    assert '<td class="n bad">25 % of 100</td>' in rows[3]


def test_tables_and_what_was_not_audited_are_there(green):
    text = " ".join(outline(green).text)
    for part in ("Planted faults", "KV remap", "Not audited", "models in bfloat16", "0.11.2"):
        assert part in text
    assert '<td class="good">yes</td>' in green and '<td class="bad">no</td>' in green


def test_a_notebook_gets_the_verdict_and_a_short_table():
    text = made.red(made.NAN)._repr_html_()
    assert text == short(made.red(made.NAN))
    outline(text)
    assert "RED: 1 of" in text and "outputs nan" in text and "<svg" not in text
    assert len(made.red(*[made.NAN] * 500)._repr_html_()) < 10_000
