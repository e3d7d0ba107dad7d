//! What one rendering may do, where filters find it. Fuel counts instructions, and one may copy a
//! text of any length: so a template's source gets filters at load that count what assignments
//! copy, and that ask in each turn of a loop whether the text is still wanted.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::machinery::{Token, tokenize};
use minijinja::value::{Object, Value};
use minijinja::{Environment, Error, ErrorKind, State};

use super::sums::{PlacedToken, closes, opens};
use super::{FUEL, invalid, syntax};
use crate::tokenize::template::IsCancelled;

/// No name that a template can write.
const NAME: &str = "bounds of this rendering";
/// The filter that counts an assigned value. Its argument is the copies that were made of it.
const COPIED: &str = "copied_value";
/// The filter of a loop's turn.
const TURN: &str = "turn_of_loop";

/// The bounds of one rendering.
pub(in crate::tokenize) struct RenderBounds {
    pub(in crate::tokenize) fuel: u64,
    /// Bytes of a text that a filter makes of a value.
    pub(in crate::tokenize) text_bytes_max: usize,
    /// Bytes of texts, and items of lists, that assignments copy.
    pub(in crate::tokenize) copies_max: usize,
    pub(in crate::tokenize) is_cancelled: IsCancelled,
}

/// The bounds, and what has been done.
struct RenderMeter {
    bounds: RenderBounds,
    copies: AtomicUsize,
}

impl fmt::Debug for RenderMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RenderMeter").finish_non_exhaustive()
    }
}

impl Object for RenderMeter {}

impl RenderMeter {
    /// A client's argument may have this name: it stops the rendering.
    fn of(state: &State<'_, '_>) -> Result<Arc<Self>, Error> {
        let found = state.lookup(NAME);
        let found = found.and_then(|value| value.downcast_object::<Self>());
        found.ok_or_else(|| invalid("the rendering has no bounds"))
    }

    fn ask(&self) -> Result<(), Error> {
        if (self.bounds.is_cancelled)() {
            return Err(invalid("the text is no longer wanted"));
        }
        Ok(())
    }
}

/// Bytes of a text that a filter may make of a value.
pub(super) fn text_bytes_max(state: &State<'_, '_>) -> Result<usize, Error> {
    RenderMeter::of(state).map(|meter| meter.bounds.text_bytes_max)
}

/// An environment has no bounds but that of fuel.
pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter(COPIED, copied);
    env.add_filter(TURN, |state: &State<'_, '_>, _: &Value| {
        RenderMeter::of(state)?.ask()
    });
    let bounds = RenderBounds {
        fuel: FUEL,
        text_bytes_max: usize::MAX,
        copies_max: usize::MAX,
        is_cancelled: Arc::new(|| false),
    };
    bounds.set(env);
}

fn copied(state: &State<'_, '_>, value: &Value, copies: usize) -> Result<Value, Error> {
    let meter = RenderMeter::of(state)?;
    let size = value.as_str().map(str::len).or_else(|| value.len());
    let size = size.unwrap_or(0).saturating_mul(copies);
    let before = meter.copies.fetch_add(size, Ordering::Relaxed);
    if size > meter.bounds.copies_max.saturating_sub(before) {
        return Err(Error::from(ErrorKind::OutOfFuel));
    }
    meter.ask()?;
    Ok(value.clone())
}

impl RenderBounds {
    fn set(self, env: &mut Environment<'static>) {
        env.set_fuel(Some(self.fuel));
        let meter = RenderMeter {
            bounds: self,
            copies: AtomicUsize::new(0),
        };
        env.add_global(NAME, Value::from_object(meter));
    }

    /// The environment for one rendering.
    pub(in crate::tokenize) fn apply(self, env: &Environment<'static>) -> Environment<'static> {
        let mut env = env.clone();
        self.set(&mut env);
        env
    }
}

/// The template with `{% set a = (b + c) | copied_value(2) %}` for `{% set a = b + c %}`, and with a
/// filter behind each `{% for … %}`.
pub(super) fn with_meters(source: &str) -> Cow<'_, str> {
    let Some(insertions) = insertions(source).filter(|found| !found.is_empty()) else {
        return Cow::Borrowed(source);
    };
    let mut metered = String::with_capacity(2 * source.len());
    let mut written = 0;
    for (at, text) in insertions {
        metered.push_str(&source[written..at]);
        metered.push_str(&text);
        written = at;
    }
    metered.push_str(&source[written..]);
    Cow::Owned(metered)
}

type Insertion = (usize, String);

/// What to insert, in order; `None` if the template cannot be read.
fn insertions(source: &str) -> Option<Vec<Insertion>> {
    let mut found = Vec::new();
    let mut tag: Option<Vec<PlacedToken<'_>>> = None;
    for token in tokenize(source, false, syntax().ok()?) {
        let (token, span) = token.ok()?;
        let place = span.start_offset as usize..span.end_offset as usize;
        if matches!(token, Token::BlockStart) {
            tag = Some(Vec::new());
        } else if matches!(token, Token::BlockEnd) {
            let tokens = tag.take()?;
            match tokens.first() {
                Some((Token::Ident("for"), _)) => {
                    // The end of the tag, with its control of white space, ends the second one.
                    found.push((
                        place.start,
                        format!(" %}}{{% if none | {TURN} %}}{{% endif "),
                    ));
                }
                Some((Token::Ident("set"), _)) => {
                    found.extend(assignment(&tokens[1..], place.start).into_iter().flatten());
                }
                Some(_) | None => {}
            }
        } else if let Some(tokens) = &mut tag {
            tokens.push((token, place));
        }
    }
    Some(found)
}

/// What to insert into an assignment that may copy: one of a block, or of more than names.
fn assignment(tokens: &[PlacedToken<'_>], end: usize) -> Option<Vec<Insertion>> {
    let mut depth = 0_usize;
    let mut assign = None;
    for (at, (token, _)) in tokens.iter().enumerate() {
        if opens(token) {
            depth += 1;
        } else if closes(token) {
            depth = depth.checked_sub(1)?;
        } else if matches!(token, Token::Assign) && depth == 0 && assign.is_none() {
            assign = Some(at);
        }
    }
    let Some(assign) = assign else {
        return Some(vec![(end, format!(" | {COPIED}(1) "))]);
    };
    let expression = tokens.get(assign + 1..)?;
    let from = expression.first()?.1.start;
    let adds = |token: &Token<'_>| matches!(token, Token::Plus | Token::Tilde);
    let sums = expression.iter().filter(|(token, _)| adds(token)).count();
    let makes = |token: &Token<'_>| matches!(token, Token::Pipe | Token::ParenOpen);
    let may_copy = sums > 0 || expression.iter().any(|(token, _)| makes(token));
    let copies = sums.max(1);
    let counted = (end, format!(") | {COPIED}({copies}) "));
    may_copy.then(|| vec![(from, "(".to_owned()), counted])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_and_loops_are_metered() {
        let metered = |source: &'static str| {
            let metered = with_meters(source);
            let metered = metered.replace(COPIED, "C");
            metered.replace(&format!("{{% if none | {TURN} %}}{{% endif"), "T")
        };
        for (source, expected) in [
            ("{% set a = b + c %}", "{% set a = (b + c ) | C(1) %}"),
            (
                "{%- set n.a=n.a~'\\n' ~ c if d -%}",
                "{%- set n.a=(n.a~'\\n' ~ c if d ) | C(2) -%}",
            ),
            (
                "{% set a, b = f(c=1), d %}",
                "{% set a, b = (f(c=1), d ) | C(1) %}",
            ),
            (
                "{% set a %}x{% endset %}",
                "{% set a  | C(1) %}x{% endset %}",
            ),
            (
                "{% set a | indent(width=2) -%}",
                "{% set a | indent(width=2)  | C(1) -%}",
            ),
            ("{% for a in b -%}", "{% for a in b  %}T -%}"),
            ("{% set a = b[0].c %}", "{% set a = b[0].c %}"),
            ("{% set a = b) + (c %}", "{% set a = b) + (c %}"),
            ("{% if a + b %}{{ a + b }}", "{% if a + b %}{{ a + b }}"),
            (
                "{% raw %}{% for %}{% endraw %}",
                "{% raw %}{% for %}{% endraw %}",
            ),
            ("{% set a = b + c", "{% set a = b + c"),
        ] {
            assert_eq!(metered(source), expected);
        }
    }

    #[test]
    fn a_metered_template_renders_what_it_rendered() {
        let env = super::super::environment().expect("an environment");
        for source in [
            "{% for a in [1, 2] %}\n  {% set b = a + 1 %}\n {{ b }}\n{% else %}x{% endfor %}\n.",
            "a\n  {%- for a in 'xy' -%}  {{ a }}  {%- endfor +%}\n\
             b {% for a in [] +%}\n{% else %}e{% endfor %}",
            "{% set a %} x\n{% endset %}{{ a }}{% set a | upper %}y{% endset %}{{ a }}",
            "{% set a, b = 'x' ~ 1, [2] + [3] %}{{ a }}{{ b }}",
            "{% set a = missing | default(none) if false %}{{ a is undefined }}",
            "{% set n = namespace(a='x', b=[]) %}{% for c in 'yz' %}{% set n.a = n.a + c %}\
             {% set n.b = n.b + [c] %}{% endfor %}{{ n.a }}{{ n.b }}",
        ] {
            let metered = with_meters(source);
            assert_ne!(metered, source);
            let render = |source: &str| env.render_str(source, ()).ok();
            assert_eq!(render(&metered), render(source), "{source}");
            assert!(render(source).is_some(), "{source}");
        }
    }
}
