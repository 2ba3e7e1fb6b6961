"""Peers of the benchmark: they are given the same work, and missing ones cost one line."""

import pytest

from pallas_kernels.bench import peers, run
from pallas_kernels.bench.cases import make_case
from pallas_kernels.bench.gate import Meter
from pallas_kernels.bench.settings import parse
from pallas_kernels.bench.trees import make_tree

TINY = (
    "--batch 1 --layers 2 --value-heads 2 --key-heads 1 --key-dim 16 --value-dim 16 "
    "--implementation xla --peers none --repeats 2"
).split()


class FakeFLA:
    """The calls that are made of FLA, in plain PyTorch: [B, T, heads, width], states [V, K]."""

    def __init__(self, torch):
        self.torch = torch
        self.chunk_gated_delta_rule = self.fused_recurrent_gated_delta_rule

    def fused_recurrent_gated_delta_rule(
        self, q, k, v, g, beta, scale, initial_state, state_v_first,
        output_final_state=False, cu_seqlens=None,
    ):  # fmt: skip
        assert scale == 1.0 and state_v_first
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        out, final = self.torch.zeros(v.shape), initial_state.clone()
        for sequence in range(len(final)):
            row, start = (sequence, 0) if cu_seqlens is None else (0, bounds[sequence])
            end = bounds[1] if cu_seqlens is None else bounds[sequence + 1]
            for t in range(start, end):
                ratio = v.shape[2] // k.shape[2]
                key, query = (x[row, t].float().repeat_interleave(ratio, 0) for x in (k, q))
                state = final[sequence] * g[row, t].exp()[:, None, None]
                u = beta[row, t][:, None] * (v[row, t].float() - (state * key[:, None]).sum(-1))
                final[sequence] = state + u[:, :, None] * key[:, None]
                out[row, t] = (final[sequence] * query[:, None]).sum(-1)
        return out, final if output_final_state else None


def test_peers_are_given_the_same_work():
    torch = pytest.importorskip("torch", reason="a peer of the bench, an optional extra")
    case = make_case(parse(TINY), 2, make_tree("hydra27"), 2, "realistic")
    truth = run.Truth(case)
    plans = [peers.loop_plan(torch, case, truth)]
    plans += peers.fla_plans(torch, FakeFLA(torch), case, truth)
    assert {peers.PER_PATH, peers.PUBLISH, peers.BOTH} < {plan.name for plan in plans}
    for plan in plans:
        meter = Meter()
        plan.check(plan.run(), meter)
        assert meter.errors() and all(e.rms < 1e-6 for e in meter.errors().values()), plan.name


def test_missing_peers_cost_one_line(monkeypatch, capsys):
    case = make_case(parse(TINY), 2, make_tree("hydra27"), 2, "realistic")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.make_peers(case, run.Truth(case)) == []
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "pip install torch flash-linear-attention" in shown
