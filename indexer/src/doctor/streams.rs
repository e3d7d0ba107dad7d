//! Judges the server and its streams: settings, bounds, usage, copies and clock.

use std::time::Duration;

use warmroute_plane::{SetupDifference, StreamRole, StreamUsage};
use warmroute_proto::view::ViewPage;

use super::page::{bytes, duration};
use super::{Code, Findings, PlaneState, StatusLine};

/// Tolerated offset of a clock: beyond it, published ages are misleading.
const SKEW_MAX_MS: u64 = 1000;

/// Maximum bytes of a block in an image, and images that the log must hold.
const BLOCK_BYTES: u64 = 16;
const IMAGES: u64 = 4;

/// Usage from which on a store counts as nearly full: a full one refuses new entries.
const FULL_PERCENT: u64 = 90;

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    for difference in &state.setup.differences {
        let code = match difference.field {
            "stream" => Code::StreamMissing,
            _ => Code::StreamDiffers,
        };
        findings.add(code, difference.to_string());
    }
    for difference in &state.setup.resized {
        let SetupDifference {
            of,
            field,
            is,
            must_be,
        } = difference;
        let about = format!("{of}: {field} is {is}, `init` made it {must_be}");
        findings.add(Code::StreamResized, about);
    }
    if let Some(complaint) = &state.complaint {
        findings.add(Code::PermissionMissing, complaint);
    }
    for stream in &state.setup.streams {
        judge_stream(state, stream, findings);
        rest.push(row(state, stream));
    }
    clock(state, findings, rest);
}

fn judge_stream(state: &PlaneState, stream: &StreamUsage, findings: &mut Findings) {
    for copy in &stream.copies_away {
        findings.add(Code::CopyAway, format!("{} on {copy}", stream.name));
    }
    let Some(bytes_max) = stream.bytes_max else {
        return;
    };
    match stream.role {
        StreamRole::Log => {
            let needed = images_bytes(state).saturating_mul(IMAGES);
            if bytes_max < needed {
                let about = format!(
                    "{} may take {}, four images of all sources take {}",
                    stream.name,
                    bytes(bytes_max),
                    bytes(needed)
                );
                findings.add(Code::LogTooSmall, about);
            }
        }
        StreamRole::Registry | StreamRole::Snapshots => {
            if stream.bytes.saturating_mul(100) >= bytes_max.saturating_mul(FULL_PERCENT) {
                let (is, max) = (bytes(stream.bytes), bytes(bytes_max));
                findings.add(Code::StoreFull, format!("{}: {is} of {max}", stream.name));
            }
        }
    }
}

/// Bytes of one image of every source, as far as the indexers know them.
fn images_bytes(state: &PlaneState) -> u64 {
    let pairs = |view: &ViewPage| {
        let digests = view.sources.iter().filter_map(|source| source.digest);
        digests.map(|digest| digest.count).sum::<u64>()
    };
    let most = state.answers().map(|(_, view)| pairs(view)).max();
    most.unwrap_or(0).saturating_mul(BLOCK_BYTES)
}

fn row(state: &PlaneState, stream: &StreamUsage) -> StatusLine {
    let what = match stream.role {
        StreamRole::Log => "log",
        StreamRole::Registry => "registry",
        StreamRole::Snapshots => "snapshots",
    };
    let bound = stream
        .bytes_max
        .map_or_else(|| "no bound".to_owned(), bytes);
    let mut text = format!(
        "{}: {} messages, {} of {bound}, replicas {}",
        stream.name,
        stream.messages,
        bytes(stream.bytes),
        stream.replicas
    );
    if stream.role == StreamRole::Log
        && let Some(log) = &state.log
    {
        text += &format!(", positions {} to {}", log.first, log.last);
    }
    if let Some(oldest) = stream.oldest_unix_ns {
        let age = Duration::from_nanos(state.unix_ns.saturating_sub(oldest));
        text += &format!(", oldest {} ago", duration(age));
    }
    (what, text)
}

fn clock(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let Some(clock) = state.setup.clock else {
        return;
    };
    let ahead = clock.ahead_ms;
    if ahead.unsigned_abs() > SKEW_MAX_MS + clock.within_ms {
        let about = format!("nats-server is {ahead} ms ahead of this machine");
        findings.add(Code::ClockSkew, about);
    }
    let text = format!("nats-server is {ahead} ms ahead, ± {} ms", clock.within_ms);
    rest.push(("clock", text));
    for (id, view) in state.answers() {
        // A view is at most as old as the deadline of its request.
        let slack = Duration::from_millis(SKEW_MAX_MS) + Duration::from_secs(2);
        let off = view.unix_ns.abs_diff(state.unix_ns);
        if Duration::from_nanos(off) > slack {
            let about = format!(
                "indexer {id} is {} off",
                duration(Duration::from_nanos(off))
            );
            findings.add(Code::ClockSkew, about);
        }
    }
}
