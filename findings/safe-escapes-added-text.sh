#!/usr/bin/env bash
# In a chat template `'text'|safe + value` escapes the value for HTML, although nothing is escaped otherwise.
#
# Versions  jinja2 3.1.6 with markupsafe 3.0.4, in the environment that transformers makes for chat templates.
# Guess     autoescape is off, so `|safe` has no effect: all ways to put two texts together print the same.
# Behaviour `|safe` makes a Markup, whose `+`, `%` and `format` escape the other operand for ever; `~`, `join` and
#           plain output do not. `tojson` of transformers gives a plain text, so that it is escaped as well. The text
#           of an operator before `|safe` thus decides about the text behind it: a published template for function
#           calls gives its model `&lt;` and `&#34;` in all descriptions of tools, and an implementation of Jinja
#           in which `safe` is a mark for the output only renders another prompt.
# Output    plus       <b>1 &lt; 2
#           plus, left 1 &lt; 2<b>
#           tilde      <b>1 < 2
#           join       <b>1 < 2
#           format     <b>1 &lt; 2
#           tojson     <b>{&#34;k&#34;: &#34;1 &lt; 2&#34;}
#           trimmed    <b>1 &lt; 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install jinja2==3.1.6 markupsafe==3.0.4
"$work/venv/bin/python" - <<'PYTHON'
import json

from jinja2.sandbox import ImmutableSandboxedEnvironment

environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
for name, template, seen in [
    ("plus", "{{ '<b>'|safe + text }}", "<b>1 &lt; 2"),
    ("plus, left", "{{ text + '<b>'|safe }}", "1 &lt; 2<b>"),
    ("tilde", "{{ '<b>'|safe ~ text }}", "<b>1 < 2"),
    ("join", "{{ ['<b>'|safe, text]|join }}", "<b>1 < 2"),
    ("format", "{{ ('<b>{}'|safe).format(text) }}", "<b>1 &lt; 2"),
    ("tojson", "{{ '<b>'|safe + {'k': text}|tojson }}", "<b>{&#34;k&#34;: &#34;1 &lt; 2&#34;}"),
    ("trimmed", "{{ ' <b>'|safe|trim + text }}", "<b>1 &lt; 2"),
]:
    rendered = environment.from_string(template).render(text="1 < 2")
    print(f"{name:10} {rendered}")
    assert rendered == seen, f"{name}: {rendered!r} instead of {seen!r}"
PYTHON
