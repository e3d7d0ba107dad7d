//! Keys, certificates and settings: files that are read again while the process runs.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

/// The content of a file of at most so many bytes. A named pipe is an error: opening it would wait
/// for a writer, and no later change would be read.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    if fs::metadata(path)?.file_type().is_fifo() {
        return Err(io::Error::other("a named pipe is no file"));
    }
    let mut content = Vec::new();
    File::open(path)?
        .take(bytes_max + 1)
        .read_to_end(&mut content)?;
    if content.len() as u64 > bytes_max {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(content)
}
