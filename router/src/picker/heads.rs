//! Heads of requests and responses: from Envoy's list of headers, and as changes of it.

use std::str::FromStr as _;

use axum::http::header::{CONNECTION, CONTENT_LENGTH, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, Version};

use super::messages::{APPEND, HeaderEntry, HeaderMutation, HeaderValueOption, OVERWRITE};

/// Headers that Envoy writes itself, or for one connection.
const ENVOYS: [HeaderName; 6] = [
    CONNECTION,
    CONTENT_LENGTH,
    HOST,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Envoy takes no changes of them.
const ENVOYS_PREFIX: &str = "x-envoy-";

/// Why a head is no head of a request or response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeadError {
    #[error("a head lacks {0}, or it is not valid")]
    Pseudo(&'static str),
    #[error("a head has a header that is not valid")]
    Header,
}

/// A head as Envoy lists it: headers, and what stands in their list beside them.
#[derive(Default)]
struct ReadHead {
    method: Option<Method>,
    path: Option<Uri>,
    status: Option<StatusCode>,
    headers: HeaderMap,
}

impl ReadHead {
    fn read(entries: Vec<HeaderEntry>) -> Result<Self, HeadError> {
        let mut head = Self::default();
        for entry in entries {
            let value = match entry.raw_value.is_empty() {
                true => entry.value.into(),
                false => entry.raw_value,
            };
            let text = || str::from_utf8(&value).ok();
            match entry.key.as_str() {
                ":method" => head.method = Method::from_bytes(&value).ok(),
                ":path" => head.path = text().and_then(|path| Uri::from_str(path).ok()),
                ":status" => head.status = StatusCode::from_bytes(&value).ok(),
                ":authority" => {
                    let host = HeaderValue::from_maybe_shared(value.clone());
                    head.headers
                        .insert(HOST, host.map_err(|_| HeadError::Header)?);
                }
                pseudo if pseudo.starts_with(':') => {}
                name => {
                    let name = HeaderName::from_str(name).map_err(|_| HeadError::Header)?;
                    let value = HeaderValue::from_maybe_shared(value.clone());
                    let value = value.map_err(|_| HeadError::Header)?;
                    let added = head.headers.try_append(name, value);
                    added.map_err(|_| HeadError::Header)?;
                }
            }
        }
        Ok(head)
    }
}

/// A request's head.
pub(super) fn request(entries: Vec<HeaderEntry>) -> Result<Request<()>, HeadError> {
    let head = ReadHead::read(entries)?;
    let mut request = Request::new(());
    *request.method_mut() = head.method.ok_or(HeadError::Pseudo(":method"))?;
    let path = head.path.filter(|path| path.authority().is_none());
    let path = path.filter(|path| path.path().starts_with('/'));
    *request.uri_mut() = path.ok_or(HeadError::Pseudo(":path"))?;
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = head.headers;
    Ok(request)
}

/// A response's head.
pub(super) fn response(entries: Vec<HeaderEntry>) -> Result<(StatusCode, HeaderMap), HeadError> {
    let head = ReadHead::read(entries)?;
    let status = head.status.ok_or(HeadError::Pseudo(":status"))?;
    Ok((status, head.headers))
}

/// The changes that make `after` of `before`.
pub(super) fn changes(before: &HeaderMap, after: &HeaderMap) -> HeaderMutation {
    let mut mutation = HeaderMutation::default();
    for name in after.keys().filter(|name| !is_envoys(name)) {
        let values = after.get_all(name);
        if !before.get_all(name).iter().eq(values.iter()) {
            set(&mut mutation, name, values.iter());
        }
    }
    let removed = before.keys().filter(|name| !after.contains_key(*name));
    let removed = removed.filter(|name| !is_envoys(name));
    mutation.remove_headers = removed.map(ToString::to_string).collect();
    mutation
}

/// All headers of an answer that is made here.
pub(super) fn all(headers: &HeaderMap) -> HeaderMutation {
    changes(&HeaderMap::new(), headers)
}

fn set<'a>(
    mutation: &mut HeaderMutation,
    name: &HeaderName,
    values: impl Iterator<Item = &'a HeaderValue>,
) {
    let actions = std::iter::once(OVERWRITE).chain(std::iter::repeat(APPEND));
    for (value, append_action) in values.zip(actions) {
        let entry = HeaderEntry {
            key: name.to_string(),
            value: String::new(),
            raw_value: value.as_bytes().to_vec().into(),
        };
        mutation.set_headers.push(HeaderValueOption {
            header: Some(entry),
            append_action,
        });
    }
}

fn is_envoys(name: &HeaderName) -> bool {
    ENVOYS.contains(name) || name.as_str().starts_with(ENVOYS_PREFIX)
}

#[cfg(test)]
pub(super) fn entries(headers: &[(&str, &str)]) -> Vec<HeaderEntry> {
    let entry = |(key, value): &(&str, &str)| HeaderEntry {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: value.as_bytes().to_vec().into(),
    };
    headers.iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |&(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn a_head_is_read_with_its_pseudo_headers() {
        let read = request(entries(&[
            (":method", "POST"),
            (":path", "/v1/completions?a=1"),
            (":scheme", "http"),
            (":authority", "models"),
            ("x-one", "1"),
            ("x-one", "2"),
        ]));
        let read = read.unwrap();
        assert_eq!(read.method(), Method::POST);
        assert_eq!(read.uri(), "/v1/completions?a=1");
        assert_eq!(read.headers()["host"], "models");
        assert_eq!(read.headers().get_all("x-one").iter().count(), 2);
        let (status, _) = response(entries(&[(":status", "204")])).unwrap();
        assert_eq!(status, StatusCode::NO_CONTENT);
    }

    #[test]
    fn what_is_no_head_is_an_error() {
        for (list, error) in [
            (&[(":path", "/")][..], HeadError::Pseudo(":method")),
            (
                &[(":method", "GET"), (":path", "*")],
                HeadError::Pseudo(":path"),
            ),
            (
                &[(":method", "GET"), (":path", "http://other/")],
                HeadError::Pseudo(":path"),
            ),
            (
                &[(":method", "GET"), (":path", "/"), ("a b", "c")],
                HeadError::Header,
            ),
            (
                &[(":method", "GET"), (":path", "/"), ("a", "\n")],
                HeadError::Header,
            ),
        ] {
            assert_eq!(request(entries(list)).err(), Some(error), "{list:?}");
        }
        assert!(response(entries(&[(":status", "1000")])).is_err());
    }

    /// Empty values are sent as raw values too: Envoy would set a value that it is not given.
    #[test]
    fn only_what_differs_is_changed() {
        let before = headers(&[
            ("host", "models"),
            ("authorization", "Bearer client"),
            ("content-length", "7"),
            ("x-envoy-original-path", "/"),
            ("x-kept", "1"),
            ("x-other", "1"),
        ]);
        let after = headers(&[
            ("x-data-parallel-rank", "0"),
            ("x-kept", "1"),
            ("x-other", "1"),
            ("x-other", "2"),
        ]);
        let changed = changes(&before, &after);
        assert_eq!(changed.remove_headers, ["authorization"]);
        let mut found: Vec<_> = changed
            .set_headers
            .iter()
            .map(|one| (one.header.clone().unwrap(), one.append_action))
            .map(|(entry, action)| (entry.key, entry.raw_value, action))
            .collect();
        found.sort();
        let expected = [
            ("x-data-parallel-rank", "0", OVERWRITE),
            ("x-other", "1", OVERWRITE),
            ("x-other", "2", APPEND),
        ];
        let expected = expected.map(|(key, value, action)| (key.into(), value.into(), action));
        assert_eq!(found, expected);
        assert_eq!(changes(&before, &before), HeaderMutation::default());
    }
}
