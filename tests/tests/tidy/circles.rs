//! Files of one crate that name each other in a circle can only be read together. A module may name
//! what it is in: only the other direction, and neighbours, make a circle.

use std::collections::{BTreeMap, BTreeSet};

use super::{Source, sources};

/// Files in circles, by crate. A number may only become smaller; a crate without is not listed.
const IN_CIRCLES: [(&str, usize); 8] = [
    ("proto/process", 3),
    ("router", 54),
    ("router/chat", 18),
    ("router/route", 3),
    ("router/sim", 3),
    ("tests/bench-proxy", 9),
    ("tests/mock", 15),
    ("tests/simulation", 17),
];

type ModulePath = Vec<String>;

/// The module that a file is, for example `["proxy", "plan"]`. `None`: of a program or a test.
fn module_of(file: &str) -> Option<ModulePath> {
    let mut parts: ModulePath = file.split('/').map(str::to_owned).collect();
    let last = parts.pop()?;
    let name = last.strip_suffix(".rs")?;
    let is_test = parts
        .iter()
        .any(|part| part == "tests" || part == "testing")
        || matches!(name, "tests" | "testing" | "main")
        || name.ends_with("_tests");
    if !matches!(name, "lib" | "mod") {
        parts.push(name.to_owned());
    }
    (!is_test).then_some(parts)
}

/// The paths of a `use` tree.
fn expand(prefix: &str, tree: &str, found: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((head, group)) = tree.split_once('{') else {
        found.push(format!("{prefix}{tree}"));
        return;
    };
    let prefix = format!("{prefix}{}", head.trim());
    let group = group.trim().trim_end_matches(',');
    let group = group.strip_suffix('}').unwrap_or(group);
    let (mut depth, mut start) = (0, 0);
    for (at, char) in group.char_indices() {
        match char {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&prefix, &group[start..at], found);
                start = at + 1;
            }
            _ => {}
        }
    }
    expand(&prefix, &group[start..], found);
}

/// What a file names: its imports, and paths in its code that begin at a module.
fn paths_in(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for part in code.split("use ").skip(1) {
        let tree = part.split(';').next().unwrap_or_default();
        expand("", tree, &mut found);
    }
    for root in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(root) {
            let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            let rest = &code[at..];
            let end = rest.find(|c| !is_path(c)).unwrap_or(rest.len());
            found.push(rest[..end].to_owned());
        }
    }
    found
}

/// The longest module of the crate that a path leads to, seen from a module.
fn target(
    path: &str,
    from: &[String],
    modules: &BTreeMap<ModulePath, String>,
) -> Option<ModulePath> {
    let mut parts = path.split("::").map(str::trim).peekable();
    let mut at = from.to_vec();
    match parts.peek()? {
        &"crate" => at.clear(),
        &"super" | &"self" => {}
        first => {
            let child = [from, &[(*first).to_owned()]].concat();
            modules.get(&child)?;
        }
    }
    for part in parts {
        match part {
            "crate" | "self" => {}
            "super" => drop(at.pop()),
            name => {
                at.push(name.to_owned());
                if !modules.contains_key(&at) {
                    at.pop();
                    break;
                }
            }
        }
    }
    Some(at)
}

/// The modules that each module names, those that it is in left out.
fn edges(modules: &BTreeMap<ModulePath, String>) -> BTreeMap<&ModulePath, BTreeSet<ModulePath>> {
    let named = |(module, code): (&ModulePath, &String)| {
        let paths = paths_in(code);
        let all = paths
            .iter()
            .filter_map(|path| target(path, module, modules));
        all.filter(|to| !module.starts_with(to)).collect()
    };
    let modules = modules.iter();
    modules.map(|one| (one.0, named(one))).collect()
}

fn is_in_circle(module: &ModulePath, edges: &BTreeMap<&ModulePath, BTreeSet<ModulePath>>) -> bool {
    let (mut seen, mut open) = (BTreeSet::new(), vec![module]);
    while let Some(at) = open.pop() {
        for next in &edges[at] {
            if next == module {
                return true;
            }
            if seen.insert(next) {
                open.push(next);
            }
        }
    }
    false
}

/// Code without comments, by module, by crate.
fn crates(sources: &[Source]) -> BTreeMap<String, BTreeMap<ModulePath, String>> {
    let mut crates: BTreeMap<String, BTreeMap<ModulePath, String>> = BTreeMap::new();
    for source in sources {
        let Some((folder, file)) = source.path.split_once("/src/") else {
            continue;
        };
        if let Some(module) = module_of(file) {
            let code = source.production();
            let code = code.map(|line| line.split("//").next().unwrap_or_default());
            let code = code.collect::<Vec<_>>().join("\n");
            let of_crate = crates.entry(folder.to_owned()).or_default();
            of_crate.insert(module, code);
        }
    }
    crates
}

#[test]
fn files_name_each_other_in_few_circles() {
    let sources = sources();
    let mut found = Vec::new();
    let mut names = Vec::new();
    for (folder, modules) in crates(&sources) {
        let edges = edges(&modules);
        let circles = modules.keys().filter(|module| is_in_circle(module, &edges));
        let circles: Vec<String> = circles.map(|module| module.join("/")).collect();
        if !circles.is_empty() {
            found.push((folder.clone(), circles.len()));
            names.push(format!("{folder}: {}", circles.join(" ")));
        }
    }
    let wanted = IN_CIRCLES.map(|(folder, files)| (folder.to_owned(), files));
    assert!(
        found == wanted,
        "{found:?}, must be {wanted:?}\n{}",
        names.join("\n")
    );
}

#[test]
fn a_circle_is_found() {
    let module = |code: &str| code.to_owned();
    let path = |text: &str| module_of(text).unwrap();
    let modules = BTreeMap::from([
        (path("lib.rs"), module("mod a; mod b; mod c;")),
        (
            path("a.rs"),
            module("use crate::b::{c::D, One};\nuse std::fmt;"),
        ),
        (path("b/mod.rs"), module("mod c; use c::D;")),
        (path("b/c.rs"), module("fn f() { crate::a::g() }")),
        (path("c.rs"), module("use super::{a, b::One};")),
    ]);
    let edges = edges(&modules);
    let circles = modules.keys().filter(|module| is_in_circle(module, &edges));
    let circles: Vec<String> = circles.map(|module| module.join("/")).collect();
    assert_eq!(circles, ["a", "b", "b/c"]);
}
