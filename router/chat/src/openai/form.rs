//! One field of a form (`multipart/form-data`, RFC 7578), found in place.
//!
//! Parts are skipped by their boundaries, and their content is not read. A form is read as the
//! engines' parser reads it: it begins with its first boundary, lines end with CRLF, and the last of
//! repeated fields counts.

use memchr::memmem::Finder;

/// RFC 2046, section 5.1.1.
const BOUNDARY_BYTES_MAX: usize = 70;

/// Longest headers of one part.
const PART_HEAD_MAX: usize = 8 << 10;

/// Parts that are read. A form with more counts as one that cannot be read.
const PARTS_MAX: usize = 2_000;

/// Longest value that is returned.
const VALUE_BYTES_MAX: usize = 1_024;

/// The value of a form's field that is no file. `None`: there is none, or the body is no form.
#[must_use]
pub fn form_field<'b>(content_type: &str, body: &'b [u8], name: &str) -> Option<&'b str> {
    let delimiter = format!("\r\n--{}", boundary(content_type)?);
    let delimiter = delimiter.as_bytes();
    let finder = Finder::new(delimiter);
    let mut start = body;
    while let Some(rest) = start.strip_prefix(b"\r\n") {
        start = rest;
    }
    let mut rest = start.strip_prefix(&delimiter[2..])?;
    let mut found = None;
    for _ in 0..PARTS_MAX {
        if rest.starts_with(b"--") {
            return found;
        }
        let (head, content) = part_head(rest)?;
        let end = finder.find(content)?;
        if is_field(head, name) {
            let value = &content[..end];
            let is_short = value.len() <= VALUE_BYTES_MAX;
            found = is_short.then(|| str::from_utf8(value).ok()).flatten();
        }
        rest = &content[end + delimiter.len()..];
    }
    None
}

/// The boundary that a content type names.
fn boundary(content_type: &str) -> Option<&str> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    let fits = (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len());
    fits.then_some(boundary)
}

/// A part's headers, and what follows them.
fn part_head(part: &[u8]) -> Option<(&[u8], &[u8])> {
    let part = part.strip_prefix(b"\r\n")?;
    if let Some(content) = part.strip_prefix(b"\r\n") {
        return Some((&[], content));
    }
    let searched = &part[..part.len().min(PART_HEAD_MAX)];
    let end = memchr::memmem::find(searched, b"\r\n\r\n")?;
    Some((&part[..end], &part[end + 4..]))
}

/// Whether a part is this field, and no file.
fn is_field(head: &[u8], name: &str) -> bool {
    let Ok(head) = str::from_utf8(head) else {
        return false;
    };
    head.split("\r\n").any(|line| {
        let Some((header, value)) = line.split_once(':') else {
            return false;
        };
        let Some((kind, parameters)) = value.split_once(';') else {
            return false;
        };
        header.trim().eq_ignore_ascii_case("content-disposition")
            && kind.trim().eq_ignore_ascii_case("form-data")
            && parameter(parameters, "name") == Some(name)
            && parameter(parameters, "filename").is_none()
    })
}

/// The value of a header's parameter. A quoted one ends at the next quote.
fn parameter<'t>(parameters: &'t str, name: &str) -> Option<&'t str> {
    let mut rest = parameters;
    loop {
        let (key, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (value, next) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => after.split_at(after.find(';').unwrap_or(after.len())),
        };
        let key = key.trim_matches(|c: char| c == ';' || c.is_ascii_whitespace());
        if key.eq_ignore_ascii_case(name) {
            return Some(value.trim_end());
        }
        rest = next;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=b0";

    fn part(disposition: &str, content: &str) -> String {
        format!("--b0\r\nContent-Disposition: form-data; {disposition}\r\n\r\n{content}\r\n")
    }

    fn model(parts: &[String]) -> Option<String> {
        let body = format!("{}--b0--\r\n", parts.concat());
        form_field(TYPE, body.as_bytes(), "model").map(str::to_owned)
    }

    #[test]
    fn a_field_is_found_wherever_it_is() {
        let file = part(
            "name=\"file\"; filename=\"a.wav\"",
            "\r\n\r\n--b\r\n--b1\r\nRIFF\0",
        );
        let field = part("name=\"model\"", "m");
        let other = part("name=\"language\"", "");
        let m = Some("m".to_owned());
        assert_eq!(model(&[field.clone(), file.clone()]), m);
        assert_eq!(model(&[file.clone(), other.clone(), field.clone()]), m);
        assert_eq!(model(&[part("name=model", "a"), field.clone()]), m);
        assert_eq!(model(&[file.clone(), other]), None);
        let named_file = part("name=\"model\"; filename=\"a\"", "m");
        assert_eq!(model(&[named_file]), None);
        let headless = part("name=\"model\"", "m").replace("--b0\r\n", "--b0\r\n\r\n");
        assert_eq!(model(&[headless]), None);
        let in_a_file = part("filename=\"; name=model\"; name=\"file\"", "m");
        assert_eq!(model(&[in_a_file]), None);
        assert_eq!(model(&[part("name=\"model\"", "")]), Some(String::new()));
        let long = part("name=\"model\"", &"m".repeat(VALUE_BYTES_MAX + 1));
        assert_eq!(model(&[long]), None);
        let many = vec![file; PARTS_MAX];
        assert_eq!(model(&[many, vec![field]].concat()), None);
    }

    #[test]
    fn what_is_no_form_has_no_field() {
        let body = format!("{}--b0--\r\n", part("name=\"model\"", "m"));
        let found = |content_type: &str, body: &str| {
            form_field(content_type, body.as_bytes(), "model").is_some()
        };
        for (content_type, is_form) in [
            (TYPE, true),
            ("Multipart/Form-Data; charset=utf-8; boundary=\"b0\"", true),
            ("multipart/form-data", false),
            ("multipart/form-data; boundary=", false),
            ("multipart/form-data; boundary=b1", false),
            ("multipart/mixed; boundary=b0", false),
            ("application/json", false),
            ("", false),
        ] {
            assert_eq!(found(content_type, &body), is_form, "{content_type}");
        }
        assert!(found(TYPE, &format!("\r\n{body}")));
        // Others could read such a body as something else.
        assert!(!found(TYPE, &format!("{{\"model\":\"x\"}}\r\n{body}")));
        assert!(!found(TYPE, &body.replace("\r\n", "\n")));
        assert!(!found(TYPE, &body[..body.len() / 2]));
        assert!(!found(TYPE, ""));
    }

    proptest! {
        /// Any bytes are read without a panic, and in a form a field is found behind any file.
        #[test]
        fn any_file_is_skipped(file in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(form_field(TYPE, &file, "none"), None);
            let mut body = b"--b0\r\nContent-Disposition: form-data; name=\"f\"; filename=\"a\"\r\n\r\n"
                .to_vec();
            body.extend_from_slice(&file);
            body.extend_from_slice(b"\r\n");
            body.extend_from_slice(part("name=\"model\"", "m").as_bytes());
            body.extend_from_slice(b"--b0--");
            let inside = memchr::memmem::find(&file, b"\r\n--b0").is_some()
                || file.starts_with(b"--b0");
            if !inside {
                prop_assert_eq!(form_field(TYPE, &body, "model"), Some("m"));
            }
        }
    }
}
