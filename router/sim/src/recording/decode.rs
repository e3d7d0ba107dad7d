//! From the files of a recording to its requests.
//!
//! A process that ends while it writes leaves a last frame that is cut, or zeros after a power
//! failure. Such a tail is skipped and counted. Any other damage is an error with file and record.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::{
    FRAME_HEAD_BYTES, FileHeader, HASH_BYTES, HEADER, MAGIC, NAME_BYTES_MAX, REQUEST,
    RecordedOutcome, RecordedPlacement, RequestFacts, check_sum,
};

/// A file's name, for errors, and its bytes.
#[derive(Clone, Copy, Debug)]
pub struct NamedFile<'a> {
    pub name: &'a str,
    pub bytes: &'a [u8],
}

/// One block after its prefix. Equal numbers are equal prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockNode(pub u32);

/// All requests of a recording, in the order of their ends.
#[derive(Debug, Default)]
pub struct Recording {
    pub requests: Vec<(RequestFacts, Option<BlockNode>)>,
    /// Files whose last record was cut.
    pub torn: usize,
    tree: BlockTree,
}

/// The blocks of all files.
#[derive(Debug, Default)]
struct BlockTree {
    parents: Vec<Option<BlockNode>>,
    /// Blocks from the root on, by node.
    depths: Vec<u32>,
    numbers: FxHashMap<(Option<BlockNode>, [u8; HASH_BYTES]), BlockNode>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    #[error("{file}: not a recording of this version")]
    Magic { file: String },
    #[error("{file}: it belongs to another recording than {first}")]
    Mixed { file: String, first: String },
    #[error("{file}, record {record}: {what}")]
    Record {
        file: String,
        record: usize,
        what: &'static str,
    },
}

/// Whether bytes begin like a recording's file.
#[must_use]
pub fn is_recording(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC[..MAGIC.len() - 1])
}

impl Recording {
    /// Decodes the files of one recording, in their order.
    pub fn decode<'a>(
        files: impl IntoIterator<Item = NamedFile<'a>>,
    ) -> Result<Self, RecordingError> {
        let mut recording = Self::default();
        let mut first: Option<(&str, u64)> = None;
        for file in files {
            let Some(header) = recording.file(file)? else {
                continue;
            };
            let (name, id) = *first.get_or_insert((file.name, header.recording));
            if id != header.recording {
                return Err(RecordingError::Mixed {
                    file: file.name.to_owned(),
                    first: name.to_owned(),
                });
            }
        }
        Ok(recording)
    }

    /// The nodes of a prompt from depth 0 on, given its last one.
    #[must_use]
    pub fn path(&self, last: Option<BlockNode>) -> Vec<BlockNode> {
        let parent = |node: &BlockNode| self.tree.parents[node.0 as usize];
        let mut path: Vec<BlockNode> = std::iter::successors(last, parent).collect();
        path.reverse();
        path
    }

    /// Different blocks of all prompts.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.tree.parents.len()
    }

    /// `None`: the file was cut before the end of its header.
    fn file(&mut self, file: NamedFile<'_>) -> Result<Option<FileHeader>, RecordingError> {
        if file.bytes.len() < MAGIC.len() && MAGIC.starts_with(file.bytes) {
            self.torn += 1;
            return Ok(None);
        }
        let Some(mut rest) = file.bytes.strip_prefix(&MAGIC) else {
            return Err(RecordingError::Magic {
                file: file.name.to_owned(),
            });
        };
        let mut decoder = FileDecoder::default();
        let mut header = None;
        for record in 0.. {
            let wrong = |what| RecordingError::Record {
                file: file.name.to_owned(),
                record,
                what,
            };
            let payload = match next_frame(&mut rest) {
                Frame::Payload(payload) => payload,
                Frame::End => break,
                Frame::Torn => {
                    self.torn += 1;
                    break;
                }
                Frame::Damaged => return Err(wrong("its check sum is wrong")),
            };
            let mut cursor = Cursor { rest: payload };
            if record == 0 {
                header = Some(cursor.header().map_err(wrong)?);
            } else {
                let request = decoder
                    .request(&mut cursor, &mut self.tree)
                    .map_err(wrong)?;
                self.requests.push(request);
            }
            if !cursor.rest.is_empty() {
                return Err(wrong("bytes after its last field"));
            }
        }
        Ok(header)
    }
}

enum Frame<'a> {
    Payload(&'a [u8]),
    End,
    /// The last frame, which was not written completely.
    Torn,
    Damaged,
}

fn next_frame<'a>(rest: &mut &'a [u8]) -> Frame<'a> {
    if rest.is_empty() {
        return Frame::End;
    }
    let Some((head, body)) = rest.split_first_chunk::<FRAME_HEAD_BYTES>() else {
        return Frame::Torn;
    };
    let [a, b, c, d, sum @ ..] = *head;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    let Some((payload, after)) = body.split_at_checked(length) else {
        return Frame::Torn;
    };
    if check_sum(payload) != u32::from_le_bytes(sum) {
        let is_zero = rest.iter().all(|&byte| byte == 0);
        return if after.is_empty() || is_zero {
            Frame::Torn
        } else {
            Frame::Damaged
        };
    }
    *rest = after;
    Frame::Payload(payload)
}

/// What later records of a file refer to.
#[derive(Default)]
struct FileDecoder {
    names: Vec<Arc<str>>,
    nodes: Vec<BlockNode>,
}

impl FileDecoder {
    fn request(
        &mut self,
        cursor: &mut Cursor<'_>,
        tree: &mut BlockTree,
    ) -> Result<(RequestFacts, Option<BlockNode>), &'static str> {
        if cursor.byte()? != REQUEST {
            return Err("unknown kind");
        }
        let arrived = cursor.micros()?;
        let outcome = usize::from(cursor.byte()?);
        let outcome = *RecordedOutcome::ALL.get(outcome).ok_or("unknown outcome")?;
        let facts = RequestFacts {
            arrived,
            outcome,
            model: self.name(cursor)?,
            prompt_tokens: cursor.small()?,
            output_tokens: cursor.small()?,
            block_tokens: cursor.small()?,
            ttft: cursor.optional()?.map(Duration::from_micros),
            duration: cursor.micros()?,
            cached_tokens: match cursor.optional()? {
                Some(tokens) => Some(u32::try_from(tokens).map_err(|_| TOO_LARGE)?),
                None => None,
            },
            placement: match cursor.byte()? {
                0 => None,
                1 => Some(self.placement(cursor)?),
                _ => return Err("unknown placement"),
            },
            tenant: match cursor.byte()? {
                0 => None,
                1 => Some(self.name(cursor)?),
                _ => return Err("unknown tenant"),
            },
        };
        let last = self.blocks(cursor, tree)?;
        let depth = last.map_or(0, |last| tree.depths[last.0 as usize]);
        if facts.block_tokens == 0
            || u64::from(depth) * u64::from(facts.block_tokens) > facts.prompt_tokens.into()
        {
            return Err("more blocks than tokens");
        }
        Ok((facts, last))
    }

    fn placement(&mut self, cursor: &mut Cursor<'_>) -> Result<RecordedPlacement, &'static str> {
        Ok(RecordedPlacement {
            worker: self.name(cursor)?,
            dp_rank: cursor.small()?,
            credited_blocks: cursor.small()?,
            predicted_blocks: cursor.small()?,
            active_requests: cursor.small()?,
            queue: cursor.micros()?,
            prefill: cursor.micros()?,
            decode: cursor.micros()?,
        })
    }

    fn blocks(
        &mut self,
        cursor: &mut Cursor<'_>,
        tree: &mut BlockTree,
    ) -> Result<Option<BlockNode>, &'static str> {
        let mut last = match cursor.optional()? {
            None => None,
            Some(number) => {
                let number = usize::try_from(number).map_err(|_| TOO_LARGE)?;
                Some(*self.nodes.get(number).ok_or("unknown block")?)
            }
        };
        for _ in 0..cursor.number()? {
            let hash = cursor.bytes::<HASH_BYTES>()?;
            let node = tree.after(last, hash)?;
            self.nodes.push(node);
            last = Some(node);
        }
        Ok(last)
    }

    fn name(&mut self, cursor: &mut Cursor<'_>) -> Result<Arc<str>, &'static str> {
        let number = usize::try_from(cursor.number()?).map_err(|_| TOO_LARGE)?;
        if number == self.names.len() {
            let length = usize::try_from(cursor.number()?).map_err(|_| TOO_LARGE)?;
            if length > NAME_BYTES_MAX {
                return Err("a name is too long");
            }
            let (name, rest) = cursor.rest.split_at_checked(length).ok_or(TOO_SHORT)?;
            cursor.rest = rest;
            let name = str::from_utf8(name).map_err(|_| "a name is not UTF-8")?;
            self.names.push(name.into());
        }
        self.names.get(number).cloned().ok_or("unknown name")
    }
}

impl BlockTree {
    fn after(
        &mut self,
        parent: Option<BlockNode>,
        hash: [u8; HASH_BYTES],
    ) -> Result<BlockNode, &'static str> {
        let next = u32::try_from(self.parents.len()).map_err(|_| TOO_LARGE)?;
        let node = *self
            .numbers
            .entry((parent, hash))
            .or_insert(BlockNode(next));
        if node.0 == next {
            let above = parent.map_or(0, |parent| self.depths[parent.0 as usize]);
            self.depths.push(above.saturating_add(1));
            self.parents.push(parent);
        }
        Ok(node)
    }
}

const TOO_SHORT: &str = "it ends inside a field";
const TOO_LARGE: &str = "a number is too large";

/// Reads the fields of one payload.
struct Cursor<'a> {
    rest: &'a [u8],
}

impl Cursor<'_> {
    fn header(&mut self) -> Result<FileHeader, &'static str> {
        if self.byte()? != HEADER {
            return Err("the first record is no header");
        }
        Ok(FileHeader {
            recording: self.number()?,
            file: self.small()?,
            started_unix_ms: self.number()?,
        })
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (bytes, rest) = self.rest.split_first_chunk::<N>().ok_or(TOO_SHORT)?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn byte(&mut self) -> Result<u8, &'static str> {
        self.bytes::<1>().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u64, &'static str> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return Err(TOO_LARGE);
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(TOO_LARGE)
    }

    fn small(&mut self) -> Result<u32, &'static str> {
        u32::try_from(self.number()?).map_err(|_| TOO_LARGE)
    }

    fn optional(&mut self) -> Result<Option<u64>, &'static str> {
        Ok(self.number()?.checked_sub(1))
    }

    fn micros(&mut self) -> Result<Duration, &'static str> {
        self.number().map(Duration::from_micros)
    }
}
