//! Errors in OpenAI's JSON form.

use std::fmt;

use serde_json::json;

use super::form::UnreadableForm;

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

/// An error sent to a client. `param` names the field at fault, `code` is stable for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenAiError {
    pub kind: ErrorType,
    pub message: String,
    pub param: Option<&'static str>,
    pub code: Option<&'static str>,
}

impl OpenAiError {
    pub fn new(kind: ErrorType, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
            code: None,
        }
    }

    pub fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorType::InvalidRequest, message).with_param(param)
    }

    #[must_use]
    pub fn with_param(self, param: &'static str) -> Self {
        Self {
            param: Some(param),
            ..self
        }
    }

    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        Self {
            code: Some(code),
            ..self
        }
    }

    /// The request names no model, and there are several.
    pub fn missing_model() -> Self {
        let message = "Several models are served: name one in `model`.";
        Self::invalid("model", message).with_code("missing_model")
    }

    /// The router cannot be sure which model an engine would read in a form.
    pub fn unreadable_form(why: UnreadableForm) -> Self {
        let message = format!("The form cannot be read: {why}.");
        Self::new(ErrorType::InvalidRequest, message).with_code("unreadable_form")
    }

    pub fn model_not_found(model: &str) -> Self {
        // The name has any length; the error repeats its first 128 characters.
        let shown: String = model.chars().take(128).collect();
        let message = format!("The model `{shown}` does not exist.");
        Self::new(ErrorType::NotFound, message)
            .with_param("model")
            .with_code("model_not_found")
    }

    pub fn status(&self) -> u16 {
        self.kind.status()
    }

    /// The JSON body: `{"error":{"message","type","param","code"}}`.
    pub fn to_json(&self) -> Vec<u8> {
        let error = json!({
            "message": self.message,
            "type": self.kind.as_str(),
            "param": self.param,
            "code": self.code,
        });
        json!({ "error": error }).to_string().into_bytes()
    }
}

impl fmt::Display for OpenAiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for OpenAiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_four_members_in_openais_form() {
        let error = OpenAiError::invalid("n", "bad \"n\"").with_code("wrong_type");
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
    fn a_huge_model_name_is_truncated() {
        let error = OpenAiError::model_not_found(&"m".repeat(1 << 20));
        assert!(error.to_json().len() < 400);
        assert_eq!(error.status(), 404);
    }
}
