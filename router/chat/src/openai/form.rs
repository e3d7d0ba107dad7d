//! One field of a form (`multipart/form-data`, RFC 7578), found in place.
//!
//! Parsers differ in what they make of a form that breaks the rules, and the field decides who may
//! be served. So a form is read only if all parsers read it alike; any other is refused. Parts are
//! skipped by their boundaries, and the content of other fields is not read.

use memchr::memmem;

/// RFC 2046, section 5.1.1.
const BOUNDARY_BYTES_MAX: usize = 70;

/// Longest headers of one part.
const PART_HEAD_MAX: usize = 8 << 10;

/// Parts that are read.
const PARTS_MAX: usize = 2_000;

/// Longest value that is returned.
const VALUE_BYTES_MAX: usize = 1_024;

/// The form breaks a rule, or is too large to be read. Names the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnreadableForm(&'static str);

impl UnreadableForm {
    pub const ODD_TYPE: Self = Self("its content type is repeated or not ASCII");
}

/// Whether a content type is that of a form, readable or not.
#[must_use]
pub fn is_form(content_type: &[u8]) -> bool {
    let start = content_type.trim_ascii_start();
    let kind = start.get(..10);
    kind.is_some_and(|kind| kind.eq_ignore_ascii_case(b"multipart/"))
}

/// Refuses a content type that is not that of a readable form.
pub fn require_form(content_type: &[u8]) -> Result<(), UnreadableForm> {
    boundary(content_type).map(|_| ())
}

/// The value of a form's field. `None`: it has none.
pub fn form_field<'b>(
    content_type: &[u8],
    body: &'b [u8],
    name: &str,
) -> Result<Option<&'b str>, UnreadableForm> {
    let delimiter = [b"--", boundary(content_type)?].concat();
    let finder = memmem::Finder::new(&delimiter);
    let mut rest = body;
    while let Some(after) = rest.strip_prefix(b"\r\n") {
        rest = after;
    }
    let start = rest.strip_prefix(delimiter.as_slice());
    rest = start.ok_or(UnreadableForm("it does not begin with its boundary"))?;
    let mut found = None;
    for _ in 0..=PARTS_MAX {
        if let Some(epilogue) = rest.strip_prefix(b"--") {
            let is_blank = epilogue.iter().all(|byte| b"\r\n \t".contains(byte));
            return is_blank
                .then_some(found)
                .ok_or(UnreadableForm("its last boundary is followed by more"));
        }
        let (head, content) = part_head(rest)?;
        let end = content_end(&finder, content)?;
        if names_field(head, name)? {
            let value = field_value(&content[..end])?;
            if found.replace(value).is_some() {
                return Err(UnreadableForm("it repeats a field"));
            }
        }
        rest = &content[end + 2 + delimiter.len()..];
    }
    Err(UnreadableForm("it has too many parts"))
}

/// Where a part's content ends, before the line end that belongs to the next boundary.
fn content_end(finder: &memmem::Finder<'_>, content: &[u8]) -> Result<usize, UnreadableForm> {
    for at in finder.find_iter(content) {
        let before = &content[..at];
        if before.ends_with(b"\r\n") {
            return Ok(at - 2);
        }
        // A boundary for parsers that take other line ends.
        if before.is_empty() || before.ends_with(b"\n") || before.ends_with(b"\r") {
            return Err(UnreadableForm("a part has a boundary in it"));
        }
    }
    Err(UnreadableForm("its last boundary is missing"))
}

fn field_value(value: &[u8]) -> Result<&str, UnreadableForm> {
    if value.len() > VALUE_BYTES_MAX {
        return Err(UnreadableForm("a field is too long"));
    }
    str::from_utf8(value).map_err(|_| UnreadableForm("a field is not UTF-8"))
}

/// The boundary that a content type names.
fn boundary(content_type: &[u8]) -> Result<&[u8], UnreadableForm> {
    let unreadable = UnreadableForm("its content type cannot be read");
    let header = Header::parse(content_type).ok_or(unreadable)?;
    match header.parameter("boundary") {
        Some(boundary)
            if header.is("multipart/form-data")
                && header.is_utf8()
                && boundary.is_ascii()
                && (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len()) =>
        {
            Ok(boundary)
        }
        Some(_) | None => Err(unreadable),
    }
}

/// A part's headers, and what follows them.
fn part_head(part: &[u8]) -> Result<(&[u8], &[u8]), UnreadableForm> {
    let part = part.strip_prefix(b"\r\n");
    let part = part.ok_or(UnreadableForm("a boundary is followed by more"))?;
    let searched = &part[..part.len().min(PART_HEAD_MAX)];
    let end = memmem::find(searched, b"\r\n\r\n");
    let end = end.ok_or(UnreadableForm("a part's headers do not end"))?;
    Ok((&part[..end], &part[end + 4..]))
}

/// Whether a part is this field.
fn names_field(head: &[u8], name: &str) -> Result<bool, UnreadableForm> {
    let (mut named, mut has_charset) = (None, false);
    for line in lines(head) {
        let unreadable = UnreadableForm("a part's headers cannot be read");
        let colon = memchr::memchr(b':', line).ok_or(unreadable)?;
        let (key, value) = (&line[..colon], &line[colon + 1..]);
        let is_name = !key.starts_with(b"-") && key.iter().all(|byte| is_token(*byte));
        if !is_name || memchr::memchr2(b'\r', b'\n', line).is_some() {
            return Err(unreadable);
        }
        let is = |name: &str| key.eq_ignore_ascii_case(name.as_bytes());
        if is("content-transfer-encoding") {
            let plain = ["7bit", "8bit", "binary"];
            let value = value.trim_ascii();
            if !plain
                .iter()
                .any(|plain| value.eq_ignore_ascii_case(plain.as_bytes()))
            {
                return Err(UnreadableForm("a part is encoded"));
            }
        }
        if is("content-type") {
            has_charset |= Header::parse(value).is_none_or(|header| !header.is_utf8());
        }
        if !is("content-disposition") {
            continue;
        }
        let header = Header::parse(value).filter(|header| header.is("form-data"));
        let header = header.ok_or(unreadable)?;
        let is_field = header.parameter("name").ok_or(unreadable)? == name.as_bytes();
        if is_field && header.has_file_name() || named.replace(is_field).is_some() {
            return Err(unreadable);
        }
    }
    let is_field = named.ok_or(UnreadableForm("a part has no name"))?;
    if is_field && has_charset {
        return Err(UnreadableForm("a field is not UTF-8"));
    }
    Ok(is_field)
}

fn lines(head: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(head);
    std::iter::from_fn(move || {
        let text = rest?;
        let end = memmem::find(text, b"\r\n");
        rest = end.map(|end| &text[end + 2..]);
        Some(&text[..end.unwrap_or(text.len())])
    })
}

/// A header's value with parameters.
struct Header<'h> {
    value: &'h [u8],
    parameters: Vec<(&'h [u8], &'h [u8])>,
}

impl<'h> Header<'h> {
    /// `None`: parsers would differ, as on repeated parameters, escapes, and names in the form of
    /// RFC 2231.
    fn parse(text: &'h [u8]) -> Option<Self> {
        let end = memchr::memchr(b';', text).unwrap_or(text.len());
        let value = text[..end].trim_ascii();
        let mut parameters: Vec<(&[u8], &[u8])> = Vec::new();
        let mut rest = &text[end..];
        while let Some(after) = rest.strip_prefix(b";") {
            let equals = memchr::memchr(b'=', after)?;
            let key = after[..equals].trim_ascii();
            let (value, next) = parameter_value(&after[equals + 1..])?;
            let escapes = if key.eq_ignore_ascii_case(b"filename") {
                value.ends_with(b"\\")
            } else {
                value.contains(&b'\\')
            };
            let is_repeated = parameters
                .iter()
                .any(|(other, _)| other.eq_ignore_ascii_case(key));
            let has_own_encoding = key.contains(&b'*') && !key.eq_ignore_ascii_case(b"filename*");
            if key.is_empty()
                || !key.iter().all(|byte| is_token(*byte))
                || is_repeated
                || has_own_encoding
                || escapes
            {
                return None;
            }
            parameters.push((key, value));
            rest = next;
        }
        rest.is_empty().then_some(Self { value, parameters })
    }

    fn is(&self, value: &str) -> bool {
        self.value.eq_ignore_ascii_case(value.as_bytes())
    }

    fn parameter(&self, name: &str) -> Option<&'h [u8]> {
        let named = |(key, _): &&(&[u8], &[u8])| key.eq_ignore_ascii_case(name.as_bytes());
        self.parameters.iter().find(named).map(|(_, value)| *value)
    }

    fn is_utf8(&self) -> bool {
        let charset = self.parameter("charset");
        charset.is_none_or(|charset| charset.eq_ignore_ascii_case(b"utf-8"))
    }

    fn has_file_name(&self) -> bool {
        self.parameter("filename").is_some() || self.parameter("filename*").is_some()
    }
}

/// The value at the beginning, and what follows it: nothing, or the next parameter.
fn parameter_value(text: &[u8]) -> Option<(&[u8], &[u8])> {
    if let Some(quoted) = text.strip_prefix(b"\"") {
        let end = memchr::memchr(b'"', quoted)?;
        let value = &quoted[..end];
        return Some((value, quoted[end + 1..].trim_ascii_start()));
    }
    let end = memchr::memchr(b';', text).unwrap_or(text.len());
    let value = text[..end].trim_ascii_end();
    let is_plain = value.iter().all(|byte| is_token(*byte) || *byte == b'/');
    (is_plain && !value.is_empty()).then_some((value, &text[end..]))
}

/// RFC 9110, section 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
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
        read(TYPE, body.as_bytes()).unwrap_or_else(|error| Some(format!("{error}")))
    }

    fn read(content_type: &str, body: &[u8]) -> Result<Option<String>, UnreadableForm> {
        let found = form_field(content_type.as_bytes(), body, "model")?;
        Ok(found.map(str::to_owned))
    }

    #[test]
    fn a_field_is_found_wherever_it_is() {
        let file = part(
            "name=\"file\"; filename=\"Füße; name=model.wav\"",
            "\r\n\r\n--b\r\n--b1\r\nRIFF\0",
        );
        let field = part("name=\"model\"", "m");
        let other = part("name=\"language\"", "");
        let m = Some("m".to_owned());
        assert_eq!(model(&[field.clone(), file.clone()]), m);
        assert_eq!(model(&[file.clone(), other.clone(), field.clone()]), m);
        assert_eq!(
            model(&[part("NAME=\"x\"", "a"), part("name=model", "m")]),
            m
        );
        let windows = part("name=\"file\"; filename=\"C:\\a.wav\"", "RIFF --b0");
        assert_eq!(model(&[windows, field.clone()]), m);
        let typed =
            "Content-Transfer-Encoding: binary\r\nContent-Type: text/plain; charset=UTF-8\r\n\r\nm";
        assert_eq!(model(&[field.replace("\r\nm", typed)]), m);
        let encoded = part("name=\"file\"; filename*=utf-8''F%C3%BC", "RIFF");
        assert_eq!(model(&[encoded, field]), m);
        assert_eq!(model(&[file, other]), None);
        assert_eq!(model(&[part("name=\"model\"", "")]), Some(String::new()));
    }

    /// Each of them names another model to some parser, or is read by none.
    #[test]
    fn a_form_that_parsers_read_differently_is_refused() {
        let field = part("name=\"model\"", "m");
        let x = part("name=\"x\"", "a");
        let disposition = "Content-Disposition: form-data; name=\"x\"";
        let second = |with: &str| x.replace(disposition, with);
        let forbidden = "Content-Disposition: form-data; name=\"model\"";
        for odd in [
            second("Content-Disposition: x; name=\"model\""),
            second("Content-Disposition: form-data; name=\"x\"; name=\"model\""),
            second("Content-Disposition: form-data; name*=utf-8''model"),
            second("Content-Disposition: form-data; name=\"x\"; name*0=\"model\""),
            second("Content-Disposition: form-data; name=\"mod\\el\""),
            second("Content-Disposition: form-data; name=\"model\" x=\"y\""),
            second("Content-Disposition: form-data; name=\"model\"; filename=\"a\""),
            second("Content-Disposition: form-data"),
            second(&format!("{disposition}\r\n{forbidden}")),
            second(&format!("X : y\r\n{disposition}")),
            second(&format!("{disposition};\r\n name=\"model\"")),
            second(&format!("X: y\n{forbidden}")),
            second(&format!(
                "Content-Transfer-Encoding: base64\r\n{disposition}"
            )),
            second(""),
            second(forbidden),
            x.replace("--b0\r\n", "--b0\r\n\r\n"),
            x.replace("--b0\r\n", "--b0 \r\n"),
            part("name=\"x\"", "\r\n--b0y\r\n"),
            part("name=\"x\"", "\n--b0\n"),
            part("name=\"x\"", "a\r--b0\r"),
            part("name=\"x\"", "--b0"),
            second(&format!("--b: y\r\n{disposition}")),
            second(&format!(
                "Content-Type: text/plain; charset=utf-7\r\n{forbidden}"
            )),
            part("name=\"x\"; filename=\"a\\\"; name=\"model\"", "a"),
            part("name=\"model\"", &"m".repeat(VALUE_BYTES_MAX + 1)),
            x.repeat(PARTS_MAX),
        ] {
            let body = format!("{field}{odd}--b0--\r\n");
            let read = read(TYPE, body.as_bytes());
            assert!(read.is_err(), "{:?} {read:?}", &odd[..odd.len().min(200)]);
        }
        let mut not_text = field.replace("\r\n\r\n", "\r\nX: \r\n\r\n").into_bytes();
        let at = memmem::find(&not_text, b"X: ").unwrap();
        not_text.insert(at + 3, 0xff);
        not_text.extend_from_slice(b"--b0--");
        assert_eq!(read(TYPE, &not_text), Ok(Some("m".to_owned())));
    }

    #[test]
    fn what_cannot_be_read_is_no_form_without_the_field() {
        let body = format!("{}--b0--\r\n", part("name=\"model\"", "m"));
        let found = |content_type: &str, body: &str| read(content_type, body.as_bytes()).is_ok();
        for (content_type, is_read) in [
            (TYPE, true),
            ("Multipart/Form-Data; charset=utf-8; boundary=\"b0\"", true),
            ("multipart/form-data", false),
            ("multipart/form-data; boundary=", false),
            ("multipart/form-data; boundary=b1", false),
            ("multipart/form-data; boundary=b0; boundary=b1", false),
            ("multipart/form-data; charset=utf-7; boundary=b0", false),
            ("multipart/form-data, a; boundary=b0", false),
            ("multipart/mixed; boundary=b0", false),
        ] {
            assert!(is_form(content_type.as_bytes()));
            assert_eq!(found(content_type, &body), is_read, "{content_type}");
        }
        assert!(!is_form(b"application/json") && !is_form(b""));
        assert!(!found(TYPE, &format!("{body}--b0\r\n")));
        assert!(found(TYPE, &format!("\r\n{body}")));
        assert!(!found(TYPE, &format!("\n{body}")));
        assert!(!found(TYPE, &format!("{{\"model\":\"x\"}}\r\n{body}")));
        assert!(!found(TYPE, &body.replace("\r\n", "\n")));
        assert!(!found(TYPE, &body[..body.len() / 2]));
        assert!(!found(TYPE, ""));
    }

    proptest! {
        /// Any bytes are read without a panic, and in a form a field is found behind any file.
        #[test]
        fn any_file_is_skipped(file in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(read(TYPE, &file).is_err());
            let mut body = b"--b0\r\nContent-Disposition: form-data; name=\"f\"; filename=\"a\"\r\n\r\n"
                .to_vec();
            body.extend_from_slice(&file);
            body.extend_from_slice(b"\r\n");
            body.extend_from_slice(part("name=\"model\"", "m").as_bytes());
            body.extend_from_slice(b"--b0--");
            let inside = memmem::find(&file, b"\r\n--b0").is_some()
                || file.starts_with(b"--b0");
            if !inside {
                prop_assert_eq!(read(TYPE, &body), Ok(Some("m".to_owned())));
            }
        }
    }
}
