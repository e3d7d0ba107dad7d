//! House rules that no compiler checks: sizes, purity, names, prose, links and lists in documents.
//!
//! Production lines are those outside `#[cfg(test)]` modules, `tests/`, `benches/` and `fuzz/`.
#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, its helpers too"
)]

#[path = "tidy/circles.rs"]
mod circles;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 800;
const FILE_LINES_MEDIAN_MAX: usize = 250;
const LINE_CHARS_MAX: usize = 110;
const PROSE_CHARS_MAX: usize = 100;
const STRUCT_FIELDS_MAX: usize = 20;

/// Crates without IO, clock, runtime or randomness of their own.
const PURE_CRATES: [&str; 6] = [
    "warmroute-chat",
    "warmroute-index",
    "warmroute-mirror",
    "warmroute-proto",
    "warmroute-route",
    "warmroute-sim",
];

/// Pure modules of crates that are not.
const PURE_MODULES: [&str; 24] = [
    "publisher-shim/src/engine/drained_feed/kept_events.rs",
    "publisher-shim/src/engine/trtllm.rs",
    "router/src/admission/displacement.rs",
    "router/src/admission/fair_queue.rs",
    "router/src/admission/free_places.rs",
    "router/src/admission/in_flight.rs",
    "router/src/admission/leave_rate.rs",
    "router/src/admission/line.rs",
    "router/src/admission/waiting_room.rs",
    "router/src/picker/exchange.rs",
    "router/src/picker/frames.rs",
    "router/src/picker/messages.rs",
    "router/src/fleet/breaker.rs",
    "router/src/tenants/budget.rs",
    "router/src/tenants/shared_budget.rs",
    "router/src/tenants/sharing.rs",
    "router/src/fleet/checks.rs",
    "router/src/fleet/drain_table.rs",
    "router/src/fleet/engine_metrics.rs",
    "router/src/fleet/health.rs",
    "router/src/fleet/lost_workers.rs",
    "router/src/fleet/models.rs",
    "router/src/fleet/state.rs",
    "router/src/settings/differences.rs",
];

/// What neither a pure crate nor a workspace crate below it may depend on.
const IMPURE_CRATES: [&str; 6] = ["async-nats", "axum", "hyper", "reqwest", "tokio", "zmq"];

/// What pure code must not name. Clippy's disallowed methods cover the clock and the environment.
const IMPURE_NAMES: [&str; 7] = [
    "tokio::",
    "reqwest::",
    "axum::",
    "zmq::",
    "std::fs",
    "std::net",
    "Rng::new()",
];

/// The one file of a pure crate that reads files.
const READS_FILES: &str = "router/chat/src/model_files.rs";

/// Names one of `fastrand`'s functions: types have capitals, and their seeds are arguments.
fn draws_globally(code: &str) -> bool {
    let mut uses = code.split("fastrand::").skip(1);
    uses.any(|rest| rest.starts_with(|c: char| c.is_lowercase()))
}

struct Source {
    path: String,
    text: String,
}

impl Source {
    /// Lines up to the test module, which stands last in a file, where it is not a file of its own.
    fn production(&self) -> impl Iterator<Item = &str> {
        let end = self
            .text
            .find("\n#[cfg(test)]\nmod tests {")
            .unwrap_or(self.text.len());
        self.text[..end].lines()
    }

    fn is_test(&self) -> bool {
        let parts: Vec<&str> = self.path.split('/').collect();
        let Some(src) = parts.iter().position(|part| *part == "src") else {
            return true;
        };
        parts.last() == Some(&"tests.rs")
            || parts[src..].contains(&"tests")
            || parts.contains(&"tests_support")
            || parts.last() == Some(&"testing.rs")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

fn files(dir: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            files(&path, ending, found);
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
}

/// The quoted strings of a list in the workspace's manifest.
fn workspace_list(key: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let start = manifest.find(&format!("\n{key} = [")).unwrap();
    let list = manifest[start..].split(']').next().unwrap();
    let quoted = list.split('"').skip(1).step_by(2);
    quoted.map(str::to_owned).collect()
}

/// The folders that hold all crates: members' top folders.
fn crate_folders() -> BTreeSet<String> {
    let members = workspace_list("members");
    let top = |member: &String| member.split('/').next().unwrap_or_default().to_owned();
    members.iter().map(top).collect()
}

fn sources() -> Vec<Source> {
    let root = root();
    let mut paths = Vec::new();
    for name in crate_folders() {
        files(&root.join(name), ".rs", &mut paths);
    }
    paths
        .into_iter()
        .map(|path| Source {
            text: fs::read_to_string(&path).unwrap(),
            path: path
                .strip_prefix(&root)
                .unwrap()
                .to_string_lossy()
                .into_owned(),
        })
        .collect()
}

fn none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn files_are_small() {
    let sources = sources();
    let production: Vec<&Source> = sources.iter().filter(|source| !source.is_test()).collect();
    let mut lengths: Vec<usize> = production
        .iter()
        .map(|source| source.production().count())
        .collect();
    let faults: Vec<String> = production
        .iter()
        .zip(&lengths)
        .filter(|(_, lines)| **lines > FILE_LINES_MAX)
        .map(|(source, lines)| format!("{}: {lines} production lines", source.path))
        .collect();
    none(&faults);
    lengths.sort_unstable();
    let median = lengths[lengths.len() / 2];
    assert!(
        median <= FILE_LINES_MEDIAN_MAX,
        "the median file has {median} lines"
    );
}

#[test]
fn lines_are_short() {
    let mut faults = Vec::new();
    for source in sources() {
        for (number, line) in (1..).zip(source.text.lines()) {
            if line.chars().count() > LINE_CHARS_MAX && !line.contains("https://") {
                faults.push(format!("{}:{number}", source.path));
            }
        }
    }
    none(&faults);
}

#[test]
fn structs_have_few_fields() {
    let mut faults = Vec::new();
    for source in sources() {
        let mut open: Option<(&str, usize)> = None;
        // A table of a settings file has as many fields as the file has keys.
        let mut is_table = false;
        for line in source.production() {
            is_table |= line.contains("deny_unknown_fields");
            if line.contains("struct ") && line.ends_with('{') {
                open = (!is_table).then(|| (line.trim(), 0));
                is_table = false;
            } else if line.trim_start() == "}" {
                open = None;
            } else if let Some((name, fields)) = &mut open
                && line.contains(": ")
                && !line.trim_start().starts_with("//")
                && !line.trim_start().starts_with('#')
            {
                *fields += 1;
                if *fields == STRUCT_FIELDS_MAX + 1 {
                    faults.push(format!("{}: {name}", source.path));
                }
            }
        }
    }
    none(&faults);
}

/// The normal dependencies that a crate's manifest names.
fn dependencies(folder: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
    let sections = manifest.split("\n[");
    let named = sections.filter_map(|section| section.strip_prefix("dependencies]"));
    let lines = named.flat_map(str::lines);
    let names = lines.filter_map(|line| line.split(['.', ' ', '=']).next());
    let names = names.filter(|name| !name.is_empty() && !name.starts_with('#'));
    names.map(str::to_owned).collect()
}

/// Every member's folder, by the name of its package.
fn packages() -> BTreeMap<String, String> {
    let name = |folder: String| {
        let manifest = fs::read_to_string(root().join(&folder).join("Cargo.toml")).unwrap();
        let name = manifest.split("\nname = \"").nth(1).unwrap();
        (
            name.split('"').next().unwrap_or_default().to_owned(),
            folder,
        )
    };
    workspace_list("members").into_iter().map(name).collect()
}

#[test]
fn pure_crates_depend_on_no_runtime_and_no_network() {
    let packages = packages();
    let mut faults = Vec::new();
    for pure in PURE_CRATES {
        let (mut open, mut seen) = (vec![pure.to_owned()], BTreeSet::new());
        while let Some(name) = open.pop() {
            if IMPURE_CRATES.contains(&name.as_str()) {
                faults.push(format!("{pure} depends on {name}"));
            }
            if let Some(folder) = packages.get(&name)
                && seen.insert(name)
            {
                open.extend(dependencies(folder));
            }
        }
        assert!(!seen.is_empty(), "{pure} is no member");
    }
    none(&faults);
}

#[test]
fn pure_code_draws_and_reads_nothing() {
    let packages = packages();
    let mut pure = PURE_CRATES
        .map(|name| format!("{}/src/", packages[name]))
        .to_vec();
    pure.extend(PURE_MODULES.map(str::to_owned));
    let is_pure = |source: &&Source| {
        let inside = pure.iter().any(|place| source.path.starts_with(place));
        inside && !source.is_test() && source.path != READS_FILES
    };
    let mut faults = Vec::new();
    let gone = pure.iter().filter(|place| !root().join(place).exists());
    faults.extend(gone.map(|place| format!("{place} is listed as pure and does not exist")));
    for source in sources().iter().filter(is_pure) {
        for (number, line) in (1..).zip(source.production()) {
            let code = line.split("//").next().unwrap_or("");
            if IMPURE_NAMES.iter().any(|name| code.contains(name)) || draws_globally(code) {
                faults.push(format!("{}:{number}: {line}", source.path));
            }
        }
    }
    none(&faults);
}

/// The type that a line declares. Indented aliases are associated types.
fn declared_type(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let code = match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.strip_prefix(' ')?,
        None => code,
    };
    let kinds = ["struct ", "enum ", "trait "].iter();
    let named = kinds.copied().find_map(|kind| code.strip_prefix(kind));
    let alias = (!line.starts_with(' ')).then(|| code.strip_prefix("type "));
    let name = named.or_else(|| alias.flatten())?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
    let name = &name[..end.unwrap_or(name.len())];
    // A macro's types have no name yet.
    (!name.is_empty()).then_some(name)
}

#[test]
fn a_type_name_stands_for_one_thing() {
    const FILES_MAX: usize = 2;
    let sources = sources();
    let mut places: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let production = |source: &&Source| !source.is_test() && !source.path.starts_with("tests/");
    for source in sources.iter().filter(production) {
        for name in source.production().filter_map(declared_type) {
            places.entry(name).or_default().insert(&source.path);
        }
    }
    let shared = places.iter().filter(|(_, files)| files.len() > FILES_MAX);
    let faults: Vec<String> = shared
        .map(|(name, files)| format!("{name}: {files:?}"))
        .collect();
    none(&faults);
}

/// Words that a sentence about processes does not need.
const NO_WORDS: [&str; 14] = [
    "whoever",
    "nobody",
    "somebody",
    "everybody",
    "anybody",
    "whom",
    "told",
    "tell",
    "tells",
    "said",
    "heard",
    "anew",
    "lately",
    "meanwhile",
];
const NO_PHRASES: [&str; 4] = [
    "all the same",
    "at once",
    "; none if",
    "module's documentation",
];
const NO_OPENINGS: [&str; 7] = [
    "Of ",
    "The same ",
    "Who ",
    "Whose ",
    "None: ",
    "None; ",
    "None, ",
];

/// What keeps a sentence from being plain English.
fn prose_fault(text: &str) -> Option<String> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '`');
    let word = words
        .map(str::to_lowercase)
        .find(|word| NO_WORDS.contains(&word.as_str()));
    let phrase = NO_PHRASES.iter().find(|phrase| text.contains(*phrase));
    let opening = NO_OPENINGS.iter().find(|opening| {
        let later = [". ", "! ", "? "].map(|end| format!("{end}{opening}"));
        text.starts_with(*opening) || later.iter().any(|start| text.contains(start))
    });
    let phrase = phrase.or(opening).map(|phrase| (*phrase).to_owned());
    word.or(phrase)
}

#[test]
fn comments_are_plain_english() {
    let mut faults = Vec::new();
    for source in sources() {
        for (number, line) in (1..).zip(source.text.lines()) {
            let comment = line.trim_start().strip_prefix("//");
            let comment = comment.map(|text| text.trim_start_matches(['/', '!']).trim());
            if let Some(fault) = comment.and_then(prose_fault) {
                faults.push(format!(
                    "{}:{number}: {fault}: {}",
                    source.path,
                    line.trim()
                ));
            }
        }
    }
    none(&faults);
}

/// A line without the targets of its links, which are file names.
fn without_targets(line: &str) -> String {
    let mut parts = line.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    let rest = parts.filter_map(|part| part.split_once(')'));
    rest.fold(first, |text, (_, rest)| text + rest)
}

/// Lines of a document outside code fences.
fn prose_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

#[test]
fn documents_are_plain_english_and_narrow() {
    let mut faults = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in prose_lines(&text) {
            let wide = line.chars().count() > PROSE_CHARS_MAX;
            let fixed = line.starts_with(['|', '<']) || line.contains("://");
            let wide = (wide && !fixed).then(|| "wide".to_owned());
            let text = without_targets(line.trim_start_matches(['-', ' ']));
            if let Some(fault) = wide.or_else(|| prose_fault(&text)) {
                faults.push(format!("{}:{number}: {fault}", path.display()));
            }
        }
    }
    none(&faults);
}

#[test]
fn production_is_all_but_the_test_module() {
    let of = |text: &str| {
        let (path, text) = (String::new(), text.to_owned());
        Source { path, text }
            .production()
            .collect::<Vec<_>>()
            .join("|")
    };
    let beside = "a\n#[cfg(test)]\nmod tests;\nb\n";
    assert_eq!(of(beside), "a|#[cfg(test)]|mod tests;|b");
    assert_eq!(of("a\n#[cfg(test)]\nmod tests {\nb\n}\n"), "a");
    assert!(draws_globally("fastrand::u64(..)") && !draws_globally("use fastrand::Rng;"));
}

/// Logged values whose debug form is plain: durations, and texts of a client in quotes.
const PLAIN_DEBUG: [&str; 4] = ["?stood", "?took", "?version", "?flight.call.request_id()"];

/// Operators read logs: a debug form shows types and names of the source.
#[test]
fn logs_show_no_debug_forms() {
    let mut faults = Vec::new();
    let production = |source: &&Source| !source.is_test() && !source.path.starts_with("tests/");
    for source in sources().iter().filter(production) {
        let code: String = source.production().flat_map(|line| [line, "\n"]).collect();
        for call in ["info!(", "warn!(", "error!("] {
            for (at, _) in code.match_indices(call) {
                let rest = &code[at + call.len()..];
                let logged = &rest[..rest.find(");").unwrap_or(rest.len())];
                let mut words = logged.split([' ', '\n', ',', '=', '(']);
                let forms = words.find(|word| word.starts_with('?') && word.len() > 1);
                if let Some(form) =
                    forms.filter(|_| !PLAIN_DEBUG.iter().any(|one| logged.contains(one)))
                {
                    faults.push(format!("{}: {call}… {form}", source.path));
                }
            }
        }
    }
    none(&faults);
}

#[test]
fn nothing_is_left_unfinished() {
    let marks = [
        ["FIX", "ME"].concat(),
        ["TO", "DO"].concat(),
        ["unimpl", "emented!"].concat(),
    ];
    let mut faults = Vec::new();
    for source in sources() {
        for (number, line) in (1..).zip(source.text.lines()) {
            if marks.iter().any(|mark| line.contains(mark.as_str())) {
                faults.push(format!("{}:{number}: {line}", source.path));
            }
        }
    }
    none(&faults);
}

/// The one crate with unsafe code: the library's C ABI. A lint of the workspace denies it outside of
/// the module that expects it.
const UNSAFE_CRATE: &str = "publisher-shim/publisher";

#[test]
fn every_crate_forbids_unsafe_code() {
    for name in workspace_list("members") {
        let sources = root().join(&name).join("src");
        let tops = ["lib.rs", "main.rs", "bench_plane/main.rs"].iter();
        let mut tops = tops.filter_map(|top| fs::read_to_string(sources.join(top)).ok());
        let top = tops.next().unwrap();
        let rule = match name == UNSAFE_CRATE {
            true => "#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]",
            false => "#![forbid(unsafe_code)]",
        };
        assert!(top.contains(rule), "{name}");
        assert!(top.starts_with("//!"), "{name}: its top says what it is");
    }
}

fn documents() -> Vec<PathBuf> {
    let root = root();
    let mut found = Vec::new();
    files(&root.join("docs"), ".md", &mut found);
    files(&root.join("deploy"), ".md", &mut found);
    files(&root.join("tests"), ".md", &mut found);
    found.push(root.join("README.md"));
    found.push(root.join("CHANGELOG.md"));
    found
}

#[test]
fn links_of_documents_resolve() {
    let mut faults = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            let target = link.split('#').next().unwrap_or("");
            let local = !target.is_empty() && !target.contains("://");
            if local && !path.parent().unwrap().join(target).exists() {
                faults.push(format!("{}: {link}", path.display()));
            }
        }
    }
    none(&faults);
}

/// The code map names every module of every crate and nothing else.
#[test]
fn code_map_is_complete() {
    let root = root();
    let map = fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    assert!(
        map.lines().count() <= 300,
        "the architecture is read in one sitting"
    );
    let named: BTreeSet<String> = map
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| name.contains("/src/") || name.contains("/tests/"))
        .map(|name| name.trim_end_matches('/').to_owned())
        .collect();
    let mut faults: Vec<String> = named
        .iter()
        .filter(|name| !root.join(name).exists())
        .map(|name| format!("the code map names {name}, which does not exist"))
        .collect();
    for source in sources().iter().filter(|source| !source.is_test()) {
        let known = named
            .iter()
            .any(|name| source.path == *name || source.path.starts_with(&format!("{name}/")));
        let wiring = ["lib.rs", "main.rs"]
            .iter()
            .any(|name| source.path.ends_with(name));
        if !known && !wiring {
            faults.push(format!("{} is missing in the code map", source.path));
        }
    }
    none(&faults);
}

/// `crate::module` and `folder/module` in the architecture's text exist.
#[test]
fn architecture_names_modules_that_exist() {
    let map = fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let sources = sources();
    let exists = |place: &str| {
        let is_there = |rest: &str| rest.starts_with(['/', '.']);
        let mut sources = sources.iter();
        sources.any(|source| source.path.split(place).skip(1).any(is_there))
    };
    let is_name = |text: &str| {
        let is_name_char = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        !text.is_empty() && text.chars().all(is_name_char)
    };
    let mut faults = Vec::new();
    for name in map.split('`').skip(1).step_by(2) {
        let module = name.split_once("::").map(|parts| (parts, "/src/"));
        let module = module.or_else(|| Some((name.split_once('/')?, "/")));
        if let Some(((first, second), between)) = module
            && is_name(first)
            && is_name(second)
            && !exists(&format!("{first}{between}{second}"))
            && !exists(&format!("{first}/{second}"))
        {
            faults.push(format!("{name} does not exist"));
        }
    }
    none(&faults);
}

/// Where a binary names its metrics, without the prefix that is theirs.
const METRICS: [(&str, &[&str]); 5] = [
    (
        "warmroute_router_",
        &[
            "router/src/metrics.rs",
            "router/src/metrics/",
            "router/src/settings/tls.rs",
        ],
    ),
    (
        "warmroute_indexer_",
        &["indexer/src/metrics.rs", "indexer/src/metrics/"],
    ),
    ("warmroute_shim_", &["publisher-shim/src/metrics.rs"]),
    ("warmroute_nats_", &["proto/process/src/nats.rs"]),
    ("warmroute_build_", &["proto/process/src/build.rs"]),
];

/// The words of a text that may be metrics: those that begin like them and go on behind the prefix.
fn metrics_in<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(prefix).filter_map(|(at, _)| {
        let rest = &text[at + prefix.len()..];
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_' && !c.is_ascii_digit());
        let name = &rest[..end.unwrap_or(rest.len())];
        // `warmroute_router_sync_*` is a family.
        (!name.is_empty() && !name.ends_with('_')).then_some(name)
    })
}

/// An alert on a metric that no binary exports never fires.
#[test]
fn metrics_in_documents_and_alerts_exist() {
    let sources = sources();
    let root = root();
    let mut paths = documents();
    // The changelog names metrics that are gone.
    paths.retain(|path| !path.ends_with("CHANGELOG.md"));
    files(&root.join("deploy"), ".yml", &mut paths);
    let (mut faults, mut alerts) = (Vec::new(), 0);
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        for (prefix, places) in METRICS {
            let named_in = |source: &&Source| places.iter().any(|at| source.path.starts_with(at));
            let code: Vec<&Source> = sources.iter().filter(named_in).collect();
            assert!(!code.is_empty(), "no file has {prefix}");
            let exists = |name: &str| {
                let literal = format!("\"{name}\"");
                code.iter().any(|source| source.text.contains(&literal))
            };
            for name in metrics_in(&text, prefix) {
                alerts += usize::from(path.ends_with("rules.yml"));
                let of_histogram = ["_bucket", "_sum", "_count"].map(|end| name.strip_suffix(end));
                if !exists(name) && !of_histogram.into_iter().flatten().any(exists) {
                    faults.push(format!("{}: {prefix}{name}", path.display()));
                }
            }
        }
    }
    none(&faults);
    assert!(alerts > 15, "the alerts were not read");
}

/// Text that speaks of the machine it was written on helps no reader.
#[test]
fn nothing_names_a_machine() {
    let private = [
        ["/wo", "rk/"].concat(),
        ["/ro", "ot/"].concat(),
        ["/ho", "me/"].concat(),
    ];
    let root = root();
    let mut paths = documents();
    for name in crate_folders() {
        for ending in [".rs", ".sh", ".py", ".md"] {
            files(&root.join(&name), ending, &mut paths);
        }
    }
    let mut faults = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        if let Some(name) = private.iter().find(|name| text.contains(name.as_str())) {
            faults.push(format!("{}: {name}", path.display()));
        }
    }
    none(&faults);
}
