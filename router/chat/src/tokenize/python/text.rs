//! Python's notion of white space, lines and letters where it differs from Rust's.

/// `str.isspace` of one character: Unicode's white space and the four separators 1C to 1F.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

pub(crate) fn strip_start(text: &str) -> &str {
    text.trim_start_matches(is_space)
}

pub(crate) fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// `str.splitlines(keepends)`.
pub(crate) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let is_end = matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        );
        if !is_end {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && chars.peek().is_some_and(|(_, next)| *next == '\n') {
            chars.next();
            end += 1;
        }
        lines.push(&text[start..if keep_ends { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        lines.push(&text[start..]);
    }
    lines
}

/// `str.title()`: a letter after a letter is lower case, any other is title case.
pub(crate) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_letter = false;
    for c in text.chars() {
        if after_letter {
            out.extend(c.to_lowercase());
        } else {
            push_title_case(&mut out, c);
        }
        after_letter = is_cased(c);
    }
    out
}

/// `str.capitalize()`.
pub(crate) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let mut out = String::with_capacity(text.len());
    if let Some(first) = chars.next() {
        push_title_case(&mut out, first);
        out.push_str(&chars.as_str().to_lowercase());
    }
    out
}

/// `str.swapcase()`.
pub(crate) fn swap_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
    }
    out
}

pub(crate) fn is_cased(c: char) -> bool {
    c.is_lowercase()
        || c.is_uppercase()
        || ('\u{1c5}'..='\u{1f2}').contains(&c) && is_title_digraph(c)
}

fn is_title_digraph(c: char) -> bool {
    matches!(c, '\u{1c5}' | '\u{1c8}' | '\u{1cb}' | '\u{1f2}')
}

/// Title case is upper case of the first letter only: digraphs and ligatures have forms of their
/// own.
fn push_title_case(out: &mut String, c: char) {
    match c {
        '\u{1c4}'..='\u{1c6}' => out.push('\u{1c5}'),
        '\u{1c7}'..='\u{1c9}' => out.push('\u{1c8}'),
        '\u{1ca}'..='\u{1cc}' => out.push('\u{1cb}'),
        '\u{1f1}'..='\u{1f3}' => out.push('\u{1f2}'),
        'ß' => out.push_str("Ss"),
        '\u{fb00}'..='\u{fb06}' => {
            let upper: Vec<char> = c.to_uppercase().collect();
            for (at, letter) in upper.iter().enumerate() {
                if at == 0 {
                    out.push(*letter);
                } else {
                    out.extend(letter.to_lowercase());
                }
            }
        }
        _ => out.extend(c.to_uppercase()),
    }
}

/// The number of characters before a byte offset: Python counts code points.
pub(crate) fn chars_before(text: &str, byte: usize) -> usize {
    text[..byte].chars().count()
}
