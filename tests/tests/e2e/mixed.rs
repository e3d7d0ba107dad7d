//! One router address before models with different tokenizers, blocks of different sizes, a model
//! without a tokenizer, engines of all forms, and engines without events: equal tokens of two models
//! share no credit, and each model's credit is what its engine reports.

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
        model: "drained",
        block_size: 32,
        engine: EngineKind::Trtllm,
        ..Form::USUAL
    },
    Form {
        model: "chunked",
        engine: EngineKind::Lmcache,
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
on_both_planes!(each_models_credit_is_what_its_engine_reports);

/// More than the blocks of an engine hold.
const EVICTING_PROMPTS: u32 = 6;
const EVICTING_TOKENS: u32 = 2400;

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
                EngineKind::Vllm | EngineKind::Lmcache => 4,
                // It has no routes that show the others' token ids.
                EngineKind::Sglang => 2,
                EngineKind::Trtllm => 0,
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
    let models = ["tiny_sp", "bare", "radix", "drained", "chunked", "alpha"];
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
        let form = form(&served.worker);
        // Nothing assures that all removals of chunks are published.
        let is_unassured = form.engine == EngineKind::Lmcache && served.state == "unverified";
        let is_best = served.state == form.best_state();
        if form.events == Events::None || is_best || is_unassured {
            return served;
        }
        assert!(served.is_without_answer(), "{}", served.state);
    }
    panic!("no index answers");
}

/// Tokens of one topic.
fn topic(number: u32, tokens: u32) -> Vec<u32> {
    (0..tokens)
        .map(|at| 100 + (at * 7 + number * 31) % 150 + at / 150 % 2)
        .collect()
}

/// Prompts that return, also after their blocks have left the GPU.
async fn each_models_credit_is_what_its_engine_reports(mode: Mode) {
    let fleet = start(mode).await;
    let first = topic(0, 620);
    for model in ["tiny_sp", "radix", "bare", "drained", "chunked"] {
        let (mut credited, mut cached) = (0, 0);
        let mut ask = async |ids: &[u32]| {
            let body = json!({"model": model, "prompt": ids, "max_tokens": 1});
            let served = answered(&fleet, &body).await;
            let credit = served.overlap_blocks * form(&served.worker).block_size;
            assert_eq!(credit, served.cached_tokens, "{model}");
            (credited, cached) = (credited + credit, cached + served.cached_tokens);
            served
        };
        ask(&first).await;
        ask(&first).await;
        for number in 1..=EVICTING_PROMPTS {
            ask(&topic(number, EVICTING_TOKENS)).await;
        }
        let last = ask(&first).await;
        if model == "chunked" {
            // Two chunks of 256 tokens; the rest is in none.
            assert_eq!(last.cached_tokens, 512);
            assert_eq!(last.tier_states, "gpu=exact, cpu=unverified, disk=exact");
        }
        if model == "drained" {
            assert_eq!(last.state, "unverified", "lost events may be unseen");
        }
        let shown = of_model(&fleet, model).await;
        assert!(credited > 0, "{model}");
        assert!(
            shown.0 >= credited && shown.1 >= cached,
            "{model}: {shown:?}"
        );
        assert!(shown.0 <= shown.1, "{model}: {shown:?}");
    }
    // Without events nothing is known exactly.
    for _ in 0..2 {
        let body = json!({"model": "quiet", "prompt": first, "max_tokens": 1});
        assert_ne!(serve(&fleet, "/v1/completions", &body).await.state, "exact");
    }
}

/// Credited and cached tokens of a model, as all routers' metrics show them.
async fn of_model(fleet: &Fleet, model: &str) -> (u64, u64) {
    let mut sums = (0, 0);
    for router in 0..fleet.routers.len() {
        let page = fleet.http.get(fleet.admin(router, "/metrics")).send().await;
        let page = page.unwrap().text().await.unwrap();
        let sum = |name: &str| {
            let prefix = format!("warmroute_router_{name}{{");
            let label = format!("model=\"{model}\"");
            let lines = page
                .lines()
                .filter(|line| line.starts_with(&prefix) && line.contains(&label));
            let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
            values.sum::<u64>()
        };
        sums.0 += sum("model_credited_tokens_total");
        sums.1 += sum("model_cached_tokens_total");
    }
    sums
}
