//! The binaries of this version, and of the one that `tests/mixed-versions.sh` built.

use std::sync::LazyLock;

use super::process::Binary;
use super::{INDEXER, ROUTER, SHIM};

/// Version of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    This,
    /// What `OTHER_BINARIES` holds, with the settings file `OTHER_SETTINGS`, if any.
    Other,
}

struct Others {
    shim: String,
    indexer: String,
    router: String,
    /// `None`: a version that does not know the settings of this one's tests.
    settings: Option<String>,
}

static OTHERS: LazyLock<Others> = LazyLock::new(|| {
    let directory = variable("OTHER_BINARIES").expect("OTHER_BINARIES names a directory");
    let binary = |part: &str| format!("{directory}/warmroute-{part}-under-test");
    Others {
        shim: binary("shim"),
        indexer: binary("indexer"),
        router: binary("router"),
        settings: variable("OTHER_SETTINGS"),
    }
});

#[expect(clippy::disallowed_methods, reason = "what a script built")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Version {
    pub(crate) fn shim(self) -> Binary {
        self.binary(SHIM, |others| &others.shim)
    }

    pub(crate) fn indexer(self) -> Binary {
        self.binary(INDEXER, |others| &others.indexer)
    }

    pub(crate) fn router(self) -> Binary {
        self.binary(ROUTER, |others| &others.router)
    }

    fn binary(self, this: &'static str, other: impl Fn(&'static Others) -> &'static str) -> Binary {
        match self {
            Self::This => this.into(),
            Self::Other => Binary {
                path: other(&OTHERS),
                settings: OTHERS.settings.as_deref(),
            },
        }
    }
}
