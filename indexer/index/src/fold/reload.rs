//! When this replica reloads a snapshot instead of requesting a new generation.
//!
//! A source that diverged here may be right elsewhere, and a new generation costs every replica an
//! image. So each generation of a source is looked up once in the newest snapshot. If that does not
//! help, or another reload was made less than [`INTERVAL`] ago, a new generation is requested.

use std::time::{Duration, Instant};

use warmroute_proto::{Generation, Source};

use super::Fold;

/// Minimum time between reloads: each sets every source back.
const INTERVAL: Duration = Duration::from_secs(30);

/// Reload state of one source's generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReloadState {
    Untried,
    Wanted,
    /// A snapshot is being read, while the folding goes on.
    Reading,
    /// Only a new generation is left.
    Tried,
}

impl ReloadState {
    pub(super) fn request(&mut self) {
        if *self == Self::Untried {
            *self = Self::Wanted;
        }
    }

    /// This state after the snapshot was read.
    pub(super) fn read(self) -> Self {
        match self {
            Self::Reading | Self::Tried => Self::Tried,
            Self::Untried | Self::Wanted => self,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReloadLimiter {
    last: Option<Instant>,
}

impl Fold {
    /// Enables reloads: a mismatch is first looked up in a snapshot by [`Self::poll_reload`].
    pub fn reload_first(&mut self) {
        self.reloads.get_or_insert_default();
    }

    /// Diverged sources with their generations, each once, if a reload is allowed now. If it did not
    /// help by [`Self::reload_ended`], [`Self::poll_resyncs`] requests new generations.
    pub fn poll_reload(&mut self, now: Instant) -> Vec<(Source, Generation)> {
        let Some(reloads) = &mut self.reloads else {
            return Vec::new();
        };
        let is_recent = |last: Instant| now.saturating_duration_since(last) < INTERVAL;
        let is_too_soon = reloads.last.is_some_and(is_recent);
        let mut diverged = Vec::new();
        for (source, fold) in self.sources.beside_standings().0 {
            if fold.reload == ReloadState::Wanted {
                if is_too_soon {
                    fold.reload = ReloadState::Tried;
                    continue;
                }
                fold.reload = ReloadState::Reading;
                diverged.extend(fold.generation().map(|fence| (source.clone(), fence)));
            }
        }
        if !diverged.is_empty() {
            reloads.last = Some(now);
        }
        diverged
    }

    /// Is a source still as it was when [`Self::poll_reload`] named it? A new generation heals it.
    #[must_use]
    pub fn is_reloading(&self) -> bool {
        let mut sources = self.sources.iter();
        sources.any(|(_, fold)| fold.reload == ReloadState::Reading)
    }

    /// What [`Self::poll_reload`] named was read, or could not be.
    pub fn reload_ended(&mut self) {
        for fold in self.sources.beside_standings().0.values_mut() {
            fold.reload = fold.reload.read();
        }
    }
}
