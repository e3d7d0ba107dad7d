//! Converts a tokenizer's file of another form to a `tokenizer.json`, as the libraries of vLLM do.
//! Pure.
//!
//! The rules are those of transformers 5.20, the newest that vLLM 0.33 admits: `AutoTokenizer`
//! chooses a class, `convert_slow_tokenizer.py` and `tokenization_utils_tokenizers.py` convert, and
//! `tokenization_llama.py` and `tokenization_gemma.py` are two classes with rules of their own.
//! Mistral's form follows `mistral_common`. The model's own code, which is not read, is known by
//! the name of its file. `testdata/tokenizer_files` has files, and the ids of these libraries.

mod charsmap;
mod definition;
mod sentencepiece;
mod tiktoken;

use serde_json::{Map, Value};

/// Largest token in bytes. Runs of blanks have up to 128 characters.
const TOKEN_BYTES_MAX: usize = 1 << 10;

/// Most tokens in a file.
const TOKENS_MAX: usize = 1 << 21;

/// A file that is not a `tokenizer.json`. The first form that a directory has counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ForeignForm {
    /// `tekken.json`, Mistral's.
    Tekken,
    /// `tokenizer.model`: SentencePiece's form, or tiktoken's.
    Model,
    /// `tiktoken.model`.
    Tiktoken,
    /// `*.tiktoken`, which only the model's own code reads.
    NamedTiktoken,
}

/// A file cannot be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConversionError {
    #[error("the file is malformed: {0}")]
    Malformed(String),
    #[error("the file is too large: {0}")]
    TooLarge(&'static str),
    #[error(
        "the model's own code reads this file, by rules that the router does not know: \
         convert it with transformers' AutoTokenizer and save_pretrained, if that can"
    )]
    OwnCode,
    #[error(
        "the router does not know the rules of {0}: \
         convert it with transformers' AutoTokenizer and save_pretrained"
    )]
    OtherClass(String),
    #[error("{0} is not in the vocabulary")]
    NoToken(String),
}

/// The files beside a tokenizer's, as far as a conversion depends on them.
#[derive(Debug, Default)]
pub(crate) struct Configurations {
    /// `tokenizer_config.json`.
    pub tokenizer: Map<String, Value>,
    /// `config.json`.
    pub model: Map<String, Value>,
}

/// The class that the engine reads the file with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenizerClass {
    Llama,
    Gemma,
    /// transformers' `TokenizersBackend`.
    Generic,
    /// Moonshot's `tokenization_kimi.py`.
    Kimi,
    /// `tokenization_qwen.py` of the first Qwen.
    Qwen,
}

impl ForeignForm {
    /// The form of a file by its name.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        match name {
            "tekken.json" => Some(Self::Tekken),
            "tokenizer.model" => Some(Self::Model),
            "tiktoken.model" => Some(Self::Tiktoken),
            _ if name.ends_with(".tiktoken") => Some(Self::NamedTiktoken),
            _ => None,
        }
    }

    /// Largest file that is read. Known ones have up to 20 MB in Mistral's form, 5 MB otherwise.
    pub(crate) const fn bytes_max(self) -> u64 {
        match self {
            Self::Tekken => 64 << 20,
            Self::Model | Self::Tiktoken | Self::NamedTiktoken => 16 << 20,
        }
    }

    /// Whether the engine uses the templates beside the file. Mistral's library has its own.
    pub(crate) fn has_templates(self) -> bool {
        self != Self::Tekken
    }

    /// The `tokenizer.json` for a file's content. Adds to the tokenizer's configuration the named
    /// tokens that the engine takes for granted.
    pub(crate) fn convert(
        self,
        content: &[u8],
        configurations: &mut Configurations,
    ) -> Result<Vec<u8>, ConversionError> {
        if self == Self::Tekken {
            // Mistral's library does not read it.
            configurations.tokenizer.clear();
            return tiktoken::of_tekken(content);
        }
        let class = TokenizerClass::of(configurations)?;
        let config = &mut configurations.tokenizer;
        if self == Self::Model {
            match sentencepiece::read(content) {
                Ok(model) => return sentencepiece::convert(&model, class, config),
                // transformers tries both forms, too.
                Err(error) if !tiktoken::is_form(content) => return Err(error),
                Err(_) => {}
            }
        }
        if self == Self::NamedTiktoken
            && !matches!(class, TokenizerClass::Kimi | TokenizerClass::Qwen)
        {
            return Err(ConversionError::OwnCode);
        }
        tiktoken::convert(content, class, config)
    }
}

/// Model types whose class `LlamaTokenizer` or `GemmaTokenizer` transformers takes for a mistake:
/// those of `TOKENIZER_MAPPING_NAMES` with a class of the library itself, and
/// `MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`.
const GENERIC_MODEL_TYPES: &str = "\
    EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chameleon chatlm \
    cohere_asr deepseek_ocr deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 \
    deepseek_vl deepseek_vl_hybrid deepseek_vl_v2 ernie4_5 ernie4_5_moe flex_olmo fuyu glm \
    glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode \
    granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax \
    hyperclovax_vlm internlm2 jamba janus kimi_k25 kimi_linear kosmos-2 llava llava_next \
    mimo_v2_flash minicpm3 minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 \
    mistral mistral3 mixtral modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 \
    nystromformer olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon \
    phi3 phi3_v phimoe pix2struct pixtral smolvlm stablelm step3_vl step3p5 umt5 \
    unlimited_ocr vipllava voxtral voxtral_realtime xlm-roberta-xl";

/// Model types whose class is `GemmaTokenizer` where none is named.
const GEMMA_MODEL_TYPES: &str = "\
    diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma \
    shieldgemma2 t5gemma zaya";

impl TokenizerClass {
    fn of(configurations: &Configurations) -> Result<Self, ConversionError> {
        let Configurations { tokenizer, model } = configurations;
        if let Some(code) = tokenizer.get("auto_map") {
            return Self::of_own_code(&code.to_string(), model);
        }
        let class = [tokenizer, model]
            .into_iter()
            .find_map(|config| config.get("tokenizer_class")?.as_str());
        let model_type = model.get("model_type").and_then(Value::as_str);
        let model_type = model_type.unwrap_or_default();
        let is_generic = is_among(GENERIC_MODEL_TYPES, model_type);
        match class.map(|class| class.strip_suffix("Fast").unwrap_or(class)) {
            Some("LlamaTokenizer" | "GemmaTokenizer") if is_generic => Ok(Self::Generic),
            Some("LlamaTokenizer") => Ok(Self::Llama),
            Some("GemmaTokenizer") => Ok(Self::Gemma),
            Some("PreTrainedTokenizer" | "TokenizersBackend") => Ok(Self::Generic),
            Some(other) => Err(ConversionError::OtherClass(other.to_owned())),
            None if is_among(GEMMA_MODEL_TYPES, model_type) => Ok(Self::Gemma),
            None => Ok(Self::Generic),
        }
    }

    fn of_own_code(code: &str, model: &Map<String, Value>) -> Result<Self, ConversionError> {
        if code.contains("tokenization_kimi.") {
            return Ok(Self::Kimi);
        }
        // The variant with images has other special tokens.
        if code.contains("tokenization_qwen.") && !model.contains_key("visual") {
            return Ok(Self::Qwen);
        }
        Err(ConversionError::OwnCode)
    }

    /// Names the tokens that a class has where the configuration does not mention them.
    fn name_tokens(self, config: &mut Map<String, Value>) {
        let defaults: &[(&str, &str)] = match self {
            Self::Llama => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
            ],
            Self::Gemma => &[
                ("bos_token", "<bos>"),
                ("eos_token", "<eos>"),
                ("unk_token", "<unk>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
            ],
            Self::Generic | Self::Kimi | Self::Qwen => &[],
        };
        for (name, text) in defaults {
            name_token(config, name, text);
        }
    }
}

fn is_among(names: &str, name: &str) -> bool {
    names.split_ascii_whitespace().any(|other| other == name)
}

fn name_token(config: &mut Map<String, Value>, name: &str, text: &str) {
    if !config.contains_key(name) {
        config.insert(name.to_owned(), text.into());
    }
}

/// The texts of `added_tokens_decoder` by id.
fn listed_tokens(config: &Map<String, Value>) -> Vec<(u32, &str)> {
    let listed = config
        .get("added_tokens_decoder")
        .and_then(Value::as_object);
    let listed = listed.into_iter().flatten();
    listed
        .filter_map(|(id, token)| Some((id.parse().ok()?, text_of(token)?)))
        .collect()
}

/// A token's text, given alone or with flags.
fn text_of(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn malformed(reason: &str) -> ConversionError {
    ConversionError::Malformed(reason.to_owned())
}

#[cfg(test)]
mod tests;
