//! The `{% generation %}` tag, which marks an assistant's text. transformers keeps the content in a
//! scope of its own; `{% with %}` does that too and trims white space like any block tag.

use std::borrow::Cow;

/// The template with `generation` and `endgeneration` replaced by `with` and `endwith`.
pub(in crate::tokenize) fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let word_at = 2 + tag[2..].len() - tag[2..].trim_start_matches(['-', '+']).len();
        let body = tag[word_at..].trim_start();
        let word_at = tag.len() - body.len();
        let word = body
            .split(|c: char| !(c.is_alphanumeric() || c == '_'))
            .next()
            .unwrap_or("");
        let after = &body[word.len()..];
        let closes = after
            .trim_start()
            .trim_start_matches(['-', '+'])
            .starts_with("%}");
        let replacement = match word {
            "generation" if closes => "with",
            "endgeneration" if closes => "endwith",
            "raw" => {
                let end = tag.find("endraw").unwrap_or(tag.len());
                out.push_str(&tag[..end]);
                rest = &tag[end..];
                continue;
            }
            _ => word,
        };
        out.push_str(&tag[..word_at]);
        out.push_str(replacement);
        rest = after;
    }
    out.push_str(rest);
    Cow::Owned(out)
}
