use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use tokio::time::advance;

use super::*;
use crate::admission::Admission;
use crate::metrics::Metrics;
use crate::openai::TokenUsage;
use crate::route::Knobs;
use crate::shared_core::SharedCore;

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
        assert!(tenants.enter(&mut headers).unwrap().visit.is_some());
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
        assert_eq!(tenants.enter(&mut headers).err().unwrap().error, error);
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
        assert!(tenants.enter(&mut headers).unwrap().visit.is_some());
        assert_eq!(headers.len(), left, "{rule}");
        assert!(headers.get(API_KEY).is_none());
    }
    // Without tenants a client's key is the engine's.
    let tenants = Tenants::new(LiveSettings::new(Settings::default()), LimitSharing::Alone);
    let mut headers = bearer_of("engine-key");
    assert!(tenants.enter(&mut headers).unwrap().visit.is_none());
    assert_eq!(headers.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_new_table_keeps_what_a_tenant_used_and_drops_its_keys() {
    let (tenants, live) = tenants("requests_per_minute = 3\nmax_concurrent_requests = 2");
    let enter = |key: &str| {
        tenants
            .enter(&mut bearer_of(key))
            .map(|entry| entry.visit.unwrap())
    };
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
    let visit = tenants.enter(&mut bearer_of(KEY)).unwrap().visit.unwrap();
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
    let visit = tenants.enter(&mut bearer_of(KEY)).unwrap().visit.unwrap();
    visit.admit_prompt(100).unwrap();
    visit.settle(Settlement::Counted, 7);
    assert_eq!(remaining(&visit), 893);
    // An absurd report costs at most 2^32 tokens.
    visit.settle(usage(u64::MAX, u64::MAX), 0);
    assert_eq!(remaining(&visit), 0);
}

const MEASURED_LIMITS: &str = "requests_per_second = 100000000\n\
    requests_per_minute = 1000000000\nmax_concurrent_requests = 1000\n\
    tokens_per_minute = 1000000000000";

/// A kind of requests whose cost is measured.
struct MeasuredRequests<'t> {
    name: &'static str,
    tenants: &'t Tenants,
    others: &'t [RouterId],
    /// Bytes of the body that the tenant's rules change.
    body: &'t [u8],
}

impl MeasuredRequests<'_> {
    /// What all routers know, as ten times a second.
    fn exchange(&self) {
        let routers = SharingRouters {
            own: RouterId([0; 16]),
            count: 1 + self.others.len(),
            reporting: self.others.to_vec(),
            newcomers: Newcomers::None,
        };
        let rows = self.tenants.report(&routers, Instant::now().into_std());
        let others = self.others.iter();
        others.for_each(|other| self.tenants.receive(*other, &rows));
    }

    fn serve(&self, admission: &Arc<Admission>, mut headers: HeaderMap) {
        let mut answer = HeaderMap::new();
        if let Some(visit) = self.tenants.enter(&mut headers).unwrap().visit {
            visit.check_model("m").unwrap();
            if !self.body.is_empty() {
                let path = "/v1/chat/completions";
                assert!(visit.imposed(path, self.body).unwrap().is_some());
            }
            visit.admit_prompt(1000).unwrap();
            let place = admission.began(Some(visit.name()), 1000);
            for tokens in 1..=500 {
                visit.generated(tokens);
            }
            visit.settle(Settlement::Counted, 500);
            visit.rates().write(&mut answer);
            drop(place);
        } else {
            drop(admission.began(None, 1000));
        }
        std::hint::black_box((headers, answer));
    }
}

/// The cost of a tenant's request: look-up, limits, its place, the charges of a stream of 500 tokens
/// and the headers; alone, with the reports of three other routers each 1,000 requests, and with
/// changes of a body of 1 and of 32 KiB.
/// `cargo test --release -p warmroute-router --lib -- --ignored --nocapture cost_of_a_tenants`.
#[tokio::test]
#[ignore = "a measurement"]
#[expect(clippy::disallowed_methods, reason = "a measurement")]
async fn cost_of_a_tenants_request() {
    const ROUNDS: u32 = 100_000;
    let open = Tenants::new(LiveSettings::new(Settings::default()), LimitSharing::Alone);
    let (limited, _) = tenants(MEASURED_LIMITS);
    let rules =
        format!("{MEASURED_LIMITS}\nmax_output_tokens = 600\npriority = 1\nsalt = \"tenant\"");
    let (changing, _) = tenants(&rules);
    let others: Vec<_> = (1..4).map(|number| RouterId([number; 16])).collect();
    let body = |bytes| format!(r#"{{"model":"m","messages":"{}"}}"#, "x".repeat(bytes));
    let (small, large) = (body(1 << 10), body(32 << 10));
    let kind = |name, tenants, others, body| MeasuredRequests {
        name,
        tenants,
        others,
        body,
    };
    let core = SharedCore::new(crate::testing::core(RouterId([0; 16]), Knobs::default()));
    let admission = Admission::new(core, 1 << 30, &Metrics::new().unwrap());
    let template = bearer_of(KEY);
    for kind in [
        kind("without tenants", &open, &[], &[]),
        kind("with tenants", &limited, &[], &[]),
        kind("with limits of four routers", &limited, &others, &[]),
        kind("with changes of 1 KiB", &changing, &[], small.as_bytes()),
        kind("with changes of 32 KiB", &changing, &[], large.as_bytes()),
    ] {
        let began = std::time::Instant::now();
        for round in 0..ROUNDS {
            if round % 1000 == 0 {
                kind.exchange();
            }
            kind.serve(&admission, template.clone());
        }
        println!("{}: {:?} a request", kind.name, began.elapsed() / ROUNDS);
    }
}
