//! Reads an engine's answer into bounded memory: any server may stand at a reused address.

/// Why there is no whole body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("more than {0} bytes")]
    TooLong(usize),
    #[error("no whole answer in time")]
    Broken,
}

/// A whole body of at most `max` bytes.
pub async fn bounded_body(
    mut response: reqwest::Response,
    max: usize,
) -> Result<Vec<u8>, BodyError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| BodyError::Broken)? {
        if body.len() + chunk.len() > max {
            return Err(BodyError::TooLong(max));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}
