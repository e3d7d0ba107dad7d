//! Requests from one process to a service of another one, and the answers on their way back.

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use warmroute_plane::{Reply as ReplyTo, ServiceRequest};

use super::World;
use super::host::{Input, ProcessId};

/// A request that its server has not answered.
pub(super) struct OpenRequest {
    from: ProcessId,
    to: ProcessId,
    question: Bytes,
    answer: oneshot::Receiver<Bytes>,
    reply: ReplyTo,
}

/// The requests of all processes.
pub(super) struct Requests {
    open: Vec<OpenRequest>,
    /// For requests and answers that were lost: the requester waits until its deadline.
    lost: Vec<ReplyTo>,
}

impl Requests {
    pub(super) const fn new() -> Self {
        Self {
            open: Vec::new(),
            lost: Vec::new(),
        }
    }
}

impl World {
    /// A request goes to one of those that serve its subject. If there is none, it fails soon; if
    /// it is lost, at its deadline.
    pub(super) fn request(&mut self, from: usize, subject: String, request: ServiceRequest) {
        let serves = |host: &usize| {
            let node = &self.hosts[*host];
            let running = node.running.as_ref().filter(|_| !node.is_cut);
            running.is_some_and(|running| running.streams.server(&subject).is_some())
        };
        let servers: Vec<usize> = (0..self.hosts.len()).filter(serves).collect();
        self.check_asked(from, &subject);
        if self.hosts[from].is_cut || self.strikes(self.rates.call_lost) {
            self.plane.requests.lost.push(request.reply);
            return;
        }
        if servers.is_empty() {
            self.in_order(from, Input::Unserved(request.reply));
            return;
        }
        let to = servers[self.rng.usize(0..servers.len())];
        let from = self.process(from);
        self.in_order(to, Input::Request(from, subject, request));
    }

    /// A request comes to its server.
    pub(super) fn accept_request(
        &mut self,
        host: usize,
        from: ProcessId,
        subject: &str,
        request: ServiceRequest,
    ) {
        let running = self.hosts[host].running.as_ref();
        let ServiceRequest { payload, reply } = request;
        let Some(server) = running.and_then(|running| running.streams.server(subject)) else {
            self.plane.requests.lost.push(reply);
            return;
        };
        let question = payload.clone();
        let (to_world, answer) = oneshot::channel();
        let reply_to = ReplyTo::new(to_world);
        // A full queue drops it.
        drop(server.try_send(ServiceRequest {
            payload,
            reply: reply_to,
        }));
        self.plane.requests.open.push(OpenRequest {
            from,
            to: self.process(host),
            question,
            answer,
            reply,
        });
    }

    /// What a process answered is on its way.
    pub(super) fn send_answers(&mut self, host: usize) {
        let here = self.process(host);
        let asked = |open: &mut OpenRequest| open.to.0 == host;
        let asked: Vec<OpenRequest> = self.plane.requests.open.extract_if(.., asked).collect();
        for mut open in asked {
            if open.to != here {
                self.plane.requests.lost.push(open.reply);
                continue;
            }
            match open.answer.try_recv() {
                Ok(answer) => self.send_answer(host, open, answer),
                Err(TryRecvError::Empty) => self.plane.requests.open.push(open),
                Err(TryRecvError::Closed) => self.plane.requests.lost.push(open.reply),
            }
        }
    }

    fn send_answer(&mut self, host: usize, open: OpenRequest, answer: Bytes) {
        self.check_served(host, &open.question, &answer);
        let answer = self.hold_as_read(answer);
        let is_lost = self.strikes(self.rates.call_lost);
        if self.hosts[host].is_cut || is_lost || open.from != self.process(open.from.0) {
            self.plane.requests.lost.push(open.reply);
            return;
        }
        self.in_order(open.from.0, Input::Served(open.reply, answer));
    }

    pub(super) fn lose_reply(&mut self, reply: ReplyTo) {
        self.plane.requests.lost.push(reply);
    }
}
