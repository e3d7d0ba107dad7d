use std::time::Duration;

use axum::http::HeaderValue;
use tokio::time::advance;

use super::*;
use crate::openai::TokenUsage;

const KEY: &str = "wr-first";
const OTHER: &str = "wr-second";

fn hash(key: &str) -> String {
    KeyHash::of(key.as_bytes()).unwrap().to_hex()
}

fn tenants(rules: &str) -> (Tenants, Arc<LiveSettings>) {
    let live = LiveSettings::new(settings(rules));
    (Tenants::new(Arc::clone(&live), LimitSharing::Alone), live)
}

fn settings(rules: &str) -> Settings {
    let (key, other) = (hash(KEY), hash(OTHER));
    let text = format!(
        "[[tenants]]\nname = \"t\"\n{rules}\n\
         keys = [{{ id = \"k\", sha256 = \"{key}\" }}, {{ id = \"o\", sha256 = \"{other}\" }}]\n"
    );
    Settings::parse(&text).unwrap()
}

fn sent(name: &'static str, value: &str) -> HeaderMap {
    let value = HeaderValue::from_str(value).unwrap();
    HeaderMap::from_iter([(HeaderName::from_static(name), value)])
}

fn bearer_of(key: &str) -> HeaderMap {
    sent("authorization", &format!("Bearer {key}"))
}

#[tokio::test(start_paused = true)]
async fn a_key_is_taken_from_either_header_and_removed() {
    let (tenants, _) = tenants("");
    for mut headers in [
        bearer_of(KEY),
        bearer_of(OTHER),
        sent("x-api-key", KEY),
        sent("authorization", "bEARER wr-first"),
    ] {
        headers.insert("x-kept", HeaderValue::from_static("1"));
        assert!(tenants.enter(&mut headers).unwrap().is_some());
        assert_eq!(headers.len(), 1, "{headers:?}");
    }
    let repeated = |name: &'static str| {
        let mut headers = bearer_of(KEY);
        headers.append(name, HeaderValue::from_static("Bearer wr-second"));
        headers.append(name, HeaderValue::from_static("x"));
        headers
    };
    for (mut headers, error) in [
        (repeated("authorization"), TenantRefusal::UnknownKey),
        (repeated("x-api-key"), TenantRefusal::UnknownKey),
        (HeaderMap::new(), TenantRefusal::NoKey),
        (bearer_of("wr-third"), TenantRefusal::UnknownKey),
        (bearer_of(""), TenantRefusal::UnknownKey),
        (sent("authorization", KEY), TenantRefusal::NoKey),
        (bearer_of(&"x".repeat(5000)), TenantRefusal::UnknownKey),
    ] {
        assert_eq!(tenants.enter(&mut headers).unwrap_err().error, error);
    }
}

#[tokio::test(start_paused = true)]
async fn the_clients_own_authorization_passes_only_if_the_operator_says_so() {
    for (rule, left) in [("", 0), ("pass", 1), ("strip", 0)] {
        let text = match rule {
            "" => String::new(),
            rule => format!("[engines]\nauthorization = \"{rule}\"\n"),
        };
        let mut headers = bearer_of("engine-key");
        headers.extend(sent("x-api-key", KEY));
        let (_, live) = tenants("");
        let with_rule = format!(
            "{text}[[tenants]]\nname = \"t\"\nkeys = [{{ id = \"k\", \
            sha256 = \"{}\" }}]\n",
            hash(KEY)
        );
        live.replace(Settings::parse(&with_rule).unwrap());
        let tenants = Tenants::new(live, LimitSharing::Alone);
        assert!(tenants.enter(&mut headers).unwrap().is_some());
        assert_eq!(headers.len(), left, "{rule}");
        assert!(headers.get(API_KEY).is_none());
    }
    // Without tenants a client's key is the engine's.
    let tenants = Tenants::new(LiveSettings::new(Settings::default()), LimitSharing::Alone);
    let mut headers = bearer_of("engine-key");
    assert!(tenants.enter(&mut headers).unwrap().is_none());
    assert_eq!(headers.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_new_table_keeps_what_a_tenant_used_and_drops_its_keys() {
    let (tenants, live) = tenants("requests_per_minute = 3\nmax_concurrent_requests = 2");
    let enter = |key: &str| tenants.enter(&mut bearer_of(key)).map(Option::unwrap);
    let (first, _second) = (enter(KEY).unwrap(), enter(KEY).unwrap());
    assert!(enter(KEY).is_err());
    drop(first);
    live.replace(settings(
        "requests_per_minute = 4\nmax_concurrent_requests = 2",
    ));
    let third = enter(KEY).unwrap();
    assert_eq!(third.rates().requests.unwrap().remaining, 1);
    assert!(enter(OTHER).is_err(), "two are open across the reload");
    drop(third);
    let fourth = enter(OTHER).unwrap();
    drop(fourth);
    let refused = enter(KEY).unwrap_err();
    assert_eq!(refused.rates.requests.unwrap().remaining, 0);
    advance(Duration::from_secs(15)).await;
    drop(enter(KEY).unwrap());
    live.replace(Settings::parse("[[tenants]]\nname = \"t\"").unwrap());
    assert_eq!(enter(KEY).unwrap_err().error, TenantRefusal::UnknownKey);
}

#[tokio::test(start_paused = true)]
async fn tokens_are_charged_as_they_come_and_settled_by_the_report() {
    let (tenants, _) = tenants("tokens_per_minute = 1000\nmax_prompt_tokens = 600");
    let remaining = |visit: &TenantVisit| visit.rates().tokens.unwrap().remaining;
    let visit = tenants.enter(&mut bearer_of(KEY)).unwrap().unwrap();
    let too_long = visit.admit_prompt(601);
    assert_eq!(too_long, Err(TenantRefusal::PromptTokens { max: 600 }));
    visit.admit_prompt(400).unwrap();
    assert_eq!(remaining(&visit), 600);
    visit.generated(63);
    assert_eq!(remaining(&visit), 600);
    visit.generated(70);
    assert_eq!(remaining(&visit), 530);
    let usage = |prompt_tokens, completion_tokens| {
        Settlement::Reported(TokenUsage {
            prompt_tokens,
            completion_tokens,
            cached_tokens: None,
        })
    };
    visit.settle(usage(300, 30), 71);
    assert_eq!(remaining(&visit), 670);
    visit.settle(Settlement::Void, 0);
    assert_eq!(remaining(&visit), 1000);
    let visit = tenants.enter(&mut bearer_of(KEY)).unwrap().unwrap();
    visit.admit_prompt(100).unwrap();
    visit.settle(Settlement::Counted, 7);
    assert_eq!(remaining(&visit), 893);
    // An absurd report costs at most 2^32 tokens.
    visit.settle(usage(u64::MAX, u64::MAX), 0);
    assert_eq!(remaining(&visit), 0);
}

/// The cost of a tenant's request: look-up, limits, the charges of a stream of 500 tokens and the
/// headers; alone, and with the reports of three other routers each 1,000 requests.
/// `cargo test --release -p warmroute-router --lib -- --ignored --nocapture cost_of`.
#[tokio::test]
#[ignore = "a measurement"]
#[expect(clippy::disallowed_methods, reason = "a measurement")]
async fn cost_of_a_tenants_request() {
    let (tenants, _) = tenants(
        "requests_per_second = 100000000\nrequests_per_minute = 1000000000\n\
         max_concurrent_requests = 1000\ntokens_per_minute = 1000000000000",
    );
    const ROUNDS: u32 = 100_000;
    let template = bearer_of(KEY);
    let others: Vec<_> = (1..4).map(|number| RouterId([number; 16])).collect();
    let routers = |others: &[RouterId]| SharingRouters {
        own: RouterId([0; 16]),
        count: 1 + others.len(),
        reporting: others.to_vec(),
        newcomers: Newcomers::None,
    };
    let open = Tenants::new(LiveSettings::new(Settings::default()), LimitSharing::Alone);
    for (name, chosen, others) in [
        ("without tenants", &open, &[][..]),
        ("with tenants", &tenants, &[]),
        ("with limits of four routers", &tenants, &others),
    ] {
        let began = std::time::Instant::now();
        for round in 0..ROUNDS {
            if round % 1000 == 0 {
                let rows = chosen.report(&routers(others), std::time::Instant::now());
                others
                    .iter()
                    .for_each(|other| chosen.receive(*other, &rows));
            }
            let mut headers = template.clone();
            let visit = chosen.enter(&mut headers).unwrap();
            let mut answer = HeaderMap::new();
            if let Some(visit) = visit {
                visit.check_model("m").unwrap();
                visit.admit_prompt(1000).unwrap();
                for tokens in 1..=500 {
                    visit.generated(tokens);
                }
                visit.settle(Settlement::Counted, 500);
                visit.rates().write(&mut answer);
            }
            std::hint::black_box(answer);
        }
        println!("{name}: {:?} a request", began.elapsed() / ROUNDS);
    }
}
