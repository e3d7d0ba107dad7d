//! A prompt with images as an engine renders it: its `…/render` routes answer with token ids, and
//! with the name and the place of each image among them.

use std::collections::BTreeMap;

use serde::Deserialize;
use warmroute_proto::hash::PlacedItem;

use super::PromptRoute;

/// Token ids and images of a prompt. The images follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedPrompt {
    pub tokens: Vec<u32>,
    pub images: Vec<PlacedItem>,
}

/// Why blocks cannot be named by an engine's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableRendering {
    #[error("it is no rendered prompt")]
    Form,
    #[error("it has media besides images")]
    OtherMedia,
    #[error("its images are not places in its tokens")]
    Places,
}

/// Asks for names and places only: processed images are many times the size of a prompt. vLLM
/// 0.26 ignores the field.
const WITHOUT_TENSORS: &[u8] = br#","mm_payload":"none"}"#;

/// The path at which engines render the prompts of a route; `None` for prompts without images.
pub const fn render_path(route: PromptRoute) -> Option<&'static str> {
    match route {
        PromptRoute::ChatCompletions => Some("/v1/chat/completions/render"),
        PromptRoute::Responses => Some("/v1/responses/render"),
        PromptRoute::Messages => Some("/v1/messages/render"),
        PromptRoute::Completions
        | PromptRoute::Embeddings
        | PromptRoute::Pooling
        | PromptRoute::TokenIds
        | PromptRoute::Embed => None,
    }
}

/// A request's body as a render route gets it. `None` if it is no object with members.
pub fn render_body(body: &[u8]) -> Option<Vec<u8>> {
    let members = body.trim_ascii_end().strip_suffix(b"}")?.trim_ascii_end();
    let has_members = !members.ends_with(b"{");
    // The last of two equal members counts.
    has_members.then(|| [members, WITHOUT_TENSORS].concat())
}

#[derive(Deserialize)]
struct Rendering {
    token_ids: Vec<u32>,
    features: Option<Features>,
}

#[derive(Deserialize)]
struct Features {
    mm_hashes: BTreeMap<String, Vec<String>>,
    mm_placeholders: BTreeMap<String, Vec<PlaceholderRange>>,
}

#[derive(Deserialize)]
struct PlaceholderRange {
    offset: usize,
    length: usize,
}

const IMAGES: &str = "image";

impl RenderedPrompt {
    /// Reads the answer of a render route to a request with images.
    pub fn read(answer: &[u8]) -> Result<Self, UnusableRendering> {
        let rendering: Rendering =
            serde_json::from_slice(answer).map_err(|_| UnusableRendering::Form)?;
        let features = rendering.features.ok_or(UnusableRendering::Form)?;
        let (mut names, mut places) = (features.mm_hashes, features.mm_placeholders);
        let images = names.remove(IMAGES).zip(places.remove(IMAGES));
        if !names.is_empty() || !places.is_empty() {
            return Err(UnusableRendering::OtherMedia);
        }
        let (names, places) = images.ok_or(UnusableRendering::Form)?;
        if names.is_empty() || names.len() != places.len() {
            return Err(UnusableRendering::Places);
        }
        let placed = names
            .into_iter()
            .zip(places)
            .map(|(name, place)| PlacedItem {
                identifier: name.into(),
                offset: place.offset,
                length: place.length,
            });
        let mut images: Vec<PlacedItem> = placed.collect();
        images.sort_by_key(|image| image.offset);
        let mut free = 0;
        for image in &images {
            let end = image.offset.checked_add(image.length);
            let end = end.filter(|&end| end <= rendering.token_ids.len());
            match end {
                Some(end) if image.length > 0 && image.offset >= free => free = end,
                Some(_) | None => return Err(UnusableRendering::Places),
            }
        }
        Ok(Self {
            tokens: rendering.token_ids,
            images,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(features: Value) -> Result<RenderedPrompt, UnusableRendering> {
        let answer = json!({
            "token_ids": [1, 2, 2, 3, 2, 4], "features": features, "sampling_params": {"n": 1},
        });
        RenderedPrompt::read(answer.to_string().as_bytes())
    }

    fn places(places: &[(i64, i64)]) -> Value {
        let hashes: Vec<String> = (0..places.len()).map(|name| name.to_string()).collect();
        let ranges = places
            .iter()
            .map(|(offset, length)| json!({"offset": offset, "length": length}));
        json!({
            "mm_hashes": {"image": hashes},
            "mm_placeholders": {"image": ranges.collect::<Vec<_>>()},
            "kwargs_data": null,
        })
    }

    #[test]
    fn images_are_read_in_the_order_of_the_tokens() {
        let rendered = read(places(&[(4, 1), (1, 2)])).unwrap();
        assert_eq!(rendered.tokens, [1, 2, 2, 3, 2, 4]);
        let images = rendered.images.iter();
        let images: Vec<_> = images
            .map(|i| (&*i.identifier, i.offset, i.length))
            .collect();
        assert_eq!(images, [("1", 1, 2), ("0", 4, 1)]);
    }

    #[test]
    fn an_answer_that_places_no_image_is_not_used() {
        use UnusableRendering::{Form, OtherMedia, Places};
        let wrong: [&[(i64, i64)]; 5] = [&[], &[(4, 3)], &[(0, 0)], &[(1, 2), (2, 1)], &[(6, 1)]];
        for wrong in wrong {
            assert_eq!(read(places(wrong)), Err(Places), "{wrong:?}");
        }
        let mut with_sound = places(&[(1, 2)]);
        with_sound["mm_hashes"]["audio"] = json!(["a"]);
        assert_eq!(read(with_sound), Err(OtherMedia));
        let mut unnamed = places(&[(1, 2)]);
        unnamed["mm_hashes"]["image"] = json!([]);
        assert_eq!(read(unnamed), Err(Places));
        for form in [json!(null), json!({}), places(&[(-1, 1)])] {
            assert_eq!(read(form.clone()), Err(Form), "{form}");
        }
        assert_eq!(RenderedPrompt::read(b"{\"token_ids\":[1]}"), Err(Form));
    }

    #[test]
    fn a_body_asks_for_no_tensors() {
        let body = render_body(b" {\"mm_payload\":\"tensors\",\"messages\":[]} \n").unwrap();
        let text = String::from_utf8(body).unwrap();
        assert_eq!(
            text,
            " {\"mm_payload\":\"tensors\",\"messages\":[],\"mm_payload\":\"none\"}"
        );
        for no_object in ["", "[]", "{}", " { } "] {
            assert_eq!(render_body(no_object.as_bytes()), None);
        }
    }
}
