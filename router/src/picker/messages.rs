//! The messages of Envoy's external processing protocol and of the gRPC health protocol.
//!
//! Only what the picker reads or writes of them; a decoder skips the rest. Names and field numbers
//! are those of the public definitions: `envoy/service/ext_proc/v3/external_processor.proto`,
//! `envoy/config/core/v3/base.proto`, `envoy/type/v3/http_status.proto`,
//! `google/protobuf/struct.proto` and `grpc/health/v1/health.proto`.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::{Message, Oneof};

/// [`ProtocolConfiguration`]'s value for bodies that are streamed both ways without waiting.
pub(super) const FULL_DUPLEX_STREAMED: i32 = 4;

/// [`HeaderValueOption`]'s values.
pub(super) const APPEND: i32 = 0;
pub(super) const OVERWRITE: i32 = 2;

/// From Envoy.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessingRequest {
    #[prost(oneof = "RequestPart", tags = "2, 3, 4, 5, 6, 7")]
    pub part: Option<RequestPart>,
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// In the first message only.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum RequestPart {
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

impl RequestPart {
    /// Kind and size, with `+` at the end of a stream: how orders of messages are recorded.
    pub(super) fn shown(&self) -> String {
        let (kind, bytes, is_end) = match self {
            Self::RequestHeaders(head) => ("request_headers", None, head.end_of_stream),
            Self::ResponseHeaders(head) => ("response_headers", None, head.end_of_stream),
            Self::RequestBody(part) => ("request_body", Some(part.body.len()), part.end_of_stream),
            Self::ResponseBody(part) => {
                ("response_body", Some(part.body.len()), part.end_of_stream)
            }
            Self::RequestTrailers(_) => ("request_trailers", None, false),
            Self::ResponseTrailers(_) => ("response_trailers", None, false),
        };
        let bytes = bytes.map(|bytes| format!(" {bytes}")).unwrap_or_default();
        let end = if is_end { "+" } else { "" };
        format!("{kind}{bytes}{end}")
    }
}

/// To Envoy.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessingResponse {
    #[prost(oneof = "ResponsePart", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub part: Option<ResponsePart>,
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum ResponsePart {
    #[prost(message, tag = "1")]
    RequestHeaders(CommonAnswer),
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonAnswer),
    #[prost(message, tag = "3")]
    RequestBody(CommonAnswer),
    #[prost(message, tag = "4")]
    ResponseBody(CommonAnswer),
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersAnswer),
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersAnswer),
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ProtocolConfiguration {
    #[prost(int32, tag = "1")]
    pub request_body_mode: i32,
    #[prost(int32, tag = "2")]
    pub response_body_mode: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpHeaders {
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderList>,
    /// No body follows.
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpBody {
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpTrailers {}

/// `HeadersResponse` and `BodyResponse`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct CommonAnswer {
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CommonResponse {
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrailersAnswer {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ImmediateResponse {
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// For Envoy's access log.
    #[prost(string, tag = "5")]
    pub details: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderMutation {
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
    #[prost(string, repeated, tag = "2")]
    pub remove_headers: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct BodyMutation {
    #[prost(message, optional, tag = "3")]
    pub streamed_response: Option<HttpBody>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderEntry>,
    #[prost(int32, tag = "3")]
    pub append_action: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderEntry {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
    /// Envoy sends and reads this one.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderList {
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderEntry>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Metadata {
    #[prost(btree_map = "string, message", tag = "1")]
    pub filter_metadata: BTreeMap<String, Struct>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Struct {
    #[prost(btree_map = "string, message", tag = "1")]
    pub fields: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(oneof = "ValueKind", tags = "3, 5, 6")]
    pub kind: Option<ValueKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum ValueKind {
    #[prost(string, tag = "3")]
    String(String),
    #[prost(message, tag = "5")]
    Struct(Struct),
    #[prost(message, tag = "6")]
    List(ListValue),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    pub service: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HealthCheckResponse {
    /// 1: serving; 2: not serving.
    #[prost(int32, tag = "1")]
    pub status: i32,
}

impl Value {
    pub(super) fn text(text: &str) -> Self {
        Self {
            kind: Some(ValueKind::String(text.to_owned())),
        }
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        match &self.kind {
            Some(ValueKind::String(text)) => Some(text),
            Some(ValueKind::Struct(_) | ValueKind::List(_)) | None => None,
        }
    }
}

impl Struct {
    /// With one field.
    pub(super) fn with(name: &str, value: Value) -> Self {
        Self {
            fields: BTreeMap::from([(name.to_owned(), value)]),
        }
    }
}

impl Metadata {
    pub(super) fn value(&self, namespace: &str, key: &str) -> Option<&Value> {
        self.filter_metadata.get(namespace)?.fields.get(key)
    }
}
