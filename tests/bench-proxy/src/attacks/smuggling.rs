//! Requests of which two readers may see different ends. What follows a chat asks for a path that
//! no engine serves: a quiet client that got this answer would count a failure.

const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"Hi."}]}"#;

const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n";

const CHUNKED: &str = "transfer-encoding: chunked";

/// Each with its head and body.
pub fn requests() -> [String; 12] {
    let (length, both) = (BODY.len(), BODY.len() + SMUGGLED.len());
    let chunk = in_chunks(&format!("{length:x}"));
    let all = format!("content-length: {}", chunk.len() + SMUGGLED.len());
    [
        // A length and chunks, and chunks under another name or twice.
        request(&format!("{all}\r\n{CHUNKED}"), &chunk),
        request(&format!("{CHUNKED}\r\ncontent-length: 4"), &chunk),
        request(&format!("{all}\r\ntransfer-encoding : chunked"), &chunk),
        request(&format!("{all}\r\ntransfer-encoding: xchunked"), &chunk),
        request(&format!("{CHUNKED}, identity"), &chunk),
        request(&format!("{CHUNKED}\r\n{CHUNKED}"), &chunk),
        // Two lengths, and one that is no number.
        request(
            &format!("content-length: {length}\r\ncontent-length: {both}"),
            BODY,
        ),
        request(&format!("content-length: {length}, {both}"), BODY),
        request(&format!("content-length: +{length}"), BODY),
        // Sizes of chunks that are no numbers, and one that is too large.
        request(CHUNKED, &in_chunks(&format!("0x{length:x}"))),
        request(CHUNKED, &in_chunks("-1")),
        request(CHUNKED, &in_chunks(&format!("1{length:016x}"))),
    ]
}

fn request(framing: &str, body: &str) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n\
         content-type: application/json\r\n{framing}\r\n\r\n{body}{SMUGGLED}"
    )
}

/// The chat as one chunk of this size, and the last chunk.
fn in_chunks(size: &str) -> String {
    format!("{size}\r\n{BODY}\r\n0\r\n\r\n")
}
