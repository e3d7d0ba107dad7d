//! Case folds of several characters: without regard to case the reference's regex engine takes `st`
//! for `ﬆ`, and `ß` for `ss`. The pattern's reader takes one character for each set, so patterns with
//! such letters next to each other are left to the reference.

use std::sync::LazyLock;

use tokenizers::utils::SysRegex;

use super::pattern::{CASELESS, Pattern};

/// Characters that are several ones in the other case, and those.
static FOLDS: LazyLock<Vec<(String, String)>> = LazyLock::new(|| {
    let folds = ('\0'..=char::MAX).map(|c| {
        let upper = c.to_lowercase().flat_map(char::to_uppercase);
        (c.to_string(), upper.collect())
    });
    let is_several = |fold: &(String, String)| fold.1.chars().nth(1).is_some();
    folds.filter(is_several).collect()
});

/// Whether the engine matches no character with two sets of a pattern, and no two with one set.
/// `None`: the engine does not read one of them.
pub(super) fn are_single(pattern: &Pattern) -> Option<bool> {
    for sequence in &pattern.caseless {
        let regex = SysRegex::new(&format!(r"\A{CASELESS}{sequence})\z")).ok()?;
        if FOLDS.iter().any(|(one, _)| matches(&regex, one)) {
            return Some(false);
        }
    }
    for set in pattern.sets.iter().filter(|set| set.starts_with(CASELESS)) {
        let regex = SysRegex::new(&format!(r"\A(?:{set})\z")).ok()?;
        if FOLDS.iter().any(|(_, several)| matches(&regex, several)) {
            return Some(false);
        }
    }
    Some(true)
}

fn matches(regex: &SysRegex, text: &str) -> bool {
    regex.find_iter(text).next().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenize::bpe::pattern;

    fn is_single(expression: &str) -> bool {
        are_single(&pattern::read(expression).unwrap()).unwrap()
    }

    #[test]
    fn patterns_with_folds_of_several_characters_are_refused() {
        for expression in [
            r"\p{N}+(?i:st|nd|rd|th)?",
            "(?i:x|ss)",
            "(?i:xfI)",
            "(?i:ffi)",
            "(?i:ß)",
            "(?i:x[ß-ü])",
            r"(?i:[\p{L}])",
            "(?i:ﬆ)",
            "(?i:İ)",
            "(?i:ŉ)",
            "(?i:ι\u{308}\u{301})",
        ] {
            assert!(!is_single(expression), "{expression}");
        }
        for expression in [
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            "'(?i:[sdmt]|ll|ve|re)",
            "(?i:nd|rd)",
            "(?i:[a-z])",
            "(?i:s|t)",
            // The engine joins no brackets.
            "(?i:[a-s][t-z])",
            r"(?i:\p{Ll}[^\s])",
            "st|ss|ß|ŉ",
        ] {
            assert!(is_single(expression), "{expression}");
        }
    }

    /// The engine's tables (`unicode_fold_data.c`) have as many.
    #[test]
    fn each_fold_is_refused_both_ways() {
        assert_eq!(FOLDS.len(), 104);
        for (one, several) in FOLDS.iter() {
            for expression in [one, several] {
                assert!(!is_single(&format!("(?i:{expression})")), "{one} {several}");
            }
        }
    }

    /// No other character is one of these strings to the engine.
    #[test]
    fn the_engine_has_no_other_folds() {
        let all: Vec<&str> = FOLDS.iter().map(|(_, several)| several.as_str()).collect();
        let regex = SysRegex::new(&format!("(?i:{})", all.join("|"))).unwrap();
        let chars: String = ('\0'..=char::MAX).flat_map(|c| [c, '\n']).collect();
        let found: Vec<&str> = regex.find_iter(&chars).map(|(a, b)| &chars[a..b]).collect();
        assert!(
            found.iter().eq(FOLDS.iter().map(|(one, _)| one)),
            "{found:?}"
        );
    }
}
