//! The live page of the admin port, in a real Chromium.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::Path;
use axum::routing::get;
use axum::{Json, Router};
use fastrand::Rng;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};
use warmroute_process::access::keys;

use crate::browser::{Browser, Screen};
use crate::fleet::traffic::{request, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode, Place, report};

const DESK: Screen = Screen {
    width: 1280,
    height: 900,
    scheme: "light",
};
const SCREENS: [Screen; 3] = [
    Screen {
        width: 360,
        height: 740,
        scheme: "dark",
    },
    DESK,
    Screen {
        width: 3840,
        height: 2160,
        scheme: "dark",
    },
];

/// A long prompt is computed during several states of the page.
const SLOW: [&str; 4] = ["--itl-ms", "5", "--prefill-tokens-per-sec", "4000"];
const LONG_PROMPT: u32 = 16_000;

/// Roles of the accessibility tree that need a name. A page has one `main` and one `banner`.
const NAMED: [&str; 11] = [
    "button",
    "checkbox",
    "dialog",
    "figure",
    "image",
    "link",
    "navigation",
    "region",
    "searchbox",
    "table",
    "textbox",
];

const PICTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/live-page.png");

/// Texts whose contrast is below WCAG's level AA: 4.5, or 3 where they are large.
const FAINT: &str = r"
const luminance = (color) => {
  const parts = color.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
  const [r, g, b] = parts.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (!color.endsWith(', 0)')) return color;
  }
  return 'rgb(255, 255, 255)';
};
const hasText = (node) => [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
const nodes = [...document.querySelectorAll('body *')];
const texts = nodes.filter((node) => node.checkVisibility() && hasText(node));
return texts.map((node) => {
  const style = getComputedStyle(node);
  const isSvg = node instanceof SVGElement;
  const pair = [isSvg ? style.fill : style.color, background(node)].map(luminance);
  const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
  return ratio < least && `${node.textContent}: ${ratio}`;
}).filter(Boolean);";

/// An expression: whether the page's background is dark.
const DARK: &str = r"getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3)
  .every((part) => Number(part) < 64)";

/// A script: keeps what a screen reader is given to say in `window.announced`.
const LISTEN: &str = r"
window.announced = [];
const node = document.getElementById('announcements');
const keep = () => window.announced.push(node.textContent);
new MutationObserver(keep).observe(node, { childList: true, characterData: true, subtree: true });";

/// A script: marks what the tabulator must reach, and returns its number.
const REACHABLE: &str = r"
const all = 'a[href], button, input, select, textarea, summary, [tabindex=\'0\']';
const nodes = [...document.querySelectorAll(all)].filter((node) => node.checkVisibility());
nodes.forEach((node, at) => { node.dataset.stop = at; });
nodes[0].focus();
return nodes.length;";

/// A script: the marked element that has the focus, if the focus is visible.
const FOCUSED: &str = r"
const node = document.activeElement;
const style = getComputedStyle(node);
const isVisible = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
return isVisible ? Number(node.dataset.stop) : null;";

/// Reasons for made-up decisions, one for each kind.
const REASONS: &str = r"
const one = (worker, cost, more = {}) => ({
  worker, dp_rank: 0, state: 'exact', rung: 'index', overlap: { gpu: 0, cpu: 0, disk: 0 },
  reported_blocks: 0, predicted_blocks: 0, active_requests: 1, foreign_requests: 0,
  probability: 0.25,
  time_ms: { queue: 0, foreign: 0, prefill: 1000 * cost, decode: 0 }, cost,
  factors: { prefill: 1, decode: 0.1 }, is_near: false, ...more,
});
const held = { overlap: { gpu: 30, cpu: 2, disk: 0 } };
const decide = (policy, ...cheapest) => ({ policy, worker: 'a', dp_rank: 0, cheapest });
return import('/live/decisions.js').then(({ why }) => [
  decide('time', one('a', 0.02, held)),
  decide('time', one('a', 0.02, held), one('b', 0.1)),
  decide('time', one('b', 0.02, { is_near: true }),
    one('a', 0.0201, { active_requests: 0, is_near: true })),
  decide('approx', one('a', 0.02, { is_near: true }), one('b', 0.02, { is_near: true }),
    one('c', 0.02, { is_near: true })),
  decide('kv', one('a', 12, { predicted_blocks: 1 }), one('b', 30.5)),
  decide('kv', one('b', 12), one('a', 30)),
  decide('kv', one('b', 12)),
  decide('round-robin', one('a', 1), one('b', 0)),
].map(why));";

fn engines(count: usize, flags: &'static [&'static str]) -> Engines {
    Engines {
        count,
        ranks: 1,
        blocks: 2_000,
        flags,
    }
}

/// An expression: the text of a worker's row.
fn row(worker: &str) -> String {
    let rows = "[...document.querySelectorAll('#sources tbody tr')]";
    format!("({rows}.find((row) => row.cells[0].innerText === '{worker}')?.innerText ?? '')")
}

/// A script: the rows of a table, as objects of their cells' texts by the text of the column's head.
fn rows(table: &str) -> String {
    format!(
        "const heads = [...document.querySelectorAll('{table} thead th')]
          .map((head) => head.innerText.trim().replace(/\\s+/g, ' '));
        const rows = [...document.querySelectorAll('{table} tbody tr')].map((row) =>
          Object.fromEntries(heads.map((head, at) => [head, row.cells[at].innerText])));"
    )
}

/// An expression: whether a row of a table meets a condition on `row`.
fn has_row(table: &str, condition: &str) -> String {
    let rows = rows(table);
    format!("(() => {{ {rows} return rows.some((row) => {condition}); }})()")
}

/// An expression: how many states the page has shown.
const STATES: &str = "Number(document.body.dataset.states ?? 0)";

async fn number(browser: &Browser, expression: &str) -> u64 {
    let value = browser.run(&format!("return {expression}")).await;
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{expression}: {value}"))
}

/// No screen scrolls sideways, and every text is readable.
async fn assert_readable(browser: &Browser) {
    for screen in SCREENS {
        browser.screen(screen).await;
        sleep(Duration::from_millis(100)).await;
        let over = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
        assert_eq!(number(browser, over).await, 0, "{screen:?}");
        let is_dark = browser.run(&format!("return {DARK}")).await;
        assert_eq!(is_dark, json!(screen.scheme == "dark"), "{screen:?}");
        let faint = browser.run(FAINT).await;
        assert_eq!(faint, json!([]), "{screen:?}");
    }
    browser.screen(DESK).await;
}

/// Content, updates and an engine that dies, with two routers and two indexers.
#[tokio::test(flavor = "multi_thread")]
async fn it_shows_the_fleet_and_what_happens_to_it() {
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let fleet = Fleet::start(mode, engines(3, &SLOW), Flags::default()).await;
    let started = Instant::now();
    let mut rng = Rng::with_seed(11);
    for _ in 0..20 {
        let (path, body) = request(&mut rng);
        serve(&fleet, path, &body).await;
    }
    let browser = Browser::start().await;
    browser.screen(DESK).await;
    browser.open(&fleet.admin(0, "/")).await;
    assert_shows_all(&fleet, &browser).await;
    assert_shows_load(&fleet, &browser).await;
    let parts = named(&browser).await;
    let expected = [
        "button",
        "checkbox",
        "image",
        "region",
        "searchbox",
        "table",
    ];
    assert!(
        expected.iter().all(|role| parts.contains(role)),
        "{parts:?}"
    );
    assert_readable(&browser).await;
    let shown = number(&browser, STATES).await;
    let further = format!("{STATES} >= {shown} + 3");
    browser.until("a state each second", &further).await;
    let loaded = "performance.getEntriesByType('resource').map((one) => one.name)";
    let own = format!("{loaded}.every((name) => name.startsWith(location.origin + '/'))");
    browser.until("nothing comes from elsewhere", &own).await;
    assert!(number(&browser, &format!("{loaded}.length")).await >= 3);
    assert_shows_changes(&fleet, &browser).await;
    assert_gives_reasons(&browser).await;
    assert_eq!(browser.console().await, [""; 0]);

    fleet.routers[0].kill();
    let lost = "document.getElementById('connection').dataset.level === 'bad'";
    browser.until("the connection is lost", lost).await;
    fleet.routers[0].restart().await;
    let live = "document.getElementById('connection').innerText === 'live'";
    browser.until("the page reconnects", live).await;
    report("live page: fleet, browser included", started);
}

async fn assert_shows_all(fleet: &Fleet, browser: &Browser) {
    let tiles = "document.getElementById('tiles').innerText";
    let healthy = format!("{tiles}.includes('3 of 3')");
    browser.until("three healthy workers", &healthy).await;
    for worker in ["worker-0", "worker-1", "worker-2"] {
        let exact = format!("/healthy.*closed.*exact/s.test({})", row(worker));
        browser.until("their state in the index", &exact).await;
    }
    let decided = "/exact[^]*?\\t\\d+\\t/.test(document.getElementById('ladder').innerText)";
    browser.until("the ladder", decided).await;
    let (path, body) = request(&mut Rng::with_seed(12));
    serve(fleet, path, &body).await;
    serve(fleet, path, &body).await;
    let hit = format!("/Cache hit rate\\s+[\\d.]+ %/.test({tiles})");
    browser.until("the hit rate", &hit).await;
    let peer = "/following\\s+equal/.test(document.getElementById('routers').innerText)";
    browser.until("the other router, in step", peer).await;
    let indexers = format!(
        "(() => {{ {} return rows.length === 2 && rows.every((row) => row['State'] === 'ready'
          && row['Behind records'] === '0' && /^[\\d.,]+ (ms|s)$/.test(row['At the end ago'])); }})()",
        rows("#indexers")
    );
    browser
        .until("both indexers and how far they are behind", &indexers)
        .await;
    let reason = r"[...document.querySelectorAll('#decisions .why')].some(({ innerText: text }) =>
        /^[\d.,]+ m?s less than worker-\d, mostly \w+; \d+ blocks cached there \(exact\)$/.test(text))";
    browser.until("why a worker was chosen", reason).await;
    browser
        .run("document.querySelector('#decisions details').open = true")
        .await;
    let terms = "document.querySelector('#decisions details[open]').innerText";
    let terms = format!("/chosen[^]*Request/.test({terms})");
    browser.until("the terms of a decision", &terms).await;
}

/// A stream through its prefill and its decoding, in the row of its worker and in the charts.
async fn assert_shows_load(fleet: &Fleet, browser: &Browser) {
    let prompt: Vec<u32> = (0..LONG_PROMPT).map(|at| 300 + at * 11 % 1000).collect();
    let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": 3000, "stream": true });
    let url = format!("{}/v1/completions", fleet.routers[0].base());
    let request = fleet.http.post(url).json(&body).send();
    let prefill = "row['Active requests'] === '1' && row['Prefill tokens'] === '16,000'";
    let prefill = has_row("#sources", prefill);
    let shown = browser.until("a request whose prompt is being computed", &prefill);
    let (stream, ()) = tokio::join!(request, shown);
    let stream = stream.unwrap();
    let worker = stream.headers()["x-warmroute-worker"].to_str().unwrap();
    let decode = format!(
        "row['Worker'] === '{worker}' && row['Active requests'] === '1'
        && row['Prefill tokens'] === '0' && /^1,\\d{{3}}$/.test(row['Decode blocks'])
        && /^[\\d.,]+ m?s$/.test(row['TTFT average'])"
    );
    let decode = has_row("#sources", &decode);
    browser.until("the request generates", &decode).await;
    for (chart, value) in [
        ("ttft", r"now p50 [\d.,]+ m?s, p95 [\d.,]+ m?s$"),
        (
            "hits",
            r"now credited by the index \d+ %, reported by engines \d+ %$",
        ),
    ] {
        let drawn = format!(
            "/{value}/.test(document.querySelector('#{chart} svg').ariaLabel)
            && [...document.querySelectorAll('#{chart} path')].every((line) =>
              /^M.*L/.test(line.getAttribute('d')))"
        );
        browser.until(chart, &drawn).await;
    }
    let worker = worker.to_owned();
    drop(stream);
    fleet.until_idle().await;
    fleet.until_indexed().await;
    let digest = fleet.get(format!("{}/v1/digest", fleet.indexes()[0])).await;
    let sources = digest["sources"].as_array().unwrap();
    let source = sources.iter().find(|source| source["worker"] == *worker);
    let blocks = source.unwrap()["blocks"].as_u64().unwrap();
    assert!(blocks >= u64::from(LONG_PROMPT) / BLOCK, "{blocks}");
    let cached = format!(
        "row['Worker'] === '{worker}' && row['Active requests'] === '0'
        && row['Cached blocks'].replaceAll(',', '') === '{blocks}'"
    );
    let cached = has_row("#sources", &cached);
    browser
        .until("its blocks, and that it ended", &cached)
        .await;
}

/// Each part of the page that a screen reader lists has a name. Returns the parts' roles.
async fn named(browser: &Browser) -> BTreeSet<&'static str> {
    let tree = browser.devtools("Accessibility.getFullAXTree", json!({}));
    let tree = tree.await;
    let nodes = tree["nodes"].as_array().unwrap();
    let (mut seen, mut unnamed) = (BTreeSet::new(), Vec::new());
    for node in nodes.iter().filter(|node| node["ignored"] == false) {
        let role = node["role"]["value"].as_str().unwrap_or("");
        let Some(role) = NAMED.into_iter().find(|named| *named == role) else {
            continue;
        };
        seen.insert(role);
        let name = node["name"]["value"].as_str().unwrap_or("");
        if name.trim().is_empty() {
            unnamed.push(role);
        }
    }
    assert_eq!(unnamed, [""; 0], "roles without a name");
    seen
}

async fn assert_shows_changes(fleet: &Fleet, browser: &Browser) {
    browser.run(LISTEN).await;
    fleet.engines[1].process.kill();
    let killed = Instant::now();
    let unhealthy = format!("{}.includes('unhealthy')", row("worker-1"));
    browser.until("the engine is unhealthy", &unhealthy).await;
    report("live page: an engine that dies is unhealthy after", killed);
    let changes = "document.getElementById('changes').innerText.includes('worker-1 is unhealthy')";
    browser.until("the change is listed", changes).await;
    let announced = "announced.some((text) => text.includes('worker-1 is unhealthy'))";
    browser.until("a screen reader says so", announced).await;
    let drain = fleet.admin(1, "/admin/workers/worker-2/drain");
    let drain = fleet.http.post(drain).header("x-warmroute-admin", "1");
    assert!(drain.send().await.unwrap().status().is_success());
    let draining = format!("{}.includes('draining')", row("worker-2"));
    browser.until("the drain", &draining).await;
    browser.run("location.reload()").await;
    browser.until("the changes outlive a reload", changes).await;
}

async fn assert_gives_reasons(browser: &Browser) {
    let expected = json!([
        "the only candidate; 32 blocks cached there (exact)",
        "80 ms less than b, mostly prefill; 32 blocks cached there (exact)",
        "near b, chosen by load; nothing known to be cached there",
        "near b and 1 more, chosen by a random draw at equal load; \
            nothing known to be cached there",
        "18.5 blocks cheaper than b; 1 block expected there",
        "drawn with a probability of 25 %; nothing known to be cached there",
        "drawn, and not among the 1 cheapest",
        "its turn",
    ]);
    assert_eq!(browser.run(REASONS).await, expected);
}

/// A model's name that is markup, with a line separator.
const HOSTILE_MODEL: &str = "<img src=x onerror=\"window.broken = 1\">\u{2028}model";

const HOSTILE_WORKERS: [&str; 3] = [
    "<img/src=x/onerror=window.broken=1>",
    "</td></tr></table><script>window.broken=1</script>",
    "a\u{202e}b\"'&amp${1}",
];

/// Engines that answer below as many paths as there are workers, all healthy, without cache events.
async fn stub_engines() -> (u16, impl Future<Output = ()>) {
    let models = async |Path(_): Path<String>| {
        Json(json!({ "object": "list", "data": [{ "id": HOSTILE_MODEL, "object": "model" }] }))
    };
    let engines = Router::new()
        .route("/{worker}/health", get(async || ()))
        .route("/{worker}/v1/models", get(models));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serve = axum::serve(listener, engines).into_future();
    (port, serve.map(Result::unwrap))
}

/// 200 workers, some with names that are markup, behind a key: rows are updated in place, sorted,
/// filtered, and used by keyboard.
#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_workers_with_hostile_names_behind_a_key() {
    let (port, engines) = stub_engines().await;
    tokio::select! {
        () = engines => panic!("the engines ended"),
        () = show_two_hundred_workers(port) => {}
    }
}

async fn show_two_hundred_workers(engines_port: u16) {
    let place = Place::new();
    let (key, hash) = keys::generate().unwrap();
    let settings = place.path("settings.toml");
    let reader = format!(
        "id = \"o\", sha256 = \"{}\", role = \"read\"",
        hash.to_hex()
    );
    std::fs::write(&settings, format!("[admin]\nkeys = [{{ {reader} }}]\n")).unwrap();
    let names = (0..197).map(|number| format!("stub-{number}"));
    let names = names.chain(HOSTILE_WORKERS.map(str::to_owned));
    let workers = names.enumerate().flat_map(|(path, name)| {
        let worker = format!("http://127.0.0.1:{engines_port}/w{path},id={name}");
        ["--worker".to_owned(), worker]
    });
    let config = ["--config".to_owned(), settings.display().to_string()];
    let arguments = config.into_iter().chain(workers);
    let arguments: Vec<&'static str> = arguments.map(|one| &*one.leak()).collect();
    let flags = Flags {
        router: arguments.leak(),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, engines(0, &[]), flags).await;
    let started = Instant::now();
    let browser = Browser::start().await;
    browser.open(&fleet.admin(0, "/")).await;
    let asks = "document.querySelector('dialog[open]')";
    browser.until("it asks for the key", asks).await;
    let parts = named(&browser).await;
    let expected = ["button", "dialog", "textbox"];
    assert!(
        expected.iter().all(|role| parts.contains(role)),
        "{parts:?}"
    );
    browser.press("wr-wrong\u{e007}").await;
    let refused = "document.getElementById('login-error').innerText.includes('not accept')";
    browser.until("a wrong key is refused", refused).await;
    browser.press(&format!("{key}\u{e007}")).await;
    assert_is_text_and_in_place(&browser).await;
    assert_is_used_by_keyboard(&browser).await;
    assert_readable(&browser).await;
    let console = browser.console().await;
    // The browser itself logs the two answers 401.
    let others = console.iter().filter(|line| !line.contains("401"));
    assert_eq!(others.count(), 0, "{console:?}");
    report("live page: 200 workers, browser included", started);
}

const ROWS: &str = "document.querySelectorAll('#sources tbody tr').length";

async fn assert_is_text_and_in_place(browser: &Browser) {
    let all = "document.getElementById('tiles').innerText.includes('200 of 200')";
    browser.until("200 healthy workers", all).await;
    assert_eq!(number(browser, ROWS).await, 200);
    let text = "return [...document.querySelectorAll('#sources :is(th, td)')]
        .map((cell) => cell.textContent + ' ' + cell.title).join(' ')";
    let text = browser.run(text).await;
    let text = text.as_str().unwrap();
    // A long name keeps its end.
    assert!(text.contains("</td></tr><…ow.broken=1</script>"), "{text}");
    let mut shown = HOSTILE_WORKERS.iter().chain([&HOSTILE_MODEL]);
    assert!(shown.all(|name| text.contains(name)), "{text}");
    let broken = browser.run("return window.broken ?? null").await;
    assert_eq!(broken, Value::Null);
    assert_eq!(number(browser, "document.images.length").await, 1);

    let all = "[...document.querySelectorAll('#sources tr')]";
    let mark = format!("{all}.forEach((row) => {{ row.kept = true }})");
    browser.run(&mark).await;
    let shown = number(browser, STATES).await;
    let further = format!("{STATES} >= {shown} + 2");
    browser.until("further states", &further).await;
    let kept = format!("{all}.filter((row) => row.kept).length");
    assert_eq!(
        number(browser, &kept).await,
        201,
        "rows are updated in place"
    );
}

/// The tabulator reaches each control in the order of the page, and shows where it is.
async fn assert_tabs_through(browser: &Browser) {
    let stops = browser.run(REACHABLE).await.as_u64().unwrap();
    assert!((20..100).contains(&stops), "{stops} controls");
    for stop in 0..stops {
        assert_eq!(browser.run(FOCUSED).await, json!(stop), "of {stops}");
        browser.press("\u{e004}").await;
    }
}

async fn assert_is_used_by_keyboard(browser: &Browser) {
    assert_tabs_through(browser).await;
    browser
        .run("document.querySelector('#sources th button').focus()")
        .await;
    browser.press("\u{e007}").await;
    let sorted = "document.querySelector('#sources th').ariaSort === 'descending'";
    browser.until("it is sorted", sorted).await;
    let first = "return document.querySelector('#sources tbody th').innerText";
    assert_eq!(browser.run(first).await, "stub-196");
    browser
        .run("document.getElementById('filter').focus()")
        .await;
    browser.press("stub-19").await;
    browser
        .until("it is filtered", &format!("{ROWS} === 8"))
        .await;
}

/// Makes the picture of the README: `tests/screenshot.sh`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes a file"]
async fn picture() {
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let fleet = Fleet::start(mode, engines(8, &["--profile", "gpu-8b"]), Flags::default()).await;
    let browser = Browser::start().await;
    let height = 1100;
    browser.screen(Screen { height, ..DESK }).await;
    browser.open(&fleet.admin(0, "/")).await;
    let running = AtomicBool::new(true);
    let clients = join_all((0..12).map(|seed| chat(&fleet, &running, seed)));
    let shoot = async {
        sleep(Duration::from_secs(100)).await;
        browser
            .run("document.querySelector('#decisions details').open = true")
            .await;
        sleep(Duration::from_millis(50)).await;
        let format = json!({ "format": "png" });
        let shot = browser.devtools("Page.captureScreenshot", format).await;
        running.store(false, Ordering::Relaxed);
        shot
    };
    let (_, shot) = tokio::join!(clients, shoot);
    std::fs::write(PICTURE, base64(shot["data"].as_str().unwrap())).unwrap();
}

/// A client that streams chats about topics of different popularity.
async fn chat(fleet: &Fleet, running: &AtomicBool, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    while running.load(Ordering::Relaxed) {
        let topic = rng.usize(0..40).min(rng.usize(0..40));
        let rule =
            |rule| format!("Rule {rule} of topic {topic}: be exact, or say that you are not. ");
        let system: String = (0..40 + 4 * topic).map(rule).collect();
        let question = format!("Question {} about topic {topic}?", rng.u32(0..50));
        let body = json!({
            "model": "mock", "max_tokens": rng.u32(10..120), "stream": true,
            "stream_options": { "include_usage": true },
            "messages": [
                { "role": "system", "content": system },
                { "role": "user", "content": question },
            ],
        });
        let url = fleet.url("/v1/chat/completions");
        let answer = fleet.http.post(url).json(&body).send().await.unwrap();
        answer.bytes().await.unwrap();
        sleep(Duration::from_millis(rng.u64(0..800))).await;
    }
}

/// Decodes standard base64 with padding.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits: BTreeMap<u8, u32> = DIGITS.iter().copied().zip(0..).collect();
    let (mut bytes, mut bits, mut width) = (Vec::new(), 0_u32, 0);
    for digit in text.bytes().filter_map(|byte| digits.get(&byte)) {
        (bits, width) = (((bits << 6) | digit) & 0xff_ffff, width + 6);
        if width >= 8 {
            width -= 8;
            bytes.push(u8::try_from((bits >> width) & 0xff).unwrap());
        }
    }
    bytes
}
