use super::*;

#[test]
fn loops_over_content_are_found_as_by_the_engine() {
    use ContentFormat::{Parts, Text};
    for (source, expected) in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Text),
        (
            "{% for m in messages %}{% for c in m['content'] %}x{% endfor %}{% endfor %}",
            Parts,
        ),
        (
            "{% for m in messages %}{% for c in m.content | list %}x{% endfor %}{% endfor %}",
            Parts,
        ),
        (
            "{% set l = messages[1:] %}\
             {% for m in l %}{% for c in m.content %}{% endfor %}{% endfor %}",
            Parts,
        ),
        ("{% for c in content %}x{% endfor %}", Parts),
        (
            "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}",
            Text,
        ),
        (
            "{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ f(m.content) }}{% endfor %}",
            Parts,
        ),
        (
            "{% macro f(a, x) %}{% for c in x %}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ f(1, x=m['content']) }}{% endfor %}",
            Parts,
        ),
        (
            "{% for m in other %}{% for c in m.content %}{% endfor %}{% endfor %}",
            Text,
        ),
        (
            "{% for i, m in messages %}{% for c in content %}{% endfor %}{% endfor %}",
            Text,
        ),
        (
            "{% set ns.m = messages %}{% for c in content %}{% endfor %}",
            Text,
        ),
        ("{% for broken", Text),
    ] {
        assert_eq!(detect(source), expected, "{source}");
    }
}
