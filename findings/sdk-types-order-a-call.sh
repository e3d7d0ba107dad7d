#!/usr/bin/env bash
# The order of an SDK's type annotations decides what a model reads of a call: the client's order of members is lost.
#
# Versions  pydantic 2.14.4, openai 3.57.0. vLLM validates chats by the SDK's TypedDicts.
# Guess     Validation of a TypedDict returns the members in the order of the input, as a dict and JSON keep it.
# Behaviour pydantic returns them in the order in which the class declares them, and others (extra="allow") behind, in
#           the input's order. The SDK declares a call as id, function, type, and its function as arguments, name. A
#           template that prints a whole call (`{{ call|tojson }}`) so shows `arguments` before `name`, an order that
#           hardly a client sends, and another one after a change of the SDK's annotations. A dict built by the same
#           class without validation keeps its own order: two routes of one server print one call in two ways.
# Output    validated   {"id": "c", "function": {"arguments": "{}", "name": "f"}, "type": "function", "index": 0}
#           constructed {"id": "c", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install pydantic==2.14.4 openai==3.57.0
"$work/venv/bin/python" - <<'PYTHON'
import json

from openai.types.chat.chat_completion_message_function_tool_call_param import (
    ChatCompletionMessageFunctionToolCallParam as Call,
    Function,
)
from pydantic import ConfigDict, TypeAdapter, with_config

sent = {"index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "c"}
with_config(ConfigDict(extra="allow"))(Call)
validated = json.dumps(TypeAdapter(Call).validate_python(sent))
print("validated  ", validated)
function = '{"arguments": "{}", "name": "f"}'
assert validated == f'{{"id": "c", "function": {function}, "type": "function", "index": 0}}', validated
constructed = json.dumps(Call(id="c", function=Function(name="f", arguments="{}"), type="function"))
print("constructed", constructed)
assert constructed == '{"id": "c", "function": {"name": "f", "arguments": "{}"}, "type": "function"}', constructed
PYTHON
