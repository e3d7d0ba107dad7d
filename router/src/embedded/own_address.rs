//! Whether a worker's URL is a port of this router: its requests would come back to it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Looks up no names but `localhost`.
pub(super) fn is_own(url: &str, own: &[SocketAddr]) -> bool {
    let Ok(url) = reqwest::Url::parse(url) else {
        return false;
    };
    let host = url.host_str().unwrap_or_default();
    let loopbacks: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let ips = match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        // The system connects to the loopback interface.
        Ok(ip) if ip.is_unspecified() => loopbacks.to_vec(),
        Ok(ip) => vec![ip],
        Err(_) if host == "localhost" => loopbacks.to_vec(),
        Err(_) => return false,
    };
    let is_at = |own: &SocketAddr, ip: IpAddr| {
        let own_ip = own.ip();
        own_ip == ip || own_ip.is_unspecified() && is_of_this_host(ip)
    };
    own.iter()
        .filter(|own| url.port_or_known_default() == Some(own.port()))
        .any(|own| ips.iter().any(|ip| is_at(own, *ip)))
}

/// Only addresses of this host can be bound to.
fn is_of_this_host(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_routers_own_ports_are_found_under_each_of_its_addresses() {
        let own = |address: &str| vec![address.parse::<SocketAddr>().unwrap()];
        let (all, one) = (own("0.0.0.0:8080"), own("127.0.0.1:8080"));
        for url in [
            "http://127.0.0.1:8080",
            "http://localhost:8080/v",
            "http://0.0.0.0:8080",
        ] {
            assert!(is_own(url, &all) && is_own(url, &one), "{url}");
        }
        assert!(is_own("http://[::1]:8080", &own("[::1]:8080")));
        assert!(is_own("http://127.0.0.9:8080", &all));
        for url in [
            "http://127.0.0.1:8000",
            "http://192.0.2.1:8080",
            "http://engine:8080",
            "unix:/run/x",
        ] {
            assert!(!is_own(url, &all), "{url}");
        }
        assert!(!is_own("http://127.0.0.9:8080", &one), "an engine's");
    }
}
