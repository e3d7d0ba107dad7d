//! The bodies of a request that two engines serve, in the form of vLLM's KV connectors in pull mode.
//!
//! The prefill leg computes the prompt: it asks for one token, and for parameters by which another
//! engine can read the prompt's blocks. Its answer has these parameters in `kv_transfer_params`. The
//! decode leg is the client's body with the parameters, copied as they are.
//! Absent: knowledge of what the parameters contain.

use serde::de::Deserializer as _;
use serde_json::value::RawValue;
use warmroute_proto::label_enum;

use super::fields::{BodyFields, without_mark};
use super::rewrite::KeptMembers;

/// The member by which engines name blocks to each other.
const TRANSFER: &str = "kv_transfer_params";

/// What the prefill leg asks for.
const WANTED: &str = concat!(
    r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"#,
    r#""remote_block_ids":null,"remote_host":null,"remote_port":null}"#,
);

/// Members of the client that the prefill leg has with other values, or not at all.
const REPLACED: &[&str] = &[
    TRANSFER,
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "min_completion_tokens",
];

/// Members that make a request one for a single engine, but for these values.
const SINGLE: &[(&str, &[&str], UnsplitBody)] = &[
    ("n", &["1"], UnsplitBody::SeveralSequences),
    ("best_of", &["1"], UnsplitBody::SeveralSequences),
    ("use_beam_search", &["false"], UnsplitBody::BeamSearch),
    ("echo", &["false"], UnsplitBody::Echo),
    ("prompt_logprobs", &[], UnsplitBody::PromptLogprobs),
    (TRANSFER, &[], UnsplitBody::OwnTransfer),
];

/// The members that are read.
const FIELDS: &[&str] = &[
    "n",
    "best_of",
    "use_beam_search",
    "echo",
    "prompt_logprobs",
    TRANSFER,
    "prompt",
    "max_completion_tokens",
];

label_enum! {
    /// Why a body is for a single engine.
    pub enum UnsplitBody {
        SeveralSequences = "several_sequences",
        BeamSearch = "beam_search",
        SeveralPrompts = "several_prompts",
        /// The answer repeats the prompt.
        Echo = "echo",
        /// The answer has log probabilities of the prompt, which one engine computes as a whole.
        PromptLogprobs = "prompt_logprobs",
        /// The client transfers blocks itself.
        OwnTransfer = "own_transfer",
        /// Only the engine can read it.
        Unreadable = "unreadable",
    }
}

/// The body of the prefill leg for a client's body.
pub fn prefill_body(body: &[u8]) -> Result<Vec<u8>, UnsplitBody> {
    let fields = BodyFields::read(body, FIELDS).map_err(|_| UnsplitBody::Unreadable)?;
    for (name, values, reason) in SINGLE {
        let value = fields.raw(name).map(RawValue::get);
        if value.is_some_and(|value| !values.contains(&value)) {
            return Err(*reason);
        }
    }
    if fields.raw("prompt").is_some_and(has_several) {
        return Err(UnsplitBody::SeveralPrompts);
    }
    let mut json = serde_json::Deserializer::from_slice(without_mark(body));
    let kept = json.deserialize_map(KeptMembers::without(REPLACED));
    let mut members = kept.map_err(|_| UnsplitBody::Unreadable)?;
    members.push("stream", "false");
    members.push("max_tokens", "1");
    if fields.given("max_completion_tokens").is_some() {
        members.push("max_completion_tokens", "1");
    }
    members.push(TRANSFER, WANTED);
    Ok([b"{", members.text.as_slice(), b"}"].concat())
}

/// The body of the decode leg: the client's, of which [`prefill_body`] made one, with the parameters
/// of the prefill leg's answer behind its last member. `None` if the answer has no parameters.
pub fn decode_body(body: &[u8], answer: &[u8]) -> Option<Vec<u8>> {
    let fields = BodyFields::read(answer, &[TRANSFER]).ok()?;
    let params = fields.raw(TRANSFER)?.get();
    // Any object with a member.
    let is_known = params.strip_prefix('{')?.trim_start().starts_with('"');
    let end = memchr::memrchr(b'}', body).filter(|_| is_known)?;
    let (members, brace) = body.split_at(end);
    // The last of repeated members counts, so that it may stand behind a null.
    let added = format!(",\"{TRANSFER}\":{params}");
    Some([members, added.as_bytes(), brace].concat())
}

/// Whether a prompt is a list of any number of prompts but one. A list of numbers is one prompt.
fn has_several(prompt: &RawValue) -> bool {
    let list = prompt.get().strip_prefix('[').map(str::trim_start);
    list.is_some_and(|items| {
        let is_list_of_prompts = items.starts_with(['"', '[', ']']);
        is_list_of_prompts && serde_json::from_str::<[&RawValue; 1]>(prompt.get()).is_err()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill(body: &str) -> String {
        let body = prefill_body(body.as_bytes()).unwrap();
        String::from_utf8(body).unwrap()
    }

    fn decode(body: &str, answer: &str) -> Option<String> {
        let body = decode_body(body.as_bytes(), answer.as_bytes());
        body.map(|body| String::from_utf8(body).unwrap())
    }

    /// Member by member what the example proxy of vLLM sends.
    #[test]
    fn the_prefill_leg_asks_for_one_token_and_parameters() {
        let wanted = |limits: &str, members: &str| {
            format!(r#"{{{members},"stream":false,{limits},"kv_transfer_params":{WANTED}}}"#)
        };
        let one = r#""max_tokens":1"#;
        for (body, expected) in [
            (
                r#"{"model":"m","prompt":"a"}"#,
                wanted(one, r#""model":"m","prompt":"a""#),
            ),
            (
                "\u{feff}{ \"prompt\": [1, 2],\n \"temperature\": 0.10,\"stream\":true,\
                 \"stream_options\":{\"include_usage\":true},\"min_tokens\":7,\
                 \"min_completion_tokens\":7,\"max_tokens\":90,\"n\":1,\"echo\":false}",
                wanted(
                    one,
                    r#""prompt":[1, 2],"temperature":0.10,"n":1,"echo":false"#,
                ),
            ),
            (
                r#"{"messages":[],"max_completion_tokens":null,"kv_transfer_params":null}"#,
                wanted(
                    r#""max_tokens":1,"max_completion_tokens":1"#,
                    r#""messages":[]"#,
                ),
            ),
        ] {
            assert_eq!(prefill(body), expected);
        }
        let params: serde_json::Value = serde_json::from_str(WANTED).unwrap();
        assert_eq!(params["do_remote_decode"], true);
    }

    #[test]
    fn a_body_for_a_single_engine_is_not_split() {
        for (body, reason) in [
            (
                r#"{"prompt":"a","n":2}"#,
                Some(UnsplitBody::SeveralSequences),
            ),
            (
                r#"{"prompt":"a","best_of":3}"#,
                Some(UnsplitBody::SeveralSequences),
            ),
            (
                r#"{"prompt":"a","use_beam_search":true}"#,
                Some(UnsplitBody::BeamSearch),
            ),
            (r#"{"prompt":"a","echo":true}"#, Some(UnsplitBody::Echo)),
            (
                r#"{"prompt":"a","prompt_logprobs":0}"#,
                Some(UnsplitBody::PromptLogprobs),
            ),
            (
                r#"{"prompt":"a","kv_transfer_params":{}}"#,
                Some(UnsplitBody::OwnTransfer),
            ),
            (r#"{"prompt":["a","b"]}"#, Some(UnsplitBody::SeveralPrompts)),
            (
                r#"{"prompt":[ [1], [2]]}"#,
                Some(UnsplitBody::SeveralPrompts),
            ),
            (r#"{"prompt":[]}"#, Some(UnsplitBody::SeveralPrompts)),
            (r#"{"prompt":NaN}"#, Some(UnsplitBody::Unreadable)),
            (r#"{"prompt":["a"],"n":null}"#, None),
            (r#"{"prompt":[[1, 2]]}"#, None),
            (r#"{"prompt":[1, 2]}"#, None),
        ] {
            assert_eq!(prefill_body(body.as_bytes()).err(), reason, "{body}");
        }
    }

    #[test]
    fn the_decode_leg_is_the_clients_body_with_the_parameters_as_they_are() {
        let body = "{ \"prompt\":\"}\", \"stream\":true }\n";
        let answer = r#"{"choices":[],"kv_transfer_params":{"a" : [1,2.50],"b":"}"},"x":1}"#;
        let params = r#"{"a" : [1,2.50],"b":"}"}"#;
        let members = r#"{ "prompt":"}", "stream":true "#;
        let expected = format!("{members},\"kv_transfer_params\":{params}}}\n");
        assert_eq!(decode(body, answer), Some(expected));
        for answer in [
            "",
            "[]",
            "{}",
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":{}}"#,
            r#"{"kv_transfer_params":{ }}"#,
            r#"{"kv_transfer_params":"x"}"#,
            r#"{"kv_transfer_params":{"a":1}"#,
        ] {
            assert_eq!(decode(body, answer), None, "{answer}");
        }
    }
}
