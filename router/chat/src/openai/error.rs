//! Errors in the form that OpenAI's clients understand. The shell only serialises them.

use std::fmt;

use serde::Serialize;

/// `type` of an error object. Closed, so that it can also be a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorType {
    InvalidRequest,
    NotFound,
    TooLarge,
    RateLimited,
    Unavailable,
    Internal,
}

impl ErrorType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest | Self::TooLarge => "invalid_request_error",
            Self::NotFound => "not_found_error",
            Self::RateLimited => "rate_limit_error",
            Self::Unavailable => "service_unavailable_error",
            Self::Internal => "internal_error",
        }
    }

    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::NotFound => 404,
            Self::TooLarge => 413,
            Self::RateLimited => 429,
            Self::Unavailable => 503,
            Self::Internal => 500,
        }
    }
}

/// What a client is told. `param` names the field at fault, `code` is a stable word for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub kind: ErrorType,
    pub message: String,
    pub param: Option<&'static str>,
    pub code: Option<&'static str>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'static str>,
    code: Option<&'static str>,
}

impl ApiError {
    pub fn new(kind: ErrorType, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
            code: None,
        }
    }

    pub fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param),
            ..Self::new(ErrorType::InvalidRequest, message)
        }
    }

    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        Self {
            code: Some(code),
            ..self
        }
    }

    pub fn model_not_found(model: &str) -> Self {
        // A name of any length comes from outside; the answer need not carry all of it.
        let shown: String = model.chars().take(128).collect();
        Self {
            param: Some("model"),
            ..Self::new(
                ErrorType::NotFound,
                format!("The model `{shown}` does not exist."),
            )
        }
        .with_code("model_not_found")
    }

    pub fn status(&self) -> u16 {
        self.kind.status()
    }

    /// The JSON body: `{"error":{"message","type","param","code"}}`.
    pub fn to_json(&self) -> Vec<u8> {
        let body = Body {
            message: &self.message,
            r#type: self.kind.as_str(),
            param: self.param,
            code: self.code,
        };
        // Strings and options always serialise; the fallback keeps this function total.
        serde_json::to_vec(&Envelope { error: body })
            .unwrap_or_else(|_| br#"{"error":{"message":"internal error"}}"#.to_vec())
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_four_members_in_openais_form() {
        let error = ApiError::invalid("n", "bad \"n\"").with_code("wrong_type");
        assert_eq!(
            String::from_utf8(error.to_json()).unwrap(),
            concat!(
                r#"{"error":{"message":"bad \"n\"","type":"invalid_request_error","#,
                r#""param":"n","code":"wrong_type"}}"#
            )
        );
        assert_eq!(error.status(), 400);
    }

    #[test]
    fn a_huge_model_name_does_not_come_back_whole() {
        let error = ApiError::model_not_found(&"m".repeat(1 << 20));
        assert!(error.to_json().len() < 400);
        assert_eq!(error.status(), 404);
    }
}
