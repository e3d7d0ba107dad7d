//! The fuzz targets' bodies, which the corpus test runs as well.
#![allow(dead_code, reason = "each user of this file runs one of the functions")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use warmroute_chat::openai::{
    PromptList, PromptRoute, PromptSource, SpecialTokens, SseEvent, SseSplitter, StreamObserver,
    TokenUsage, form_field, parse,
};
use warmroute_chat::tokenize::{
    ChatTemplates, CivilTime, ReferenceComparison, RenderBound, RenderError, RenderLimits,
    Tokenizer,
};

const TEMPLATES: [&str; 6] = [
    include_str!("../testdata/templates/chatml_tools.jinja"),
    include_str!("../testdata/templates/qwen3_thinking.jinja"),
    include_str!("../testdata/templates/llama31_tools.jinja"),
    include_str!("../testdata/templates/glm4.jinja"),
    include_str!("../testdata/templates/gpt_oss.jinja"),
    include_str!("../testdata/templates/xml_tools.jinja"),
];

fn tokenizer() -> &'static Tokenizer {
    &tokenizers()[0]
}

fn tokenizers() -> &'static [Tokenizer; 2] {
    static TOKENIZERS: OnceLock<[Tokenizer; 2]> = OnceLock::new();
    TOKENIZERS.get_or_init(|| {
        ["tiny", "tiny_sp"].map(|name| {
            let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
                .ancestors()
                .map(|directory| directory.join("tests/fixtures").join(name))
                .find(|fixture| fixture.is_dir());
            Tokenizer::load(&fixture.expect("fixture")).expect("tokenizer")
        })
    })
}

/// A text, cut at every seam: the ids are the reference's.
pub(crate) fn seams(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for tokenizer in tokenizers() {
        let compared = tokenizer.compare_cut(&text, SpecialTokens::Add);
        assert_ne!(compared, ReferenceComparison::Different, "{text:?}");
    }
}

/// A tokenizer's file that is not a `tokenizer.json`: loaded, and texts encoded. The first byte
/// chooses its name and the engine's class.
pub(crate) fn tokenizer_file(data: &[u8]) {
    const FILES: [&str; 4] = [
        "tekken.json",
        "tokenizer.model",
        "tiktoken.model",
        "qwen.tiktoken",
    ];
    const CLASSES: [&str; 4] = [
        r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}"#,
        r#"{"tokenizer_class": "GemmaTokenizer"}"#,
        r#"{"added_tokens_decoder": {"3": {"content": "<t>"}, "9": {"content": "<new>"}}}"#,
        r#"{"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", null]}}"#,
    ];
    let Some((choice, content)) = data.split_first() else {
        return;
    };
    let directory = tempfile::tempdir().expect("directory");
    let write = |name: &str, content: &[u8]| {
        std::fs::write(directory.path().join(name), content).expect("file");
    };
    write(FILES[usize::from(choice % 4)], content);
    write(
        "tokenizer_config.json",
        CLASSES[usize::from(choice / 4 % 4)].as_bytes(),
    );
    if let Ok(tokenizer) = Tokenizer::load(directory.path()) {
        for text in ["", " ab  a<t>b", "①é\u{301}ﬁ"] {
            // A text may have no ids; what counts is that nothing panics.
            drop(tokenizer.encode(text, SpecialTokens::Add));
        }
    }
}

fn templates() -> &'static [ChatTemplates] {
    static COMPILED: OnceLock<Vec<ChatTemplates>> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<|begin_of_text|>".to_owned())]);
        let compile = |source: &str| ChatTemplates::single(source.to_owned(), tokens.clone());
        TEMPLATES
            .iter()
            .map(|source| compile(source).expect("template"))
            .collect()
    })
}

/// A chat body: parsed, forwarded, rendered by several templates, encoded. Also read as a body of
/// the routes whose bodies become chats.
pub(crate) fn chat(data: &[u8]) {
    for route in [PromptRoute::Responses, PromptRoute::Messages] {
        if let Ok(request) = parse(route, data) {
            check_forwarded(request.rewritten.as_deref().unwrap_or(data));
        }
    }
    let Ok(request) = parse(PromptRoute::ChatCompletions, data) else {
        return;
    };
    check_forwarded(request.rewritten.as_deref().unwrap_or(data));
    let PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat is a chat")
    };
    for templates in templates() {
        if let Ok(text) = templates.render(parts, CivilTime::from_unix(1_772_874_302))
            && text.len() < 1 << 16
        {
            let ids = tokenizer()
                .encode(&text, parts.special_tokens)
                .expect("bytes always encode");
            assert!(ids.len() <= text.len());
        }
    }
}

/// Parts of template sources.
const FRAGMENTS: [&str; 80] = [
    "{% for message in messages %}",
    "{% for key, value in message.items() %}",
    "{% for a in range(40) %}",
    "{% for tool in tools recursive %}",
    "{% endfor %}",
    "{% endfor -%}\n",
    "{% if message.role == 'user' %}",
    "{% if loop.first and not loop.last %}",
    "{% elif tools is defined %}",
    "{% else %}",
    "{% endif %}",
    "{%- endif +%}\n  ",
    "{{ message.content }}",
    "{{ message['content'] | trim }}",
    "{{- '<|im_start|>' + message.role + '\\n' -}}",
    "{{ 'a' + message.content + bos_token }}",
    "{% set ns = namespace(found=false, n=0) %}",
    "{% set ns.n = ns.n + 1 %}",
    "{% set x = messages %}",
    "{% set messages = messages[1:] %}",
    "{% set content %}",
    "{% endset %}",
    "{% macro show(x, depth=0) %}",
    "{% endmacro %}",
    "{{ show(messages) }}",
    "{% call show(1) %}",
    "{% endcall %}",
    "{% with x = tools %}",
    "{% endwith %}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{% include 'default' %}",
    "{% block a %}",
    "{% endblock %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% raw %}",
    "{% endraw %}",
    "{% break %}",
    "{% continue %}",
    "{{ raise_exception('no') }}",
    "{{ tools | tojson(indent=2) }}",
    "{{ strftime_now('%d %b %Y') }}",
    "{{ messages[::-1] | length }}",
    "{{ (messages | last).content.split('\\n')[-1].strip() }}",
    "{{ loop.index0 }}{{ loop.previtem }}",
    "{# ",
    " #}",
    "{% ",
    "{%- ",
    " %}",
    " -%}",
    "{{ ",
    " }}",
    "messages",
    "message.content",
    "add_generation_prompt",
    "show",
    "loop",
    "[0]",
    "[-9:7:2]",
    "[",
    "]",
    "(",
    ")",
    ".replace('a', 'bb')",
    " | join(', ')",
    " | selectattr('role', 'equalto', 'user') | list",
    " | map(attribute='content')",
    " | dictsort | string",
    " + ",
    " ~ ",
    " * 7",
    " not in ",
    " is none",
    " if x else ",
    "'%s %5.2f' % ",
    "1.5e3",
    "\"\\u00e9\"",
    "🙂\n\u{301}",
];

/// Sources are cut to this length, and loop so often at most, so that one takes milliseconds.
const SOURCE_BYTES_MAX: usize = 4 << 10;
const LOOPS_MAX: usize = 5;

/// Many outputs and turns of a template that prints lists: it ends there.
const ASKED_MAX: usize = 1 << 20;

/// A loop of more instructions than a short rendering may execute. It uses no name that a template
/// may have given another value.
const LONG_LOOP: &str = "{% for _ in [1,2,3,4,5,6,7,8,9,10] %}{% for _ in [1,2,3,4,5,6,7,8,9,10] %}\
    {% for _ in [1,2,3,4,5,6,7,8,9,10] %}{% for _ in [1,2,3,4,5,6,7,8,9,10] %}\
    {% for _ in [1,2,3,4,5,6,7,8,9,10] %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}\
    {% endfor %}";

const TEMPLATE_CHAT: &str = r#"{"model": "m", "messages": [
    {"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "a b\nc"},
    {"role": "assistant", "content": [{"type": "text", "text": "{{ 1 }}"}]},
    {"role": "user", "content": "é🙂"}], "tools": [{"type": "function", "function":
    {"name": "f", "parameters": {"type": "object"}}}]}"#;

/// A template's source: as it is, or of a fragment for each byte if the first byte is odd.
fn template_source(data: &[u8]) -> Option<String> {
    let (mode, rest) = data.split_first()?;
    let source = if mode % 2 == 0 {
        String::from_utf8_lossy(rest).into_owned()
    } else {
        let fragment = |byte: &u8| FRAGMENTS[usize::from(*byte) % FRAGMENTS.len()];
        rest.iter().map(fragment).collect()
    };
    let loops = source.matches("for").count() - source.matches("endfor").count();
    (source.len() <= SOURCE_BYTES_MAX && loops <= LOOPS_MAX).then_some(source)
}

fn render_short(source: &str) -> Option<Result<String, RenderError>> {
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let templates = ChatTemplates::single(source.to_owned(), tokens).ok()?;
    let request = parse(PromptRoute::ChatCompletions, TEMPLATE_CHAT.as_bytes()).expect("a body");
    let PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat is a chat")
    };
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let limits = RenderLimits {
        bound: RenderBound::Short,
        is_cancelled: Arc::new(move || count.fetch_add(1, Ordering::Relaxed) >= ASKED_MAX),
    };
    let text = templates.render_within(parts, CivilTime::from_unix(1_772_874_302), limits);
    let asked = asked.load(Ordering::Relaxed);
    assert!(asked <= ASKED_MAX + 1, "it goes on after its end");
    Some(text)
}

/// A template's source. It is refused, or renders a text or an error, within the bound of
/// instructions.
pub(crate) fn template(data: &[u8]) {
    let Some(source) = template_source(data) else {
        return;
    };
    match render_short(&source) {
        None | Some(Err(RenderError::TooLong)) => {}
        Some(Err(RenderError::Template(error))) => {
            assert!(!error.contains("panicked"), "{source:?}: {error}");
        }
        Some(Err(error)) => panic!("{source:?} is no reason for this: {error}"),
        // One in a few, since it takes as long as the bound allows.
        Some(Ok(_)) if source.len() % 16 != 0 => {}
        Some(Ok(_)) => {
            let ended = render_short(&format!("{source}\n{LONG_LOOP}"));
            assert_eq!(ended, Some(Err(RenderError::TooLong)), "{source:?}");
        }
    }
}

const KWARGS: &str = "chat_template_kwargs";
const KWARGS_MAX: usize = 1024;
/// Part of every text in generated arguments: no error repeats it.
const SECRET: &str = "hunter2-hunter2";

/// Arguments of a template, and whether they must be accepted, if that is known.
struct DrivenKwargs {
    json: String,
    accepted: Option<bool>,
}

impl DrivenKwargs {
    /// JSON as it is. Other values than objects are refused, `null` is none.
    fn of_text(text: &str) -> Option<Self> {
        let value: serde_json::Value = serde_json::from_str(text).ok()?;
        let accepted = (!value.is_object()).then(|| value.is_null());
        Some(Self {
            json: text.to_owned(),
            accepted,
        })
    }

    /// Two bytes for each group of members: its kind and its size.
    fn of_groups(groups: &[u8]) -> Self {
        const RESERVED: [&str; 3] = ["messages", "chat_template", "tokenizer"];
        const CONSUMED: [&str; 2] = ["add_generation_prompt", "max_length"];
        let (mut members, mut names) = (Vec::new(), BTreeSet::new());
        let mut accepted = true;
        for (group, pair) in groups.as_chunks::<2>().0.iter().take(32).enumerate() {
            let [kind, size] = pair.map(usize::from);
            let mut add = |name: String, value: String| {
                members.push(format!("{name:?}:{value}"));
                names.insert(name);
            };
            let text = format!("{SECRET:?}");
            match kind % 8 {
                0 => (0..size * 6).for_each(|i| add(format!("{SECRET}{group}_{i}"), text.clone())),
                1 => (0..size * 6).for_each(|i| add("same".to_owned(), i.to_string())),
                2 => {
                    accepted &= size < 100;
                    let depth = if size < 100 { size } else { size + 100 };
                    let value = "[".repeat(depth) + &text + &"]".repeat(depth);
                    add("deep".to_owned(), value);
                }
                3 => {
                    // 19 nines have 64 bits.
                    accepted &= size % 40 < 19;
                    add("number".to_owned(), "9".repeat(1 + size % 40));
                }
                4 => {
                    let is_reserved = size < 128;
                    accepted &= !is_reserved;
                    let name = if is_reserved {
                        RESERVED[size % 3]
                    } else {
                        CONSUMED[size % 2]
                    };
                    add(name.to_owned(), text);
                }
                5 => add(format!("null{size}"), "null".to_owned()),
                6 => add("auto".to_owned(), "\"auto\"".to_owned()),
                _ if size % 8 == 0 => {
                    accepted = false;
                    add("zero".to_owned(), "-0".to_owned());
                }
                _ => add("float".to_owned(), format!("-0.{size}e-0{size}")),
            }
        }
        Self {
            json: format!("{{{}}}", members.join(",")),
            accepted: Some(accepted && names.len() <= KWARGS_MAX),
        }
    }
}

/// A request's arguments for a template: JSON, or groups of members if the first byte is odd. Few
/// enough are accepted; an error names the field, and nothing of its content.
pub(crate) fn kwargs(data: &[u8]) {
    static COMPILED: OnceLock<ChatTemplates> = OnceLock::new();
    let Some((mode, rest)) = data.split_first() else {
        return;
    };
    let driven = match mode % 2 {
        0 => DrivenKwargs::of_text(&String::from_utf8_lossy(rest)),
        _ => Some(DrivenKwargs::of_groups(rest)),
    };
    let Some(DrivenKwargs { json, accepted }) = driven else {
        return;
    };
    let body =
        format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], "{KWARGS}": {json}}}"#);
    let error = match parse(PromptRoute::ChatCompletions, body.as_bytes()) {
        Err(error) => {
            assert_eq!(error.param, Some(KWARGS), "{error:?}");
            Some(error.message)
        }
        Ok(request) => {
            let PromptSource::Chat(parts) = &request.prompt else {
                panic!("a chat is a chat")
            };
            let templates = COMPILED.get_or_init(|| {
                let source = "{{ messages[0].content }}{{ same }}".to_owned();
                ChatTemplates::single(source, BTreeMap::new()).expect("template")
            });
            match templates.render(parts, CivilTime::from_unix(0)) {
                Ok(text) => {
                    check_accepted(&json, &text);
                    None
                }
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains(KWARGS), "{error}");
                    Some(error)
                }
            }
        }
    };
    if let Some(accepted) = accepted {
        assert_eq!(error.is_none(), accepted, "{error:?}: {data:?}");
    }
    if let Some(error) = error {
        assert!(!error.contains(SECRET) && error.len() < 200, "{error}");
    }
}

/// The last value of a repeated member counts.
fn check_accepted(json: &str, text: &str) {
    let members: serde_json::Value = serde_json::from_str(json).expect("accepted JSON");
    assert!(
        members
            .as_object()
            .is_none_or(|members| members.len() <= KWARGS_MAX)
    );
    assert!(text.starts_with('x'), "{text}");
    let same = &members["same"];
    if let Some(number) = same.as_u64() {
        assert_eq!(text[1..], number.to_string());
    } else if let Some(same) = same.as_str().filter(|same| *same != "auto") {
        assert_eq!(text[1..], *same);
    } else if same.is_null() {
        assert_eq!(text, "x");
    }
}

/// A completion body: parsed, forwarded, encoded.
pub(crate) fn completion(data: &[u8]) {
    let Ok(request) = parse(PromptRoute::Completions, data) else {
        return;
    };
    check_forwarded(request.rewritten.as_deref().unwrap_or(data));
    let PromptSource::Completion(parts) = &request.prompt else {
        panic!("a completion is a completion")
    };
    if let PromptList::Texts(texts) = &parts.prompts {
        for text in texts {
            let ids = tokenizer()
                .encode(text, SpecialTokens::Omit)
                .expect("bytes always encode");
            assert!(ids.len() <= text.len());
        }
    }
}

/// What Python reads in a body that is forwarded does not set the report mode. Halves of pairs of
/// surrogates, which Python reads, are replaced, and the byte order mark is left out.
fn check_forwarded(body: &[u8]) {
    type Members<'m> = BTreeMap<String, &'m serde_json::value::RawValue>;
    let text = String::from_utf8_lossy(body);
    let text = text.replace("\\ud", "\\u0").replace("\\uD", "\\u0");
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let members: Members<'_> = serde_json::from_str(text).expect("a forwarded body can be read");
    let xargs = members.get("vllm_xargs").map(|xargs| xargs.get());
    let xargs: Members<'_> = xargs
        .and_then(|x| serde_json::from_str(x).ok())
        .unwrap_or_default();
    assert!(!xargs.contains_key("kv_cache_report_mode"));
}

/// A form: the first line is its content type. A field that is found is a part of the body.
pub(crate) fn form(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n');
    let Some((kind, body)) = end.and_then(|end| data.split_at_checked(end)) else {
        return;
    };
    let body = &body[1..];
    if let Ok(Some(model)) = form_field(kind, body, "model") {
        assert!(model.len() <= 1024);
        let model = model.as_bytes();
        let end = [model, &b"\r\n--"[..]].concat();
        assert!(body.windows(end.len()).any(|part| part == end));
    }
}

/// A stream: the first byte is the size of the chunks that the rest comes in.
pub(crate) fn sse(data: &[u8]) {
    let Some((size, stream)) = data.split_first() else {
        return;
    };
    let size = usize::from(*size).max(1);
    let events = |chunks: &mut dyn Iterator<Item = &[u8]>| {
        let (mut splitter, mut found) = (SseSplitter::default(), Vec::new());
        let mut keep = |event: SseEvent<'_>| match event {
            SseEvent::Whole(bytes) => found.push(bytes.to_vec()),
            SseEvent::Oversized(_) => found.push(Vec::new()),
        };
        for chunk in chunks {
            splitter.push(chunk, &mut keep);
        }
        splitter.finish(&mut keep);
        found
    };
    assert_eq!(
        events(&mut stream.chunks(size)),
        events(&mut std::iter::once(stream))
    );
    let mut watch = StreamObserver::default();
    let firsts = stream
        .chunks(size)
        .filter(|chunk| watch.push(chunk))
        .count();
    assert!(firsts <= 1);
    watch.finish();
    let _usage: Option<TokenUsage> = TokenUsage::from_json(stream);
}
