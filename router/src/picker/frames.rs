//! gRPC's framing of messages in a body of HTTP/2: a flag, a length of four bytes, the message.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use prost::Message;

const PREFIX: usize = 5;

/// Cuts a body into messages.
pub(super) struct FrameDecoder {
    /// At most one message and what came with its end.
    buffer: BytesMut,
    message_max: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a message is compressed, which was not agreed on")]
    Compressed,
    #[error("a message has {0} bytes, which is too large")]
    TooLarge(usize),
    #[error("the stream ends within a message")]
    Truncated,
}

impl FrameDecoder {
    pub(super) fn new(message_max: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            message_max,
        }
    }

    pub(super) fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// Bytes of the message in progress; `None`: its length is not known yet.
    pub(super) fn length(&self) -> Result<Option<usize>, FrameError> {
        let [flag, a, b, c, d, ..] = self.buffer[..] else {
            return Ok(None);
        };
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if flag != 0 {
            return Err(FrameError::Compressed);
        }
        if length > self.message_max {
            return Err(FrameError::TooLarge(length));
        }
        Ok(Some(length))
    }

    /// The next message, if it is complete.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, FrameError> {
        let Some(length) = self.length()? else {
            return Ok(None);
        };
        if self.buffer.len() < PREFIX + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    /// The body ends.
    pub(super) fn end(&self) -> Result<(), FrameError> {
        match self.buffer.is_empty() {
            true => Ok(()),
            false => Err(FrameError::Truncated),
        }
    }
}

/// A message with its frame.
pub(super) fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(PREFIX + length);
    frame.put_u8(0);
    // A message of this router is far below 4 GiB.
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut frame);
    frame.freeze()
}

#[cfg(test)]
mod tests {
    use super::super::messages::HealthCheckRequest;
    use super::*;

    fn request(service: &str) -> HealthCheckRequest {
        HealthCheckRequest {
            service: service.to_owned(),
        }
    }

    #[test]
    fn messages_are_found_however_the_body_is_cut() {
        let sent = [request("a"), request(""), request(&"long".repeat(99))];
        let body: Vec<u8> = sent.iter().flat_map(framed).collect();
        for cut in [1, 3, 7, body.len()] {
            let mut decoder = FrameDecoder::new(1 << 10);
            let mut found = Vec::new();
            for piece in body.chunks(cut) {
                decoder.push(piece);
                while let Some(message) = decoder.next().unwrap() {
                    found.push(HealthCheckRequest::decode(message).unwrap());
                }
            }
            assert_eq!(found, sent);
            assert_eq!(decoder.end(), Ok(()));
        }
    }

    #[test]
    fn what_is_no_message_is_an_error_before_it_is_kept() {
        let mut decoder = FrameDecoder::new(4);
        decoder.push(&[0, 0, 0, 0, 5]);
        assert_eq!(decoder.next(), Err(FrameError::TooLarge(5)));
        let mut decoder = FrameDecoder::new(4);
        decoder.push(b"GET / HTTP/1.1");
        assert_eq!(decoder.next(), Err(FrameError::Compressed));
        let mut decoder = FrameDecoder::new(4);
        decoder.push(&[0, 0]);
        assert_eq!(decoder.next(), Ok(None));
        assert_eq!(decoder.end(), Err(FrameError::Truncated));
    }
}
