//! Hints that clients of other routers send, followed where the settings say so.
//!
//! A gateway that has chosen a worker names it. The hint counts while that worker can take the
//! request: one that is unknown or unhealthy is chosen around, and a failure ends it.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, Method};
use warmroute_proto::{Source, WorkerId};

use super::App;
use super::forward::{ExcludedSources, Routing};
use super::headers::ENGINE_RANK;
use crate::openai::{ImposedFields, OpenAiError, RefusedField, impose};
use crate::route::Leg;
use crate::settings::{Settings, TenantHint, WorkerHint};
use crate::tenants::{SALT_PREFIX, group_salt, has_prompt};

const WORKER: HeaderName = HeaderName::from_static("x-dynamo-worker-instance-id");
const RANK: HeaderName = HeaderName::from_static("x-dynamo-dp-rank");
const TENANT: HeaderName = HeaderName::from_static("x-tenant-id");

/// Routes whose engines read `cache_salt`.
const SALTED_ROUTES: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

impl App {
    /// The sources that must not get a request: all but its owner's, or but those that it names.
    pub(super) fn excluded(
        &self,
        owner: Option<&WorkerId>,
        headers: &HeaderMap,
        model: &str,
    ) -> ExcludedSources {
        match owner {
            Some(owner) => self.fleet.other_sources(owner).into(),
            None => {
                let for_hint = self.others_than_hinted(headers, model);
                ExcludedSources {
                    for_hint: for_hint.is_some(),
                    sources: for_hint.unwrap_or_default(),
                }
            }
        }
    }

    /// Workers may have come and gone while the request waited.
    pub(super) fn renew_hint(&self, routing: &mut Routing, headers: &HeaderMap) {
        if routing.excluded.for_hint {
            routing.excluded = self.excluded(None, headers, &routing.model);
        }
    }

    /// The sources of a model that a request does not name; `None`: it names none that can take it.
    fn others_than_hinted(&self, headers: &HeaderMap, model: &str) -> Option<Vec<Source>> {
        let settings = self.settings.current();
        if settings.worker_hint == WorkerHint::Ignore {
            return None;
        }
        let text = |name| headers.get(name)?.to_str().ok();
        let rank_in = |name| text(name)?.parse::<u32>().ok();
        let worker: Option<&str> = text(WORKER);
        let of_worker = worker.and_then(|_| rank_in(RANK));
        // vLLM's own header names a rank of whichever worker.
        let rank = of_worker.or_else(|| rank_in(ENGINE_RANK));
        if worker.is_none() && rank.is_none() {
            return None;
        }
        let is_hinted = |source: &&Source| {
            worker.is_none_or(|worker| source.worker.as_str() == worker)
                && rank.is_none_or(|rank| rank == source.dp_rank.0)
        };
        let core = self.core.core();
        let candidates = core
            .fleet()
            .candidates(model, Leg::Whole)
            .unwrap_or_default();
        let sources = || candidates.iter().map(|candidate| &candidate.source);
        let others = sources().filter(|source| !is_hinted(source));
        sources()
            .any(|source| is_hinted(&source))
            .then(|| others.cloned().collect())
    }
}

/// A tenant's name, by which the engine's cache is divided; `None`: not one text.
#[derive(Clone)]
pub(super) struct TenantName(Option<String>);

impl TenantName {
    /// The tenant that a request names, by the settings by which it was let in without tenants: they
    /// may have tenants before its body is whole.
    pub(super) fn hinted(settings: &Settings, request: &Request) -> Option<Self> {
        if request.method() != Method::POST || !has_prompt(request.uri().path()) {
            return None;
        }
        match settings.tenant_hint {
            TenantHint::CacheSalt => {
                let mut names = request.headers().get_all(TENANT).into_iter();
                let first = names.next()?;
                let only = first.to_str().ok().filter(|_| names.next().is_none());
                Some(Self(only.map(str::to_owned)))
            }
            TenantHint::Ignore => None,
        }
    }

    /// The body for the engine.
    pub(super) fn imposed(&self, path: &str, body: &[u8]) -> Result<Option<Vec<u8>>, OpenAiError> {
        let name = self.0.as_deref().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| {
            let message = "`x-tenant-id` must be one text.";
            OpenAiError::invalid("x-tenant-id", message).with_code("invalid_tenant")
        })?;
        let mut fields = ImposedFields {
            reserved_salt: SALT_PREFIX,
            // They name another request's blocks.
            refused: RefusedField::TRANSFERS.to_vec(),
            ..ImposedFields::default()
        };
        if SALTED_ROUTES.contains(&path) {
            // Also over the client's own salt, which may be another tenant's.
            fields.salt = Some(Box::new(|own| group_salt(name, own)));
        }
        impose(body, &fields)
    }
}
