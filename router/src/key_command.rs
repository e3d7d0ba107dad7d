//! `warmroute-router key new`.

use anyhow::Context as _;
use warmroute_process::access::keys::{self, KeyId};

use crate::config::NewKeyArgs;

/// A new key, with the lines for the settings file. They hold its hash only.
pub fn new_key(args: &NewKeyArgs) -> anyhow::Result<String> {
    let tenant = args.tenant.as_deref().map(str::parse::<KeyId>);
    let tenant = tenant.transpose().context("--tenant")?;
    let generated = keys::generate().ok();
    let (key, hash) = generated.context("the system has no random numbers")?;
    let hash = hash.to_hex();
    // Logs name a key by its owner and a part of its hash.
    let owner = tenant.as_ref().map_or("ops", KeyId::as_str);
    let row = format!("id = \"{owner:.48}-{}\", sha256 = \"{hash}\"", &hash[..8]);
    let lines = match &tenant {
        None => format!("[admin]\nkeys = [{{ {row}, role = \"operate\" }}]"),
        Some(tenant) => format!("[[tenants]]\nname = \"{tenant}\"\nkeys = [{{ {row} }}]"),
    };
    let title = "# For the settings file; the key itself is stored nowhere.";
    Ok(format!("{key}\n\n{title}\n{lines}"))
}

#[cfg(test)]
mod tests {
    use warmroute_process::access::keys::KeyHash;

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn the_lines_of_a_new_key_are_settings() {
        let printed = new_key(&NewKeyArgs { tenant: None }).unwrap();
        let (key, lines) = printed.split_once('\n').unwrap();
        let settings = Settings::parse(lines).unwrap();
        let hash = settings.admin_keys().unwrap()[0].key.hash;
        assert_eq!(KeyHash::of(key.as_bytes()), Some(hash));
        assert!(!lines.contains(key));
        let tenant = Some("search".to_owned());
        let printed = new_key(&NewKeyArgs { tenant }).unwrap();
        let (key, lines) = printed.split_once('\n').unwrap();
        let settings = Settings::parse(lines).unwrap();
        let hash = settings.tenants[0].keys[0].hash;
        assert_eq!(KeyHash::of(key.as_bytes()), Some(hash));
        let tenant = Some("a b".to_owned());
        assert!(new_key(&NewKeyArgs { tenant }).is_err());
    }
}
