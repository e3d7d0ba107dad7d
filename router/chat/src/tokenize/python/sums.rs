//! Printed sums of texts, as in `{{ 'a' + b + c }}`, without the copies that a sum makes: every `+`
//! copies all that is left of it twice, and a message's content is often there.

use std::borrow::Cow;
use std::ops::Range;

use minijinja::machinery::{Token, tokenize};
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error};

use super::{invalid, syntax};

/// The filter that fails where a sum of texts does.
const TEXT_ONLY: &str = "text_of_sum";

/// Names that are operators.
const OPERATOR_WORDS: &[&str] = &["if", "else", "and", "or", "not", "in", "is"];

pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter(TEXT_ONLY, |value: &Value| -> Result<Value, Error> {
        let text = (value.kind() == ValueKind::String).then(|| value.clone());
        text.ok_or_else(|| invalid("only a text can be added to a text"))
    });
}

pub(super) type PlacedToken<'t> = (Token<'t>, Range<usize>);

/// The template with `{{ 'a' }}{{ b | text_of_sum }}` for each `{{ 'a' + b }}`. A sum that begins
/// with a text is one of texts, or fails.
pub(super) fn without_printed_sums(source: &str) -> Cow<'_, str> {
    let Some(sums) = printed_sums(source).filter(|sums| !sums.is_empty()) else {
        return Cow::Borrowed(source);
    };
    let mut rewritten = String::with_capacity(2 * source.len());
    let mut copied = 0;
    for part in sums.iter().flatten() {
        rewritten.push_str(&source[copied..part.operand.end]);
        if !part.is_literal {
            rewritten.push_str(" | ");
            rewritten.push_str(TEXT_ONLY);
        }
        if part.plus.is_some() {
            rewritten.push_str(" }}{{");
        }
        copied = part.plus.as_ref().unwrap_or(&part.operand).end;
    }
    rewritten.push_str(&source[copied..]);
    Cow::Owned(rewritten)
}

/// A part of a sum and the `+` behind it.
#[derive(Debug)]
struct SumPart {
    operand: Range<usize>,
    plus: Option<Range<usize>>,
    is_literal: bool,
}

/// The sums to rewrite, in order; `None` if the template cannot be read.
fn printed_sums(source: &str) -> Option<Vec<Vec<SumPart>>> {
    let mut sums = Vec::new();
    let mut printed: Vec<PlacedToken<'_>> = Vec::new();
    let mut is_printed = false;
    for token in tokenize(source, false, syntax().ok()?) {
        let (token, span) = token.ok()?;
        let place = span.start_offset as usize..span.end_offset as usize;
        if matches!(token, Token::VariableStart) {
            is_printed = true;
        } else if matches!(token, Token::VariableEnd) {
            sums.extend(sum_parts(&printed));
            printed.clear();
            is_printed = false;
        } else if is_printed {
            printed.push((token, place));
        }
    }
    Some(sums)
}

/// The parts of an expression that is a sum of a literal text and others, without operators that
/// bind as `+` does or less.
fn sum_parts(tokens: &[PlacedToken<'_>]) -> Option<Vec<SumPart>> {
    let mut parts = Vec::new();
    let mut depth = 0_usize;
    let mut from = 0;
    for (at, (token, place)) in tokens.iter().enumerate() {
        if opens(token) {
            depth += 1;
        } else if closes(token) {
            depth = depth.checked_sub(1)?;
        } else if depth > 0 {
            continue;
        } else if matches!(token, Token::Plus) {
            parts.push(part(&tokens[from..at], Some(place.clone()))?);
            from = at + 1;
        } else if !binds_more(token) {
            return None;
        }
    }
    parts.push(part(&tokens[from..], None)?);
    let is_sum = parts.len() > 1 && parts[0].is_literal;
    is_sum.then_some(parts)
}

pub(super) const fn opens(token: &Token<'_>) -> bool {
    matches!(
        token,
        Token::ParenOpen | Token::BracketOpen | Token::BraceOpen
    )
}

pub(super) const fn closes(token: &Token<'_>) -> bool {
    matches!(
        token,
        Token::ParenClose | Token::BracketClose | Token::BraceClose
    )
}

/// Whether a token belongs to an operand of `+`: a name, a text, an attribute or a filter.
fn binds_more(token: &Token<'_>) -> bool {
    if let Token::Ident(word) = token {
        !OPERATOR_WORDS.contains(word)
    } else {
        is_text(token) || matches!(token, Token::Dot | Token::Pipe)
    }
}

pub(super) const fn is_text(token: &Token<'_>) -> bool {
    matches!(token, Token::Str(_) | Token::String(_))
}

fn part(operand: &[PlacedToken<'_>], plus: Option<Range<usize>>) -> Option<SumPart> {
    let (first, last) = (operand.first()?, operand.last()?);
    Some(SumPart {
        operand: first.1.start..last.1.end,
        plus,
        is_literal: is_text(&first.0) && operand.len() == 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_texts_are_printed_part_by_part() {
        let rewritten = |source: &'static str| without_printed_sums(source).replace(TEXT_ONLY, "F");
        for (source, expected) in [
            ("{{ 'a' + b }}", "{{ 'a' }}{{ b | F }}"),
            (
                "x {{- '<' + m['role'] + '\\n' + m.content | trim + '>' -}} y",
                "x {{- '<' }}{{ m['role'] | F }}{{ '\\n' }}{{ m.content | trim | F }}{{ '>' -}} y",
            ),
            (
                "{{ 'a' + f(b + c, 1 - 2) }}",
                "{{ 'a' }}{{ f(b + c, 1 - 2) | F }}",
            ),
            (
                "{% set x = 'a' + b %}{{ 'é' + b +}}",
                "{% set x = 'a' + b %}{{ 'é' }}{{ b | F +}}",
            ),
        ] {
            assert_eq!(rewritten(source), expected);
        }
    }

    #[test]
    fn other_expressions_stay() {
        for source in [
            "{{ a + 'b' }}",
            "{{ 1 + 2 }}",
            "{{ 'a' + b if c else d }}",
            "{{ 'a' + b in c }}",
            "{{ 'a' + b is defined }}",
            "{{ 'a' + b == c }}",
            "{{ 'a' + b ~ c }}",
            "{{ 'a' + b * 2 }}",
            "{{ 'a' + -b }}",
            "{{ 'a' | upper + b }}",
            "{{ 'a', b }}",
            "{{ ('a' + b) | trim }}",
            "{{ 'a' + }}",
            "{{ 'a' + b",
            "{% raw %}{{ 'a' + b }}{% endraw %}",
            "{# {{ 'a' + b }} #}",
        ] {
            assert_eq!(without_printed_sums(source), source);
        }
    }

    #[test]
    fn a_sum_with_another_value_fails_as_before() {
        let env = super::super::environment().expect("an environment");
        let source = "{{ 'a' + x }}";
        let rewritten = without_printed_sums(source);
        assert_ne!(rewritten, source);
        for value in ["1", "none", "missing", "true", "[1]", "1.5", "{}", "'b'"] {
            let render = |source: &str| {
                let source = format!("{{% set x = {value} %}}{source}");
                env.render_str(&source, ()).ok()
            };
            assert_eq!(render(&rewritten), render(source), "{value}");
            assert_eq!(render(source).is_some(), value == "'b'", "{value}");
        }
    }
}
