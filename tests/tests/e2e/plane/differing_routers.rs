//! `doctor` names a router whose tokenizer or settings differ from the fleet's.

use crate::fleet::{Engines, Flags, Fleet, Mode};
use crate::scaling::assert_content;

const OTHER_TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny_sp");

#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_a_router_with_another_tokenizer_and_policy() {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let mut fleet = Fleet::start(mode, engines, Flags::default()).await;
    fleet.until_indexed().await;
    assert_content(&fleet).await;
    let other = ["--tokenizer", OTHER_TOKENIZER, "--policy", "kv"];
    fleet.add_router_with(&other).await;
    fleet.until_found("router_check_failed", "worker-0: ").await;
    fleet.until_found("routers_differ", "settings ").await;
}
