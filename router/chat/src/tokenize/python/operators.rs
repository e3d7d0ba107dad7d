//! Operators and attributes that mean something else in Python than in minijinja, as filters: `~`,
//! `%` behind a literal text, `+` where texts may be marked as safe, and attributes and constant
//! items with the name of a method. A call of a method stays as it is.

use std::borrow::Cow;

use minijinja::machinery::{Token, tokenize};

use super::attributes::is_method_name;
use super::sums::{PlacedToken, closes, is_text, opens};
use super::syntax;

/// The filters that the rewritten expressions use. No template can have them.
pub(super) const CONCAT: &str = "texts_of";
pub(super) const ADD: &str = "sum_with";
pub(super) const PRINTF: &str = "printf_of";
pub(super) const ATTRIBUTE: &str = "attribute_of";
pub(super) const ITEM: &str = "item_of";

/// Words that stand between operands.
const OPERATOR_WORDS: &[&str] = &["if", "else", "and", "or", "not", "in", "is"];
/// Filters that mark a text as safe: adding to it escapes the other text.
const MARKING: &[&str] = &["safe", "escape", "e", "forceescape"];

/// The template with filters for these operators.
pub(super) fn with_python_operators(source: &str) -> Cow<'_, str> {
    let Some(tags) = tags(source) else {
        return Cow::Borrowed(source);
    };
    let adds_safe = marks_safe(&tags);
    let mut rewritten = String::with_capacity(2 * source.len());
    let mut copied = 0;
    for tag in &tags {
        let (Some(first), Some(last)) = (tag.tokens.first(), tag.tokens.last()) else {
            continue;
        };
        if let Some(text) = Rewriter::new(source, tag, adds_safe).and_then(|tag| tag.rewritten()) {
            rewritten.push_str(&source[copied..first.1.start]);
            rewritten.push_str(&text);
            copied = last.1.end;
        }
    }
    rewritten.push_str(&source[copied..]);
    Cow::Owned(rewritten)
}

/// Whether a template marks texts as safe.
pub(super) fn marks_texts_safe(source: &str) -> bool {
    tags(source).is_some_and(|tags| marks_safe(&tags))
}

fn marks_safe(tags: &[Tag<'_>]) -> bool {
    let mut pairs = tags.iter().flat_map(|tag| tag.tokens.windows(2));
    pairs.any(|pair| match pair {
        [(Token::Pipe, _), (Token::Ident(name), _)] => MARKING.contains(name),
        _ => false,
    })
}

/// The tokens between the delimiters of one tag.
struct Tag<'t> {
    tokens: Vec<PlacedToken<'t>>,
    is_printed: bool,
}

/// `None` if the template cannot be read.
fn tags(source: &str) -> Option<Vec<Tag<'_>>> {
    let mut tags = Vec::new();
    let mut open: Option<Tag<'_>> = None;
    for token in tokenize(source, false, syntax().ok()?) {
        let (token, span) = token.ok()?;
        let place = span.start_offset as usize..span.end_offset as usize;
        if matches!(token, Token::VariableStart | Token::BlockStart) {
            open = Some(Tag {
                tokens: Vec::new(),
                is_printed: matches!(token, Token::VariableStart),
            });
        } else if matches!(token, Token::VariableEnd | Token::BlockEnd) {
            tags.push(open.take()?);
        } else if let Some(tag) = &mut open {
            tag.tokens.push((token, place));
        }
    }
    Some(tags)
}

/// Writes the expressions of one tag. Ranges are indexes of tokens, without those inside brackets.
struct Rewriter<'t> {
    source: &'t str,
    tag: &'t Tag<'t>,
    /// For each opening bracket its closing one.
    partners: Vec<usize>,
    adds_safe: bool,
}

impl<'t> Rewriter<'t> {
    /// `None` if brackets have no partners.
    fn new(source: &'t str, tag: &'t Tag<'t>, adds_safe: bool) -> Option<Self> {
        let mut partners = vec![0; tag.tokens.len()];
        let mut open = Vec::new();
        for (at, (token, _)) in tag.tokens.iter().enumerate() {
            if opens(token) {
                open.push(at);
            } else if closes(token) {
                partners[open.pop()?] = at;
            }
        }
        open.is_empty().then_some(Self {
            source,
            tag,
            partners,
            adds_safe,
        })
    }

    /// `None` for a tag that stays.
    fn rewritten(&self) -> Option<String> {
        let end = self.tag.tokens.len();
        let text = if self.tag.is_printed {
            self.printed_parts(end).unwrap_or_else(|| self.list(0, end))
        } else {
            let names = self.target_end();
            let mut text = String::new();
            for at in 0..names {
                self.push_raw(&mut text, 0, at);
            }
            if names < end {
                self.push_gap(&mut text, 0, names);
                text.push_str(&self.list(names, end));
            }
            text
        };
        let (first, last) = (self.tag.tokens.first()?, self.tag.tokens.last()?);
        (text != self.source[first.1.start..last.1.end]).then_some(text)
    }

    /// The tokens of a statement before its expressions: its name, and what an assignment sets.
    fn target_end(&self) -> usize {
        let tokens = &self.tag.tokens;
        if !matches!(tokens.first(), Some((Token::Ident("set"), _))) {
            return 1;
        }
        let assigns = |(token, _): &PlacedToken<'_>| matches!(token, Token::Assign);
        tokens
            .iter()
            .position(assigns)
            .map_or(tokens.len(), |at| at + 1)
    }

    /// A printed chain of `~`, printed part by part.
    fn printed_parts(&self, end: usize) -> Option<String> {
        let is_chain = !self
            .tops(0, end)
            .any(|at| self.separates(0, at) || self.adds(0, at));
        let parts = self.split(0, end, |token| matches!(token, Token::Tilde));
        if !is_chain || parts.len() < 2 || parts.iter().any(|(from, to)| from == to) {
            return None;
        }
        let parts = parts.iter().map(|(from, to)| self.product(*from, *to));
        Some(parts.collect::<Vec<_>>().join(" }}{{ "))
    }

    /// The tokens of a range that lie in none of its brackets; of those the opening one.
    fn tops(&self, from: usize, to: usize) -> impl Iterator<Item = usize> {
        let mut at = from;
        std::iter::from_fn(move || {
            let found = (at < to).then_some(at)?;
            at = self.partners[found].max(found) + 1;
            Some(found)
        })
    }

    fn token(&self, at: usize) -> &Token<'t> {
        &self.tag.tokens[at].0
    }

    fn is_word(&self, at: usize, word: &str) -> bool {
        matches!(self.token(at), Token::Ident(found) if *found == word)
    }

    /// The name or word that a token is.
    fn word(&self, at: usize) -> Option<&'t str> {
        if let Token::Ident(word) = self.token(at) {
            Some(word)
        } else {
            None
        }
    }

    /// Whether an operand ends with this token.
    fn ends_operand(&self, at: usize) -> bool {
        let token = self.token(at);
        let is_number = matches!(token, Token::Int(_) | Token::Int128(_) | Token::Float(_));
        let is_name = self
            .word(at)
            .is_some_and(|word| !OPERATOR_WORDS.contains(&word));
        is_number || is_name || closes(token) || is_text(token)
    }

    /// Whether a token binds less than `+`, in a range that begins at `from`.
    fn separates(&self, from: usize, at: usize) -> bool {
        let follows = |at: usize, word: &str| at > from && self.is_word(at - 1, word);
        match self.word(at) {
            Some("if" | "else" | "and" | "or") => true,
            Some("not") => !follows(at, "is"),
            Some("in") => {
                let is_test = follows(at, "is") || follows(at, "not") && follows(at - 1, "is");
                !is_test
            }
            Some(_) => false,
            None => matches!(
                self.token(at),
                Token::Comma
                    | Token::Colon
                    | Token::Assign
                    | Token::Eq
                    | Token::Ne
                    | Token::Lt
                    | Token::Lte
                    | Token::Gt
                    | Token::Gte
            ),
        }
    }

    /// Whether a token is a `+` or `-` between two operands.
    fn adds(&self, from: usize, at: usize) -> bool {
        let is_operator = matches!(self.token(at), Token::Plus | Token::Minus);
        is_operator && at > from && self.ends_operand(at - 1)
    }

    /// The ranges between such tokens.
    fn split(
        &self,
        from: usize,
        to: usize,
        splits: impl Fn(&Token<'_>) -> bool,
    ) -> Vec<(usize, usize)> {
        let mut parts = Vec::new();
        let mut start = from;
        for at in self.tops(from, to).filter(|at| splits(self.token(*at))) {
            parts.push((start, at));
            start = at + 1;
        }
        parts.push((start, to));
        parts
    }

    /// The white space before a token, unless it is the first one of its range.
    fn push_gap(&self, out: &mut String, from: usize, at: usize) {
        if at > from {
            let tokens = &self.tag.tokens;
            out.push_str(&self.source[tokens[at - 1].1.end..tokens[at].1.start]);
        }
    }

    fn push_raw(&self, out: &mut String, from: usize, at: usize) {
        self.push_gap(out, from, at);
        out.push_str(&self.source[self.tag.tokens[at].1.clone()]);
    }

    /// The source of a range, for an expression that is none.
    fn raw(&self, from: usize, to: usize) -> String {
        let tokens = self.tag.tokens.get(from..to).unwrap_or_default();
        match (tokens.first(), tokens.last()) {
            (Some(first), Some(last)) => self.source[first.1.start..last.1.end].to_owned(),
            _ => String::new(),
        }
    }

    /// Pieces between the tokens of `cuts`, and these tokens themselves.
    fn pieces(
        &self,
        from: usize,
        to: usize,
        cuts: &[usize],
        piece: impl Fn(usize, usize) -> String,
    ) -> String {
        let mut out = String::new();
        let mut start = from;
        for cut in cuts.iter().copied().chain([to]) {
            if start < cut {
                self.push_gap(&mut out, from, start);
                out.push_str(&piece(start, cut));
            }
            if cut < to {
                self.push_raw(&mut out, from, cut);
            }
            start = cut + 1;
        }
        out
    }

    /// Expressions and what separates them.
    fn list(&self, from: usize, to: usize) -> String {
        let cuts: Vec<usize> = self
            .tops(from, to)
            .filter(|at| self.separates(from, *at))
            .collect();
        self.pieces(from, to, &cuts, |from, to| self.sum(from, to))
    }

    fn sum(&self, from: usize, to: usize) -> String {
        let cuts: Vec<usize> = self
            .tops(from, to)
            .filter(|at| self.adds(from, *at))
            .collect();
        let is_sum =
            !cuts.is_empty() && cuts.iter().all(|at| matches!(self.token(*at), Token::Plus));
        if !(self.adds_safe && is_sum) {
            return self.pieces(from, to, &cuts, |from, to| self.concat(from, to));
        }
        let mut out = String::new();
        let mut start = from;
        for cut in cuts.into_iter().chain([to]) {
            let operand = self.concat(start, cut);
            out = match start == from {
                true => operand,
                false => format!("(({out})|{ADD}({operand}))"),
            };
            start = cut + 1;
        }
        out
    }

    fn concat(&self, from: usize, to: usize) -> String {
        let parts = self.split(from, to, |token| matches!(token, Token::Tilde));
        if parts.iter().any(|(from, to)| from == to) {
            return self.raw(from, to);
        }
        let mut parts = parts.into_iter().map(|(from, to)| self.product(from, to));
        let first = parts.next().unwrap_or_default();
        let others: Vec<String> = parts.collect();
        if others.is_empty() {
            return first;
        }
        format!("(({first})|{CONCAT}({}))", others.join(", "))
    }

    fn product(&self, from: usize, to: usize) -> String {
        let after = (from..to).find(|at| !is_text(self.token(*at)));
        let Some(sign) = after.filter(|at| *at > from && matches!(self.token(*at), Token::Mod))
        else {
            return self.chain(from, to);
        };
        let binds_alike = |at: &usize| {
            let token = self.token(*at);
            matches!(
                token,
                Token::Mul | Token::Div | Token::FloorDiv | Token::Mod
            )
        };
        let end = self.tops(sign + 1, to).find(binds_alike).unwrap_or(to);
        if end == sign + 1 {
            return self.raw(from, to);
        }
        let (text, value) = (self.chain(from, sign), self.chain(sign + 1, end));
        let mut out = format!("(({text})|{PRINTF}({value}))");
        if end < to {
            self.push_gap(&mut out, from, end);
            out.push_str(&self.chain(end, to));
        }
        out
    }

    /// Operands with their attributes, items, calls and filters.
    fn chain(&self, from: usize, to: usize) -> String {
        let mut out = String::new();
        // Where the operand begins that the next attribute belongs to.
        let mut operand = None;
        let mut at = from;
        while at < to {
            self.push_gap(&mut out, from, at);
            let token = self.token(at);
            let follows_operand = at > from && self.ends_operand(at - 1);
            let end = self.partners[at].max(at);
            if opens(token) {
                let inner = self.list(at + 1, end);
                let is_item = matches!(token, Token::BracketOpen) && follows_operand;
                match operand.filter(|_| is_item && self.names_method(at + 1, end)) {
                    Some(start) => wrap(&mut out, start, ITEM, &inner),
                    None => {
                        let is_postfix = follows_operand && !matches!(token, Token::BraceOpen);
                        if !is_postfix {
                            operand = Some(out.len());
                        }
                        self.push_bracketed(&mut out, at, end, &inner);
                    }
                }
            } else if matches!(token, Token::Dot) && at + 1 < to {
                match operand.filter(|start| self.reads_method(at, to, &out[*start..])) {
                    Some(start) => {
                        let name = &self.source[self.tag.tokens[at + 1].1.clone()];
                        wrap(&mut out, start, ATTRIBUTE, &format!("\"{name}\""));
                    }
                    None => {
                        out.push('.');
                        self.push_raw(&mut out, from, at + 1);
                    }
                }
                at += 2;
                continue;
            } else {
                let continues_text = is_text(token) && at > from && is_text(self.token(at - 1));
                if !continues_text {
                    operand = self.begins_operand(from, at).then_some(out.len());
                }
                out.push_str(&self.source[self.tag.tokens[at].1.clone()]);
            }
            at = end + 1;
        }
        out
    }

    fn push_bracketed(&self, out: &mut String, open: usize, close: usize, inner: &str) {
        out.push_str(&self.source[self.tag.tokens[open].1.clone()]);
        if open + 1 < close {
            self.push_gap(out, open, open + 1);
            out.push_str(inner);
        }
        self.push_gap(out, open, close);
        out.push_str(&self.source[self.tag.tokens[close].1.clone()]);
    }

    /// Not the name of a filter or a test.
    fn begins_operand(&self, from: usize, at: usize) -> bool {
        let follows = |at: usize, word: &str| at > from && self.is_word(at - 1, word);
        let is_test = follows(at, "is") || follows(at, "not") && follows(at - 1, "is");
        let is_filter = at > from && matches!(self.token(at - 1), Token::Pipe);
        self.ends_operand(at) && !is_test && !is_filter
    }

    /// Whether these are one text that names a method.
    fn names_method(&self, from: usize, to: usize) -> bool {
        let token = self.token(from);
        let name = if let Token::Str(name) = token {
            name
        } else if let Token::String(name) = token {
            name.as_ref()
        } else {
            return false;
        };
        to == from + 1 && is_method_name(name)
    }

    /// Whether the attribute behind a dot may be a method that is not called. A loop's `index` is
    /// none.
    fn reads_method(&self, dot: usize, to: usize, operand: &str) -> bool {
        let is_called = dot + 2 < to && matches!(self.token(dot + 2), Token::ParenOpen);
        let names_method =
            matches!(self.token(dot + 1), Token::Ident(name) if is_method_name(name));
        names_method && !is_called && operand != "loop"
    }
}

/// Makes what `out` has from `start` on the value of a filter.
fn wrap(out: &mut String, start: usize, filter: &str, argument: &str) {
    let operand = out.split_off(start);
    let operand = operand.trim_end();
    out.push_str(&format!("(({operand})|{filter}({argument}))"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(source: &str) -> String {
        let mut text = with_python_operators(source).into_owned();
        for (name, short) in [
            (CONCAT, "C"),
            (ADD, "S"),
            (PRINTF, "P"),
            (ATTRIBUTE, "A"),
            (ITEM, "I"),
        ] {
            text = text.replace(name, short);
        }
        text
    }

    #[test]
    fn operators_become_filters() {
        for (source, expected) in [
            ("{{ a ~ 'b' ~ c.d }}", "{{ a }}{{ 'b' }}{{ c.d }}"),
            ("x {{- a ~ b -}} y", "x {{- a }}{{ b -}} y"),
            ("{% set x = a ~ b ~ 1 %}", "{% set x = ((a)|C(b, 1)) %}"),
            ("{%- set x=a*2~b -%}", "{%- set x=((a*2)|C(b)) -%}"),
            ("{{ 'a' + b ~ c }}", "{{ 'a' + ((b)|C(c)) }}"),
            ("{{ f(a ~ b, -c ~ d) }}", "{{ f(((a)|C(b)), ((-c)|C(d))) }}"),
            ("{% if a ~ b == c %}", "{% if ((a)|C(b)) == c %}"),
            (
                "{% if a ~ b is not in c %}",
                "{% if ((a)|C(b is not in c)) %}",
            ),
            ("{% if not a ~ b in c %}", "{% if not ((a)|C(b)) in c %}"),
            (
                "{% for x in a ~ b if c %}",
                "{% for x in ((a)|C(b)) if c %}",
            ),
            ("{{ a ~ b if c else d }}", "{{ ((a)|C(b)) if c else d }}"),
            (
                "{{ a ~ (b ~ c) | upper }}",
                "{{ a }}{{ (((b)|C(c))) | upper }}",
            ),
            ("{{ '%s' % x }}", "{{ (('%s')|P(x)) }}"),
            (
                "{{ '%s-%s' % (x, y.z) ~ w }}",
                "{{ (('%s-%s')|P((x, y.z))) }}{{ w }}",
            ),
            (
                "{{ '%s' % x | upper * 2 }}",
                "{{ (('%s')|P(x | upper)) * 2 }}",
            ),
            ("{{ a.items }}", "{{ ((a)|A(\"items\")) }}"),
            (
                "{{ -a.b[0].items.type }}",
                "{{ -((a.b[0])|A(\"items\")).type }}",
            ),
            (
                "{{ f(x).values.keys }}",
                "{{ ((((f(x))|A(\"values\")))|A(\"keys\")) }}",
            ),
            ("{{ a['items'].b }}", "{{ ((a)|I('items')).b }}"),
            ("{{ (a).items }}", "{{ (((a))|A(\"items\")) }}"),
            (
                "{% if a.b.items is defined %}",
                "{% if ((a.b)|A(\"items\")) is defined %}",
            ),
            ("{{ a[b.items] }}", "{{ a[((b)|A(\"items\"))] }}"),
            ("{{ 'x'.title }}", "{{ (('x')|A(\"title\")) }}"),
            ("{{ a | safe + b }}", "{{ ((a | safe)|S(b)) }}"),
            ("{{ a | safe + b - c }}", "{{ a | safe + b - c }}"),
        ] {
            assert_eq!(rewritten(source), expected, "{source}");
        }
    }

    #[test]
    fn other_expressions_stay() {
        for source in [
            "{{ a + b }}",
            "{% for k, v in a.items() %}",
            "{{ a.get('items') }}",
            "{{ loop.index }}",
            "{{ a['type'] }}",
            "{{ a[items] }}",
            "{{ ['items'] }}",
            "{{ {'items': 1} }}",
            "{% set ns.items = 1 %}",
            "{% set items | upper %}",
            "{% if loop.index0 % 2 == 0 %}",
            "{{ a | items }}",
            "{{ a is foo.items }}",
            "{% macro m(a='x', b=[1]) %}",
            "{{ a ~ }}",
            "{{ a ~ b",
            "{% raw %}{{ a ~ b }}{% endraw %}",
            "{# {{ a ~ b }} #}",
        ] {
            assert_eq!(rewritten(source), source);
        }
    }
}
