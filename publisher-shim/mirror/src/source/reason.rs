//! Why generations begin, and how many did.

use warmroute_proto::registry::ResyncReason;

use crate::mirror::Inconsistency;

/// Why a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GenerationReason {
    LeaseTaken,
    EngineRestarted,
    GapUnfilled,
    /// A loss may have occurred where replays or sequence numbers are missing to detect it.
    LossUnseen,
    Mirror(Inconsistency),
    OutboxFull,
    Resync(ResyncReason),
    /// The log does not end with what it acknowledged.
    LogLost,
    /// The registry does not have the generation in use.
    RegistryLost,
    /// Another shim took a generation.
    Overtaken,
    /// The log takes smaller records only.
    RecordTooLarge,
    /// A checkpoint was read, and no replay can prove it.
    Unprovable,
}

impl GenerationReason {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::LeaseTaken => "lease_taken",
            Self::EngineRestarted => "engine_restarted",
            Self::GapUnfilled => "gap_unfilled",
            Self::LossUnseen => "loss_unseen",
            Self::Mirror(inconsistency) => inconsistency.label(),
            Self::OutboxFull => "outbox_full",
            Self::Resync(reason) => reason.label(),
            Self::LogLost => "log_lost_records",
            Self::RegistryLost => "registry_lost",
            Self::Overtaken => "overtaken",
            Self::RecordTooLarge => "record_too_large",
            Self::Unprovable => "unprovable",
        }
    }

    /// All reasons in a fixed order: the closed set of a metric's label.
    pub const ALL: [Self; 17] = [
        Self::LeaseTaken,
        Self::EngineRestarted,
        Self::GapUnfilled,
        Self::LossUnseen,
        Self::Mirror(Inconsistency::TwoPrefixes),
        Self::Mirror(Inconsistency::TooMany),
        Self::Mirror(Inconsistency::Undecodable),
        Self::OutboxFull,
        Self::Resync(ResyncReason::Gap),
        Self::Resync(ResyncReason::Mismatch),
        Self::Resync(ResyncReason::Fenced),
        Self::Resync(ResyncReason::LogLost),
        Self::LogLost,
        Self::RegistryLost,
        Self::Overtaken,
        Self::RecordTooLarge,
        Self::Unprovable,
    ];
}

/// Number of generations begun, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenerationCounts([u64; GenerationReason::ALL.len()]);

impl GenerationCounts {
    #[must_use]
    pub fn of(&self, reason: GenerationReason) -> u64 {
        let mut counts = GenerationReason::ALL.iter().zip(self.0);
        let found = counts.find(|&(&known, _)| known == reason);
        found.map_or(0, |(_, count)| count)
    }

    pub(super) fn count(&mut self, reason: GenerationReason) {
        for (known, count) in GenerationReason::ALL.iter().zip(&mut self.0) {
            *count += u64::from(*known == reason);
        }
    }
}
