//! Subscriptions that the server removes while it keeps the connection, as after a change of
//! permissions. Only a new connection or a new subscription brings them back, once the permission
//! is back: the process's client must find out by the product's supervision.

use std::time::Duration;

use warmroute_indexer::Handle;

use super::host::{Event, Input, Kind, ProcessId};
use super::plane::{At, Reply};
use super::{Breakage, World};

/// A refusal whose error text arrives shows within this time: the text may be 2 s on its way.
const NOTICED_WITH_TEXT: Duration = Duration::from_secs(4);
/// Without the text, a silence of 15 s or two probes without an answer show it.
const NOTICED_WITHOUT_TEXT: Duration = Duration::from_secs(20);
/// A process makes its subscriptions again within this time once they are permitted.
const RESTORED_WITHIN: Duration = Duration::from_secs(35);
/// A call whose answer cannot come fails after this time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Some of a process's subscriptions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Subscriptions {
    broadcasts: bool,
    /// All answers, and what a tail or a watch reads.
    inbox: bool,
}

impl Subscriptions {
    const NONE: Self = Self {
        broadcasts: false,
        inbox: false,
    };
}

/// What a host's user may not subscribe to, and what its connection lacks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SubscriptionState {
    refused: Subscriptions,
    refused_until: At,
    missing: Subscriptions,
    /// The subscriptions are missing since then, or complete again.
    changed_at: At,
    /// The error text of the refusal was lost.
    is_text_lost: bool,
}

impl SubscriptionState {
    pub(super) const fn lacks_broadcasts(&self) -> bool {
        self.missing.broadcasts
    }

    pub(super) const fn lacks_inbox(&self) -> bool {
        self.missing.inbox
    }

    /// Whether answers came for so long.
    pub(super) fn has_answers_for(&self, time: Duration, now: At) -> bool {
        !self.missing.inbox && self.changed_at + time <= now
    }

    /// Everything is permitted from now on.
    pub(super) fn permit(&mut self, now: At) {
        self.refused_until = self.refused_until.min(now);
    }

    fn refused(&self, now: At) -> Subscriptions {
        if now < self.refused_until {
            self.refused
        } else {
            Subscriptions::NONE
        }
    }

    fn is_missing(&self) -> bool {
        self.missing != Subscriptions::NONE
    }
}

impl World {
    /// The server removes a process's subscriptions, and refuses them for some time.
    pub(super) fn deafen(&mut self, host: usize) -> bool {
        let after = self.millis(1_000..12_000);
        self.fault_lasts(after);
        let drawn = self.dice.later.u8(0..3);
        let refused = Subscriptions {
            broadcasts: drawn != 1,
            inbox: drawn != 0,
        };
        let until = self.now + after;
        let node = &mut self.hosts[host];
        node.subscriptions.refused = refused;
        node.subscriptions.refused_until = until;
        node.subscriptions.missing.broadcasts |= refused.broadcasts;
        node.subscriptions.missing.inbox |= refused.inbox;
        let is_up = node.is_up;
        self.refuse(host, refused);
        is_up
    }

    /// The server sends an error text for each refused subscription, which the client may drop.
    fn refuse(&mut self, host: usize, refused: Subscriptions) {
        if refused == Subscriptions::NONE {
            return;
        }
        let is_text_lost = self.dice.later.u8(0..3) == 0;
        let subscriptions = &mut self.hosts[host].subscriptions;
        subscriptions.is_text_lost = is_text_lost;
        subscriptions.changed_at = self.now;
        if !is_text_lost {
            self.send_refusals(host, refused);
        }
    }

    fn send_refusals(&mut self, host: usize, refused: Subscriptions) {
        let broadcasts = refused.broadcasts.then(|| self.subjects.all_heartbeats());
        let inbox = refused.inbox.then(|| "_INBOX.user.connection.*".to_owned());
        for subject in broadcasts.into_iter().chain(inbox) {
            let text = format!("Permissions Violation for Subscription to \"{subject}\"");
            self.in_order(host, Input::Refused(text));
        }
    }

    /// A new connection makes all subscriptions that are permitted.
    pub(super) fn on_new_connection(&mut self, host: usize) {
        let now = self.now;
        let node = &mut self.hosts[host];
        let was_missing = node.subscriptions.is_missing();
        let refused = node.subscriptions.refused(now);
        node.subscriptions.missing = refused;
        if was_missing {
            node.subscriptions.changed_at = now;
        }
        if let Some(running) = &node.running {
            running.connection.count_connection();
        }
        self.refuse(host, refused);
    }

    /// The process's client makes a subscription, perhaps again.
    pub(super) fn on_subscription(&mut self, host: usize) {
        let now = self.now;
        let subscriptions = &mut self.hosts[host].subscriptions;
        if subscriptions.refused(now).broadcasts {
            let refused = Subscriptions {
                inbox: false,
                ..subscriptions.refused
            };
            self.send_refusals(host, refused);
        } else if self.broken != Some(Breakage::DeafForGood) && subscriptions.missing.broadcasts {
            subscriptions.missing.broadcasts = false;
            subscriptions.changed_at = now;
        }
    }

    /// The process's client closes its connection and opens another one.
    pub(super) fn reconnect(&mut self, host: usize) {
        if self.broken == Some(Breakage::DeafForGood) {
            return;
        }
        self.note(|| format!("host {host}: reconnects"));
        self.hosts[host].seems_up = false;
        self.accept(host, Input::Connection(false));
        let after = self.millis(5..200);
        let life = self.hosts[host].life;
        self.plan(after, Event::Reconnected((host, life)));
    }

    pub(super) fn reconnected(&mut self, (host, life): ProcessId) {
        let node = &mut self.hosts[host];
        // A link that comes back connects it as well.
        if node.life != life || node.is_cut || node.seems_up {
            return;
        }
        node.seems_up = true;
        self.disturb(host);
        self.send_host(host, Duration::ZERO, Input::Connection(true));
        self.on_new_connection(host);
        self.reconnect_streams(host);
    }

    /// What comes through an inbox that the server removed; `None`: it does not come.
    pub(super) fn through_inbox(&mut self, host: usize, input: Input) -> Option<Input> {
        if !self.hosts[host].subscriptions.lacks_inbox() {
            return Some(input);
        }
        match input {
            Input::Tail(..) | Input::TailEnded(_) | Input::Registry(..) => None,
            Input::Reply(then, reply) if !matches!(reply, Reply::Unavailable) => {
                let late = Input::Reply(then, Reply::Unavailable);
                self.send_host(host, ANSWER_TIMEOUT, late);
                None
            }
            Input::Served(reply, _) | Input::Unserved(reply) => {
                self.lose_reply(reply);
                None
            }
            other => Some(other),
        }
    }

    // --- what has to hold

    /// A process with a missing subscription is not ready, and makes it again.
    pub(super) fn check_subscriptions(&mut self, host: usize) {
        let node = &self.hosts[host];
        let subscriptions = node.subscriptions;
        let runs = node
            .running
            .as_ref()
            .is_some_and(|it| it.ends_since.is_none());
        if !subscriptions.is_missing() || !runs || node.is_paused || node.is_cut {
            return;
        }
        let undisturbed = node.disturbed_at.max(node.stalled_until);
        let noticed_within = if subscriptions.is_text_lost {
            NOTICED_WITHOUT_TEXT
        } else {
            NOTICED_WITH_TEXT
        };
        let is_noticed = undisturbed.max(subscriptions.changed_at) + noticed_within < self.now;
        if is_noticed && self.is_ready(host) {
            let missing = subscriptions.missing;
            self.fail(format!(
                "host {host} is ready, its connection lacks {missing:?}"
            ));
        }
        if undisturbed.max(subscriptions.refused_until) + RESTORED_WITHIN < self.now {
            let missing = subscriptions.missing;
            self.fail(format!(
                "host {host} lacks {missing:?}, permitted for {RESTORED_WITHIN:?}"
            ));
        }
    }

    fn is_ready(&self, host: usize) -> bool {
        match self.hosts[host].kind {
            Kind::Shim(at) => {
                let handle = self.shims[at].handle.as_ref();
                handle.is_some_and(|handle| handle.readiness().is_ok())
            }
            Kind::Indexer(at) => self.read_index(at, Handle::is_ready).unwrap_or_default(),
            Kind::Router(_) => false,
        }
    }
}
