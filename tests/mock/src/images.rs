//! Images in chats: each becomes a run of placeholder tokens and a name of its content, as vLLM's
//! processors make them. No image is fetched or decoded: its URL or data is its content.

use serde_json::{Value, json};
use warmroute_chat::openai::SpecialTokens;
use warmroute_proto::hash::PlacedItem;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::text::Text;

/// Stands for an image in the text that a template renders.
const MARK: &str = "\u{fdd0}";
/// The token that an image consists of.
const PLACEHOLDER: u32 = 3;
/// Tokens of an image: no multiple of a block, so that images and text share blocks.
const IMAGE_TOKENS: usize = 40;
/// Tokens of an image whose `detail` is `low`: several fit into a block.
const LOW_DETAIL_TOKENS: usize = 5;
/// Bytes of an image's processed form.
const TENSOR_BYTES: usize = 5 << 20;

/// An image of a request.
pub(crate) struct Image {
    identifier: String,
    tokens: usize,
}

/// A prompt as the engine caches it.
#[derive(Clone, Default)]
pub(crate) struct EncodedPrompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) items: Vec<PlacedItem>,
}

impl From<Vec<u32>> for EncodedPrompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self {
            tokens,
            items: Vec::new(),
        }
    }
}

/// Takes the images out of a body, in the order of the text, and leaves marks in their places.
pub(crate) fn take(body: &mut Value) -> Vec<Image> {
    let mut images = Vec::new();
    for field in ["messages", "input"] {
        if let Some(value) = body.get_mut(field) {
            take_from(value, &mut images);
        }
    }
    images
}

fn take_from(value: &mut Value, images: &mut Vec<Image>) {
    let text_kind = match value["type"].as_str() {
        Some("image_url" | "image") => Some("text"),
        Some("input_image") => Some("input_text"),
        Some(_) | None => None,
    };
    if let Some(kind) = text_kind {
        images.push(Image::of(value));
        *value = json!({"type": kind, "text": MARK});
        return;
    }
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| take_from(value, images)),
        Value::Object(members) => members
            .values_mut()
            .for_each(|value| take_from(value, images)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

impl Image {
    fn of(part: &Value) -> Self {
        let content = match (&part["image_url"]["url"], &part["image_url"]) {
            (Value::String(url), _) | (_, Value::String(url)) => url.clone(),
            _ => part["source"].to_string(),
        };
        let digest = |seed| xxh3_128_with_seed(content.as_bytes(), seed);
        let by_content = || format!("{:032x}{:032x}", digest(0), digest(1));
        let low = [&part["detail"], &part["image_url"]["detail"]].contains(&&json!("low"));
        Self {
            identifier: part["uuid"].as_str().map_or_else(by_content, str::to_owned),
            tokens: if low { LOW_DETAIL_TOKENS } else { IMAGE_TOKENS },
        }
    }
}

/// Encodes a rendered text with the images in the places of its marks.
pub(crate) fn encode(
    text: &Text,
    rendered: &str,
    special: SpecialTokens,
    images: Vec<Image>,
) -> Result<EncodedPrompt, String> {
    if images.is_empty() {
        return Ok(text.encode(rendered, special)?.into());
    }
    let mut prompt = EncodedPrompt::default();
    let mut pieces = rendered.split(MARK);
    prompt.tokens = text.encode(pieces.next().unwrap_or_default(), special)?;
    let mut images = images.into_iter();
    for piece in pieces {
        let image = images.next().ok_or("more marks than images")?;
        prompt.items.push(PlacedItem {
            identifier: image.identifier.into(),
            offset: prompt.tokens.len(),
            length: image.tokens,
        });
        let filled = prompt.tokens.len() + image.tokens;
        prompt.tokens.resize(filled, PLACEHOLDER);
        let after = text.encode(piece, SpecialTokens::Omit)?;
        prompt.tokens.extend(after);
    }
    match images.next() {
        None => Ok(prompt),
        Some(_) => Err("the template leaves out an image".to_owned()),
    }
}

/// What a render route reports of the images. `payload`: the request's `mm_payload`.
pub(crate) fn features(items: &[PlacedItem], payload: &Value) -> Value {
    if items.is_empty() {
        return Value::Null;
    }
    let hashes = items.iter().map(|item| &*item.identifier);
    let places = items
        .iter()
        .map(|item| json!({"offset": item.offset, "length": item.length}));
    let mut features = json!({
        "mm_hashes": {"image": hashes.collect::<Vec<_>>()},
        "mm_placeholders": {"image": places.collect::<Vec<_>>()},
        "kwargs_data": null,
    });
    if payload != "none" {
        let tensors = vec!["A".repeat(TENSOR_BYTES); items.len()];
        features["kwargs_data"] = json!({"image": tensors});
    }
    features
}
