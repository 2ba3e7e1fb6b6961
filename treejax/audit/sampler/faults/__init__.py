"""Faults of samplers that the audit must catch; one line each.

The mistakes that are known from public engines and papers: first those of acceptance rules, then
those of keys and draws, then those of processing, padding and cuts.
"""

from treejax.audit.sampler.faults import coins, draws, handed, laws, shown
from treejax.audit.sampler.faults.base import Given, Sampler, SamplerFault, shipped
from treejax.steps.rules import Block, Match, MultiStep, WithoutReplacement

_MULTI = MultiStep(), "iid"
_RSD = WithoutReplacement(), "without_replacement"
_MATCH = Match(), "fixed"
_BLOCK = Block(), "iid"

REGISTRY: dict[str, SamplerFault] = {
    "p_without_q": SamplerFault(*_MULTI, "designed", law=laws.accepts_with_p),
    "always_accepted": SamplerFault(*_RSD, "designed", law=laws.accepts_always),
    "no_residual": SamplerFault(*_RSD, "designed", law=laws.no_residual),
    "residual_not_normalised": SamplerFault(*_RSD, "designed", law=laws.residual_not_normalised),
    "rank_order_ignored": SamplerFault(*_RSD, "designed", law=laws.rank_order_ignored),
    "q_not_updated": SamplerFault(*_RSD, "designed", law=laws.q_not_updated),
    "neighbours_row": SamplerFault(*_RSD, "designed", given=shown.neighbours_row),
    "neighbours_row_match": SamplerFault(*_MATCH, "designed", given=shown.neighbours_row),
    "bonus_at_parent": SamplerFault(*_RSD, "designed", law=laws.bonus_from_parent),
    "bonus_at_parent_match": SamplerFault(*_MATCH, "designed", choose=draws.drawn_at_parent),
    "bonus_redrawn": SamplerFault(*_MATCH, "designed", choose=draws.redrawn_after_mismatch),
    "temperature_on_q_only": SamplerFault(*_RSD, "cold", given=shown.temperature_on_q_only),
    "temperature_on_p_only": SamplerFault(*_RSD, "cold", given=shown.temperature_on_p_only),
    "temperature_twice": SamplerFault(*_MATCH, "cold", given=shown.temperature_twice),
    "bonus_without_temperature": SamplerFault(*_RSD, "cold", choose=coins.bonus_at_temperature_1),
    "same_coin": SamplerFault(*_RSD, "designed", choose=coins.same_coin_for_siblings),
    "coin_reused": SamplerFault(*_RSD, "single", choose=coins.rejecting_coin_reused),
    "last_draw_fixed": SamplerFault(*_RSD, "designed", choose=coins.last_draw_fixed),
    "key_at_all_positions": SamplerFault(*_MATCH, "designed", choose=draws.same_key_everywhere),
    "key_at_all_depths": SamplerFault(*_MATCH, "designed", choose=draws.same_key_at_all_depths),
    "key_in_every_step": SamplerFault(*_MATCH, "designed", choose=draws.same_keys_in_every_step),
    "drawn_per_path": SamplerFault(*_MATCH, "designed", choose=draws.drawn_per_path),
    "soft_q": SamplerFault(WithoutReplacement(), "fixed", "designed", given=shown.soft_q),
    "pruned_by_q": SamplerFault(*_RSD, "designed", given=shown.pruned_by_q),
    "better_sibling_kept": SamplerFault(*_RSD, "designed", given=shown.better_sibling_kept),
    "product_of_uniforms": SamplerFault(*_BLOCK, "designed", choose=coins.product_of_uniforms),
    "path_of_single_chances": SamplerFault(*_MULTI, "designed", law=laws.path_of_single_chances),
    "min_p_only_on_bonus": SamplerFault(*_RSD, "filters", choose=coins.min_p_only_on_bonus),
    "ties_cut": SamplerFault(*_MATCH, "filters", given=shown.ties_cut),
    "history_without_path": SamplerFault(*_MATCH, "penalties", given=shown.history_without_path),
    "least_tokens_ignored": SamplerFault(*_MATCH, "penalties", given=shown.least_tokens_ignored),
    "padding_matched": SamplerFault(*_MATCH, "designed", given=shown.padding_matched),
    "stops_ignored": SamplerFault(*_MATCH, "penalties", deliver=handed.stops_ignored),
    "one_token_too_many": SamplerFault(*_MATCH, "cold", **handed.ONE_TOO_MANY),
}

__all__ = ["REGISTRY", "Given", "Sampler", "SamplerFault", "shipped"]
