"""Bad chat templates: wrong, endless, larger than memory, or curious about the interpreter."""

from __future__ import annotations

import random

from tests.chaos.grammar.draft import Draft, Expected, Part, Parts
from tests.chaos.grammar.tokenizers import CONFIG

GOOD = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{{ a }}{% endfor %}{% endfor %}{% endfor %}"
_RECURSION = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
_DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
_QUIET_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

BROKEN = {
    "division by zero": "{{ 1/0 }}",
    "unclosed": "{% for message in messages %}",
    "unknown tag": "{% while true %}{% endwhile %}",
    "unknown filter": "{{ messages|explode }}",
    "undefined": "{{ nothing.at.all }}",
    "raises": "{{ raise_exception('x' * 1000000) }}",
    "empty": "",
    "says nothing": "{% if false %}x{% endif %}",
    "only blanks": "   ",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ messages.__init__.__globals__ }}",
    "format attribute": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "long text": "{{ 'a' * 300000000 }}",
    "longer text": "{{ 'a' * 99999999999 }}",
    "padded text": "{{ 'x'.ljust(2000000000) }}",
    "formatted text": "{{ '%2000000000d' % 1 }}",
    "long list": "{{ range(200000000)|list|length }}",
    "huge power": "{{ 9 ** (9 ** 9) }}",
    "loops": _LOOP,
    "quiet loops": _QUIET_LOOP,
    "recursion": _RECURSION,
    "doubling": _DOUBLING,
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "sum of a range": "{{ range(99999999999)|sum }}",
    "indented": "{{ messages|tojson(indent=999999999) }}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep list": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "many blocks": "{% if true %}" * 3000 + "x" + "{% endif %}" * 3000,
    "twenty MB": "a" * 20_000_000,
    "too long for the model": GOOD + "{{ 'a' * 5000 }}",
    "long strftime": "{{ strftime_now('%Y' * 10000000) }}",
}
"""These cannot give a prompt within any reason."""

ODD = {
    "surrogates": GOOD + "{{ '\\ud800' }}",
    "NUL": GOOD + "\0",
    "letters that the tokenizer does not know": GOOD + "日本語",
    "a division for some tasks": GOOD + "{% if '7' in messages[-1]['content'] %}{{ 1/0 }}{% endif %}",
    "a loop for some tasks": GOOD + "{% if '99' in messages[-1]['content'] %}" + _QUIET_LOOP + "{% endif %}",
    "a long text for some tasks": GOOD + "{% if '88' in messages[-1]['content'] %}{{ 'a' * 300000000 }}{% endif %}",
    "all but too long": GOOD + "{{ 'a' * 4000 }}",
}
"""These give one, at least for some tasks."""

KINDS: tuple[object, ...] = (
    7,
    ["a", "b"],
    {"name": "default"},
    [{"name": "default", "template": GOOD}],
    True,
    {"default": 7},
)


def _template(text: object, expected: Expected) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        draft.change_json(CONFIG, lambda document: document.update(chat_template=text))
        draft.expect(expected)

    return part


def _in_a_file(draft: Draft, rng: random.Random) -> None:
    """A good one in the configuration, and a bad one in the file that goes before it."""
    (draft.model() / "chat_template.jinja").write_text(BROKEN[rng.choice(sorted(BROKEN))])
    draft.expect(Expected.ENDS)


def _of_another_kind(draft: Draft, rng: random.Random) -> None:
    draft.change_json(CONFIG, lambda document: document.update(chat_template=rng.choice(KINDS)))


TEMPLATES: Parts = {
    **{f"template: {name}": _template(text, Expected.ENDS) for name, text in BROKEN.items()},
    **{f"template: {name}": _template(text, Expected.HARMLESS) for name, text in ODD.items()},
    "template: in a file": _in_a_file,
    "template: of another kind": _of_another_kind,
}
