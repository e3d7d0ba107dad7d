//! Prints what prompts cost: CPU time of the two encoders, hits of the cache, and the peak memory
//! of hostile bodies. Linux only. [PERF.md](../../../docs/PERF.md) has the command and results.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark fails and prints"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use warmroute_chat::openai::{PromptList, PromptRoute, PromptSource, SpecialTokens, parse};
use warmroute_chat::tokenize::{ChatTemplates, CivilTime, TaskState, Tokenizer};

const RUNS: usize = 5;

/// As of a model with this length.
const TOKENS_MAX: usize = 1 << 20;

/// CPU time of this thread in microseconds.
fn cpu_us() -> f64 {
    // Updates the kernel's count.
    std::thread::yield_now();
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanos: f64 = text.split(' ').next().unwrap().parse().unwrap();
    nanos / 1000.0
}

/// Median CPU time of a call, in microseconds.
fn median(mut call: impl FnMut(usize)) -> f64 {
    let mut times: Vec<f64> = (0..RUNS)
        .map(|run| {
            let started = cpu_us();
            call(run);
            cpu_us() - started
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[RUNS / 2]
}

/// Text of files below a directory, from an offset that differs for each run.
fn files(directory: &str, ending: &str, text: &mut String) {
    let mut entries: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries {
        let path = entry.path();
        let name = path.display().to_string();
        if path.is_dir() {
            files(&name, ending, text);
        } else if name.ends_with(ending) {
            text.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

const SCRIPTS: &[&str] = &[
    "Маршрутизатор отправляет каждый запрос туда, где начало текста уже обработано.",
    "路由器把每个请求发送到已经缓存了提示前缀的服务器，这样首个词元的等待时间最短。",
    "ルーターは各リクエストを、プロンプトの先頭がすでに計算されているサーバーに送ります。",
    "라우터는 각 요청을 프롬프트의 앞부분이 이미 계산된 서버로 보냅니다.",
    "يرسل الموجه كل طلب إلى الخادم الذي يحتفظ ببداية النص في ذاكرته.",
    "Der Verteiler schickt jede Anfrage dorthin, wo ihr Anfang schon berechnet ist; größere später.",
    "राउटर हर अनुरोध को वहाँ भेजता है जहाँ पाठ की शुरुआत पहले से मौजूद है।",
    "Ο δρομολογητής στέλνει κάθε αίτημα εκεί όπου η αρχή του κειμένου υπάρχει ήδη.",
    "Le routeur envoie chaque requête là où son début a déjà été calculé, même très longue.",
];

fn multilingual(bytes: usize) -> String {
    let (mut text, mut state) = (String::new(), 1_u64);
    while text.len() < bytes {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let sentence = SCRIPTS[(state >> 33) as usize % SCRIPTS.len()];
        writeln!(text, "{sentence} {}", state >> 50).unwrap();
    }
    text
}

fn slice(text: &str, from: usize, bytes: usize) -> &str {
    let start = text.ceil_char_boundary(from % (text.len() - bytes - 8));
    &text[start..text.floor_char_boundary(start + bytes)]
}

fn encoders(load: &dyn Fn() -> Tokenizer) {
    let (mut prose, mut code) = (String::new(), String::new());
    files("docs", ".md", &mut prose);
    files("router", ".rs", &mut code);
    println!("| text | own, µs | reference, µs | ratio | cached, µs |\n|---|---|---|---|---|");
    for (name, text) in [
        ("prose", &prose),
        ("code", &code),
        ("multilingual", &multilingual(1 << 20)),
    ] {
        for bytes in [8 << 10, 128 << 10] {
            compare(&format!("{} KiB {name}", bytes >> 10), load, &|run| {
                slice(text, (run + 1) * (bytes + 13), bytes)
            });
        }
    }
    shared(&load(), &prose);
}

/// One row: texts that do not overlap, each encoded twice by both encoders.
fn compare<'t>(name: &str, load: &dyn Fn() -> Tokenizer, text: &dyn Fn(usize) -> &'t str) {
    let (own, theirs) = (load(), load());
    theirs.compare_with_reference("a", SpecialTokens::Omit, &[]);
    let encode = |tokenizer: &Tokenizer, run: usize| {
        tokenizer.encode(text(run), SpecialTokens::Omit).unwrap()
    };
    // The last text warms up both encoders.
    assert_eq!(encode(&own, RUNS), encode(&theirs, RUNS));
    let own_us = median(|run| drop(encode(&own, run)));
    let reference_us = median(|run| drop(encode(&theirs, run)));
    let cached_us = median(|run| drop(encode(&own, run)));
    let ratio = reference_us / own_us;
    println!("| {name} | {own_us:.0} | {reference_us:.0} | {ratio:.0} | {cached_us:.0} |");
}

/// Prompts that share most of their text, without a chat's structure or inside one message.
fn shared(tokenizer: &Tokenizer, prose: &str) {
    let document = slice(prose, 0, 126 << 10);
    let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Omit);
    encode(document).unwrap();
    let completion = median(|run| {
        let end = slice(prose, run * 7919 + 200_000, 4 << 10);
        encode(&format!("{document}{end}")).unwrap();
    });
    let question = median(|run| {
        let asked = slice(prose, run * 10_473 + 190_000, 200);
        encode(&format!("<|im_start|>user\n{asked}\n{document}<|im_end|>")).unwrap();
    });
    println!("\n130 KiB with a shared prefix of 126 KiB: {completion:.0} µs");
    println!("a shared document of 126 KiB after a new question: {question:.0} µs");
    let mut body = String::from("{\"model\":\"m\",\"messages\":[");
    for turn in 0..30 {
        let text = slice(prose, turn * 2100, 2100).replace(['"', '\\', '\n', '\t'], " ");
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        write!(body, "{{\"role\":\"{role}\",\"content\":\"{text}\"}},").unwrap();
    }
    encode_body(tokenizer, &format!("{}]}}", body.trim_end_matches(','))).unwrap();
    let turn = median(|run| {
        let asked = slice(prose, run * 10_473 + 190_000, 2000);
        let asked = asked.replace(['"', '\\', '\n', '\t'], " ");
        let last = format!("{{\"role\":\"user\",\"content\":\"{asked}\"}}]}}");
        encode_body(tokenizer, &format!("{body}{last}")).unwrap();
    });
    println!("turn 30 of a chat of 63 KB, with parsing and rendering: {turn:.0} µs");
}

/// Tokens of a body, as the router prepares it.
fn encode_body(tokenizer: &Tokenizer, body: &str) -> Result<usize, String> {
    let chat = body.contains("\"messages\"");
    let route = if chat {
        PromptRoute::ChatCompletions
    } else {
        PromptRoute::Completions
    };
    let request = parse(route, body.as_bytes()).map_err(|error| error.to_string())?;
    let (text, special) = match &request.prompt {
        PromptSource::Chat(parts) => {
            let text = tokenizer.render_chat(parts, CivilTime::from_unix(0));
            (
                text.map_err(|error| error.to_string())?,
                parts.special_tokens,
            )
        }
        PromptSource::Completion(parts) => match &parts.prompts {
            PromptList::Texts(texts) => (texts[0].clone().into_owned(), parts.special_tokens),
            PromptList::Tokens(lists) => return Ok(lists[0].len()),
        },
    };
    let mut task = tokenizer.task(text, special).with_tokens_max(TOKENS_MAX);
    while task
        .step(tokenizer, 64 << 10)
        .map_err(|error| error.to_string())?
        == TaskState::More
    {}
    Ok(task.ids().len())
}

/// A line of `/proc/self/status`, in bytes.
fn memory(line: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let found = status.lines().find_map(|l| l.strip_prefix(line)).unwrap();
    let kilobytes: usize = found.trim().trim_end_matches(" kB").parse().unwrap();
    kilobytes << 10
}

const INDENTED_TOOL: &str = "a tool, with indentation";

/// A tool whose text would have twenty times its bytes.
fn indented_tool(strings: &str) -> String {
    let (open, close) = ("[".repeat(118), "]".repeat(118));
    let function = format!("{{\"name\":\"f\",\"parameters\":{open}{strings}1{close}}}");
    let tool = format!("{{\"type\":\"function\",\"function\":{function}}}");
    let message = "{\"role\":\"user\",\"content\":\"x\"}";
    format!("{{\"model\":\"m\",\"messages\":[{message}],\"tools\":[{tool}]}}")
}

/// A template that prints tools with indentation.
fn indenting() -> ChatTemplates {
    let source = include_str!("../testdata/templates/llama31_tools.jinja");
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    ChatTemplates::single(source.to_owned(), tokens).unwrap()
}

fn hostile(path: &str, only: Option<&str>) {
    let size = 8 << 20;
    let repeat = |unit: &str| unit.repeat(size / unit.len());
    let chat = |text: String| {
        format!("{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}}]}}")
    };
    let messages = repeat("{\"role\":\"user\",\"content\":\"x\"},");
    let tools = repeat("[[],1,{\"a\":{}}],");
    let bodies = [
        (
            "chat, prose",
            chat(repeat("The quick brown fox jumps over it. ")),
        ),
        ("chat, one-token bytes", chat(repeat("\\u0001 ꙮ"))),
        ("chat, added tokens", chat(repeat("<|im_end|>"))),
        ("chat, CJK", chat(repeat("路由器把每个请求发送。"))),
        ("chat, NFD", chat(repeat("e\u{301}\u{323} "))),
        ("chat, marks", chat(repeat("\u{301}\u{316}"))),
        ("chat, expands under NFC", chat(repeat("\u{1d15f} "))),
        ("chat, one word", chat(repeat("a"))),
        ("chat, blanks", chat(repeat(" "))),
        ("chat, escapes", chat(repeat("\\n"))),
        ("chat, digits", chat(repeat("7"))),
        (
            "completion, prose",
            format!(
                "{{\"model\":\"m\",\"prompt\":\"{}\"}}",
                repeat("The quick brown fox jumps over it. ")
            ),
        ),
        (
            "many messages",
            format!(
                "{{\"model\":\"m\",\"messages\":[{}]}}",
                messages.trim_end_matches(',')
            ),
        ),
        (
            "many values",
            chat("x".to_owned()).replace("}]}", &format!("}}],\"documents\":[{tools}1]}}")),
        ),
        (
            INDENTED_TOOL,
            indented_tool(&repeat("\"abcdefghijklmnopqrs\",")),
        ),
    ];
    match only {
        None => {
            println!("\n| body of 8 MiB | peak bytes a body byte | CPU, ms | result |");
            println!("|---|---|---|---|");
            for (name, _) in bodies {
                // A process of its own has no memory left from another body.
                let program = std::env::current_exe().unwrap();
                let status = Command::new(program).arg(path).arg(name).status();
                assert!(status.unwrap().success(), "{name}");
            }
        }
        Some(only) => {
            let body = bodies.into_iter().find(|(name, _)| *name == only);
            let mut tokenizer = Tokenizer::load(Path::new(path)).unwrap();
            if only == INDENTED_TOOL {
                tokenizer = tokenizer.with_templates(indenting());
            }
            peak(&tokenizer, only, &body.unwrap().1);
        }
    }
}

fn peak(tokenizer: &Tokenizer, name: &str, body: &str) {
    let before = memory("VmRSS:");
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let started = cpu_us();
    let result = encode_body(tokenizer, body);
    let took = (cpu_us() - started) / 1000.0;
    let peak = memory("VmHWM:") - before + body.len();
    let result = result.map_or_else(|why| why, |tokens| format!("{tokens} tokens"));
    let ratio = peak as f64 / body.len() as f64;
    println!("| {name} | {ratio:.1} | {took:.0} | {result} |");
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .unwrap_or_else(|| "tests/fixtures/tiny".to_owned());
    let only = args.next();
    if only.is_none() {
        encoders(&|| Tokenizer::load(Path::new(&path)).unwrap());
    }
    hostile(&path, only.as_deref());
}
