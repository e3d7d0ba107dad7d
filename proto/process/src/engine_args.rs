//! Checks of what operators state about an engine: its event endpoints and its block size.

use warmroute_proto::BlockSize;

/// Most tokens of a block. Hybrid models have blocks of a few thousand.
pub const BLOCK_TOKENS_MAX: u32 = 65_536;

/// Whether a ZMQ endpoint can be connected to: `tcp://HOST:PORT` or `ipc://PATH`. A wildcard host is
/// what an engine binds, and `inproc://` ends at its process.
#[must_use]
pub fn is_endpoint(endpoint: &str) -> bool {
    if endpoint.contains('\0') {
        return false;
    }
    match endpoint.split_once("://") {
        Some(("tcp", address)) => address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && host != "*" && port.parse::<u16>().is_ok_and(|port| port > 0)
        }),
        Some(("ipc", path)) => !path.is_empty(),
        Some(_) | None => false,
    }
}

/// Whether cache events come from a route of the engine's HTTP: `http[s]://HOST[:PORT]/PATH`.
#[must_use]
pub fn is_event_route(endpoint: &str) -> bool {
    let url = reqwest::Url::parse(endpoint);
    url.is_ok_and(|url| {
        ["http", "https"].contains(&url.scheme())
            && url.has_host()
            && url.username().is_empty()
            && url.password().is_none()
            && url.path() != "/"
    })
}

/// Whether such a route is of the server at this URL: the server's key goes to it. All requests to a
/// `unix:` worker go to its socket.
#[must_use]
pub fn is_route_of(route: &str, worker_url: &str) -> bool {
    let origin = |url| reqwest::Url::parse(url).map(|url| url.origin()).ok();
    worker_url.starts_with("unix:") || origin(route) == origin(worker_url)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not between 1 and {BLOCK_TOKENS_MAX}")]
pub struct BlockSizeError;

/// Parses a block size of 1 to [`BLOCK_TOKENS_MAX`] tokens.
pub fn block_size(text: &str) -> Result<BlockSize, BlockSizeError> {
    let tokens = text
        .parse()
        .ok()
        .filter(|tokens| *tokens <= BLOCK_TOKENS_MAX);
    tokens.and_then(BlockSize::new).ok_or(BlockSizeError)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_those_that_can_be_connected_to() {
        for good in ["tcp://h:5557", "tcp://[::1]:1", "ipc:///run/x"] {
            assert!(is_endpoint(good), "{good}");
        }
        for bad in [
            "",
            "h:1",
            "tcp://h",
            "tcp://:1",
            "tcp://*:5557",
            "tcp://h:0",
            "tcp://h:65536",
            "ipc://",
            "ipc:///a\0b",
            "inproc://x",
            "http://h:1",
        ] {
            assert!(!is_endpoint(bad), "{bad:?}");
        }
    }

    #[test]
    fn an_event_route_has_a_path() {
        for good in ["http://h:8000/kv_cache_events", "https://[::1]/events"] {
            assert!(is_event_route(good), "{good}");
        }
        for bad in [
            "http://h:1",
            "http://h:1/",
            "http://u:p@h/x",
            "tcp://h:1",
            "ftp://h/x",
        ] {
            assert!(!is_event_route(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_route_is_of_its_workers_server() {
        let route = "http://h:80/kv_cache_events";
        for worker in ["http://h", "http://H:80/v", "unix:/run/x"] {
            assert!(is_route_of(route, worker), "{worker}");
        }
        for worker in ["https://h:80", "http://h:81", "http://other", "h"] {
            assert!(!is_route_of(route, worker), "{worker}");
        }
    }

    #[test]
    fn block_sizes_are_bounded() {
        for bad in ["0", "65537", "-1", "x"] {
            assert_eq!(block_size(bad), Err(BlockSizeError), "{bad}");
        }
        assert_eq!(block_size("16").ok(), BlockSize::new(16));
    }
}
