use serde::Deserialize;

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

const NOW: CivilTime = CivilTime {
    year: 2026,
    month: 3,
    day: 7,
    hour: 9,
    minute: 5,
    second: 2,
};

/// Renders as `render` of the template module does, without a chat around it.
fn render(source: &str, context: &Value) -> Result<String, Error> {
    let mut env = environment()?;
    env.add_global("strftime_now", strftime_now(NOW));
    env.render_str(&without_generation_tags(source), context.clone())
}

/// What the engine refuses and we render. Harmless: no prompt comes of it there.
const MORE_LENIENT: &[&str] = &["{% do l %}"];

/// What the engine renders and we refuse: such a chat is routed by load. Nothing may be added here
/// that real templates use.
const UNSUPPORTED: &[&str] = &[
    "{{ '%.2f' % 2.5 }}",
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
fn a_template_that_runs_for_ever_is_stopped() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    assert_eq!(
        render(endless, &Value::UNDEFINED).unwrap_err().kind(),
        ErrorKind::OutOfFuel
    );
    let nested = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(render(nested, &Value::UNDEFINED).is_err());
}
