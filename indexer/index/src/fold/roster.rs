//! The roster of a fold: a dense number for each source, and the changes of their status.
//!
//! Numbers are never reused: a source that was forgotten and returns gets a new one. Rows grow with
//! the number of different sources ever seen, by about a hundred bytes each.

use std::collections::BTreeMap;

use warmroute_proto::Source;
use warmroute_proto::roster::{
    RosterId, RosterNumber, RosterPage, RosterPageRequest, RosterRow, RosterStatus,
};

/// Encoded bytes of a row without its worker's name.
const ROW_BYTES: usize = 64;

#[derive(Default)]
pub(super) struct Roster {
    id: RosterId,
    /// By number.
    rows: Vec<Row>,
    numbers: BTreeMap<Source, RosterNumber>,
    /// Every row once, by the version of its last change.
    changes: BTreeMap<u64, RosterNumber>,
    version: u64,
}

struct Row {
    source: Source,
    status: Option<RosterStatus>,
    changed: u64,
}

impl Roster {
    pub(super) const fn set_id(&mut self, id: RosterId) {
        self.id = id;
    }

    pub(super) const fn id(&self) -> RosterId {
        self.id
    }

    /// The source's number, a new one for an unknown source.
    pub(super) fn add(&mut self, source: &Source) -> RosterNumber {
        if let Some(&known) = self.numbers.get(source) {
            return known;
        }
        let number = RosterNumber(u32::try_from(self.rows.len()).unwrap_or(u32::MAX));
        self.version += 1;
        self.rows.push(Row {
            source: source.clone(),
            status: None,
            changed: self.version,
        });
        self.numbers.insert(source.clone(), number);
        self.changes.insert(self.version, number);
        number
    }

    pub(super) fn set(&mut self, number: RosterNumber, status: Option<RosterStatus>) {
        let Some(row) = self.rows.get_mut(number.index()) else {
            return;
        };
        if row.status == status {
            return;
        }
        row.status = status;
        self.changes.remove(&row.changed);
        self.version += 1;
        row.changed = self.version;
        self.changes.insert(self.version, number);
    }

    pub(super) fn remove(&mut self, source: &Source) {
        if let Some(number) = self.numbers.remove(source) {
            self.set(number, None);
        }
    }

    /// The version that brought this status; `None` if the row has another one.
    pub(super) fn version_of(&self, number: RosterNumber, status: RosterStatus) -> Option<u64> {
        let row = self.rows.get(number.index())?;
        (row.status == Some(status)).then_some(row.changed)
    }

    pub(super) fn source(&self, number: RosterNumber) -> Option<&Source> {
        self.rows.get(number.index()).map(|row| &row.source)
    }

    /// The oldest changes after a version, in about so many bytes; one row in any case.
    pub(super) fn page(&self, ask: &RosterPageRequest, bytes_max: usize) -> RosterPage {
        let since = if ask.roster == self.id { ask.since } else { 0 };
        let mut page = RosterPage {
            roster: self.id,
            version: self.version,
            rows: Vec::new(),
            more: false,
        };
        let mut bytes = 0;
        for (&changed, &number) in self.changes.range(since.saturating_add(1)..) {
            let Some(row) = self.rows.get(number.index()) else {
                continue;
            };
            if bytes >= bytes_max && !page.rows.is_empty() {
                page.more = true;
                break;
            }
            bytes += ROW_BYTES + row.source.worker.as_str().len();
            page.version = changed;
            page.rows.push(RosterRow {
                number,
                source: row.source.clone(),
                status: row.status,
            });
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warmroute_proto::query::SourceState;
    use warmroute_proto::{DpRank, Generation, Tiers};

    use super::*;
    use warmroute_proto::roster::PART_BYTES_MAX;

    fn source(number: u32) -> Source {
        Source {
            worker: format!("{}{number}", "long-".repeat(2_000)).into(),
            dp_rank: DpRank(0),
        }
    }

    fn status(generation: u64) -> RosterStatus {
        RosterStatus {
            generation: Generation(generation),
            states: Tiers::all(SourceState::Exact),
            reason: None,
        }
    }

    /// What a reader has read: name and status by number.
    type Read = BTreeMap<RosterNumber, (Source, Option<RosterStatus>)>;

    proptest! {
        /// A reader that reads a page now and then has all rows after its last one.
        #[test]
        fn pages_carry_every_change(
            steps in prop::collection::vec((0..80_u32, 0..4_u64, 0..6_u8), 1..300),
        ) {
            let mut roster = Roster::default();
            roster.set_id(RosterId(7));
            let mut read = Read::new();
            let mut ask = RosterPageRequest { roster: RosterId(7), since: 0 };
            let mut take = |roster: &Roster, read: &mut Read| {
                let page = roster.page(&ask, PART_BYTES_MAX);
                ask.since = page.version;
                read.extend(page.rows.into_iter().map(|row| (row.number, (row.source, row.status))));
                page.more
            };
            for (name, generation, step) in steps {
                match step {
                    0 => drop(take(&roster, &mut read)),
                    1 => roster.remove(&source(name)),
                    _ => {
                        let number = roster.add(&source(name));
                        roster.set(number, Some(status(generation)));
                    }
                }
            }
            while take(&roster, &mut read) {}
            let rows = roster.rows.iter().map(|row| (row.source.clone(), row.status));
            prop_assert_eq!(read.into_values().collect::<Vec<_>>(), rows.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_reader_of_another_roster_starts_at_the_beginning() {
        let mut roster = Roster::default();
        roster.set_id(RosterId(7));
        roster.add(&source(1));
        let ask = |roster, since| RosterPageRequest { roster, since };
        assert_eq!(
            roster.page(&ask(RosterId(7), 1), PART_BYTES_MAX).rows.len(),
            0
        );
        assert_eq!(
            roster.page(&ask(RosterId(8), 1), PART_BYTES_MAX).rows.len(),
            1
        );
    }
}
