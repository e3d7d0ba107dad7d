//! White space, lines and letter case as Python defines them, where Rust differs.

/// `str.isspace` of one character: Unicode's white space and the four separators 1C to 1F.
pub(in crate::tokenize) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

pub(in crate::tokenize) fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

const LINE_ENDS: [char; 10] = [
    '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}',
];

/// `str.splitlines(keepends=True)`.
pub(super) fn split_lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(LINE_ENDS) {
        let end = rest[at..].chars().next().map_or(1, char::len_utf8);
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            end
        };
        let (line, after) = rest.split_at(at + end);
        lines.push(line);
        rest = after;
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

pub(super) fn without_line_end(line: &str) -> &str {
    let line = line.strip_suffix("\r\n").unwrap_or(line);
    line.strip_suffix(LINE_ENDS).unwrap_or(line)
}

/// `str.title()`: a letter after a letter is lower case, any other is title case.
pub(super) fn title(text: &str) -> String {
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
pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let mut out = String::with_capacity(text.len());
    if let Some(first) = chars.next() {
        push_title_case(&mut out, first);
        out.push_str(&chars.as_str().to_lowercase());
    }
    out
}

/// `str.swapcase()`.
pub(super) fn swap_case(text: &str) -> String {
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

fn is_cased(c: char) -> bool {
    c.is_lowercase()
        || c.is_uppercase()
        || matches!(c, '\u{1c5}' | '\u{1c8}' | '\u{1cb}' | '\u{1f2}')
}

/// Title case is upper case of the first letter only: digraphs and ligatures have own forms.
fn push_title_case(out: &mut String, c: char) {
    match c {
        '\u{1c4}'..='\u{1c6}' => out.push('\u{1c5}'),
        '\u{1c7}'..='\u{1c9}' => out.push('\u{1c8}'),
        '\u{1ca}'..='\u{1cc}' => out.push('\u{1cb}'),
        '\u{1f1}'..='\u{1f3}' => out.push('\u{1f2}'),
        'ß' | '\u{fb00}'..='\u{fb06}' => {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase));
        }
        _ => out.extend(c.to_uppercase()),
    }
}
