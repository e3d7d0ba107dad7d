#!/usr/bin/env bash
# A mapping's key cannot be read as an attribute in a chat template if it has the name of a method of dict, and a key
# that is absent can be there by its index.
#
# Version   jinja2 3.1.6, ImmutableSandboxedEnvironment, which renders chat templates in transformers.
# Guess     `value.name` is the key `name` where there is one (as in other implementations of Jinja), and
#           `value['name']` is nothing but the key.
# Behaviour Attributes win with a dot. A harmless method (`items`, `keys`, `values`, `get`, `copy`) is what `.items`
#           gives, whether such a key exists or not: true in a condition, and no list in a loop. A method that changes
#           the mapping (`update`, `pop`, `clear`) is "unsafe" and becomes undefined, also where the key exists: a
#           tool's parameter named `update` vanishes without an error. With brackets the key wins, and without a key
#           the attribute is taken: `schema['items']` of a schema without `items` is true. `is callable` is true of
#           anything undefined.
# Output    of {"items": [1], "update": "u"}: v.items is iterable: False; v.update is defined: False;
#           v.get('update'): u; v['items']: [1]; v['update']: u
#           of {}: v.items is defined: True; v['items'] is defined: True; 'items' in v: False;
#           v['update'] is defined: False; v.nothing is callable: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install jinja2==3.1.6
"$work/venv/bin/python" - <<'PYTHON'
from jinja2.sandbox import ImmutableSandboxedEnvironment

environment = ImmutableSandboxedEnvironment()
full, empty = {"items": [1], "update": "u"}, {}
for value, expression, seen in [
    (full, "v.items is iterable", "False"),
    (full, "v.update is defined", "False"),
    (full, "v.get('update')", "u"),
    (full, "v['items']", "[1]"),
    (full, "v['update']", "u"),
    (full, "v.items() | list", "[('items', [1]), ('update', 'u')]"),
    (empty, "v.items is defined", "True"),
    (empty, "v['items'] is defined", "True"),
    (empty, "'items' in v", "False"),
    (empty, "v['update'] is defined", "False"),
    (empty, "v.nothing is callable", "True"),
]:
    rendered = environment.from_string("{{ " + expression + " }}").render(v=value)
    print(f"{value!s:32} {expression:24} {rendered}")
    assert rendered == seen, f"{expression}: {rendered!r} instead of {seen!r}"
PYTHON
