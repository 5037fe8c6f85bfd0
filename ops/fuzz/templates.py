"""Chat templates: the sandbox bounds time, memory and recursion, whatever a model brings along."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from random import Random

from ops.fuzz.mutate import bent
from ops.fuzz.target import Target, same
from shared.model.chat import ChatTemplate, TemplateError
from shared.model.template_sandbox import MAX_TEXT, Budget

TEMPLATES = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{- bos_token }}{%- set ns = namespace(n=0) %}"
    "{%- for m in messages if m.role != 'tool' %}{%- set ns.n = ns.n + 1 %}"
    "{{- loop.index0 ~ ': ' ~ (m.content | trim | tojson) }}{%- endfor %}{{ '%05d' % ns.n }}{{ eos_token }}",
    "{% macro turn(m, depth) %}{% if depth > 0 %}{{ turn(m, depth - 1) }}{% endif %}"
    "{{ m.content.split(' ')[0] }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m, 3) }}{{ m | dictsort | map('join', '=') | list | join(',') }}{% endfor %}",
    "{%- if tools is not none and tools is iterable %}{{ raise_exception('no tools') }}{%- endif %}"
    "{{ strftime_now('%Y-%m-%d') }}{% for x in range(10) %}{{ 'ab' * x }}{{ '{:>{w}}'.format(x, w=5) }}{% endfor %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages[-1].content | upper | replace('A', 'b') }}",
)
"""Such as models carry."""

PIECES = tuple(
    r"""
{{ 'x' * 99999999 }}
{{ range(10**9) | list }}
{% for a in range(9999) %}{% for b in range(9999) %}.{% endfor %}{% endfor %}
{{ 9 ** 9 ** 9 }}
{{ 1 << 10**9 }}
{{ '%99999999d' % 1 }}
{{ '{:>99999999}'.format(1) }}
{{ 'a' | center(10**8) }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ messages.__class__.__mro__ }}
{{ ''.format_map(messages) }}
{{ lipsum(n=100000) }}
{{ cycler(1).next() }}
{{ joiner() }}
{{ dict(a=1) | tojson(indent=10**6) }}
{{ messages | batch(1) | list }}
{{ messages | slice(10**9) | list }}
{% set x = 'ab' %}{% for i in range(40) %}{% set x = x ~ x %}{% endfor %}
{{ (messages * 10**6) | length }}
{{ 'a,b' | replace('', 'x' * 9999) }}
{{ [1, 2] | sum(start=10**5000) }}
{% include 'x' %}
{% import 'y' as z %}
{% extends 'q' %}
{{ self.x() }}
{% block x %}{{ super() }}{% endblock %}
{% raw %}{{ }}{% endraw %}
{{ 'x' | indent(10**7) }}
{{ 'abc' | list | join('x' * 10**6) }}
{{ '\ud800' }}
{{ 1e308 * 10 }}
{{ 0.1 | round(10**6) }}
{{ 10**4000 }}
{{ messages | tojson | safe | escape }}
{{ namespace(a=1).__init__.__globals__ }}
{% set ns = namespace() %}{% set ns.a = ns %}{{ ns.a | tojson }}
{{ 'a'.join(['b'] * 10**7) }}
{{ 'a'.ljust(10**9) }}
{{ 'x'.encode('utf-16').decode('latin1') }}
{{ -5 % 0 }}
{{ 'é' | urlencode }}
""".strip().split("\n")
)
"""Each asks for more than it should get, or for what it should not."""


def _seeds(rng: Random) -> list[bytes]:
    return [source.encode() for source in (*TEMPLATES, *PIECES)]


def _check(data: bytes, _: Path) -> bool:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a cat? " * 20}]
    try:
        template = ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>", "eos_token": "</s>"})
        text = template.render(messages, now=dt.datetime(2026, 1, 2), budget=Budget(steps=20_000, seconds=0.5))
    except TemplateError as error:
        same(bool(str(error)), "a refusal without words")
        return False
    same(len(text) <= MAX_TEXT, f"a prompt of {len(text)} characters")
    return True


def _bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Half of them pieces put together, so that most still compile."""
    if rng.random() < 0.5:
        return bent(data, rng, corpus)
    source = data.decode()
    for _ in range(rng.randint(1, 3)):
        piece = rng.choice((*PIECES, *TEMPLATES))
        at = rng.choice([0, len(source), *(n for n, char in enumerate(source) if source[n : n + 2] in ("{{", "{%"))])
        source = source[:at] + piece + source[at:]
    return source.encode(errors="replace")


TARGETS = [Target("chat-template", _seeds, _check, _bend, cpu_s=12.0, memory=1 << 30)]
