"""Ten turns of a coding session each, in the forms of current agent clients: fields, kinds of items, nulls, marks that
move from turn to turn. All texts are invented.

Each session yields paths and bodies, without the model. They are not streamed, so that an answer is one object. A turn
begins with the turns before, as its client sends them, but for what the client changes at each turn.
"""

PARTS = "index mirror record image digest replay fence roster batch shard".split()
TURNS = len(PARTS)


def prose(part, sentences=1):
    return " ".join(f"The {part} keeps rule {number} of {len(part)}, as its tests say." for number in range(sentences))


# Claude Code: `/v1/messages`.

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
BASH = {
    "name": "Bash",
    "description": "Runs a command in the workspace and returns what it prints.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command"},
            "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600000},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "eager_input_streaming": True,
}
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    **EPHEMERAL,
}


def claude_code():
    history = []
    for number, part in enumerate(PARTS):
        history.extend(claude_turn(number, part))
        # The mark of the last block moves, the line of attribution changes.
        *earlier, last = history
        *blocks, end = last["content"]
        marked = {**last, "content": [*blocks, {**end, **EPHEMERAL}]}
        line = f"x-anthropic-billing-header: cc_version=9.9.{number}; cc_entrypoint=cli; cch={number:05x};"
        yield "/v1/messages", {
            "max_tokens": 4,
            "system": [
                {"type": "text", "text": line},
                {"type": "text", "text": "You are an agent that edits programs.", **EPHEMERAL},
                {"type": "text", "text": prose("workspace", 4), "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            "messages": [*earlier, marked],
            "tools": [BASH, READ],
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": '{"device":"d","session":"s"}'},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }


def claude_turn(number, part):
    if number == 0:
        reminder = {"type": "text", "text": "<system-reminder>The list of tasks is empty.</system-reminder>\n"}
        return [{"role": "user", "content": [reminder, {"type": "text", "text": f"Mend the {part}."}]}]
    call = f"toolu_0{number}"
    tool, given = ("Bash", {"command": f'grep -rn "{part}" .', "timeout": 1000.0}), ("Read", {"path": f"src/{part}.rs"})
    name, fields = tool if number % 2 else given
    said = [{"type": "thinking", "thinking": f"Where is the {part}?", "signature": "c2ln"}]
    if number % 3:
        said.append({"type": "text", "text": prose(part)})
    said.append({"type": "tool_use", "id": call, "name": name, "input": fields})
    found = prose(part)
    result = {"type": "tool_result", "tool_use_id": call, "content": found}
    if number % 4 == 2:
        result["content"] = [{"type": "text", "text": found}]
    elif number % 4 == 3:
        result["is_error"] = True
    after = [{"type": "text", "text": f"And the {part}?"}] if number % 5 == 4 else []
    return [{"role": "assistant", "content": said}, {"role": "user", "content": [result, *after]}]


# Codex: `/v1/responses`.

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command and returns what it prints.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The command"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches files.", "format": {"type": "text"}}
NOTES = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "Notes",
    "tools": [
        {
            "type": "function",
            "name": "find",
            "description": "Finds a note.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        }
    ],
}


def codex():
    history = []
    for number, part in enumerate(PARTS):
        history.extend(codex_turn(number, part))
        yield "/v1/responses", {
            "instructions": "You are a coding agent. " + prose("workspace", 4),
            "input": list(history),
            "tools": [SHELL, PATCH, NOTES, {"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "019a-0000",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-turn": str(number)},
            "max_output_tokens": 16,
        }


def item(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def codex_turn(number, part):
    if number == 0:
        where = f"<environment_context>\n  <cwd>/{part}</cwd>\n</environment_context>"
        return [item("developer", prose("sandbox", 2)), item("user", where), item("user", f"Mend the {part}.")]
    call = f"call_{number}"
    thought = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    if number % 4 == 0:
        said = {**item("assistant", prose(part)), "phase": "final_answer"}
        return [thought, said, item("user", f"And the {part}?")]
    if number % 4 == 1:
        arguments = f'{{"command":["cat","{part}"]}}'
        asked = {"type": "function_call", "name": "shell", "arguments": arguments, "call_id": call}
        given = {"type": "function_call_output", "call_id": call, "output": prose(part)}
        return [thought, {**asked, "id": None, "status": None, "namespace": None}, given]
    if number % 4 == 2:
        patch = f"*** Begin Patch\n*** Update File: {part}\n-a\n+b\n*** End Patch"
        asked = {"type": "custom_tool_call", "call_id": call, "name": "apply_patch", "input": patch}
        given = {"type": "custom_tool_call_output", "call_id": call, "output": "Done"}
        return [{**item("assistant", prose(part)), "phase": "commentary"}, asked, given]
    asked = {"type": "function_call", "name": "find", "namespace": "mcp__notes", "arguments": f'{{"text":"{part}"}}'}
    given = {"type": "function_call_output", "call_id": call, "output": [{"type": "input_text", "text": prose(part)}]}
    return [thought, {**asked, "call_id": call}, given]


# A loop of tools with the `openai` package: `/v1/chat/completions`.

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks words up.",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "string"}}, "limit": {"type": "integer"}},
            "required": ["words"],
        },
    },
}
# What `model_dump` writes of a message that has none of these.
NULLS = {"refusal": None, "annotations": None, "audio": None, "function_call": None}


def tool_loop():
    history = [{"role": "system", "content": "You look words up. " + prose("dictionary", 4)}]
    for number, part in enumerate(PARTS):
        history.extend(loop_turn(number, part))
        yield "/v1/chat/completions", {
            "messages": list(history),
            "tools": [LOOK_UP],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_completion_tokens": 4,
            "user": "someone",
        }


def loop_turn(number, part):
    if number == 0:
        return [{"role": "user", "content": f"What is the {part}?"}]
    if number % 4 == 0:
        said = {"role": "assistant", "content": prose(part), **NULLS, "tool_calls": None}
        return [said, {"role": "user", "content": [{"type": "text", "text": f"And the {part}?"}]}]
    calls = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": "look_up", "arguments": f'{{"words": ["{part}"], "limit": {place}}}'},
        }
        for place in range(1 + number % 2)
    ]
    asked = {"role": "assistant", "content": None, **NULLS, "tool_calls": calls}
    return [asked, *({"role": "tool", "tool_call_id": call["id"], "content": prose(part)} for call in calls)]


SESSIONS = {"Claude Code": claude_code, "Codex": codex, "a loop of tools": tool_loop}
