//! The fuzz targets' bodies, which the corpus test runs as well.
#![allow(dead_code, reason = "each user of this file runs one of the functions")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use warmroute_chat::openai::{
    PromptList, PromptRoute, PromptSource, SpecialTokens, SseEvent, SseSplitter, StreamObserver,
    TokenUsage, form_field, parse,
};
use warmroute_chat::tokenize::{ChatTemplates, CivilTime, ReferenceComparison, Tokenizer};

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

/// A chat body: parsed, forwarded, rendered by several templates, encoded.
pub(crate) fn chat(data: &[u8]) {
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

fn check_forwarded(body: &[u8]) {
    let forwarded: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    assert!(
        forwarded["vllm_xargs"]
            .get("kv_cache_report_mode")
            .is_none()
    );
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
