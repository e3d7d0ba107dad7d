use super::*;

fn permit() -> OwnedSemaphorePermit {
    let permits = Arc::new(tokio::sync::Semaphore::new(1));
    permits.try_acquire_owned().expect("a free permit")
}

fn connected() -> (NatsLink, Arc<Statistics>) {
    let link = NatsLink::new("shim");
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
fn an_event_that_read_the_count_before_the_link_began_cuts_nothing_off() {
    let (link, _) = connected();
    let mut answer = link.await_answer(7, permit());
    link.raise_epoch(0);
    link.poll(State::Connected);
    assert_eq!(*link.epochs().borrow(), 1);
    let pending = answer.try_recv().expect_err("no answer arrived");
    assert_eq!(pending, oneshot::error::TryRecvError::Empty);
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

#[test]
fn a_connection_without_a_subscription_is_down_and_reconnects() {
    let (link, statistics) = connected();
    let connection = link.connection();
    let violation = r#"Permissions Violation for Subscription to "a" (sid "1")"#;
    link.observe(Event::ServerError(ServerError::Other(violation.into())));
    assert!(link.is_up(), "requests are still sent");
    assert_eq!(*connection.borrow(), Connection::Down);
    assert!(!link.poll(State::Connected), "after a delay");
    statistics.connects.store(2, Ordering::Relaxed);
    link.observe(Event::Connected);
    assert_eq!(*connection.borrow(), Connection::Down, "not settled");
    let publish = r#"Permissions Violation for Publish to "b""#;
    link.observe(Event::ServerError(ServerError::Other(publish.into())));
    assert!(link.is_publish_refused("b"));
}

#[test]
fn unanswered_requests_take_the_connection_down() {
    let (link, _) = connected();
    let connection = link.connection();
    link.set_unanswered(true);
    assert_eq!(*connection.borrow(), Connection::Down);
    link.set_unanswered(false);
    assert_eq!(*connection.borrow(), Connection::Up);
}

#[test]
fn refused_credentials_are_a_warning_each_minute() {
    let (link, _) = connected();
    let begin = Instant::now();
    assert!(link.is_login_warning_due(begin));
    let almost = begin + LOGIN_WARNING_EVERY - Duration::from_nanos(1);
    assert!(!link.is_login_warning_due(almost));
    assert!(link.is_login_warning_due(begin + LOGIN_WARNING_EVERY));
}

#[test]
fn refusals_of_credentials_are_told_from_other_errors() {
    for error in [
        ServerError::AuthorizationViolation,
        ServerError::Other("User Authentication Expired".into()),
        ServerError::Other("User Authentication Revoked".into()),
    ] {
        let (link, _) = connected();
        link.observe(Event::ServerError(error));
        assert!(lock(&link.login_warned).is_some());
    }
    let (link, _) = connected();
    let violation = "Permissions Violation for Publish to \"a\"";
    link.observe(Event::ServerError(ServerError::Other(violation.into())));
    let io = ConnectErrorKind::Io.to_string();
    link.observe(Event::ClientError(ClientError::Other(io)));
    assert!(lock(&link.login_warned).is_none());
    let text = ConnectErrorKind::AuthorizationViolation.to_string();
    link.observe(Event::ClientError(ClientError::Other(text)));
    assert!(lock(&link.login_warned).is_some());
}

#[test]
fn a_message_beyond_the_limit_reconnects_now_and_then_seldom() {
    let mut refresh = LimitRefresh::of(0);
    let start = Instant::now();
    let mut due = |secs: u64, limit| refresh.exceeded(limit, start + Duration::from_secs(secs));
    assert!(due(0, 1000));
    assert!(!due(59, 1000));
    assert!(due(60, 1000));
    // The limit stays: the pause doubles.
    assert!(!due(179, 1000));
    assert!(due(180, 1000));
    // Another limit is another case.
    assert!(due(181, 2000));
    let times = (0..100_000).filter(|&secs| due(1000 + secs, 2000));
    assert!(times.count() < 40);
    let (link, _) = connected();
    assert!(!link.poll(State::Connected));
    link.limit_exceeded(70_000, 65_536);
    link.limit_exceeded(70_000, 65_536);
    assert!(link.poll(State::Connected));
    assert!(!link.poll(State::Connected));
}
