"""Pooled rates by hand, and recorded requests as they are read."""

import json
import sys

import pytest

from treejax.ablation.recorded import Message, Settings, prompt_of, read_requests
from treejax.ablation.requests_report import (
    accepted_by_depth,
    make_table,
    summarise,
    write_requests,
)
from treejax.cli.chat import make_renderer


def row(arm, prompt, repeat, tokens, seconds, gate="green", **more):
    place = {"arm": arm, "corpus": "c", "prompt": prompt, "mode": "greedy", "repeat": repeat}
    problem = "wrong" if gate == "red" else None
    head = place | {"gate": gate, "problem": problem, "drafter": "d"}
    if gate == "red":
        return head
    figures = {"tokens": tokens, "decode_s": seconds, "prefill_s": 0.5, "compile_s": 9.0}
    figures |= {"tokens_per_s": (tokens - 1) / seconds, "scratch_bytes": 2**20}
    figures |= {"steps": 5, "drafts": 4, "proposed": 8, "accepted": 3, "accepted_per_pos": [2, 1]}
    figures |= {"state_bytes": 0, "prompt_tokens": 7, "budget": 64, "acceptance_length": 1.75}
    return head | figures | more


def one(rows, arm):
    (record,) = [each for each in summarise(rows, ["plain", "a", "b"]) if each["arm"] == arm]
    return record


PLAIN = [
    *(row("plain", "p", 0, 11, 1.0), row("plain", "q", 0, 31, 3.0)),
    *(row("plain", "p", 1, 11, 2.0), row("plain", "q", 1, 31, 2.0)),
]


def test_rates_are_sums_by_sums_with_ranges_over_repeats():
    rows = [*PLAIN, row("a", "p", 0, 11, 0.5), row("a", "q", 0, 31, 1.5)]
    rows += [row("a", "p", 1, 11, 1.0), row("a", "q", 1, 31, 3.0)]
    plain, arm = one(rows, "plain"), one(rows, "a")
    assert plain["tokens_per_s"] == 10.0  # 40 tokens in 4 s, twice; not the mean of the requests'
    assert (arm["tokens_per_s_min"], arm["tokens_per_s_max"]) == (10.0, 20.0)
    assert arm["tokens_per_s"] == 15.0
    assert (arm["times_plain_min"], arm["times_plain"], arm["times_plain_max"]) == (1, 1.5, 2)
    assert (arm["requests"], arm["repeats"], arm["tokens"], arm["steps"]) == (2, 2, 42, 10)
    assert arm["acceptance_length"] == 1 + 6 / 8 and arm["first_accepted"] == 4 / 8
    assert arm["node_use"] == 6 / 16 and arm["scratch_mib"] == 1.0


def test_an_arm_on_fewer_requests_is_compared_with_plain_on_those():
    rows = [*PLAIN, row("a", "p", 0, 11, 0.25), row("a", "p", 1, 11, 0.5)]
    arm = one(rows, "a")
    assert (arm["times_plain"], arm["tokens_per_s"], arm["requests"]) == (4.0, 30.0, 1)


def test_a_repeat_that_was_cut_short_is_not_pooled():
    rows = [*PLAIN, row("a", "p", 0, 11, 1.0), row("a", "q", 0, 31, 3.0), row("a", "p", 1, 11, 9.0)]
    arm = one(rows, "a")
    assert (arm["repeats"], arm["tokens_per_s_min"], arm["tokens_per_s_max"]) == (1, 10.0, 10.0)


def test_one_red_row_takes_all_figures_of_the_arm(tmp_path):
    rows = [*PLAIN, row("a", "p", 0, 11, 0.1), row("a", "q", 0, 0, 0, "red")]
    rows += [row("b", "p", 0, 11, 0.2, "near tie")]
    wrong, near = one(rows, "a"), one(rows, "b")
    assert wrong["gate"] == "red" and wrong["problem"] == "q, greedy: wrong"
    assert "tokens_per_s" not in wrong and "accepted" not in wrong
    assert (near["gate"], near["near_ties"], near["tokens_per_s"]) == ("near tie", 1, 50.0)
    write_requests(rows, tmp_path / "requests.csv")
    text = (tmp_path / "requests.csv").read_text()
    assert "b tokens_per_s" in text and "a tokens_per_s" not in text
    table = make_table(summarise(rows, ["plain", "a", "b"]), None)
    assert "a, c, greedy: q, greedy: wrong" in str(table.caption)
    assert list(table.columns[-3].cells)[1:2] == ["-"]


def test_what_did_not_fit_is_no_failure_and_no_figure():
    lost = row("a", "p", 0, 0, 0, "red") | {"gate": "not run", "problem": "does not fit"}
    record = one([*PLAIN, lost], "a")
    assert (record["gate"], record["problem"]) == ("not run", "p, greedy: does not fit")
    assert "tokens_per_s" not in record


def test_fc26_a_drafter_that_proposes_nothing_is_said():
    idle = {"drafts": 0, "proposed": 0, "accepted": 0, "accepted_per_pos": []}
    records = summarise([*PLAIN, row("a", "p", 0, 11, 1.0, **idle)], ["plain", "a"])
    assert records[1]["acceptance_length"] is None and records[1]["first_accepted"] is None
    assert "a, c, greedy: the drafter proposed nothing" in str(make_table(records, None).caption)


def test_acceptance_by_depth_counts_all_drafts():
    rows = [row("a", "p", 0, 2, 1.0), row("a", "q", 0, 2, 1.0, accepted_per_pos=[4, 2, 2])]
    assert accepted_by_depth(rows) == [6 / 8, 3 / 8, 2 / 8]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "traffic.jsonl"


def test_recorded_requests_keep_what_they_say(file):
    lines = [
        {"messages": [{"role": "user", "content": "hi"}], "id": "chat"},
        {"tokens": [1, 2], "sampling": {"temperature": 1, "min_p": 0.1}, "seed": 4},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    requests = read_requests(file)
    (first, chat), (second, ids) = requests["chat"], requests["line 2"]
    assert (first, second) == (1, 2) and chat.messages == (Message("user", "hi"),)
    assert prompt_of(chat, lambda messages: f"<{messages[0]['content']}>") == "<hi>"
    assert prompt_of(ids, None) == (1, 2) and ids.seed == 4
    assert ids.sampling == Settings(temperature=1.0, min_p=0.1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is list, expected a JSON object"),
        ("{}", "line 2: none given, expected one of prompt, messages, tokens"),
        ('{"prompt": "a", "tokens": [1]}', "line 2: prompt and tokens given"),
        ('{"prompt": ""}', "line 2: prompt is empty"),
        ('{"tokens": []}', "line 2: tokens is empty"),
        ('{"tokens": [1.5]}', r"line 2.tokens\[0\] is 1.5, expected int"),
        ('{"tokens": 3}', "line 2.tokens is 3, expected list"),
        ('{"prompt": "a", "stop": "x"}', "line 2: unknown key 'stop'"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": true}', "line 2.max_tokens is True, expected int"),
        ('{"prompt": "a", "seed": -1}', "line 2: seed is -1"),
        ('{"prompt": "a", "sampling": {"top_p": 0.5}}', "sampling: missing key 'temperature'"),
        ('{"prompt": "a", "sampling": {"temperature": -1}}', "line 2: temperature is -1"),
        ('{"prompt": "a", "sampling": {"temperature": 1, "top_k": 0}}', "line 2: top_k is 0"),
        ('{"messages": [{"role": "user"}]}', "missing key 'content'"),
        ('{"prompt": "a", "id": "line 1"}', "line 2: id 'line 1' is there already"),
    ],
)
def test_a_wrong_line_is_named_with_its_file(file, line, message):
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_requests(file)
    assert str(caught.value).startswith(f"{file}, line 2") and "\n" not in str(caught.value)


def test_a_file_without_requests_is_refused(file):
    file.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no request"):
        read_requests(file)


TEMPLATE = """
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant"] %}
        {{- raise_exception("no role " + message.role) }}
    {%- endif %}
{{- bos_token + message.role + ": " + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "assistant:" }}
{%- endif %}
"""


def test_messages_are_rendered_by_the_models_own_template(tmp_path):
    settings = {"eos_token": {"content": "</s>"}, "bos_token": None, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    expected = "user: 1 + 1?</s>assistant: 2</s>assistant:"
    assert make_renderer(tmp_path)(talk) == expected
    settings["chat_template"] = [{"name": "tools", "template": "x"}]
    settings["chat_template"].append({"name": "default", "template": TEMPLATE})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert make_renderer(tmp_path)(talk) == expected
    with pytest.raises(ValueError, match="chat template refuses: no role robot"):
        make_renderer(tmp_path)([{"role": "robot", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="its chat template cannot be read"):
        make_renderer(tmp_path)


def test_what_chat_needs_and_lacks_is_said_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="has no chat template"):
        make_renderer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"pip install 'treejax\[chat\]'"):
        make_renderer(tmp_path)
