//! A headless Chromium, driven over chromedriver's `WebDriver` HTTP protocol.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::fleet::{Place, client, free_port, signal};
use crate::nats_server::child::Watchdog;

/// Nothing but the page's own requests, and no state of another run.
const ARGUMENTS: [&str; 8] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
];

const PATIENCE: Duration = Duration::from_secs(60);

/// Size of a window in CSS pixels, and what the person prefers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screen {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) scheme: &'static str,
}

/// One window. Dropping it ends the browser.
pub(crate) struct Browser {
    driver: Child,
    watchdog: Watchdog,
    /// The browser's process, which may outlive its driver.
    pid: u32,
    session: String,
    http: reqwest::Client,
    _place: Place,
}

impl Browser {
    pub(crate) async fn start() -> Self {
        let (place, port) = (Place::new(), free_port());
        let log = File::create(place.path("chromedriver.log")).expect("a file");
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn()
            .expect("chromedriver starts: install chromium and chromium-driver");
        let watchdog = Watchdog::over(&driver);
        let data = format!("--user-data-dir={}", place.path("browser").display());
        let arguments: Vec<&str> = ARGUMENTS.into_iter().chain([&*data]).collect();
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:loggingPrefs": { "browser": "ALL" },
            "goog:chromeOptions": { "args": arguments },
        } } });
        let http = client().build();
        let http = http.expect("a client");
        let sessions = format!("http://127.0.0.1:{port}/session");
        let deadline = Instant::now() + PATIENCE;
        let opened = loop {
            match http.post(&sessions).json(&wanted).send().await {
                Ok(answer) => break answer.json::<Value>().await.expect("JSON"),
                Err(error) => assert!(Instant::now() < deadline, "no chromedriver: {error}"),
            }
            sleep(Duration::from_millis(20)).await;
        };
        let opened = &opened["value"];
        let id = opened["sessionId"].as_str();
        let id = id.unwrap_or_else(|| panic!("no session: {opened}"));
        let pid = opened["capabilities"]["goog:processID"].as_u64();
        Self {
            driver,
            watchdog,
            pid: pid.and_then(|pid| pid.try_into().ok()).expect("a process"),
            session: format!("{sessions}/{id}"),
            http,
            _place: place,
        }
    }

    async fn command(&self, path: &str, body: Value) -> Value {
        let url = format!("{}/{path}", self.session);
        let answer = self.http.post(&url).json(&body).send().await;
        let answer = answer.expect("chromedriver answers");
        let is_done = answer.status().is_success();
        let answer: Value = answer.json().await.expect("JSON");
        assert!(is_done, "{path}: {answer}");
        answer["value"].clone()
    }

    pub(crate) async fn open(&self, url: &str) {
        self.command("url", json!({ "url": url })).await;
    }

    /// The value that a script returns.
    pub(crate) async fn run(&self, script: &str) -> Value {
        let body = json!({ "script": script, "args": [] });
        self.command("execute/sync", body).await
    }

    /// Waits until an expression is true.
    pub(crate) async fn until(&self, what: &str, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.run(&format!("return Boolean({expression})")).await != json!(true) {
            if Instant::now() >= deadline {
                let text = self.run("return document.body.innerText").await;
                panic!(
                    "in vain: {what}; console {:?}; page {text}",
                    self.console().await
                );
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn screen(&self, screen: Screen) {
        let Screen {
            width,
            height,
            scheme,
        } = screen;
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
        });
        self.devtools("Emulation.setDeviceMetricsOverride", size)
            .await;
        let scheme = json!({ "name": "prefers-color-scheme", "value": scheme });
        let features = json!({ "features": [scheme] });
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    /// One command of the `DevTools` protocol.
    pub(crate) async fn devtools(&self, command: &str, parameters: Value) -> Value {
        let body = json!({ "cmd": command, "params": parameters });
        self.command("goog/cdp/execute", body).await
    }

    /// Types keys into the focused element. Code points of the private area are special keys.
    pub(crate) async fn press(&self, keys: &str) {
        let keys: Vec<Value> = keys
            .chars()
            .flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({ "type": kind, "value": key })))
            .collect();
        let actions = json!([{ "type": "key", "id": "keyboard", "actions": keys }]);
        self.command("actions", json!({ "actions": actions })).await;
    }

    /// What the console got since the last call: also what the content security policy blocked.
    pub(crate) async fn console(&self) -> Vec<String> {
        let lines = self.command("se/log", json!({ "type": "browser" })).await;
        let lines = lines.as_array().expect("lines");
        lines
            .iter()
            .map(|line| line["message"].to_string())
            .collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver first: it would report the end of its browser.
        self.watchdog.end();
        drop(self.driver.kill());
        drop(self.driver.wait());
        signal(self.pid, "KILL");
    }
}
