use super::*;

fn refused(operation: RefusedOperation, subject: &str) -> PermissionViolation {
    let subject = subject.to_owned();
    PermissionViolation { operation, subject }
}

fn hb() -> PermissionViolation {
    refused(RefusedOperation::Subscribe, "wr.prod.hb.>")
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn violations_are_parsed() {
    let reload = r#"Permissions Violation for Subscription to "wr.prod.hb.>" (sid "7")"#;
    assert_eq!(PermissionViolation::parse(reload), Some(hb()));
    let queue = r#"Permissions Violation for Subscription to "q" using queue "wr""#;
    let expected = refused(RefusedOperation::Subscribe, "q");
    assert_eq!(PermissionViolation::parse(queue), Some(expected));
    let publish = r#"Permissions Violation for Publish to "a.b""#;
    let expected = refused(RefusedOperation::Publish, "a.b");
    assert_eq!(PermissionViolation::parse(publish), Some(expected));
    for other in ["", "Slow Consumer", "Permissions Violation for X to \"a\""] {
        assert_eq!(PermissionViolation::parse(other), None, "{other}");
    }
}

#[test]
fn grants_cover_random_subjects() {
    let check = |subject: &str, grant: &str| {
        assert_eq!(refused(RefusedOperation::Publish, subject).grant(), grant);
    };
    check("wr.prod.kv.worker-0.0", "wr.prod.kv.worker-0.0");
    check("_INBOX.router.Xa9.17", "allow_responses");
    let inbox = refused(RefusedOperation::Subscribe, "_INBOX.indexer.Xa9.*");
    assert_eq!(inbox.grant(), "_INBOX.indexer.>");
    check("$O.wr_prod.C.Xa9", "$O.wr_prod.>");
    let next = "$JS.API.CONSUMER.MSG.NEXT.wr_prod";
    check(&format!("{next}.Xa9"), &format!("{next}.>"));
    let grant = "$JS.API.CONSUMER.*.wr_prod.>";
    check("$JS.API.CONSUMER.CREATE.wr_prod.Xa9.wr.prod.>", grant);
    check("$JS.API.CONSUMER.DELETE.wr_prod.Xa9", grant);
    check("$JS.API.STREAM.INFO.wr_prod", "$JS.API.STREAM.INFO.wr_prod");
}

#[test]
fn a_refused_subscription_reconnects_with_backoff_until_it_is_accepted() {
    let start = Instant::now();
    let mut permissions = RefusedPermissions::new(start);
    assert!(!permissions.poll(start, 1));
    assert!(permissions.refused(&hb(), start, 1));
    let mut reconnects = Vec::new();
    let mut epoch = 1;
    for quarter in 0..400 {
        let now = start + SECOND / 4 * quarter;
        assert!(permissions.is_deaf());
        if permissions.poll(now, epoch) {
            reconnects.push(quarter / 4);
            epoch += 1;
            assert!(!permissions.refused(&hb(), now, epoch), "logged once");
        }
    }
    assert_eq!(reconnects, [1, 3, 7, 15, 31, 61, 91]);
    let now = start + SECOND * 100;
    epoch += 1;
    assert!(!permissions.poll(now, epoch));
    assert!(permissions.is_deaf(), "the server may still refuse it");
    assert!(!permissions.poll(now + ACCEPTED_AFTER, epoch));
    assert!(!permissions.is_deaf());
    let again = now + SECOND * 60;
    assert!(permissions.refused(&hb(), again, epoch), "logged again");
    assert!(!permissions.poll(again, epoch));
    assert!(permissions.poll(again + BACKOFF_MIN, epoch));
}

#[test]
fn refused_answers_are_not_listed() {
    let start = Instant::now();
    let mut permissions = RefusedPermissions::new(start);
    permissions.refused(&hb(), start, 1);
    let answer = refused(RefusedOperation::Publish, "_INBOX.router.Xa9.17");
    assert!(permissions.refused(&answer, start, 1), "logged");
    assert_eq!(permissions.list(), ["subscribe wr.prod.hb.>"]);
}

#[test]
fn unanswered_requests_reconnect_until_one_is_answered() {
    let start = Instant::now();
    let mut permissions = RefusedPermissions::new(start);
    permissions.set_unanswered(true, start);
    assert!(permissions.is_deaf());
    assert!(permissions.poll(start + BACKOFF_MIN, 1));
    assert!(!permissions.poll(start + BACKOFF_MIN * 2, 2));
    assert!(permissions.poll(start + BACKOFF_MIN * 3, 2));
    permissions.set_unanswered(false, start + SECOND * 5);
    assert!(!permissions.is_deaf());
    assert!(!permissions.poll(start + SECOND * 600, 3));
}

#[test]
fn a_refused_publish_is_logged_once_and_needs_no_reconnect() {
    let start = Instant::now();
    let mut permissions = RefusedPermissions::new(start);
    let publish = refused(RefusedOperation::Publish, "a.b");
    assert!(permissions.refused(&publish, start, 1));
    assert!(!permissions.refused(&publish, start + SECOND, 1));
    assert!(permissions.is_publish_refused("a.b"));
    assert!(!permissions.is_deaf());
    assert!(!permissions.poll(start + SECOND * 100, 1));
    assert!(!permissions.poll(start + SECOND + PUBLISH_FORGOTTEN_AFTER, 1));
    assert!(!permissions.is_publish_refused("a.b"));
    assert!(permissions.refused(&publish, start + SECOND * 700, 1));
}

#[test]
fn refusals_are_bounded_and_subscriptions_are_kept() {
    let start = Instant::now();
    let mut permissions = RefusedPermissions::new(start);
    permissions.refused(&hb(), start, 1);
    for number in 0..1000 {
        let publish = refused(RefusedOperation::Publish, &format!("a.{number}"));
        permissions.refused(&publish, start, 1);
    }
    assert_eq!(permissions.refusals.len(), REFUSALS_MAX);
    assert!(permissions.is_deaf());
}
