//! Files of the commands that work with traces.

use std::fs::{self, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use uuid::Uuid;
use warmroute_sim::recording::{NamedFile, RECORDING_EXTENSION, Recording, is_recording};
use warmroute_sim::simulate::ReplayArgs;
use warmroute_sim::trace::Trace;

/// Reads a trace: the newest recording of a directory, one file of a recording, or Mooncake's form.
/// `models`: those of a recording's requests, or all if none is named.
pub fn load(path: &Path, models: &[String]) -> anyhow::Result<Trace> {
    load_any(path, models).with_context(|| format!("the trace {path:?}"))
}

fn load_any(path: &Path, models: &[String]) -> anyhow::Result<Trace> {
    if path.is_dir() {
        return recorded(&newest_recording(path)?, models);
    }
    let bytes = fs::read(path)?;
    if is_recording(&bytes) {
        return recorded(&[(path.display().to_string(), bytes)], models);
    }
    ensure!(models.is_empty(), "--model: only recordings name models");
    let text = String::from_utf8(bytes).context("neither a recording nor text")?;
    Ok(Trace::parse(&text)?)
}

/// Reads the newest recording of a directory, or one file of a recording.
pub fn load_recording(path: &Path) -> anyhow::Result<Recording> {
    let read = || {
        if path.is_dir() {
            return decoded(&newest_recording(path)?);
        }
        decoded(&[(path.display().to_string(), fs::read(path)?)])
    };
    read().with_context(|| format!("the recording {path:?}"))
}

fn decoded(files: &[(String, Vec<u8>)]) -> anyhow::Result<Recording> {
    let named = files.iter().map(|(name, bytes)| NamedFile { name, bytes });
    Ok(Recording::decode(named)?)
}

fn recorded(files: &[(String, Vec<u8>)], models: &[String]) -> anyhow::Result<Trace> {
    let recording = decoded(files)?;
    let trace = Trace::of_recording(&recording, models)?;
    note(format_args!(
        "{} requests in {} files, {} of them with a cut end; {} requests are replayed",
        recording.requests.len(),
        files.len(),
        recording.torn,
        trace.len(),
    ));
    Ok(trace)
}

/// Names and bytes of a directory's newest recording, in order.
fn newest_recording(dir: &Path) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|ext| ext == RECORDING_EXTENSION)
        {
            paths.push(path);
        }
    }
    ensure!(!paths.is_empty(), "no recording is in this directory");
    paths.sort();
    let all = paths.len();
    let newest = paths.last().map(|path| recording_of(path).to_owned());
    paths.retain(|path| Some(recording_of(path)) == newest.as_deref());
    if paths.len() < all {
        let left_out = all - paths.len();
        note(format_args!(
            "{left_out} files of earlier recordings are left out"
        ));
    }
    let mut files = Vec::new();
    for path in paths {
        let bytes = match fs::read(&path) {
            // A router that records deletes its oldest files.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            bytes => bytes.with_context(|| path.display().to_string())?,
        };
        files.push((path.display().to_string(), bytes));
    }
    Ok(files)
}

/// What the names of all files of one recording begin with.
fn recording_of(path: &Path) -> &str {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.unwrap_or_default();
    name.rsplit_once('-')
        .map_or(name, |(recording, _)| recording)
}

/// The replay with the profile of its file, if it names one.
pub fn with_profile(replay: &ReplayArgs) -> anyhow::Result<ReplayArgs> {
    let mut replay = replay.clone();
    replay
        .read_profile(|path| anyhow::Ok(fs::read_to_string(path)?))
        .context("--profile-file")?;
    Ok(replay)
}

/// Writes a file line by line. Its name exists only when it is complete.
pub fn write_whole(path: &Path, lines: impl IntoIterator<Item = String>) -> anyhow::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.tmp", Uuid::new_v4()));
    let temporary = PathBuf::from(name);
    let written = write_lines(&temporary, lines).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // It may not exist.
        drop(fs::remove_file(&temporary));
    }
    written.with_context(|| format!("writing {path:?}"))
}

fn write_lines(path: &Path, lines: impl IntoIterator<Item = String>) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let mut writer = BufWriter::new(file);
    for line in lines {
        writeln!(writer, "{line}")?;
    }
    writer.into_inner()?.sync_all()
}

/// A line for the operator, beside the command's output.
fn note(line: std::fmt::Arguments<'_>) {
    // A closed stderr does not stop the command.
    drop(writeln!(io::stderr(), "{line}"));
}
