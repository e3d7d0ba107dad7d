//! `[endpoint_picker]`: the port for gateways. Applied at the start.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::Deserialize;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct EndpointPickerSettings {
    host: IpAddr,
    /// 0: there is none.
    port: u16,
}

impl Default for EndpointPickerSettings {
    fn default() -> Self {
        Self {
            host: Ipv4Addr::UNSPECIFIED.into(),
            port: 0,
        }
    }
}

impl EndpointPickerSettings {
    /// The address to listen on; `None`: gateways are not served.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        (self.port != 0).then(|| SocketAddr::new(self.host, self.port))
    }
}

#[cfg(test)]
mod tests {
    use crate::settings::Settings;

    #[test]
    fn gateways_are_served_where_a_port_is_named() {
        for (text, address) in [
            ("", None),
            ("[endpoint_picker]\nhost = \"::1\"", None),
            ("[endpoint_picker]\nport = 9002", Some("0.0.0.0:9002")),
            (
                "[endpoint_picker]\nhost = \"::1\"\nport = 9002",
                Some("[::1]:9002"),
            ),
        ] {
            let settings = Settings::parse(text).unwrap();
            let found = settings.endpoint_picker.address().map(|at| at.to_string());
            assert_eq!(found.as_deref(), address, "{text}");
        }
        assert!(Settings::parse("[endpoint_picker]\nport = 65536").is_err());
    }
}
