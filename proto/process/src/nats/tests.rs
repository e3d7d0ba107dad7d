use std::env;

use super::*;

fn read_from_file(text: &str) -> anyhow::Result<NatsAuth> {
    let file = env::temp_dir().join(format!("wr-creds-{}", Uuid::new_v4()));
    fs::write(&file, text)?;
    let auth = credentials(&file);
    fs::remove_file(&file)?;
    auth
}

#[test]
fn the_format_of_credentials_shows_their_kind() {
    let shape = |text: &str| format!("{:?}", read_from_file(text).unwrap());
    assert_eq!(shape("ann:secret\n"), "user and password");
    assert_eq!(shape("t0ken\n"), "token");
    assert_eq!(shape(&format!("SU{}", "A".repeat(56))), "nkey");
    assert_eq!(shape("-----BEGIN NATS USER JWT-----\n…"), "credentials");
    assert!(read_from_file("").is_err());
    assert!(read_from_file("two words").is_err());
}

#[test]
fn a_user_names_the_process_and_its_inbox() {
    let named = |url: &str| named(url, Namespace::from("ns"), "router", url_auth(url)).unwrap();
    let name = |url: &str| named(url).name;
    assert_eq!(name("nats://ann:secret@h:4222,nats://i:4222"), "ann");
    assert!(name("nats://token@h:4222").starts_with("router-"));
    assert!(name("h:4222").starts_with("router-"));
    assert_ne!(name("h:4222"), name("h:4222"));
    let auth = |url: &str| format!("{:?}", named(url).auth);
    assert_eq!(auth("nats://ann:secret@h:4222"), "user and password");
    assert_eq!(auth("nats://token@h:4222"), "token");
    assert_eq!(auth("nats://h:4222,nats://ann:secret@i:4222"), "none");
}

/// RFC 8032's first key, as a user's.
const SEED: &str = "SUAJ2YNRTXX72WTAXKCEV5ES5QWMIRCJYVUXWMTJDFYDXLADDSXH6YALCA";
const KEY: &str = "UDLVVGABQKYQVN6VJP7NHSLEA45A5YLS6PNKMIZFV4BBU2HXA5IRUVAL";

#[test]
fn a_seed_names_the_inbox_that_permissions_open() {
    let inbox = |auth| named("h:4222", Namespace::from("ns"), "router", auth).map(|c| c.inbox);
    let own = format!("_INBOX.{KEY}");
    assert_eq!(inbox(NatsAuth::NkeySeed(SEED.to_owned())).unwrap(), own);
    let creds = format!(
        "-----BEGIN NATS USER JWT-----\neyJ0.e30.c2ln\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"
    );
    assert_eq!(inbox(NatsAuth::Credentials(creds)).unwrap(), own);
    assert!(inbox(NatsAuth::Credentials("no seed".to_owned())).is_err());
    assert!(inbox(NatsAuth::NkeySeed(format!("SU{}", "A".repeat(56)))).is_err());
    let anonymous = inbox(NatsAuth::Token("t".to_owned())).unwrap();
    assert!(anonymous.starts_with("_INBOX.router-"), "{anonymous}");
}

#[tokio::test(start_paused = true)]
async fn commands_wait_for_an_unreachable_server_and_for_no_other_error() {
    let away = || Err::<(), _>(NatsError::Unreachable(String::new()));
    let begun = Instant::now();
    let waited = retry_unreachable(Duration::from_millis(2500), async || away()).await;
    assert_eq!(waited, away());
    assert_eq!(begun.elapsed(), Duration::from_millis(2500));
    let refused = || Err::<(), _>(NatsError::Refused(String::new()));
    let answered = retry_unreachable(Duration::from_secs(60), async || refused()).await;
    assert_eq!(answered, refused());
    let tries = std::cell::Cell::new(0);
    let third = async || {
        tries.set(tries.get() + 1);
        if tries.get() < 3 { away() } else { Ok(()) }
    };
    assert_eq!(
        retry_unreachable(Duration::from_secs(60), third).await,
        Ok(())
    );
    assert_eq!(begun.elapsed(), Duration::from_millis(4500));
}

#[test]
fn every_count_is_described_once() {
    let stats = NatsStats {
        disconnects: 7,
        ..NatsStats::default()
    };
    let page = metrics_text(Connection::Up, &stats);
    assert!(
        page.contains("\nwarmroute_nats_disconnects_total 7\n"),
        "{page}"
    );
    assert!(page.contains("\nwarmroute_nats_up 1\n"), "{page}");
    let helps = page.lines().filter(|line| line.starts_with("# HELP "));
    let names: std::collections::BTreeSet<_> =
        helps.filter_map(|line| line.split(' ').nth(2)).collect();
    assert_eq!(names.len() * 3, page.lines().count());
}

#[test]
fn secrets_of_urls_are_not_shown() {
    assert_eq!(
        redacted("nats://ann:secret@h:4222,tls://i:4222"),
        "nats://…@h:4222,tls://i:4222"
    );
}

#[test]
fn the_end_of_the_url_says_who_keeps_the_log() {
    let read = |url: &str| {
        let args = NatsArgs {
            nats_url: Some(url.to_owned()),
            namespace: "ns".into(),
            nats_creds: None,
            nats_tls: None,
            init: false,
        };
        Some((config(&args, "test").ok()?.url, log(&args).ok()?))
    };
    let of = |url: &str, log| Some((url.to_owned(), log));
    let two = "nats://h:4222,nats://i:4222";
    assert_eq!(read(two), of(two, PlaneLog::JetStream));
    assert_eq!(read(&format!("{two}?log=none")), of(two, PlaneLog::None));
    assert_eq!(read("h:1?log=jetstream"), of("h:1", PlaneLog::JetStream));
    let secret = "nats://u:a?log=none@h:1";
    assert_eq!(read(secret), of(secret, PlaneLog::JetStream));
    assert_eq!(read("h:1?log=no"), None);
    assert_eq!(read("h:1?"), None);
}
