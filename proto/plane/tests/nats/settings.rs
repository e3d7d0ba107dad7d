//! Settings of streams that an operator's tool changes while the plane is in use.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::stream::{Config, DiscardPolicy};
use tokio::time::{sleep, timeout};
use warmroute_plane::{NatsConfig, NatsPlane};

use super::nats_server::NatsServer;
use super::{SOON, config, sizes};

/// What this thread logs.
#[derive(Clone, Default)]
struct LogText(Arc<Mutex<Vec<u8>>>);

impl Write for LogText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LogText {
    /// Waits for a line with both, and forgets all lines.
    async fn has(&self, level: &str, text: &str) {
        let found = async {
            loop {
                let lines = String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned();
                let mut lines = lines.lines();
                if lines.any(|line| line.contains(level) && line.contains(text)) {
                    return;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, found).await.expect(text);
        self.0.lock().unwrap().clear();
    }
}

type Change = fn(&mut Config);

/// More than one message of a subject is a registry that keeps leases for longer.
const CHANGES: [(&str, &str, Change); 5] = [
    ("KV_wr_t", "max_msgs_per_subject is 5, must be 1", |is| {
        is.max_messages_per_subject = 5;
    }),
    ("KV_wr_t", "max_msg_size is 4096", |is| {
        is.max_message_size = 4096;
    }),
    ("wr_t", "max_msgs is 10, must be -1", |is| {
        is.max_messages = 10;
    }),
    ("wr_t", "max_age is 0ns, must be bounded", |is| {
        is.max_age = Duration::ZERO;
    }),
    ("wr_t", "discard is New, must be Old", |is| {
        is.discard = DiscardPolicy::New;
    }),
];

#[tokio::test]
async fn settings_that_change_while_in_use_are_named() {
    let log = LogText::default();
    let writer = log.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false);
    let lines = lines.with_writer(move || writer.clone()).finish();
    let _on_this_thread = tracing::subscriber::set_default(lines);
    let server = NatsServer::start().await;
    let checked = NatsConfig {
        setup_check: Duration::from_millis(20),
        ..config(&server)
    };
    let _plane = NatsPlane::init(checked, sizes()).await.unwrap();
    let client = async_nats::connect(server.url()).await.unwrap();
    let streams = jetstream::new(client);
    for (name, difference, change) in CHANGES {
        let mut stream = streams.get_stream(name).await.unwrap();
        let right = stream.info().await.unwrap().config.clone();
        let mut changed = right.clone();
        change(&mut changed);
        streams.update_stream(changed).await.unwrap();
        log.has("WARN", &format!("{name}: {difference}")).await;
        // What `doctor` reads.
        let (_, setup) = NatsPlane::inspect(config(&server), || 0).await.unwrap();
        let found: Vec<String> = setup.differences.iter().map(ToString::to_string).collect();
        let [only] = found.as_slice() else {
            panic!("{found:?}");
        };
        assert!(only.contains(difference), "{only}");
        streams.update_stream(right).await.unwrap();
        log.has("INFO", "as required again").await;
    }
}
