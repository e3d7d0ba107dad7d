//! The server's side of a process's streams: tails of the log, watches of the registry, subscriptions.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::mpsc;
use warmroute_plane::{Broadcast, LogMessage, RegistryEvent, Revision, ServiceRequest};
use warmroute_proto::{LogPosition, StreamIdentity};

use super::plane::At;

/// How far a tail is, and the stamp of the message there.
#[derive(Clone, Copy)]
pub(super) struct Reached {
    pub(super) position: LogPosition,
    pub(super) stored: Option<u64>,
}

pub(super) struct Tail {
    pub(super) id: u64,
    pub(super) to: mpsc::Sender<Vec<LogMessage>>,
    pub(super) batch_max: usize,
    /// The log that it follows.
    pub(super) log: StreamIdentity,
    /// Counts connections: what is on its way in an earlier one is lost.
    pub(super) connection: u64,
    pub(super) sent: Reached,
    pub(super) delivered: Reached,
    /// When the tail next proves that its log is still there.
    pub(super) check_at: At,
    pub(super) is_pumping: bool,
}

pub(super) struct Watch {
    pub(super) id: u64,
    pub(super) to: mpsc::Sender<RegistryEvent>,
    pub(super) prefix: String,
    /// A router's follower of workers and drains reads it.
    pub(super) is_of_fleet: bool,
    pub(super) seen: BTreeMap<String, Revision>,
    /// The keys that will be in `seen` when all that was sent has arrived: a process that stands still
    /// reads it later.
    pub(super) sent: BTreeSet<String>,
    /// Everything that was there at its begin came.
    pub(super) is_current: bool,
}

impl Watch {
    pub(super) fn note_sent(&mut self, event: &RegistryEvent) {
        match event {
            RegistryEvent::Put { key, .. } => {
                self.sent.insert(key.clone());
            }
            RegistryEvent::Gone { key } => {
                self.sent.remove(key);
            }
            RegistryEvent::Current => {}
        }
    }
}

#[derive(Default)]
pub(super) struct Streams {
    opened: u64,
    pub(super) tails: Vec<Tail>,
    pub(super) watches: Vec<Watch>,
    pub(super) subscriptions: Vec<(String, mpsc::Sender<Broadcast>)>,
    pub(super) services: Vec<(String, mpsc::Sender<ServiceRequest>)>,
}

impl Streams {
    /// A number for the next stream. Forgets those that the process dropped.
    pub(super) fn next_id(&mut self) -> u64 {
        self.tails.retain(|tail| !tail.to.is_closed());
        self.watches.retain(|watch| !watch.to.is_closed());
        self.opened += 1;
        self.opened
    }

    pub(super) fn subscribe(&mut self, subject: String, to: mpsc::Sender<Broadcast>) {
        self.subscriptions.retain(|(_, to)| !to.is_closed());
        self.subscriptions.push((subject, to));
    }

    pub(super) fn tail(&mut self, id: u64) -> Option<&mut Tail> {
        self.tails.iter_mut().find(|tail| tail.id == id)
    }

    pub(super) fn watch(&mut self, id: u64) -> Option<&mut Watch> {
        self.watches.iter_mut().find(|watch| watch.id == id)
    }

    pub(super) fn listens_to(&self, subject: &str) -> bool {
        self.listeners(subject).next().is_some()
    }

    pub(super) fn listeners(
        &self,
        subject: &str,
    ) -> impl Iterator<Item = &mpsc::Sender<Broadcast>> {
        let matching = move |(wanted, to): &&(String, mpsc::Sender<Broadcast>)| {
            let prefix = wanted.strip_suffix('>');
            let is_it = prefix.map_or(subject == wanted, |prefix| subject.starts_with(prefix));
            is_it && !to.is_closed()
        };
        self.subscriptions.iter().filter(matching).map(|(_, to)| to)
    }

    /// One of those that serve a subject.
    pub(super) fn server(&self, subject: &str) -> Option<&mpsc::Sender<ServiceRequest>> {
        let mut servers = self.services.iter();
        let found = servers.find(|(served, to)| served == subject && !to.is_closed());
        found.map(|(_, to)| to)
    }
}
