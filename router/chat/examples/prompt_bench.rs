//! Prints what prompts cost: CPU time of the two encoders, hits of the cache, and the peak memory
//! of hostile bodies. Linux only. [PERF.md](../../../docs/PERF.md) has the command and results.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark fails and prints"
)]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use warmroute_chat::openai::{PromptList, PromptRoute, PromptSource, SpecialTokens, parse};
use warmroute_chat::tokenize::{CivilTime, TaskState, Tokenizer};

const RUNS: usize = 5;

/// CPU time of this thread in microseconds.
fn cpu_us() -> f64 {
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
        write!(text, "{sentence} {}\n", state >> 50).unwrap();
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
    let own = load();
    let reference = load();
    reference.compare_with_reference("a", SpecialTokens::Omit, &[]);
    println!("| text | own, µs | reference, µs | ratio | cached, µs |\n|---|---|---|---|---|");
    for (name, text) in [
        ("prose", &prose),
        ("code", &code),
        ("multilingual", &multilingual(1 << 20)),
    ] {
        for bytes in [8 << 10, 128 << 10] {
            let at = |run: usize| slice(text, (run + 1) * 50_021 + bytes, bytes);
            let encode = |tokenizer: &Tokenizer, text: &str| {
                tokenizer.encode(text, SpecialTokens::Omit).unwrap()
            };
            for run in 0..RUNS {
                assert_eq!(encode(&load(), at(run)), encode(&reference, at(run)));
            }
            let theirs = load();
            theirs.compare_with_reference("a", SpecialTokens::Omit, &[]);
            let own_us = median(|run| drop(encode(&own, at(run))));
            let reference_us = median(|run| drop(encode(&theirs, at(run))));
            let cached_us = median(|run| drop(encode(&own, at(run))));
            println!(
                "| {} KiB {name} | {own_us:.0} | {reference_us:.0} | {:.0} | {cached_us:.0} |",
                bytes >> 10,
                reference_us / own_us
            );
        }
    }
    shared(&load(), &prose);
}

/// Prompts that share most of their text, without a chat's structure or inside one message.
fn shared(tokenizer: &Tokenizer, prose: &str) {
    let document = slice(prose, 0, 126 << 10);
    let encode = |text: &str| drop(tokenizer.encode(text, SpecialTokens::Omit));
    encode(document);
    let completion = median(|run| {
        encode(&format!(
            "{document}{}",
            slice(prose, run * 7919 + 200_000, 4 << 10)
        ));
    });
    let question = median(|run| {
        let asked = slice(prose, run * 104_729 + 90_000, 200);
        encode(&format!("<|im_start|>user\n{asked}\n{document}<|im_end|>"));
    });
    println!("\n130 KiB with a shared prefix of 126 KiB: {completion:.0} µs");
    println!("a shared document of 126 KiB after a new question: {question:.0} µs");
    let mut body = String::from("{\"model\":\"m\",\"messages\":[");
    for turn in 0..30 {
        let text = slice(prose, turn * 2100, 2100).replace(['"', '\\', '\n', '\t'], " ");
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        write!(body, "{{\"role\":\"{role}\",\"content\":\"{text}\"}},").unwrap();
    }
    encode_body(tokenizer, &format!("{}]}}", body.trim_end_matches(',')));
    let turn = median(|run| {
        let asked =
            slice(prose, run * 104_729 + 90_000, 2000).replace(['"', '\\', '\n', '\t'], " ");
        encode_body(
            tokenizer,
            &format!("{body}{{\"role\":\"user\",\"content\":\"{asked}\"}}]}}"),
        );
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
    let mut task = tokenizer.task(text, special);
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

fn hostile(load: &dyn Fn() -> Tokenizer) {
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
    ];
    println!("\n| body of 8 MiB | peak bytes a body byte | CPU, ms | result |\n|---|---|---|---|");
    for (name, body) in bodies {
        let tokenizer = load();
        let before = memory("VmRSS:");
        fs::write("/proc/self/clear_refs", "5").unwrap();
        let started = cpu_us();
        let result = encode_body(&tokenizer, &body);
        let took = cpu_us() - started;
        let peak = memory("VmHWM:") - before + body.len();
        let result = result.map_or_else(|why| why, |tokens| format!("{tokens} tokens"));
        let ratio = peak as f64 / body.len() as f64;
        println!("| {name} | {ratio:.1} | {:.0} | {result} |", took / 1000.0);
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .unwrap_or_else(|| "tests/fixtures/tiny".to_owned());
    let load = || Tokenizer::load(Path::new(&path)).unwrap();
    encoders(&load);
    hostile(&load);
}
