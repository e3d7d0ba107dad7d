use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::*;
use crate::openai::{PromptRoute, PromptSource, parse};

/// 2026-03-07 09:05:02.
fn now() -> CivilTime {
    CivilTime::from_unix(1_772_874_302)
}

#[derive(Deserialize)]
struct Vectors {
    shapes: Vec<Shape>,
    requests: Vec<Request>,
    chats: Vec<Chat>,
    completions: Vec<Completion>,
}

#[derive(Deserialize)]
struct Shape {
    name: String,
    tokenizer: String,
    specials: BTreeMap<String, String>,
    content_format: String,
    templates: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Request {
    name: String,
    body: Box<RawValue>,
}

#[derive(Deserialize)]
struct Chat {
    template: String,
    request: String,
    text: Option<String>,
    ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Completion {
    tokenizer: String,
    text: String,
    with_special: Vec<u32>,
    without_special: Vec<u32>,
}

fn vectors() -> Vectors {
    let text = include_str!("../../testdata/templates/vectors.json");
    serde_json::from_str(text).unwrap()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

fn shaped(shape: &Shape) -> Tokenizer {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/templates");
    let read = |file: &String| std::fs::read_to_string(directory.join(file)).unwrap();
    let sources: BTreeMap<String, String> = shape
        .templates
        .iter()
        .map(|(name, file)| (name.clone(), read(file)))
        .collect();
    let specials = shape.specials.clone();
    let templates = match &sources.iter().collect::<Vec<_>>()[..] {
        [(_, source)] => ChatTemplates::single((*source).clone(), specials).unwrap(),
        _ => ChatTemplates::named(sources, specials).unwrap(),
    };
    Tokenizer::load(&fixture(&shape.tokenizer))
        .unwrap()
        .with_templates(templates)
}

/// The router's text and ids of a request, or the error.
fn chat(tokenizer: &Tokenizer, body: &str) -> Result<(String, Vec<u32>), String> {
    let model = format!(
        "{{\"model\":\"m\",{}",
        body.trim_start().strip_prefix('{').unwrap()
    );
    let request =
        parse(PromptRoute::ChatCompletions, model.as_bytes()).map_err(|e| e.to_string())?;
    let PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat")
    };
    let text = tokenizer
        .render_chat(parts, now())
        .map_err(|error| error.to_string())?;
    let ids = tokenizer
        .encode_chat(parts, now())
        .map_err(|error| error.to_string())?;
    Ok((text, ids))
}

#[test]
fn chats_have_the_engines_text_and_ids() {
    let vectors = vectors();
    let bodies: BTreeMap<&str, &str> = vectors
        .requests
        .iter()
        .map(|r| (r.name.as_str(), r.body.get()))
        .collect();
    let tokenizers: BTreeMap<&str, Tokenizer> = vectors
        .shapes
        .iter()
        .map(|shape| (shape.name.as_str(), shaped(shape)))
        .collect();
    let mut wrong = Vec::new();
    let (mut equal, mut refused) = (0, 0);
    for vector in &vectors.chats {
        let ours = chat(
            &tokenizers[vector.template.as_str()],
            bodies[vector.request.as_str()],
        );
        match (&ours, &vector.text, &vector.ids) {
            (Ok((text, ids)), Some(their_text), Some(their_ids))
                if text == their_text && ids == their_ids =>
            {
                equal += 1
            }
            (Err(_), None, _) => refused += 1,
            _ => wrong.push(format!(
                "{} / {}\n  ours   {:?}\n  engine {:?}",
                vector.template,
                vector.request,
                ours.as_ref().map(|(text, _)| text),
                vector.text
            )),
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(
        vectors.shapes.len() >= 12 && equal > 500 && refused > 50,
        "{equal} {refused}"
    );
}

#[test]
fn content_formats_are_the_engines() {
    for shape in &vectors().shapes {
        let format = shaped(shape).templates.unwrap().content_format();
        let expected = match shape.content_format.as_str() {
            "openai" => ContentFormat::Parts,
            _ => ContentFormat::Text,
        };
        assert_eq!(format, Some(expected), "{}", shape.name);
    }
}

#[test]
fn completions_have_the_engines_ids() {
    for vector in &vectors().completions {
        let tokenizer = Tokenizer::load(&fixture(&vector.tokenizer)).unwrap();
        let encode = |special| tokenizer.encode(&vector.text, special).unwrap();
        assert_eq!(
            encode(SpecialTokens::Add),
            vector.with_special,
            "{:?}",
            vector.text
        );
        assert_eq!(
            encode(SpecialTokens::Omit),
            vector.without_special,
            "{:?}",
            vector.text
        );
    }
}

#[test]
fn a_bare_tokenizer_has_no_templates() {
    let tokenizer = Tokenizer::load(&fixture("tiny/tokenizer.json")).unwrap();
    let error = chat(
        &tokenizer,
        r#"{"messages":[{"role":"user","content":"x"}]}"#,
    )
    .unwrap_err();
    assert_eq!(error, RenderError::NoTemplate.to_string());
    assert!(matches!(
        Tokenizer::load(&fixture("absent")),
        Err(TokenizerLoadError::File(_))
    ));
}

#[test]
fn the_quick_starts_tokenizer_encodes_every_probe() {
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let probes = parity::probes(&tokenizer, "m", now());
    assert_eq!(probes.len(), 35);
    assert!(probes.iter().all(|probe| probe.ours.is_ok()), "{probes:?}");
    let mut verdicts = Vec::new();
    for probe in &probes {
        let body: Value = serde_json::from_slice(&probe.body).unwrap();
        assert_eq!(body["model"], "m");
        let theirs = parity::ProbeAnswer::Tokens(probe.ours.clone().unwrap());
        verdicts.push((probe.kind, parity::compare(&probe.ours, &theirs)));
    }
    let trust = parity::trust(verdicts.iter().map(|(kind, verdict)| (*kind, verdict)));
    assert!(trust.completions && trust.chat && trust.chat_with_tools && trust.skipped == 0);
}

/// A template of its own, default arguments and the rule for unused tools.
#[test]
fn the_settings_of_a_model_change_the_text() {
    const TEMPLATE: &str = "{{ messages[0].content }}{% if tools %}, {{ tools | length }} tool\
        {% endif %}, {{ style | default('plain') }}";
    let name = format!("warmroute-template-{}.jinja", std::process::id());
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, TEMPLATE).unwrap();
    let text = |kwargs: Option<&str>, unused_tools, body: &str| {
        let source = ModelSource {
            path: fixture("tiny"),
            chat_template: Some(file.clone()),
            rules: TemplateRules {
                default_kwargs: kwargs.map(str::to_owned),
                unused_tools,
            },
        };
        let tokenizer = Tokenizer::of_files(source.read().unwrap()).unwrap();
        let body = format!(r#"{{"messages":[{{"role":"user","content":"x"}}]{body}}}"#);
        chat(&tokenizer, &body).unwrap().0
    };
    let (rendered, excluded) = (UnusedTools::Rendered, UnusedTools::Excluded);
    assert_eq!(text(None, rendered, ""), "x, plain", "its own template");
    let short = Some(r#"{"style":"short"}"#);
    assert_eq!(text(short, rendered, ""), "x, short", "by default");
    let own = r#","chat_template_kwargs":{"style":"long"}"#;
    assert_eq!(text(short, rendered, own), "x, long", "by the request");
    let tools = r#","tools":[{"type":"function","function":{"name":"f"}}]"#;
    let unused = &format!(r#"{tools},"tool_choice":"none""#);
    assert_eq!(text(None, rendered, unused), "x, 1 tool, plain");
    assert_eq!(text(None, excluded, unused), "x, plain");
    assert_eq!(text(None, excluded, tools), "x, 1 tool, plain");
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn templates_of_clients_are_not_run() {
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let body = r#"{"messages":[{"role":"user","content":"x"}],"chat_template":"{{ 1 }}"}"#;
    assert_eq!(
        chat(&tokenizer, body).unwrap_err(),
        RenderError::RequestTemplate.to_string()
    );
    let body = r#"{"messages":[{"role":"user","content":"x"}],
        "chat_template_kwargs":{"chat_template":"{{ 1 }}"}}"#;
    assert!(chat(&tokenizer, body).is_err());
}

#[test]
fn a_template_that_executes_many_instructions_ends_within_its_bound() {
    let slow = "{% for a in range(300) %}{% for b in range(1000) %}{% endfor %}{% endfor %}done";
    let including = "{% include 'slow' %}";
    let sources = [("default", including), ("slow", slow)];
    let sources = sources.map(|(name, source)| (name.to_owned(), source.to_owned()));
    let templates = ChatTemplates::named(sources.into(), BTreeMap::new()).unwrap();
    for name in ["", r#","chat_template":"slow""#] {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}]{name}}}"#);
        let request = parse(PromptRoute::ChatCompletions, body.as_bytes()).unwrap();
        let PromptSource::Chat(parts) = &request.prompt else {
            panic!("a chat")
        };
        let render = |bound| {
            let is_cancelled: IsCancelled = std::sync::Arc::new(|| false);
            let limits = RenderLimits {
                bound,
                is_cancelled,
            };
            templates.render_within(parts, now(), limits)
        };
        assert_eq!(render(RenderBound::Short), Err(RenderError::TooLong));
        assert_eq!(render(RenderBound::Long), Ok("done".to_owned()));
    }
}

/// A few such bodies once occupied every encoding thread for minutes. `tests/render_cost.rs` counts
/// what they cost.
#[test]
fn template_kwargs_are_bounded() {
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let body = |members: usize| {
        let kwargs: Vec<String> = (0..members).map(|i| format!("\"k{i}\":{i}")).collect();
        format!(
            r#"{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{{{}}}}}"#,
            kwargs.join(",")
        )
    };
    chat(&tokenizer, &body(1024)).unwrap();
    for members in [1025, 300_000] {
        let error = chat(&tokenizer, &body(members)).unwrap_err();
        assert_eq!(error, "`chat_template_kwargs` has more than 1024 members");
    }
}

#[test]
fn values_that_python_reads_differently_are_unsupported() {
    const NUMBER: RenderError = RenderError::Number("tool_calls");
    const OTHER: RenderError = RenderError::Unsupported("tool_calls");
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
    for (arguments, expected) in [
        (r#"{\"a\": NaN}"#, NUMBER),
        (r#"{\"a\": [-Infinity]}"#, NUMBER),
        (r#"{\"a\": 18446744073709551616}"#, NUMBER),
        (r#"{\"a\": -9223372036854775809}"#, NUMBER),
        (r#"{\"a\": 1e999}"#, NUMBER),
        (r#"{\"a\": -0}"#, NUMBER),
        (r#"{\"a\": \"\\ud800\"}"#, OTHER),
        (deep.as_str(), OTHER),
    ] {
        let body = format!(
            r#"{{"messages":[{{"role":"assistant","content":"","tool_calls":[{{"id":"1",
            "type":"function","function":{{"name":"f","arguments":"{arguments}"}}}}]}}]}}"#
        );
        let error = chat(&tokenizer, &body).unwrap_err();
        assert_eq!(error, expected.to_string(), "{arguments}");
    }
}

#[test]
fn numbers_that_python_reads_differently_are_unsupported_everywhere() {
    let source = include_str!("../../testdata/templates/mistral_tools.jinja").to_owned();
    let tokens = ["bos_token", "eos_token"].map(|name| (name.to_owned(), "<s>".to_owned()));
    let templates = ChatTemplates::single(source, tokens.into()).unwrap();
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let tokenizer = tokenizer.with_templates(templates);
    let body = |number: &str, place: &str| {
        let at = |name: &str| if name == place { number } else { "1" };
        format!(
            r#"{{"messages":[{{"role":"user","content":"x"}},{{"role":"assistant","content":"",
            "tool_calls":[{{"id":"123456789","type":"function","function":{{"name":"f",
            "arguments":"{{\"a\":{}}}","x":{}}}}}]}}],"tools":[{{"type":"function","function":
            {{"name":"f","parameters":{{"default":{}}}}}}}],
            "chat_template_kwargs":{{"k":[{}]}},"documents":[{{"d":{}}}]}}"#,
            at("tool_calls"),
            at("messages"),
            at("tools"),
            at("chat_template_kwargs"),
            at("documents"),
        )
    };
    for place in [
        "tool_calls",
        "messages",
        "tools",
        "chat_template_kwargs",
        "documents",
    ] {
        for number in ["-0", "123456789012345678901234"] {
            let error = chat(&tokenizer, &body(number, place)).unwrap_err();
            let expected = RenderError::Number(place);
            assert_eq!(error, expected.to_string(), "{number}");
        }
        for number in ["-0.0", "-0e1", "-0.5E-07", "1e-05", "-10"] {
            chat(&tokenizer, &body(number, place)).unwrap();
        }
        for number in [
            "9223372036854775807",
            "-9223372036854775808",
            "18446744073709551615",
            "0.1000000000000000055511",
            "1700000000000000000.5",
        ] {
            chat(&tokenizer, &body(number, place)).unwrap();
        }
    }
    let text = r#"{"messages":[{"role":"user","content":"-0, 123456789012345678901234"}]}"#;
    chat(&tokenizer, text).unwrap();
}

/// The text of a body under a template; `None` if there is none.
fn text_of(template: &str, route: PromptRoute, body: &Value) -> Option<String> {
    let templates = ChatTemplates::single(template.to_owned(), BTreeMap::new()).unwrap();
    let body = body.to_string();
    let request = parse(route, body.as_bytes()).unwrap();
    assert_eq!(request.info.opaque, None, "{body}");
    match &request.prompt {
        PromptSource::Chat(chat) => templates.render(chat, now()).ok(),
        PromptSource::Completion(_) => panic!("a chat"),
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one line for each body")]
fn an_empty_text_is_no_part_of_a_text() {
    use PromptRoute::{ChatCompletions, Messages, Responses};
    const TEXT: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    const PARTS: &str = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}\
        {{ m.content }}{% else %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endif %}\
        {% endfor %}";
    let part = |text: &str| json!({"type": "text", "text": text});
    let message = |role: &str, content: Value| json!({"role": role, "content": content});
    let chat = |role: &str, content: Value| {
        (
            ChatCompletions,
            json!({"messages": [message(role, content)]}),
        )
    };
    let two = |first: &str, second: &str| json!([part(first), part(second)]);
    let output = json!([{"type": "input_text", "text": ""}, {"type": "input_text", "text": "x"}]);
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": two("", "x")});
    let refusal = json!([{"type": "refusal", "refusal": ""}, part("x")]);
    for ((route, body), text, parts) in [
        (chat("user", two("", "x")), "<user>x", "<user>[][x]"),
        (chat("system", two("x", "")), "<system>x", "<system>[x][]"),
        (
            chat("assistant", two("", "")),
            "<assistant>",
            "<assistant>[][]",
        ),
        (
            chat("assistant", refusal),
            "<assistant>x",
            "<assistant>[][x]",
        ),
        (chat("user", json!("")), "<user>", "<user>[]"),
        (chat("tool", two("", "x")), "<tool>x", "<tool>\nx"),
        (
            (
                Responses,
                json!({"input": [message("user", output.clone())]}),
            ),
            "<user>x",
            "<user>[][x]",
        ),
        (
            (
                Responses,
                json!({"input": [{"type": "function_call_output", "call_id": "c", "output": output}]}),
            ),
            "<tool>x",
            "<tool>\nx",
        ),
        (
            (
                Messages,
                json!({"messages": [message("user", two("", "x"))]}),
            ),
            "<user>x",
            "<user>[x]",
        ),
        (
            (
                Messages,
                json!({"messages": [message("user", json!([result]))]}),
            ),
            "<tool>\nx",
            "<tool>\nx",
        ),
    ] {
        assert_eq!(text_of(TEXT, route, &body).as_deref(), Some(text), "{body}");
        assert_eq!(
            text_of(PARTS, route, &body).as_deref(),
            Some(parts),
            "{body}"
        );
    }
}

/// Templates may print a whole call.
#[test]
fn the_members_of_a_call_have_each_routes_order() {
    use PromptRoute::{ChatCompletions, Messages, Responses};
    const ALL: &str =
        "{% for m in messages %}{{ m.tool_calls | tojson }}{{ m.content }}{% endfor %}";
    let call = json!({"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}});
    let block = json!({"type": "tool_use", "id": "c", "name": "f", "input": {}});
    let item = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    let arguments_first =
        r#"[{"id": "c", "function": {"arguments": {}, "name": "f"}, "type": "function"}]"#;
    let name_first =
        r#"[{"id": "c", "function": {"name": "f", "arguments": {}}, "type": "function"}]"#;
    for (route, body, expected) in [
        (
            ChatCompletions,
            json!({"messages": [{"role": "assistant", "tool_calls": [call]}]}),
            arguments_first,
        ),
        (
            Messages,
            json!({"messages": [{"role": "assistant", "content": [block]}]}),
            arguments_first,
        ),
        (Responses, json!({"input": [item]}), name_first),
    ] {
        assert_eq!(
            text_of(ALL, route, &body).as_deref(),
            Some(expected),
            "{body}"
        );
    }
}

#[test]
fn an_empty_list_of_tools_is_no_missing_list() {
    use PromptRoute::{ChatCompletions, Messages, Responses};
    const TOOLS: &str = "{{ tools is none }}{{ tools | tojson }}{# messages #}";
    let dropped = json!([{"type": "web_search"}, {"type": "local_shell"}]);
    let user = json!([{"role": "user", "content": "x"}]);
    for (route, body, expected) in [
        (
            Responses,
            json!({"input": "x", "tools": dropped}),
            Some("False[]"),
        ),
        (
            Responses,
            json!({"input": "x", "tools": []}),
            Some("Truenull"),
        ),
        (
            Messages,
            json!({"messages": user, "tools": []}),
            Some("False[]"),
        ),
        (
            ChatCompletions,
            json!({"messages": user, "tools": []}),
            None,
        ),
    ] {
        assert_eq!(text_of(TOOLS, route, &body).as_deref(), expected, "{body}");
    }
}

#[test]
fn an_unfinished_answer_goes_on() {
    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\
        {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let answer = |status: &str| {
        json!({"type": "message", "id": "m", "role": "assistant", "status": status,
            "content": [{"type": "output_text", "text": "a ", "annotations": []}]})
    };
    let user = json!({"role": "user", "content": "x"});
    for (items, expected) in [
        (
            json!([user, answer("incomplete")]),
            "<user>x</user><assistant>a ",
        ),
        (
            json!([user, answer("in_progress")]),
            "<user>x</user><assistant>a ",
        ),
        (
            json!([user, answer("completed")]),
            "<user>x</user><assistant>a </assistant><assistant>",
        ),
        (
            json!([answer("incomplete"), user]),
            "<assistant>a </assistant><user>x</user><assistant>",
        ),
    ] {
        let body = json!({"input": items});
        let text = text_of(TEMPLATE, PromptRoute::Responses, &body);
        assert_eq!(text.as_deref(), Some(expected), "{body}");
    }
}

#[test]
fn the_line_of_attribution_is_cut_from_a_system_prompt() {
    use PromptRoute::{ChatCompletions, Messages, Responses};
    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let line = "x-anthropic-billing-header: a=1;";
    let user = json!([{"role": "user", "content": "x"}]);
    let both = format!("{line}\nS");
    let chat = json!([{"role": "system", "content": both}, {"role": "user", "content": "x"}]);
    let late = json!([{"role": "user", "content": "x"}, {"role": "system", "content": both}]);
    for (route, body, expected) in [
        (
            Messages,
            json!({"messages": user, "system": both}),
            "<system>S<user>x",
        ),
        (
            Messages,
            json!({"messages": user, "system": line}),
            "<system><user>x",
        ),
        (Messages, json!({"messages": late}), "<user>x"),
        (
            ChatCompletions,
            json!({"messages": chat}),
            "<system>S<user>x",
        ),
        (
            Responses,
            json!({"input": "x", "instructions": both}),
            "<system>S<user>x",
        ),
    ] {
        assert_eq!(
            text_of(TEMPLATE, route, &body).as_deref(),
            Some(expected),
            "{body}"
        );
    }
}

#[test]
fn a_second_request_encodes_only_new_messages() {
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let long = "some words of a long document ".repeat(200);
    let first = format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}]}}"#);
    chat(&tokenizer, &first).unwrap();
    let before = tokenizer.cache_stats();
    let second = format!(
        r#"{{"messages":[{{"role":"user","content":"{long}"}},{{"role":"assistant","content":"ok"}},
        {{"role":"user","content":"go on"}}]}}"#
    );
    chat(&tokenizer, &second).unwrap();
    let after = tokenizer.cache_stats();
    assert!(after.miss_bytes - before.miss_bytes < 100);
    assert!(after.hit_bytes - before.hit_bytes > 6000);
}

/// The time of an encoding shows no client what prompts with another salt contain.
#[test]
fn prompts_with_other_salts_share_no_cached_ids() {
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let long = "some words of a long document ".repeat(200);
    let misses = |salt: Option<&str>| {
        let before = tokenizer.cache_stats().miss_bytes;
        let task = tokenizer.task(&*long, SpecialTokens::Add);
        let mut task = task.with_cache_scope(CacheScope::of_salt(salt));
        while task.step(&tokenizer, usize::MAX).unwrap() == TaskState::More {}
        tokenizer.cache_stats().miss_bytes - before
    };
    for salt in [None, Some("a"), Some("b")] {
        assert!(misses(salt) > 5000, "{salt:?}: of others");
        assert_eq!(misses(salt), 0, "{salt:?}: its own");
    }
}

#[test]
fn a_text_beyond_the_regex_engines_limits_is_an_error() {
    let tokenizer = Tokenizer::load(&fixture("tiny")).unwrap();
    let blanks = " ".repeat(11_000_000) + "x";
    assert!(tokenizer.encode(&blanks, SpecialTokens::Add).is_err());
    assert!(tokenizer.encode("x", SpecialTokens::Add).is_ok());
}
