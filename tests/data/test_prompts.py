"""Prompts and completions of decoder-only models: which ids are read, which are learnt, and what is refused."""

import json
import shlex
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tiny_tokenizers
from clocks import clock_at
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged
from tiny_tokenizers import CHATML, gpt_like
from tokenizers import normalizers
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from ngramloss import cli, recipe
from ngramloss.data import Example, load, prompts
from ngramloss.data.candidate_tokens import tokenise_candidates
from ngramloss.data.candidates import Candidates
from ngramloss.data.prompts import completion_ids, fix_date, prompt_ids, prompt_of
from ngramloss.data.tokens import Shape, tokenise
from ngramloss.data.tokens import prompt_ids as model_input
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.models.prompts import _warn_once, align_stop, shape_of, warn_without_bos
from ngramloss.recipe import Data, Model
from ngramloss.training import prepare
from ngramloss.training.processes import Processes
from ngramloss.training.run import run_of

SOURCE = "The cat sat on the mat. It slept there all day!"
TARGET = "The cat slept."


def llama_like():
    """Unigram that puts a space before every text by itself, as Llama 2 does."""
    tokenizer = tiny_tokenizers.t5_like()
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return gpt_like()


STOPS = [1]
END, TURN = 1, 3


def made(data, tokenizer, column="", task="summarisation", source=SOURCE, target=TARGET, longest=(1000, 1000)):
    """The prompt, the ids of a row, and what was cut."""
    prompt, cut = prompt_of(data, task, column, tokenizer, STOPS), ([], [])
    (inputs,), (labels,) = prompts.rows([Example("1", source, target)], tokenizer, prompt, *longest, cut)
    return inputs, labels, (cut[0][0], cut[1][0])


# A template


@pytest.mark.parametrize(
    ("data", "column", "task", "text"),
    [
        (Data(), "document", "summarisation", f"<s>{SOURCE}\n\nSummary:| {TARGET}</s>"),
        (Data(), "", "translation", f"<s>{SOURCE}\n\nTranslation:| {TARGET}</s>"),
        (Data(), "prompt", "summarisation", f"<s>{SOURCE}| {TARGET}</s>"),
        (Data(), "Prompt", "summarisation", f"<s>{SOURCE}| {TARGET}</s>"),
        (Data(), "Instruction,Input", "summarisation", f"<s>{SOURCE}\n\n|{TARGET}</s>"),
        (Data(prompt="Text: {source}\nTL;DR:"), "prompt", "summarisation", f"<s>Text: {SOURCE}\nTL;DR:| {TARGET}</s>"),
        (Data(prompt="{source}\nIn short:\n"), "", "summarisation", f"<s>{SOURCE}\nIn short:\n|{TARGET}</s>"),
        (Data(prompt="<s>{source} ="), "", "summarisation", f"<s>{SOURCE} =| {TARGET}</s>"),
    ],
)
def test_prompt_and_completion_are_joined_as_ids(tokenizer, data, column, task, text):
    inputs, labels, cut = made(data, tokenizer, column, task)
    assert "|".join(tokenizer.batch_decode([inputs, labels])) == text
    assert cut == (False, False)
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split("|"))
    assert inputs == before
    assert labels == after


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("a =\n", "b", "a =\n|b</s>"),
        ("a =", " b", "a =| b</s>"),
        ("a =", "\nb", "a =|\nb</s>"),
        ("a =", "b", "a =| b</s>"),
    ],
)
def test_a_space_is_added_only_where_there_is_none(source, target, text):
    inputs, labels, _ = made(Data(), gpt_like(bos=False), "prompt", source=source, target=target)
    assert "|".join(gpt_like().batch_decode([inputs, labels])) == text


def test_a_tokenizer_that_puts_spaces_by_itself_gets_no_second_one():
    tokenizer = llama_like()
    whole = tokenizer("The cat\n\nSummary: The dog")["input_ids"]
    inputs, labels, _ = made(Data(), tokenizer, source="The cat", target="The dog")
    assert [*inputs, *labels] == [*whole, END]
    ours = tiny_tokenizers.ours()  # <s> text </s>
    prompt = prompt_of(Data(), "summarisation", "", ours, [2])
    (inputs,), (labels,) = (
        prompt_ids(["The cat"], ours, prompt, 99),
        completion_ids(["The cat"], ["The dog"], ours, prompt, 99),
    )
    assert [*inputs, *labels] == ours("The cat\n\nSummary: The dog")["input_ids"]


def test_a_long_source_is_cut_and_never_the_template(tokenizer):
    data = Data(prompt="Read: {source}\n\nSummary:")
    whole, _, _ = made(data, tokenizer)
    inputs, _, cut = made(data, tokenizer, source=SOURCE * 3, longest=(len(whole), 99))
    assert (len(inputs), cut) == (len(whole), (True, False))
    text = tokenizer.decode(inputs)
    assert text.startswith("<s>Read: The cat sat")
    assert text.endswith("\n\nSummary:")
    inputs, _, cut = made(data, tokenizer, longest=(len(whole), 99))
    assert (inputs, cut) == (whole, (False, False)), "one that just fits is not cut"


def test_a_prompt_without_template_keeps_its_end(tokenizer):
    inputs, _, cut = made(Data(), tokenizer, "prompt", source=f"{SOURCE * 3} Summarise:", longest=(12, 99))
    assert (len(inputs), inputs[0], cut[0]) == (12, 0, True)
    assert tokenizer.decode(inputs).endswith(" Summarise:")


def test_a_long_target_loses_its_end_and_is_counted(tokenizer):
    _, whole, _ = made(Data(), tokenizer)
    for longest, cut in ((len(whole), False), (len(whole) - 1, True)):
        _, labels, found = made(Data(), tokenizer, longest=(99, longest))
        assert (labels, found) == (whole[:longest], (False, cut))


@pytest.mark.parametrize("data", [Data(prompt="Read this text: {source}\n\nSummary:"), Data(prompt="chat")])
def test_a_template_that_fills_the_prompt_is_refused(tokenizer, data):
    with pytest.raises(
        UserError, match=r"data.max_source = 6 is too small: the prompt takes \d+ tokens without the source"
    ):
        made(data, tokenizer, longest=(6, 99))


def test_the_completion_ends_with_a_token_that_generation_stops_at(tokenizer):
    assert prompt_of(Data(), "summarisation", "", tokenizer, [7, 1]).stop == (1, 7)
    assert prompt_of(Data(), "summarisation", "", tokenizer, [7, 9]).ending == (7,)


# A chat template


def test_a_chat_prompt_is_that_of_the_tokenizer_and_its_end_of_turn_is_learnt(tokenizer):
    inputs, labels, _ = made(Data(prompt="chat", instruction="Summarise."), tokenizer)
    asked = [{"role": "user", "content": f"Summarise.\n\n{SOURCE}"}]
    assert inputs == tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": TARGET}])["input_ids"]
    assert [*inputs, *labels] == whole[:-1], "without the line break after the end"
    assert labels[-1] == TURN
    assert prompt_of(Data(prompt="chat"), "summarisation", "", tokenizer, STOPS).stop == (TURN, END)


def test_the_source_of_a_chat_prompt_is_cut(tokenizer):
    inputs, _, cut = made(Data(prompt="chat", instruction="Summarise."), tokenizer, source=SOURCE * 9, longest=(60, 99))
    text = tokenizer.decode(inputs)
    assert (len(inputs), cut[0]) == (60, True)
    assert text.startswith("<|im_start|>user\nSummarise.\n\nThe cat")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, 'the tokenizer has no chat template, which data.prompt = "chat" needs'),
        ("{{ messages | length }}{% for m in messages %}{{ m['content'] }}</s>{% endfor %}", "once its answer follows"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "no token at the end of an answer"),
        ("{{ raise_exception('no users here') }}", "refuses messages of user: no users here"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused(template, message):
    with pytest.raises(UserError, match=message):
        prompt_of(Data(prompt="chat"), "summarisation", "", gpt_like(template=template), STOPS)


def test_what_a_chat_template_writes_before_an_answer_belongs_to_the_prompt():
    thinking = CHATML.replace(
        "{{ message['content'] }}",
        "{% if message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
    )
    tokenizer = gpt_like(template=thinking)
    inputs, labels, _ = made(Data(prompt="chat"), tokenizer)
    assert tokenizer.decode(inputs).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(labels) == f"{TARGET}<|im_end|>"


# Messages


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The cat?"},
    {"role": "assistant", "content": "It slept."},
    {"role": "user", "content": "The dog?"},
    {"role": "assistant", "content": "It ran home."},
]


ANSWERED = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
CLOCKS = {
    "Llama 3": "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
    "{%- endif %}\n  {% if true %}Today: {{ date_string }}\n{% endif %}" + ANSWERED,
    "Mistral": '\n\n{%- set today = strftime_now("%Y-%m-%d") %}{%- set before = strftime_now("%d") | int - 1 %}'
    "{{ today }} {{ before }}" + ANSWERED,
    "inside": "  {% macro head() %}{{ strftime_now(format='%A, %-d %B %y') }}{% endmacro %}"
    "{% for m in messages %}{{ head() }}{% endfor %}" + ANSWERED,
}


@pytest.mark.parametrize("name", [*CLOCKS, "none"])
def test_a_template_with_a_day_writes_what_it_writes_on_that_day(monkeypatch, tmp_path, name):
    clock_at(monkeypatch, 2026, 2, 3)
    tokenizer = gpt_like(template=CLOCKS.get(name, CHATML))
    today = tokenizer.apply_chat_template(TALK, tokenize=False)
    clock_at(monkeypatch, 2027, 11, 30)
    assert (tokenizer.apply_chat_template(TALK, tokenize=False) == today) == (name == "none")
    assert fix_date(tokenizer, "2026-02-03") == ("" if name == "none" else "2026-02-03")
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == today
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert fix_date(loaded) == ("" if name == "none" else "2026-02-03"), "one that has a day keeps it"
    assert loaded.apply_chat_template(TALK, tokenize=False) == today


def test_today_is_the_day_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("NGRAMLOSS_TODAY", "2026-01-31")
    assert fix_date(gpt_like(template=CLOCKS["Mistral"])) == "2026-01-31"
    assert fix_date(gpt_like(template=CLOCKS["Mistral"]), "2026-02-03") == "2026-02-03"
    monkeypatch.setenv("NGRAMLOSS_TODAY", "tomorrow")
    with pytest.raises(UserError, match="NGRAMLOSS_TODAY should be a day such as 2026-01-31, got 'tomorrow'"):
        fix_date(gpt_like(template=CLOCKS["Mistral"]))


def test_each_of_several_templates_gets_the_day():
    tokenizer = gpt_like(template={"default": CLOCKS["Llama 3"], "tool_use": CHATML})
    assert fix_date(tokenizer, "2026-02-03") == "2026-02-03"
    assert "Today: 03 Feb 2026\n" in tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.chat_template["tool_use"] == CHATML


def talk(tokenizer, messages=TALK, longest=(1000, 1000)):
    source, target = json.dumps(messages[:-1]), messages[-1]["content"]
    return made(Data(), tokenizer, "messages", source=source, target=target, longest=longest)


def test_every_answer_of_messages_is_learnt_and_nothing_else(tokenizer):
    inputs, labels, _ = talk(tokenizer)
    assert inputs == tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(TALK)["input_ids"]
    assert [*inputs, *(token if token >= 0 else ~token for token in labels)] == whole[:-1]
    learnt = "".join(tokenizer.decode(token) if token >= 0 else "·" for token in labels)
    assert [part for part in learnt.split("·") if part] == ["It slept.<|im_end|>", "It ran home.<|im_end|>"]


def test_messages_are_a_prompt_for_their_last_answer(tokenizer):
    prompt = prompt_of(Data(), "summarisation", "messages", tokenizer, STOPS)
    (inputs,) = model_input([json.dumps(TALK[:-1])], tokenizer, Shape.of(Data(), prompt))
    assert inputs == tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True)["input_ids"]


def test_the_longest_message_is_cut(tokenizer):
    inputs, labels, cut = talk(tokenizer, [TALK[0], {"role": "user", "content": SOURCE * 9}, TALK[2]], (60, 3))
    text = tokenizer.decode(inputs)
    assert (len(inputs), len(labels), cut) == (60, 3, (True, True))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe cat sat")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UserError, match=r"without the longest message, 'Be brief"):
        talk(tokenizer, longest=(5, 99))


def test_an_earlier_answer_is_not_cut_although_it_is_the_longest_message(tokenizer):
    talk = [TALK[1], {"role": "assistant", "content": SOURCE * 3}, {"role": "user", "content": SOURCE}]
    prompt = prompt_of(Data(), "summarisation", "messages", tokenizer, STOPS)
    (whole,) = model_input([json.dumps(talk)], tokenizer, Shape.of(Data(), prompt))
    (inputs,) = model_input([json.dumps(talk)], tokenizer, Shape.of(Data(max_source=len(whole) - 5), prompt))
    assert len(inputs) == len(whole) - 5
    assert f"assistant\n{SOURCE * 3}<|im_end|>" in tokenizer.decode(inputs)


def test_an_answer_that_quotes_its_end_is_learnt_to_its_own_end(tokenizer):
    quoting = {"role": "assistant", "content": "Write <|im_end|> there."}
    _, labels, _ = talk(tokenizer, [TALK[1], quoting])
    assert tokenizer.decode(labels) == "Write <|im_end|> there.<|im_end|>"


def test_a_chat_template_that_rewrites_earlier_messages_is_refused_for_several_answers():
    thinking = CHATML.replace(
        "{{ message['content'] }}",
        "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}{{ message['content'] }}",
    )
    tokenizer = gpt_like(template=thinking)
    inputs, labels, _ = talk(tokenizer, TALK[:3])
    assert tokenizer.decode(inputs).endswith("assistant\n<think></think>")
    assert tokenizer.decode(labels) == "It slept.<|im_end|>"
    with pytest.raises(UserError, match=r"writes messages differently when others follow \(row '1', message 3\)"):
        talk(tokenizer)


def legacy_llama():
    """llama_like, as its tokenizer was written until 2024: a space before every text and behind every special token."""
    tokenizer = llama_like()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    return tokenizer


HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
ASKED = "{% if add_generation_prompt %}" + HEADER.replace("{{ m.role }}", "assistant") + "{% endif %}"
CHAT_TEMPLATES = {
    "chatml": CHATML,
    "llama3": "<s>{% for m in messages %}" + HEADER + "{{ m.content | trim }}<|eot_id|>{% endfor %}" + ASKED,
    "mistral": "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "thinking": CHATML.replace("{{ message['content'] }}", "{% if loop.last %}{{ lead }}{% endif %}{{ message.content }}")
    .replace("{{ lead }}", "{% if message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"),
}  # fmt: skip
CHATTING = tiny_tokenizers.FAMILIES | {"gpt": gpt_like, "llama": llama_like, "legacy llama": legacy_llama}
CONTENT = st.text("aI .?é\n", min_size=1, max_size=6).filter(str.strip)


@cache
def chatting(family, template):
    tokenizer = deepcopy(CHATTING[family]())
    marks = "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
    tokenizer.add_special_tokens({"extra_special_tokens": list(marks)})
    tokenizer.chat_template = CHAT_TEMPLATES[template]
    return tokenizer


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
@pytest.mark.parametrize("family", CHATTING)
@given(st.data())
@settings(max_examples=10)
def test_generation_reads_before_each_answer_what_training_read(family, template, data):
    tokenizer, roles = chatting(family, template), ["system"] * data.draw(st.integers(0, 1))
    roles += ["user", "assistant"] * data.draw(st.integers(1, 3))
    messages = [{"role": role, "content": data.draw(CONTENT)} for role in roles]
    answers = [at for at, role in enumerate(roles) if role == "assistant"]
    others = answers[:-1] if template != "thinking" else []
    learnt = [*(at for at in others if data.draw(st.booleans())), answers[-1]]
    prompt = prompt_of(Data(), "summarisation", "messages", tokenizer, STOPS)
    example = Example("1", json.dumps(messages[:-1]), messages[-1]["content"], weights=[at in learnt for at in answers])
    (inputs,), (labels,) = prompts.rows([example], tokenizer, prompt, 1000, 1000, ([], []))
    read = [json.dumps(messages[:at]) for at in learnt]
    begins = [at for at, token in enumerate(labels) if token >= 0 and (not at or labels[at - 1] < 0)]
    before = [[*inputs, *(max(token, ~token) for token in labels[:at])] for at in begins]
    assert prompt_ids(read, tokenizer, prompt, 1000) == before


def test_a_greeting_may_stand_before_the_first_question():
    """Some templates refuse messages without a question, and so those before the greeting."""
    refusing = "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('empty') }}{% endif %}"
    tokenizer = gpt_like(template=refusing + CHATML)
    asked = [TALK[0], TALK[2], TALK[1]]
    prompt = prompt_of(Data(), "summarisation", "messages", tokenizer, STOPS)
    whole = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert prompt_ids([json.dumps(asked)], tokenizer, prompt, 1000) == [whole]


@pytest.mark.parametrize("data", [Data(prompt="{source} ="), Data(prompt="chat", instruction="Now:")])
def test_messages_have_no_template(tokenizer, data):
    with pytest.raises(UserError, match="the messages of the data are the prompt"):
        prompt_of(data, "summarisation", "messages", tokenizer, STOPS)


# Rows of data


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_columns_prompt_and_completion_are_found_together(tmp_path):
    name = write(tmp_path / "a.jsonl", {"text": "all", "prompt": "a", "completion": "b"})
    split = load(name, "train")
    assert (split.examples, split.column) == ([Example("1", "a", "b")], "prompt")
    name = write(tmp_path / "c.jsonl", {"Text": "all", "Prompt": "a", "Completion": "b"})
    assert load(name, "train").examples == [Example("1", "a", "b")]
    name = write(tmp_path / "b.jsonl", {"document": "d", "summary": "s", "prompt": "a", "messages": 3})
    assert load(name, "train").examples == [Example("1", "d", "s")]


@pytest.mark.parametrize("as_text", [False, True])
def test_messages_are_read_up_to_the_last_answer(tmp_path, as_text):
    messages = [*TALK, {"role": "user", "content": "Thanks."}]
    name = write(tmp_path / "a.jsonl", {"id": "x", "messages": json.dumps(messages) if as_text else messages})
    split = load(name, "train")
    (example,) = split.examples
    assert (split.column, example.id, json.loads(example.source), example.target) == (
        "messages",
        "x",
        TALK[:4],
        "It ran home.",
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("[", "'messages' is not JSON"),
        ([], "'messages' should be a list of messages, each with role and content"),
        ([{"role": "user", "content": None}], "number 1 has no text as its role or its content"),
        ([TALK[1], {"role": "assistant", "content": " "}], "'messages' has an empty answer: number 2"),
        (TALK[:2], "'messages' has no answer: no message has the role 'assistant'"),
        (TALK[2:], "'messages' begins with an answer"),
        ([TALK[1], {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "has tool_calls in number 2"),
    ],
)
def test_messages_that_cannot_be_used_are_bad_rows(tmp_path, messages, message):
    name = write(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": messages})
    with pytest.raises(UserError, match=f"a.jsonl:2: .*{message}"):
        load(name, "train")


@pytest.mark.parametrize("as_text", [False, True])
def test_conversations_that_all_end_with_a_question_are_read_whole_if_no_target_is_needed(tmp_path, as_text):
    talks = [TALK[:2], TALK[:4]]
    assert [talk[-1]["role"] for talk in talks] == ["user", "user"]
    written = [{"messages": json.dumps(talk) if as_text else talk, "response": "r", "x": 1} for talk in talks]
    split = load(write(tmp_path / "a.jsonl", *written), "train", need_target=False)
    assert [json.loads(example.source) for example in split.examples] == talks
    assert [example.target for example in split.examples] == ["", ""]
    assert (split.column, split.target_column, split.unread) == ("messages", "", ("response", "x"))
    with pytest.raises(UserError, match=r"a.jsonl:1: 'messages' has no answer"):
        load(tmp_path.joinpath("a.jsonl").as_posix(), "train")


def test_conversations_of_which_one_ends_with_an_answer_have_targets(tmp_path):
    name = write(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": TALK[:4]})
    split = load(name, "train", need_target=False)
    assert [example.target for example in split.examples] == [TALK[4]["content"], TALK[2]["content"]]
    assert split == load(name, "train")


def test_a_conversation_that_ends_with_an_answer_is_a_bad_row_among_those_that_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr("ngramloss.data.examples.LOOKED_AT", 2)
    assert load(
        write(tmp_path / "c.jsonl", {"messages": TALK[:2]}, {"x": 1}), "train", need_target=False, on_bad_row="skip"
    )
    broken, asked = {"messages": "["}, {"messages": TALK[:2]}
    name = write(tmp_path / "a.jsonl", broken, asked, {"messages": TALK}, {"x": 1})
    with pytest.raises(UserError, match=r"3 of 4 rows") as error:
        load(name, "train", need_target=False)
    assert "a.jsonl:1: 'messages' is not JSON" in str(error.value)
    assert "a.jsonl:3: 'messages' ends with an answer, but the first rows do not" in str(error.value)
    with pytest.raises(UserError, match=r"'messages' is not JSON"):
        load(write(tmp_path / "b.jsonl", broken), "train", need_target=False)


def test_messages_without_a_chat_template_are_told_how_to_get_one():
    with pytest.raises(
        UserError, match=r"'messages' needs\. Use .* to chat; or give the tokenizer one, .*model.tokenizer"
    ):
        prompt_of(Data(), "summarisation", "messages", gpt_like(template=None), STOPS)


def test_what_is_beside_messages_and_in_them_and_not_read_is_known(tmp_path):
    thought = [*TALK[:-1], TALK[-1] | {"thinking": "Hm."}]
    name = write(
        tmp_path / "a.jsonl", {"messages": TALK, "tools": []}, {"messages": json.dumps(thought), "system": "x"}
    )
    assert load(name, "train").unread == ("tools", "system", "thinking of the messages")


@pytest.mark.parametrize(
    ("trained", "validated", "template", "alike"),
    [
        ("document", "dialogue", "", True),
        ("document", "prompt", "", False),
        ("document", "prompt", "{source} =", True),
        ("document", "messages", "{source} =", False),
        ("instruction,input", "input", "", False),
        ("instruction,input", "instruction", "", True),
        ("Prompt", "prompt", "", True),
    ],
)
def test_training_and_validation_are_read_alike(tmp_path, trained, validated, template, alike):
    from ngramloss.training.prepare import read_splits

    for split, columns in {"train": trained, "validation": validated}.items():
        texts = TALK if columns == "messages" else "a"
        target = {} if columns == "messages" else {"summary": "b"}
        write(tmp_path / f"{split}.jsonl", {name: texts for name in columns.split(",")} | target)
    changes = [f"data.name={tmp_path}", *([f"data.prompt={template}"] if template else [])]
    settings = recipe.load("sft", changes)
    if alike:
        assert read_splits(settings)["validation"].column == validated
    else:
        with pytest.raises(
            UserError, match=rf"the training split has its sources in '{trained}', but the validation split in"
        ):
            read_splits(settings)


def test_an_empty_completion_is_a_bad_row(tmp_path):
    name = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": " "})
    with pytest.raises(UserError, match=r"a.jsonl:2: 'completion' is blank"):
        load(name, "train")


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.prompt=Summary:"], r"data.prompt: must have \{source\} once"),
        (["data.prompt={source} {source}"], r"data.prompt: must have \{source\} once"),
        (["data.instruction=Summarise."], 'data.instruction: belongs to data.prompt = "chat"'),
        (
            ["model.lora_alpha=64"],
            r"model.lora_alpha: is for adapters, but model.lora is 0\. Set model.lora, or leave this out",
        ),
        (['model.lora_targets=["q_proj"]'], r"model.lora_targets: is for adapters"),
        ([r"data.prompt={source}\n\nTL;DR:"], r"""data.prompt: has .* --set 'data.prompt="\{source\}\\n"""),
        (["data.prompt=chat", r"data.instruction=Be brief.\n"], "data.instruction: has a backslash and an n"),
    ],
)
def test_a_wrong_prompt_is_a_mistake_in_the_recipe(settings, message):
    with pytest.raises(UserError, match=message):
        recipe.load("sft", settings)


@pytest.mark.parametrize("data", [Data(prefix="summarize: "), Data(separator="</s>")])
def test_settings_of_encoder_decoders_are_refused(tokenizer, data):
    with pytest.raises(UserError, match="a decoder-only model has none"):
        prompt_of(data, "summarisation", "", tokenizer, STOPS)


BART = Model(name="scratch", architecture="bart")
LLAMA = replace(BART, architecture="llama", width=16, decoder_layers=1, heads=2, feed_forward=24)


def test_an_encoder_decoder_has_no_prompt():
    assert shape_of(Data(), "summarisation", BART, loading.load_config(BART), tiny_tokenizers.ours()) == Shape.of(
        Data()
    )
    with pytest.raises(UserError, match=r"Text before its sources is data\.prefix"):
        shape_of(Data(prompt="{source} ="), "summarisation", BART, loading.load_config(BART), tiny_tokenizers.ours())
    with pytest.raises(UserError, match="has conversations, for decoder-only models"):
        shape_of(Data(), "summarisation", BART, loading.load_config(BART), tiny_tokenizers.ours(), column="messages")


# Tokens on disk


@pytest.mark.parametrize("column", ["", "messages"])
def test_tokens_are_cached_by_everything_that_makes_the_prompt(tmp_path, tokenizer, column):
    source = json.dumps(TALK[:-1]) if column else SOURCE
    examples = [Example(str(number), source, TARGET) for number in range(3)]
    prompt = prompt_of(Data(), "summarisation", column, tokenizer, STOPS)
    shape = Shape.of(Data(max_source=99, max_target=99), prompt)
    rows = tokenise(examples, "abc", tokenizer, shape, cache=tmp_path)
    inputs, labels = prompts.rows(examples, tokenizer, prompt, 99, 99, ([], []))
    assert [row["input_ids"].tolist() for row in rows] == inputs
    assert [row["labels"].tolist() for row in rows] == labels
    assert rows.cut == (0, 0)
    assert any(token < 0 for token in labels[0]) == bool(column)
    others = [
        replace(prompt, before="x"),
        replace(prompt, after="x"),
        replace(prompt, lead="" if prompt.lead is None else None),
        replace(prompt, ending=(5, 3) if column else (5,)),
        replace(prompt, stop=(*prompt.stop, 9)),
        replace(prompt, chat_template="x"),
    ]
    made = [tokenise(examples, "abc", tokenizer, replace(shape, prompt=one), cache=tmp_path) for one in others]
    assert len({rows.folder, *(one.folder for one in made)}) == 7


def test_candidates_become_completions(tmp_path, tokenizer):
    prompt = prompt_of(Data(prompt="{source}\n"), "summarisation", "", tokenizer, STOPS)
    candidates = Candidates({"1": (("The dog", "Rain"), (1.0, 0.0))}, "abc", {})

    def texts(prompt):
        shape = Shape.of(Data(), prompt)
        rows = tokenise_candidates([Example("1", SOURCE, TARGET)], "abc", candidates, tokenizer, shape, cache=tmp_path)
        return [tokenizer.decode(ids) for ids in rows[0][0]]

    assert texts(prompt) == ["The dog</s>", "Rain</s>"]
    assert texts(replace(prompt, ending=(END, END))) == ["The dog</s></s>", "Rain</s></s>"], "not those of the cache"


# Models


def test_llama_is_made_from_scratch_and_is_causal():
    tokenizer = tiny_tokenizers.ours()
    model = loading.load(LLAMA, tokenizer)
    assert isinstance(model, LlamaForCausalLM)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (16, 1, 24)
    assert loading.is_causal(config)
    assert loading.is_causal(loading.load_config(LLAMA))
    assert not loading.is_causal(loading.load_config(BART))


@pytest.mark.parametrize(("family", "causal"), [("gpt2", True), ("bert", False), ("bart", False), ("vit", False)])
def test_the_configuration_says_whether_a_model_is_causal(family, causal):
    from transformers import AutoConfig

    assert loading.is_causal(AutoConfig.for_model(family)) == causal
    assert loading.is_causal(AutoConfig.for_model("bert", is_decoder=True))


@pytest.fixture
def saved(tmp_path):
    """A decoder-only model without an id for padding, and its tokenizer."""
    tokenizer = gpt_like()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return Model(name=str(tmp_path / "model"))


def test_a_causal_model_without_padding_is_padded_with_its_end(saved):
    tokenizer, _ = loading.load_tokenizer(saved, lambda: (), "")
    assert tokenizer.pad_token_id is None
    model = loading.load(saved, tokenizer)
    assert isinstance(model, LlamaForCausalLM)
    assert (tokenizer.pad_token_id, model.config.pad_token_id, model.generation_config.pad_token_id) == (1, 1, 1)
    shape = shape_of(Data(), "summarisation", saved, loading.load_config(saved), tokenizer)
    (labels,) = completion_ids([SOURCE], [TARGET], tokenizer, shape.prompt, 99)
    assert labels[-1] == tokenizer.pad_token_id, "the end is learnt, though it pads, too"


def test_generation_stops_at_the_end_of_a_turn(saved):
    tokenizer, _ = loading.load_tokenizer(saved, lambda: (), "")
    model = loading.load(saved, tokenizer)
    align_stop(
        model, shape_of(Data(prompt="chat"), "summarisation", saved, loading.load_config(saved), tokenizer).prompt
    )
    assert model.generation_config.eos_token_id == [TURN, END]
    model.save_pretrained(saved.name)
    assert loading.stop_ids(saved, loading.load_config(saved), tokenizer) == [TURN, END]
    assert shape_of(Data(), "summarisation", saved, loading.load_config(saved), tokenizer).prompt.ending == (END,)


def test_the_stop_of_a_model_without_generation_settings_is_in_its_config(saved):
    (Path(saved.name) / "generation_config.json").unlink()
    tokenizer, _ = loading.load_tokenizer(saved, lambda: (), "")
    assert loading.stop_ids(saved, loading.load_config(saved), tokenizer) == [1]
    assert loading.stop_ids(LLAMA, loading.load_config(LLAMA), tokenizer) == [1]


@pytest.mark.usefixtures("own_cache")
def test_a_recipe_is_prepared_for_a_causal_model(saved, tmp_path, monkeypatch):
    import torch

    from ngramloss.data.tokens import Tokens
    from ngramloss.storage.run_folder import RunFolder

    monkeypatch.chdir(tmp_path)
    name = write(tmp_path / "a.jsonl", *({"prompt": f"{SOURCE} {number}", "completion": TARGET} for number in range(4)))
    settings = recipe.load(
        "sft", [f"data.name={name}", f"model.name={saved.name}", "train.eval_every=0", "data.max_target=3"]
    )
    here = Processes(0, 1, torch.device("cpu"))
    ready, _ = prepare.prepare(run_of(settings), RunFolder(tmp_path / "run"), here, None)
    assert ready.used[0] == "train: 4 rows; 4 completions cut to 3 tokens (data.max_target)."
    row = Tokens(ready.splits["train"].tokens)[2]
    tokenizer, _ = loading.load_tokenizer(saved, lambda: (), "")
    assert tokenizer.decode(row["input_ids"]) == f"<s>{SOURCE} 2"
    assert len(row["labels"]) == 3


# A token that every text must begin with


def gemma(folder, *, bos):
    """A tiny Gemma 3 in a folder, with a tokenizer that puts <s> first, or leaves it out as a converted one does."""
    tokenizer = gpt_like(bos=bos, template=None)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    Gemma3ForCausalLM(Gemma3TextConfig(**ids, **sizes, **heads)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def begun(config, data, tokenizer, column=""):
    """The warnings about a prompt, and how many <s> its ids begin with, and have."""
    _warn_once.cache_clear()
    prompt = prompt_of(data, "summarisation", column, tokenizer, STOPS)
    source = json.dumps(TALK[:1]) if prompt.messages else SOURCE
    with logged() as lines:
        warn_without_bos(config, tokenizer, prompt)
        warn_without_bos(config, tokenizer, prompt)
    (ids,) = prompt_ids([source], tokenizer, prompt, 1000)
    return lines, (ids[0] == 0, ids.count(0))


def test_a_gemma_without_its_first_token_is_warned_of_with_the_setting_that_puts_it_there():
    config, bare, whole = Gemma3TextConfig(bos_token_id=0), gpt_like(bos=False, template=None), gpt_like(template=None)
    (line,), found = begun(config, Data(), bare)
    assert found == (False, 0)
    assert line.startswith("a prompt of gemma3_text must begin with <s>, and neither the tokenizer nor the prompt puts")
    (setting,) = shlex.split(line.partition("--set ")[2].removesuffix("."))
    data = recipe.load("sft", [setting]).data
    assert data.prompt == "<s>{source}\n\nSummary:"
    for tokenizer in (bare, whole):
        assert begun(config, data, tokenizer) == ([], (True, 1))
        assert begun(config, Data(prompt="none"), tokenizer) == ([], (True, 1))
    assert begun(config, Data(), whole) == ([], (True, 1))


def test_a_chat_template_of_gemma_begins_with_the_token_or_is_warned_of():
    config = Gemma3TextConfig(bos_token_id=0)
    for data, column in ((Data(prompt="chat"), ""), (Data(), "messages")):
        (line,), found = begun(config, data, gpt_like(bos=True), column)
        assert found == (False, 0)
        assert line.endswith("Begin the chat template with it.")
        assert begun(config, data, gpt_like(template="{{ bos_token }}" + CHATML), column) == ([], (True, 1))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_models_that_may_be_trained_without_a_first_token_are_not_warned_of(family):
    from transformers import AutoConfig

    assert begun(AutoConfig.for_model(family, bos_token_id=0), Data(), gpt_like(bos=False)) == ([], (False, 0))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("bos", [False, True])
def test_train_and_generate_warn_of_a_gemma_without_its_first_token(tmp_path, monkeypatch, bos):
    from ngramloss.data.tokens import Tokens
    from ngramloss.generation.job import job
    from ngramloss.generation.load_job import load_model, writer_of

    monkeypatch.chdir(tmp_path)
    model, given = gemma(tmp_path / "model", bos=bos), [] if bos else ['data.prompt="<s>{source}\\n\\nSummary:"']
    name = write(tmp_path / "a.jsonl", *({"document": f"{SOURCE} {number}", "summary": TARGET} for number in range(4)))
    small = ["train.eval_every=0", "train.epochs=1", "generation.max_length=4", "generation.num_beams=1"]
    small += ["data.max_source=60", "train.max_tokens=200"]
    plain = [f"model.name={model}", f"data.name={name}", *small]

    def warnings(act):
        _warn_once.cache_clear()
        with logged() as lines:
            act()
        return [line for line in lines if "must begin with <s>" in line]

    def train(settings, folder):
        return cli.main(["train", "sft", "--run", folder, *(part for each in settings for part in ("--set", each))])

    def generate(*settings):
        work = job(model, data=name, overrides=["data.max_source=60", "generation.max_length=4", *settings])
        loaded = load_model(work, device="cpu")
        writers.append(writer_of(work, *loaded, column="document"))

    writers = []
    assert len(warnings(lambda: train(plain, "a"))) == len(warnings(generate)) == (not bos)
    assert not warnings(lambda: train([*plain, *given], "b") or generate(*given))
    prepared = json.loads((tmp_path / "b" / "prepared.json").read_text())
    row = Tokens(Path(prepared["splits"]["train"]["tokens"]))[0]["input_ids"].tolist()
    (read,) = model_input([f"{SOURCE} 0"], writers[-1].tokenizer, writers[-1].shape)
    assert row == read
    assert (row[0], row.count(0)) == (0, 1)
    assert not warnings(lambda: cli.main(["generate", "a", "--data", name, "--limit", "1"]))
