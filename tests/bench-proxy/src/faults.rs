//! Engines that misbehave: what a marked request gets instead of an answer.

use std::io;

use tokio::io::{AsyncWriteExt as _, copy, sink};
use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::backend::{CHUNK_PERIOD, STREAM_HEAD, chunk};

/// Before the name of a fault, in the text of a chat.
const MARK: &str = "Fault: ";

/// Part of a line without an end. Each stream has 6.25 MiB/s of it.
const LINE_PART: usize = 64 << 10;

/// Bytes that a long length announces beyond those that follow.
const MISSING_BYTES: usize = 1000;

const PART: &str = r#"{"id":"chatcmpl-0123456789","object":"chat.completion","#;

/// An answer to a request that was not sent. A quiet client that got it would count a failure.
const EXCESS: &str = "HTTP/1.1 418 X\r\ncontent-length: 2\r\n\r\n{}";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Neither an answer nor an end.
    Silence,
    ResetBeforeHead,
    ResetAfterHead,
    ResetWithinBody,
    /// More bytes than announced.
    ShortLength,
    /// Fewer bytes than announced, and the connection's end.
    LongLengthAndEnd,
    /// Fewer bytes than announced, and no end.
    LongLengthAndSilence,
    /// A stream of one event whose line does not end.
    EndlessLine,
}

impl Fault {
    const ALL: [Self; 8] = [
        Self::Silence,
        Self::ResetBeforeHead,
        Self::ResetAfterHead,
        Self::ResetWithinBody,
        Self::ShortLength,
        Self::LongLengthAndEnd,
        Self::LongLengthAndSilence,
        Self::EndlessLine,
    ];

    pub const fn is_of_streams(self) -> bool {
        matches!(self, Self::EndlessLine)
    }

    /// In the text of a chat that gets the fault.
    pub fn mark(self) -> String {
        format!("{MARK}{self:?}")
    }

    /// The fault that a body asks for.
    pub fn wanted(body: &[u8]) -> Option<Self> {
        let at = body
            .windows(MARK.len())
            .position(|bytes| bytes == MARK.as_bytes())?;
        let name = body[at + MARK.len()..].split(|byte| *byte == b'.').next()?;
        let is_named = |fault: &Self| format!("{fault:?}").as_bytes() == name;
        Self::ALL.into_iter().find(is_named)
    }

    /// Answers one request. Returns whether the connection stays open.
    pub async fn serve(self, stream: &mut TcpStream) -> io::Result<bool> {
        match self {
            Self::Silence => wait_for_end(stream).await?,
            Self::ResetBeforeHead => reset(stream, "").await?,
            Self::ResetAfterHead => reset(stream, &answer(MISSING_BYTES, "")).await?,
            Self::ResetWithinBody => reset(stream, &answer(MISSING_BYTES, PART)).await?,
            Self::ShortLength => {
                let answer = answer(PART.len(), &format!("{PART}{EXCESS}"));
                stream.write_all(answer.as_bytes()).await?;
                return Ok(true);
            }
            Self::LongLengthAndEnd => {
                let answer = answer(PART.len() + MISSING_BYTES, PART);
                stream.write_all(answer.as_bytes()).await?;
            }
            Self::LongLengthAndSilence => {
                let answer = answer(PART.len() + MISSING_BYTES, PART);
                stream.write_all(answer.as_bytes()).await?;
                wait_for_end(stream).await?;
            }
            Self::EndlessLine => write_endless_line(stream).await?,
        }
        Ok(false)
    }
}

fn answer(length: usize, body: &str) -> String {
    format!(
        "HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n\
         {body}"
    )
}

/// Writes nothing until the peer closes the connection.
async fn wait_for_end(stream: &mut TcpStream) -> io::Result<()> {
    copy(stream, &mut sink()).await.map(|_| ())
}

/// Resets the connection when it is dropped, after the peer had time to read these bytes.
async fn reset(stream: &mut TcpStream, after: &str) -> io::Result<()> {
    stream.write_all(after.as_bytes()).await?;
    if !after.is_empty() {
        sleep(CHUNK_PERIOD).await;
    }
    stream.set_zero_linger()
}

async fn write_endless_line(stream: &mut TcpStream) -> io::Result<()> {
    let begin = format!("{STREAM_HEAD}{}", chunk("data: {\"id\":\""));
    stream.write_all(begin.as_bytes()).await?;
    let part = chunk(&"a".repeat(LINE_PART));
    let mut ticks = interval(CHUNK_PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        stream.write_all(part.as_bytes()).await?;
    }
}
