//! What a router knows of one indexer's roster, and answers that name sources by its numbers.

use std::sync::Arc;

use warmroute_proto::query::{IndexAnswer, SourceState};
use warmroute_proto::roster::{
    HolderDetail, HolderGroup, HolderPart, ROSTER_MAX, RosterId, RosterNumber, RosterPage,
    RosterPageRequest, RosterRow, RosterStatus,
};
use warmroute_proto::{BlockCut, Generation, LogPosition, Source, StreamIdentity, Tiers};

/// A position of one log. Those of different logs cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerPosition {
    pub log: StreamIdentity,
    pub position: LogPosition,
}

/// The rows of one indexer's roster that were read so far.
#[derive(Clone, Debug, Default)]
pub struct ReplicaRoster {
    id: RosterId,
    version: u64,
    /// By number; `None` for a row that was not read.
    rows: Vec<Option<KnownRow>>,
}

#[derive(Clone, Debug)]
pub struct KnownRow {
    pub source: Source,
    pub status: Option<RosterStatus>,
}

/// A page that no honest indexer sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a roster with more than {ROSTER_MAX} sources")]
pub struct BadRosterPage;

/// An indexer's answer to a query, as this router can read it.
#[derive(Clone, Debug)]
pub enum IndexReply {
    /// Every source by its name.
    Full(IndexAnswer),
    Holders(HolderReply),
    /// The answers about one prompt in blocks of different sizes. Each counts for the sources that
    /// have blocks of its size; that of the prompt's first cut for sources of an unknown size too.
    Cuts(Vec<(BlockCut, Self)>),
}

/// The holders of a prompt, and the roster that names them.
#[derive(Clone, Debug)]
pub struct HolderReply {
    roster: Arc<ReplicaRoster>,
    parts: Vec<HolderPart>,
    /// Says nothing of the prompt's last blocks.
    is_cut: bool,
}

/// One answer's data of one source.
pub struct KnownHolder<'a> {
    pub row: &'a KnownRow,
    pub group: Option<&'a HolderGroup>,
    pub detail: Option<&'a HolderDetail>,
    is_cut: bool,
}

impl ReplicaRoster {
    /// The request for the next page.
    #[must_use]
    pub const fn next_request(&self) -> RosterPageRequest {
        RosterPageRequest {
            roster: self.id,
            since: self.version,
        }
    }

    /// Takes in a page that answers [`Self::next_request`].
    pub fn take(&mut self, page: RosterPage) -> Result<(), BadRosterPage> {
        if page.roster != self.id {
            *self = Self {
                id: page.roster,
                ..Self::default()
            };
        }
        self.put(page.rows)?;
        self.version = page.version;
        Ok(())
    }

    fn put(&mut self, rows: Vec<RosterRow>) -> Result<(), BadRosterPage> {
        for row in rows {
            let index = row.number.index();
            if row.number.0 >= ROSTER_MAX {
                return Err(BadRosterPage);
            }
            if self.rows.len() <= index {
                self.rows.resize_with(index + 1, || None);
            }
            self.rows[index] = Some(KnownRow {
                source: row.source,
                status: row.status,
            });
        }
        Ok(())
    }

    fn knows(&self, number: RosterNumber) -> bool {
        self.rows.get(number.index()).is_some_and(Option::is_some)
    }
}

impl HolderReply {
    /// Parts of one or more answers of the replica with this roster, with their changes of it;
    /// `None` if one is of another roster, or of none that an honest indexer has.
    #[must_use]
    pub fn new(mut roster: Arc<ReplicaRoster>, mut parts: Vec<HolderPart>) -> Option<Self> {
        let is_own = !parts.is_empty() && parts.iter().all(|part| part.roster == roster.id);
        for part in parts.iter_mut().filter(|_| is_own) {
            let changes = std::mem::take(&mut part.changes);
            if !changes.is_empty() {
                Arc::make_mut(&mut roster).put(changes).ok()?;
            }
        }
        is_own.then_some(Self {
            roster,
            parts,
            is_cut: false,
        })
    }

    /// An answer about the first blocks of a prompt: sources may hold more, so no state is above
    /// `partial`.
    #[must_use]
    pub fn of_first_blocks(self) -> Self {
        Self {
            is_cut: true,
            ..self
        }
    }

    /// The lowest position of the parts; `None` if they are of several logs.
    #[must_use]
    pub fn position(&self) -> Option<AnswerPosition> {
        let log = self.parts.first()?.log;
        let position = self.parts.iter().map(|part| part.position).min()?;
        let is_one = self.parts.iter().all(|part| part.log == log);
        is_one.then_some(AnswerPosition { log, position })
    }

    /// Number of holders that the roster does not name: their credit is lost.
    #[must_use]
    pub fn unnamed(&self) -> usize {
        let groups = self.parts.iter().flat_map(|part| &part.groups);
        let members = groups.flat_map(|group| group.members.iter());
        members.filter(|number| !self.roster.knows(*number)).count()
    }

    /// All sources of the roster.
    pub fn sources(&self) -> impl Iterator<Item = KnownHolder<'_>> {
        let rows = &self.roster.rows;
        let mut known: Vec<(Option<&HolderGroup>, Option<&HolderDetail>)> =
            vec![(None, None); rows.len()];
        for part in &self.parts {
            for group in &part.groups {
                for number in group.members.iter() {
                    // A later part's group and detail are of one later moment.
                    if let Some(of) = known.get_mut(number.index()) {
                        *of = (Some(group), None);
                    }
                }
            }
            for detail in &part.details {
                if let Some((_, of)) = known.get_mut(detail.source.index()) {
                    *of = Some(detail);
                }
            }
        }
        rows.iter().zip(known).filter_map(|(row, (group, detail))| {
            Some(KnownHolder {
                row: row.as_ref()?,
                group,
                detail,
                is_cut: self.is_cut,
            })
        })
    }
}

impl KnownHolder<'_> {
    /// `None`: its generation is with the next page of the roster.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        let detail = self.detail.map(|detail| detail.generation);
        detail.or_else(|| Some(self.row.status?.generation))
    }

    #[must_use]
    pub fn states(&self) -> Option<Tiers<SourceState>> {
        let group = self.group.map(|group| group.states);
        let states = group.or_else(|| Some(self.row.status?.states))?;
        Some(match self.is_cut {
            true => states.map(|state| state.weakest(SourceState::Partial)),
            false => states,
        })
    }

    #[must_use]
    pub fn run(&self) -> Tiers<u32> {
        self.group.map(|group| group.run).unwrap_or_default()
    }
}

impl From<IndexAnswer> for IndexReply {
    fn from(answer: IndexAnswer) -> Self {
        Self::Full(answer)
    }
}
