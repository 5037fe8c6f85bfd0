"""Chat templates: equal to `transformers`, exactly one BOS, and bounded whatever the template tries."""

import dataclasses
import datetime as dt
import functools
from typing import Any

import pytest

from shared.model.chat import ChatTemplate, TemplateError
from shared.model.prompt import encode
from shared.model.spec import ModelSpec, open_model
from shared.model.template_sandbox import Budget
from tests.models import smollm2_path
from tests.tiny_models import Tiny, Vocabulary, hf_tokenizer, train_vocabulary, write_directory

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
        not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}"""

STYLES = {"llama3": LLAMA3, "chatml": CHATML, "qwen3": QWEN3, "gemma": GEMMA}

USER = {"role": "user", "content": '  Was ist 12 + 34?\n\t<|eot|> & "quotes" <b>ünïcödé 한국어</b>  '}
TURNS: list[list[dict[str, str]]] = [
    [USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n46"}, {"role": "user", "content": "sure?"}],
    [{"role": "system", "content": " Be brief. "}, USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n46"}],
]


@functools.cache
def vocabulary() -> Vocabulary:
    return train_vocabulary()


@functools.cache
def reference() -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=hf_tokenizer(vocabulary()), bos_token="<|bos|>", eos_token="<|eos|>"
    )


TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("turns", range(len(TURNS)))
@pytest.mark.parametrize("variables", [{}, {"add_generation_prompt": False}, {"enable_thinking": False}])
def test_rendered_text_equals_transformers(style: str, turns: int, variables: dict[str, Any]) -> None:
    asked = {"add_generation_prompt": True} | variables
    if style == "gemma" and turns == 2:
        with pytest.raises(TemplateError, match=r"^System role not supported$"):
            ChatTemplate(GEMMA, TOKENS).render(TURNS[turns], **asked)
        return
    expected = reference().apply_chat_template(TURNS[turns], chat_template=STYLES[style], tokenize=False, **asked)
    assert ChatTemplate(STYLES[style], TOKENS).render(TURNS[turns], **asked) == expected


SNIPPETS = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{{ {'b': 1, 'a': 'ü<&>'} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{% for m in messages %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }}{% endfor %}",
    "{% for m in messages %}{{ loop.nextitem is defined }}{{ loop.previtem is defined }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.role }}{% else %}none{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% continue %}x{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for c in 'abc' %}{{ c }}-{% endfor %}{% for x in nothing %}{{ x }}{% endfor %}",
    "{% for x in messages | map(attribute='role') %}{{ x }}{{ loop.first }}{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | map(attribute='role') | unique | join(', ') }}",
    "{% macro turn(role, text='x') %}[{{ role }}:{{ text }}]{% endmacro %}{{ turn('a') ~ turn('b', 1) ~ none ~ 1.5 }}",
    "{% set n = namespace(n=0) %}{% for m in messages %}{% set n.n = n.n + m.content|length %}{% endfor %}{{ n.n }}",
    "{% generation %}said{% endgeneration %}",
    "{{ 'a,b'.split(',') }}{{ 'x' * 3 }}{{ '%s-%d' % ('a', 3) }}{{ '{}|{:>4}'.format(1, 'b') }}",
    "{{ 7 // 2 }}{{ 2 ** 8 }}{{ 7 % 4 }}{{ 1 + 1.5 }}",
    "{{ 'abc' | indent(2) | upper | replace('B', 'bb') | trim | center(9) }}{{ [3, 1, 2] | sort | join }}",
    "{{ 'a b' | title }}{{ 'x' in 'xyz' }}{{ undefined_thing }}{{ undefined_thing is defined }}",
    "{{ messages is iterable }}{{ messages is mapping }}",
    "{{ dict(a=1).a }}{{ [1, [2, 3]] }}{{ {'k': none} }}{{ (1,) + (2,) }}{{ [1] + [2] }}{{ true and 'y' or 'n' }}",
    "  {% if true %}\n    kept\n  {% endif %}\n  {{- ' x' -}}  \n{# comment #}\ny\n",
    "{% set x %}block{{ 1 }}{% endset %}{{ x | length }}{% filter upper %}abc{% endfilter %}",
    "{{ messages[-1].content[:3] }}{{ messages[0].get('no', 'dflt') }}",
    "{{ strftime_now('%Y') | length }}{{ messages | batch(2) | list | length }}{{ 3 | string }}{{ '4' | int + 1 }}",
]


@pytest.mark.parametrize("source", SNIPPETS)
def test_jinjas_usual_means_work_as_in_transformers(source: str) -> None:
    expected = reference().apply_chat_template(TURNS[1], chat_template=source, tokenize=False)
    assert ChatTemplate(source, TOKENS).render(TURNS[1], add_generation_prompt=False) == expected


def spec_with(add_bos: bool, tmp_path: Any) -> tuple[Any, ModelSpec]:
    tiny = Tiny()
    given = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    write_directory(tmp_path, tiny, tiny.tensors(), vocabulary=vocabulary(), tokenizer_config=given)
    source = open_model(str(tmp_path), tmp_path)
    return source.tokenizer(), dataclasses.replace(source.spec, add_bos=add_bos)


@pytest.mark.parametrize("style", ["llama3", "gemma"])
def test_k01_a_template_that_writes_bos_gets_exactly_one(style: str, tmp_path: Any) -> None:
    tokenizer, spec = spec_with(True, tmp_path)
    text = ChatTemplate(STYLES[style], spec.template_tokens).render(TURNS[1])
    ids = encode(tokenizer, spec, text)
    assert ids.count(spec.bos_id or -1) == 1
    assert ids[0] == spec.bos_id
    tokenised = reference().apply_chat_template(
        TURNS[1], chat_template=STYLES[style], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == tokenised
    assert encode(tokenizer, spec, text.removeprefix("<|bos|>")) == ids  # raw completion of the same text


def test_k01_a_model_without_bos_gets_none(tmp_path: Any) -> None:
    tokenizer, spec = spec_with(False, tmp_path)
    ids = encode(tokenizer, spec, ChatTemplate(CHATML, spec.template_tokens).render(TURNS[0]))
    assert spec.bos_id not in ids
    tokenised = reference().apply_chat_template(
        TURNS[0], chat_template=CHATML, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == tokenised
    assert encode(tokenizer, spec, "") == []


def test_an_empty_text_of_a_model_with_bos_is_the_bos(tmp_path: Any) -> None:
    tokenizer, spec = spec_with(True, tmp_path)
    assert encode(tokenizer, spec, "") == [spec.bos_id]


def test_smollm2_renders_its_own_template() -> None:
    spec = open_model(str(smollm2_path()), smollm2_path().parent).spec
    assert spec.chat_template is not None
    text = ChatTemplate(spec.chat_template, spec.template_tokens).render([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")


def test_the_clock_of_a_template_can_be_fixed() -> None:
    then = dt.datetime(2024, 2, 29, 12, 30)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {})
    assert template.render([], now=then) == "29 Feb 2024"


def test_messages_are_data_and_never_a_template() -> None:
    text = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in text


def doubling(start: str, step: str, end: str = "") -> str:
    """A template that makes n.x out of itself 60 times."""
    loop = "{% for i in range(60) %}{% set n.x = " + step + " %}{% endfor %}"
    return "{% set n = namespace(x=" + start + ") %}" + loop + end


GREEDY = {
    "repetition": "{{ 'x' * 10**10 }}",
    "list repetition": "{{ ([1] * 10**9) | length }}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a list": "{% set l = range(9999)|list %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
    "loop length": "{% for i in range(9999)|map('string') %}{% for j in range(loop.length) %}{% endfor %}{% endfor %}",
    "doubling by ~": doubling("'ab'", "n.x ~ n.x"),
    "doubling by +": doubling("'ab'", "n.x + n.x"),
    "doubling by %": doubling("'ab'", "'%s%s' % (n.x, n.x)"),
    "doubling by join": doubling("'ab'", "[n.x, n.x]|join"),
    "doubling by format": doubling("'ab'", "'{0}{0}'.format(n.x)"),
    "doubling lists": doubling("[1]", "[n.x, n.x]", "{{ n.x }}"),
    "doubling as json": doubling("1", "[n.x, n.x]", "{{ n.x|tojson }}"),
    "doubling dicts": doubling("1", "{1: n.x, 2: n.x}", "{{ n.x ~ '' }}"),
    "% width": "{{ '%1000000000d' % 1 }}",
    "% width from an argument": "{{ '%*d' % (10**9, 1) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format width from an argument": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "center filter": "{{ 'x' | center(10**10) }}",
    "indent filter": "{{ 'x\\ny' | indent(10**10) }}",
    "json indent": "{{ [1] | tojson(indent=10**10) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list | length }}",
    "power": "{{ 2 ** (2 ** 40) }}",
    "huge product": doubling("7", "n.x * n.x"),
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) | length }}",
    "replace nothing": "{{ ('x' * 1000000) | replace('', 'y' * 1000000) | length }}",
    "join": "{{ (('a,' * 1000000).split(',') | join('x' * 1000000)) | length }}",
    "str.join": "{{ ('x' * 1000000).join(('a,' * 1000000).split(',')) | length }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "translate": "{{ 'a'.translate({97: 'x'}) }}",
    "deep nesting": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "many blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "recursive loop": "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a long source": "x" * (1 << 20) + "x",
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_template_is_stopped(name: str) -> None:
    budget = Budget(steps=50_000, seconds=60)
    with pytest.raises(TemplateError):
        ChatTemplate(GREEDY[name], {}).render(TURNS[0], budget=budget)


def test_time_is_a_limit_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(10) %}{% endfor %}", {})
    assert template.render([]) == ""
    with pytest.raises(TemplateError, match="takes too long"):
        template.render([], budget=Budget(seconds=-1))


ERRORS = [
    ("{{", r"wrong in line 1"),
    ("\n\n{% nosuch %}", r"wrong in line 3"),
    ("{{ 'x' | urlize }}", r"No filter named 'urlize'"),
    ("{{ a.b.c }}", r"'a' is undefined"),
    ("{{ 1 / 0 }}", r"ZeroDivisionError"),
    ("{% include 'x' %}", r"no loader"),
    ("{{ ''.__class__.__mro__ }}", r"unsafe|undefined"),
    ("{{ messages.append(1) }}", r"unsafe"),
    ("{{ cycler.__init__.__globals__ }}", r"unsafe|undefined"),
    ("{{ raise_exception('only users speak') }}", r"^only users speak$"),
]


@pytest.mark.parametrize(("source", "reason"), ERRORS)
def test_a_failing_template_says_why(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(source, {}).render(TURNS[0])


def test_ordinary_chats_stay_far_below_the_budget() -> None:
    turns = [USER, {"role": "assistant", "content": "y" * 3000}] * 500
    budget = Budget()
    given = budget.steps
    ChatTemplate(QWEN3, TOKENS).render(turns, budget=budget)
    assert given - budget.steps < given / 50
