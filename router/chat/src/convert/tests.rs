use std::fs;
use std::path::{Path, PathBuf};

use prost::Message as _;
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::model_files::ModelFiles;
use crate::openai::SpecialTokens;
use crate::tokenize::{EncoderKind, Tokenizer};

/// Written by `testdata/tokenizer_files/make.py` with the libraries that vLLM uses.
const EXPECTED: &str = include_str!("../../testdata/tokenizer_files/expected.json");

#[derive(Deserialize)]
struct Expected {
    texts: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    /// Its name in the model's directory, and in that of the test's data.
    file: String,
    source: String,
    tokenizer_config: Value,
    config: Value,
    before: Vec<u32>,
    after: Vec<u32>,
    ids: Vec<Vec<u32>>,
}

fn expected() -> Expected {
    serde_json::from_str(EXPECTED).unwrap()
}

fn data(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tokenizer_files");
    directory.join(name)
}

impl Case {
    fn directory(&self) -> TempDir {
        let directory = TempDir::new().unwrap();
        let write = |name: &str, content: &[u8]| {
            fs::write(directory.path().join(name), content).unwrap();
        };
        write(&self.file, &fs::read(data(&self.source)).unwrap());
        write(
            "tokenizer_config.json",
            self.tokenizer_config.to_string().as_bytes(),
        );
        write("config.json", self.config.to_string().as_bytes());
        directory
    }

    fn configurations(&self) -> Configurations {
        let object = |value: &Value| value.as_object().unwrap().clone();
        Configurations {
            tokenizer: object(&self.tokenizer_config),
            model: object(&self.config),
        }
    }
}

#[test]
fn converted_files_have_the_ids_of_the_engines_libraries() {
    let expected = expected();
    let mut wrong = Vec::new();
    for case in &expected.cases {
        let directory = case.directory();
        let tokenizer = Tokenizer::load(directory.path()).unwrap();
        for (text, ids) in expected.texts.iter().zip(&case.ids) {
            let surrounded = [&case.before[..], ids, &case.after].concat();
            for (special, ids) in [
                (SpecialTokens::Omit, ids),
                (SpecialTokens::Add, &surrounded),
            ] {
                let ours = tokenizer.encode(text, special);
                if ours.as_ref() != Ok(ids) {
                    wrong.push(format!("{} {text:?}\n  {ours:?}\n  {ids:?}", case.name));
                }
            }
        }
        assert_eq!(tokenizer.compare_generated(300, 7), None, "{}", case.name);
    }
    assert!(wrong.is_empty(), "{}: {}", wrong.len(), wrong.join("\n"));
}

#[test]
fn the_own_encoder_knows_converted_byte_pair_encoding() {
    for case in expected().cases {
        let tokenizer = Tokenizer::load(case.directory().path()).unwrap();
        // A blank token beside one that takes blanks, Unigram, and vocabularies that lack bytes.
        let is_other = case.name == "llama_legacy"
            || case.name.contains("unigram")
            || case.source == "bpe_unknown.model";
        let encoder = if is_other {
            EncoderKind::Reference
        } else {
            EncoderKind::Own
        };
        assert_eq!(tokenizer.encoder(), encoder, "{}", case.name);
    }
}

/// Loads a file's content and encodes a few texts. Errors are as good as ids; a panic inside the
/// reference is none of them.
fn try_out(case: &Case, content: &[u8]) -> bool {
    let form = ForeignForm::of_name(&case.file).unwrap();
    let mut configurations = case.configurations();
    let Ok(tokenizer) = form.convert(content, &mut configurations) else {
        return false;
    };
    let files = ModelFiles {
        tokenizer,
        config: configurations.tokenizer,
        ..ModelFiles::default()
    };
    let Ok(tokenizer) = Tokenizer::of_files(files) else {
        return false;
    };
    for text in [
        "",
        "Hello  ﬁne wörld",
        "<s>①\u{200b}e\u{301} 東京<tool>\n\n",
    ] {
        if let Err(error) = tokenizer.encode(text, SpecialTokens::Add) {
            assert!(!error.to_string().contains("regex"), "{}", case.name);
        }
    }
    true
}

#[test]
fn damaged_files_are_errors_or_other_tokenizers() {
    let (mut loaded, mut refused) = (0, 0);
    for case in expected().cases {
        let content = fs::read(data(&case.source)).unwrap();
        assert!(try_out(&case, &content), "{}", case.name);
        let mut count = |content: &[u8]| match try_out(&case, content) {
            true => loaded += 1,
            false => refused += 1,
        };
        for at in (0..content.len()).step_by(content.len() / 24) {
            count(&content[..at]);
            for flipped in [0x01, 0x15, 0x80] {
                let mut changed = content.clone();
                changed[at] ^= flipped;
                count(&changed);
            }
        }
    }
    assert!(loaded > 100 && refused > 100, "{loaded} {refused}");
}

#[test]
fn a_table_of_replacements_is_applied_only_if_it_is_sound() {
    let case = expected()
        .cases
        .into_iter()
        .find(|case| case.name == "unigram");
    let case = case.unwrap();
    let mut model = sentencepiece::read(&fs::read(data(&case.source)).unwrap()).unwrap();
    let table = model.normalizer.charsmap.clone();
    assert!(charsmap::is_sound(&table) && !charsmap::is_sound(&table[..3]));
    let (mut sound, mut damaged) = (0, 0);
    for at in 0..table.len() {
        let mut changed = table.clone();
        changed[at] ^= 1 << (at % 8);
        if charsmap::is_sound(&changed) {
            sound += 1;
            if sound % 16 == 0 {
                model.normalizer.charsmap = changed;
                assert!(try_out(&case, &model.encode_to_vec()), "{at}");
            }
        } else {
            damaged += 1;
        }
    }
    assert!(sound > 100 && damaged > 100, "{sound} {damaged}");
}

fn refusal(form: ForeignForm, content: &[u8], tokenizer: Value, model: Value) -> String {
    let object = |value: Value| value.as_object().unwrap().clone();
    let mut configurations = Configurations {
        tokenizer: object(tokenizer),
        model: object(model),
    };
    let converted = form.convert(content, &mut configurations);
    converted.unwrap_err().to_string()
}

#[test]
fn memory_and_work_of_a_conversion_are_bounded() {
    let generic = || json!({"tokenizer_class": "TokenizersBackend"});
    let ranks = fs::read(data("ranks.tiktoken")).unwrap();
    let mut listed = generic();
    listed["added_tokens_decoder"] = json!({"4000000000": {"content": "<far>"}});
    let error = refusal(ForeignForm::Tiktoken, &ranks, listed, json!({}));
    assert!(error.contains("too large: an added token"), "{error}");

    let mut model = sentencepiece::read(&fs::read(data("bpe.model")).unwrap()).unwrap();
    let mut piece = model.pieces[100].clone();
    for length in 1..=1024 {
        piece.text = "a".repeat(length);
        model.pieces.push(piece.clone());
    }
    let error = refusal(
        ForeignForm::Model,
        &model.encode_to_vec(),
        generic(),
        json!({}),
    );
    assert!(error.contains("too many merges"), "{error}");
    piece.text.push('a');
    model.pieces = vec![piece];
    let error = refusal(
        ForeignForm::Model,
        &model.encode_to_vec(),
        generic(),
        json!({}),
    );
    assert!(error.contains("too long"), "{error}");

    let size = json!({"config": {"pattern": "x", "default_vocab_size": 1_u64 << 40,
        "default_num_special_tokens": 10}, "vocab": []});
    let size = size.to_string();
    let error = refusal(ForeignForm::Tekken, size.as_bytes(), json!({}), json!({}));
    assert!(error.contains("fewer tokens"), "{error}");
}

#[test]
fn files_with_rules_that_are_not_known_are_refused() {
    let ranks = fs::read(data("ranks.tiktoken")).unwrap();
    let code = |file: &str| json!({"auto_map": {"AutoTokenizer": [file, null]}});
    let refused = |tokenizer, model| refusal(ForeignForm::Tiktoken, &ranks, tokenizer, model);
    let own = refused(code("tokenization_own.OwnTokenizer"), json!({}));
    assert!(
        own.contains("own code") && own.contains("save_pretrained"),
        "{own}"
    );
    let images = refused(
        code("tokenization_qwen.QWenTokenizer"),
        json!({"visual": {}}),
    );
    assert_eq!(images, own);
    let named = refusal(ForeignForm::NamedTiktoken, &ranks, json!({}), json!({}));
    assert_eq!(named, own);
    let other = refused(json!({"tokenizer_class": "T5TokenizerFast"}), json!({}));
    assert!(other.contains("T5Tokenizer"), "{other}");
    let lacking = json!({"add_bos_token": true, "bos_token": "<nowhere>"});
    let lacking = refused(lacking, json!({}));
    assert_eq!(lacking, "<nowhere> is not in the vocabulary");
}

#[test]
fn the_merges_of_one_token_are_in_the_order_of_its_kind() {
    use definition::{BpeModel, MergeOrder, Vocabulary};
    let merges = |order| {
        let ids = [
            ("ab", 0),
            ("bc", 1),
            ("a", 2),
            ("b", 3),
            ("c", 4),
            ("abc", 5),
        ];
        let vocabulary = Vocabulary::new(ids.map(|(text, id)| (text.to_owned(), id)).to_vec());
        let model = BpeModel {
            merges: vocabulary.merges(order).unwrap(),
            vocabulary,
            unknown: None,
            fuses_unknown: false,
            byte_fallback: false,
            ignores_merges: false,
        };
        let written = serde_json::to_value(&model).unwrap();
        written["merges"].as_array().unwrap()[2..].to_vec()
    };
    let by_length = [json!(["a", "bc"]), json!(["ab", "c"])];
    assert_eq!(merges(MergeOrder::LeftLength), by_length);
    let by_id = [json!(["ab", "c"]), json!(["a", "bc"])];
    assert_eq!(merges(MergeOrder::LeftId), by_id);
}
