//! Reads the part of regular expressions that pre-tokenizers use: alternatives of repeated
//! character sets, a negative lookahead of one character at the end of an alternative, and a group
//! at the end of an alternative. Sets stay text, for the reference's engine to interpret. All else
//! is not read, and the reference splits such texts.

/// One element of an alternative. A set is a position in [`Pattern::sets`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node<S = usize> {
    /// Greedy.
    Repeat { set: S, min: u32, max: u32 },
    /// The next character, if any, is not in the set.
    NotAhead(S),
    /// The last element of an alternative.
    Group {
        alternatives: Vec<Vec<Self>>,
        presence: Presence,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Required,
    Optional,
}

/// An expression, tried alternative by alternative.
#[derive(Debug)]
pub(super) struct Pattern {
    pub alternatives: Vec<Vec<Node>>,
    pub sets: Vec<String>,
    /// What is matched without regard to case: each two or three sets next to each other.
    pub caseless: Vec<String>,
}

/// The begin of a group or set that is matched without regard to case.
pub(super) const CASELESS: &str = "(?i:";

/// How letters are matched.
#[derive(Clone, Copy)]
enum LetterCase {
    Exact,
    Ignored,
}

struct PatternReader<'p> {
    rest: &'p str,
    sets: Vec<String>,
    caseless: Vec<String>,
}

/// Reads an expression; `None` if it has other elements.
pub(super) fn read(expression: &str) -> Option<Pattern> {
    let mut reader = PatternReader {
        rest: expression,
        sets: Vec::new(),
        caseless: Vec::new(),
    };
    let alternatives = reader.alternatives(LetterCase::Exact)?;
    let matches_text = |alternative: &Vec<Node>| {
        alternative.iter().any(|node| match node {
            Node::Repeat { min, .. } => *min > 0,
            Node::NotAhead(_) => false,
            Node::Group { presence, .. } => *presence == Presence::Required,
        })
    };
    let is_read = reader.rest.is_empty() && alternatives.iter().all(matches_text);
    is_read.then_some(Pattern {
        alternatives,
        sets: reader.sets,
        caseless: reader.caseless,
    })
}

impl PatternReader<'_> {
    fn take(&mut self, prefix: &str) -> bool {
        let rest = self.rest.strip_prefix(prefix);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn alternatives(&mut self, case: LetterCase) -> Option<Vec<Vec<Node>>> {
        let mut alternatives = vec![self.alternative(case)?];
        while self.take("|") {
            alternatives.push(self.alternative(case)?);
        }
        Some(alternatives)
    }

    fn alternative(&mut self, case: LetterCase) -> Option<Vec<Node>> {
        let mut nodes = Vec::new();
        while !self.rest.is_empty() && !self.rest.starts_with(['|', ')']) {
            let is_last = matches!(nodes.last(), Some(Node::Group { .. } | Node::NotAhead(_)));
            if is_last {
                return None;
            }
            nodes.push(self.node(case)?);
        }
        (!nodes.is_empty()).then_some(nodes)
    }

    fn node(&mut self, case: LetterCase) -> Option<Node> {
        if self.take("(?!") {
            let set = self.set(case)?;
            return self.take(")").then_some(Node::NotAhead(set));
        }
        let inner = if self.take(CASELESS) {
            Some(LetterCase::Ignored)
        } else if self.take("(?:") {
            Some(case)
        } else {
            None
        };
        if let Some(inner) = inner {
            let alternatives = self.alternatives(inner)?;
            let is_flat = |node: &Node| matches!(node, Node::Repeat { .. });
            if !self.take(")") || !alternatives.iter().flatten().all(is_flat) {
                return None;
            }
            if matches!(inner, LetterCase::Ignored) {
                for nodes in &alternatives {
                    self.add_caseless(nodes)?;
                }
            }
            let presence = if self.take("?") {
                Presence::Optional
            } else {
                Presence::Required
            };
            return (!self.rest.starts_with(['?', '*', '+', '{'])).then_some(Node::Group {
                alternatives,
                presence,
            });
        }
        let set = self.set(case)?;
        let (min, max) = self.bounds()?;
        Some(Node::Repeat { set, min, max })
    }

    /// Repetitions are not read here: whether the engine joins repeated letters is not known.
    fn add_caseless(&mut self, nodes: &[Node]) -> Option<()> {
        let set = |node: &Node| match node {
            Node::Repeat {
                set,
                min: 1,
                max: 1,
            } => Some(
                self.sets[*set]
                    .strip_prefix(CASELESS)?
                    .strip_suffix(')')?
                    .to_owned(),
            ),
            Node::Repeat { .. } | Node::NotAhead(_) | Node::Group { .. } => None,
        };
        let sets: Vec<String> = nodes.iter().map(set).collect::<Option<_>>()?;
        let sequences = [2, 3].into_iter().flat_map(|length| sets.windows(length));
        self.caseless.extend(sequences.map(<[String]>::concat));
        Some(())
    }

    /// The bounds of a repetition. Possessive and lazy ones are not read.
    fn bounds(&mut self) -> Option<(u32, u32)> {
        let bounds = if self.take("?") {
            (0, 1)
        } else if self.take("*") {
            (0, u32::MAX)
        } else if self.take("+") {
            (1, u32::MAX)
        } else if self.take("{") {
            let (inside, rest) = self.rest.split_once('}')?;
            self.rest = rest;
            match inside.split_once(',') {
                None => (inside.parse().ok()?, inside.parse().ok()?),
                Some((min, "")) => (min.parse().ok()?, u32::MAX),
                Some((min, max)) => (min.parse().ok()?, max.parse().ok()?),
            }
        } else {
            return Some((1, 1));
        };
        (bounds.1 > 0 && !self.rest.starts_with(['?', '*', '+', '{'])).then_some(bounds)
    }

    /// One set of characters: a bracket, an escape or a literal.
    fn set(&mut self, case: LetterCase) -> Option<usize> {
        let mut chars = self.rest.chars();
        let length = match chars.next()? {
            '[' => bracket_length(self.rest)?,
            '\\' => match chars.next()? {
                'p' | 'P' if chars.as_str().starts_with('{') => self.rest.find('}')? + 1,
                's' | 'S' | 'd' | 'D' | 'w' | 'W' | 'r' | 'n' | 't' => 2,
                escaped if escaped.is_ascii_punctuation() => 2,
                _ => return None,
            },
            '.' | '^' | '$' | '(' | ')' | '*' | '+' | '?' | '{' | '|' => return None,
            literal => literal.len_utf8(),
        };
        let (set, rest) = self.rest.split_at(length);
        self.rest = rest;
        let set = match case {
            LetterCase::Exact => set.to_owned(),
            LetterCase::Ignored => format!("{CASELESS}{set})"),
        };
        let known = self.sets.iter().position(|known| *known == set);
        Some(known.unwrap_or_else(|| {
            self.sets.push(set);
            self.sets.len() - 1
        }))
    }
}

/// The length of a bracket, with nested ones.
fn bracket_length(text: &str) -> Option<usize> {
    let (mut depth, mut escaped) = (0_u32, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' => depth += 1,
            ']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_expressions_are_not_read() {
        for expression in [
            "",
            "a|",
            "a*",
            "a++",
            "a+?",
            "(?=a)b",
            "(a)",
            "(?:a(?:b))",
            "(?:a)+",
            "(?:a)b",
            "a(?!b)c",
            "\\bword",
            "^a",
            "a.",
            "[a",
            "\\p{L",
            "(?i:s{2})",
        ] {
            assert!(read(expression).is_none(), "{expression}");
        }
        let pattern = read("(?i:'s|'ll)|\\p{N}{1,3}|[^\\s\\p{L}]+[\\r\\n]*|\\s+(?!\\S)").unwrap();
        assert_eq!(pattern.alternatives.len(), 4);
        assert_eq!(pattern.sets[..3], ["(?i:')", "(?i:s)", "(?i:l)"]);
        assert_eq!(pattern.caseless, ["'s", "'l", "ll", "'ll"]);
    }
}
