use tempfile::TempDir;

use super::*;

struct Scratch(TempDir);

impl Scratch {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = TempDir::new().unwrap();
        for (file, content) in [("tokenizer.json", "{}")].iter().chain(files) {
            let file = dir.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        }
        Self(dir)
    }

    fn read(&self) -> ModelFiles {
        read(self.0.path()).unwrap()
    }
}

fn named(entries: &[(&str, &str)]) -> TemplateSources {
    TemplateSources::Named(
        entries
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
    )
}

#[test]
fn a_file_of_another_form_is_named_in_its_error() {
    let error_of = |file: &str| {
        let scratch = Scratch::new(&[(file, "")]);
        fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
        let error = read(scratch.0.path()).unwrap_err();
        assert!(error.to_string().contains(file), "{error}");
        error
    };
    for file in [
        "tekken.json",
        "tokenizer.model",
        "tiktoken.model",
        "qwen.tiktoken",
    ] {
        let error = error_of(file);
        assert!(
            matches!(error, ModelFileError::Conversion { .. }),
            "{error}"
        );
    }
    for file in ["vocab.json", "spiece.model"] {
        let error = error_of(file);
        assert!(matches!(error, ModelFileError::OtherForm { .. }), "{error}");
    }
}

#[test]
fn another_form_is_read_only_without_a_tokenizer_json_and_up_to_its_bound() {
    let scratch = Scratch::new(&[("tekken.json", ""), ("tokenizer.model", "")]);
    assert_eq!(scratch.read().tokenizer, b"{}");
    fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
    let file = fs::File::create(scratch.0.path().join("tekken.json")).unwrap();
    file.set_len((64 << 20) + 1).unwrap();
    let error = read(scratch.0.path()).unwrap_err();
    assert!(matches!(error, ModelFileError::TooLarge { .. }), "{error}");
}

/// Without them the router would cut their names into pieces.
#[test]
fn added_tokens_that_no_configuration_lists_are_an_error() {
    let tekken = include_str!("../../testdata/tokenizer_files/tekken.json");
    let added = ("added_tokens.json", "{}");
    let listed = ("tokenizer_config.json", r#"{"added_tokens_decoder": {}}"#);
    for (files, is_read) in [
        (vec![("tekken.json", tekken), added], false),
        (vec![("tekken.json", tekken), added, listed], true),
    ] {
        let scratch = Scratch::new(&files);
        fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
        match read(scratch.0.path()) {
            Ok(_) => assert!(is_read),
            Err(error) => assert!(!is_read && error.to_string().contains(added.0), "{error}"),
        }
    }
}

#[test]
fn mistrals_form_has_neither_templates_nor_a_configuration() {
    let tekken = include_str!("../../testdata/tokenizer_files/tekken.json");
    let scratch = Scratch::new(&[("tekken.json", tekken), CONFIG, JINJA]);
    fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
    let files = scratch.read();
    assert_eq!(files.templates, TemplateSources::None);
    assert!(files.config.is_empty());
}

#[test]
fn a_digest_covers_templates_and_rules() {
    let scratch = Scratch::new(&[("own.jinja", "own"), CONFIG]);
    let mut source = ModelSource {
        path: scratch.0.path().to_owned(),
        ..ModelSource::default()
    };
    let plain = source.read().unwrap();
    assert_eq!(plain.digest(), source.read().unwrap().digest());
    source.chat_template = Some(scratch.0.path().join("own.jinja"));
    let own = source.read().unwrap();
    assert_eq!(own.templates, TemplateSources::Single("own".into()));
    source.rules.default_kwargs = Some("{}".into());
    let ruled = source.read().unwrap();
    assert!(plain.digest() != own.digest() && own.digest() != ruled.digest());
    source.chat_template = Some(scratch.0.path().join("absent.jinja"));
    assert!(source.read().is_err());
}

const CONFIG: (&str, &str) = ("tokenizer_config.json", r#"{"chat_template":"configured"}"#);
const JINJA: (&str, &str) = ("chat_template.jinja", "file");
const EXTRA: (&str, &str) = ("additional_chat_templates/tool_use.jinja", "tools");

/// A name, files with their contents, and the templates expected.
type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], TemplateSources);

#[test]
fn template_files_come_before_the_configuration() {
    let legacy = ("chat_template.json", r#"{"chat_template":"legacy"}"#);
    let list = (
        "tokenizer_config.json",
        r#"{"chat_template":[{"name":"default","template":"d"},{"name":"rag","template":"r"}]}"#,
    );
    let single = |text: &str| TemplateSources::Single(text.to_owned());
    let cases: [Case<'_>; 7] = [
        ("none", &[], TemplateSources::None),
        ("config", &[CONFIG], single("configured")),
        ("jinja", &[CONFIG, legacy, JINJA], single("file")),
        ("legacy", &[CONFIG, legacy], single("legacy")),
        ("list", &[list], named(&[("default", "d"), ("rag", "r")])),
        (
            "extra",
            &[CONFIG, JINJA, EXTRA],
            named(&[("default", "file"), ("tool_use", "tools")]),
        ),
        (
            "only_extra",
            &[CONFIG, EXTRA],
            named(&[("tool_use", "tools")]),
        ),
    ];
    for (name, files, expected) in cases {
        assert_eq!(Scratch::new(files).read().templates, expected, "{name}");
    }
}

#[test]
fn the_map_of_special_tokens_counts_only_without_a_list_by_id() {
    let map = (
        "special_tokens_map.json",
        r#"{"eos_token":"new","pad_token":"pad"}"#,
    );
    let old = ("tokenizer_config.json", r#"{"eos_token":"old"}"#);
    let config = Scratch::new(&[old, map]).read().config;
    assert_eq!(
        (config["eos_token"].as_str(), config["pad_token"].as_str()),
        (Some("new"), Some("pad"))
    );
    let listed = (
        "tokenizer_config.json",
        r#"{"eos_token":"old","added_tokens_decoder":{}}"#,
    );
    let config = Scratch::new(&[listed, map]).read().config;
    assert_eq!(config["eos_token"].as_str(), Some("old"));
    assert!(!config.contains_key("pad_token"));
}

#[test]
fn broken_files_are_named() {
    let scratch = Scratch::new(&[("tokenizer_config.json", "{")]);
    let error = read(scratch.0.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
    let scratch = Scratch::new(&[("tokenizer_config.json", r#"{"chat_template":5}"#)]);
    assert!(matches!(
        read(scratch.0.path()),
        Err(ModelFileError::Json { .. })
    ));
}
