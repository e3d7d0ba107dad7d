use super::*;

fn permit() -> OwnedSemaphorePermit {
    let permits = Arc::new(tokio::sync::Semaphore::new(1));
    permits.try_acquire_owned().expect("a free permit")
}

fn connected() -> (NatsLink, Arc<Statistics>) {
    let link = NatsLink::new();
    let statistics = Arc::new(Statistics::default());
    statistics.connects.store(1, Ordering::Relaxed);
    link.begin(Arc::clone(&statistics));
    (link, statistics)
}

#[test]
fn a_disconnect_fails_what_is_in_flight() {
    let (link, statistics) = connected();
    let mut answer = link.await_answer(7, permit());
    link.observe(Event::Disconnected);
    assert!(!link.is_up());
    assert!(answer.try_recv().is_err());
    let epochs = link.epochs();
    statistics.connects.store(2, Ordering::Relaxed);
    link.observe(Event::Connected);
    assert!(link.is_up());
    assert_eq!(*epochs.borrow(), 2);
    assert_eq!(link.counters.answers_cut_off.load(Ordering::Relaxed), 1);
}

#[test]
fn a_reconnect_without_events_is_seen() {
    let (link, statistics) = connected();
    let mut answer = link.await_answer(7, permit());
    let epochs = link.epochs();
    statistics.connects.store(2, Ordering::Relaxed);
    link.poll(State::Connected);
    assert_eq!(epochs.has_changed().ok(), Some(true), "consumers are woken");
    assert_eq!(*epochs.borrow(), 2);
    assert!(answer.try_recv().is_err());
    link.poll(State::Disconnected);
    assert!(!link.is_up());
}

#[test]
fn every_event_is_counted() {
    let (link, _) = connected();
    link.observe(Event::SlowConsumer(1));
    link.observe(Event::LameDuckMode);
    link.observe(Event::ServerError(ServerError::Other("no".into())));
    link.observe(Event::ClientError(ClientError::MaxReconnects));
    link.observe(Event::Closed);
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counters = &link.counters;
    assert_eq!(of(&counters.slow_consumers), 1);
    assert_eq!(of(&counters.lame_ducks), 1);
    assert_eq!(of(&counters.server_errors), 1);
    assert_eq!(of(&counters.client_errors), 1);
    assert_eq!(of(&counters.closed), 1);
    assert_eq!(link.last_server_error(), "no");
}
