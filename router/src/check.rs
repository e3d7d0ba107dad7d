//! `--check`: reads the files that a start reads, and starts nothing.

use anyhow::Context as _;
use warmroute_process::nats;

use crate::config::Config;
use crate::settings::Settings;
use crate::tokenizers;

/// Checks what [`Config`] names and does not hold. Returns a line that says what is valid.
pub fn check(config: &Config) -> anyhow::Result<String> {
    if let Some(nats) = &config.nats {
        nats::check(nats)?;
    }
    let default = Settings::default();
    let settings = config.settings.as_ref();
    let in_force = settings.map_or(&default, |file| &file.settings);
    if let Some(dir) = in_force.models_dir() {
        std::fs::read_dir(dir).with_context(|| format!("models_dir {}", dir.display()))?;
    }
    let read = tokenizers::check(config.tokenizer.as_deref(), in_force)?;
    let settings = settings.map_or_else(String::new, |file| format!(", {}", file.path.display()));
    let tokenizers = match read {
        1 => "1 tokenizer".to_owned(),
        several => format!("{several} tokenizers"),
    };
    Ok(format!("valid: flags{settings}, {tokenizers}"))
}
