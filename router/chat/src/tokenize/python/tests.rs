use serde::Deserialize;

use minijinja::value::Kwargs;

use super::*;

#[derive(Deserialize)]
struct Vectors {
    context: Value,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    source: String,
    text: Option<String>,
}

/// 2026-03-07 09:05:02.
const NOW: i64 = 1_772_874_302;

/// Renders a template without a chat.
fn render(source: &str, context: &Value) -> Result<String, Error> {
    render_in(environment()?, source, context)
}

fn render_in(mut env: Environment<'_>, source: &str, context: &Value) -> Result<String, Error> {
    env.add_global("strftime_now", strftime_now(CivilTime::from_unix(NOW)));
    let source = without_generation_tags(source);
    env.render_str(&prepared(&source), context.clone())
}

/// Sources that the engine refuses and the router renders. Harmless: the engine makes no prompt.
const MORE_LENIENT: &[&str] = &["{% do l %}", "{{ 'type' in p.items }}"];

/// Sources that the engine renders and the router refuses: such a chat is routed by load.
/// Constructs of real templates must not be added.
const UNSUPPORTED: &[&str] = &[
    "{% macro m(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ m(1, 2) }}",
    "{% set j = joiner(', ') %}{% for w in words %}{{ j() }}{{ w }}{% endfor %}",
];

#[test]
fn expressions_print_what_python_prints() {
    let text = include_str!("../../../testdata/templates/expressions.json");
    let vectors: Vectors = serde_json::from_str(text).unwrap();
    let mut wrong = Vec::new();
    for case in &vectors.cases {
        let ours = render(&case.source, &vectors.context);
        let equal = match (&ours, &case.text) {
            (Ok(ours), Some(theirs)) => ours == theirs,
            (Err(_), None) => true,
            (Ok(_), None) => MORE_LENIENT.contains(&case.source.as_str()),
            (Err(_), Some(_)) => UNSUPPORTED.contains(&case.source.as_str()),
        };
        if !equal {
            wrong.push(format!(
                "{}\n  ours   {ours:?}\n  python {:?}",
                case.source, case.text
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn methods_split_and_strip_as_python_does() {
    for (source, expected) in [
        ("{{ ' a  b '.rsplit(None, 1) }}", "[' a', 'b']"),
        ("{{ ' a  b '.split(None, 1) }}", "['a', 'b ']"),
        ("{{ ' a '.split(None, 0) }}", "['a ']"),
        ("{{ 'xax'.strip(none) }}|{{ [1, 2].index(2) }}", "xax|1"),
    ] {
        assert_eq!(render(source, &Value::UNDEFINED).unwrap(), expected);
    }
}

#[test]
fn an_endless_template_is_stopped() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    let mut env = environment().unwrap();
    assert_eq!(env.fuel(), Some(FUEL));
    env.set_fuel(Some(SHORT_FUEL));
    assert_eq!(
        render_in(env, endless, &Value::UNDEFINED)
            .unwrap_err()
            .kind(),
        ErrorKind::OutOfFuel
    );
    let nested = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(render(nested, &Value::UNDEFINED).is_err());
}

/// A width may have any size, and a value may stand in each field.
#[test]
fn a_formatted_text_is_bounded() {
    let long = "x".repeat(1 << 20);
    for wide in [
        "{{ '%99999d' % 1 }}",
        "{{ '%.99999f' % 1.5 }}",
        "{{ '%*d' % (9999, 1) }}",
        "{{ '%99999d' | format(1) }}",
        "{{ '%(a)99999s' | format(a=1) }}",
        "{{ '{:99999}'.format(1) }}",
        "{{ '{{{:{}}'.format(1, 9999) }}",
    ] {
        assert!(render(wide, &Value::UNDEFINED).is_err(), "{wide}");
    }
    let wanted = format!("{:>9999}|{:>9}", 1, 2);
    let written = "{{ '%9999d|%9d' % (1, 2) }}";
    assert_eq!(render(written, &Value::UNDEFINED).unwrap(), wanted);
    let written = "{{ '{:>9999}|{:>9}'.format(1, 2) }}";
    assert_eq!(render(written, &Value::UNDEFINED).unwrap(), wanted);
    for field in ["%(a)s", "{a}"] {
        let text = field.repeat(200);
        let bounded = |bytes_max| match field {
            "{a}" => texts::str_format(
                &text,
                &[Kwargs::from_iter([("a", Value::from(long.as_str()))]).into()],
                bytes_max,
            )
            .is_ok(),
            _ => texts::printf(
                &text.as_str().into(),
                &[Value::from_pairs([("a", long.as_str())])],
                bytes_max,
            )
            .is_ok(),
        };
        assert!(!bounded(64 << 20), "{field}");
        assert!(bounded(usize::MAX), "{field}");
    }
}
