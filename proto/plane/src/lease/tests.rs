use super::*;
use crate::faulty::{Fault, FaultyPlane};

const KEY: &str = "wr.t.lease";

fn holder(plane: &Arc<FaultyPlane>) -> LeaseHolder {
    LeaseHolder::new(Arc::clone(plane) as Arc<dyn Plane>, KEY.to_owned())
}

async fn next(holder: &mut LeaseHolder, value: &'static str) -> LeaseEvent {
    let next = holder.next(|| Bytes::from_static(value.as_bytes()));
    let next = timeout(Duration::from_secs(60), next).await;
    next.expect("an event within a minute")
}

async fn value(plane: &FaultyPlane) -> Option<Bytes> {
    let entry = plane.get(KEY.to_owned()).await.unwrap();
    entry.map(|entry| entry.value)
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_acquired_renewed_and_released() {
    let plane = Arc::new(FaultyPlane::new());
    let mut lease = holder(&plane);
    let begun = Instant::now();
    let LeaseEvent::Acquired(first) = next(&mut lease, "a").await else {
        panic!("the key is free");
    };
    assert_eq!(begun.elapsed(), Duration::ZERO);
    for renewals in 1..=5 {
        let LeaseEvent::Renewed(revision) = next(&mut lease, "a").await else {
            panic!("the lease is held");
        };
        assert!(revision > first);
        assert_eq!(begun.elapsed(), renewals * LEASE_RENEWAL);
    }
    lease.renew_now();
    next(&mut lease, "changed").await;
    assert_eq!(begun.elapsed(), 5 * LEASE_RENEWAL, "immediately");
    assert_eq!(value(&plane).await.unwrap(), "changed");
    lease.release().await;
    assert_eq!(value(&plane).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_second_holder_waits_until_the_first_releases_or_expires() {
    let plane = Arc::new(FaultyPlane::new());
    let (mut first, mut second) = (holder(&plane), holder(&plane));
    next(&mut first, "first").await;
    assert_eq!(next(&mut second, "second").await, LeaseEvent::HeldElsewhere);
    first.release().await;
    let acquired = next(&mut second, "second").await;
    assert!(matches!(acquired, LeaseEvent::Acquired(_)));
    let begun = Instant::now();
    let mut third = holder(&plane);
    while next(&mut third, "third").await == LeaseEvent::HeldElsewhere {}
    assert!(begun.elapsed() >= LEASE_TTL && begun.elapsed() <= LEASE_TTL + LEASE_RENEWAL);
    assert_eq!(next(&mut second, "second").await, LeaseEvent::Lost);
    assert_eq!(next(&mut second, "second").await, LeaseEvent::HeldElsewhere);
}

/// One TTL after the last confirmed renewal was sent, not after its answer, whatever hangs.
#[tokio::test(start_paused = true)]
async fn a_lease_expires_by_the_clock_of_its_holder() {
    for fault in [Fault::Refused, Fault::AnswerLost, Fault::Hangs] {
        let plane = Arc::new(FaultyPlane::new());
        let mut lease = holder(&plane);
        let sent = Instant::now();
        next(&mut lease, "a").await;
        plane.script(&[fault; 100]);
        assert_eq!(next(&mut lease, "a").await, LeaseEvent::Lost);
        assert_eq!(sent.elapsed(), LEASE_TTL);
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_is_tried_again_within_the_ttl() {
    for fault in [Fault::Refused, Fault::AnswerLost] {
        let plane = Arc::new(FaultyPlane::new());
        let mut lease = holder(&plane);
        next(&mut lease, "a").await;
        plane.script(&[fault; 3]);
        let renewed = next(&mut lease, "other value").await;
        assert!(matches!(renewed, LeaseEvent::Renewed(_)), "{renewed:?}");
        assert_eq!(value(&plane).await.unwrap(), "other value");
    }
}

/// The first write took effect, but the process knows only its own values.
#[tokio::test(start_paused = true)]
async fn an_acquisition_without_an_answer_is_recognised_by_its_value() {
    for fault in [Fault::AnswerLost, Fault::Hangs] {
        let plane = Arc::new(FaultyPlane::new());
        plane.script(&[fault]);
        let mut lease = holder(&plane);
        let dropped = timeout(Duration::from_millis(1), next(&mut lease, "first")).await;
        assert!(dropped.is_err());
        let acquired = next(&mut lease, "second").await;
        assert!(matches!(acquired, LeaseEvent::Acquired(_)), "{acquired:?}");
        assert_eq!(value(&plane).await.unwrap(), "second");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_or_overwritten_key_is_lost_and_acquired_again() {
    let plane = Arc::new(FaultyPlane::new());
    let mut lease = holder(&plane);
    let LeaseEvent::Acquired(revision) = next(&mut lease, "a").await else {
        panic!("the key is free");
    };
    plane.delete(KEY.to_owned(), revision).await.unwrap();
    assert_eq!(next(&mut lease, "a").await, LeaseEvent::Lost);
    let acquired = next(&mut lease, "a").await;
    assert!(matches!(acquired, LeaseEvent::Acquired(_)));
    let put = plane.put(KEY.to_owned(), "b".into(), PutIf::Always, None);
    put.await.unwrap();
    assert_eq!(next(&mut lease, "a").await, LeaseEvent::Lost);
    assert_eq!(next(&mut lease, "a").await, LeaseEvent::HeldElsewhere);
    assert_eq!(value(&plane).await.unwrap(), "b");
}

#[tokio::test(start_paused = true)]
async fn a_release_ends_a_write_under_way_and_takes_no_longer_than_its_bound() {
    let plane = Arc::new(FaultyPlane::new());
    let mut lease = holder(&plane);
    next(&mut lease, "a").await;
    plane.script(&[Fault::Hangs]);
    lease.renew_now();
    let dropped = timeout(Duration::from_millis(1), next(&mut lease, "a")).await;
    assert!(dropped.is_err());
    let begun = Instant::now();
    lease.release().await;
    assert!(begun.elapsed() <= RELEASE_MAX);
}

#[test]
fn a_confirmation_that_is_older_than_the_ttl_proves_nothing() {
    let sent = Instant::now();
    let mut timing = LeaseTiming::new(sent);
    let late = sent + LEASE_TTL;
    let held = Some(LeaseWrite::Held(Revision(1)));
    assert_eq!(timing.written(sent, held, late), None);
    assert_eq!(timing.wake(), late + RETRY_DELAY);
    let acquired = timing.written(late, held, late);
    assert_eq!(acquired, Some(LeaseEvent::Acquired(Revision(1))));
    assert_eq!(timing.wake(), late + LEASE_RENEWAL);
}
