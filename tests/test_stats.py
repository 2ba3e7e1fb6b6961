"""Statistics: vLLM's definitions, counted by hand; and the block of text that shows them."""

import json

from treejax.cli.printing import stats_text
from treejax.drafters import make_drafter
from treejax.stats import Stats

INTERFACE = """num_drafts num_draft_tokens num_accepted_tokens accepted_per_pos acceptance_length
node_use tokens steps prefill_s decode_s compile_s decode_tokens_per_s state_bytes scratch_bytes
policy drafter tree implementation device finish_reason"""
SINCE = {"rule", "lossless"}  # how candidates were accepted, since rules can be chosen
VISITS = {"steps_per_visit", "visits", "wait_s", "idle_s", "wasted_steps"}  # host and device


def counted():
    """Five steps: 4 of 27, nothing proposed, 0 of 27, 2 of 10, 1 of 1."""
    stats = Stats()
    for proposed, accepted in [(27, 4), (0, 0), (27, 0), (10, 2), (1, 1)]:
        stats.count_step(proposed, accepted)
    return stats


def test_steps_that_propose_nothing_are_no_drafts():
    stats = counted()
    assert (stats.steps, stats.num_drafts) == (5, 4)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (65, 7)
    assert stats.accepted_per_pos == [3, 2, 1, 1]
    assert stats.acceptance_length == 1 + 7 / 4
    assert stats.node_use == 7 / 65


def test_accepted_per_position_adds_up_to_all_accepted():
    stats = counted()
    assert sum(stats.accepted_per_pos) == stats.num_accepted_tokens


def test_nothing_drafted_divides_by_nothing():
    stats = Stats()
    assert stats.acceptance_length == 1.0 and stats.node_use == 0.0
    assert stats.decode_tokens_per_s == 0.0


def test_the_first_token_belongs_to_the_prompt_and_not_to_decoding():
    assert Stats(tokens=41, decode_s=2.0).decode_tokens_per_s == 20.0


def test_the_names_are_the_interfaces():
    """As JSON: exactly the promised names, and numbers that survive the round trip."""
    figures = json.loads(json.dumps(counted().as_dict()))
    assert set(figures) == set(INTERFACE.split()) | SINCE | VISITS
    assert figures["accepted_per_pos"] == [3, 2, 1, 1]
    assert figures["acceptance_length"] == 2.75


def test_the_text_shows_every_number_with_its_formula():
    stats = counted()
    stats.tokens, stats.prefill_s, stats.compile_s = 13, 0.5, 2.25
    stats.state_bytes, stats.scratch_bytes = 3 * 2**20, 2**19
    stats.policy, stats.drafter, stats.tree, stats.device = "wy", "mtp", "hydra27", "cpu"
    for steps, wait in ((3, 1.0), (2, 0.5)):
        stats.count_visit(steps, 2.0, wait, 0.25)
    assert (stats.visits, stats.steps_per_visit, stats.decode_s) == (2, 3, 4.0)
    stats.wasted_steps = 1
    text = stats_text(stats, 23, make_drafter("mtp+suffix", "hydra27"), "float32", "equal 13/13")
    assert text == (
        "prompt      23 tok   prefill 46.0 tok/s   first token 500 ms   "
        "compile 2.2 s (not in rates)\n"
        "generated   13 tok   decode 3.0 tok/s   5 steps   end: length   "
        "[wy | mtp | hydra27 | xla | float32 | cpu]\n"
        "tree        27 nodes   depth 11   11 paths\n"
        "drafted     65 nodes in 4 drafts   accepted 7   node use 10.8 %\n"
        "acceptance  2.75 tok/draft = 1 + 7/4   by depth 0.75 0.50 0.25 0.25\n"
        "visits      2 of at most 3 steps   host waited 1.50 s   device idle at most 0.50 s   "
        "1 wasted after the stop string\n"
        "memory      scratch 0.5 MiB   state 3.0 MiB\n"
        "check       equal 13/13\n"
    )


def test_a_drafter_that_never_finds_anything_is_visible():
    stats = Stats(drafter="suffix", steps=3)
    assert "no candidate in any step" in stats_text(stats, 5, make_drafter("suffix"), "float32")
    assert "at most 16 nodes   depth 8" in stats_text(stats, 5, make_drafter("suffix"), "float32")
