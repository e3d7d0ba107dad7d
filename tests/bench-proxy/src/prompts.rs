//! The texts of prompts that are tokenized: sentences of this repository's documents, paragraphs of
//! its code or sentences in nine languages, in an order of their own for each text.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};

/// Documents that prompts share.
const SHARED_TEXTS: u64 = 8;

/// Seeds of the others.
const NEW_TEXTS: u64 = 1 << 32;

/// Sentences with different numbers, for each language.
const NUMBERED: usize = 2000;

/// Those of the router's `prompt_bench`.
const LANGUAGES: [&str; 9] = [
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

pub struct Prompts {
    pub corpus: Corpus,
    /// Sentences or paragraphs.
    pieces: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corpus {
    Prose,
    Code,
    Multilingual,
}

/// Pages of `docs` whose sentences are prompts of prose.
const PAGES: [&str; 7] = [
    "ARCHITECTURE",
    "CLIENTS",
    "OPERATIONS",
    "PROMPTS",
    "PROTOCOL",
    "RELIABILITY",
    "WORKERS",
];

/// What an engine has of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Novelty {
    /// Nothing.
    New,
    /// One of some documents, with a question of a tenth of the text.
    MostlySeen,
}

impl Prompts {
    pub fn prose() -> anyhow::Result<Self> {
        let mut pieces = Vec::new();
        for name in PAGES {
            let path = format!("docs/{name}.md");
            let text = fs::read_to_string(&path).with_context(|| path.clone())?;
            let plain = text.replace(['"', '\\', '\t'], "").replace('\n', " ");
            pieces.extend(plain.split_inclusive(". ").map(str::to_owned));
        }
        Self::of(Corpus::Prose, pieces)
    }

    pub fn code() -> anyhow::Result<Self> {
        let mut pieces = Vec::new();
        add_code(Path::new("router/src"), &mut pieces)?;
        // The order of a folder's entries differs between machines.
        pieces.sort_unstable();
        Self::of(Corpus::Code, pieces)
    }

    pub fn multilingual() -> anyhow::Result<Self> {
        let numbered = |number| LANGUAGES.map(|sentence| format!("{sentence} {number}\n"));
        let pieces = (0..NUMBERED).flat_map(numbered).collect();
        Self::of(Corpus::Multilingual, pieces)
    }

    fn of(corpus: Corpus, pieces: Vec<String>) -> anyhow::Result<Self> {
        ensure!(pieces.len() > 500, "{corpus:?}: {} pieces", pieces.len());
        Ok(Self { corpus, pieces })
    }

    /// The text of one request.
    pub fn prompt(&self, novelty: Novelty, number: usize, bytes: usize) -> String {
        let number = number as u64;
        match novelty {
            Novelty::New => self.text(NEW_TEXTS + number, bytes),
            Novelty::MostlySeen => {
                let mut text = self.text(number % SHARED_TEXTS, bytes / 10 * 9);
                text.push_str(&self.text(NEW_TEXTS + number, bytes - text.len()));
                text
            }
        }
    }

    /// Pieces chosen by the seed, up to the length.
    fn text(&self, seed: u64, bytes: usize) -> String {
        // SplitMix64.
        let mut state = seed;
        let mut text = String::with_capacity(bytes + 1024);
        while text.len() < bytes {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let index = (mixed ^ (mixed >> 31)) % self.pieces.len() as u64;
            text.push_str(&self.pieces[index as usize]);
        }
        text.truncate(text.floor_char_boundary(bytes));
        text
    }
}

/// Adds the paragraphs of all files below.
fn add_code(folder: &Path, pieces: &mut Vec<String>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("{}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            add_code(&path, pieces)?;
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path)?;
            pieces.extend(text.split_inclusive("\n\n").map(str::to_owned));
        }
    }
    Ok(())
}

/// A text as it stands in a string of JSON.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + text.len() / 8);
    for character in text.chars() {
        match character {
            '"' => escaped.push_str("\\\""),
            '\\' => escaped.push_str("\\\\"),
            '\n' => escaped.push_str("\\n"),
            control if control < ' ' => {
                // Writing into a string does not fail.
                let _ = write!(escaped, "\\u{:04x}", u32::from(control));
            }
            other => escaped.push(other),
        }
    }
    escaped
}
