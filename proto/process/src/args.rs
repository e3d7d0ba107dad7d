//! Flags that several binaries share.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{NonEmptyStringValueParser, TypedValueParser as _};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use warmroute_proto::Namespace;

/// Connection to the plane. The flags may stand before or after a sub-command.
#[derive(Clone, Args)]
#[command(next_help_heading = "NATS")]
pub struct NatsArgs {
    /// NATS servers, separated by commas: `nats://USER:PASSWORD@HOST:4222`, or `tls://` for TLS.
    /// `?log=none` at the end: without JetStream.
    #[arg(long, global = true, env = "WARMROUTE_NATS_URL", value_name = "URL")]
    pub nats_url: Option<String>,
    /// Separates fleets: part of every subject and of every stream's name.
    #[arg(
        long,
        global = true,
        env = "WARMROUTE_NAMESPACE",
        default_value = "default",
        value_parser = NonEmptyStringValueParser::new().map(Namespace::from)
    )]
    pub namespace: Namespace,
    /// File with credentials: a .creds file, an nkey seed, `USER:PASSWORD` or a token. Keeps
    /// secrets out of URLs and process lists.
    #[arg(long, global = true, env = "WARMROUTE_NATS_CREDS", value_name = "FILE")]
    pub nats_creds: Option<PathBuf>,
    /// TLS: ca=FILE[,cert=FILE,key=FILE] in PEM, instead of the system's authorities.
    #[arg(long, global = true, env = "WARMROUTE_NATS_TLS", value_name = "SPEC")]
    pub nats_tls: Option<TlsSpec>,
    /// Create missing streams and buckets. For trials; in production run `warmroute-indexer init`
    /// once.
    #[arg(long, global = true, env = "WARMROUTE_INIT")]
    pub init: bool,
}

impl NatsArgs {
    /// The flags, for a sub-command that connects to nothing: accepted, since they are global, and
    /// not shown in its help. Its namespace is shown.
    #[must_use]
    pub fn hidden() -> Vec<Arg> {
        let all = Self::augment_args(Command::new("nats"));
        let flags = all
            .get_arguments()
            .filter(|flag| flag.get_id() != "namespace");
        flags.map(|flag| flag.clone().hide(true)).collect()
    }
}

/// Shows no secrets.
impl fmt::Debug for NatsArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsArgs")
            .field("nats_url", &self.nats_url.as_deref().map(redacted))
            .field("namespace", &self.namespace)
            .field("nats_creds", &self.nats_creds)
            .field("nats_tls", &self.nats_tls)
            .field("init", &self.init)
            .finish()
    }
}

/// The flags of this process that were given, on its command line or in its environment, as TOML:
/// what differs from the defaults. Credentials in URLs are not shown.
#[must_use]
pub fn given(command: &Command) -> String {
    let matches = command.clone().try_get_matches();
    matches.map_or_else(|_| String::new(), |matches| given_of(command, &matches))
}

fn given_of(command: &Command, matches: &ArgMatches) -> String {
    let is_given = |id: &str| {
        let source = matches.value_source(id);
        matches!(
            source,
            Some(ValueSource::CommandLine | ValueSource::EnvVariable)
        )
    };
    let flags = command.get_arguments().filter_map(|flag| {
        let (id, name) = (flag.get_id().as_str(), flag.get_long()?);
        let values = is_given(id).then(|| matches.get_raw(id)).flatten()?;
        let values: Vec<String> = values
            .map(|value| as_toml(&value.to_string_lossy()))
            .collect();
        match &values[..] {
            [one] => Some(format!("{name} = {one}")),
            several => Some(format!("{name} = [{}]", several.join(", "))),
        }
    });
    flags.collect::<Vec<_>>().join(", ")
}

fn as_toml(value: &str) -> String {
    match value.parse::<f64>().is_ok() || matches!(value, "true" | "false") {
        true => value.to_owned(),
        false => format!("{:?}", redacted(value)),
    }
}

/// A process that needs a plane has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--nats-url is missing")]
pub struct NoNatsUrl;

impl NatsArgs {
    pub fn url(&self) -> Result<&str, NoNatsUrl> {
        self.nats_url.as_deref().ok_or(NoNatsUrl)
    }
}

/// The value of `--nats-tls`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSpec {
    pub authority: Option<PathBuf>,
    /// Certificate and key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl TlsSpec {
    pub fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let identity = self.identity.iter();
        let identity = identity.flat_map(|(certificate, key)| [certificate, key]);
        self.authority.iter().chain(identity)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsSpecError {
    #[error("{0:?} is not ca=FILE, cert=FILE or key=FILE")]
    Part(String),
    #[error("{0}= is given twice")]
    Twice(&'static str),
    #[error("cert= and key= belong together")]
    Half,
    #[error("nothing is given")]
    Empty,
}

impl FromStr for TlsSpec {
    type Err = TlsSpecError;

    fn from_str(spec: &str) -> Result<Self, TlsSpecError> {
        let (mut authority, mut certificate, mut key) = (None, None, None);
        for part in spec.split(',').filter(|part| !part.is_empty()) {
            let wrong = || TlsSpecError::Part(part.to_owned());
            let (name, file) = part.split_once('=').ok_or_else(wrong)?;
            let (slot, name) = match name {
                "ca" => (&mut authority, "ca"),
                "cert" => (&mut certificate, "cert"),
                "key" => (&mut key, "key"),
                _ => return Err(wrong()),
            };
            if file.is_empty() {
                return Err(wrong());
            }
            if slot.replace(PathBuf::from(file)).is_some() {
                return Err(TlsSpecError::Twice(name));
            }
        }
        let identity = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => return Err(TlsSpecError::Half),
        };
        if authority.is_none() && identity.is_none() {
            return Err(TlsSpecError::Empty);
        }
        Ok(Self {
            authority,
            identity,
        })
    }
}

/// Configuration of the logs. The flags may stand before or after a sub-command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Logs")]
pub struct LogArgs {
    /// Log filter: a level, or `target=level` pairs. `debug` shows every decision.
    #[arg(
        long,
        global = true,
        env = "WARMROUTE_LOG",
        default_value = "info",
        value_name = "FILTER",
        value_parser = log_filter
    )]
    pub log: String,
    /// Logs as JSON lines, for collectors.
    #[arg(long, global = true, env = "WARMROUTE_LOG_JSON")]
    pub log_json: bool,
}

fn log_filter(text: &str) -> Result<String, ParseError> {
    EnvFilter::try_new(text).map(|_| text.to_owned())
}

/// URLs with credentials redacted.
#[must_use]
pub fn redacted(urls: &str) -> String {
    let bare = |url: &str| match url.rsplit_once('@') {
        Some((before, host)) => {
            let scheme = before.split_once("://").map_or("", |(scheme, _)| scheme);
            format!("{scheme}://…@{host}")
        }
        None => url.to_owned(),
    };
    urls.split(',').map(bare).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser};

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[arg(long, default_value_t = 8000)]
        port: u16,
        #[arg(long)]
        worker: Vec<String>,
        #[command(flatten)]
        nats: NatsArgs,
        #[command(flatten)]
        logs: LogArgs,
    }

    #[test]
    fn given_flags_are_toml_without_credentials() {
        let command = Flags::command();
        let given = |flags: &[&str]| {
            let flags = ["x"].iter().chain(flags);
            let matches = command.clone().get_matches_from(flags);
            given_of(&command, &matches)
        };
        assert_eq!(given(&[]), "");
        let flags = [
            "--port=9",
            "--log-json",
            "--worker=a",
            "--worker=b",
            "--nats-url=nats://me:secret@h:4222",
        ];
        let shown = "port = 9, worker = [\"a\", \"b\"], nats-url = \"nats://…@h:4222\", \
                     log-json = true";
        assert_eq!(given(&flags), shown);
    }

    #[test]
    fn tls_is_an_authority_or_an_identity_or_both() {
        let both: TlsSpec = "ca=a.pem,cert=c.pem,key=k.pem".parse().unwrap();
        assert_eq!(both.authority, Some("a.pem".into()));
        assert_eq!(both.identity, Some(("c.pem".into(), "k.pem".into())));
        for (spec, error) in [
            ("", TlsSpecError::Empty),
            ("cert=c.pem", TlsSpecError::Half),
            ("ca=a,ca=b", TlsSpecError::Twice("ca")),
            ("a.pem", TlsSpecError::Part("a.pem".into())),
            ("ca=", TlsSpecError::Part("ca=".into())),
        ] {
            assert_eq!(spec.parse::<TlsSpec>(), Err(error), "{spec}");
        }
    }
}
