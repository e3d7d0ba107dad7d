//! SentencePiece's `tokenizer.model`, a protobuf message (`sentencepiece_model.proto`).

use std::collections::HashMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use prost::Message as _;
use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::{Map, Value, json};

use super::definition::{
    AddedTokenEntry, BpeModel, Definition, MergeOrder, Vocabulary, post_processor,
};
use super::{
    ConversionError, TOKEN_BYTES_MAX, TOKENS_MAX, TokenizerClass, charsmap, listed_tokens,
    malformed, name_token, text_of,
};

/// `ModelProto`. Other fields are skipped.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SentencePieceModel {
    #[prost(message, repeated, tag = "1")]
    pub(super) pieces: Vec<SentencePiece>,
    #[prost(message, required, tag = "2")]
    trainer: TrainerSpec,
    #[prost(message, required, tag = "3")]
    pub(super) normalizer: NormalizerSpec,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SentencePiece {
    #[prost(string, required, tag = "1")]
    pub(super) text: String,
    #[prost(float, required, tag = "2")]
    score: f32,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TrainerSpec {
    #[prost(int32, optional, tag = "3", default = "1")]
    model_type: Option<i32>,
    #[prost(bool, required, tag = "35")]
    byte_fallback: bool,
    #[prost(int32, required, tag = "40")]
    unk_id: i32,
    #[prost(int32, optional, tag = "41", default = "1")]
    bos_id: Option<i32>,
    #[prost(int32, optional, tag = "42", default = "2")]
    eos_id: Option<i32>,
    #[prost(string, optional, tag = "45", default = "<unk>")]
    unk_piece: Option<String>,
    #[prost(string, optional, tag = "46", default = "<s>")]
    bos_piece: Option<String>,
    #[prost(string, optional, tag = "47", default = "</s>")]
    eos_piece: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct NormalizerSpec {
    #[prost(bytes = "vec", required, tag = "2")]
    pub(super) charsmap: Vec<u8>,
}

const UNIGRAM: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Reads a file and checks what the conversion relies on.
pub(super) fn read(content: &[u8]) -> Result<SentencePieceModel, ConversionError> {
    let model = SentencePieceModel::decode(content)
        .map_err(|error| ConversionError::Malformed(error.to_string()))?;
    if model.pieces.is_empty() {
        return Err(malformed("it has no pieces"));
    }
    if model.pieces.len() > TOKENS_MAX {
        return Err(ConversionError::TooLarge("it has too many pieces"));
    }
    for piece in &model.pieces {
        if piece.text.is_empty() {
            return Err(malformed("a piece is empty"));
        }
        if piece.text.len() > TOKEN_BYTES_MAX {
            return Err(ConversionError::TooLarge("a piece is too long"));
        }
        if !piece.score.is_finite() {
            return Err(malformed("a score is no number"));
        }
    }
    let charsmap = &model.normalizer.charsmap;
    if !charsmap.is_empty() && !charsmap::is_sound(charsmap) {
        return Err(malformed("its table of replacements is damaged"));
    }
    Ok(model)
}

/// The `tokenizer.json` that a class of transformers makes of a model.
pub(super) fn convert(
    model: &SentencePieceModel,
    class: TokenizerClass,
    config: &mut Map<String, Value>,
) -> Result<Vec<u8>, ConversionError> {
    let trainer = &model.trainer;
    let pieces = model.pieces.iter();
    let mut names: Vec<String> = pieces.map(|piece| piece.text.clone()).collect();
    class.name_tokens(config);
    if class == TokenizerClass::Generic {
        name_tokens_of(trainer, config);
        if trainer.model_type() == UNIGRAM {
            return unigram(model, config);
        }
        rename_listed(&mut names, config);
    }
    let (mut normalizer, mut pre_tokenizer, mut unknown) = (Value::Null, Value::Null, None);
    let mut byte_fallback = true;
    match class {
        TokenizerClass::Llama => pre_tokenizer = metaspace(config),
        TokenizerClass::Gemma => {
            unknown = config.get("unk_token").and_then(text_of).map(str::to_owned);
            normalizer = blanks();
        }
        TokenizerClass::Generic => {
            unknown = Some(trainer.unk_piece().to_owned());
            byte_fallback = trainer.byte_fallback;
            normalizer = replacements(&model.normalizer);
        }
        TokenizerClass::Kimi | TokenizerClass::Qwen => return Err(ConversionError::OwnCode),
    }
    let vocabulary = Vocabulary::new(names.into_iter().zip(0..).collect());
    let ids = vocabulary.ids();
    let post_processor = post_processor(config, |token| ids.get(token).copied())?;
    let definition = Definition {
        added_tokens: added_tokens(model, config),
        normalizer,
        pre_tokenizer,
        post_processor,
        model: BpeModel {
            merges: vocabulary.merges(MergeOrder::LeftLength)?,
            vocabulary,
            unknown,
            fuses_unknown: true,
            byte_fallback,
            ignores_merges: false,
        },
    };
    definition.to_json()
}

fn unigram(
    model: &SentencePieceModel,
    config: &Map<String, Value>,
) -> Result<Vec<u8>, ConversionError> {
    let id = |token: &str| {
        (0..)
            .zip(&model.pieces)
            .find(|(_, piece)| piece.text == token)
    };
    let definition = Definition {
        added_tokens: added_tokens(model, config),
        normalizer: replacements(&model.normalizer),
        pre_tokenizer: Value::Null,
        post_processor: post_processor(config, |token| id(token).map(|(id, _)| id))?,
        model: UnigramModel(model),
    };
    definition.to_json()
}

fn blanks() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

/// The pre-tokenizer of the class `LlamaTokenizer`. An absent `legacy` is false there.
fn metaspace(config: &Map<String, Value>) -> Value {
    let flag = |name: &str| config.get(name).and_then(Value::as_bool);
    let scheme = match (flag("add_prefix_space"), flag("legacy")) {
        (Some(false), _) => "never",
        (_, Some(true)) => "always",
        (_, _) => "first",
    };
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false})
}

fn replacements(normalizer: &NormalizerSpec) -> Value {
    let charsmap = &normalizer.charsmap;
    let table = (!charsmap.is_empty()).then(|| {
        let charsmap = BASE64_STANDARD.encode(charsmap);
        json!({"type": "Precompiled", "precompiled_charsmap": charsmap})
    });
    let all: Vec<Value> = table.into_iter().chain([blanks()]).collect();
    json!({"type": "Sequence", "normalizers": all})
}

/// Names the tokens that the model names and the configuration does not mention.
fn name_tokens_of(trainer: &TrainerSpec, config: &mut Map<String, Value>) {
    let named = [
        ("bos_token", trainer.bos_id(), trainer.bos_piece(), "<s>"),
        ("eos_token", trainer.eos_id(), trainer.eos_piece(), "</s>"),
        ("unk_token", trainer.unk_id, trainer.unk_piece(), "<unk>"),
    ];
    for (name, id, piece, default) in named {
        if id >= 0 {
            let text = if piece.is_empty() { default } else { piece };
            name_token(config, name, text);
        }
    }
}

/// A listed token takes the place of the piece with its id, unless there is a piece of its name.
fn rename_listed(names: &mut [String], config: &Map<String, Value>) {
    let listed = listed_tokens(config);
    // Pieces with the name of each listed token.
    let mut named: HashMap<&str, u32> = listed.iter().map(|(_, text)| (*text, 0)).collect();
    for name in names.iter() {
        if let Some(count) = named.get_mut(name.as_str()) {
            *count += 1;
        }
    }
    for (id, text) in listed {
        let is_free = named.get(text) == Some(&0);
        if let (Some(name), true) = (names.get_mut(id as usize), is_free) {
            if let Some(count) = named.get_mut(name.as_str()) {
                *count -= 1;
            }
            text.clone_into(name);
            named.insert(text, 1);
        }
    }
}

/// Control pieces and user-defined ones, which are found in the text. Special tokens that the
/// configuration lists replace them.
fn added_tokens(model: &SentencePieceModel, config: &Map<String, Value>) -> Vec<AddedTokenEntry> {
    let has_own = config.contains_key("additional_special_tokens")
        || config
            .get("extra_special_tokens")
            .is_some_and(Value::is_array);
    let pieces = (0..).zip(&model.pieces).filter(|_| !has_own);
    let added = pieces.filter(|(_, piece)| [CONTROL, USER_DEFINED].contains(&piece.kind()));
    added
        .map(|(id, piece)| AddedTokenEntry {
            special: piece.kind() == CONTROL,
            ..AddedTokenEntry::plain(id, piece.text.clone())
        })
        .collect()
}

struct UnigramModel<'m>(&'m SentencePieceModel);

impl Serialize for UnigramModel<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let SentencePieceModel {
            pieces, trainer, ..
        } = self.0;
        let pieces = pieces.iter();
        let pieces: Vec<_> = pieces
            .map(|piece| (&piece.text, f64::from(piece.score)))
            .collect();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("type", "Unigram")?;
        map.serialize_entry("unk_id", &trainer.unk_id)?;
        map.serialize_entry("byte_fallback", &trainer.byte_fallback)?;
        map.serialize_entry("vocab", &pieces)?;
        map.end()
    }
}
