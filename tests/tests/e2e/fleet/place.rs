//! Files and ports of a fleet.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError};

thread_local! {
    /// The thread's last panic.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

fn keep_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            PANIC.set(panic.to_string());
            print(panic);
        }));
    });
}

/// Its own directory, kept with its logs when the test fails.
pub(crate) struct Place(PathBuf);

impl Place {
    pub(crate) fn new() -> Self {
        static TAKEN: AtomicU32 = AtomicU32::new(0);
        let number = TAKEN.fetch_add(1, Ordering::Relaxed);
        let name = format!("fleet-{}-{number}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        keep_panics();
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Flags of routers with these settings, in the file `router.toml`.
    pub(crate) fn router_flags(&self, settings: &str) -> &'static [&'static str] {
        let file = self.path("router.toml");
        fs::write(&file, settings).expect("a file of settings");
        Vec::leak(vec!["--config", String::leak(file.display().to_string())])
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Behind the logs of all processes: the end of a long output is what is kept.
            eprintln!("the test failed: {}", PANIC.take());
        } else {
            // A leftover file is harmless.
            drop(fs::remove_dir_all(&self.0));
        }
    }
}

/// Below the ephemeral ports, so that a port stays free while its process is down.
const PORTS: std::ops::Range<u16> = 12_000..32_000;

pub(crate) fn free_port() -> u16 {
    free_ports(1)
}

/// The first of `count` free ports in a row: a rank's port is its base plus its number. No two
/// tests of this process get one port.
pub(crate) fn free_ports(count: u16) -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 0..1000 {
        let first = fastrand::u16(PORTS.start..PORTS.end - count);
        let all = first..first + count;
        let is_free =
            |port: u16| !given.contains(&port) && TcpListener::bind(("127.0.0.1", port)).is_ok();
        if all.clone().all(is_free) {
            given.extend(all);
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}
