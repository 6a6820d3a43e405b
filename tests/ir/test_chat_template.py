"""Chat templates, against what transformers' conventions render, and against templates that mean harm."""

import copy
import datetime
import json
import pathlib
import time
from typing import Any

import pytest

from zllmc.frontends.chat_template import chat_templates_from_gguf, chat_templates_from_hf
from zllmc.frontends.tokenizer import tokenizer_from_gguf
from zllmc.runtime.chat_template import ChatTemplate, ChatTemplateError
from zllmc.runtime.text import Tokenizer
from zllmc.zllm_ir.errors import ZllmcError

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **variables: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **variables)


def test_renders_what_transformers_renders(conformance: pathlib.Path) -> None:
    data = json.loads((conformance / "tokenizers" / "chat-templates.json").read_text())
    today = datetime.datetime.fromisoformat(data["date"])
    conversations = {conversation["name"]: conversation for conversation in data["conversations"]}
    rendered = refused = 0
    for entry in data["templates"]:
        template = ChatTemplate(entry["source"], entry["bos_token"], entry["eos_token"], now=lambda: today)
        for case in entry["cases"]:
            conversation = conversations[case["name"]]
            arguments = {
                "tools": conversation["tools"],
                "add_generation_prompt": conversation["add_generation_prompt"],
            }
            if "hf_error" in case:
                with pytest.raises(ChatTemplateError):
                    template.render(conversation["messages"], **arguments)
                refused += 1
                continue
            where = (entry["template"], case["name"])
            assert template.render(conversation["messages"], **arguments) == case["hf_jinja2"], where
            rendered += 1
            if "hf_jinja2_kwargs" in case:
                text = template.render(conversation["messages"], **arguments, **data["kwargs"])
                assert text == case["hf_jinja2_kwargs"], where
    assert rendered > 350 and refused > 30


def test_tool_calls_may_have_their_arguments_as_json_text(conformance: pathlib.Path) -> None:
    data = json.loads((conformance / "tokenizers" / "chat-templates.json").read_text())
    source = next(t["source"] for t in data["templates"] if "qwen2.5-coder-0.5b" in t["template"])
    conversation = next(c for c in data["conversations"] if c["name"] == "tools_two_calls_then_answer")
    as_text = copy.deepcopy(conversation["messages"])
    for message in as_text:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    before = copy.deepcopy(as_text)
    expected = render(source, conversation["messages"], tools=conversation["tools"])
    assert render(source, as_text, tools=conversation["tools"]) == expected
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in expected
    assert as_text == before


def test_arguments_that_are_no_json_object_stay_text() -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ("not json", "[1]", "3")]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_calls": None},
    ]
    source = "{% for call in messages[0].tool_calls %}{{ call.function.arguments }};{% endfor %}"
    assert render(source, messages) == "not json;[1];3;"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<b> & \\'é\\''} | tojson }}", '{"a": "<b> & \'é\'"}'),
        ("{{ ['é'] | tojson(ensure_ascii=True) }}", '["\\u00e9"]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ ('[1, {\"a\": null}]' | fromjson)[1].a is none }}", "True"),
        ("{{ strftime_now('%d %b %Y') }}", "30 Nov 2026"),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "013",
        ),
        ("{% generation %}{{ 'x' }}{% endgeneration %}", "x"),
        ("{{ [{'a': 1}, {'b': 2}] | rejectattr('a', 'defined') | list }}", "[{'b': 2}]"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
            "{{ ns.n }}",
            "1",
        ),
        (
            "{{ 'a,b'.split(',') | join('+') }}{{ 'x'.replace('x', 'y') }}{{ '{:.2f}|%d'.format(1.5) % 3 }}",
            "a+by1.50|3",
        ),
        ("{{ messages | map(attribute='role') | join(', ') | upper | indent(2) }}", "USER"),
        (
            "{{ bos_token ~ (tools is none) ~ documents ~ add_generation_prompt ~ missing }}",
            "<s>TrueNoneTrue",
        ),
        ("{% macro m(x) %}[{{ x }}]{{ caller() }}{% endmacro %}{% call m(1) %}c{% endcall %}", "[1]c"),
        (
            "{% for x in [3, 1, 2] | sort if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% endfor %}",
            "1:2/2 2:3/2 ",
        ),
    ],
)
def test_has_the_helpers_that_templates_use(source: str, expected: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>", now=lambda: datetime.datetime(2026, 11, 30))
    assert template.render(USER) == expected


def test_the_generation_prompt_and_variables_reach_the_template() -> None:
    source = "{{ add_generation_prompt }} {{ enable_thinking }} {{ tools | length }}"
    text = render(source, add_generation_prompt=False, enable_thinking=True, tools=[{"type": "function"}])
    assert text == "False True 1"


def test_errors_say_what_is_wrong_and_where() -> None:
    with pytest.raises(ChatTemplateError, match=r"refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match=r"fails at line 3: .*endfor"):
        ChatTemplate("a\n{% for x in y %}\n{% endif %}")
    with pytest.raises(ChatTemplateError, match=r"fails at line 2: .*no attribute 'bar'"):
        render("a\n{{ messages[0].foo.bar.baz }}", [{"foo": {}}])
    with pytest.raises(ChatTemplateError, match=r"fails at line 1: TypeError"):
        render("{% for x in none %}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="over 1000000 characters"):
        ChatTemplate("x" * 1_000_001)


def test_a_failing_template_gives_no_other_format() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}ok")
    assert template.render(USER) == "ok"
    with pytest.raises(ChatTemplateError):
        template.render(USER * 2)
    assert template.render(USER) == "ok"


GROW = "{% set ns = namespace(x=START) %}{% for i in range(64) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def growing(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
        "{% for a in range(99999) %}" + "x" * 60000 + "{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(100) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ ([0] * 10 ** 10) | length }}",
        "{{ 10 ** (10 ** 10) }}",
        growing("3", "ns.x * ns.x"),
        growing("'aaaa'", "ns.x ~ ns.x"),
        growing("'aaaa'", "ns.x + ns.x"),
        growing("[1]", "[ns.x, ns.x]"),
        growing("(1, 2)", "(ns.x, ns.x)"),
        growing("1", "dict(a=ns.x, b=ns.x)"),
        growing("'aa'", "ns.x.replace('a', 'aa')"),
        growing("[1]", "[ns.x | list, ns.x[:]]"),
        "{% set x %}" + "{{ 'a' * 9999999 }}" * 3 + "{% endset %}{{ x ~ x }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ range(99999) | join('b' * 1000000) }}",
        "{{ ('b' * 1000000).join(range(99999) | map('string')) }}",
        "{{ 'a\n' | indent(10 ** 10) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a'['zfill'](10 ** 10) }}",
        "{{ ('a' | attr('center'))(10 ** 10) }}",
        "{{ strftime_now('%1000000000d') }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
        "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{% set q = 'b' in a %}{% endfor %}",
        "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{% set q = 'b' is in(a) %}{% endfor %}",
        "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{% set q = a.count('b') %}{% endfor %}",
    ],
)
def test_a_template_can_not_use_up_the_machine(source: str) -> None:
    started = time.process_time()
    with pytest.raises(ChatTemplateError):
        render(source)
    assert time.process_time() - started < 20  # without its budget: hours, or all of the memory


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ('x' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ 'x'.format_map({}) }}",
        "{{ messages.append(1) }}",
        "{% set messages[0].content = 'x' %}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum() }}",
    ],
)
def test_a_template_can_not_reach_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)
    assert USER == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "source", ["{{ raise_exception.__globals__ }}", "{{ strftime_now.__self__ }}", "{{ ''['__class__'] }}"]
)
def test_what_lies_outside_the_sandbox_is_not_shown(source: str) -> None:
    assert render(source) == ""


def test_a_long_conversation_is_within_the_budget(conformance: pathlib.Path) -> None:
    data = json.loads((conformance / "tokenizers" / "chat-templates.json").read_text())
    source = next(t["source"] for t in data["templates"] if "Qwen3-0.6B" in t["template"])
    turn = [
        {"role": "user", "content": "word " * 500},
        {"role": "assistant", "content": "word </think> " * 200},
    ]
    assert len(render(source, turn * 400 + USER)) > 1_000_000


@pytest.mark.parametrize("name", ["llama-spm", "phi-3"])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_rendered_prompt_has_one_bos(conformance: pathlib.Path, name: str, writes_bos: bool) -> None:
    from zllmc.frontends.gguf import read_gguf

    bundle = tokenizer_from_gguf(read_gguf(conformance / "vocabs" / f"ggml-vocab-{name}.gguf").metadata)
    tokenizer = Tokenizer.from_json(bundle.json, bundle.facts)
    source = ("{{ bos_token }}" if writes_bos else "") + "{{ messages[0].content }}{{ eos_token }}"
    text = ChatTemplate(source, bundle.facts["bos_token"], bundle.facts["eos_token"]).render(USER)
    ids = tokenizer.encode_prompt(text)
    assert ids.count(bundle.facts["bos_id"]) == 1 and ids[0] == bundle.facts["bos_id"]
    if writes_bos:
        assert ids == tokenizer.encode(text, add_special=False, parse_special=True)


def test_finds_the_templates_of_a_gguf_file() -> None:
    metadata = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert chat_templates_from_gguf(metadata) == {"default": "a", "tool_use": "b"}
    assert chat_templates_from_gguf({}) == {}
    with pytest.raises(ZllmcError, match="isn't text"):
        chat_templates_from_gguf({"tokenizer.chat_template": 3})


def test_finds_the_templates_of_a_hugging_face_folder(tmp_path: pathlib.Path) -> None:
    assert chat_templates_from_hf(tmp_path) == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "a"}')
    assert chat_templates_from_hf(tmp_path) == {"default": "a"}
    config.write_text(
        '{"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}'
    )
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    assert chat_templates_from_hf(tmp_path) == {"default": "a", "rag": "b", "tool_use": "c"}
    (tmp_path / "chat_template.jinja").write_text("d")
    assert chat_templates_from_hf(tmp_path)["default"] == "d"


@pytest.mark.parametrize("config", ["{", '{"chat_template": 3}', '{"chat_template": [{"name": "x"}]}', "[]x"])
def test_an_unreadable_folder_is_a_clear_error(tmp_path: pathlib.Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ZllmcError, match="template"):
        chat_templates_from_hf(tmp_path)
