//! The server's side: one log, one registry, one snapshot store, and what can happen to them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use warmroute_plane::{LogMessage, LogStatus, PutIf, RegistryEntry, RegistryEvent, Revision};
use warmroute_proto::{LogPosition, StreamIdentity};

use super::core_bus::WorldPlane;
use super::services::Requests;

/// Since the world began.
pub(super) type At = Duration;

/// One question to the plane, answered in one step.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Append {
        subject: String,
        payload: Bytes,
    },
    Status,
    LastOn(String),
    At(LogPosition),
    Get(String),
    Put {
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    },
    Delete(String, Revision),
    Blobs,
    Blob(String),
    PutBlob(String, Bytes),
    DeleteBlob(String),
    Tail(LogPosition, usize, mpsc::Sender<Vec<LogMessage>>),
    Watch(String, mpsc::Sender<RegistryEvent>),
}

impl Op {
    const fn is_of_the_log(&self) -> bool {
        matches!(
            self,
            Self::Append { .. } | Self::Status | Self::LastOn(_) | Self::At(_) | Self::Tail(..)
        )
    }

    const fn is_of_the_store(&self) -> bool {
        matches!(
            self,
            Self::Blobs | Self::Blob(_) | Self::PutBlob(..) | Self::DeleteBlob(_)
        )
    }

    pub(super) const fn label(&self) -> &'static str {
        match self {
            Self::Append { .. } => "append",
            Self::Status => "log status",
            Self::LastOn(_) => "last record",
            Self::At(_) => "record",
            Self::Get(_) => "get",
            Self::Put { .. } => "put",
            Self::Delete(..) => "delete",
            Self::Blobs => "snapshots",
            Self::Blob(_) => "snapshot",
            Self::PutBlob(..) => "put snapshot",
            Self::DeleteBlob(_) => "delete snapshot",
            Self::Tail(..) => "tail",
            Self::Watch(..) => "watch",
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Reply {
    Position(LogPosition),
    Status(LogStatus),
    Message(Option<LogMessage>),
    Entry(Option<RegistryEntry>),
    Revision(Revision),
    Names(Vec<String>),
    Blob(Option<Bytes>),
    Done,
    Conflict,
    /// No answer in time; the effect of the call is unknown.
    Unavailable,
}

impl Reply {
    pub(super) const fn label(&self) -> &'static str {
        match self {
            Self::Position(_)
            | Self::Status(_)
            | Self::Message(_)
            | Self::Entry(_)
            | Self::Revision(_)
            | Self::Names(_)
            | Self::Blob(_)
            | Self::Done => "well",
            Self::Conflict => "with a conflict",
            Self::Unavailable => "never",
        }
    }
}

/// What the log does with a call for some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Impairment {
    /// It neither performs nor answers the call.
    Refuses,
    /// It performs the call, and the answer is lost.
    LosesAnswers,
}

#[derive(Clone)]
pub(super) struct Log {
    pub(super) identity: StreamIdentity,
    messages: VecDeque<LogMessage>,
    last: LogPosition,
    pub(super) messages_max: usize,
}

impl Log {
    pub(super) const fn new(identity: StreamIdentity, messages_max: usize) -> Self {
        Self {
            identity,
            messages: VecDeque::new(),
            last: LogPosition(0),
            messages_max,
        }
    }

    pub(super) fn status(&self) -> LogStatus {
        let first = self.messages.front();
        LogStatus {
            identity: self.identity,
            first: first.map_or_else(|| self.last.next(), |message| message.position),
            last: self.last,
            now_unix_ns: 0,
        }
    }

    fn append(&mut self, subject: String, payload: Bytes, stored_unix_ns: u64) -> LogPosition {
        self.last = self.last.next();
        self.messages.push_back(LogMessage {
            position: self.last,
            subject,
            payload,
            stored_unix_ns,
        });
        self.trim(self.messages_max);
        self.last
    }

    /// Lets the oldest go.
    /// Was there more?
    pub(super) fn trim(&mut self, keep: usize) -> bool {
        let is_more = self.messages.len() > keep;
        while self.messages.len() > keep {
            self.messages.pop_front();
        }
        is_more
    }

    pub(super) fn at(&self, position: LogPosition) -> Option<&LogMessage> {
        let first = self.messages.front()?.position;
        let index = position.0.checked_sub(first.0)?;
        self.messages.get(usize::try_from(index).ok()?)
    }

    pub(super) fn at_mut(&mut self, position: LogPosition) -> Option<&mut LogMessage> {
        let first = self.messages.front()?.position;
        let index = position.0.checked_sub(first.0)?;
        self.messages.get_mut(usize::try_from(index).ok()?)
    }

    pub(super) fn last_on(&self, subject: &str) -> Option<&LogMessage> {
        let mut newest_first = self.messages.iter().rev();
        newest_first.find(|message| message.subject == subject)
    }

    pub(super) fn after(&self, after: LogPosition, max: usize) -> Vec<LogMessage> {
        let first = self.status().first;
        let skip = after.next().0.saturating_sub(first.0);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let skip = skip.min(self.messages.len());
        self.messages.range(skip..).take(max).cloned().collect()
    }
}

#[derive(Clone)]
pub(super) struct Entry {
    pub(super) entry: RegistryEntry,
    pub(super) expires: Option<At>,
}

/// A change that is sent to watchers.
#[derive(Clone, Debug)]
pub(super) struct Changed {
    pub(super) key: String,
    /// The new value; `None` if the key is gone.
    pub(super) entry: Option<RegistryEntry>,
}

pub(super) struct Plane {
    pub(super) kind: WorldPlane,
    /// When the last message from one host to another one arrives, without a log server.
    pub(super) reached: BTreeMap<(usize, usize), At>,
    /// The requests of processes to each other.
    pub(super) requests: Requests,
    pub(super) log: Log,
    pub(super) keys: BTreeMap<String, Entry>,
    revision: u64,
    pub(super) blobs: BTreeMap<String, Bytes>,
    /// An older copy of log and registry.
    copy: Option<(Log, BTreeMap<String, Entry>)>,
    stored: u64,
    /// A copy of the log that answers half of the reads, until then.
    lag: Option<(Log, At)>,
    lagging_turn: bool,
    /// How far the leading server's clock is ahead.
    clock_ahead: Duration,
    pub(super) changed: Vec<Changed>,
    /// What is wrong with appends to a subject, or with the whole log, and until when.
    impaired: BTreeMap<Option<String>, (Impairment, At)>,
    /// The snapshot store is slow until then.
    store_slow_until: At,
    /// When the last slow transfer ends.
    pub(super) slow_transfers_end: At,
}

impl Plane {
    pub(super) const fn new(log: Log, kind: WorldPlane) -> Self {
        Self {
            kind,
            reached: BTreeMap::new(),
            requests: Requests::new(),
            log,
            keys: BTreeMap::new(),
            revision: 0,
            blobs: BTreeMap::new(),
            copy: None,
            stored: 0,
            lag: None,
            lagging_turn: false,
            clock_ahead: Duration::from_secs(30),
            changed: Vec::new(),
            impaired: BTreeMap::new(),
            store_slow_until: Duration::ZERO,
            slow_transfers_end: Duration::ZERO,
        }
    }

    pub(super) const fn slow_store(&mut self, until: At) {
        self.store_slow_until = until;
    }

    pub(super) fn is_slow(&self, now: At, op: &Op) -> bool {
        op.is_of_the_store() && now < self.store_slow_until
    }

    pub(super) fn impair(&mut self, subject: Option<String>, how: Impairment, until: At) {
        self.impaired.insert(subject, (how, until));
    }

    pub(super) fn repair(&mut self) {
        self.impaired.clear();
        self.store_slow_until = Duration::ZERO;
    }

    /// When the log got a leader again.
    pub(super) fn log_led_from(&self) -> At {
        let impaired = self.impaired.get(&None);
        impaired.map_or_else(At::default, |(_, until)| *until)
    }

    /// Until when the log has no leader.
    pub(super) fn leaderless_until(&self, now: At) -> Option<At> {
        let (_, until) = self.impaired.get(&None)?;
        Some(*until).filter(|until| *until > now)
    }

    /// What is wrong with this call.
    pub(super) fn impairment(&self, now: At, op: &Op) -> Option<Impairment> {
        if !op.is_of_the_log() {
            return None;
        }
        let of_subject = match op {
            Op::Append { subject, .. } => self.impaired.get(&Some(subject.clone())),
            _ => None,
        };
        let all = self.impaired.get(&None);
        let mut impaired = all.into_iter().chain(of_subject);
        impaired
            .find(|(_, until)| *until > now)
            .map(|(how, _)| *how)
    }

    pub(super) fn answer(&mut self, now: At, op: Op) -> Reply {
        match op {
            Op::Append { subject, payload } => Reply::Position(self.append(now, subject, payload)),
            Op::Status => Reply::Status(LogStatus {
                now_unix_ns: self.clock(now),
                ..self.log.status()
            }),
            Op::LastOn(subject) => Reply::Message(self.read_from(now).last_on(&subject).cloned()),
            Op::At(position) => Reply::Message(self.read_from(now).at(position).cloned()),
            Op::Get(key) => Reply::Entry(self.keys.get(&key).map(|entry| entry.entry.clone())),
            Op::Put {
                key,
                value,
                condition,
                lease,
            } => self.put(key, value, condition, lease.map(|lease| now + lease)),
            Op::Delete(key, revision) => {
                let is_it = |entry: &Entry| entry.entry.revision == revision;
                if !self.keys.get(&key).is_some_and(is_it) {
                    return Reply::Conflict;
                }
                self.remove(&key);
                Reply::Done
            }
            Op::Blobs => Reply::Names(self.blobs.keys().cloned().collect()),
            Op::Blob(name) => Reply::Blob(self.blobs.get(&name).cloned()),
            Op::PutBlob(name, blob) => {
                if self.blobs.contains_key(&name) {
                    return Reply::Conflict;
                }
                self.blobs.insert(name, blob);
                Reply::Done
            }
            Op::DeleteBlob(name) => {
                self.blobs.remove(&name);
                Reply::Done
            }
            // The world holds the streams.
            Op::Tail(..) | Op::Watch(..) => Reply::Done,
        }
    }

    /// Another server stamps messages from now on.
    pub(super) const fn another_clock(&mut self, ahead: Duration) {
        self.clock_ahead = ahead;
        self.stored = 0;
    }

    pub(super) fn begin_lag(&mut self, until: At) {
        self.lag = Some((self.log.clone(), until));
    }

    /// Single records are read from any copy.
    fn read_from(&mut self, now: At) -> &Log {
        self.lag
            .take_if(|(log, until)| *until <= now || log.identity != self.log.identity);
        self.lagging_turn = !self.lagging_turn;
        match &self.lag {
            Some((log, _)) if self.lagging_turn => log,
            Some(_) | None => &self.log,
        }
    }

    /// What stamps messages.
    pub(super) fn clock(&self, now: At) -> u64 {
        let now = now + self.clock_ahead;
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        now.max(self.stored)
    }

    pub(super) fn append(&mut self, now: At, subject: String, payload: Bytes) -> LogPosition {
        // No two messages are stored at one moment.
        self.stored = self.clock(now).max(self.stored + 1);
        self.log.append(subject, payload, self.stored)
    }

    fn put(&mut self, key: String, value: Bytes, condition: PutIf, expires: Option<At>) -> Reply {
        let present = self.keys.get(&key).map(|entry| entry.entry.revision);
        let holds = match condition {
            PutIf::Always => true,
            PutIf::Absent => present.is_none(),
            PutIf::Revision(revision) => present == Some(revision),
        };
        if !holds {
            return Reply::Conflict;
        }
        self.revision += 1;
        let revision = Revision(self.revision);
        let entry = RegistryEntry { value, revision };
        self.changed.push(Changed {
            key: key.clone(),
            entry: Some(entry.clone()),
        });
        self.keys.insert(key, Entry { entry, expires });
        Reply::Revision(revision)
    }

    /// Removes a key whose time is over, unless it was written again. Was it removed?
    pub(super) fn expire(&mut self, now: At, key: &str) -> bool {
        let is_over = |entry: &Entry| entry.expires.is_some_and(|expires| expires <= now);
        let expires = self.keys.get(key).is_some_and(is_over);
        if expires {
            self.remove(key);
        }
        expires
    }

    pub(super) fn remove(&mut self, key: &str) {
        if self.keys.remove(key).is_some() {
            self.changed.push(Changed {
                key: key.to_owned(),
                entry: None,
            });
        }
    }

    // --- what goes wrong

    pub(super) fn overwrite(&mut self, key: String, value: Bytes) {
        self.put(key, value, PutIf::Always, None);
    }

    pub(super) fn save_copy(&mut self) {
        self.copy = Some((self.log.clone(), self.keys.clone()));
    }

    /// The server starts from an older copy of its directory. Leases in it ran out long ago.
    pub(super) fn roll_back(&mut self) -> bool {
        let Some((log, keys)) = self.copy.clone() else {
            return false;
        };
        let messages_max = self.log.messages_max;
        self.log = log;
        self.lag = None;
        self.log.messages_max = messages_max;
        for key in self.keys.keys().cloned().collect::<Vec<_>>() {
            self.remove(&key);
        }
        for (key, entry) in keys {
            if entry.expires.is_none() {
                self.changed.push(Changed {
                    key: key.clone(),
                    entry: Some(entry.entry.clone()),
                });
                self.keys.insert(key, entry);
            }
        }
        // The server's count goes back with it.
        let newest = self.keys.values().map(|entry| entry.entry.revision.0).max();
        self.revision = newest.unwrap_or(0);
        true
    }

    /// The log's last messages are gone; positions are given again.
    /// Was there any?
    pub(super) fn lose_tail(&mut self, messages: usize) -> bool {
        let is_any = !self.log.messages.is_empty();
        for _ in 0..messages {
            if let Some(lost) = self.log.messages.pop_back() {
                self.log.last = LogPosition(lost.position.0 - 1);
            }
        }
        is_any
    }

    pub(super) fn recreate(&mut self, identity: StreamIdentity) {
        self.log = Log::new(identity, self.log.messages_max);
        self.copy = None;
    }

    /// Was there anything in it?
    pub(super) fn lose_registry(&mut self) -> bool {
        let is_any = !self.keys.is_empty();
        for key in self.keys.keys().cloned().collect::<Vec<_>>() {
            self.remove(&key);
        }
        self.revision = 0;
        is_any
    }
}
