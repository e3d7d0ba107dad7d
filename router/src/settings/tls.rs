//! `[tls]` and `[admin.tls]`: certificates of the two ports.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use warmroute_process::metrics::{MetricKind, MetricLabels, MetricsText};
use warmroute_process::tls::{ServerTls, ServerTlsFiles};

use super::file::{Settings, SettingsError};

/// The files of one port, relative to the settings file's directory. Empty: plain HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PortTls {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: PathBuf,
    /// The files' content.
    #[serde(skip)]
    loaded: Option<ServerTls>,
}

impl PortTls {
    fn read(&mut self, table: &'static str, dir: &Path) -> Result<(), SettingsError> {
        let is_set = |path: &Path| !path.as_os_str().is_empty();
        match (is_set(&self.certificate), is_set(&self.key)) {
            (true, true) => {}
            (false, false) if !is_set(&self.client_ca) => return Ok(()),
            (true | false, true | false) => return Err(SettingsError::HalfTls(table)),
        }
        let files = ServerTlsFiles {
            certificate: dir.join(&self.certificate),
            key: dir.join(&self.key),
            client_ca: is_set(&self.client_ca).then(|| dir.join(&self.client_ca)),
        };
        let loaded = ServerTls::load(&files).map_err(|error| SettingsError::Tls {
            table,
            error: Box::new(error),
        });
        self.loaded = Some(loaded?);
        Ok(())
    }

    /// Whether clients are let in that `before` refused.
    pub(super) fn opens(&self, before: &Self) -> bool {
        let removed = |now: &Path, before: &Path| {
            now.as_os_str().is_empty() && !before.as_os_str().is_empty()
        };
        removed(&self.certificate, &before.certificate)
            || removed(&self.client_ca, &before.client_ca)
    }
}

impl Settings {
    pub(super) fn read_certificates(&mut self, settings: &Path) -> Result<(), SettingsError> {
        let dir = settings.parent().unwrap_or_else(|| Path::new(""));
        self.tls.read("tls", dir)?;
        self.admin.tls.read("admin.tls", dir)
    }

    /// When the ports' certificates expire, in Prometheus's text format.
    pub(crate) fn certificate_metrics(&self) -> String {
        let ports = [("public", &self.tls), ("admin", &self.admin.tls)];
        let expiries = ports.into_iter().filter_map(|(port, tls)| {
            let expires = tls.loaded.as_ref()?.expires_unix_s()?;
            Some((MetricLabels::new(&[("port", &port)]), expires))
        });
        let mut text = MetricsText::new("warmroute_router_");
        text.family(
            MetricKind::Gauge,
            "tls_certificate_expiry_timestamp_seconds",
            "When the port's certificate expires, in seconds since 1970",
            expiries,
        );
        text.into_string()
    }

    /// The ports whose certificate has expired.
    pub(super) fn ports_with_expired_certificates(&self, unix_s: i64) -> Vec<&'static str> {
        let ports = [("public", &self.tls), ("admin", &self.admin.tls)];
        let is_expired = |tls: &PortTls| {
            let loaded = tls.loaded.as_ref();
            let expires = loaded.and_then(ServerTls::expires_unix_s);
            expires.is_some_and(|expires| expires <= unix_s)
        };
        let expired = ports.into_iter().filter(|(_, tls)| is_expired(tls));
        expired.map(|(port, _)| port).collect()
    }

    /// TLS of the public port; `None`: plain HTTP.
    pub(crate) fn public_tls(&self) -> Option<ServerTls> {
        self.tls.loaded.clone()
    }

    /// TLS of the admin port; `None`: plain HTTP.
    pub(crate) fn admin_tls(&self) -> Option<ServerTls> {
        self.admin.tls.loaded.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        let mut settings = Settings::parse(text).unwrap();
        let read = settings.read_certificates(Path::new("/none/router.toml"));
        read.unwrap_err().to_string()
    }

    #[test]
    fn half_a_table_is_refused() {
        for (text, why) in [
            ("[tls]\nkey = \"k\"", "tls: certificate and key"),
            (
                "[admin.tls]\nclient_ca = \"c\"",
                "admin.tls: certificate and key",
            ),
            (
                "[tls]\ncertificate = \"c\"\nkey = \"k\"",
                "tls: \"/none/c\"",
            ),
        ] {
            let found = refused(text);
            assert!(found.starts_with(why), "{found}");
        }
    }

    #[test]
    fn a_port_with_an_expired_certificate_is_named() {
        let mut params = rcgen::CertificateParams::new(["h".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2031, 1, 1);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let dir = tempfile::TempDir::new().unwrap();
        for (name, pem) in [("c", certificate.pem()), ("k", key.serialize_pem())] {
            std::fs::write(dir.path().join(name), pem).unwrap();
        }
        let text = "[admin.tls]\ncertificate = \"c\"\nkey = \"k\"";
        let mut settings = Settings::parse(text).unwrap();
        let file = dir.path().join("router.toml");
        settings.read_certificates(&file).unwrap();
        let expired = |unix_s| settings.ports_with_expired_certificates(unix_s);
        assert!(expired(1_924_991_999).is_empty());
        assert_eq!(expired(1_924_992_000), ["admin"]);
    }

    #[test]
    fn without_tls_or_client_certificates_a_port_is_opened() {
        let parse = |text| Settings::parse(text).unwrap();
        let [plain, tls, clients] = [
            "",
            "[tls]\ncertificate = \"c\"\nkey = \"k\"",
            "[tls]\ncertificate = \"c\"\nkey = \"k\"\nclient_ca = \"a\"",
        ]
        .map(parse);
        assert!(plain.opens_a_port_of(&tls) && tls.opens_a_port_of(&clients));
        assert!(!clients.opens_a_port_of(&plain) && !tls.opens_a_port_of(&tls));
        let admin = parse("[admin.tls]\ncertificate = \"c\"\nkey = \"k\"");
        assert!(plain.opens_a_port_of(&admin));
    }
}
