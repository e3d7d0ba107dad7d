//! When this replica reads a snapshot again instead of asking for a new generation.
//!
//! What diverged here may be right everywhere else: a new generation would cost every replica an image.
//! So each generation of a source is looked for once in the newest snapshot; if that does not help, or
//! another reload was only just made, a new generation is asked for.

use std::time::{Duration, Instant};

use warmroute_proto::{Generation, Source};

use super::Fold;

/// Between two reloads: they set every source back.
const INTERVAL: Duration = Duration::from_secs(30);

/// One source's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReloadState {
    Untried,
    Wanted,
    /// For this generation there is nothing left but a new one.
    Tried,
}

impl ReloadState {
    pub(super) fn request(&mut self) {
        if *self == Self::Untried {
            *self = Self::Wanted;
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReloadLimiter {
    last: Option<Instant>,
}

impl Fold {
    /// From now on a mismatch is first looked for in a snapshot; see [`Self::poll_reload`].
    pub fn reload_first(&mut self) {
        self.reloads.get_or_insert_default();
    }

    /// The sources that diverged, with their generations, if it is time to reload for them. They are
    /// told once; if a snapshot does not help, they are asked for by [`Self::poll_resyncs`].
    pub fn poll_reload(&mut self, now: Instant) -> Vec<(Source, Generation)> {
        let Some(reloads) = &mut self.reloads else {
            return Vec::new();
        };
        let mut diverged = Vec::new();
        for (source, fold) in &mut self.sources {
            if fold.reload == ReloadState::Wanted {
                fold.reload = ReloadState::Tried;
                diverged.extend(fold.generation().map(|fence| (source.clone(), fence)));
            }
        }
        let lately = |last: Instant| now.saturating_duration_since(last) < INTERVAL;
        if diverged.is_empty() || reloads.last.is_some_and(lately) {
            return Vec::new();
        }
        reloads.last = Some(now);
        diverged
    }
}
