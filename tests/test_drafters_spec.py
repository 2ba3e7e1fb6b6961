"""Drafters by name with settings as text; every mistake is one line."""

import pytest

from treejax.drafters import MTP, MTPSuffix, MTPTree, make_drafter


def test_settings_become_fields():
    assert make_drafter("mtp@draws=coupled", "3,2") == MTP("3,2", draws="coupled")
    made = make_drafter("mtp_tree@form=marginal, beam=4,coupled=true", "best9x3")
    assert made == MTPTree("best9x3", form="marginal", beam=4, coupled=True)
    assert make_drafter("mtp") == MTP()
    hybrid = MTPSuffix("best15x6", passes="conditional")
    assert make_drafter("mtp+suffix@passes=conditional", "best15x6") == hybrid
    assert make_drafter("mtp+suffix@passes=3", "best15x6") == MTPSuffix("best15x6", passes=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mtp@x=1", "setting 'x' is unknown, expected of: draws"),
        ("mtp@", "setting '' is malformed, expected NAME@key=value"),
        ("mtp@draws", "setting 'draws' is malformed"),
        ("mtp_tree@beam=wide", "beam is 'wide', expected a value of type int"),
        ("mtp_tree@coupled=1", "coupled is '1', expected a value of type bool"),
        ("oak@x=1", "drafter 'oak' is unknown"),
        ("mtp@draws=loudly", "draws 'loudly' are unknown"),
    ],
)
def test_mistakes_are_one_line(text, message):
    with pytest.raises(ValueError) as error:
        make_drafter(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_budget_brings_its_own_trees():
    with pytest.raises(ValueError, match="'budget' brings its own trees, leave out 'chain3'"):
        make_drafter("budget", "chain3")
