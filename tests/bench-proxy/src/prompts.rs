//! The texts of prompts that are tokenized: sentences of this repository's documents, in an order
//! of their own for each text.

use std::fs;

use anyhow::{Context as _, ensure};

/// Documents that prompts share.
const SHARED_TEXTS: u64 = 8;

/// Seeds of the others.
const NEW_TEXTS: u64 = 1 << 32;

pub struct Prompts {
    sentences: Vec<String>,
}

/// What an engine has of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Novelty {
    /// Nothing.
    New,
    /// One of some documents, with a question of a tenth of the text.
    MostlySeen,
}

impl Prompts {
    pub fn load() -> anyhow::Result<Self> {
        let mut sentences = Vec::new();
        for name in ["CONFIGURATION", "OPERATIONS", "PROTOCOL", "RELIABILITY"] {
            let path = format!("docs/{name}.md");
            let text = fs::read_to_string(&path).with_context(|| path.clone())?;
            // Needs no escapes in JSON.
            let plain = text.replace(['"', '\\', '\t'], "").replace('\n', " ");
            sentences.extend(plain.split_inclusive(". ").map(str::to_owned));
        }
        ensure!(sentences.len() > 500, "{} sentences", sentences.len());
        Ok(Self { sentences })
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

    /// Sentences chosen by the seed, up to the length.
    fn text(&self, seed: u64, bytes: usize) -> String {
        // SplitMix64.
        let mut state = seed;
        let mut text = String::with_capacity(bytes + 1024);
        while text.len() < bytes {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let index = (mixed ^ (mixed >> 31)) % self.sentences.len() as u64;
            text.push_str(&self.sentences[index as usize]);
        }
        text.truncate(text.floor_char_boundary(bytes));
        text
    }
}
