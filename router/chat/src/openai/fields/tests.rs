use super::*;

const NAMES: &[&str] = &["model", "flag", "n"];

#[test]
fn last_of_repeated_keys_wins_and_escaped_keys_count() {
    let body = br#"{"model":"a","m\u006fdel":"b","x":{"model":"c"},"flag":null,"n":"7"}"#;
    let fields = BodyFields::read(body, NAMES).unwrap();
    assert_eq!(fields.text("model").unwrap().as_deref(), Some("b"));
    assert!(!fields.has("flag"));
    assert_eq!(fields.integer("n"), Ok(Some(7)));
}

#[test]
fn depth_is_bounded_in_skipped_fields() {
    let deep = format!("{{\"x\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let error = BodyFields::read(deep.as_bytes(), NAMES).unwrap_err();
    assert_eq!(body_error(&error).code, Some("too_deep"));
}

#[test]
fn broken_json_and_wrong_types_have_different_codes() {
    for (body, code) in [
        (&b""[..], "invalid_json"),
        (b"{", "invalid_json"),
        (b"{} x", "invalid_json"),
        (b"[]", "wrong_type"),
        (b"\"x\"", "wrong_type"),
        (b"{\"a\":\"\xff\"}", "invalid_json"),
        (b"{\"a\":NaN}", "invalid_json"),
    ] {
        let error = BodyFields::read(body, NAMES).unwrap_err();
        assert_eq!(body_error(&error).code, Some(code), "{body:?}");
    }
}

#[test]
fn flags_follow_the_engines_reading() {
    for (json, expected) in [
        ("true", Ok(Some(true))),
        ("0", Ok(Some(false))),
        ("\"Yes\"", Ok(Some(true))),
        ("null", Ok(None)),
        ("2", Err(UnreadableField("flag"))),
        ("{}", Err(UnreadableField("flag"))),
    ] {
        let body = format!("{{\"flag\":{json}}}");
        assert_eq!(
            BodyFields::read(body.as_bytes(), NAMES)
                .unwrap()
                .flag("flag"),
            expected
        );
    }
}
