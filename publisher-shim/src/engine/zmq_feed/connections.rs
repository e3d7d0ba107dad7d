//! The connections of a socket, from what its monitor reports.
//!
//! libzmq reports the end of every connection, also of one whose handshake failed: a port scan is no
//! engine that went away. Only the end names the descriptor, and not every failed handshake is reported
//! as one: a peer of the wrong socket type only ends. One thread reports everything, a failure right
//! before the end of its connection.

/// What a monitor reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MonitorEvent {
    /// A descriptor has a peer; the handshake follows.
    Opened(u32),
    Handshaken,
    HandshakeFailed,
    Ended(u32),
    Stopped,
    Other,
}

const OPENED: [zmq::SocketEvent; 2] = [zmq::SocketEvent::ACCEPTED, zmq::SocketEvent::CONNECTED];
const FAILED: [zmq::SocketEvent; 3] = [
    zmq::SocketEvent::HANDSHAKE_FAILED_NO_DETAIL,
    zmq::SocketEvent::HANDSHAKE_FAILED_PROTOCOL,
    zmq::SocketEvent::HANDSHAKE_FAILED_AUTH,
];

/// The events of a monitor that are read here.
pub(super) fn monitored() -> i32 {
    let others = [
        zmq::SocketEvent::HANDSHAKE_SUCCEEDED,
        zmq::SocketEvent::DISCONNECTED,
        zmq::SocketEvent::MONITOR_STOPPED,
    ];
    let all = OPENED.into_iter().chain(FAILED).chain(others);
    all.map(|event| i32::from(event.to_raw())).sum()
}

impl MonitorEvent {
    /// Reads an event's first frame: its number and its value.
    pub(super) fn read(frame: &[u8]) -> Self {
        let Some((number, value)) = frame.split_first_chunk() else {
            return Self::Other;
        };
        let number = u16::from_ne_bytes(*number);
        let value = value
            .first_chunk()
            .map_or(0, |raw| u32::from_ne_bytes(*raw));
        let is = |event: &zmq::SocketEvent| event.to_raw() == number;
        if OPENED.iter().any(is) {
            Self::Opened(value)
        } else if FAILED.iter().any(is) {
            Self::HandshakeFailed
        } else if is(&zmq::SocketEvent::HANDSHAKE_SUCCEEDED) {
            Self::Handshaken
        } else if is(&zmq::SocketEvent::DISCONNECTED) {
            Self::Ended(value)
        } else if is(&zmq::SocketEvent::MONITOR_STOPPED) {
            Self::Stopped
        } else {
            Self::Other
        }
    }
}

/// A change of the peers that completed the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Made,
    Lost,
}

#[derive(Debug, Default)]
pub(super) struct Connections {
    /// Peers that completed the handshake.
    count: usize,
    /// Descriptors that were not seen to complete it.
    pending: Vec<u32>,
    /// So many of the pending ones did complete it.
    unnamed: usize,
    /// The next end belongs to a handshake that failed.
    failed: bool,
}

impl Connections {
    pub(super) const fn are_some(&self) -> bool {
        self.count > 0
    }

    pub(super) fn apply(&mut self, event: MonitorEvent) -> Option<Change> {
        match event {
            MonitorEvent::Opened(descriptor) => {
                self.pending.push(descriptor);
                None
            }
            MonitorEvent::Handshaken => {
                self.count += 1;
                self.unnamed += 1;
                self.name();
                Some(Change::Made)
            }
            MonitorEvent::HandshakeFailed => {
                self.failed = true;
                None
            }
            MonitorEvent::Ended(descriptor) => self.ended(descriptor),
            MonitorEvent::Stopped | MonitorEvent::Other => None,
        }
    }

    fn ended(&mut self, descriptor: u32) -> Option<Change> {
        let failed = std::mem::take(&mut self.failed);
        let at = self.pending.iter().position(|&open| open == descriptor);
        if let Some(at) = at {
            self.pending.swap_remove(at);
            let was_never_made = failed || self.unnamed == 0;
            if !was_never_made {
                self.unnamed -= 1;
            }
            self.name();
            if was_never_made {
                return None;
            }
        }
        self.count = self.count.saturating_sub(1);
        Some(Change::Lost)
    }

    /// If all of the pending ones completed the handshake, each is known by its descriptor.
    fn name(&mut self) {
        if self.unnamed >= self.pending.len() {
            self.pending.clear();
            self.unnamed = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::MonitorEvent::{Ended, HandshakeFailed, Handshaken, Opened};
    use super::*;

    fn changes(events: &[MonitorEvent]) -> Vec<Change> {
        let mut connections = Connections::default();
        let changes = events.iter().filter_map(|event| connections.apply(*event));
        changes.collect()
    }

    #[test]
    fn only_the_end_of_a_connection_that_was_made_counts() {
        let made = [Opened(1), Handshaken];
        let of = |then: &[MonitorEvent]| changes(&[&made, then].concat());
        assert_eq!(of(&[]), [Change::Made]);
        assert_eq!(of(&[Ended(1)]), [Change::Made, Change::Lost]);
        assert_eq!(of(&[Opened(2), HandshakeFailed, Ended(2)]), [Change::Made]);
        // Not every failure is reported.
        assert_eq!(of(&[Opened(2), Ended(2)]), [Change::Made]);
        // The engine goes while a peer stays silent.
        let lost = [Change::Made, Change::Lost];
        assert_eq!(of(&[Opened(2), Ended(1), HandshakeFailed, Ended(2)]), lost);
    }

    #[test]
    fn an_engine_that_connects_beside_a_silent_peer_is_told_from_it() {
        let both = [Opened(1), Opened(2), Handshaken];
        let of = |then: &[MonitorEvent]| changes(&[&both, then].concat());
        assert_eq!(of(&[HandshakeFailed, Ended(1)]), [Change::Made]);
        let lost = [Change::Made, Change::Lost];
        assert_eq!(of(&[Ended(2), HandshakeFailed, Ended(1)]), lost);
        assert_eq!(of(&[HandshakeFailed, Ended(1), Ended(2)]), lost);
    }
}
