//! Certificates of tests, made when they run.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd,
};
use uuid::Uuid;

/// An authority that signs certificates of 127.0.0.1 and localhost.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key in PEM.
pub(crate) struct PemPair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        // Equal names would be one authority with two keys.
        let name = Uuid::new_v4().to_string();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// Writes its certificate. Returns the file.
    pub(crate) fn write(&self, dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, self.0.pem()).unwrap();
        path
    }

    pub(crate) fn issue(&self) -> PemPair {
        self.issue_until(2100)
    }

    /// Ends at the beginning of the year.
    pub(crate) fn issue_until(&self, year: i32) -> PemPair {
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        PemPair {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        }
    }
}

impl PemPair {
    /// Writes `NAME.crt` and `NAME.key`. Returns both.
    pub(crate) fn write(&self, dir: &Path, name: &str) -> [PathBuf; 2] {
        let paths = ["crt", "key"].map(|kind| dir.join(format!("{name}.{kind}")));
        fs::write(&paths[0], &self.certificate).unwrap();
        fs::write(&paths[1], &self.key).unwrap();
        paths
    }
}
