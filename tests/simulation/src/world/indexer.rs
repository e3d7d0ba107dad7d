//! Indexers: the product's service around a simulated plane, and what the world sees of it.

use warmroute_indexer::fold::RecordVerdict;
use warmroute_indexer::{Handle, IndexerConfig, Replica, Service, SnapshotConfig};
use warmroute_proto::LogPosition;
use warmroute_proto::view::{PAGE_SOURCES_MAX, SourceView, ViewPageRequest};

use super::breakage::Bent;
use super::core_bus::WorldPlane;
use super::{At, World};

pub(super) struct Indexer {
    pub(super) host: usize,
    pub(super) runs: u64,
    pub(super) handle: Option<Handle>,
    /// As of the last look.
    position: LogPosition,
    pub(super) bent: Bent,
    /// When it still waited for a slow snapshot store.
    pub(super) started_after: At,
}

impl Indexer {
    pub(super) fn new(host: usize) -> Self {
        Self {
            host,
            runs: 0,
            handle: None,
            position: LogPosition(0),
            bent: Bent::default(),
            started_after: At::default(),
        }
    }
}

impl World {
    pub(super) fn start_indexer(&mut self, at: usize) {
        let indexer = &mut self.indexers[at];
        indexer.runs += 1;
        let (host, writer) = (indexer.host, format!("i{at}r{}", indexer.runs));
        let config = IndexerConfig {
            namespace: super::namespace(),
            max_memory_bytes: self.rates.set.indexer_bytes_max.filter(|_| at == 0),
        };
        let (schedule, kind) = (self.rates.schedule, self.plane.kind);
        let mut handle = None;
        self.run_process(host, |plane, _outbox, stop| {
            let service = Service::new(config, plane).unwrap();
            let id = writer.clone();
            let service = service.registered_as(Replica { id, url: None });
            let service = match kind {
                WorldPlane::Log => service.with_snapshots(SnapshotConfig { writer, schedule }),
                WorldPlane::Core => service,
            };
            handle = Some(service.handle());
            async { service.run(stop).await.unwrap() }
        });
        self.indexers[at].handle = handle;
    }

    pub(super) fn indexer_is_gone(&mut self, at: usize) {
        let indexer = &mut self.indexers[at];
        indexer.handle = None;
        indexer.position = LogPosition(0);
        indexer.bent = Bent::default();
    }

    /// Calls what reads an indexer's state at its own time.
    pub(super) fn read_index<R>(&self, at: usize, read: impl FnOnce(&Handle) -> R) -> Option<R> {
        let indexer = &self.indexers[at];
        let handle = indexer.handle.as_ref()?;
        let running = self.hosts[indexer.host].running.as_ref()?;
        Some(running.process.enter(|| read(handle)))
    }

    /// An indexer's state of each source.
    pub(super) fn standings(&self, at: usize) -> Vec<SourceView> {
        let ask = ViewPageRequest {
            after: None,
            sources_max: PAGE_SOURCES_MAX,
        };
        let page = self.read_index(at, |handle| handle.view(&ask).sources);
        page.unwrap_or_default()
    }

    /// Checks the answers of a process that ran.
    pub(super) fn indexer_ran(&mut self, at: usize) {
        let Some(position) = self.read_index(at, Handle::position) else {
            return;
        };
        if std::mem::replace(&mut self.indexers[at].position, position) != position {
            self.note(|| format!("indexer {at}: at {position}"));
            self.check_position(at);
        }
    }

    /// Adds what a process counted to the report; once, at its end.
    pub(super) fn harvest(&mut self, at: usize) {
        let Some(Ok(text)) = self.read_index(at, Handle::metrics_text) else {
            return;
        };
        let text = String::from_utf8(text).unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let Some(name) = name.strip_prefix("warmroute_indexer_") else {
                continue;
            };
            let value = value.parse::<f64>().unwrap_or(0.0) as u64;
            let (name, label) = name.split_once('{').unwrap_or((name, ""));
            match name {
                "records_total" => {
                    let word = label.split('"').nth(1).unwrap_or_default();
                    let verdict = RecordVerdict::ALL
                        .iter()
                        .find(|verdict| verdict.label() == word);
                    self.checks.verdicts.count(*verdict.unwrap(), value);
                }
                "set_asides_total" => self.checks.set_aside += value,
                // Positions of another log are not expected.
                "snapshots_skipped_total" if !label.contains("another_log") => {
                    self.checks.skipped += value;
                }
                _ => {}
            }
        }
    }
}
