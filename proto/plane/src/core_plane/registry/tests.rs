use super::*;

const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(6);

fn two(now: Instant) -> [SharedRegistry; 2] {
    [1, 2].map(|writer| SharedRegistry::new(now, writer, 1000))
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn value(registry: &mut SharedRegistry, now: Instant, key: &str) -> Option<Bytes> {
    registry.get(now, key).map(|entry| entry.value)
}

fn put(
    registry: &mut SharedRegistry,
    now: Instant,
    value: &str,
    lease: Option<Duration>,
) -> RegistryWrite {
    let put = registry.put(now, "k".to_owned(), bytes(value), PutIf::Always, lease);
    put.unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_later_of_two_writes_counts_in_any_order() {
    let now = Instant::now();
    let [mut one, mut two] = two(now);
    let (first, second) = (put(&mut one, now, "a", None), put(&mut two, now, "b", None));
    assert!(second.revision > first.revision, "by the writer");
    assert_eq!(one.merge(now, second.clone()), Merged::Applied);
    assert_eq!(two.merge(now, first.clone()), Merged::Known);
    assert_eq!(one.merge(now, second), Merged::Known);
    assert_eq!(value(&mut one, now, "k"), Some(bytes("b")));
    assert_eq!(value(&mut two, now, "k"), Some(bytes("b")));
    assert_eq!(one.digest(), two.digest());
    let third = put(&mut one, now, "c", None);
    assert_ne!(one.digest(), two.digest());
    assert!(third.revision > first.revision);
    let renewed = two.put(now, "k".to_owned(), bytes("d"), PutIf::Absent, None);
    assert_eq!(renewed, Err(PlaneError::Conflict));
    two.merge(now, third);
    assert_eq!(one.digest(), two.digest());
}

#[tokio::test(start_paused = true)]
async fn a_deleted_key_does_not_come_back_by_a_late_message() {
    let now = Instant::now();
    let [mut one, mut two] = two(now);
    let written = put(&mut one, now, "a", None);
    two.merge(now, written.clone());
    let revision = Revision(written.revision);
    let deleted = two.delete(now, "k", revision).unwrap();
    assert_eq!(two.delete(now, "k", revision), Err(PlaneError::Conflict));
    one.merge(now, deleted);
    assert_eq!(one.merge(now, written), Merged::Known);
    assert_eq!(value(&mut one, now, "k"), None);
    assert_eq!(one.digest(), RegistryDigest::default());
    let (page, more) = one.page(now, "", 1);
    assert!(page.len() == 1 && page[0].value.is_none() && !more);
    one.expire(now + GONE_KEPT);
    assert_eq!(one.page(now + GONE_KEPT, "", 1), (Vec::new(), false));
    assert_eq!(one.bytes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_by_the_clock_of_each_process() {
    let now = Instant::now();
    let [mut one, mut two] = two(now);
    let written = put(&mut one, now, "a", Some(TTL));
    two.merge(now, written.clone());
    for tenths in 0..60 {
        let now = now + SECOND * tenths / 10;
        assert!(value(&mut one, now, "k").is_some() && value(&mut two, now, "k").is_some());
    }
    let later = now + TTL;
    assert!(value(&mut one, later, "k").is_none() && value(&mut two, later, "k").is_none());
    assert_eq!(two.merge(later, written), Merged::Known, "late");
    assert!(value(&mut two, later, "k").is_none());
    let again = two.put(later, "k".to_owned(), bytes("b"), PutIf::Absent, Some(TTL));
    assert!(again.is_ok());
}

/// A process that stood still, or was cut off, has not read the renewals.
#[tokio::test(start_paused = true)]
async fn what_was_not_received_does_not_end_a_lease() {
    let now = Instant::now();
    let [mut still, mut cut] = two(now);
    put(&mut still, now, "a", Some(TTL));
    put(&mut cut, now, "a", Some(TTL));
    assert!(
        value(&mut still, now + 2 * TTL, "k").is_some(),
        "stood still"
    );
    cut.hold_leases();
    for seconds in 0..20 {
        assert!(value(&mut cut, now + SECOND * seconds, "k").is_some());
    }
    let back = now + SECOND * 20;
    cut.run_leases(back);
    for seconds in 0..6 {
        assert!(value(&mut cut, back + SECOND * seconds, "k").is_some());
    }
    assert!(value(&mut cut, back + TTL, "k").is_none());
}

#[tokio::test(start_paused = true)]
async fn pages_bring_the_whole_registry() {
    let now = Instant::now();
    let [mut one, mut two] = two(now);
    for key in ["a", "b", "c", "d"] {
        let lease = (key == "c").then_some(TTL);
        let put = one.put(now, key.to_owned(), bytes("value"), PutIf::Absent, lease);
        put.unwrap();
    }
    let (mut after, mut pages) = (String::new(), 0);
    loop {
        let (writes, more) = one.page(now + SECOND, &after, 1);
        pages += 1;
        after = writes[0].key.clone();
        writes.into_iter().for_each(|write| {
            two.merge(now, write);
        });
        if !more {
            break;
        }
    }
    assert_eq!(pages, 4);
    assert_eq!(one.digest(), two.digest());
    for seconds in 0..5 {
        assert!(value(&mut two, now + SECOND * seconds, "c").is_some());
    }
    let later = now + TTL - SECOND;
    assert!(value(&mut two, later, "c").is_none(), "what was left of it");
}

#[tokio::test(start_paused = true)]
async fn an_impossible_revision_is_refused() {
    let now = Instant::now();
    let [mut one, _] = two(now);
    let mut write = put(&mut one, now, "a", None);
    write.revision = u64::MAX;
    assert_eq!(one.merge(now, write), Merged::Refused);
    assert_eq!(value(&mut one, now, "k"), Some(bytes("a")));
}

/// One message of a process that may write one key cannot stop the writes of others.
#[tokio::test(start_paused = true)]
async fn the_last_revision_of_a_key_ends_that_key_only() {
    let now = Instant::now();
    let [mut one, _] = two(now);
    let last = RegistryWrite {
        key: "hostile".to_owned(),
        revision: COUNTER_MAX << WRITER_BITS,
        value: Some(Vec::new()),
        lease_ms: None,
    };
    assert_eq!(one.merge(now, last), Merged::Applied);
    put(&mut one, now, "a", None);
    put(&mut one, now, "b", Some(TTL));
    let again = one.put(now, "hostile".to_owned(), bytes("c"), PutIf::Always, None);
    assert!(matches!(again, Err(PlaneError::Unavailable(_))));
    let revision = Revision(COUNTER_MAX << WRITER_BITS);
    let deleted = one.delete(now, "hostile", revision);
    assert!(matches!(deleted, Err(PlaneError::Unavailable(_))));
}

/// A full registry takes renewals, and no deletions of keys that it never had.
#[tokio::test(start_paused = true)]
async fn a_full_registry_keeps_what_it_has() {
    let now = Instant::now();
    let [mut one, mut two] = two(now);
    let large = "x".repeat(BYTES_MAX - 10);
    put(&mut one, now, &large, Some(TTL));
    put(&mut one, now, &large, Some(TTL));
    let other = two.put(
        now,
        "another key".to_owned(),
        bytes("y"),
        PutIf::Always,
        None,
    );
    let mut other = other.unwrap();
    assert_eq!(one.merge(now, other.clone()), Merged::Refused);
    other.value = None;
    assert_eq!(one.merge(now, other), Merged::Refused);
}
