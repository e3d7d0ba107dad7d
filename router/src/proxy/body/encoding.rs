//! Bodies with a `Content-Encoding`, decoded piece by piece. The caller bounds their sum.

use std::io::{self, Read};

use axum::http::{HeaderMap, header};
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use xxhash_rust::xxh64::Xxh64;

use crate::error::ProxyError;

/// Largest window of a zstd frame: what RFC 9659 allows to HTTP. Bounds a decoder's memory.
const ZSTD_WINDOW_MAX: u64 = 8 << 20;

/// Largest decoded piece.
const PIECE_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Gzip,
    Zstd,
}

impl Encoding {
    /// The encoding of a body; `None` if it has none. Several of them are refused, as unknown ones are.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Self>, ProxyError> {
        let mut found = None;
        for value in headers.get_all(header::CONTENT_ENCODING) {
            let names = value.to_str().map_err(|_| ProxyError::BodyEncoded)?;
            for name in names.split(',').map(str::trim) {
                let encoding = match name.to_ascii_lowercase().as_str() {
                    "identity" | "" => continue,
                    "gzip" | "x-gzip" => Self::Gzip,
                    "zstd" => Self::Zstd,
                    _ => return Err(ProxyError::BodyEncoded),
                };
                if found.replace(encoding).is_some() {
                    return Err(ProxyError::BodyEncoded);
                }
            }
        }
        Ok(found)
    }

    /// Decodes a whole body. Ends with the first error of `take`.
    pub(super) fn decode(
        self,
        encoded: &[u8],
        take: &mut impl FnMut(&[u8]) -> Result<(), ProxyError>,
    ) -> Result<(), ProxyError> {
        match self {
            Self::Gzip => pass(MultiGzDecoder::new(encoded), take),
            Self::Zstd => decode_zstd(encoded, take),
        }
    }
}

/// Decodes one frame after the other, as RFC 8878 asks, and compares their checksums.
fn decode_zstd(
    mut encoded: &[u8],
    take: &mut impl FnMut(&[u8]) -> Result<(), ProxyError>,
) -> Result<(), ProxyError> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(ZSTD_WINDOW_MAX);
    while !encoded.is_empty() {
        let frame = match StreamingDecoder::new_with_decoder(&mut encoded, &mut decoder) {
            Ok(frame) => frame,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let rest = encoded.get(length as usize..);
                encoded = rest.ok_or_else(|| malformed("a skipped frame is cut off"))?;
                continue;
            }
            Err(error) => return Err(malformed(error)),
        };
        let mut hash = Xxh64::new(0);
        pass(frame, &mut |piece| {
            hash.update(piece);
            take(piece)
        })?;
        let own = hash.digest().to_le_bytes();
        let sent = decoder.get_checksum_from_data().map(u32::to_le_bytes);
        if sent.is_some_and(|sent| sent != own[..4]) {
            return Err(malformed("a checksum differs"));
        }
    }
    Ok(())
}

fn pass(
    mut decoder: impl Read,
    take: &mut impl FnMut(&[u8]) -> Result<(), ProxyError>,
) -> Result<(), ProxyError> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match decoder.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(bytes) => take(&piece[..bytes])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(malformed(error)),
        }
    }
}

fn malformed(why: impl ToString) -> ProxyError {
    let why = why.to_string();
    ProxyError::Malformed(format!("The request body cannot be decoded: {why}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        compress_to_vec(bytes, CompressionLevel::Fastest)
    }

    fn decoded(encoding: Encoding, encoded: &[u8]) -> Result<Vec<u8>, ProxyError> {
        let mut bytes = Vec::new();
        encoding.decode(encoded, &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(bytes)
    }

    fn text(bytes: usize) -> Vec<u8> {
        let mut words = (0_u32..).flat_map(|n| format!("{} ", n.wrapping_mul(7919)).into_bytes());
        words.by_ref().take(bytes).collect()
    }

    #[test]
    fn encodings_are_found_by_their_names() {
        for (values, wanted) in [
            (vec![], Ok(None)),
            (vec!["identity", "identity, "], Ok(None)),
            (vec!["gzip"], Ok(Some(Encoding::Gzip))),
            (vec!["X-GZIP"], Ok(Some(Encoding::Gzip))),
            (vec!["identity", "Zstd"], Ok(Some(Encoding::Zstd))),
            (vec!["gzip, zstd"], Err(ProxyError::BodyEncoded)),
            (vec!["gzip", "gzip"], Err(ProxyError::BodyEncoded)),
            (
                vec!["identity", "identity, br"],
                Err(ProxyError::BodyEncoded),
            ),
            (vec!["deflate"], Err(ProxyError::BodyEncoded)),
        ] {
            let mut headers = HeaderMap::new();
            for value in &values {
                headers.append(header::CONTENT_ENCODING, value.parse().unwrap());
            }
            assert_eq!(Encoding::of(&headers), wanted, "{values:?}");
        }
    }

    /// Several members or frames are one body, and frames that are to be skipped have no bytes.
    #[test]
    fn bodies_are_decoded_whole() {
        let skipped = [&0x184D_2A53_u32.to_le_bytes()[..], &[3, 0, 0, 0], b"abc"].concat();
        for bytes in [0, 1, 100, PIECE_BYTES, 300_000] {
            let plain = text(bytes);
            let twice = [plain.clone(), plain.clone()].concat();
            let members = [gzip(&plain), gzip(&plain)].concat();
            assert_eq!(decoded(Encoding::Gzip, &members).unwrap(), twice);
            let frames = [zstd(&plain), skipped.clone(), zstd(&plain)].concat();
            assert_eq!(decoded(Encoding::Zstd, &frames).unwrap(), twice);
        }
    }

    /// By the reference encoder, level 3: with a size, a checksum and a repeated match.
    #[test]
    fn a_frame_of_the_reference_encoder_is_decoded() {
        let frame = REFERENCE_FRAME;
        let plain = decoded(Encoding::Zstd, frame).unwrap();
        assert_eq!(plain, b"{\"model\":\"m\",\"prompt\":\"".repeat(20));
        let mut damaged = frame.to_vec();
        *damaged.last_mut().unwrap() ^= 1;
        let error = decoded(Encoding::Zstd, &damaged).unwrap_err();
        assert!(error.to_string().contains("checksum"), "{error}");
    }

    #[test]
    fn a_body_that_is_cut_off_is_refused() {
        let plain = text(5000);
        for (encoding, whole) in [
            (Encoding::Gzip, gzip(&plain)),
            (Encoding::Zstd, zstd(&plain)),
        ] {
            for length in 1..whole.len() {
                let cut = decoded(encoding, &whole[..length]);
                assert!(
                    matches!(cut, Err(ProxyError::Malformed(_))),
                    "{encoding:?} {length}"
                );
            }
            let longer = [&whole[..], b"{}"].concat();
            let longer = decoded(encoding, &longer);
            assert!(
                matches!(longer, Err(ProxyError::Malformed(_))),
                "{encoding:?}"
            );
            let plain = decoded(encoding, &plain);
            assert!(
                matches!(plain, Err(ProxyError::Malformed(_))),
                "{encoding:?}"
            );
        }
    }

    /// Each changed byte leads to an error or to other bytes, and never to a panic.
    #[test]
    fn damaged_bodies_end() {
        let plain = text(3000);
        for (encoding, whole) in [
            (Encoding::Gzip, gzip(&plain)),
            (Encoding::Zstd, zstd(&plain)),
        ] {
            for at in 0..whole.len() {
                let mut damaged = whole.clone();
                damaged[at] ^= 0x55;
                let mut bytes = 0;
                let ended = encoding.decode(&damaged, &mut |piece| {
                    bytes += piece.len();
                    if bytes > 1 << 20 {
                        return Err(ProxyError::TooLarge { max: 1 << 20 });
                    }
                    Ok(())
                });
                drop(ended);
            }
        }
    }

    /// Such a frame would take 16 MiB before its first byte.
    #[test]
    fn a_window_beyond_the_bound_is_refused() {
        let window = |exponent: u8| [0x28, 0xB5, 0x2F, 0xFD, 0, exponent << 3, 1, 0, 0];
        assert_eq!(decoded(Encoding::Zstd, &window(13)), Ok(Vec::new()));
        let error = decoded(Encoding::Zstd, &window(14)).unwrap_err();
        assert!(matches!(error, ProxyError::Malformed(_)), "{error}");
    }

    const REFERENCE_FRAME: &[u8] = b"\x28\xb5\x2f\xfd\x64\xcc\x00\xf5\x00\x00\xb8{\"model\":\"m\",\
        \"prompt\":\"\x01\x00\x65\x55\x9d\x4d\xec\x0e\x0d\xef";
}
