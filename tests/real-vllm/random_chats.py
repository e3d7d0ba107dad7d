"""Random chats with tools, as bodies of the three routes: seeded, so that a difference can be seen again."""

import json
import random

ROUTES = ("chat", "responses", "messages")
WORDS = """the weather in Köln is 20° fine <b>bold</b> don't say "yes" & go 日本語 😀 a\\b {x} {{ y }} <|im_end|>
<think> </think> <tool_call> [INST] null True 1e-7 \u2028 e\u0301 tab\tend"""
WORDS = WORDS.replace("\n", " ").split(" ")
EDGES = ("", " ", "\n", "\n\n", "\t ")
# Among them names of dict's methods, which templates reach by attribute.
NAMES = "city unit days items keys values get update pop copy type name description properties enum x 深度 a-b"
NAMES = NAMES.split()
NUMBERS = (0, 1, -7, 2**53, 2**63 - 1, 2**64 - 1, 0.5, -0.0, 1.0, 1e-7, 1e16, 1e22, 123456.789, 100.0, 1e-5)


class Chats:
    """Half of them are calm: what every template expects. The others have all that engines accept."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.is_calm = self.maybe(0.5)

    def maybe(self, share):
        return self.random.random() < share

    def text(self, empty=0.08):
        if self.maybe(empty):
            return self.random.choice(EDGES)
        words = " ".join(self.random.choices(WORDS, k=self.random.randint(1, 8)))
        before, after = (self.random.choice(EDGES) if self.maybe(0.15) else "" for _ in range(2))
        return before + words + after

    def value(self, depth=0):
        kind = self.random.choice(["text", "number", "number", "bool", "null", "list", "object"])
        if kind in ("list", "object") and depth < 3:
            inner = [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]
            names = self.random.sample(NAMES, len(inner))
            return inner if kind == "list" else dict(zip(names, inner))
        scalars = {"number": self.random.choice(NUMBERS), "bool": self.maybe(0.5), "null": None}
        return scalars.get(kind, self.text())

    def schema(self, depth=0):
        kinds = ["string", "integer", "number", "boolean", "array", "object", "union", "enum", "const", "any", "ref"]
        kind = self.random.choice(kinds[:4] if depth == 3 else kinds[:6] if self.is_calm else kinds)
        made = {"type": kind}
        if self.maybe(0.6):
            made["description"] = self.text()
        if kind == "array":
            made["items"] = self.schema(depth + 1)
        elif kind == "object":
            made |= self.object_schema(depth + 1)
        elif kind == "union":
            alternatives = [self.schema(depth + 1) for _ in range(2)]
            made.pop("type")
            made |= self.random.choice([
                {"type": ["string", "null"]}, {"anyOf": alternatives}, {"oneOf": alternatives, "nullable": True},
            ])
        elif kind == "enum":
            values = [self.text(), self.random.choice(NUMBERS), None, True]
            made |= {"type": "string", "enum": self.random.sample(values, self.random.randint(1, 4))}
        elif kind == "const":
            made = {"const": self.value()}
        elif kind == "any":
            made = {}
        elif kind == "ref":
            made = {"$ref": "#/$defs/a"}
        elif kind in ("integer", "number") and self.maybe(0.5):
            made["minimum"] = self.random.choice(NUMBERS)
        if self.maybe(0.2) and not self.is_calm:
            made["default"] = self.value(2)
        return made

    def object_schema(self, depth=0):
        names = self.random.sample(NAMES, self.random.randint(0, 4 if depth < 2 else 2))
        made = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        if names and self.maybe(0.7):
            made["required"] = self.random.sample(names, self.random.randint(0, len(names)))
        if self.maybe(0.3):
            made["additionalProperties"] = self.random.choice([False, True, {"type": "string"}])
        if depth == 0 and self.maybe(0.2):
            made |= {"$defs": {"a": {"type": "string"}}, "$schema": "https://json-schema.org/draft/2020-12/schema"}
        return made

    def tools(self):
        if self.maybe(0.3):
            return []
        names = ["get_weather", "Bash", "search", "update", "mcp__x__read"]
        names = self.random.sample(names, self.random.randint(1, 3))
        return [self.tool(name) for name in names]

    def tool(self, name):
        made = {"name": name, "parameters": self.object_schema()}
        if self.maybe(0.85):
            made["description"] = self.text()
        if self.maybe(0.15):
            made["strict"] = self.maybe(0.5)
        return made

    def turns(self, tools):
        """(role, text or texts, reasoning, calls): calls are (id, name, arguments, result or results)."""
        made = []
        if self.maybe(0.6):
            made.append(("system", self.content(), None, []))
        for _ in range(self.random.randint(1, 3)):
            made.append(("user", self.content(), None, []))
            while tools and self.maybe(0.5):
                made.append(self.assistant(tools))
            if self.is_calm or self.maybe(0.6):
                made.append(self.assistant([]))
            elif self.maybe(0.2):
                made.append(("system", self.content(), None, []))
        if made[-1][0] == "assistant" and not made[-1][3] or made[-1][0] == "system":
            made.append(("user", self.content(), None, []))
        return made

    def assistant(self, tools):
        count = 0 if not tools else 1 if self.is_calm else self.random.choice([1, 1, 2])
        names = [self.random.choice(tools)["name"] for _ in range(count)]
        # Some templates want nine characters.
        calls = [(f"{self.random.randrange(10**9):09}", name, self.arguments(), self.content()) for name in names]
        content = None if calls and self.maybe(0.5) else self.content()
        return ("assistant", content, self.text() if self.maybe(0.3) else None, calls)

    def arguments(self):
        names = self.random.sample(NAMES, self.random.randint(0, 3))
        return {name: self.value() for name in names}

    def content(self):
        if self.is_calm or self.maybe(0.5):
            return self.text(0.02 if self.is_calm else 0.08)
        return [self.text(0.25) for _ in range(self.random.randint(1, 3))]

    def body(self, route):
        tools = self.tools()
        turns = self.turns(tools)
        body = {"model": "m", **getattr(self, route)(turns, tools)}
        if self.maybe(0.2):
            names = {"enable_thinking": self.maybe(0.5), "thinking": self.maybe(0.5), "custom": self.value()}
            body["chat_template_kwargs"] = dict(self.random.sample(list(names.items()), self.random.randint(1, 3)))
        return body

    def arguments_text(self, arguments):
        compact = (",", ":") if self.maybe(0.3) else None
        return json.dumps(arguments, ensure_ascii=self.maybe(0.3), separators=compact)

    def chat(self, turns, tools):
        def content(part):
            return [{"type": "text", "text": text} for text in part] if isinstance(part, list) else part

        messages = []
        for role, said, reasoning, calls in turns:
            role = "developer" if role == "system" and self.maybe(0.1) else role
            message = {"role": role, "content": content(said)}
            if reasoning is not None:
                message[self.random.choice(["reasoning", "reasoning_content"])] = reasoning
            if calls:
                functions = [{"name": name, "arguments": self.arguments_text(given)} for _, name, given, _ in calls]
                message["tool_calls"] = [
                    {"id": call[0], "type": "function", "function": function}
                    for call, function in zip(calls, functions)
                ]
            messages.append(message)
            messages += [{"role": "tool", "tool_call_id": call, "content": content(r)} for call, _, _, r in calls]
        body = {"messages": messages}
        if tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        if self.maybe(0.2):
            body["reasoning_effort"] = self.random.choice(["none", "low", "medium", "high"])
        if self.maybe(0.1):
            body |= {"add_generation_prompt": False}
            if self.maybe(0.5) and messages[-1]["role"] == "user":
                messages.append({"role": "assistant", "content": self.text(0)})
                body["continue_final_message"] = True
        return body

    def responses(self, turns, tools):
        def content(part, kind):
            return [{"type": kind, "text": text} for text in part] if isinstance(part, list) else part

        items = []
        for role, said, reasoning, calls in turns:
            if role != "assistant":
                role = "developer" if role == "system" and self.maybe(0.5) else role
                items.append({"type": "message", "role": role, "content": content(said, "input_text")})
                continue
            if reasoning is not None:
                part = {"type": "reasoning_text", "text": reasoning}
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [part]})
            if said is not None:
                said = content(said if isinstance(said, list) else [said], "output_text")
                items.append({"type": "message", "role": "assistant", "content": said})
            items += [
                {"type": "function_call", "call_id": call, "name": name, "arguments": self.arguments_text(given)}
                for call, name, given, _ in calls
            ]
            items += [
                {"type": "function_call_output", "call_id": call, "output": content(result, "input_text")}
                for call, _, _, result in calls
            ]
        body = {"input": items}
        if tools:
            body["tools"] = [{"type": "function", **tool} for tool in tools]
        if self.maybe(0.5):
            body["instructions"] = self.text()
        if self.maybe(0.2):
            body["reasoning"] = {"effort": self.random.choice(["none", "low", "medium", "high"])}
        return body

    def messages(self, turns, tools):
        def content(part):
            return [{"type": "text", "text": text} for text in part] if isinstance(part, list) else part

        def blocks(part):
            return content(part if isinstance(part, list) else [part])

        body = {"max_tokens": 9999, "messages": []}
        for place, (role, said, reasoning, calls) in enumerate(turns):
            if role == "system" and place == 0:
                body["system"] = content(said)
                continue
            if reasoning is None and not calls:
                body["messages"].append({"role": role, "content": content(said)})
                continue
            parts = [] if said is None else blocks(said)
            if reasoning is not None:
                parts.insert(0, {"type": "thinking", "thinking": reasoning, "signature": "s"})
            parts += [
                {"type": "tool_use", "id": call, "name": name, "input": given} for call, name, given, _ in calls
            ]
            body["messages"].append({"role": role, "content": parts})
            results = [
                {"type": "tool_result", "tool_use_id": call, "content": content(result)} for call, _, _, result in calls
            ]
            if results:
                body["messages"].append({"role": "user", "content": results})
        if tools:
            renamed = [dict(tool) for tool in tools]
            for tool in renamed:
                tool["input_schema"] = tool.pop("parameters")
            body["tools"] = renamed
        if self.maybe(0.2):
            body["output_config"] = {"effort": self.random.choice(["low", "medium", "high", "max"])}
        return body
