#!/usr/bin/env python3
"""Writes conversions.json: what vLLM makes of bodies of /v1/responses and /v1/messages.

Run it with a Python that has vllm: `python convert.py > conversions.json`.
"""

import json

import vllm
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
    should_continue_final_message,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "weather", "description": "Of a city", "parameters": SCHEMA}
TOOL = {"name": "weather", "description": "Of a city", "input_schema": SCHEMA}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Köln"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "21.5"}


def said(text, **more):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


def thought(text, **more):
    return {"type": "reasoning", "id": "r1", "summary": [],
            "content": [{"type": "reasoning_text", "text": text}], **more}


def user(content):
    return {"role": "user", "content": content}


RESPONSES = [
    {"input": "Hello"},
    {"input": "Hello", "instructions": "Be brief."},
    {"input": "Hello", "instructions": ""},
    {"input": [user("Hello"), {"role": "assistant", "content": "Hi."}, user("Again")]},
    {"input": [{"type": "message", **user([{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}])}]},
    {"input": [{"role": "system", "content": "S"}, {"role": "developer", "content": "D"}, user("Hello")]},
    {"input": [user("Weather?"), CALL, RESULT, said("21."), user("OK")], "tools": [FUNCTION]},
    {"input": [user("Weather?"), thought("hm"), said("Let me look."), CALL, {**CALL, "call_id": "c2"}, RESULT, {**RESULT, "call_id": "c2"}], "tools": [FUNCTION]},
    {"input": [user("Q"), said("A"), said("B"), user("C")]},
    {"input": [user("Q"), thought("one"), thought("two"), said("A"), user("C")]},
    {"input": [user("Q"), said("A", id="m1", status="completed"), user("C")]},
    {"input": [user("Q"), CALL, said("after"), user("C")]},
    {"input": "Hello", "tools": [{**FUNCTION, "strict": True}]},
    {"input": "Hello", "tools": [{**FUNCTION, "strict": None}]},
    {"input": "Hello", "tools": [FUNCTION], "tool_choice": "none"},
    {"input": [user("Q"), {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "short"}]}, said("A"), user("C")]},
]

FIELDS = {"client_metadata": {"a": "b"}, "context_management": [], "moderation": {}, "tomorrow": None}
OUTPUT = [
    thought("hm", encrypted_content=None, status=None),
    said("Let me look.", id="m1", status="completed", phase=None),
    {**CALL, "id": "fc1", "status": None, "namespace": "mcp__x", "caller": None},
    {**RESULT, "status": None, "output": [{"type": "input_text", "text": ""}, {"type": "input_text", "text": "21"}, {"type": "input_text", "text": "dry"}]},
    {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "a \"b\"\nü"},
    {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
]
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches", "format": {"type": "text"}}
NAMESPACE = {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [FUNCTION, {**FUNCTION, "name": "b", "strict": True}]}
DROPPED = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}, {"type": "tool_search", "execution": "client"}, {"type": "image_generation", "output_format": "png"}]
RESPONSES += [
    {"input": "Hello", **FIELDS},
    {"input": [user("Q"), *OUTPUT, user("C")]},
    {"input": [user("Q"), {"type": "reasoning", "id": "r1", "summary": [], "content": None, "encrypted_content": ""}, said("A", phase="commentary"), user("C")]},
    {"input": [user("Q"), said("A", id="m1", status="incomplete"), user("C")]},
    {"input": [user("Q"), said("A", id="m1", status="incomplete")]},
    {"input": [user("Q"), thought("hm", status="in_progress")]},
    {"input": [{**user([{"type": "input_text", "text": "Q"}]), "type": "message", "status": "incomplete"}]},
    {"input": [user("Q"), {**CALL, "id": "fc1", "status": "incomplete"}]},
    {"input": "Hello", "tools": [CUSTOM, FUNCTION]},
    {"input": "Hello", "tools": [{"type": "custom", "name": "bare"}]},
    {"input": "Hello", "tools": [FUNCTION, NAMESPACE]},
    {"input": "Hello", "tools": [*DROPPED, FUNCTION]},
    {"input": "Hello", "tools": DROPPED},
    {"input": "Hello", "tools": []},
    {"input": [user([{"type": "input_text", "text": ""}, {"type": "input_text", "text": "x"}])]},
]

BILLING = "x-anthropic-billing-header: a=1;"
MESSAGES = [
    {"messages": [user("Hello")], "system": BILLING + "\nYou are careful."},
    {"messages": [user("Hello")], "system": BILLING},
    {"messages": [user("Hello"), {"role": "system", "content": BILLING + "\nlost"}, user("x")], "system": BILLING + "\nS"},
    {"messages": [user("Hello"), {"role": "system", "content": [{"type": "text", "text": BILLING}, {"type": "text", "text": "kept"}]}, user("x")]},
    {"messages": [user("Hello")], "context_management": {"edits": []}, "speed": "fast", "mcp_servers": [], "betas": ["b"], "inference_geo": "x", "diagnostics": {}, "fallbacks": [], "container": "c", "cache_control": {"type": "ephemeral"}, "anthropic_version": "v", "user_profile_id": "p"},
    {"messages": [user("Hello")], "tools": [{**TOOL, "type": "custom", "eager_input_streaming": True, "allowed_callers": ["direct"], "input_examples": [{}], "cache_control": {"type": "ephemeral"}}]},
    {"messages": [user("Hello")], "tools": []},
    {"messages": [user("Hello")]},
    {"messages": [user("Hello")], "system": "Be brief."},
    {"messages": [user("Hello")], "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "A"}, {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [user("Hello")], "system": ""},
    {"messages": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), {"role": "assistant", "content": "Hi."}, user([{"type": "text", "text": "only"}])]},
    {"messages": [user([{"type": "text", "text": ""}]), {"role": "assistant", "content": []}, user("x")]},
    {"messages": [user("Weather?"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Let me look."}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln", "days": 1.0}}]}, user([{"type": "tool_result", "tool_use_id": "t1", "content": "21.5"}, {"type": "text", "text": "And?"}])], "tools": [TOOL]},
    {"messages": [user("Q"), {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "a", "input": {}}, {"type": "tool_use", "id": "t2", "name": "b", "input": {"x": [1, 2]}}]}, user([{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, {"type": "tool_result", "tool_use_id": "t2", "is_error": True}])], "tools": [TOOL]},
    {"messages": [user("Q"), {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A"}]}, user("C")]},
    {"messages": [user("Q"), {"role": "system", "content": "reminder"}, {"role": "assistant", "content": "A"}, {"role": "system", "content": [{"type": "text", "text": "two"}]}, user("C")], "system": "S"},
    {"messages": [user("Q")], "tools": [{"name": "bare", "input_schema": {"properties": {}}}, {**TOOL, "strict": True}]},
    {"messages": [user("Q")], "tools": [TOOL], "tool_choice": {"type": "none"}},
    {"messages": [user("Q")], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    {"messages": [user("Q")], "output_config": {"effort": "high"}},
    {"messages": [user("Q")], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"messages": [user("Q"), {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "search", "input": {}}]}, user([{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "weather"}]}])], "tools": [{**TOOL, "defer_loading": True}]},
]


def plain(value):
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def responses(body):
    request = ResponsesRequest.model_validate(json.loads(json.dumps({"model": "m", **body})))
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input)
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    case = {"messages": plain(messages), "tools": tools}
    return {**case, "continued": True} if should_continue_final_message(request.input) else case


def messages(body, merge):
    body = {"model": "m", "max_tokens": 4096, **body}
    request = AnthropicMessagesRequest.model_validate(json.loads(json.dumps(body)))
    chat = AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=merge)
    tools = None if chat.tools is None else [tool.model_dump() for tool in chat.tools]
    return {"messages": plain(chat.messages), "tools": tools, "reasoning_effort": chat.reasoning_effort}


cases = [{"route": "responses", "body": body, **responses(body)} for body in RESPONSES]
for body in MESSAGES:
    case = {"route": "messages", "body": body, **messages(body, False)}
    merged = messages(body, True)["messages"]
    if merged != case["messages"]:
        case["system_first"] = merged
    cases.append(case)
lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
print(f'{{"vllm": "{vllm.__version__}", "cases": [\n{lines}\n]}}')
