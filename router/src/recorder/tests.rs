use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use warmroute_proto::{BlockSize, Seed};
use warmroute_sim::recording::{
    FileHeader, NamedFile, RECORDING_EXTENSION, RecordedOutcome, Recording, RequestFacts, file_name,
};

use super::*;
use crate::settings::Settings;
use crate::testing::TestTask;

fn settings(folder: &TempDir, max_bytes: u64) -> Settings {
    let dir = folder.path().display();
    let text = format!("recording_dir = \"{dir}\"\nrecording_max_bytes = {max_bytes}\n");
    Settings::parse(&text).unwrap()
}

/// Names and bytes of the files, oldest first.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = entries
        .filter(|path| {
            path.extension()
                .is_some_and(|ext| ext == RECORDING_EXTENSION)
        })
        .collect();
    paths.sort();
    let named = paths
        .iter()
        .map(|path| (path.display().to_string(), fs::read(path).unwrap()));
    named.collect()
}

fn decode(dir: &Path) -> Recording {
    let files = files(dir);
    let named = files.iter().map(|(name, bytes)| NamedFile { name, bytes });
    Recording::decode(named).unwrap()
}

fn prompt(first: u32, tokens: u32) -> Arc<Prompt> {
    let tokens: Vec<u32> = (first..first + tokens).collect();
    Arc::new(Prompt::new(
        &tokens,
        BlockSize::new(16).unwrap(),
        Seed::PLAIN,
    ))
}

struct Running {
    recorder: Recorder,
    live: Arc<LiveSettings>,
    metrics: Arc<Metrics>,
    task: TestTask,
}

impl Running {
    fn start(settings: Settings) -> Self {
        let live = LiveSettings::new(settings);
        let metrics = Arc::new(Metrics::new().unwrap());
        let (recorder, writer) = Recorder::new(Arc::clone(&live), Arc::clone(&metrics));
        let task = TestTask::spawn(|stop| writer.run(stop));
        Self {
            recorder,
            live,
            metrics,
            task,
        }
    }

    /// Records a request that has ended.
    fn end_one(&self, prompt: &Arc<Prompt>, output_tokens: u32) {
        let facts = RequestFacts {
            arrived: Duration::ZERO,
            model: "m".into(),
            prompt_tokens: prompt.tokens(),
            output_tokens,
            block_tokens: 16,
            ttft: None,
            duration: Duration::ZERO,
            cached_tokens: None,
            outcome: RecordedOutcome::Completed,
            placement: None,
            tenant: None,
        };
        let ticket = self.recorder.open(prompt).unwrap();
        ticket.end(Instant::now(), facts);
    }

    /// Waits until requests are recorded, or are not.
    async fn until(&self, runs: bool) {
        while self.recorder.shared.runs.load(Ordering::Relaxed) != runs {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn records(&self, outcome: &str) -> u64 {
        let series = format!("recorded_requests_total{{outcome=\"{outcome}\"}}");
        self.metrics.value(&series)
    }

    async fn end(self) -> Arc<Metrics> {
        self.task.end().await;
        self.metrics
    }
}

#[tokio::test(start_paused = true)]
async fn the_settings_start_and_end_a_recording_and_the_stop_loses_nothing() {
    let folder = TempDir::new().unwrap();
    let running = Running::start(Settings::default());
    assert!(running.recorder.open(&prompt(0, 64)).is_none());
    running.live.replace(settings(&folder, 1 << 20));
    running.until(true).await;
    assert_eq!(running.metrics.value("recording"), 1);
    running.end_one(&prompt(0, 70), 9);
    running.end_one(&prompt(0, 64), 0);
    running.live.replace(Settings::default());
    running.until(false).await;
    running.live.replace(settings(&folder, 1 << 20));
    running.until(true).await;
    running.end_one(&prompt(0, 64), 0);
    running.end().await;

    let files = files(folder.path());
    assert_eq!(files.len(), 2, "each recording has files of its own");
    let (name, bytes) = &files[0];
    let first = Recording::decode([NamedFile { name, bytes }]).unwrap();
    let [(done, path), (gone, other)] = &first.requests[..] else {
        panic!("{:?}", first.requests);
    };
    assert_eq!((done.output_tokens, gone.output_tokens), (9, 0));
    assert_eq!((path, first.path(*other).len()), (other, 4));
}

#[tokio::test(start_paused = true)]
async fn the_directory_keeps_its_bound_and_the_newest_requests() {
    let folder = TempDir::new().unwrap();
    let bound = 1 << 20;
    let running = Running::start(settings(&folder, bound));
    running.until(true).await;
    for number in 0..400 {
        let prompt = prompt(number * 100_000, 32_000);
        running.end_one(&prompt, number);
        while running
            .recorder
            .shared
            .queued_blocks
            .load(Ordering::Relaxed)
            > 0
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    // Longer than any file.
    running.end_one(&prompt(0, 1 << 20), 0);
    let metrics = running.end().await;
    assert_eq!(
        metrics.value("recorded_requests_total{outcome=\"written\"}"),
        400
    );
    assert_eq!(
        metrics.value("recorded_requests_total{outcome=\"dropped\"}"),
        1
    );
    let files = files(folder.path());
    let bytes: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(
        bytes as u64 <= bound && files.len() > 4,
        "{bytes} in {}",
        files.len()
    );
    let requests = decode(folder.path()).requests;
    let kept: Vec<u32> = requests
        .iter()
        .map(|(facts, _)| facts.output_tokens)
        .collect();
    let first = 400 - u32::try_from(kept.len()).unwrap();
    assert!(first > 0 && kept.len() > 50, "{first}");
    assert!(kept.into_iter().eq(first..400));
}

/// The clock was set back since the directory's last recording, or stands still.
#[tokio::test(start_paused = true)]
async fn a_later_recording_has_greater_names_whatever_the_clock_shows() {
    let folder = TempDir::new().unwrap();
    let header = FileHeader {
        recording: u64::MAX,
        file: 7,
        started_unix_ms: 90_000_000_000_000,
    };
    let earlier = file_name(&header);
    fs::write(folder.path().join(&earlier), "").unwrap();
    for recordings in 1..4 {
        let running = Running::start(settings(&folder, 1 << 20));
        running.until(true).await;
        running.end_one(&prompt(0, 64), recordings);
        running.end().await;
        let names: Vec<String> = files(folder.path())
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert!(names[0].ends_with(&earlier), "{names:?}");
        let (newest, bytes) = &files(folder.path())[recordings as usize];
        let newest = Recording::decode([NamedFile {
            name: newest,
            bytes,
        }])
        .unwrap();
        assert_eq!(newest.requests[0].0.output_tokens, recordings);
    }
}

#[tokio::test(start_paused = true)]
async fn a_directory_has_one_writer() {
    let folder = TempDir::new().unwrap();
    let one = Running::start(settings(&folder, 1 << 20));
    one.until(true).await;
    let other = Running::start(settings(&folder, 1 << 20));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(other.recorder.open(&prompt(0, 64)).is_none());
    assert_eq!(other.metrics.value("recording"), 0);
    one.end().await;
    other.until(true).await;
    other.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_drops_records_and_counts_them() {
    let folder = TempDir::new().unwrap();
    let running = Running::start(settings(&folder, 1 << 20));
    running.until(true).await;
    // No task runs between two awaits.
    let prompt = prompt(0, 64);
    for _ in 0..QUEUE_MAX + 7 {
        running.end_one(&prompt, 0);
    }
    assert_eq!(running.records("dropped"), 7);
    let metrics = running.end().await;
    assert_eq!(
        metrics.value("recorded_requests_total{outcome=\"dropped\"}"),
        7
    );
    assert_eq!(decode(folder.path()).requests.len(), QUEUE_MAX);
}
