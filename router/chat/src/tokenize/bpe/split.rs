//! Splits a text into words as the reference's pre-tokenizer does, and proves where a text may be
//! cut.
//!
//! A **seam** is a pair of adjacent characters between which a cut changes no word. It is proven
//! from the pattern alone: no alternative can match both characters next to each other, so every
//! attempt to match stops there as it does at a text's end; and no lookahead that sees the second
//! one decides an alternative. Matching has no lookbehind, so the text after the cut is split as if
//! it stood alone.

use serde_json::Value;

use super::automaton::{PatternMatch, WordAutomaton};
use super::case_folds;
use super::char_classes::{CharClasses, ClassMask};
use super::pattern::{self, Node, Presence};

/// The pattern of `ByteLevel` with `use_regex`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// A text is refused in which the first pattern matches nothing for longer: a step cannot end there,
/// so that this bounds its time, and the words that it holds.
pub(in crate::tokenize) const UNMATCHED_BYTES_MAX: usize = 512 << 10;

/// Text that attempts to match may look at behind their matches, for each byte of the part that is
/// split, and in addition. Patterns of models need a few bytes, and after a line's end the blanks up
/// to the longest word. One such as `\d+%|\d` looks at all digits for each of them.
const SEEN_OF_BYTE_MAX: usize = 64;
const SEEN_BYTES_MAX: usize = 64 << 10;

/// Several patterns, each applied to the pieces of the one before.
#[derive(Debug)]
pub(super) struct PatternSplitter {
    classes: CharClasses,
    stages: Vec<WordAutomaton>,
    /// By the class of the character before: the classes with which it makes a seam.
    seams: Vec<ClassMask>,
}

type MaskNode = Node<ClassMask>;

/// The text behind their matches that the attempts of one pattern have looked at.
struct SeenText {
    start: usize,
    bytes: usize,
}

/// What one pattern tries, in this order.
type PatternAlternatives = Vec<Vec<MaskNode>>;

/// A word's start and end.
pub(super) type WordSpan = (u32, u32);

impl PatternSplitter {
    /// The splitter of a pre-tokenizer that ends in `ByteLevel`; `None` if it has other parts.
    pub(super) fn new(pre_tokenizer: &Value) -> Option<Self> {
        let single = [pre_tokenizer.clone()];
        let parts = match pre_tokenizer["type"].as_str()? {
            "Sequence" => pre_tokenizer["pretokenizers"].as_array()?.as_slice(),
            _ => &single,
        };
        let (byte_level, splits) = parts.split_last()?;
        let is_plain = byte_level["type"] == "ByteLevel" && byte_level["add_prefix_space"] == false;
        let mut expressions = Vec::new();
        for split in splits {
            let is_isolated = split["behavior"] == "Isolated" && split["invert"] == false;
            if split["type"] != "Split" || !is_isolated {
                return None;
            }
            expressions.push(split["pattern"]["Regex"].as_str()?);
        }
        if byte_level["use_regex"] != false {
            expressions.push(GPT2);
        }
        is_plain.then(|| Self::of_expressions(&expressions))?
    }

    fn of_expressions(expressions: &[&str]) -> Option<Self> {
        let mut sets: Vec<String> = Vec::new();
        let mut patterns = Vec::new();
        for expression in expressions {
            let pattern = pattern::read(expression)?;
            if !case_folds::are_single(&pattern)? {
                return None;
            }
            let places = pattern.sets.into_iter().map(|set| {
                let known = sets.iter().position(|known| *known == set);
                known.unwrap_or_else(|| {
                    sets.push(set);
                    sets.len() - 1
                })
            });
            let places: Vec<usize> = places.collect();
            patterns.push((pattern.alternatives, places));
        }
        let (classes, masks) = CharClasses::new(&sets)?;
        let stages = patterns.iter().map(|(alternatives, places)| {
            let mask = |set: usize| masks[places[set]];
            let masked = alternatives.iter().map(|nodes| masked(nodes, &mask));
            masked.collect()
        });
        let stages: Vec<PatternAlternatives> = stages.collect();
        let seams = seams(&stages, classes.all())?;
        let automata = stages
            .iter()
            .map(|alternatives| WordAutomaton::new(alternatives, &classes));
        let stages = automata.collect::<Option<_>>()?;
        Some(Self {
            classes,
            stages,
            seams,
        })
    }

    /// Appends the words of a text, up to the first match of the first pattern that ends at `until`
    /// or later. Returns its end, which is above 0 for a text and `until` above 0: as matching has no
    /// lookbehind, the rest has the words of a text of its own. `None`: the first pattern does not
    /// match for too long, or a pattern looks at too much text behind its matches.
    pub(super) fn split(
        &self,
        text: &[u8],
        until: usize,
        words: &mut Vec<WordSpan>,
    ) -> Option<usize> {
        let (first, mut at) = (&self.stages[0], 0);
        let (mut unmatched, mut seen) = (0, SeenText::from(0));
        // Only a match ends a part: a later pattern may match across `until`.
        while unmatched < until
            && let Some((_, length)) = self.classes.at(text, at)
        {
            if at - unmatched > UNMATCHED_BYTES_MAX {
                return None;
            }
            let found = first.match_at(&self.classes, text, at);
            seen.count(found, at)?;
            match found.end {
                Some(end) => {
                    self.split_stage(1, text, unmatched..at, words)?;
                    self.split_stage(1, text, at..end, words)?;
                    (at, unmatched) = (end, end);
                }
                None => at += length,
            }
        }
        if at >= text.len() {
            self.split_stage(1, text, unmatched..text.len(), words)?;
            unmatched = text.len();
        }
        Some(unmatched)
    }

    fn split_stage(
        &self,
        number: usize,
        text: &[u8],
        range: std::ops::Range<usize>,
        words: &mut Vec<WordSpan>,
    ) -> Option<()> {
        let Some(stage) = self.stages.get(number) else {
            if !range.is_empty() {
                words.push((range.start as u32, range.end as u32));
            }
            return Some(());
        };
        let text = &text[..range.end];
        let mut unmatched = range.start;
        let (mut at, mut seen) = (range.start, SeenText::from(range.start));
        while let Some((_, length)) = self.classes.at(text, at) {
            let found = stage.match_at(&self.classes, text, at);
            seen.count(found, at)?;
            match found.end {
                Some(end) => {
                    self.split_stage(number + 1, text, unmatched..at, words)?;
                    self.split_stage(number + 1, text, at..end, words)?;
                    (at, unmatched) = (end, end);
                }
                None => at += length,
            }
        }
        self.split_stage(number + 1, text, unmatched..range.end, words)
    }

    /// Whether a cut before the character at `at` changes no word.
    pub(super) fn is_seam(&self, text: &[u8], at: usize) -> bool {
        let before = self.classes.before(text, at);
        let after = self.classes.at(text, at);
        match (before, after) {
            (Some(before), Some((after, _))) => self.seams[usize::from(before)] >> after & 1 == 1,
            _ => false,
        }
    }
}

impl SeenText {
    const fn from(start: usize) -> Self {
        Self { start, bytes: 0 }
    }

    /// `None`: too much of it.
    #[inline]
    fn count(&mut self, found: PatternMatch, at: usize) -> Option<()> {
        let end = found.end.unwrap_or(at);
        self.bytes += found.seen - end;
        let most = SEEN_BYTES_MAX + SEEN_OF_BYTE_MAX * (end - self.start);
        (self.bytes <= most).then_some(())
    }
}

pub(super) fn masked(nodes: &[Node], mask: &impl Fn(usize) -> ClassMask) -> Vec<MaskNode> {
    let convert = |node: &Node| match node {
        Node::Repeat { set, min, max } => MaskNode::Repeat {
            set: mask(*set),
            min: *min,
            max: *max,
        },
        Node::NotAhead(set) => MaskNode::NotAhead(mask(*set)),
        Node::Group {
            alternatives,
            presence,
        } => MaskNode::Group {
            alternatives: alternatives
                .iter()
                .map(|nodes| masked(nodes, mask))
                .collect(),
            presence: *presence,
        },
    };
    nodes.iter().map(convert).collect()
}

const fn has(mask: ClassMask, class: u8) -> bool {
    mask >> class & 1 == 1
}

/// The classes that may begin a match of the nodes.
fn first_of(nodes: &[MaskNode]) -> ClassMask {
    let mut first = 0;
    for node in nodes {
        match node {
            MaskNode::Repeat { set, min, .. } => {
                first |= set;
                if *min > 0 {
                    break;
                }
            }
            MaskNode::NotAhead(_) => {}
            MaskNode::Group { alternatives, .. } => {
                first |= alternatives
                    .iter()
                    .fold(0, |mask, nodes| mask | first_of(nodes));
            }
        }
    }
    first
}

/// Adds, for each class, the classes that may follow it inside a match of the nodes.
fn add_followers(nodes: &[MaskNode], followers: &mut [ClassMask]) {
    for (at, node) in nodes.iter().enumerate() {
        match node {
            MaskNode::Repeat { set, max, .. } => {
                let repeated = if *max > 1 { *set } else { 0 };
                let next = repeated | first_of(&nodes[at + 1..]);
                for class in (0..64_u8).filter(|class| has(*set, *class)) {
                    followers[usize::from(class)] |= next;
                }
            }
            MaskNode::NotAhead(_) => {}
            MaskNode::Group { alternatives, .. } => {
                for nodes in alternatives {
                    add_followers(nodes, followers);
                }
            }
        }
    }
}

/// The classes before which a lookahead after this class may decide a match.
fn add_lookaheads(alternatives: &[Vec<MaskNode>], decided: &mut [ClassMask]) -> Option<()> {
    for (number, nodes) in alternatives.iter().enumerate() {
        let Some(at) = nodes
            .iter()
            .position(|node| matches!(node, MaskNode::NotAhead(_)))
        else {
            continue;
        };
        let [MaskNode::Repeat { set, .. }, MaskNode::NotAhead(ahead)] = &nodes[..=at] else {
            return None;
        };
        for class in (0..64_u8).filter(|class| has(*set, *class)) {
            // `S*T+` before `S+(?!N)` matches whatever ends in a character of both S and T.
            let is_taken_before = alternatives[..number].iter().any(|earlier| {
                matches!(&earlier[..], [
                    MaskNode::Repeat { set: outer, min: 0, max: u32::MAX },
                    MaskNode::Repeat { set: last, min: 1, max: u32::MAX },
                ] if outer & set == *set && has(*last, class))
            });
            if !is_taken_before {
                decided[usize::from(class)] |= ahead;
            }
        }
    }
    Some(())
}

/// By class: the classes with which it makes a seam in all stages. `None` if a stage has other
/// lookaheads than these.
fn seams(stages: &[PatternAlternatives], all: ClassMask) -> Option<Vec<ClassMask>> {
    let mut crossed: Vec<ClassMask> = vec![0; 64];
    for stage in stages {
        for nodes in stage {
            add_followers(nodes, &mut crossed);
        }
        add_lookaheads(stage, &mut crossed)?;
    }
    // What the last stage may leave unmatched is one word.
    let last = stages.last()?;
    let unmatched = last.iter().fold(all, |left, nodes| left & !alone(nodes));
    for class in (0..64_u8).filter(|class| has(unmatched, *class)) {
        crossed[usize::from(class)] |= unmatched;
    }
    Some(crossed.into_iter().map(|mask| !mask).collect())
}

/// The classes of which the nodes match one character, whatever follows it.
fn alone(nodes: &[MaskNode]) -> ClassMask {
    let mut required = 0;
    for node in nodes {
        match node {
            MaskNode::Repeat { min: 0, .. } => {}
            MaskNode::Group { presence, .. } if *presence == Presence::Optional => {}
            MaskNode::Repeat { set, min: 1, .. } if required == 0 => required = *set,
            MaskNode::Repeat { .. } | MaskNode::NotAhead(_) | MaskNode::Group { .. } => return 0,
        }
    }
    required
}

#[cfg(test)]
mod tests;
