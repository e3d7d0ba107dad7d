//! One router address before models with different tokenizers, blocks of different sizes, a model
//! without a tokenizer, and engines without events: equal tokens of two models share no credit.

use serde_json::{Value, json};

use crate::fleet::traffic::{Served, serve};
use crate::fleet::{EngineKind, Engines, Events, Flags, Fleet, Form, Mode, text, worker_name};

const TINY_SP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny_sp");

const ENGINES: Engines = Engines {
    count: FORMS.len(),
    ranks: 1,
    blocks: 600,
    flags: &["--profile", "instant"],
};

const ALPHA: Form = Form {
    model: "alpha",
    ..Form::USUAL
};
const FORMS: &[Form] = &[
    ALPHA,
    Form {
        block_size: 32,
        ..ALPHA
    },
    Form {
        events: Events::None,
        ..ALPHA
    },
    Form {
        model: "tiny_sp",
        tokenizer: TINY_SP,
        ..Form::USUAL
    },
    Form {
        model: "radix",
        engine: EngineKind::Sglang,
        ..Form::USUAL
    },
    // The router knows no tokenizer of it.
    Form {
        model: "bare",
        ..Form::USUAL
    },
    Form {
        model: "quiet",
        events: Events::None,
        ..Form::USUAL
    },
];

const FLAGS: Flags = Flags {
    router: &[concat!(
        "--config=",
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/mixed.toml"
    )],
    forms: FORMS,
    ..Flags::NONE
};

on_both_planes!(equal_tokens_of_two_models_share_no_credit);

/// The engine of a worker.
fn form(worker: &str) -> &'static Form {
    let mut named = FORMS.iter().enumerate();
    let found = named.find(|&(index, _)| worker_name(index) == worker);
    found.unwrap_or_else(|| panic!("no worker {worker}")).1
}

async fn start(mode: Mode) -> Fleet {
    let fleet = Fleet::start(mode, ENGINES, FLAGS).await;
    fleet.until_indexed().await;
    let all_known = async |fleet: &Fleet| all_known(fleet).await;
    fleet.until("routers know all workers", all_known).await;
    fleet
}

/// Each router serves every worker, and has compared each model that has a tokenizer.
async fn all_known(fleet: &Fleet) -> bool {
    for router in 0..fleet.routers.len() {
        let workers = shown_workers(fleet, router).await;
        let is_known = |worker: &Value| {
            let form = form(&text(&worker["worker"]));
            let checks = ["chat", "text", "responses", "messages"];
            let compared = match form.engine {
                EngineKind::Vllm => 4,
                // It has no routes that show the others' token ids.
                EngineKind::Sglang => 2,
            };
            let mut checks = checks[..compared].iter();
            let passed = checks.all(|check| worker["checks"][check]["result"] == "passed");
            worker["health"] == "healthy"
                && worker["tokenizers"][form.model]["state"] != "loading"
                && (has_no_tokenizer(form) || passed)
        };
        if workers.len() != FORMS.len() || !workers.iter().all(is_known) {
            return false;
        }
    }
    true
}

/// Whether the routers' settings name none.
fn has_no_tokenizer(form: &Form) -> bool {
    form.model == "bare"
}

async fn shown_workers(fleet: &Fleet, router: usize) -> Vec<Value> {
    let shown = fleet.get(fleet.admin(router, "/workers")).await;
    shown["workers"].as_array().expect("workers").clone()
}

/// Token ids that one model has cached are no credit for another one with blocks of equal size.
async fn equal_tokens_of_two_models_share_no_credit(mode: Mode) {
    let fleet = start(mode).await;
    let ids: Vec<u32> = (0..320).map(|at| 100 + at * 7 % 150).collect();
    let models = ["tiny_sp", "bare", "radix", "alpha"];
    for model in models {
        let body = json!({"model": model, "prompt": ids, "max_tokens": 1});
        let first = serve(&fleet, "/v1/completions", &body).await;
        fleet.until_idle().await;
        fleet.until_indexed().await;
        assert_eq!(form(&first.worker).model, model);
        assert_eq!(
            (first.overlap_blocks, first.cached_tokens),
            (0, 0),
            "{model}"
        );
    }
    for model in models {
        let body = json!({"model": model, "prompt": ids, "max_tokens": 1});
        // A model's second worker may get it first.
        let mut tokens = 0;
        for _ in 0..=FORMS.len() {
            let served = answered(&fleet, &body).await;
            let form = form(&served.worker);
            let credit = served.overlap_blocks * form.block_size;
            if form.events == Events::Published {
                assert_eq!(credit, served.cached_tokens, "{model}");
            }
            tokens += credit;
        }
        assert!(tokens > 0, "{model} has credit of its own");
    }
}

/// A request of which the index knew something, if its worker has events. Then nothing is under way.
async fn answered(fleet: &Fleet, body: &Value) -> Served {
    for _ in 0..50 {
        let served = serve(fleet, "/v1/completions", body).await;
        fleet.until_idle().await;
        fleet.until_indexed().await;
        if form(&served.worker).events == Events::None || served.state == "exact" {
            return served;
        }
        assert!(served.is_without_answer(), "{}", served.state);
    }
    panic!("no index answers");
}
